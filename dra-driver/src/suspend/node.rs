//! What the node knows of the processes of a share, and calls about them. Blocks as long as NVML and libcuda do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drava_nvml::{GpuUuid, Memory, ProcessMemory};

use super::checkpoint::{Action, CheckpointError, Checkpointer, LOCK_TIMEOUT_MS};
use super::{Look, SeenProcess};
use crate::agent::node::usage_region::{ReadBuffer, UsageRegion};
use crate::gpus::inventory::OpenLibrary;
use crate::node::claim::{ClaimUid, ShareId};
use crate::node::layout::Layout;
use crate::node::limits_page::Page;
use crate::node::mounts::{ClaimsMount, MountedShare};
use crate::node::process::{ProcessInfo, Processes, is_uninterruptible};
use crate::prepare::liveness::is_in_pod;
use crate::prepare::{HeldProcess, Phase, Share};

/// Time between two looks at whether a process is in uninterruptible sleep.
const SLEEP_POLL: Duration = Duration::from_millis(10);

/// The node, for suspensions.
#[derive(Clone)]
pub struct SuspendNode {
    /// Paths of claims and their files.
    pub layout: Layout,
    /// `/proc` of the node.
    pub proc_root: PathBuf,
    /// Opens NVML.
    pub open: OpenLibrary,
    /// Calls libcuda.
    pub checkpointer: Checkpointer,
    /// Boot of the node: no process survives it.
    pub boot_id: String,
}

/// A call about a process failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {action} process {} of the node: {error}", process.pid)]
pub struct ActError {
    action: Action,
    /// The process.
    pub process: HeldProcess,
    /// Cause.
    #[source]
    pub error: CheckpointError,
}

impl SuspendNode {
    /// Looks at a share with the libcuda at `library`.
    ///
    /// # Errors
    /// When the page, `/proc` or NVML cannot be read.
    pub fn look(
        &self,
        claim: &ClaimUid,
        share: &Share,
        gpu: &GpuUuid,
        library: &Path,
    ) -> Result<Look, String> {
        // Before the region: see `SUSPENDED_OFFSET`.
        let page = Page::open(&self.layout.limits(claim, &share.id));
        let suspension = page.map_err(|error| error.to_string())?.suspension();
        let page_waits = suspension != 0;
        // Without a readable region, libvgpu lets no process onto the GPU.
        let region = UsageRegion::open(&self.layout.usage(claim, &share.id));
        let mut buffer = ReadBuffer::default();
        let header = region.header(&mut buffer);
        let is_demanded =
            page_waits && header.is_ok_and(|header| header.share.demanded == suspension);
        let slots = region.view(&mut buffer);
        let slots = slots.map(|view| view.processes).unwrap_or_default();
        let claims = ClaimsMount::locate(&self.layout.claims());
        // Otherwise no process would be attributed to the share, as if all had ended.
        claims.map_err(|error| format!("cannot locate the claims directory: {error}"))?;
        let library_of_gpus = (self.open)()?;
        let memory = library_of_gpus.memory(gpu).ok();
        let listed = library_of_gpus.processes(gpu);
        let listed = listed.map_err(|error| error.to_string())?.into_iter();
        let listed: BTreeMap<u32, ProcessMemory> = listed
            .map(|process| (process.pid, process.memory))
            .collect();

        let phase = share.suspension.as_ref().map(|recorded| recorded.phase);
        let is_running = matches!(phase, None | Some(Phase::Running)) && !page_waits;
        let recorded = share.suspension.iter();
        let recorded: Vec<HeldProcess> = recorded
            .flat_map(|recorded| recorded.processes.clone())
            .collect();
        let starts: BTreeSet<u64> = slots.iter().map(|slot| slot.owner.start_time).collect();
        let mut pids: BTreeSet<u32> = listed.keys().copied().collect();
        // Once suspended, the processes are known, and each look would start a process for each of them.
        if phase != Some(Phase::Suspended) {
            pids.extend(recorded.iter().map(|held| held.pid));
            pids.extend(self.started_at(&starts)?);
        }

        let wanted = MountedShare {
            claim: claim.clone(),
            share: share.id.clone(),
        };
        let mut look = Look {
            boot_id: self.boot_id.clone(),
            page_waits,
            is_demanded,
            is_free: true,
            free_bytes: memory.and_then(|memory| match memory {
                Memory::Dedicated {
                    total_bytes,
                    reserved_bytes,
                    used_bytes,
                } => Some(total_bytes.saturating_sub(reserved_bytes.saturating_add(used_bytes))),
                Memory::NotSupported => None,
            }),
            ..Look::default()
        };
        let mut described = Processes::new(self.proc_root.clone(), self.layout.claims());
        for pid in pids {
            let Some(info) = described.describe_again(pid) else {
                // Only a process that has ended needs nothing.
                look.is_unknown |= described.start_time(pid).is_some();
                continue;
            };
            if !info.shares.contains(&wanted) {
                let is_recorded = |held: &HeldProcess| {
                    held.pid == pid && held.start_time == info.owner.start_time
                };
                look.is_unknown |= recorded.iter().any(is_recorded);
                // A program that has left the mounts of its container may be of this share.
                let may_be_ours = info.shares.is_empty() && is_in_pod(&self.proc_root, pid);
                look.is_free &= !may_be_ours || is_shown_free(listed.get(&pid));
                continue;
            }
            let process = HeldProcess {
                pid,
                start_time: info.owner.start_time,
            };
            let slot = slots.iter().find(|slot| slot.owner == info.owner);
            let is_charged = slot.is_some_and(|slot| slot.used_bytes > 0);
            let memory = listed.get(&pid);
            if memory.is_none() && !is_charged && !recorded.contains(&process) {
                continue;
            }
            if slot.is_some_and(|slot| slot.exported_bytes > 0) {
                look.refusal = Some(format!(
                    "process {pid} of the node ({}) has GPU memory that other processes may have open",
                    info.name
                ));
            }
            if info.shares.len() > 1 {
                look.refusal = Some(format!(
                    "process {pid} of the node ({}) has several shares, and only a whole process can be suspended",
                    info.name
                ));
            }
            if is_running {
                continue;
            }
            let bytes = match memory {
                Some(ProcessMemory::Used { bytes }) => *bytes,
                Some(ProcessMemory::NotAvailable) | None => 0,
            };
            look.is_free &= is_shown_free(memory);
            match self.checkpointer.call(library, Action::Look, process) {
                Ok(state) => look.processes.push(SeenProcess {
                    process,
                    state,
                    bytes,
                }),
                // It has no context: not yet, or not any more.
                Err(CheckpointError::Cuda(INVALID_VALUE | NOT_INITIALIZED)) => {
                    look.is_changing |= is_charged || memory.is_some();
                }
                Err(CheckpointError::Ended) => look.is_changing = true,
                Err(CheckpointError::Unavailable(why)) if recorded.is_empty() => {
                    look.refusal = Some(why);
                }
                Err(error) => {
                    tracing::warn!(pid, %error, "cannot read the state of a process of a suspended share");
                    look.is_unknown = true;
                }
            }
        }
        Ok(look)
    }

    /// Returns whether a program of a suspended share has called libcuda. Cheap: two files are read.
    #[must_use]
    pub fn is_demanded(&self, claim: &ClaimUid, share: &ShareId, buffer: &mut ReadBuffer) -> bool {
        let page = Page::open(&self.layout.limits(claim, share));
        let suspension = page.map_or(0, |page| page.suspension());
        let region = UsageRegion::open(&self.layout.usage(claim, share));
        let header = region.header(buffer);
        suspension != 0 && header.is_ok_and(|header| header.share.demanded == suspension)
    }

    /// Returns the processes that were started at these times, of all containers and the node.
    fn started_at(&self, starts: &BTreeSet<u64>) -> Result<Vec<u32>, String> {
        if starts.is_empty() {
            return Ok(Vec::new());
        }
        let entries = fs::read_dir(&self.proc_root).map_err(|error| error.to_string())?;
        let described = Processes::new(self.proc_root.clone(), self.layout.claims());
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let is_wanted = |pid: &u32| {
            let start = described.start_time(*pid);
            start.is_some_and(|start| starts.contains(&start))
        };
        Ok(pids.filter(is_wanted).collect())
    }

    /// Makes a call about each of these processes, and returns the failures. A process that has ended needs none. Up to the first
    /// failure, unless the way leads back: one process that fails holds up no other.
    #[must_use]
    pub fn act(&self, library: &Path, action: Action, processes: &[HeldProcess]) -> Vec<ActError> {
        let described = Processes::new(self.proc_root.clone(), self.layout.claims());
        let is_there = |held: &HeldProcess| described.start_time(held.pid) == Some(held.start_time);
        if action == Action::Lock
            && let Some(&process) = self.uninterruptible(processes)
        {
            // Before any of them is locked: the others would stand still while libcuda waits for it.
            return vec![ActError {
                action,
                process,
                error: CheckpointError::Uninterruptible,
            }];
        }
        let mut failures = Vec::new();
        for held in processes {
            if !is_there(held) {
                continue;
            }
            let outcome = self.checkpointer.call(library, action, *held);
            if !is_there(held) || outcome == Err(CheckpointError::Ended) {
                continue;
            }
            failures.extend(outcome.err().map(|error| ActError {
                action,
                process: *held,
                error,
            }));
            if !failures.is_empty() && matches!(action, Action::Lock | Action::Checkpoint) {
                break;
            }
        }
        failures
    }

    /// Returns the first of these processes that stays in uninterruptible sleep for as long as a lock waits for running calls. Many
    /// threads are in that state for a moment.
    fn uninterruptible<'a>(&self, processes: &'a [HeldProcess]) -> Option<&'a HeldProcess> {
        let until = Instant::now() + Duration::from_millis(LOCK_TIMEOUT_MS.into());
        let mut sleeping: Vec<&HeldProcess> = processes.iter().collect();
        loop {
            sleeping.retain(|held| is_uninterruptible(&self.proc_root, held.pid));
            let first = sleeping.first()?;
            if Instant::now() >= until {
                return Some(first);
            }
            std::thread::sleep(SLEEP_POLL);
        }
    }

    /// Kills those of these processes that have the share, and returns their PIDs.
    #[must_use]
    pub fn kill(&self, claim: &ClaimUid, share: &Share, processes: &[HeldProcess]) -> Vec<u32> {
        let share = MountedShare {
            claim: claim.clone(),
            share: share.id.clone(),
        };
        let mut described = Processes::new(self.proc_root.clone(), self.layout.claims());
        let is_killed = |held: &&HeldProcess| {
            described.kill(held.pid, |info: &ProcessInfo| {
                info.owner.start_time == held.start_time && info.shares.contains(&share)
            })
        };
        let killed = processes.iter().filter(is_killed);
        killed.map(|held| held.pid).collect()
    }
}

/// `CUDA_ERROR_INVALID_VALUE`: there is no such process on the GPU.
const INVALID_VALUE: i32 = 1;

/// `CUDA_ERROR_NOT_INITIALIZED`: the process has no context.
const NOT_INITIALIZED: i32 = 3;

/// Returns whether NVML shows no memory of a process. Memory that it does not tell cannot be confirmed to be free.
const fn is_shown_free(memory: Option<&ProcessMemory>) -> bool {
    match memory {
        None => true,
        Some(ProcessMemory::Used { bytes }) => *bytes == 0,
        Some(ProcessMemory::NotAvailable) => false,
    }
}
