//! What operators see of the controller: probes and metrics; and the clock of the lease.

pub mod clock;
pub mod health;
pub mod metrics;
