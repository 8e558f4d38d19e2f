//! GpuShareRecommendations: the leader reads what shares use from the metrics of the node drivers, and writes what workloads need.
//!
//! The metrics are read over plain HTTP, as Prometheus does, so this takes no permission. Peaks of memory are those since a share
//! exists, so a reading every few minutes misses none. What a recommendation follows from is in its status: another leader goes on
//! from there. A status is written when its amounts change, and every hour.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::listed::Listed;
use drava_api::quota::ShareAmounts;
use drava_api::recommendation::{
    GpuShareRecommendation, GpuShareRecommendationStatus, UsageHistory, job_of, status,
};
use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;

use crate::write::lease::Term;
use crate::write::writes::{FIELD_MANAGER, ignore_outdated};
use collection::{ClaimOwner, LastReadings, WorkloadKey, WorkloadReading, owner_of, pod_of};
use usage::{ShareKey, ShareUsage, shares};

mod collection;
mod usage;

#[cfg(test)]
mod tests;

/// Labels of the pods of node drivers.
const DRIVERS: &str = "app.kubernetes.io/name=drava,app.kubernetes.io/component=driver";

/// Name of the port with the metrics.
const PORT: &str = "http";

/// Time between two readings.
const PERIOD: Duration = Duration::from_secs(300);

/// Time for the answer of one node driver.
const LIMIT: Duration = Duration::from_secs(10);

/// Requests that wait for an answer at the same time.
const IN_FLIGHT: usize = 16;

/// Time after which a status is written although its amounts are the same.
const REFRESH_SECONDS: i64 = 3600;

/// What is known of the workloads.
pub struct Recommender {
    client: Client,
    /// Reads metrics: without credentials.
    metrics: Client,
    /// Namespace of the node drivers.
    namespace: String,
    last: LastReadings,
    /// By UID of the claim; `None` for claims that have no workload.
    owners: BTreeMap<String, Option<ClaimOwner>>,
    workloads: BTreeMap<WorkloadKey, Workload>,
}

/// What is remembered of a workload.
#[derive(Debug)]
struct Workload {
    current: ShareAmounts,
    history: UsageHistory,
}

type Objects = BTreeMap<WorkloadKey, GpuShareRecommendation>;

/// Maintains the recommendations during the term. `metrics` is a client without credentials.
pub async fn maintain(client: Client, metrics: Client, namespace: &str, term: &Term) {
    let mut recommender = Recommender::new(client, metrics, namespace);
    loop {
        let now = (Timestamp::now(), Instant::now());
        if let Err(error) = recommender.round(now, term).await {
            tracing::warn!(
                error = describe(&error),
                "cannot recommend amounts of shares"
            );
        }
        tokio::time::sleep(PERIOD).await;
    }
}

impl Recommender {
    fn new(client: Client, metrics: Client, namespace: &str) -> Self {
        Self {
            client,
            metrics,
            namespace: namespace.to_owned(),
            last: LastReadings::default(),
            owners: BTreeMap::new(),
            workloads: BTreeMap::new(),
        }
    }

    /// Reads the node drivers once, and writes what has changed.
    async fn round(
        &mut self,
        (time, instant): (Timestamp, Instant),
        term: &Term,
    ) -> kube::Result<()> {
        let objects = self.objects().await?;
        let shares = self.shares().await?;
        self.find_owners(&shares).await;
        for (key, object) in &objects {
            let status = object.status.clone().unwrap_or_default();
            self.workloads.entry(key.clone()).or_insert(Workload {
                current: status.current,
                history: status.history,
            });
        }
        let workloads = &self.workloads;
        let history = |key: &WorkloadKey| Some(&workloads.get(key)?.history);
        let readings = self.last.collect(instant, &shares, &self.owners, history);
        // Kubernetes stores whole seconds.
        let now = Time(Timestamp::from_second(time.as_second()).unwrap_or(time));
        for (key, reading) in &readings {
            let workload = self.workloads.entry(key.clone()).or_insert(Workload {
                current: reading.current,
                history: UsageHistory::default(),
            });
            workload.current = reading.current;
            workload.history.add(&now, &reading.reading);
        }
        // What is not in use is as its object says, or gone with it.
        self.workloads
            .retain(|key, _| readings.contains_key(key) || objects.contains_key(key));
        for (key, workload) in &self.workloads {
            if !term.is_valid() {
                return Ok(());
            }
            let reading = readings.get(key);
            let shares = reading.map_or(0, |reading| reading.shares);
            let status = status(shares, workload.current, workload.history.clone());
            let written = match (objects.get(key), reading) {
                (Some(object), _) => self.update(key, object, reading, status).await,
                (None, Some(reading)) => self.create(key, reading, status).await,
                (None, None) => Ok(()),
            };
            if let Err(error) = ignore_outdated(written) {
                let (namespace, name) = key;
                tracing::warn!(
                    error = describe(&error),
                    namespace,
                    name,
                    "cannot write a GpuShareRecommendation"
                );
            }
        }
        Ok(())
    }

    /// Returns the recommendations of the cluster.
    async fn objects(&self) -> kube::Result<Objects> {
        let all: Api<Listed<GpuShareRecommendation>> = Api::all(self.client.clone());
        // From the cache of the API server.
        let list = all.list(&ListParams::default().match_any()).await?;
        let (objects, _) = Listed::split(list.items);
        let keyed = objects.into_iter().filter_map(|object| {
            let metadata = &object.metadata;
            let key = (metadata.namespace.clone()?, metadata.name.clone()?);
            Some((key, object))
        });
        Ok(keyed.collect())
    }

    /// Returns the shares on all nodes whose driver answers.
    async fn shares(&self) -> kube::Result<BTreeMap<ShareKey, ShareUsage>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let drivers = ListParams::default().labels(DRIVERS).match_any();
        let drivers = pods.list(&drivers).await?;
        let addresses = drivers.items.iter().filter_map(address);
        let answers = futures::stream::iter(addresses).map(async |address| {
            let text = self.read(&address).await;
            (address, text)
        });
        let answers: Vec<_> = answers.buffer_unordered(IN_FLIGHT).collect().await;
        let mut found = BTreeMap::new();
        for (address, answer) in answers {
            match answer {
                Ok(text) => found.extend(shares(&text)),
                Err(error) => tracing::debug!(
                    address,
                    error = describe(&error),
                    "cannot read the metrics of a node driver"
                ),
            }
        }
        Ok(found)
    }

    async fn read(&self, address: &str) -> kube::Result<String> {
        let request = http::Request::get(address).body(Vec::new());
        let request = request.map_err(kube::Error::HttpError)?;
        match tokio::time::timeout(LIMIT, self.metrics.request_text(request)).await {
            Ok(answer) => answer,
            Err(elapsed) => Err(kube::Error::Service(elapsed.into())),
        }
    }

    /// Reads the metadata of new claims and of their pods, once for each claim.
    async fn find_owners(&mut self, shares: &BTreeMap<ShareKey, ShareUsage>) {
        let claims: BTreeMap<&str, &ShareKey> = shares
            .keys()
            .map(|share| (share.uid.as_str(), share))
            .collect();
        self.owners
            .retain(|uid, _| claims.contains_key(uid.as_str()));
        let new = claims
            .into_iter()
            .filter(|(uid, _)| !self.owners.contains_key(*uid));
        let new: Vec<_> = new.collect();
        let answers = futures::stream::iter(new).map(async |(uid, share)| {
            let owner = self.find_owner(share).await;
            (uid, share, owner)
        });
        let answers: Vec<_> = answers.buffer_unordered(IN_FLIGHT).collect().await;
        for (uid, share, owner) in answers {
            match owner {
                Ok(owner) => {
                    self.owners.insert(uid.to_owned(), owner);
                }
                Err(error) => tracing::debug!(
                    namespace = share.namespace,
                    claim = share.claim,
                    error = describe(&error),
                    "cannot read the workload of a claim"
                ),
            }
        }
    }

    async fn find_owner(&self, share: &ShareKey) -> kube::Result<Option<ClaimOwner>> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &share.namespace);
        let Some(claim) = claims.get_metadata_opt(&share.claim).await? else {
            return Ok(None);
        };
        // The claim that was prepared is gone.
        if claim.metadata.uid.as_deref() != Some(share.uid.as_str()) {
            return Ok(None);
        }
        let (pod, job) = match pod_of(&claim.metadata) {
            Some(pod) => {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &share.namespace);
                let Some(pod) = pods.get_metadata_opt(pod).await? else {
                    return Ok(None);
                };
                let job = match job_of(&pod.metadata) {
                    Some(job) => {
                        let jobs: Api<Job> = Api::namespaced(self.client.clone(), &share.namespace);
                        jobs.get_metadata_opt(&job.name).await?
                    }
                    None => None,
                };
                (Some(pod.metadata), job.map(|job| job.metadata))
            }
            None => (None, None),
        };
        Ok(owner_of(&claim.metadata, pod.as_ref(), job.as_ref()))
    }

    async fn create(
        &self,
        (namespace, name): &WorkloadKey,
        reading: &WorkloadReading,
        status: GpuShareRecommendationStatus,
    ) -> kube::Result<()> {
        let mut object = GpuShareRecommendation::new(name, reading.spec.clone());
        object.metadata.namespace = Some(namespace.clone());
        object.metadata.owner_references = Some(reading.owners.clone());
        let objects = self.recommendations(namespace);
        let created = objects.create(&parameters(), &object).await?;
        self.write_status(created, status).await
    }

    async fn update(
        &self,
        (namespace, name): &WorkloadKey,
        object: &GpuShareRecommendation,
        reading: Option<&WorkloadReading>,
        status: GpuShareRecommendationStatus,
    ) -> kube::Result<()> {
        let before = object.metadata.owner_references.clone().unwrap_or_default();
        let new = reading.map(|reading| added(&before, &reading.owners));
        let mut object = object.clone();
        if let Some(new) = new.filter(|new| !new.is_empty()) {
            // The garbage collector removes owners that are gone.
            let owners = [before, new].concat();
            let resource_version = &object.metadata.resource_version;
            let patch = json!({"metadata": {"ownerReferences": owners, "resourceVersion": resource_version}});
            let parameters = PatchParams {
                field_manager: Some(FIELD_MANAGER.to_owned()),
                ..PatchParams::default()
            };
            let patched = self.recommendations(namespace);
            object = patched
                .patch(name, &parameters, &Patch::Merge(patch))
                .await?;
        }
        match object
            .status
            .as_ref()
            .is_some_and(|before| !is_due(before, &status))
        {
            true => Ok(()),
            false => self.write_status(object, status).await,
        }
    }

    async fn write_status(
        &self,
        mut object: GpuShareRecommendation,
        status: GpuShareRecommendationStatus,
    ) -> kube::Result<()> {
        let metadata = &object.metadata;
        let name = metadata.name.clone().unwrap_or_default();
        let objects = self.recommendations(metadata.namespace.as_deref().unwrap_or_default());
        object.status = Some(status);
        let written = objects.replace_status(&name, &parameters(), &object).await;
        written.map(drop)
    }

    fn recommendations(&self, namespace: &str) -> Api<GpuShareRecommendation> {
        Api::namespaced(self.client.clone(), namespace)
    }
}

fn parameters() -> PostParams {
    PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    }
}

/// Returns the owners that are not among those before.
fn added(before: &[OwnerReference], owners: &[OwnerReference]) -> Vec<OwnerReference> {
    let is_new = |owner: &&OwnerReference| before.iter().all(|known| known.uid != owner.uid);
    owners.iter().filter(is_new).cloned().collect()
}

/// Returns whether a status is written in the place of another: its amounts are others, or the history of the other is old.
fn is_due(before: &GpuShareRecommendationStatus, status: &GpuShareRecommendationStatus) -> bool {
    let seconds = |history: &UsageHistory| history.read_at.as_ref().map(|at| at.0.as_second());
    let (old, new) = (seconds(&before.history), seconds(&status.history));
    let with_history = GpuShareRecommendationStatus {
        history: status.history.clone(),
        ..before.clone()
    };
    with_history != *status
        || old
            .zip(new)
            .map_or(old != new, |(old, new)| new - old >= REFRESH_SECONDS)
}

/// Returns the address of the metrics of a node driver that runs.
fn address(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if status.phase.as_deref() != Some("Running") {
        return None;
    }
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let port = ports.find(|port| port.name.as_deref() == Some(PORT))?;
    let (ip, port) = (status.pod_ip.as_deref()?, port.container_port);
    Some(match ip.contains(':') {
        true => format!("http://[{ip}]:{port}/metrics"),
        false => format!("http://{ip}:{port}/metrics"),
    })
}
