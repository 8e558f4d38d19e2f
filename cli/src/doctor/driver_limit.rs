//! Nodes whose NVIDIA driver cannot limit memory, although a device class requires it.

use std::collections::BTreeSet;

use drava_api::config::{self, MemoryEnforcement};
use drava_api::{DeviceType, names};
use k8s_openapi::api::resource::v1::{Device, DeviceClass};

use super::device::string_attribute;
use super::state::ClusterState;
use super::{Fault, Finding};

/// First release of the NVIDIA driver with memory limits of cgroups.
const FIRST_RELEASE: u32 = 615;

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let classes: Vec<&DeviceClass> = state.classes.iter().filter(|one| is_open(one)).collect();
    let mut found = BTreeSet::new();
    for slice in state.own_slices() {
        let node = slice.spec.node_name.as_deref().unwrap_or_default();
        for device in slice.spec.devices.iter().flatten() {
            if lacks_limit(device) {
                found.insert((node, release(device)));
            }
        }
    }
    let of_node = |(node, release): (&str, Option<u32>)| {
        let finding = |class: &&DeviceClass| finding(class, node, release);
        classes.iter().map(finding).collect::<Vec<_>>()
    };
    found.into_iter().flat_map(of_node).collect()
}

/// Returns whether a class requires the limit and may get a device without.
fn is_open(class: &DeviceClass) -> bool {
    let Some(spec) = &class.spec else {
        return false;
    };
    let configs = spec.config.as_deref().unwrap_or_default();
    // An invalid config is another finding.
    let settings = config::resolve_spec(configs, &[], "");
    let is_required =
        settings.is_ok_and(|settings| settings.memory_enforcement == MemoryEnforcement::Driver);
    let mut selectors = spec.selectors.iter().flatten();
    let is_selected = selectors.any(|selector| {
        let cel = selector.cel.as_ref();
        cel.is_some_and(|cel| {
            cel.expression
                .contains(names::attribute::MEMORY_ENFORCEMENT)
        })
    });
    is_required && !is_selected
}

fn lacks_limit(device: &Device) -> bool {
    let attribute = |name| string_attribute(device, name);
    attribute(names::attribute::TYPE).and_then(DeviceType::parse) == Some(DeviceType::Vgpu)
        && attribute(names::attribute::MEMORY_ENFORCEMENT)
            == Some(MemoryEnforcement::Library.as_str())
}

/// Returns the release of the NVIDIA driver, the first number of its version.
fn release(device: &Device) -> Option<u32> {
    let attributes = device.attributes.as_ref()?;
    let version = attributes
        .get(names::attribute::DRIVER_VERSION)?
        .version
        .as_deref()?;
    version.split('.').next()?.parse().ok()
}

fn finding(class: &DeviceClass, node: &str, release: Option<u32>) -> Finding {
    let class = class.metadata.name.as_deref().unwrap_or_default();
    let remedy = match release {
        Some(release) if release < FIRST_RELEASE => {
            format!("install NVIDIA driver {FIRST_RELEASE} or later on the node (it has {release})")
        }
        _ => "provide cgroup v2 at /sys/fs/cgroup of the node, and see the log of its node driver for what is missing"
            .to_owned(),
    };
    Finding {
        fault: Fault::DriverLimitMissing,
        object: format!("node {node}"),
        problem: format!(
            "device class {class} requires memory.enforcement: driver, and the NVIDIA driver of the node cannot limit memory"
        ),
        fix: format!(
            "{remedy}, or select devices with {} == \"driver\" in the class",
            names::attribute::MEMORY_ENFORCEMENT
        ),
    }
}
