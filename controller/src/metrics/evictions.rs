//! Counters of preemptions and evictions.

use std::fmt;

use drava_api::metric::controller as table;
use prometheus_client::encoding::DescriptorEncoder;

use crate::action::{EvictionCause, EvictionOutcome, Precedence};

/// Evictions for one cause.
#[derive(Debug, Clone, Copy, Default)]
struct Evictions {
    evicted: u64,
    failed: u64,
}

/// Preemptions and evictions of this replica.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EvictionCounters {
    by_priority: u64,
    by_guarantee: u64,
    preemption: Evictions,
    incomplete_gang: Evictions,
}

impl EvictionCounters {
    /// Counts an outcome. A preemptor counts when a pod was evicted for it.
    pub(super) fn count(&mut self, outcome: &EvictionOutcome) {
        let evictions = match &outcome.eviction.cause {
            EvictionCause::Preemption(preemptor) => {
                let preemptions = match preemptor.precedence {
                    Precedence::Priority => &mut self.by_priority,
                    Precedence::Guarantee => &mut self.by_guarantee,
                };
                *preemptions += u64::from(!outcome.evicted.is_empty());
                &mut self.preemption
            }
            EvictionCause::IncompleteGang(_) => &mut self.incomplete_gang,
        };
        evictions.evicted += outcome.evicted.len() as u64;
        evictions.failed += u64::from(outcome.failure.is_some());
    }

    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let preemptions = [
            ("priority", self.by_priority),
            ("guarantee", self.by_guarantee),
        ];
        let preemptions = preemptions.map(|(precedence, count)| ([precedence], count as f64));
        table::PREEMPTIONS.encode(encoder, preemptions)?;
        let causes = [
            ("preemption", self.preemption),
            ("incomplete-gang", self.incomplete_gang),
        ];
        let evicted = causes.map(|(cause, evictions)| ([cause], evictions.evicted as f64));
        table::EVICTIONS.encode(encoder, evicted)?;
        let failed = causes.map(|(cause, evictions)| ([cause], evictions.failed as f64));
        table::EVICTION_FAILURES.encode(encoder, failed)
    }
}
