//! Liveness of claims: whether containers or GPU processes of a claim are on the node.
//!
//! The API server can lose a claim whose containers run: a claim is deleted by force, or restored from an old backup. So
//! the state of a claim is removed only if `/proc` shows no container with a share of the claim and NVML shows no process
//! that may belong to it. A process that belongs to no share (a whole GPU, or a process that hides its mounts) counts for
//! every claim of its GPU.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use drava_nvml::{GpuError, GpuLibrary, GpuUuid, Process, Status};

use crate::gpus::inventory::{InstanceKey, OpenLibrary};
use crate::node::claim::ClaimUid;
use crate::node::mounts::ClaimsMount;
use crate::node::process::{ProcessInfo, Processes, container_cgroup};
use crate::prepare::Prepared;
use crate::prepare::record::{held_gpus, instance_keys};

/// Liveness of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Liveness {
    /// A container or process of the claim is on the node.
    Running(Evidence),
    /// The node cannot be inspected, for this reason.
    Unknown(String),
    /// No container and no process of the claim is on the node.
    Ended,
}

/// Evidence that a claim is in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Evidence {
    /// A share of the claim is mounted.
    Mount,
    /// The process with this PID on the node has a context on a GPU of the claim.
    Process {
        /// PID on the node.
        pid: u32,
        /// Name of the program.
        name: String,
    },
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount => f.write_str("a container mounts its share"),
            Self::Process { pid, name } => {
                write!(f, "process {pid} ({name}) of the node uses its GPU")
            }
        }
    }
}

/// What a claim holds.
pub struct Held {
    /// UID of the claim.
    pub uid: ClaimUid,
    /// GPUs, also those of MIG instances.
    pub gpus: BTreeSet<GpuUuid>,
    /// MIG instances.
    pub instances: BTreeSet<InstanceKey>,
}

impl Held {
    /// Returns what the devices of a claim hold.
    #[must_use]
    pub fn new(uid: &ClaimUid, devices: &[Prepared]) -> Self {
        Self {
            uid: uid.clone(),
            gpus: held_gpus(devices).into_iter().map(GpuUuid::new).collect(),
            instances: instance_keys(devices).collect(),
        }
    }

    /// Returns the part of one GPU.
    #[must_use]
    pub fn of_gpu(&self, gpu: &GpuUuid) -> Self {
        let instances = self.instances.iter().filter(|(of, ..)| of == gpu);
        Self {
            uid: self.uid.clone(),
            gpus: BTreeSet::from([gpu.clone()]),
            instances: instances.cloned().collect(),
        }
    }
}

/// Returns the IDs of a claim's MIG instances on a GPU; `None` if the claim has no partition of the GPU.
fn instance_ids(
    library: &dyn GpuLibrary,
    gpu: &GpuUuid,
    instances: &BTreeSet<InstanceKey>,
) -> Result<Option<Vec<u32>>, GpuError> {
    if instances.iter().all(|(other, ..)| other != gpu) {
        return Ok(None);
    }
    let listed = library.mig_instances(gpu)?;
    let own = listed.iter().filter(|instance| {
        let key = (gpu.clone(), instance.profile_id, instance.placement);
        instances.contains(&key)
    });
    Ok(Some(own.map(|instance| instance.id).collect()))
}

/// Inspects the processes of the node.
#[derive(Clone)]
pub struct Inspector {
    /// `/proc` of the node.
    pub proc_root: PathBuf,
    /// Directory of the claims.
    pub claims: PathBuf,
    /// Opens the GPU library.
    pub open: OpenLibrary,
}

impl Inspector {
    /// Returns the claims of which a share is mounted in any mount namespace.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn mounted_claims(&self) -> io::Result<BTreeSet<ClaimUid>> {
        let mount = ClaimsMount::locate(&self.claims)?;
        let mut namespaces = BTreeSet::new();
        let mut claims = BTreeSet::new();
        for entry in fs::read_dir(&self.proc_root)? {
            let dir = entry?.path();
            let is_process = dir
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit));
            if !is_process {
                continue;
            }
            // All processes of a namespace have the same mounts.
            if let Ok(namespace) = fs::read_link(dir.join("ns/mnt"))
                && !namespaces.insert(namespace)
            {
                continue;
            }
            // A process may end at any moment.
            let mounts = fs::read_to_string(dir.join("mountinfo")).unwrap_or_default();
            claims.extend(
                mount
                    .shares(&mounts)
                    .into_iter()
                    .map(|mounted| mounted.claim),
            );
        }
        Ok(claims)
    }

    /// Returns the liveness of a claim. Blocks as long as NVML does.
    #[must_use]
    pub fn liveness(&self, held: &Held) -> Liveness {
        match self.mounted_claims() {
            Ok(mounted) if mounted.contains(&held.uid) => Liveness::Running(Evidence::Mount),
            Ok(_) => self.gpu_liveness(held),
            Err(error) => {
                let proc_root = self.proc_root.display();
                Liveness::Unknown(format!("cannot list {proc_root}: {error}"))
            }
        }
    }

    /// Returns the liveness of a claim of which no share is mounted. Blocks as long as NVML does.
    #[must_use]
    pub fn gpu_liveness(&self, held: &Held) -> Liveness {
        let Held {
            uid,
            gpus,
            instances,
        } = held;
        if gpus.is_empty() {
            return Liveness::Ended;
        }
        let library = match (self.open)() {
            Ok(library) => library,
            Err(reason) => return Liveness::Unknown(reason),
        };
        let mut processes = Processes::new(self.proc_root.clone(), self.claims.clone());
        for gpu in gpus {
            let listed = match library.processes(gpu) {
                Ok(listed) => listed,
                // Without a list the mounts alone decide; a GPU that is not on the node has no processes.
                Err(error) if error.status.is_absent() || error.status == Status::NotFound => {
                    continue;
                }
                Err(error) => return Liveness::Unknown(error.to_string()),
            };
            let own = match instance_ids(library.as_ref(), gpu, instances) {
                Ok(own) => own,
                Err(error) => return Liveness::Unknown(error.to_string()),
            };
            let in_own = |process: &Process| match (&own, process.gpu_instance) {
                (None, _) => true,
                (Some(own), Some(instance)) => own.contains(&instance),
                (Some(_), None) => false,
            };
            for pid in listed.into_iter().filter(in_own).map(|process| process.pid) {
                let Some(described) = processes.describe(pid) else {
                    continue;
                };
                if may_belong(uid, &described, is_in_pod(&self.proc_root, pid)) {
                    let name = described.name;
                    return Liveness::Running(Evidence::Process { pid, name });
                }
            }
        }
        Liveness::Ended
    }
}

/// Returns whether a process on a GPU of the claim may belong to the claim.
fn may_belong(uid: &ClaimUid, process: &ProcessInfo, is_in_pod: bool) -> bool {
    if process.shares.is_empty() {
        is_in_pod
    } else {
        process.shares.iter().any(|mounted| mounted.claim == *uid)
    }
}

/// Returns whether a process is in a container of a pod.
pub(crate) fn is_in_pod(proc_root: &Path, pid: u32) -> bool {
    fs::read_to_string(proc_root.join(pid.to_string()).join("cgroup"))
        .is_ok_and(|cgroups| container_cgroup(&cgroups).is_some())
}

#[cfg(test)]
mod tests {
    use drava_vgpu_abi::ledger::Owner;

    use super::*;
    use crate::node::claim::ShareId;
    use crate::node::mounts::MountedShare;

    #[test]
    fn counts_pod_process_without_share_for_every_claim() {
        let claim = |text: &str| ClaimUid::parse(text).unwrap();
        let process = |claims: &[&str]| ProcessInfo {
            owner: Owner {
                pid: 1,
                start_time: 1,
                pid_namespace: 1,
            },
            name: "python".to_owned(),
            shares: claims
                .iter()
                .map(|text| MountedShare {
                    claim: claim(text),
                    share: ShareId::parse("00000000-0000-4000-8000-000000000001").unwrap(),
                })
                .collect(),
        };
        for (shares, is_in_pod, expected) in [
            (["a"].as_slice(), true, true),
            (&["b", "a"], true, true),
            (&["b"], true, false),
            (&[], true, true),
            // A display server or a monitor of the node.
            (&[], false, false),
        ] {
            let found = may_belong(&claim("a"), &process(shares), is_in_pod);
            assert_eq!(found, expected, "{shares:?} {is_in_pod}");
        }
    }
}
