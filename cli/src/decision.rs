//! Command line options of commands that decide like the controller.

use drava_allocator::placement::Policies;
use drava_allocator::pod;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::leader::LeaderSettings;
use drava_explanation::explain::Settings;

/// Settings of decisions that differ from those of the controller.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct DecisionOptions {
    /// Policy for nodes: binpack, spread or leastFragmentation; default: that of the controller.
    #[arg(long)]
    node_policy: Option<NodePlacementPolicy>,

    /// Policy for the GPUs of a node: binpack, spread, leastFragmentation, topology or numa; default: that of the controller.
    #[arg(long)]
    gpu_policy: Option<GpuPlacementPolicy>,

    /// Scheduler whose pods are served; repeatable; default: those of the controller.
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

    /// Returns the settings of decisions: the options, else what the leader has written, else the defaults of the chart. A value
    /// that only a newer controller knows counts as not written.
    pub(crate) fn settings(&self, leader: Option<&LeaderSettings>) -> Settings {
        let mut settings = defaults();
        let policies = &mut settings.policies;
        if let Some(leader) = leader {
            policies.node = leader.node_policy.parse().unwrap_or(policies.node);
            policies.gpu = leader.gpu_policy.parse().unwrap_or(policies.gpu);
            settings.schedulers.clone_from(&leader.scheduler_names);
        }
        policies.node = self.node_policy.unwrap_or(policies.node);
        policies.gpu = self.gpu_policy.unwrap_or(policies.gpu);
        if !self.scheduler_name.is_empty() {
            settings.schedulers.clone_from(&self.scheduler_name);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decides_as_the_leader_does() {
        let leader = LeaderSettings {
            node_policy: "spread".to_owned(),
            gpu_policy: "of a newer version".to_owned(),
            scheduler_names: vec!["default-scheduler".to_owned(), "volcano".to_owned()],
        };
        let settings = DecisionOptions::default().settings(Some(&leader));
        assert_eq!(settings.policies.node, NodePlacementPolicy::Spread);
        assert_eq!(settings.policies.gpu, GpuPlacementPolicy::Binpack);
        assert_eq!(settings.schedulers, leader.scheduler_names);
        let options = DecisionOptions {
            node_policy: Some(NodePlacementPolicy::Binpack),
            gpu_policy: None,
            scheduler_name: vec!["other".to_owned()],
        };
        let settings = options.settings(Some(&leader));
        assert_eq!(settings.policies.node, NodePlacementPolicy::Binpack);
        assert_eq!(settings.schedulers, ["other"]);
    }
}
