//! What operators see and set while the driver runs: probes, and the log with its filter.

pub mod health;
pub mod log;
