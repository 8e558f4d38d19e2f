//! A pair of events, used over and over for launches of one context.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::meter::events::{create, destroy};

pub(super) const EMPTY: u32 = 0;
pub(super) const IDLE: u32 = 1;
pub(super) const BUSY: u32 = 2;
pub(super) const PENDING: u32 = 3;

/// All zeroes has no events.
pub(super) struct Pair {
    pub(super) state: AtomicU32,
    /// Index of the card's first share.
    pub(super) card: AtomicU32,
    /// Whether what it measures corrects what was charged, and whether its kind learns from it.
    pub(super) counts: AtomicU32,
    pub(super) learns: AtomicU32,
    pub(super) context: AtomicU64,
    pub(super) start: AtomicU64,
    pub(super) end: AtomicU64,
    pub(super) kind: AtomicU64,
    pub(super) charged_ns: AtomicU64,
    pub(super) launched_ns: AtomicU64,
    /// When the last of its calls so far had returned.
    pub(super) recorded_ns: AtomicU64,
    /// For how long the card waited for the launch after the first event, and at most for the second event after it.
    pub(super) gap_ns: AtomicU64,
    pub(super) late_ns: AtomicU64,
    /// How long the call that launched it took, 0 if the card was busy with what was there before for all of it.
    pub(super) call_ns: AtomicU64,
    /// When the start was first seen to be reached, 0 before.
    pub(super) started_us: AtomicU64,
}

impl Pair {
    pub(super) fn create(&self, context: u64) -> bool {
        let (Some(start), Some(end)) = (create(), create()) else {
            return false;
        };
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.context.store(context, Ordering::Relaxed);
        true
    }

    pub(super) fn destroy(&self) {
        destroy(self.start.load(Ordering::Relaxed));
        destroy(self.end.load(Ordering::Relaxed));
    }
}
