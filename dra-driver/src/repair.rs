//! What differs from what the claims say, and its repair: lost and orphaned state, ignored CDI specs, health of claims, removal.

pub mod directories;
pub mod health_report;
pub mod injection;
pub mod reconcile;
pub mod removal;
pub mod runtime_config;
