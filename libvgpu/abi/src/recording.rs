//! What the host saw while two events were recorded round a launch, and what that makes of the time between them.
//!
//! The host may be interrupted between any two calls, for longer than the launch takes. If the card had nothing else to
//! do, the events measure that, too. And what the driver answers may be older than the interruption: an event that has just
//! been recorded is not reached yet, on a card that is idle.
//!
//! | Seen | What follows |
//! |---|---|
//! | the first event was not reached when the second was recorded | all of it was queued before the card came to it: exact |
//! | it was reached before the launch was called | the card waited from then on |
//! | it was reached some time between | the card waited for no longer than the call took, or if the host was interrupted before that, since then |
//! | the second event was reached at once | the launch was over before |
//! | it was not, and the events cannot tell whether because of the launch | it may have been over before, if the host was interrupted |

use crate::cost::{INTERRUPTED_NS, Sample};

/// Moments of one clock of the host, nanoseconds, and what the driver answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recording {
    /// Before the first event was recorded.
    pub begun_ns: u64,
    /// When the launch was called.
    pub called_ns: u64,
    /// When that had returned.
    pub returned_ns: u64,
    /// When the second event had been recorded and the driver was asked about it.
    pub ended_ns: u64,
    /// Whether the first event was reached before the launch was called.
    pub was_reached: bool,
    /// Whether it was when the second event had been recorded.
    pub is_reached: bool,
    /// Whether the second event was, too.
    pub is_over: bool,
}

impl Recording {
    /// What is known of the launch if the card says that there are so many nanoseconds between the events.
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
        // If the card waited for longer than the events say, it came to the first one behind other work.
        let has_waited = self.was_reached && before_ns <= measured_ns;
        // What the driver said before the host was interrupted may have been true for no longer than a moment.
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

    /// Whether the launch may have been over before the second event was queued although that was not reached at once: the
    /// host was interrupted, and the first event, which the card cannot have come to before it was recorded, was reached
    /// early enough for that.
    fn may_be_over(self, measured_ns: u64) -> bool {
        self.ended_ns.saturating_sub(self.called_ns) >= INTERRUPTED_NS
            && self.begun_ns.saturating_add(measured_ns)
                <= self.ended_ns.saturating_add(INTERRUPTED_NS)
    }
}
