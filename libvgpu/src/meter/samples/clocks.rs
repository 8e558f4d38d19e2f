//! Time that streams of one context have in common, by which samples that overlap count once.

use drava_vgpu_abi::cost::Timeline;

use crate::cuda::CUstream;
use crate::meter::events::{create, destroy, elapsed_ns, record};
use crate::sys;

/// Contexts whose streams are compared.
const CLOCKS: usize = 8;
/// A context's clock is set anew after this time, or its figures lose precision.
const CLOCK_LIFE_US: u64 = 8_000_000;
/// Events may be reached before the event that set the clock.
const CLOCK_START_NS: i64 = 1 << 40;

/// All zeroes is none.
pub(super) struct Clocks([Clock; CLOCKS]);

/// The time of a context's streams. All zeroes is none.
struct Clock {
    context: u64,
    event: u64,
    set_us: u64,
    timeline: Timeline,
}

impl Clocks {
    /// Gives the context a clock, or a new one.
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

    /// How much of a sample of that length, which began with the event `start`, no other sample covers.
    pub(super) fn new_part(&mut self, context: u64, start: u64, ns: u64) -> u64 {
        let Some(clock) = self.0.iter_mut().find(|clock| clock.context == context) else {
            return ns;
        };
        let Some(since) = elapsed_ns(clock.event, start) else {
            return ns;
        };
        let start = CLOCK_START_NS.saturating_add(since).max(0).unsigned_abs();
        clock.timeline.add(start, start.saturating_add(ns))
    }

    /// Stops the clocks of the contexts that `ends` says yes to, while these are still there.
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
