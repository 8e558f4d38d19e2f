//! Other owners of the node's GPUs: device plugins and other DRA drivers.
//!
//! A GPU has one owner: two would give the same memory and time to different pods. While a device plugin offers GPUs of
//! the node, or another DRA driver publishes a GPU, drava does not publish it. Devices that claims hold stay published
//! with a taint, and their programs keep their limits. The condition `exclusive` names the other owner.

use std::collections::{BTreeMap, BTreeSet};

use drava_api::{Quantity, names};
use drava_nvml::GpuUuid;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

use crate::gpus::capacity::UnavailableReason;

/// Number of GPUs that the condition names for each driver.
const NAMED: usize = 3;

/// Other owners of the GPUs of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OtherOwners {
    /// Extended resources with which a device plugin offers the GPUs of the node.
    pub plugin_resources: BTreeSet<String>,
    /// DRA drivers that publish a GPU or its partitions, by UUID.
    pub drivers: BTreeMap<GpuUuid, String>,
}

impl OtherOwners {
    /// Reads the owners from the Node object and from the slices of other drivers on the node.
    pub fn read<'a>(
        node: Option<&Node>,
        slices: impl IntoIterator<Item = &'a ResourceSlice>,
    ) -> Self {
        let status = node.and_then(|node| node.status.as_ref());
        let allocatable = status.and_then(|status| status.allocatable.as_ref());
        let plugin_resources = allocatable
            .into_iter()
            .flatten()
            .filter(|(name, amount)| {
                // kubelet keeps the resource with the amount 0 after the end of its plugin.
                let amount = Quantity::try_from(*amount);
                names::is_device_plugin_resource(name)
                    && amount.is_ok_and(|amount| !amount.is_zero())
            })
            .map(|(name, _)| name.clone())
            .collect();
        let mut drivers = BTreeMap::new();
        for slice in slices {
            for uuid in slice.spec.devices.iter().flatten().flat_map(uuids) {
                drivers.insert(GpuUuid::new(uuid), slice.spec.driver.clone());
            }
        }
        Self {
            plugin_resources,
            drivers,
        }
    }

    /// Returns why a GPU is not published.
    #[must_use]
    pub fn reason(&self, gpu: &GpuUuid) -> Option<UnavailableReason> {
        if self.drivers.contains_key(gpu) {
            Some(UnavailableReason::OtherDriver)
        } else if self.plugin_resources.is_empty() {
            None
        } else {
            Some(UnavailableReason::DevicePlugin)
        }
    }

    /// Returns the state of the condition `exclusive` for the GPUs that the node profile does not exclude.
    ///
    /// # Errors
    /// When a GPU has another owner, with its name and the fix.
    pub fn check<'a>(&self, gpus: impl Iterator<Item = &'a GpuUuid>) -> Result<(), String> {
        let gpus: Vec<&GpuUuid> = gpus.collect();
        let mut problems = Vec::new();
        let mut by_driver: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for gpu in &gpus {
            if let Some(driver) = self.drivers.get(*gpu) {
                by_driver.entry(driver).or_default().push(gpu.as_str());
            }
        }
        for (driver, gpus) in by_driver {
            let named: Vec<&str> = gpus.iter().take(NAMED).copied().collect();
            let more = gpus.len() - named.len();
            let more = if more == 0 {
                String::new()
            } else {
                format!(" and {more} more")
            };
            problems.push(format!(
                "DRA driver {driver} publishes {}{more}",
                named.join(", ")
            ));
        }
        if !gpus.is_empty() && !self.plugin_resources.is_empty() {
            let resources: Vec<&str> = self.plugin_resources.iter().map(String::as_str).collect();
            problems.push(format!(
                "a device plugin offers {} on this node",
                resources.join(", ")
            ));
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(format!(
            "{}; drava does not publish these GPUs, because a GPU has one owner; remove the other owner from the node, or \
             the label {} of the node",
            problems.join("; "),
            names::ENABLED_LABEL
        ))
    }
}

/// Returns the UUIDs in the attributes of a device of another driver, which qualifies them, or names that of a
/// partition's GPU differently.
fn uuids(device: &Device) -> impl Iterator<Item = &str> {
    let attributes = device.attributes.iter().flatten();
    attributes.filter_map(|(name, value)| {
        let name = name.rsplit('/').next().unwrap_or(name);
        matches!(name, names::attribute::UUID | names::attribute::PARENT_UUID)
            .then_some(value.string.as_deref())
            .flatten()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(driver: &str, attribute: &str, uuid: &str) -> ResourceSlice {
        let attributes = json!({attribute: {"string": uuid}});
        serde_json::from_value(json!({
            "metadata": {"name": "a"},
            "spec": {
                "driver": driver, "nodeName": "n",
                "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0", "attributes": attributes}],
            },
        }))
        .unwrap()
    }

    fn node(allocatable: &serde_json::Value) -> Node {
        serde_json::from_value(json!({"status": {"allocatable": allocatable}})).unwrap()
    }

    #[test]
    fn finds_device_plugin_that_offers_gpus() {
        let read = |allocatable| OtherOwners::read(Some(&node(&allocatable)), []);
        let ended = read(json!({"nvidia.com/gpu": "0", "cpu": "8", "example.com/gpu": "4"}));
        assert_eq!(ended, OtherOwners::default());
        for resource in [
            "nvidia.com/gpu",
            "nvidia.com/mig-1g.10gb",
            "volcano.sh/vgpu-number",
        ] {
            let owners = read(json!({resource: "2"}));
            let gpu = GpuUuid::new("GPU-1");
            assert_eq!(owners.reason(&gpu), Some(UnavailableReason::DevicePlugin));
            let problem = owners.check([&gpu].into_iter()).unwrap_err();
            assert!(
                problem.contains(&format!("a device plugin offers {resource}")),
                "{problem}"
            );
            assert_eq!(owners.check([].into_iter()), Ok(()), "no GPU for drava");
        }
    }

    #[test]
    fn finds_driver_that_publishes_same_gpu() {
        for attribute in ["uuid", "gpu.nvidia.com/uuid", "parentUUID"] {
            let owners = OtherOwners::read(None, &[slice("gpu.nvidia.com", attribute, "GPU-1")]);
            let (own, other) = (GpuUuid::new("GPU-1"), GpuUuid::new("GPU-2"));
            assert_eq!(owners.reason(&own), Some(UnavailableReason::OtherDriver));
            assert_eq!(owners.reason(&other), None);
            let problem = owners.check([&own, &other].into_iter()).unwrap_err();
            assert!(
                problem.contains("DRA driver gpu.nvidia.com publishes GPU-1;"),
                "{problem}"
            );
        }
    }
}
