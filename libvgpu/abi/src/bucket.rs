//! The debt bucket: how a share's GPU time is granted, charged and repaid.
//!
//! A share has one credit, in microseconds of GPU time, in the header of its region. Elapsed time fills the credit
//! at the granted rate, and launches consume it. Every process that reads the credit refills it first, so no
//! process depends on another.
//!
//! ```text
//! refill:  refilled := now (compare-and-swap; one of the readers wins) │ credit += elapsed time × rate, up to a cap
//! take x:  credit −= x if credit is above zero (compare-and-swap)
//! settle:  credit += x or −= x, when events have measured the real duration of a launch
//! ```
//!
//! Invariants, whichever process dies after whichever step:
//! - **A launch needs credit above zero, not credit for its whole cost**: one overdraft is possible, then all
//!   launches wait until it is repaid. So a kernel of any length can run, and over time no share gets more than its
//!   rate.
//! - **No interval is paid out twice**: only the process that moved `refilled` adds the credit. If it dies between
//!   the two steps, the share loses that interval, at most [`MAX_REFILL_US`].
//! - No process waits for another process: every wait has a deadline.
//!
//! A thread takes leases of up to [`LEASE_US`] and spends them launch by launch without touching shared memory. The
//! rest of a lease is lost when the thread ends.
//!
//! **Node agent**: it writes rates into the limits page and reads the sums in the slots. It writes nothing here.

use crate::atomic::Word;
use crate::limits::{ComputePolicy, Limits};
use crate::region::Header;

/// Size of a lease, microseconds of GPU time.
pub const LEASE_US: u64 = 1_000;

/// How long an idle share accumulates credit, microseconds. Apart from one overdraft, a share uses at most its rate
/// times this beyond its rate, in any interval.
pub const BURST_US: u64 = 50_000;

/// Longest interval that one refill pays out, microseconds; more than any burst.
pub const MAX_REFILL_US: u64 = 1_000_000;

/// Longest sleep of a waiting launch, microseconds: the delay until it sees a new rate.
pub const MAX_SLEEP_US: u64 = 5_000;

/// Longest wait of a launch at rate zero, microseconds; then the launch is admitted. Prevents a
/// deadlock with a kernel that waits for a kernel on another GPU whose launch waits here.
pub const MAX_ADMISSION_WAIT_US: u64 = 500_000;

/// A launch of at least this duration is counted as long, microseconds: ten times the burst.
pub const LONG_KERNEL_US: u64 = 500_000;

/// A yield that ends further ahead than this is ignored as damage, microseconds.
pub const MAX_YIELD_US: u64 = 100_000;

/// A share whose time is lent notifies the agent after this time without demand, microseconds. It exceeds the sleep
/// of a waiting launch, so a pause costs one notification, and is below the time that the agent needs to see an
/// idle share.
pub const IDLE_US: u64 = 4 * MAX_SLEEP_US;

/// A share notifies the agent if its queued work ends within this time, microseconds; otherwise the agent polls
/// before that end.
pub const NOTIFY_AHEAD_US: u64 = 1_000;

/// Longest accepted forecast of a busy GPU, microseconds.
const MAX_BUSY_US: u64 = 60_000_000;

/// Largest debt, microseconds; more is damage.
const MAX_DEBT_US: i64 = 3_600_000_000;

/// Most debt of a share that may use the whole GPU before further work is not charged, microseconds. A share that is limited
/// later has to wait until it is repaid.
pub const MAX_QUEUED_US: i64 = 1_000_000;

/// Microseconds per second.
pub const SECOND_US: u64 = 1_000_000;

/// Microseconds of GPU time per second for one percent of a GPU.
pub const US_PER_PERCENT: u32 = 10_000;

/// How a share may use the GPU at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// GPU time is counted, not limited.
    Free,
    /// Microseconds of GPU time per second. 0 stops the share, except for [`MAX_ADMISSION_WAIT_US`].
    Rate(u32),
}

impl Grant {
    /// Returns the grant that the limits page expresses.
    ///
    /// | Policy | Agent | Grant |
    /// |---|---|---|
    /// | none | – | free |
    /// | balance, fixed | has set a rate | that rate; free from a whole GPU up |
    /// | balance, fixed | has not | the guarantee; free if there is none |
    #[must_use]
    pub fn of(limits: &Limits) -> Self {
        match limits.compute_policy {
            ComputePolicy::None => Self::Free,
            ComputePolicy::Balance | ComputePolicy::Fixed => Self::by_rate(limits),
        }
    }

    fn by_rate(limits: &Limits) -> Self {
        let guarantee = limits.cores.percent().saturating_mul(US_PER_PERCENT);
        let rate = match limits.rate_us_per_s {
            Some(rate) => rate,
            None if guarantee == 0 => return Self::Free,
            None => guarantee,
        };
        if u64::from(rate) >= SECOND_US {
            Self::Free
        } else {
            Self::Rate(rate)
        }
    }

    /// Returns the credit at which a waiting launch resumes, microseconds: the gain of one sleep, at most a lease.
    #[must_use]
    pub fn resume_credit_us(self) -> u64 {
        let (rate, _) = self.rate_and_cap();
        (rate * MAX_SLEEP_US / SECOND_US).clamp(1, LEASE_US)
    }

    /// Returns the refill rate in microseconds of GPU time per second, and the cap of the credit.
    fn rate_and_cap(self) -> (u64, u64) {
        match self {
            Self::Rate(rate) => {
                let rate = u64::from(rate);
                // At least a lease, so that a share at the lowest rate eventually gets one.
                (rate, (rate * BURST_US / SECOND_US).max(LEASE_US))
            }
            // A share that may use the whole GPU accumulates no credit: it would become a burst at the expense of
            // the share that resumes.
            Self::Free => (SECOND_US, 0),
        }
    }
}

/// Returns how long a share yields, microseconds, if the page requests to yield until `until_us`.
#[must_use]
pub fn yields_for_us(until_us: u64, now_us: u64) -> Option<u64> {
    let left = until_us.checked_sub(now_us)?;
    (1..=MAX_YIELD_US).contains(&left).then_some(left)
}

/// Returns whether a share that needs GPU time now, and last did at `last_demand_us`, notifies the agent to reclaim
/// lent time.
#[must_use]
pub fn resumes_demand(last_demand_us: u64, now_us: u64) -> bool {
    // Clocks of two threads may cross. A time far ahead is damage and prevents no notification.
    last_demand_us.abs_diff(now_us) >= IDLE_US
}

/// Denial: the share is in debt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InDebt {
    /// Delay until the next attempt, microseconds.
    pub retry_after_us: u64,
}

/// A share's bucket.
pub struct Bucket<'a, A> {
    header: &'a Header<A>,
}

impl<A> Clone for Bucket<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Bucket<'_, A> {}

impl<'a, A: Word> Bucket<'a, A> {
    /// Returns the bucket in `header`.
    #[must_use]
    pub fn new(header: &'a Header<A>) -> Self {
        Self { header }
    }

    /// Returns the GPU time that the share may still use, microseconds; negative is debt.
    #[must_use]
    pub fn credit_us(&self) -> i64 {
        self.header.credit_us.load().cast_signed()
    }

    /// Records demand at `now_us` and returns the time of the previous demand.
    pub fn record_demand(&self, now_us: u64) -> u64 {
        let before_us = self.header.last_demand_us.load();
        self.header.last_demand_us.store(now_us);
        before_us
    }

    /// Extends the forecast of the busy GPU by `us` and returns whether to notify the agent: the previous work is
    /// finished, or nearly.
    pub fn extend_busy_until(&self, us: u64, now_us: u64) -> bool {
        // A later time is damage.
        let farthest = now_us.saturating_add(MAX_BUSY_US);
        let mut seen = self.header.busy_until_us.load();
        loop {
            let before = if seen <= farthest { seen } else { 0 };
            let until = before.max(now_us).saturating_add(us).min(farthest);
            match self.header.busy_until_us.compare_exchange(seen, until) {
                Ok(_) => return before < now_us.saturating_add(NOTIFY_AHEAD_US),
                Err(found) => seen = found,
            }
        }
    }

    /// Counts a launch that was admitted after [`MAX_ADMISSION_WAIT_US`].
    pub fn count_admission_timeout(&self) {
        self.header.admission_timeouts.fetch_add(1);
    }

    /// Pays out the time since the last refill.
    pub fn refill(&self, grant: Grant, now_us: u64) {
        let (rate, cap) = grant.rate_and_cap();
        let since = self.header.refilled_us.load();
        if since > now_us && since - now_us < MAX_REFILL_US {
            // Another process refilled at a later time.
            return;
        }
        // A clock that went back further is that of another boot, or damage.
        let passed = now_us.saturating_sub(since).min(MAX_REFILL_US);
        let gain = passed * rate / SECOND_US;
        if now_us >= since && gain == 0 && rate != 0 {
            // Keep the interval: at a low rate each refill would round to zero.
            return;
        }
        // The fraction of a microsecond of GPU time stays for the next refill, in whole microseconds of the clock.
        // Random rounding makes periodic refills lose nothing.
        let unpaid = passed * rate % SECOND_US;
        let rest = match (unpaid + dither(now_us, rate)).checked_div(rate) {
            Some(rest) if now_us > since => rest.min(passed),
            _ => 0,
        };
        let refilled = now_us.saturating_sub(rest);
        if self
            .header
            .refilled_us
            .compare_exchange(since, refilled)
            .is_ok()
        {
            self.deposit(gain, cap);
        }
    }

    fn deposit(&self, gain: u64, cap: u64) {
        let gain = i64::try_from(gain).unwrap_or(0);
        let cap = i64::try_from(cap).unwrap_or(0);
        let mut seen = self.header.credit_us.load();
        loop {
            let credit = seen.cast_signed();
            let credit = if credit < -MAX_DEBT_US { 0 } else { credit };
            let filled = credit.saturating_add(gain).min(cap);
            if filled == seen.cast_signed() {
                return;
            }
            match self
                .header
                .credit_us
                .compare_exchange(seen, filled.cast_unsigned())
            {
                Ok(_) => return,
                Err(found) => seen = found,
            }
        }
    }

    /// Takes `need_us`, and up to `lease_us` if the credit allows, if the credit is at least `least_us` and above
    /// zero. Returns the amount taken.
    ///
    /// A launch that waits passes [`Grant::resume_credit_us`]: one sleep per launch would cost more than a short
    /// launch.
    ///
    /// # Errors
    /// [`InDebt`] if the credit is lower; then nothing is taken.
    pub fn take(
        &self,
        grant: Grant,
        need_us: u64,
        least_us: u64,
        lease_us: u64,
    ) -> Result<u64, InDebt> {
        let mut seen = self.header.credit_us.load();
        loop {
            let credit = seen.cast_signed();
            let least = least_us.max(1);
            let available = u64::try_from(credit).ok();
            let Some(available) = available.filter(|&credit| credit >= least) else {
                return Err(InDebt {
                    retry_after_us: retry_after_us(credit, grant),
                });
            };
            let taken = need_us.max(available.min(lease_us));
            match self
                .header
                .credit_us
                .compare_exchange(seen, charged(credit, taken).cast_unsigned())
            {
                Ok(_) => return Ok(taken),
                Err(found) => seen = found,
            }
        }
    }

    /// Takes `us` whatever the credit.
    pub fn charge(&self, us: u64) {
        self.header
            .credit_us
            .fetch_sub(us.min(MAX_DEBT_US.cast_unsigned()));
    }

    /// Charges work of a share that may use the whole GPU, which is admitted at once: its debt is the work that the GPU has
    /// yet to do, up to [`MAX_QUEUED_US`].
    pub fn enqueue(&self, us: u64) {
        if self.credit_us() > -MAX_QUEUED_US {
            self.charge(us.min(MAX_QUEUED_US.cast_unsigned()));
        }
    }

    /// Returns `us` to the credit.
    pub fn repay(&self, us: u64) {
        self.header
            .credit_us
            .fetch_add(us.min(MAX_DEBT_US.cast_unsigned()));
    }
}

/// Returns a pseudo-random number below `bound`, or 0, independent of the refill period.
fn dither(now_us: u64, bound: u64) -> u64 {
    let mixed = now_us.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
    // 32 bits times less than 2^20.
    (mixed * bound) >> 32
}

fn charged(credit: i64, taken: u64) -> i64 {
    credit.saturating_sub(i64::try_from(taken).unwrap_or(i64::MAX))
}

/// Returns the delay after which the credit may suffice at the grant's rate, microseconds, at most one sleep.
fn retry_after_us(credit: i64, grant: Grant) -> u64 {
    let (rate, _) = grant.rate_and_cap();
    let wanted = i64::try_from(grant.resume_credit_us()).unwrap_or(1);
    let missing = wanted.saturating_sub(credit).unsigned_abs();
    missing
        .saturating_mul(SECOND_US)
        .div_ceil(rate.max(1))
        .clamp(1, MAX_SLEEP_US)
}
