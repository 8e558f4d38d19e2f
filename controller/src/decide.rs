//! Decisions: the planner with its queue and ledger.

pub mod allocation;
pub mod event_deduplicator;
pub(crate) mod ledger;
pub mod planner;
pub(crate) mod queue;
pub(crate) mod timers;
pub(crate) mod victims;

#[cfg(test)]
pub(crate) mod fixture;
