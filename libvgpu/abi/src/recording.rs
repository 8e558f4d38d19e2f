//! Host-side observations while two events are recorded around a launch, and the resulting [`Sample`].
//!
//! The host may be interrupted between any two calls for longer than the launch takes. The events of an idle GPU
//! include that time. And an answer of libcuda may be older than the interruption: an event that was just recorded
//! is not reported as reached although the GPU is idle.
//!
//! | Observation | Conclusion |
//! |---|---|
//! | first event not reached when the second was recorded | all work was queued before the GPU reached it: exact |
//! | first event reached before the launching call | the GPU waited from then on |
//! | first event reached in between | the GPU waited at most for the call, or since an interruption of the host before it |
//! | second event reached immediately | the launch ended before |
//! | second event not reached, maybe for another reason | the launch may have ended before, if the host was interrupted |

use crate::cost::{INTERRUPTED_NS, Sample};

/// Times of one host clock, nanoseconds, and answers of libcuda.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recording {
    /// Before the first event was recorded.
    pub begun_ns: u64,
    /// When the launching call began.
    pub called_ns: u64,
    /// When the launching call returned.
    pub returned_ns: u64,
    /// When the second event was recorded and queried.
    pub ended_ns: u64,
    /// Whether the first event was reached before the launching call.
    pub was_reached: bool,
    /// Whether the first event was reached when the second was recorded.
    pub is_reached: bool,
    /// Whether the second event was reached as well.
    pub is_over: bool,
}

impl Recording {
    /// Returns the sample for `measured_ns` between the events.
    #[must_use]
    pub fn sample(self, measured_ns: u64) -> Sample {
        if !self.is_reached {
            return Sample {
                measured_ns,
                gap_ns: 0,
                call_ns: 0,
                late_ns: 0,
            };
        }
        let before_ns = self.called_ns.saturating_sub(self.begun_ns);
        // A wait longer than the measured time means that the GPU reached the first event after other work.
        let has_waited = self.was_reached && before_ns <= measured_ns;
        // An answer from before an interruption may have been outdated immediately.
        let may_have_waited = !has_waited && (self.was_reached || before_ns >= INTERRUPTED_NS);
        let from_ns = if may_have_waited {
            self.begun_ns
        } else {
            self.called_ns
        };
        let late_ns = if self.is_over || self.may_be_over(measured_ns) {
            self.ended_ns.saturating_sub(self.called_ns)
        } else {
            0
        };
        Sample {
            measured_ns,
            gap_ns: if has_waited { before_ns } else { 0 },
            call_ns: self.returned_ns.saturating_sub(from_ns),
            late_ns,
        }
    }

    /// Returns whether the launch may have ended before the second event was queued although that event was not
    /// reached immediately: the host was interrupted, and the GPU reached the first event, which is not before its
    /// recording, early enough.
    fn may_be_over(self, measured_ns: u64) -> bool {
        self.ended_ns.saturating_sub(self.called_ns) >= INTERRUPTED_NS
            && self.begun_ns.saturating_add(measured_ns)
                <= self.ended_ns.saturating_add(INTERRUPTED_NS)
    }
}
