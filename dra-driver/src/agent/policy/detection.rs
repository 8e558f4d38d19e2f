//! Detection of violations that libvgpu cannot prevent. Pure: NVML's processes and the usage regions in, violations out.
//!
//! A tenant can write anything to its region. NVML's values come from the kernel driver, so memory is judged by NVML, and
//! the region only says which processes count themselves.
//!
//! | Suspected violation | Condition |
//! |---|---|
//! | over the limit | by NVML, the processes of the share use more than its limit and the [`tolerance`] of each, at most twice the limit |
//! | not counted | a process with a context, in a container of the share, has no slot in its region, and some limit of the share needs libvgpu |
//! | region damaged | the region is missing, has a wrong size or type, or contradicts itself |
//! | other GPU | a process, in a container of the share, has a context on a GPU that its claim does not have |
//!
//! Memory that libcuda allocates for itself is no violation. It looks the same as memory that a program has allocated past
//! libvgpu, so the amount decides: up to [`most_excess_bytes`] in each process that counts itself, [`super::reserve`] charges
//! it to the share, which is denied further memory. All processes together are tolerated as much as the limit, because many
//! idle processes would hide any amount in another one.
//!
//! A violation suspected in [`CONFIRMATIONS`] successive scans is confirmed, once. It is cleared after [`HEALTHY`]
//! successive scans without it.

use std::collections::BTreeMap;

use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::snapshot::{ProcessUsage, RegionError};

const MIB: u64 = 1 << 20;

/// Successive scans that confirm a violation. With one scan per second, it is reported within three seconds.
pub const CONFIRMATIONS: u32 = 2;

/// Successive scans that clear a violation.
pub const HEALTHY: u32 = 10;

/// Tolerated error of the total of a region: processes change it while it is read.
const TORN_READ_BYTES: u64 = 256 * MIB;

/// The excess of one process is at most so many times the estimate; more is not driver memory but a violation. Four contexts
/// are the local memory of a kernel with 8 KiB for each thread, or the buffers of a profiler.
pub const EXCESS_FACTOR: u64 = 4;

/// Returns the most driver memory of a process beyond its charges, if a context is estimated as `estimate_bytes`.
#[must_use]
pub fn most_excess_bytes(estimate_bytes: u64) -> u64 {
    estimate_bytes.saturating_mul(EXCESS_FACTOR)
}

/// Least value of [`tolerance`]: NVML and the region are read at different times.
const LEAST_TOLERANCE_BYTES: u64 = 64 * MIB;

/// Returns by how much NVML's value of a process that counts itself may exceed its account, if the driver's memory of a
/// context is estimated as `estimate_bytes`.
#[must_use]
pub fn tolerance(estimate_bytes: u64) -> u64 {
    most_excess_bytes(estimate_bytes).max(LEAST_TOLERANCE_BYTES)
}

/// Problem of a usage region.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegionProblem {
    /// It cannot be opened or read, or is not a file.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// It is truncated or grown.
    #[error("has {found} bytes instead of {expected}")]
    Size {
        /// Its size.
        found: u64,
        /// Size of a region.
        expected: u64,
    },
    /// It is not a region of this version.
    #[error("is invalid: {0}")]
    Content(RegionError),
    /// More slots in use than a region has.
    #[error("reports {0} slots in use")]
    Slots(u64),
    /// Its total is less than the sum of its slots.
    #[error("reports {total_bytes} bytes in use, but its processes use {held_bytes}")]
    Total {
        /// Total in the header.
        total_bytes: u64,
        /// Sum of the slots.
        held_bytes: u64,
    },
}

/// Content of a region.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RegionView {
    /// Bytes used by all processes.
    pub total_bytes: u64,
    /// Highest total.
    pub peak_bytes: u64,
    /// Allocations denied.
    pub denied: u64,
    /// When a process last used GPU time or waited for it, µs of `CLOCK_MONOTONIC`; 0 is never.
    pub last_demand_us: u64,
    /// Its slots.
    pub processes: Vec<ProcessUsage>,
}

/// What of the limits of a share does not hold for a process without libvgpu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unenforced {
    /// Neither memory nor GPU time.
    All,
    /// GPU time: the NVIDIA driver limits memory.
    GpuTime,
    /// Nothing: the NVIDIA driver limits memory, and GPU time has no limit, or not one of libvgpu.
    Nothing,
}

/// A share in one scan.
#[derive(Debug, Clone)]
pub struct ShareView<Id> {
    /// The share.
    pub id: Id,
    /// Memory limit of its page.
    pub limit_bytes: Option<u64>,
    /// Estimated memory of the driver in a context.
    pub estimate_bytes: u64,
    /// Its region.
    pub region: Result<RegionView, RegionProblem>,
    /// What does not hold for processes without libvgpu.
    pub without_library: Unenforced,
}

/// A process that NVML lists on the GPU, with its description from `/proc`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess<Id> {
    /// PID on the host.
    pub pid: u32,
    /// Name of its program.
    pub name: String,
    /// The owner that a slot of the process has.
    pub owner: Owner,
    /// Device memory by NVML; `None` if NVML does not report it.
    pub used_bytes: Option<u64>,
    /// Shares of this GPU that its container has.
    pub shares: Vec<Id>,
    /// If none, a share of another GPU that its container has, whose claim does not have this GPU.
    pub elsewhere: Option<Id>,
}

/// A violation in one scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SuspectedViolation {
    /// The share uses more than its limit.
    OverLimit {
        /// By NVML.
        used_bytes: u64,
        /// Limit of the share, or of all shares that its containers have on the GPU.
        limit_bytes: u64,
        /// Its processes on the host.
        pids: Vec<u32>,
    },
    /// A process does not count itself.
    NotCounted {
        /// PID on the host.
        pid: u32,
        /// Name of its program.
        name: String,
        /// What does not hold for it.
        unenforced: Unenforced,
    },
    /// The region is damaged.
    Region(RegionProblem),
    /// A process uses a GPU that is not the share's.
    OtherGpu {
        /// PID on the host.
        pid: u32,
        /// Name of its program.
        name: String,
        /// UUID of the GPU.
        gpu: String,
    },
}

/// Kinds of violations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationKind {
    /// [`SuspectedViolation::OverLimit`]
    OverLimit,
    /// [`SuspectedViolation::NotCounted`]
    NotCounted,
    /// [`SuspectedViolation::Region`]
    Region,
    /// [`SuspectedViolation::OtherGpu`]
    OtherGpu,
}

impl SuspectedViolation {
    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> ViolationKind {
        match self {
            Self::OverLimit { .. } => ViolationKind::OverLimit,
            Self::NotCounted { .. } => ViolationKind::NotCounted,
            Self::Region(_) => ViolationKind::Region,
            Self::OtherGpu { .. } => ViolationKind::OtherGpu,
        }
    }
}

/// Checks the values of a region against each other.
///
/// # Errors
/// The contradiction.
pub fn check(region: RegionView) -> Result<RegionView, RegionProblem> {
    let held = region.processes.iter().map(|process| process.used_bytes);
    let held_bytes = held.fold(0, u64::saturating_add);
    if held_bytes > region.total_bytes.saturating_add(TORN_READ_BYTES) {
        return Err(RegionProblem::Total {
            total_bytes: region.total_bytes,
            held_bytes,
        });
    }
    Ok(region)
}

/// Returns the suspected violations of the shares of the GPU with the UUID `gpu`, and by its processes.
#[must_use]
pub fn detect<Id: Ord + Copy>(
    gpu: &str,
    shares: &[ShareView<Id>],
    processes: &[GpuProcess<Id>],
) -> Vec<(Id, SuspectedViolation)> {
    let mut found = Vec::new();
    for share in shares {
        if let Err(problem) = &share.region {
            found.push((share.id, SuspectedViolation::Region(problem.clone())));
        }
    }
    for process in processes {
        if let Some(share) = process.elsewhere {
            let (pid, name) = (process.pid, process.name.clone());
            let gpu = gpu.to_owned();
            found.push((share, SuspectedViolation::OtherGpu { pid, name, gpu }));
        }
        let mut own = process.shares.iter();
        if let Some(first) = process.shares.first()
            && !own.any(|id| is_counted(shares, *id, process.owner))
        {
            let share = shares.iter().find(|share| share.id == *first);
            let unenforced = share.map_or(Unenforced::All, |share| share.without_library);
            let violation = SuspectedViolation::NotCounted {
                pid: process.pid,
                name: process.name.clone(),
                unenforced,
            };
            let is_violation = unenforced != Unenforced::Nothing;
            found.extend(is_violation.then_some((*first, violation)));
        }
    }
    // A process may use any share of its container, so shares of one container are judged together.
    for group in groups(shares, processes) {
        found.extend(over_limit(&group, shares, processes));
    }
    found
}

/// Returns whether these shares together exceed their limits.
fn over_limit<Id: Ord + Copy>(
    group: &[Id],
    shares: &[ShareView<Id>],
    processes: &[GpuProcess<Id>],
) -> Option<(Id, SuspectedViolation)> {
    let first = *group.first()?;
    let limit = |id: &Id| shares.iter().find(|share| share.id == *id)?.limit_bytes;
    let limit_bytes = group.iter().map(limit).sum::<Option<u64>>()?;
    let is_member = |process: &&GpuProcess<Id>| process.shares.iter().any(|id| group.contains(id));
    let members: Vec<_> = processes.iter().filter(is_member).collect();
    let used = members.iter().filter_map(|process| process.used_bytes);
    let used_bytes = used.fold(0, u64::saturating_add);
    let tolerated = members.iter().map(|process| {
        let counting = shares.iter().filter(|share| group.contains(&share.id));
        let estimates = counting
            .filter(|share| counts(share, process.owner))
            .map(|share| share.estimate_bytes);
        tolerance(estimates.max().unwrap_or(0))
    });
    let (sum, largest) = tolerated.fold((0u64, 0), |(sum, largest), bytes| {
        (sum.saturating_add(bytes), bytes.max(largest))
    });
    // One process is tolerated in any share, however small.
    let tolerated = sum.min(limit_bytes.max(largest));
    (used_bytes > limit_bytes.saturating_add(tolerated)).then(|| {
        let pids = members.iter().map(|process| process.pid).collect();
        let violation = SuspectedViolation::OverLimit {
            used_bytes,
            limit_bytes,
            pids,
        };
        (first, violation)
    })
}

fn is_counted<Id: Ord + Copy>(shares: &[ShareView<Id>], id: Id, owner: Owner) -> bool {
    let share = shares.iter().find(|share| share.id == id);
    // A damaged region is reported itself; it does not say which processes count themselves.
    share.is_some_and(|share| share.region.is_err() || counts(share, owner))
}

/// Returns whether a process has a slot in the region of the share.
fn counts<Id>(share: &ShareView<Id>, owner: Owner) -> bool {
    let region = share.region.as_ref();
    region.is_ok_and(|region| region.processes.iter().any(|slot| slot.owner == owner))
}

/// Groups shares that one process has together.
fn groups<Id: Ord + Copy>(shares: &[ShareView<Id>], processes: &[GpuProcess<Id>]) -> Vec<Vec<Id>> {
    let mut groups: Vec<Vec<Id>> = shares.iter().map(|share| vec![share.id]).collect();
    for process in processes.iter().filter(|process| process.shares.len() > 1) {
        let (joined, mut rest): (Vec<_>, Vec<_>) = groups
            .into_iter()
            .partition(|group| process.shares.iter().any(|id| group.contains(id)));
        rest.push(joined.concat());
        groups = rest;
    }
    groups
}

/// Change of the violations of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ViolationChange {
    /// A violation is confirmed, for the first time or after it was cleared.
    Confirmed(SuspectedViolation),
    /// A violation is cleared.
    Cleared(ViolationKind),
}

/// Confirms and clears violations.
#[derive(Debug, Clone, Default)]
pub struct ViolationTracker<Id> {
    states: BTreeMap<(Id, ViolationKind), ViolationState>,
}

/// Successive scans with and without the violation.
#[derive(Debug, Clone, Copy, Default)]
struct ViolationState {
    suspected: u32,
    healthy: u32,
    is_confirmed: bool,
}

impl<Id: Ord + Copy> ViolationTracker<Id> {
    /// Whether the last successive scans confirm the violation.
    #[must_use]
    pub fn is_confirmed(&self, id: Id, kind: ViolationKind) -> bool {
        let state = self.states.get(&(id, kind));
        state.is_some_and(|state| state.suspected >= CONFIRMATIONS)
    }

    /// Applies a scan of all shares of a GPU. `has_processes` is whether NVML listed the processes: without them only
    /// regions are judged, and other violations stay as they are.
    pub fn update(
        &mut self,
        shares: &[Id],
        suspected: &[(Id, SuspectedViolation)],
        has_processes: bool,
    ) -> Vec<(Id, ViolationChange)> {
        // One process per share and kind is reported.
        let mut first = BTreeMap::new();
        for (id, violation) in suspected {
            first.entry((*id, violation.kind())).or_insert(violation);
        }
        for key in first.keys() {
            self.states.entry(*key).or_default();
        }
        let mut changes = Vec::new();
        self.states.retain(|key, state| {
            if let Some(violation) = first.get(key) {
                state.suspected = state.suspected.saturating_add(1);
                state.healthy = 0;
                if state.suspected >= CONFIRMATIONS && !state.is_confirmed {
                    state.is_confirmed = true;
                    changes.push((key.0, ViolationChange::Confirmed((*violation).clone())));
                }
                return true;
            }
            if !shares.contains(&key.0) {
                return false;
            }
            if !has_processes && key.1 != ViolationKind::Region {
                return true;
            }
            state.suspected = 0;
            state.healthy += 1;
            if state.is_confirmed && state.healthy == HEALTHY {
                changes.push((key.0, ViolationChange::Cleared(key.1)));
            }
            state.is_confirmed && state.healthy < HEALTHY
        });
        changes
    }
}
