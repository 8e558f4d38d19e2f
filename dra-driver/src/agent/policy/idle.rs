//! Idle shares: since when a share has used no GPU time. Pure.
//!
//! A period begins anew with each sign of GPU time, with each restart of the agent and when a suspended share is resumed: what was
//! not measured is not idle. The level is reported after a minute; a share whose level changes often is reported less often.

/// Time without GPU time after which a share is reported as idle, µs.
pub const FIRST_US: u64 = 60_000_000;

/// Longest such time, in first ones, and length of an idle period after which the next one is reported after the first time again.
const LAST_FACTOR: u64 = 10;

/// What one scan shows of a share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Evidence {
    /// GPU time counted by libvgpu, µs.
    pub gpu_time_us: u64,
    /// When a process last took GPU time or waited for it, µs; 0 is never.
    pub last_demand_us: u64,
    /// Whether NVML shows kernels of its processes: libvgpu counts a long kernel at its end.
    pub is_busy: bool,
    /// Whether processes use the GPU in a way that is not measured.
    pub is_unknown: bool,
    /// Whether it is suspended, or on its way there or back.
    pub is_suspended: bool,
}

/// Follows one share.
#[derive(Debug, Clone)]
pub struct IdleTracker {
    last: Option<Evidence>,
    /// Begin of the period, µs.
    since_us: u64,
    /// The level: since when it is idle, µs.
    idle_since_us: Option<u64>,
    /// Time after which it is reported as idle at first, µs.
    first_us: u64,
    /// Time after which it is reported as idle, µs.
    after_us: u64,
}

impl IdleTracker {
    /// Follows a share that is reported as idle after `first_us`, see [`FIRST_US`].
    #[must_use]
    pub const fn new(first_us: u64) -> Self {
        Self {
            last: None,
            since_us: 0,
            idle_since_us: None,
            first_us,
            after_us: first_us,
        }
    }

    /// Since when the share has used no GPU time, µs; `None` if it has lately, or nothing is known of it.
    #[must_use]
    pub const fn idle_since_us(&self) -> Option<u64> {
        self.idle_since_us
    }

    /// Applies a scan. While the share is suspended, its level stays.
    pub fn update(&mut self, now_us: u64, seen: Evidence) {
        let signs = |seen: Evidence| {
            let Evidence {
                gpu_time_us,
                last_demand_us,
                is_suspended,
                ..
            } = seen;
            (gpu_time_us, last_demand_us, is_suspended)
        };
        let before = self.last.replace(seen).map(signs);
        if seen.is_suspended {
            return;
        }
        if before != Some(signs(seen)) || seen.is_busy || seen.is_unknown {
            if let Some(since_us) = self.idle_since_us.take() {
                let last_us = self.first_us.saturating_mul(LAST_FACTOR);
                self.after_us = match now_us.saturating_sub(since_us) < last_us {
                    true => self.after_us.saturating_mul(2).min(last_us),
                    false => self.first_us,
                };
            }
            self.since_us = now_us;
        } else if now_us.saturating_sub(self.since_us) >= self.after_us {
            self.idle_since_us = Some(self.since_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_US: u64 = 1_000_000;

    struct Share {
        tracker: IdleTracker,
        now_us: u64,
        seen: Evidence,
    }

    impl Share {
        fn new() -> Self {
            let mut share = Self {
                tracker: IdleTracker::new(FIRST_US),
                now_us: 100 * SECOND_US,
                seen: Evidence::default(),
            };
            share.scans(1, |_| ());
            share
        }

        /// Scans for these seconds, `use_gpu` before each. Returns whether it is idle then, and how often that has changed.
        fn scans(&mut self, seconds: u64, use_gpu: impl Fn(&mut Evidence)) -> (bool, u32) {
            let mut changes = 0;
            for _ in 0..seconds {
                self.now_us += SECOND_US;
                use_gpu(&mut self.seen);
                let before = self.tracker.idle_since_us();
                self.tracker.update(self.now_us, self.seen);
                changes += u32::from(before != self.tracker.idle_since_us());
            }
            (self.tracker.idle_since_us().is_some(), changes)
        }

        fn idle_for(&self) -> Option<u64> {
            let since_us = self.tracker.idle_since_us()?;
            Some((self.now_us - since_us) / SECOND_US)
        }
    }

    #[test]
    fn share_without_gpu_time_is_idle_after_whole_period() {
        let mut share = Share::new();
        assert_eq!(share.scans(59, |_| ()), (false, 0));
        assert_eq!(share.scans(1, |_| ()), (true, 1));
        assert_eq!(share.scans(10_000, |_| ()), (true, 0));
        assert_eq!(share.idle_for(), Some(10_060));
    }

    #[test]
    fn any_sign_of_gpu_time_begins_period_anew() {
        let signs: [fn(&mut Evidence); 4] = [
            |seen| seen.gpu_time_us += 1,
            |seen| seen.last_demand_us += 1,
            |seen| seen.is_busy = true,
            |seen| seen.is_unknown = true,
        ];
        for sign in signs {
            let mut share = Share::new();
            share.scans(59, |_| ());
            assert_eq!(share.scans(1, sign), (false, 0));
            (share.seen.is_busy, share.seen.is_unknown) = (false, false);
            assert_eq!(share.scans(59, |_| ()).1, 0);
            assert_eq!(share.scans(1, |_| ()), (true, 1));
            assert_eq!(share.scans(1, sign), (false, 1));
        }
    }

    #[test]
    fn running_kernel_is_never_idle() {
        let mut share = Share::new();
        assert_eq!(share.scans(10_000, |seen| seen.is_busy = true), (false, 0));
    }

    #[test]
    fn suspended_time_does_not_count() {
        let mut share = Share::new();
        share.scans(60, |_| ());
        let suspended = share.scans(1000, |seen| seen.is_suspended = true);
        assert_eq!(suspended, (true, 0), "its level stays");
        assert_eq!(share.scans(1, |seen| seen.is_suspended = false), (false, 1));
        share.scans(1000, |_| ());
        assert!(share.idle_for().unwrap() <= 1000);
    }

    #[test]
    fn changes_of_a_share_that_often_pauses_become_rare() {
        let mut share = Share::new();
        let mut changes = 0;
        for _ in 0..60 {
            changes += share.scans(60, |_| ()).1;
            changes += share.scans(1, |seen| seen.gpu_time_us += 1).1;
        }
        assert_eq!(changes, 2, "one pause is reported");
        assert_eq!(share.scans(119, |_| ()), (false, 0));
        assert_eq!(share.scans(1, |_| ()), (true, 1));
        // Pauses of a little more than the time after which they are reported double that, up to ten minutes, which is a long pause.
        for after in [240, 480, 600, 60] {
            share.scans(1, |seen| seen.gpu_time_us += 1);
            let pause = share.tracker.after_us / SECOND_US;
            assert_eq!(pause, after);
            assert_eq!(share.scans(pause - 1, |_| ()), (false, 0));
            assert_eq!(share.scans(1, |_| ()), (true, 1));
        }
        assert_eq!(share.scans(1000, |_| ()), (true, 0));
        // A long pause ends that.
        share.scans(1, |seen| seen.gpu_time_us += 1);
        assert_eq!(share.scans(60, |_| ()), (true, 1));
    }
}
