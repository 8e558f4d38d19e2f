//! Priority arbitration between the shares of one GPU. Pure: no I/O, no clock.
//!
//! A busy share reports its expected end (`busy_until_us`). Until then, shares of lower priority yield: their launches
//! wait. Otherwise the GPU would alternate between both, and each request of the busy share would take twice as long. A
//! yield expires by itself, so a crashed agent stalls no share.
//!
//! **A multi-kernel request counts as one.** A program that awaits each of its kernels leaves gaps, in which a kernel of any
//! length from a yielding share could start; and work that had to wait for the GPU ends later than reported. So shares yield
//! a little longer: for a quarter of the work, and for [`HOLDOFF_US`] after recent multi-kernel requests, within a budget of a
//! tenth of the time. After the third and later kernels of a request, which no kernel of a yielding share delayed, the
//! hold-off is [`GAP_US`].
//!
//! **No share starves, whatever another reports.** Yielded time counts against the guarantee of the yielding share, or the
//! floor. A share with a deficit of [`MAX_DEFICIT_US`] stops yielding until it is repaid. Values written by tenants have no
//! influence on that.

use std::collections::BTreeMap;

use drava_vgpu_abi::Priority;

/// Latest end of a yield, from now, µs; earlier than what libvgpu accepts.
pub const AHEAD_US: u64 = 50_000;

/// Yielded part of a guarantee after which a share stops yielding, µs; also the most it can get in advance.
pub const MAX_DEFICIT_US: u64 = 10_000;

/// Allowance for work that had to wait for the GPU: the fraction 1/`DELAY_FRACTION` of the work, within the bounds
/// `DELAY_BOUNDS_US`, µs.
const DELAY_FRACTION: u64 = 4;
const DELAY_BOUNDS_US: (u64, u64) = (50, 1_000);

/// Time on the host between two kernels of a request, µs.
pub const GAP_US: u64 = 500;

/// Hold-off when a kernel of a yielding share, of a millisecond, may have delayed the request.
pub const HOLDOFF_US: u64 = GAP_US + 1_000;

/// Budget of hold-offs: the fraction 1/`HOLDOFF_BUDGET` of the time, saved up to `MAX_SAVED_US`, µs.
const HOLDOFF_BUDGET: u64 = 10;
const MAX_SAVED_US: u64 = 20_000;

/// Single-kernel requests after which a share no longer counts as one of multi-kernel requests.
const MULTI_KERNEL_MEMORY: u8 = 4;

/// Time before the end of work at which the share is polled, µs.
const POLL_AHEAD_US: u64 = 500;

/// Bounds of the time between two polls of a busy share, µs.
const POLL_US: (u64, u64) = (200, 5_000);

const MILLION: i64 = 1_000_000;

/// A metered share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareState<Id> {
    /// The share.
    pub id: Id,
    /// Its priority.
    pub priority: Priority,
    /// Time that it gets however long other shares are busy, µs of GPU time per second.
    pub guarantee: i64,
    /// Reported end of its work, µs; in the past if it is idle.
    pub busy_until_us: u64,
}

/// Time that one share yielded and got.
#[derive(Debug, Clone, Copy)]
struct Account {
    /// Guaranteed time less time got, µs in millionths.
    deficit: i64,
    has_deficit: bool,
    /// End of its yield.
    until_us: u64,
    /// Its part of the GPU while it does not yield, in millionths.
    part: i64,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            deficit: 0,
            has_deficit: false,
            until_us: 0,
            part: MILLION,
        }
    }
}

/// Work of a share that others may yield to.
#[derive(Debug, Clone, Copy, Default)]
struct BusyTracker {
    /// Earned hold-off: by the work, µs, and by time, µs in parts of [`HOLDOFF_BUDGET`].
    earned_us: u64,
    saved: u64,
    /// The request in progress.
    period: Option<BusyPeriod>,
    /// End of the last work, µs.
    worked_until_us: u64,
    /// Remaining single-kernel requests after which it still counts as a share of multi-kernel requests.
    multi_kernel: u8,
}

/// A request, µs.
#[derive(Debug, Clone, Copy)]
struct BusyPeriod {
    /// Reported end.
    busy_until_us: u64,
    /// End of the yield.
    end_us: u64,
    /// Kernels so far.
    kernels: u8,
}

/// Arbitrates between the shares of one GPU.
#[derive(Debug, Clone)]
pub struct PriorityArbiter<Id> {
    accounts: BTreeMap<Id, Account>,
    trackers: BTreeMap<Id, BusyTracker>,
    polled_us: u64,
    next_us: u64,
}

impl<Id> Default for PriorityArbiter<Id> {
    fn default() -> Self {
        Self {
            accounts: BTreeMap::new(),
            trackers: BTreeMap::new(),
            polled_us: 0,
            next_us: u64::MAX,
        }
    }
}

impl<Id: Ord + Copy> PriorityArbiter<Id> {
    /// Returns the time of the next poll without a notification, µs.
    #[must_use]
    pub fn next_us(&self) -> u64 {
        self.next_us
    }

    /// Whether the share yields at `now_us`.
    #[must_use]
    pub fn yields(&self, id: Id, now_us: u64) -> bool {
        let account = self.accounts.get(&id);
        account.is_some_and(|account| account.until_us > now_us)
    }

    /// Returns the end of each share's yield, µs; 0 if it does not yield.
    pub fn poll(&mut self, now_us: u64, shares: &[ShareState<Id>]) -> Vec<(Id, u64)> {
        let is_present = |id: &Id| shares.iter().any(|share| share.id == *id);
        self.accounts.retain(|id, _| is_present(id));
        self.trackers.retain(|id, _| is_present(id));
        let last_us = match std::mem::replace(&mut self.polled_us, now_us) {
            0 => now_us,
            last_us => last_us,
        };
        let busy: Vec<(&ShareState<Id>, BusyPeriod)> = shares
            .iter()
            .filter_map(|share| {
                let tracker = self.trackers.entry(share.id).or_default();
                tracker.update(last_us, now_us, share.busy_until_us);
                Some((share, tracker.period?))
            })
            .collect();
        let yields = shares.iter().map(|share| {
            let above = || busy.iter().filter(|(of, _)| of.priority > share.priority);
            let account = self.accounts.entry(share.id).or_default();
            account.update(last_us, now_us, share.guarantee);
            // The GPU divides time evenly.
            let others = i64::try_from(above().count()).unwrap_or(i64::MAX - 1);
            account.part = MILLION / (1 + others);
            let until_us = above().map(|(_, period)| period.end_us).max().unwrap_or(0);
            account.until_us = if account.has_deficit { 0 } else { until_us };
            (share.id, account.until_us)
        });
        let yields = yields.collect();
        self.next_us = next_us(now_us, busy.iter().map(|(_, period)| period));
        yields
    }
}

impl BusyTracker {
    /// Applies the reported end of the share's work.
    fn update(&mut self, last_us: u64, now_us: u64, busy_until_us: u64) {
        let most = HOLDOFF_BUDGET * MAX_SAVED_US;
        let passed_us = now_us.saturating_sub(last_us).min(most);
        self.saved = (self.saved + passed_us).min(most);
        let (shortest, longest) = DELAY_BOUNDS_US;
        if let Some(period) = self.period {
            let from_us = period.busy_until_us.saturating_add(shortest).max(last_us);
            self.spend(period.end_us.min(now_us).saturating_sub(from_us));
        }
        if busy_until_us <= now_us {
            self.period = self.period.filter(|period| period.end_us > now_us);
            return;
        }
        let continues = self.continues(now_us, busy_until_us);
        let before = self.period.filter(|period| period.end_us > now_us);
        let kernels = before.map_or(1, |period| {
            period.kernels.saturating_add(u8::from(continues))
        });
        let holdoff_us = match kernels {
            // A kernel launched before the yield may have delayed the first two.
            0..=2 => HOLDOFF_US,
            _ => GAP_US,
        };
        let before_us = self
            .period
            .map_or(now_us, |period| period.busy_until_us.max(now_us));
        let work_us = busy_until_us.saturating_sub(before_us);
        self.earned_us = self
            .earned_us
            .saturating_add(work_us / DELAY_FRACTION)
            .min(longest);
        let saved_us = match self.multi_kernel {
            0 => shortest,
            _ => (self.saved / HOLDOFF_BUDGET).clamp(shortest, holdoff_us),
        };
        let end_us = busy_until_us.saturating_add(self.earned_us.max(saved_us));
        self.period = Some(BusyPeriod {
            busy_until_us,
            end_us: end_us.min(now_us.saturating_add(AHEAD_US)),
            kernels,
        });
    }

    /// Returns whether work until `busy_until_us` is another kernel of the same request.
    fn continues(&mut self, now_us: u64, busy_until_us: u64) -> bool {
        let idle_us = now_us.saturating_sub(self.worked_until_us);
        self.worked_until_us = busy_until_us;
        self.multi_kernel = match idle_us {
            0 => self.multi_kernel,
            1..=HOLDOFF_US => MULTI_KERNEL_MEMORY,
            _ => self.multi_kernel.saturating_sub(1),
        };
        (1..=HOLDOFF_US).contains(&idle_us)
    }

    /// Deducts time that others have yielded after the work.
    fn spend(&mut self, us: u64) {
        let earned_us = us.min(self.earned_us);
        self.earned_us -= earned_us;
        self.saved = self.saved.saturating_sub(HOLDOFF_BUDGET * (us - earned_us));
    }
}

fn next_us<'a>(now_us: u64, periods: impl Iterator<Item = &'a BusyPeriod>) -> u64 {
    let (shortest, longest) = POLL_US;
    let soonest = periods
        .flat_map(|period| {
            let ends_us = period.busy_until_us.min(period.end_us);
            let early_us = ends_us.saturating_sub(POLL_AHEAD_US);
            [early_us, ends_us, period.end_us]
        })
        .filter(|poll_us| *poll_us > now_us)
        .min();
    soonest.map_or(u64::MAX, |soonest| {
        soonest.clamp(now_us + shortest, now_us + longest)
    })
}

impl Account {
    /// Counts the time since the last poll.
    fn update(&mut self, last_us: u64, now_us: u64, guarantee: i64) {
        const MOST: i64 = MAX_DEFICIT_US.cast_signed() * MILLION;
        // A longer pause repays any deficit.
        let passed_us = now_us.saturating_sub(last_us).min(1_000_000);
        let yielded_us = self.until_us.min(now_us).saturating_sub(last_us);
        let got_us = passed_us.saturating_sub(yielded_us).cast_signed();
        self.deficit += guarantee * passed_us.cast_signed() - self.part * got_us;
        self.deficit = self.deficit.clamp(-MOST, MOST);
        self.has_deficit = self.deficit >= MOST || (self.has_deficit && self.deficit > 0);
    }
}
