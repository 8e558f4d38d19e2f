//! A common clock of the streams of a context, by which overlapping samples count once.

use drava_vgpu_abi::cost::Timeline;

use crate::cuda::CUstream;
use crate::meter::events::{create, destroy, elapsed_ns, record};
use crate::sys;

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
    /// Sets the clock of the context if it has none, or an old one.
    pub(super) fn set(&mut self, context: u64, stream: CUstream) {
        let now = sys::now_us();
        let clocks = &mut self.0;
        let known = clocks
            .iter()
            .position(|clock| clock.context == context)
            .or_else(|| clocks.iter().position(|clock| clock.context == 0));
        let Some(clock) = known.and_then(|index| clocks.get_mut(index)) else {
            return;
        };
        if clock.context == context && now.saturating_sub(clock.set_us) < CLOCK_LIFE_US {
            return;
        }
        if clock.context == 0 {
            clock.event = create().unwrap_or(0);
        }
        if clock.event != 0 && record(clock.event, stream) {
            clock.context = context;
            clock.set_us = now;
            clock.timeline = Timeline::new();
        }
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
