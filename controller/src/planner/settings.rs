//! Settings of the planner, and the time of its decisions.

use std::time::Duration;

use drava_allocator::placement::Policies;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

/// Settings of the planner.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Policies by which nodes and GPUs are scored.
    pub policies: Policies,
    /// Names of the schedulers whose pods are served.
    pub schedulers: Vec<String>,
    /// Time after which an unreserved allocation is released.
    pub release_after: Duration,
    /// Whether pods are evicted for pods of higher priority.
    pub preemption: bool,
}

/// Time of a decision.
#[derive(Debug, Clone)]
pub struct DecisionTime {
    /// For backoffs and deadlines.
    pub instant: Instant,
    /// For written timestamps.
    pub time: Time,
    /// Returns whether the time slice that started at `instant` is over. The decisions that are left are due at once, after
    /// other inputs have had their turn.
    pub is_slice_over: fn(Instant) -> bool,
}
