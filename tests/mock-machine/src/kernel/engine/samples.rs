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
}

impl Sample {
    /// For how long any kernel was running.
    #[must_use]
    pub fn total(&self) -> Nanos {
        self.busy.values().sum()
    }
}

#[derive(Debug)]
pub(super) struct Samples {
    closed: VecDeque<Sample>,
    open: Sample,
}

impl Samples {
    pub(super) fn new(now: Nanos) -> Self {
        let open = Sample {
            end: now + SAMPLE_PERIOD,
            busy: BTreeMap::new(),
        };
        Self {
            closed: VecDeque::new(),
            open,
        }
    }

    pub(super) fn closed(&self) -> &VecDeque<Sample> {
        &self.closed
    }

    /// Adds a stretch of time in which one context, or none, was busy.
    pub(super) fn account(&mut self, mut from: Nanos, to: Nanos, busy: Option<ContextId>) {
        while from < to {
            let part = to.min(self.open.end) - from;
            if let Some(context) = busy {
                *self.open.busy.entry(context).or_default() += part;
            }
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

    fn close(&mut self) {
        let next = Sample {
            end: self.open.end + SAMPLE_PERIOD,
            busy: BTreeMap::new(),
        };
        self.closed
            .push_back(std::mem::replace(&mut self.open, next));
        if self.closed.len() > KEPT {
            self.closed.pop_front();
        }
    }
}
