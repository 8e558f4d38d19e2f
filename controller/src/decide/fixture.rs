//! Settings for tests.

use std::time::Duration;

use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};

use super::planner::Settings;

/// Settings of a planner that evicts pods.
pub(crate) fn settings() -> Settings {
    Settings {
        policies: Policies {
            node: NodePlacementPolicy::Binpack,
            gpu: GpuPlacementPolicy::Binpack,
        },
        schedulers: vec!["default-scheduler".to_owned()],
        release_after: Duration::from_secs(60),
        preemption: true,
    }
}
