//! The debt bucket: how a share's GPU time is granted, taken and repaid.
//!
//! One credit per share, in microseconds of GPU time, in the header of its region. Time fills it at the granted
//! rate, launches take from it, and whoever looks at it fills it first, so that no process and no thread has to be
//! there for the others.
//!
//! ```text
//! refill:  refilled := now (compare-and-swap; one of those who look wins) │ credit += time passed × rate, up to a cap
//! take x:  credit −= x if credit is above zero (compare-and-swap)
//! settle:  credit += x or −= x, when events have measured what a launch really took
//! ```
//!
//! Invariants, whatever dies after whichever step:
//! - **A launch needs credit above zero, not credit for all of it**: one overdraft, then everybody waits until it is
//!   repaid. So a kernel of any length can run, and over time no share gets more than its rate.
//! - **No stretch of time is paid out twice**: only who has moved `refilled` adds for it. Who dies between the two
//!   steps costs the share that stretch, at most [`MAX_REFILL_US`].
//! - Nobody waits for a process: what ends a wait is the clock.
//!
//! In its own turn with the token a share may go deeper into debt: [`Grant::may_overdraw`].
//!
//! A thread takes leases of up to [`LEASE_US`] and spends them launch by launch without touching shared memory. What
//! it has not spent when it ends is lost, which is less than a lease.
//!
//! **What the node agent does with it**: it writes rates and tokens into the limits page and reads the sums in the
//! slots. It writes nothing here.

use crate::atomic::Word;
use crate::limits::{ComputePolicy, Limits};
use crate::region::Header;

/// What a thread takes at once, microseconds of GPU time.
pub const LEASE_US: u64 = 1_000;

/// For how long an idle share keeps what its rate gives, microseconds. The most that it can use beyond its rate in
/// any stretch of time, apart from one overdraft, is the rate times this.
pub const BURST_US: u64 = 50_000;

/// The same in token mode: what may lie in the card's queues when a slice ends.
pub const TOKEN_BURST_US: u64 = 2_000;

/// The longest time that is paid out at once, microseconds; more than any burst.
pub const MAX_REFILL_US: u64 = 1_000_000;

/// The longest sleep of a waiting launch before it looks again, microseconds: so fast does it see a new rate.
pub const MAX_SLEEP_US: u64 = 5_000;

/// After waiting for so long without a token, or at a rate of nothing, a launch goes ahead, microseconds. A kernel
/// that waits for one on another card, whose launch waits here, cannot wait forever.
pub const MAX_ADMISSION_WAIT_US: u64 = 500_000;

/// A token that ended longer ago than this was given by an agent that is gone, microseconds.
pub const TOKEN_ABANDONED_US: u64 = 3_000_000;

/// A token beyond this is none, microseconds: a torn or damaged word.
pub const MAX_TOKEN_US: u64 = 1_000_000;

/// A launch of at least this length is counted as long, microseconds: ten slices of 50 ms.
pub const LONG_KERNEL_US: u64 = 500_000;

/// A moment until which a share gives way that is further away than this is none, microseconds: damage.
pub const MAX_YIELD_US: u64 = 100_000;

/// A share whose time others use calls the agent if it has wanted none for so long, microseconds: more than a launch that
/// waits sleeps, so that a pause costs one call, and less than the agent needs to see that somebody is idle.
pub const IDLE_US: u64 = 4 * MAX_SLEEP_US;

/// A share that calls the agent does so if its work so far ends within this time, microseconds: otherwise the agent looks
/// again before that end.
pub const NOTIFY_AHEAD_US: u64 = 1_000;

/// A kernel is not taken to be under way for longer than this, microseconds.
const MAX_BUSY_US: u64 = 60_000_000;

/// Debt beyond this is damage, not debt, microseconds.
const MAX_DEBT_US: i64 = 3_600_000_000;

/// Microseconds in a second.
pub const SECOND_US: u64 = 1_000_000;

/// Microseconds of GPU time per percent of a card in one second.
pub const US_PER_PERCENT: u32 = 10_000;

/// What a share may do with the card at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// It launches as it likes; GPU time is counted, not limited.
    Free,
    /// It gets so many microseconds of GPU time per second. 0 stops it, but for [`MAX_ADMISSION_WAIT_US`].
    Rate(u32),
    /// It has the token, and with it the whole card, until this moment.
    Token {
        /// Microseconds of `CLOCK_MONOTONIC`.
        until_us: u64,
    },
    /// Another share has the token.
    NoToken {
        /// When this one's next turn begins, microseconds of `CLOCK_MONOTONIC`; a moment that has passed where that is
        /// not known yet.
        from_us: u64,
    },
}

/// A turn with the token, in microseconds of `CLOCK_MONOTONIC`. Told before it begins, so that the card is not idle
/// between two of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenSlice {
    /// Its first moment.
    pub from_us: u64,
    /// The first moment after it; 0 if there never was a turn.
    pub until_us: u64,
}

impl Grant {
    /// What the limits page grants.
    ///
    /// | Policy | Agent | Grant |
    /// |---|---|---|
    /// | none | – | free |
    /// | balance, fixed | has set a rate | that rate; free from a whole card up |
    /// | balance, fixed | has not | the guarantee; free if there is none |
    /// | token | gives tokens | the token, or none |
    /// | token | never gave one, or not for [`TOKEN_ABANDONED_US`] | as balance |
    #[must_use]
    pub fn of(limits: &Limits, turn: TokenSlice, now_us: u64) -> Self {
        let TokenSlice { from_us, until_us } = turn;
        match limits.compute_policy {
            ComputePolicy::None => Self::Free,
            ComputePolicy::Balance | ComputePolicy::Fixed => Self::by_rate(limits),
            ComputePolicy::Token => {
                let is_damaged = until_us > now_us.saturating_add(MAX_TOKEN_US);
                let is_abandoned = until_us.saturating_add(TOKEN_ABANDONED_US) < now_us;
                if is_damaged || is_abandoned {
                    Self::by_rate(limits)
                } else if (from_us..until_us).contains(&now_us) {
                    Self::Token { until_us }
                } else {
                    Self::NoToken { from_us }
                }
            }
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

    /// The credit that a waiting launch goes on with, microseconds: what one sleep brings, and at most a lease.
    #[must_use]
    pub fn resume_credit_us(self) -> u64 {
        let (rate, _) = self.rate_and_cap();
        (rate * MAX_SLEEP_US / SECOND_US).clamp(1, LEASE_US)
    }

    /// For how long waiting is all that a launch can do, microseconds: until the share's turn, if that is known.
    #[must_use]
    pub fn starts_in_us(self, now_us: u64) -> Option<u64> {
        match self {
            Self::NoToken { from_us } => from_us.checked_sub(now_us),
            Self::Free | Self::Rate(_) | Self::Token { .. } => None,
        }
    }

    /// Whether a launch goes ahead whatever the share owes: in its own turn nobody else can use the card, and what its
    /// processes owe may be a wrong guess.
    ///
    /// One does with nothing under way, unless most of it would run in the next one's turn. Where launches of its kind
    /// differ, the one that is under way may end at any moment, and another one waits behind it if both are likely to end
    /// within the turn. Otherwise the card would be idle after each short one, for as long as it takes to see its end.
    #[must_use]
    pub fn may_overdraw(self, launch: NextLaunch, now_us: u64) -> bool {
        let Self::Token { until_us } = self else {
            return false;
        };
        let left_us = until_us.saturating_sub(now_us);
        match launch.in_flight {
            0 => launch.us / 2 <= left_us,
            1 => launch.is_variable && launch.us.saturating_add(launch.in_flight_us) <= left_us,
            _ => false,
        }
    }

    /// Up to which moment time is paid out. Who knows when its turn begins has a burst then, however late it looked
    /// before: the card is busy from the beginning on.
    fn refill_until_us(self, now_us: u64) -> u64 {
        match self {
            Self::NoToken { from_us } if from_us > now_us => {
                now_us.min(from_us.saturating_sub(TOKEN_BURST_US))
            }
            Self::NoToken { .. } | Self::Token { .. } | Self::Free | Self::Rate(_) => now_us,
        }
    }

    /// Microseconds of GPU time that it fills the bucket with per second, and the most that the bucket holds.
    fn rate_and_cap(self) -> (u64, u64) {
        match self {
            Self::Rate(rate) => {
                let rate = u64::from(rate);
                // So much that every look at least at the lowest rate finds a whole lease some day.
                (rate, (rate * BURST_US / SECOND_US).max(LEASE_US))
            }
            // Who may have all of the card needs no credit. What it saved would be a burst at the expense of whoever
            // wants the card back.
            Self::Free => (SECOND_US, 0),
            Self::Token { .. } => (SECOND_US, TOKEN_BURST_US),
            // What runs on after a turn is repaid while it does; the agent takes it off the next turns.
            Self::NoToken { .. } => (SECOND_US, 0),
        }
    }
}

/// A launch that is to be made, and what its process launched before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextLaunch {
    /// What it is charged, microseconds.
    pub us: u64,
    /// Whether launches of its kind differ in length.
    pub is_variable: bool,
    /// Launches whose ends were not seen yet.
    pub in_flight: usize,
    /// What these were charged together, microseconds.
    pub in_flight_us: u64,
}

/// For how long a share makes no launches whose page says that it gives way until that moment, microseconds.
#[must_use]
pub fn yields_for_us(until_us: u64, now_us: u64) -> Option<u64> {
    let left = until_us.checked_sub(now_us)?;
    (1..=MAX_YIELD_US).contains(&left).then_some(left)
}

/// Whether a share that wants time now, and last wanted some at `last_demand_us`, is to call for what others use of it.
#[must_use]
pub fn resumes_demand(last_demand_us: u64, now_us: u64) -> bool {
    // Clocks of two threads may cross; a moment that is far ahead is damage, and keeps nobody from calling.
    last_demand_us.abs_diff(now_us) >= IDLE_US
}

/// Why nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InDebt {
    /// Microseconds of `CLOCK_MONOTONIC` after which it is worth looking again, from now.
    pub retry_after_us: u64,
}

/// The bucket of a share, as its processes see it.
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
    /// The bucket in that header.
    #[must_use]
    pub fn new(header: &'a Header<A>) -> Self {
        Self { header }
    }

    /// Microseconds of GPU time that the share may still use; negative is debt.
    #[must_use]
    pub fn credit_us(&self) -> i64 {
        self.header.credit_us.load().cast_signed()
    }

    /// Notes that somebody wants GPU time now, and says when somebody did before.
    pub fn record_demand(&self, now_us: u64) -> u64 {
        let before_us = self.header.last_demand_us.load();
        self.header.last_demand_us.store(now_us);
        before_us
    }

    /// Notes that the card will be busy for `us` more with what is launched now, and says whether the agent is to be told:
    /// what was launched before is over, or nearly.
    pub fn extend_busy_until(&self, us: u64, now_us: u64) -> bool {
        // Beyond that it is damage.
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

    /// Counts a launch that went ahead because its patience was at an end.
    pub fn count_admission_timeout(&self) {
        self.header.admission_timeouts.fetch_add(1);
    }

    /// Pays out the time since the last refill.
    pub fn refill(&self, grant: Grant, now_us: u64) {
        let (rate, cap) = grant.rate_and_cap();
        let now_us = grant.refill_until_us(now_us);
        let since = self.header.refilled_us.load();
        if since > now_us && since - now_us < MAX_REFILL_US {
            // Somebody looked later and was faster.
            return;
        }
        // A clock that went backwards by more is that of another boot, or damage.
        let passed = now_us.saturating_sub(since).min(MAX_REFILL_US);
        let gain = passed * rate / SECOND_US;
        if now_us >= since && gain == 0 && rate != 0 {
            // Left to add up: at a low rate every look is too early for a whole microsecond.
            return;
        }
        // What does not make a whole microsecond of GPU time is left for the next refill, in whole microseconds of the
        // clock: up or down by chance, so that looks at a regular pace lose nothing.
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

    /// Takes `need_us`, and as much more as there is up to `lease_us`, if the credit is at least `least_us`, and above
    /// zero. Returns how much.
    ///
    /// Who has begun to wait does better to wait for [`Grant::resume_credit_us`]: a sleep per launch would cost more
    /// than short launches do.
    ///
    /// # Errors
    /// [`InDebt`] if there is less; nothing is taken then.
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

    /// Gives `us` back.
    pub fn repay(&self, us: u64) {
        self.header
            .credit_us
            .fetch_add(us.min(MAX_DEBT_US.cast_unsigned()));
    }
}

/// A number below `bound`, or 0, that has nothing to do with how regular the clock is looked at.
fn dither(now_us: u64, bound: u64) -> u64 {
    let mixed = now_us.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
    // 32 bits times less than 2^20.
    (mixed * bound) >> 32
}

fn charged(credit: i64, taken: u64) -> i64 {
    credit.saturating_sub(i64::try_from(taken).unwrap_or(i64::MAX))
}

/// After how many microseconds it is worth looking at a credit again, at the grant's rate; not more than one sleep.
fn retry_after_us(credit: i64, grant: Grant) -> u64 {
    if let Grant::NoToken { .. } = grant {
        return MAX_SLEEP_US;
    }
    let (rate, _) = grant.rate_and_cap();
    let wanted = i64::try_from(grant.resume_credit_us()).unwrap_or(1);
    let missing = wanted.saturating_sub(credit).unsigned_abs();
    missing
        .saturating_mul(SECOND_US)
        .div_ceil(rate.max(1))
        .clamp(1, MAX_SLEEP_US)
}
