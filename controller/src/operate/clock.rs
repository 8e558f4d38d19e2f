//! Clock for the validity of the lease.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Monotonic clock that counts the time for which the machine was suspended.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Duration + Send + Sync>);

impl Clock {
    /// Returns the time since boot, `CLOCK_BOOTTIME`.
    #[must_use]
    pub fn boot() -> Self {
        Self::new(|| {
            let time = clock_gettime(ClockId::Boottime);
            // Both fields of the time since boot are positive.
            Duration::new(
                u64::try_from(time.tv_sec).unwrap_or_default(),
                u32::try_from(time.tv_nsec).unwrap_or_default(),
            )
        })
    }

    /// Creates a clock that returns `now()`.
    #[must_use]
    pub fn new(now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Returns the time since the clock's origin.
    #[must_use]
    pub fn now(&self) -> Duration {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clock").field(&self.now()).finish()
    }
}
