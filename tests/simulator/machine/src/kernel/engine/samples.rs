//! How busy a card was, in sampling periods, as its driver keeps them: a period counts when it is
//! over, so a reader is always a little late.

use std::collections::{BTreeMap, VecDeque};

use crate::protocol::ContextId;

use super::super::Nanos;

/// Length of a sampling period.
pub const SAMPLE_PERIOD: Nanos = 1_000_000_000 / 6;
/// How many periods are kept.
const KEPT: usize = 120;

/// One closed sampling period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// When it closed.
    pub end: Nanos,
    /// For how long each context had a kernel running.
    pub busy: BTreeMap<ContextId, Nanos>,
    /// For how long the card was busy; instances count for as much of it as they are.
    pub total: Nanos,
}

/// What a card, or one GPU instance, has done since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// For how long any kernel was running.
    pub busy: Nanos,
    /// The same, where instances count for as much of the card as they are.
    pub weighted: Nanos,
    /// For how long all multiprocessors together were occupied.
    pub occupied: u128,
}

/// A part that is busy for a stretch of time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    pub(super) context: ContextId,
    /// Its GPU instance.
    pub(super) gpu: Option<u32>,
    /// Multiprocessors with a kernel.
    pub(super) occupied: u32,
    /// Multiprocessors that count as busy.
    pub(super) share: u32,
}

#[derive(Debug)]
pub(super) struct Samples {
    closed: VecDeque<Sample>,
    open: Sample,
    /// Of all of the card, and of the GPU instances.
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

    /// What all of the card, or one GPU instance, has done.
    pub(super) fn of(&self, gpu: Option<u32>) -> Counters {
        self.counters.get(&gpu).copied().unwrap_or_default()
    }

    /// Adds a stretch of time in which these parts of the card were busy.
    pub(super) fn account(&mut self, mut from: Nanos, to: Nanos, all: u32, busy: &[Busy]) {
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
                // Long ago, nothing is kept anyway.
                let periods = (to - from) / SAMPLE_PERIOD;
                let skipped = periods.saturating_sub(KEPT as Nanos) * SAMPLE_PERIOD;
                from += skipped;
                self.open.end += skipped;
            }
        }
    }

    fn count(&mut self, length: Nanos, all: u32, busy: &[Busy]) {
        let mut parts: BTreeMap<Option<u32>, (u32, u32)> = BTreeMap::new();
        for one in busy {
            // Without instances, what is counted for the card is all there is.
            let places = [None, one.gpu];
            let places = places.iter().take(1 + usize::from(one.gpu.is_some()));
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
        if self.closed.len() > KEPT {
            self.closed.pop_front();
        }
    }
}

/// A time in which `share` of `all` multiprocessors were busy, as time of all of them.
fn weighted(length: Nanos, share: u32, all: u32) -> Nanos {
    match share >= all {
        true => length,
        false => length * Nanos::from(share) / Nanos::from(all.max(1)),
    }
}
