//! A pair of events, reused for launches in one context.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::recording::Recording;

use crate::meter::events::{create, destroy};

pub(super) const EMPTY: u32 = 0;
pub(super) const IDLE: u32 = 1;
pub(super) const BUSY: u32 = 2;
pub(super) const PENDING: u32 = 3;

/// All zeroes has no events.
pub(super) struct Pair {
    pub(super) state: AtomicU32,
    /// Index of the GPU's first share.
    pub(super) gpu: AtomicU32,
    /// Whether its measured time corrects its charge, and whether its kind learns from it.
    pub(super) is_measured: AtomicU32,
    pub(super) learns: AtomicU32,
    pub(super) context: AtomicU64,
    pub(super) start: AtomicU64,
    pub(super) end: AtomicU64,
    /// Recorded directly after `end` if [`Pair::has_after`], to measure the time of an event.
    pub(super) after: AtomicU64,
    pub(super) has_after: AtomicU32,
    pub(super) kind: AtomicU64,
    pub(super) charged_ns: AtomicU64,
    /// Observations of the host, see [`Recording`].
    pub(super) begun_ns: AtomicU64,
    pub(super) called_ns: AtomicU64,
    pub(super) returned_ns: AtomicU64,
    pub(super) ended_ns: AtomicU64,
    pub(super) was_reached: AtomicU32,
    pub(super) is_reached: AtomicU32,
    pub(super) is_over: AtomicU32,
    /// Time of the first poll that found the first event reached; 0 before.
    pub(super) started_us: AtomicU64,
}

impl Pair {
    pub(super) fn create(&self, context: u64) -> bool {
        let (Some(start), Some(end), Some(after)) = (create(), create(), create()) else {
            return false;
        };
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.after.store(after, Ordering::Relaxed);
        self.context.store(context, Ordering::Relaxed);
        true
    }

    pub(super) fn recording(&self) -> Recording {
        let time = |at: &AtomicU64| at.load(Ordering::Relaxed);
        let flag = |is: &AtomicU32| is.load(Ordering::Relaxed) != 0;
        Recording {
            begun_ns: time(&self.begun_ns),
            called_ns: time(&self.called_ns),
            returned_ns: time(&self.returned_ns),
            ended_ns: time(&self.ended_ns),
            was_reached: flag(&self.was_reached),
            is_reached: flag(&self.is_reached),
            is_over: flag(&self.is_over),
        }
    }

    pub(super) fn destroy(&self) {
        destroy(self.start.load(Ordering::Relaxed));
        destroy(self.end.load(Ordering::Relaxed));
        destroy(self.after.load(Ordering::Relaxed));
    }
}
