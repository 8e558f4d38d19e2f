//! Command line options of commands that decide like the controller.

use drava_allocator::placement::Policies;
use drava_allocator::pod;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_explanation::explain::Settings;

/// Settings of the controller.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DecisionOptions {
    /// The controller's policy for nodes: binpack, spread or leastFragmentation; default: binpack.
    #[arg(long)]
    node_policy: Option<NodePlacementPolicy>,

    /// The controller's policy for the GPUs of a node: binpack, spread, leastFragmentation, topology or numa; default: binpack.
    #[arg(long)]
    gpu_policy: Option<GpuPlacementPolicy>,

    /// Scheduler whose pods the controller serves; repeatable; default: default-scheduler.
    #[arg(long)]
    scheduler_name: Vec<String>,
}

impl DecisionOptions {
    /// Returns the options that are given.
    pub(crate) fn given(&self) -> Vec<&'static str> {
        let options = [
            ("--node-policy", self.node_policy.is_some()),
            ("--gpu-policy", self.gpu_policy.is_some()),
            ("--scheduler-name", !self.scheduler_name.is_empty()),
        ];
        let given = options.into_iter().filter(|(_, is_given)| *is_given);
        given.map(|(name, _)| name).collect()
    }
}

impl From<DecisionOptions> for Settings {
    fn from(options: DecisionOptions) -> Self {
        let mut settings = defaults();
        let policies = &mut settings.policies;
        policies.node = options.node_policy.unwrap_or(policies.node);
        policies.gpu = options.gpu_policy.unwrap_or(policies.gpu);
        if !options.scheduler_name.is_empty() {
            settings.schedulers = options.scheduler_name;
        }
        settings
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
