//! Rate limit of notifications. Pure.

/// Notifications in a row that are accepted at once.
pub const BURST: u32 = 64;

/// Time for which one more notification is accepted after a burst, µs.
pub const REFILL_US: u64 = 2_000;

/// Accepts [`BURST`] notifications in a row, and then one per [`REFILL_US`].
#[derive(Debug, Clone, Copy)]
pub struct RateLimiter {
    remaining: u32,
    since_us: u64,
}

impl Default for RateLimiter {
    fn default() -> Self {
        Self {
            remaining: BURST,
            since_us: 0,
        }
    }
}

impl RateLimiter {
    /// Returns when the next notification is accepted, µs; not before `now_us`.
    #[must_use]
    pub fn next_us(&self, now_us: u64) -> u64 {
        if self.remaining > 0 {
            now_us
        } else {
            (self.since_us + REFILL_US).max(now_us)
        }
    }

    /// Counts a notification that was accepted at `now_us`.
    pub fn accept(&mut self, now_us: u64) {
        let refilled = now_us.saturating_sub(self.since_us) / REFILL_US;
        let remaining = u64::from(self.remaining).saturating_add(refilled);
        self.since_us = match remaining >= u64::from(BURST) {
            true => now_us,
            false => self.since_us + refilled * REFILL_US,
        };
        let remaining = u32::try_from(remaining).unwrap_or(BURST).min(BURST);
        self.remaining = remaining.saturating_sub(1);
    }
}
