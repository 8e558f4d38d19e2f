//! Claim records: one durable file per prepared claim, the only durable write of prepare.
//!
//! A record suffices to answer kubelet again, to repair, to check conflicts and to unprepare, without the API server and
//! without the GPU library. It is written before the first effect. Everything else on the node can be compared with the
//! record, so it needs no durable write: after a power failure the next prepare or reconciliation replaces what is
//! missing or damaged.
//!
//! Files are replaced atomically, see [`format`] for their form. A damaged record (disk error, manual edit) is rebuilt
//! from the API server and blocks only the GPUs in its header. A record of another build is never changed: its claim has
//! state that this build does not know.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use drava_nvml::GpuUuid;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use self::format::Unreadable;
use super::base::CommonEdits;
use super::{Access, Delivery, Partition, Prepared};
use crate::gpus::inventory::InstanceKey;
use crate::node::claim::{ClaimRef, ClaimUid};
use crate::node::files;

mod format;

/// Time after which records are read even if their directory has not changed: a write during the last read can have the same
/// time.
const REREAD: Duration = Duration::from_secs(60);

/// Record of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRecord {
    /// The claim.
    pub claim: ClaimRef,
    /// Devices of the claim.
    pub devices: Vec<Prepared>,
    /// Content hash of the libvgpu.so of its containers.
    pub library: String,
    /// Content hash of the CDI hook of its containers.
    pub hook: String,
    /// Delivery of libvgpu.so.
    #[serde(default)]
    pub delivery: Delivery,
    /// Location of the edits that the claim shares with others.
    #[serde(default)]
    pub common: CommonEdits,
    /// Whether its libvgpu.so makes new processes of a suspended share wait. Those of older builds do not.
    #[serde(default)]
    pub can_wait: bool,
}

impl ClaimRecord {
    /// Returns the GPUs of its devices.
    #[must_use]
    pub fn gpus(&self) -> BTreeSet<GpuUuid> {
        let gpus = self.devices.iter().map(|device| &device.gpu.uuid);
        gpus.map(|uuid| GpuUuid::new(uuid.clone())).collect()
    }

    /// Returns the UUIDs of the GPUs of which the claim holds capacity.
    #[must_use]
    pub fn held_gpus(&self) -> BTreeSet<String> {
        held_gpus(&self.devices)
    }
}

/// Returns the UUIDs of the GPUs of which these devices hold capacity. Admin access holds none.
#[must_use]
pub fn held_gpus(devices: &[Prepared]) -> BTreeSet<String> {
    devices
        .iter()
        .filter(|device| device.access != Access::Admin)
        .map(|device| device.gpu.uuid.clone())
        .collect()
}

/// Returns the UUIDs of the GPUs of which these devices have multiprocessors.
#[must_use]
pub fn spatial_gpus(devices: &[Prepared]) -> BTreeSet<&str> {
    let is_spatial = |device: &&Prepared| device.share().is_some_and(super::Share::is_spatial);
    let spatial = devices.iter().filter(is_spatial);
    spatial.map(|device| device.gpu.uuid.as_str()).collect()
}

/// Returns the MIG instances of these devices.
pub fn instance_keys(devices: &[Prepared]) -> impl Iterator<Item = InstanceKey> {
    partitions(devices).map(|(gpu, partition)| (gpu, partition.profile_id, partition.placement()))
}

/// Returns the partitions of these devices, with their GPUs.
pub(super) fn partitions(devices: &[Prepared]) -> impl Iterator<Item = (GpuUuid, &Partition)> {
    devices.iter().filter_map(|device| {
        let partition = device.partition()?;
        Some((GpuUuid::new(device.gpu.uuid.clone()), partition))
    })
}

/// Content of a record file.
#[derive(Debug, PartialEq, Eq)]
pub enum Loaded {
    /// The file does not exist.
    Absent,
    /// The record is valid.
    Present(Box<ClaimRecord>),
    /// Another build wrote the record. It must not be changed.
    Unsupported(Unsupported),
    /// The record is damaged.
    Damaged(Damage),
}

/// A record that another build wrote in a form that this build does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// UUIDs of the GPUs that the claim holds.
    pub gpus: BTreeSet<String>,
    /// Difference to this build.
    pub reason: String,
}

/// Damage of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// UUIDs of the GPUs that the claim holds; `None` if the header is damaged too.
    pub gpus: Option<BTreeSet<String>>,
    /// Description of the damage.
    pub reason: String,
}

/// A record file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}", path.display())]
pub struct RecordError {
    operation: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Identifies the content of a record: each write replaces the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordVersion {
    modified: SystemTime,
    inode: u64,
}

/// Record files of this node.
#[derive(Debug, Clone)]
pub struct RecordStore {
    dir: PathBuf,
}

impl RecordStore {
    /// Returns the records in `dir`, which must exist.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// Reads the record of a claim.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn load(&self, uid: &ClaimUid) -> Result<Loaded, RecordError> {
        let path = self.path(uid);
        match fs::read(&path) {
            Ok(bytes) => Ok(match format::decode(&bytes) {
                Ok(record) if record.claim.uid == *uid => Loaded::Present(Box::new(record)),
                Ok(record) => Loaded::Damaged(Damage {
                    gpus: None,
                    reason: format!("record of claim {}", record.claim),
                }),
                Err(Unreadable::Unsupported(unsupported)) => Loaded::Unsupported(unsupported),
                Err(Unreadable::Damaged(damage)) => Loaded::Damaged(damage),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Loaded::Absent),
            Err(source) => Err(RecordError {
                operation: "read the claim record",
                path,
                source,
            }),
        }
    }

    /// Returns what identifies the content of a claim's record; `None` without one.
    #[must_use]
    pub fn version(&self, uid: &ClaimUid) -> Option<RecordVersion> {
        let file = fs::metadata(self.path(uid)).ok()?;
        Some(RecordVersion {
            modified: file.modified().ok()?,
            inode: file.ino(),
        })
    }

    /// Writes a record durably.
    ///
    /// # Errors
    /// When the record cannot be written; an existing record then stays.
    pub fn save(&self, record: &ClaimRecord) -> Result<(), RecordError> {
        let path = self.path(&record.claim.uid);
        files::write_durably(&path, &format::encode(record), 0o600).map_err(|source| RecordError {
            operation: "write the claim record",
            path,
            source,
        })
    }

    /// Removes the record of a claim. Succeeds when no record exists.
    ///
    /// # Errors
    /// When the file exists and cannot be removed.
    pub fn remove(&self, uid: &ClaimUid) -> Result<(), RecordError> {
        let path = self.path(uid);
        files::remove_durably(&path).map_err(|source| RecordError {
            operation: "remove the claim record",
            path,
            source,
        })
    }

    /// Returns the records that another build wrote.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn unsupported(&self) -> Result<Vec<(ClaimUid, Unsupported)>, RecordError> {
        let mut found = Vec::new();
        for uid in self.list()?.recorded {
            if let Loaded::Unsupported(unsupported) = self.load(&uid)? {
                found.push((uid, unsupported));
            }
        }
        Ok(found)
    }

    /// Lists the claims with records.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn list(&self) -> Result<Listing, RecordError> {
        let error = |source| RecordError {
            operation: "list the claim records in",
            path: self.dir.clone(),
            source,
        };
        let mut listing = Listing::default();
        for entry in fs::read_dir(&self.dir).map_err(error)? {
            let name = entry.map_err(error)?.file_name();
            let Some(name) = name.to_str() else {
                continue;
            };
            match name.strip_suffix(".json") {
                Some(uid) => listing.recorded.extend(ClaimUid::parse(uid).ok()),
                None => listing.limits.extend(ClaimUid::parse(name).ok()),
            }
        }
        listing.recorded.sort();
        listing.limits.sort();
        Ok(listing)
    }

    fn path(&self, uid: &ClaimUid) -> PathBuf {
        self.dir.join(format!("{uid}.json"))
    }
}

/// Detects changes of the records by the time of their directory: each write replaces a file.
#[derive(Debug, Default, Clone)]
pub struct RecordChanges {
    /// Time of the directory, and when the records are read in any case.
    read: Option<(SystemTime, Instant)>,
}

impl RecordChanges {
    /// Returns whether the records must be read: always the first time, after a change, and every [`REREAD`].
    pub fn is_changed(&mut self, store: &RecordStore, now: Instant) -> bool {
        let changed = fs::metadata(&store.dir).and_then(|dir| dir.modified()).ok();
        let is_current = self
            .read
            .is_some_and(|(at, until)| Some(at) == changed && now < until);
        if !is_current {
            self.read = changed.map(|at| (at, now + REREAD));
        }
        !is_current
    }
}

/// Claims with records.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Claims with a record.
    pub recorded: Vec<ClaimUid>,
    /// Claims with a directory of limits.
    pub limits: Vec<ClaimUid>,
}

/// Records for tests.
#[cfg(test)]
pub(crate) mod fixture {
    use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy, Priority};

    use super::*;
    use crate::gpus::capacity::ShareTotals;
    use crate::node::claim::ShareId;
    use crate::prepare::{GpuRef, Share};

    /// Returns the record of the claim with this number and one share of GPU 0.
    pub(crate) fn record(number: u32, pool: &str, amounts: ShareTotals) -> ClaimRecord {
        let uid = format!("00000000-0000-4000-8000-{number:012}");
        let share = Share {
            limit_bytes: None,
            bursts_idle: false,
            lends_idle: false,
            can_suspend: false,
            id: ShareId::parse(&uid).unwrap(),
            memory_bytes: amounts.memory_bytes,
            cores: amounts.cores,
            slots: amounts.slots,
            compute_policy: ComputePolicy::Balance,
            priority: Priority::default(),
            memory_policy: MemoryPolicy::Hard,
            limited_by_driver: false,
            enforcement: Enforcement::default(),
            unmetered: false,
            grants: Vec::new(),
            suspension: None,
        };
        ClaimRecord {
            claim: ClaimRef {
                namespace: "default".to_owned(),
                name: format!("claim-{number}"),
                uid: ClaimUid::parse(&uid).unwrap(),
            },
            devices: vec![Prepared {
                request: "gpu".to_owned(),
                pool: pool.to_owned(),
                device: "gpu-0-vgpu".to_owned(),
                gpu: GpuRef {
                    uuid: "GPU-0".to_owned(),
                    minor: 0,
                    pci_bus_id: String::new(),
                },
                access: Access::Share(share),
            }],
            library: String::new(),
            hook: String::new(),
            delivery: Delivery::Preload,
            common: CommonEdits::InClaim,
            can_wait: true,
        }
    }
}
