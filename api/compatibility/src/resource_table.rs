//! Names of the extended resources and the defaults behind them, in one table that a value can replace.

use serde::{Deserialize, Serialize};

/// Extended resources that are translated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ResourceTable {
    /// Resources that belong together. A container may use one family.
    pub families: Vec<ResourceFamily>,
    /// Prefix of the resources of NVIDIA's device plugin for MIG partitions; the profile follows.
    pub mig_prefix: String,
    /// Resources whose sharing has no amount, so that they cannot be translated.
    pub without_amount: Vec<String>,
}

/// Extended resources of one device plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResourceFamily {
    /// Number of GPUs, each of them another one.
    pub count: String,
    /// Memory per GPU, in units of `memoryFactor` MiB.
    pub memory: String,
    /// Memory per GPU in percent of the GPU.
    pub memory_percentage: String,
    /// Percent of the time of each GPU. 100 is a whole GPU.
    pub cores: String,
    /// Priority among the containers of a GPU: 0 is high, 1 is low.
    #[serde(default)]
    pub priority: Option<String>,
    /// Meaning of `count` without another resource of the family.
    pub count_alone: CountAlone,
    /// MiB per unit of memory.
    #[serde(default = "one")]
    pub memory_factor: u64,
    /// Number of GPUs without `count`.
    #[serde(default = "one")]
    pub default_count: u64,
    /// Memory without `memory` and `memoryPercentage`, in units of `memoryFactor` MiB; 0 is all memory of the GPU.
    #[serde(default)]
    pub default_memory: u64,
    /// Cores without `cores`.
    #[serde(default)]
    pub default_cores: u64,
}

/// Meaning of a number of GPUs without amounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CountAlone {
    /// Whole GPUs.
    WholeGpu,
    /// Shares with the default amounts.
    Share,
}

const fn one() -> u64 {
    1
}

impl ResourceFamily {
    /// Resources of HAMi under the name of NVIDIA's device plugin.
    #[must_use]
    pub fn nvidia() -> Self {
        Self {
            count: "nvidia.com/gpu".to_owned(),
            memory: "nvidia.com/gpumem".to_owned(),
            memory_percentage: "nvidia.com/gpumem-percentage".to_owned(),
            cores: "nvidia.com/gpucores".to_owned(),
            priority: Some("nvidia.com/priority".to_owned()),
            count_alone: CountAlone::WholeGpu,
            memory_factor: 1,
            default_count: 1,
            default_memory: 0,
            default_cores: 0,
        }
    }

    /// Resources of Volcano's vGPU device plugin.
    #[must_use]
    pub fn volcano() -> Self {
        Self {
            count: "volcano.sh/vgpu-number".to_owned(),
            memory: "volcano.sh/vgpu-memory".to_owned(),
            memory_percentage: "volcano.sh/vgpu-memory-percentage".to_owned(),
            cores: "volcano.sh/vgpu-cores".to_owned(),
            priority: None,
            count_alone: CountAlone::Share,
            memory_factor: 1,
            default_count: 1,
            default_memory: 0,
            default_cores: 0,
        }
    }

    /// Returns the names of the family.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        [
            &self.count,
            &self.memory,
            &self.memory_percentage,
            &self.cores,
        ]
        .into_iter()
        .chain(&self.priority)
        .map(String::as_str)
    }
}

impl Default for ResourceTable {
    fn default() -> Self {
        Self {
            families: vec![ResourceFamily::nvidia(), ResourceFamily::volcano()],
            mig_prefix: "nvidia.com/mig-".to_owned(),
            without_amount: vec!["nvidia.com/gpu.shared".to_owned()],
        }
    }
}

impl ResourceTable {
    /// Returns whether the table has the resource.
    #[must_use]
    pub fn contains(&self, resource: &str) -> bool {
        self.mig_profile(resource).is_some()
            || self.without_amount.iter().any(|name| name == resource)
            || self
                .families
                .iter()
                .any(|family| family.names().any(|name| name == resource))
    }

    /// Returns the MIG profile of a resource of NVIDIA's device plugin: `1g.10gb.me` is `1g.10gb+me`, because resource names
    /// have no `+`.
    #[must_use]
    pub fn mig_profile(&self, resource: &str) -> Option<String> {
        let suffix = resource.strip_prefix(&self.mig_prefix)?;
        let (slices, memory) = suffix.split_once('.')?;
        Some(match memory.split_once('.') {
            Some((memory, extension)) => format!("{slices}.{memory}+{extension}"),
            None => suffix.to_owned(),
        })
    }
}
