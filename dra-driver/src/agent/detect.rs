//! What libvgpu did not see, or could not. Pure: what NVML and the regions say in, breaches out.
//!
//! The region belongs to the tenant, who may write anything there. NVML does not: its figures come from the kernel
//! driver. So a share's use is judged by NVML, and the region only says which of the processes count themselves.
//!
//! | Suspicion | What it takes |
//! |---|---|
//! | over the limit | NVML says that the share's processes hold more than the limit and [`slack`] |
//! | not counted | a process with a context, in a container of the share, has no slot in its region |
//! | region damaged | it is missing, of another size or kind, or its figures contradict each other |
//!
//! A suspicion that [`CONFIRMATIONS`] looks in a row had is a breach, told once. It ends after [`HEALTHY`] looks without.

use std::collections::BTreeMap;

use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::snapshot::{ProcessUsage, RegionError};

const MIB: u64 = 1 << 20;

/// Looks in a row that a suspicion needs. One look a second: a breach is told within three seconds.
pub const CONFIRMATIONS: u32 = 2;

/// Looks in a row without it after which a breach is over.
pub const HEALTHY: u32 = 10;

/// By how much the total of a region may be off in one look: processes change it while it is read.
const TORN_BYTES: u64 = 256 * MIB;

/// By how much NVML's figure may exceed a limit: what the driver takes in each process is estimated.
#[must_use]
pub fn slack(processes: usize) -> u64 {
    u64::try_from(processes)
        .unwrap_or(u64::MAX)
        .max(1)
        .saturating_mul(64 * MIB)
}

/// What is wrong with a region.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegionProblem {
    /// It cannot be opened or read, or is no file.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// Truncated or grown.
    #[error("has {found} bytes instead of {expected}")]
    Size {
        /// Its size.
        found: u64,
        /// What it must be.
        expected: u64,
    },
    /// Not a region of this version.
    #[error("is invalid: {0}")]
    Content(RegionError),
    /// More slots in use than there are.
    #[error("reports {0} slots in use")]
    Slots(u64),
    /// Its total is less than what its slots hold.
    #[error("reports {total_bytes} bytes in use, but its processes use {held_bytes}")]
    Total {
        /// What the header says.
        total_bytes: u64,
        /// Sum of the slots.
        held_bytes: u64,
    },
}

/// A region that could be read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RegionView {
    /// Bytes taken by all processes.
    pub total_bytes: u64,
    /// Highest total.
    pub peak_bytes: u64,
    /// Allocations denied.
    pub denied: u64,
    /// When a process last took GPU time or waited for it, µs of `CLOCK_MONOTONIC`; 0 is never.
    pub last_demand_us: u64,
    /// Its slots.
    pub processes: Vec<ProcessUsage>,
}

/// A share as seen in one look.
#[derive(Debug, Clone)]
pub struct ShareView<Id> {
    /// Which.
    pub id: Id,
    /// Limit of its page.
    pub limit_bytes: Option<u64>,
    /// Its region.
    pub region: Result<RegionView, RegionProblem>,
}

/// A process that NVML lists on the card, and what `/proc` says about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess<Id> {
    /// PID on the host.
    pub pid: u32,
    /// Name of its program.
    pub name: String,
    /// How it appears in a slot.
    pub owner: Owner,
    /// Device memory by NVML; `None` where it does not say.
    pub used_bytes: Option<u64>,
    /// Shares of this card that its container has.
    pub shares: Vec<Id>,
}

/// What may be wrong with a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suspicion {
    /// It uses more than its limit.
    OverLimit {
        /// By NVML.
        used_bytes: u64,
        /// Limit of the share, or of all shares that its containers have of the card.
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
    },
    /// Its region cannot be used.
    Region(RegionProblem),
}

/// Kinds of suspicion, each told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// [`Suspicion::OverLimit`]
    OverLimit,
    /// [`Suspicion::NotCounted`]
    NotCounted,
    /// [`Suspicion::Region`]
    Region,
}

impl Suspicion {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::OverLimit { .. } => Kind::OverLimit,
            Self::NotCounted { .. } => Kind::NotCounted,
            Self::Region(_) => Kind::Region,
        }
    }
}

/// Checks the figures of a region against each other.
///
/// # Errors
/// What is wrong.
pub fn check(region: RegionView) -> Result<RegionView, RegionProblem> {
    let held_bytes = region
        .processes
        .iter()
        .fold(0u64, |sum, process| sum.saturating_add(process.used_bytes));
    if held_bytes > region.total_bytes.saturating_add(TORN_BYTES) {
        return Err(RegionProblem::Total {
            total_bytes: region.total_bytes,
            held_bytes,
        });
    }
    Ok(region)
}

/// Looks at the shares of one card.
#[must_use]
pub fn look<Id: Ord + Copy>(
    shares: &[ShareView<Id>],
    processes: &[GpuProcess<Id>],
) -> Vec<(Id, Suspicion)> {
    let mut found = Vec::new();
    for share in shares {
        if let Err(problem) = &share.region {
            found.push((share.id, Suspicion::Region(problem.clone())));
        }
    }
    for process in processes {
        let is_counted = process
            .shares
            .iter()
            .any(|id| is_counted(shares, *id, process.owner));
        if let Some(first) = process.shares.first()
            && !is_counted
        {
            found.push((
                *first,
                Suspicion::NotCounted {
                    pid: process.pid,
                    name: process.name.clone(),
                },
            ));
        }
    }
    // A process may take from any share that its container has, so shares are judged together that somebody has
    // together.
    for group in groups(shares, processes) {
        let Some(first) = group.first().copied() else {
            continue;
        };
        let limits = group.iter().map(|id| {
            shares
                .iter()
                .find(|share| share.id == *id)
                .and_then(|share| share.limit_bytes)
        });
        let Some(limit_bytes) = limits.sum::<Option<u64>>() else {
            continue;
        };
        let members: Vec<_> = processes
            .iter()
            .filter(|p| p.shares.iter().any(|id| group.contains(id)))
            .collect();
        let used_bytes = members
            .iter()
            .filter_map(|process| process.used_bytes)
            .fold(0, u64::saturating_add);
        if used_bytes > limit_bytes.saturating_add(slack(members.len())) {
            let pids = members.iter().map(|process| process.pid).collect();
            found.push((
                first,
                Suspicion::OverLimit {
                    used_bytes,
                    limit_bytes,
                    pids,
                },
            ));
        }
    }
    found
}

fn is_counted<Id: Ord + Copy>(shares: &[ShareView<Id>], id: Id, owner: Owner) -> bool {
    let share = shares.iter().find(|share| share.id == id);
    match share.map(|share| &share.region) {
        Some(Ok(region)) => region
            .processes
            .iter()
            .any(|process| process.owner == owner),
        // Who counts in a damaged region cannot be known; the damage itself is told.
        Some(Err(_)) => true,
        None => false,
    }
}

/// The shares, put together where a process has several.
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

/// What changed for a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// A suspicion was confirmed, for the first time or again after it was over.
    Confirmed(Suspicion),
    /// A breach is over.
    Over(Kind),
}

/// Confirms suspicions.
#[derive(Debug, Clone)]
pub struct Judge<Id> {
    cases: BTreeMap<(Id, Kind), Case>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Case {
    seen: u32,
    healthy: u32,
    is_told: bool,
}

impl<Id> Default for Judge<Id> {
    fn default() -> Self {
        Self {
            cases: BTreeMap::new(),
        }
    }
}

impl<Id: Ord + Copy> Judge<Id> {
    /// Whether enough looks in a row have shown it.
    #[must_use]
    pub fn is_confirmed(&self, id: Id, kind: Kind) -> bool {
        self.cases
            .get(&(id, kind))
            .is_some_and(|case| case.seen >= CONFIRMATIONS)
    }

    /// Takes one look at the shares of a card, all of them.
    pub fn hear(&mut self, shares: &[Id], found: Vec<(Id, Suspicion)>) -> Vec<(Id, News)> {
        let mut news = Vec::new();
        let mut seen = BTreeMap::new();
        for (id, suspicion) in found {
            // One of each kind is enough; which process it is, people find out from the first.
            seen.entry((id, suspicion.kind())).or_insert(suspicion);
        }
        for key in seen.keys() {
            self.cases.entry(*key).or_default();
        }
        self.cases.retain(|key, case| {
            if let Some(suspicion) = seen.remove(key) {
                case.seen = case.seen.saturating_add(1);
                case.healthy = 0;
                if case.seen >= CONFIRMATIONS && !case.is_told {
                    case.is_told = true;
                    news.push((key.0, News::Confirmed(suspicion)));
                }
                return true;
            }
            if !shares.contains(&key.0) {
                return false;
            }
            case.seen = 0;
            case.healthy += 1;
            if case.is_told && case.healthy == HEALTHY {
                news.push((key.0, News::Over(key.1)));
            }
            case.is_told && case.healthy < HEALTHY
        });
        news
    }
}
