//! Division of the time of a GPU. Pure.
//!
//! All values are microseconds of GPU time per second, so a GPU has [`GPU`] of them.
//!
//! 1. Each share gets its guarantee, or less if it demands less. A best-effort share, which has no guarantee, gets the
//!    [`floor`], so that it does not starve.
//! 2. The rest goes to shares that may borrow idle time: by priority, and within a priority by weight.
//!
//! An idle share is allotted nothing, but [`Allotment::rate`] is what it may use at once when it resumes.

use drava_vgpu_abi::{Cores, Priority};

/// All the time of a GPU.
pub const GPU: i64 = 1_000_000;

/// One percent of a GPU.
const PERCENT: i64 = GPU / 100;

/// What a best-effort share gets on a busy GPU.
const FLOOR: i64 = PERCENT;

/// What all best-effort shares together get on a busy GPU. If guarantees use the whole GPU, each provides a part.
const FLOORS: i64 = 2 * PERCENT;

/// Whether a share may use idle time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Borrowing {
    /// It may.
    Allowed,
    /// It may not.
    Denied,
}

/// How much time a share demands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Demand {
    /// None.
    #[default]
    Idle,
    /// About this much; it is not throttled.
    UpTo(i64),
    /// More than it gets.
    All,
}

/// A metered share of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareDemand {
    /// Guaranteed time.
    pub cores: Cores,
    /// Whether it may have more.
    pub borrowing: Borrowing,
    /// Priority for idle time.
    pub priority: Priority,
    /// Demand.
    pub demand: Demand,
}

/// What a share may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allotment {
    /// Its part of the GPU. The sum of all parts is at most the GPU.
    pub part: i64,
    /// What it may use until the next control period: more than its part if it demands less than its guarantee.
    pub rate: i64,
}

/// Returns the guaranteed time.
#[must_use]
pub fn guarantee(cores: Cores) -> i64 {
    i64::from(cores.percent()) * PERCENT
}

impl ShareDemand {
    fn guarantee(&self) -> i64 {
        guarantee(self.cores)
    }

    /// Weight for idle time. A best-effort share has the weight of the smallest guarantee.
    fn weight(&self) -> i64 {
        i64::from(self.cores.percent()).max(1)
    }

    fn demanded(&self) -> i64 {
        match self.demand {
            Demand::Idle => 0,
            Demand::UpTo(rate) => rate.clamp(0, GPU),
            Demand::All => GPU,
        }
    }

    /// What it gets before idle time is divided, with this floor.
    fn base(&self, floor: i64) -> i64 {
        let base = match self.guarantee() {
            0 => floor,
            guarantee => guarantee,
        };
        base.min(self.demanded())
    }
}

/// Returns what each of `count` best-effort shares with demand gets on a busy GPU.
#[must_use]
pub fn floor(count: usize) -> i64 {
    let count = i64::try_from(count).unwrap_or(i64::MAX).max(1);
    FLOOR.min(FLOORS / count).max(1)
}

/// Divides a GPU.
#[must_use]
pub fn allot(shares: &[ShareDemand]) -> Vec<Allotment> {
    let is_best_effort = |share: &ShareDemand| share.guarantee() == 0;
    let demanding = shares.iter().filter(|share| share.demand != Demand::Idle);
    let floor = floor(demanding.filter(|share| is_best_effort(share)).count());
    let sum = |of_best_effort: bool| -> i64 {
        let own = shares.iter();
        let own = own.filter(|share| is_best_effort(share) == of_best_effort);
        own.map(|share| share.base(floor)).sum()
    };
    let (guarantees, available) = (sum(false), GPU - sum(true));
    let scaled = |share: &ShareDemand| match share.base(floor) {
        base if guarantees > available && !is_best_effort(share) => base * available / guarantees,
        base => base,
    };
    let mut parts: Vec<i64> = shares.iter().map(scaled).collect();
    let mut idle = GPU - parts.iter().sum::<i64>();
    let mut priorities: Vec<Priority> = shares.iter().map(|share| share.priority).collect();
    priorities.sort_unstable_by(|a, b| b.cmp(a));
    priorities.dedup();
    for priority in priorities {
        idle = divide_idle_time(idle, shares, &mut parts, priority);
    }
    let allotments = shares.iter().zip(parts).map(|(share, part)| {
        let at_once = match share.borrowing {
            // Idle time without demand may be used before the next control period.
            Borrowing::Allowed => share.guarantee().max(part + idle),
            Borrowing::Denied => share.guarantee(),
        };
        Allotment {
            part,
            rate: at_once.max(part).max(floor).min(GPU),
        }
    });
    allotments.collect()
}

/// Adds `idle` time by weight to shares of this priority up to their demands, and returns the rest.
fn divide_idle_time(
    mut idle: i64,
    shares: &[ShareDemand],
    parts: &mut [i64],
    priority: Priority,
) -> i64 {
    loop {
        let is_open = |(share, part): &(&ShareDemand, &mut i64)| {
            share.borrowing == Borrowing::Allowed
                && share.priority == priority
                && **part < share.demanded()
        };
        let open = shares.iter().zip(&mut *parts).filter(is_open);
        let weights: i64 = open.map(|(share, _)| share.weight()).sum();
        if weights == 0 || idle < weights {
            return idle;
        }
        let round = idle;
        for (share, part) in shares.iter().zip(&mut *parts).filter(is_open) {
            let more = (round * share.weight() / weights).min(share.demanded() - *part);
            *part += more;
            idle -= more;
        }
    }
}
