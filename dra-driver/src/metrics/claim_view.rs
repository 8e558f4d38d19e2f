//! Prepared claims with their devices and pods, for the labels of the metrics.
//!
//! Devices come from the claim records. Pods come from `status.reservedFor`: a claim is read from the API server when
//! it is first seen, and every [`REFRESH`], since pods join and leave a shared claim without a call of kubelet. Containers
//! come from the pods, each of which is read once for a claim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::listed::Listed;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kubelet::claims::{ClaimService, blocking};
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded, RecordChanges, RecordError};
use crate::prepare::{Access, Prepared, Share};
use crate::report::pods::{self, PodRef, reserving_pods};

/// Time between two checks whether claims were prepared or unprepared.
const INTERVAL: Duration = Duration::from_secs(5);

/// Time between two reads of a claim from the API server.
const REFRESH: Duration = Duration::from_secs(300);

/// Time after which a failed read of a claim is repeated.
const RETRY: Duration = Duration::from_secs(30);

/// Maximum number of claims that are read from the API server in one interval.
const MAX_READS: usize = 16;

/// A prepared claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimEntry {
    /// The claim.
    pub claim: ClaimRef,
    /// Its devices.
    pub devices: Vec<DeviceEntry>,
    /// Names of the pods that reserve the claim; empty until they were read.
    pub pods: BTreeSet<String>,
    /// Containers that use the claim, by pod; without pods that were not read so far.
    pub containers: BTreeMap<String, Vec<Container>>,
}

/// A container that uses a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Name of the container.
    pub name: String,
    /// Position in the pod: containers, then init containers.
    pub index: usize,
    /// Names of the requests of the claim that the container uses; empty for all.
    pub requests: Vec<String>,
}

/// A device of a prepared claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Name of the request.
    pub request: String,
    /// Name of the device.
    pub device: String,
    /// UUID of the GPU.
    pub gpu: String,
    /// Access to the device.
    pub access: DeviceAccess,
    /// GPU memory that a suspended share had, bytes; `None` while the share is not suspended.
    pub suspended_bytes: Option<u64>,
    /// Since when, seconds since the epoch; `None` also if that is not recorded.
    pub suspended_since: Option<u64>,
}

/// Access of a claim to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceAccess {
    /// A share.
    Share(ShareId),
    /// The whole GPU.
    Whole,
    /// A MIG partition.
    Partition,
    /// Admin access.
    Admin,
}

/// Follows the prepared claims until `stop`.
pub async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    entries: watch::Sender<Arc<[ClaimEntry]>>,
    stop: CancellationToken,
) {
    let mut view = ClaimView {
        claims,
        changes: RecordChanges::default(),
        known: BTreeMap::new(),
    };
    loop {
        let updated = tokio::select! {
            () = stop.cancelled() => return,
            updated = view.update() => updated,
        };
        match updated {
            Ok(()) => {
                let known = view.known.values().map(|known| known.entry.clone());
                entries.send_replace(known.collect());
            }
            Err(error) => tracing::warn!(error, "cannot read the claims for the metrics"),
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

struct ClaimView<E> {
    claims: Arc<ClaimService<E>>,
    changes: RecordChanges,
    known: BTreeMap<ClaimUid, Known>,
}

struct Known {
    entry: ClaimEntry,
    /// Time of the next read from the API server.
    read_at: Instant,
}

impl<E: Effects> ClaimView<E> {
    async fn update(&mut self) -> Result<(), String> {
        let applier = Arc::clone(&self.claims.applier);
        let (now, mut changes) = (Instant::now(), self.changes.clone());
        let read = blocking(move || {
            if !changes.is_changed(applier.store(), now) {
                return Ok((changes, None));
            }
            let mut records = Vec::new();
            for uid in applier.store().list()?.recorded {
                if let Loaded::Present(record) = applier.store().load(&uid)? {
                    records.push(*record);
                }
            }
            Ok::<_, RecordError>((changes, Some(records)))
        });
        let read = read.await.map_err(|error| describe(&error))?;
        let (changes, records) = read.map_err(|error| describe(&error))?;
        self.changes = changes;
        if let Some(records) = records {
            self.set_records(&records, now);
        }
        self.read_pods(now).await;
        Ok(())
    }

    fn set_records(&mut self, records: &[ClaimRecord], now: Instant) {
        let mut before = std::mem::take(&mut self.known);
        for record in records {
            let mut known = before.remove(&record.claim.uid).unwrap_or_else(|| Known {
                entry: entry(record),
                read_at: now,
            });
            known.entry.devices = entry(record).devices;
            self.known.insert(record.claim.uid.clone(), known);
        }
    }

    async fn read_pods(&mut self, now: Instant) {
        let due = self.known.values_mut().filter(|known| known.read_at <= now);
        for Known { entry, read_at } in due.take(MAX_READS) {
            match self.claims.fetch(&entry.claim).await {
                Ok(found) => {
                    *read_at = now + REFRESH;
                    let uid = Some(entry.claim.uid.as_str());
                    let found = found.filter(|found| found.metadata.uid.as_deref() == uid);
                    let reserving = found.as_ref().map(reserving_pods).unwrap_or_default();
                    entry.pods = reserving.iter().map(|pod| pod.name.clone()).collect();
                    let is_complete = read_containers(&self.claims.client, entry, &reserving).await;
                    if !is_complete {
                        *read_at = now + RETRY;
                    }
                }
                Err(error) => {
                    *read_at = now + RETRY;
                    tracing::debug!(claim = %entry.claim, error = describe(&error), "cannot read the pods of the claim");
                }
            }
        }
    }
}

fn entry(record: &ClaimRecord) -> ClaimEntry {
    let device = |prepared: &Prepared| DeviceEntry {
        request: prepared.request.clone(),
        device: prepared.device.clone(),
        gpu: prepared.gpu.uuid.clone(),
        access: match &prepared.access {
            Access::Share(share) => DeviceAccess::Share(share.id.clone()),
            Access::Whole => DeviceAccess::Whole,
            Access::Partition(_) => DeviceAccess::Partition,
            Access::Admin => DeviceAccess::Admin,
        },
        suspended_bytes: prepared.share().and_then(Share::suspended_bytes),
        suspended_since: prepared.share().and_then(Share::suspended_since),
    };
    ClaimEntry {
        claim: record.claim.clone(),
        devices: record.devices.iter().map(device).collect(),
        pods: BTreeSet::new(),
        containers: BTreeMap::new(),
    }
}

/// Reads the containers of the pods that were not read before. Returns whether all were read.
async fn read_containers(client: &Client, entry: &mut ClaimEntry, reserving: &[PodRef]) -> bool {
    let pods: Api<Listed<Pod>> = Api::namespaced(client.clone(), &entry.claim.namespace);
    let reserves = |name: &String| reserving.iter().any(|pod| pod.name == *name);
    entry.containers.retain(|name, _| reserves(name));
    let mut is_complete = true;
    for pod in reserving {
        if entry.containers.contains_key(&pod.name) {
            continue;
        }
        match pods.get_opt(&pod.name).await {
            Ok(found) => {
                let uid = Some(pod.uid.as_str());
                let found = found.and_then(Listed::object);
                let found = found.filter(|found| found.metadata.uid.as_deref() == uid);
                let users = found.map(|found| pods::users(&found, &entry.claim.name));
                let users = users.unwrap_or_default().into_iter();
                let users = users.map(|user| Container {
                    name: user.container,
                    index: user.index,
                    requests: user.requests,
                });
                entry.containers.insert(pod.name.clone(), users.collect());
            }
            Err(error) => {
                is_complete = false;
                tracing::debug!(pod = pod.name, %error, "cannot read the containers of the pod");
            }
        }
    }
    is_complete
}
