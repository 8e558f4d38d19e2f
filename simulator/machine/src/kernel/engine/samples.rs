//! Utilization by sampling period, as the driver keeps it. A period is visible once closed, so
//! readers lag.

use std::collections::{BTreeMap, VecDeque};

use crate::protocol::{ContextId, Nanos};

/// Length of a sampling period.
pub const SAMPLE_PERIOD: Nanos = 1_000_000_000 / 6;
/// Number of kept periods.
const KEPT_PERIODS: usize = 120;

/// One closed sampling period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// End of the period.
    pub end: Nanos,
    /// Time with a running kernel, by context.
    pub busy: BTreeMap<ContextId, Nanos>,
    /// BusyPart time of the GPU; instances count by their fraction.
    pub total: Nanos,
}

/// Counters of a GPU or GPU instance since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Time with any kernel running.
    pub busy: Nanos,
    /// BusyPart time in which instances count by their fraction of the GPU.
    pub weighted: Nanos,
    /// Occupied time, summed over all multiprocessors.
    pub occupied: u128,
}

/// A part that is busy for a span of time.
#[derive(Clone, Copy, Debug)]
pub(super) struct BusyPart {
    pub(super) context: ContextId,
    /// Its GPU instance.
    pub(super) gpu_instance: Option<u32>,
    /// Multiprocessors with a kernel.
    pub(super) occupied: u32,
    /// Multiprocessors counted as busy.
    pub(super) share: u32,
}

#[derive(Debug)]
pub(super) struct Samples {
    closed: VecDeque<Sample>,
    open: Sample,
    /// Of the whole GPU and of its GPU instances.
    counters: BTreeMap<Option<u32>, Counters>,
}

impl Samples {
    pub(super) fn new(now: Nanos) -> Self {
        let open = Sample {
            end: now + SAMPLE_PERIOD,
            ..Sample::default()
        };
        Self {
            closed: VecDeque::new(),
            open,
            counters: BTreeMap::new(),
        }
    }

    pub(super) fn closed(&self) -> &VecDeque<Sample> {
        &self.closed
    }

    /// Counters of the whole GPU or of one GPU instance.
    pub(super) fn of(&self, gpu_instance: Option<u32>) -> Counters {
        self.counters
            .get(&gpu_instance)
            .copied()
            .unwrap_or_default()
    }

    /// Adds a span in which these parts were busy.
    pub(super) fn account(&mut self, mut from: Nanos, to: Nanos, all: u32, busy: &[BusyPart]) {
        self.count(to.saturating_sub(from), all, busy);
        let share = busy.iter().map(|one| one.share).sum();
        while from < to {
            let part = to.min(self.open.end) - from;
            for one in busy {
                *self.open.busy.entry(one.context).or_default() += part;
            }
            self.open.total += weighted(part, share, all);
            from += part;
            if from == self.open.end {
                self.close();
                // Too old to be kept.
                let periods = (to - from) / SAMPLE_PERIOD;
                let skipped = periods.saturating_sub(KEPT_PERIODS as Nanos) * SAMPLE_PERIOD;
                from += skipped;
                self.open.end += skipped;
            }
        }
    }

    fn count(&mut self, length: Nanos, all: u32, busy: &[BusyPart]) {
        let mut parts: BTreeMap<Option<u32>, (u32, u32)> = BTreeMap::new();
        for one in busy {
            // Without instances the GPU has all the counters.
            let places = [None, one.gpu_instance];
            let places = places
                .iter()
                .take(1 + usize::from(one.gpu_instance.is_some()));
            for place in places {
                let (share, occupied) = parts.entry(*place).or_default();
                *share += one.share;
                *occupied += one.occupied;
            }
        }
        for (place, (share, occupied)) in parts {
            let counters = self.counters.entry(place).or_default();
            counters.busy += length;
            counters.weighted += weighted(length, share, all);
            counters.occupied += u128::from(length) * u128::from(occupied);
        }
    }

    fn close(&mut self) {
        let next = Sample {
            end: self.open.end + SAMPLE_PERIOD,
            ..Sample::default()
        };
        self.closed
            .push_back(std::mem::replace(&mut self.open, next));
        if self.closed.len() > KEPT_PERIODS {
            self.closed.pop_front();
        }
    }
}

/// Scales a span by `share` of `all` multiprocessors.
fn weighted(length: Nanos, share: u32, all: u32) -> Nanos {
    match share >= all {
        true => length,
        false => length * Nanos::from(share) / Nanos::from(all.max(1)),
    }
}
