//! The controller of managed mode: allocates the claims of pods that are pending for devices of this driver.
//!
//! Watches feed the [`planner`], a pure state machine; the [`leader`] executes its actions with [`writes`] and the
//! [`event_publisher`]. Only the replica that holds the [`lease`] does so, and it starts from complete lists. Every replica
//! serves the [`webhook`].

pub mod action;
pub mod allocation;
mod claim;
pub mod clock;
pub mod compatibility;
pub mod connection;
pub mod event;
pub mod event_deduplicator;
pub mod event_publisher;
pub mod evictions;
pub mod explanations;
#[cfg(test)]
mod fixture;
mod gang;
pub mod health;
pub mod leader;
pub mod lease;
mod ledger;
mod live_pods;
pub mod metrics;
mod objects;
pub mod options;
pub mod planner;
mod pod;
pub mod pod_condition;
pub mod pod_group;
mod queue;
pub mod status;
pub mod uninstall;
mod victims;
pub mod watches;
pub mod webhook;
pub mod writes;
