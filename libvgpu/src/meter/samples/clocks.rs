//! A common clock of the streams of a context, by which overlapping samples count once.

use drava_vgpu_abi::cost::Timeline;

use crate::meter::events::{destroy, elapsed_ns};

/// Contexts whose streams are compared.
const CLOCKS: usize = 8;
/// Age at which a context's clock is reset, microseconds: event times lose precision with their distance.
const CLOCK_LIFE_US: u64 = 8_000_000;
/// Time of the clock's event, nanoseconds: other events may be reached before it.
const CLOCK_START_NS: i64 = 1 << 40;

/// The clocks of a process. All zeroes is none.
pub(super) struct Clocks([Clock; CLOCKS]);

/// The clock of a context. All zeroes is none.
struct Clock {
    context: u64,
    event: u64,
    set_us: u64,
    timeline: Timeline,
}

impl Clocks {
    /// Returns whether the context has no clock, or an old one.
    pub(super) fn is_due(&self, context: u64, now_us: u64) -> bool {
        let of_context = self.0.iter().find(|clock| clock.context == context);
        of_context.map_or_else(
            || self.0.iter().any(|clock| clock.context == 0),
            |clock| now_us.saturating_sub(clock.set_us) >= CLOCK_LIFE_US,
        )
    }

    /// Sets the clock of the context to an event that was recorded at `now_us`. Returns `false` if it is not due.
    pub(super) fn set(&mut self, context: u64, event: u64, now_us: u64) -> bool {
        if !self.is_due(context, now_us) {
            return false;
        }
        self.forget(|old| old == context);
        let free = self.0.iter_mut().find(|clock| clock.context == 0);
        if let Some(clock) = free {
            clock.context = context;
            clock.event = event;
            clock.set_us = now_us;
            clock.timeline = Timeline::new();
            return true;
        }
        false
    }

    /// Returns the part of a sample of `ns` from the event `start` that no other sample covers.
    pub(super) fn new_part_ns(&mut self, context: u64, start: u64, ns: u64) -> u64 {
        let Some(clock) = self.0.iter_mut().find(|clock| clock.context == context) else {
            return ns;
        };
        let Some(since) = elapsed_ns(clock.event, start) else {
            return ns;
        };
        let start = CLOCK_START_NS.saturating_add(since).max(0).unsigned_abs();
        clock.timeline.add(start, start.saturating_add(ns))
    }

    /// Stops the clocks of contexts for which `ends` is true, before the contexts end.
    pub(super) fn forget(&mut self, ends: impl Fn(u64) -> bool) {
        for clock in self.0.iter_mut().filter(|clock| clock.context != 0) {
            if ends(clock.context) {
                destroy(clock.event);
                clock.context = 0;
                clock.event = 0;
            }
        }
    }
}
