//! The controller of managed mode: allocates the claims of pods that are pending for devices of this driver.
//!
//! | Module | Responsibility |
//! |---|---|
//! | [`pods`] | what the controller reads from pods, their gangs and their claims |
//! | [`watch`] | watches of the objects that decisions need |
//! | [`action`] | what is to be done, and what has become of it: allocations, evictions, events, statuses |
//! | [`operate`] | probes and metrics |
//! | [`decide`] | the planner, a pure state machine, with its queue and ledger |
//! | [mod@write] | writes to the API server, and the lease that admits them |
//! | [`admit`] | the webhook: gate, check of config, translation of extended resources |
//! | [`explanations`] | explanations of decisions in an object |
//! | [`recommendations`] | amounts that workloads need, in an object |
//! | [`leader`] | the loop of the leading replica, from watches to writes |
//! | [`command`] | options, and the removal of what is left in the cluster |
//!
//! Each module depends on those above it only, which a test checks. Only the replica that holds the lease decides, and it
//! starts from complete lists. Every replica serves the webhook.

pub mod action;
pub mod admit;
pub mod command;
pub mod decide;
pub mod explanations;
#[cfg(test)]
mod fixture;
pub mod leader;
pub mod operate;
pub mod pods;
pub mod recommendations;
pub mod watch;
pub mod write;
