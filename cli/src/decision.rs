//! Command line options of commands that decide like the controller.

use drava_allocator::placement::Policies;
use drava_allocator::pod;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_explanation::explain::Settings;

/// Settings of the controller.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DecisionOptions {
    /// The controller's policy for nodes: binpack, spread or leastFragmentation.
    #[arg(long, default_value = "binpack")]
    node_policy: NodePlacementPolicy,

    /// The controller's policy for the GPUs of a node: binpack, spread, leastFragmentation, topology or numa.
    #[arg(long, default_value = "binpack")]
    gpu_policy: GpuPlacementPolicy,

    /// Scheduler whose pods the controller serves; repeatable.
    #[arg(long, default_value = pod::DEFAULT_SCHEDULER)]
    scheduler_name: Vec<String>,
}

impl From<DecisionOptions> for Settings {
    fn from(options: DecisionOptions) -> Self {
        Self {
            policies: Policies {
                node: options.node_policy,
                gpu: options.gpu_policy,
            },
            schedulers: options.scheduler_name,
        }
    }
}

/// Returns the default settings of the chart.
pub(crate) fn defaults() -> Settings {
    Settings {
        policies: Policies {
            node: NodePlacementPolicy::Binpack,
            gpu: GpuPlacementPolicy::Binpack,
        },
        schedulers: vec![pod::DEFAULT_SCHEDULER.to_owned()],
    }
}
