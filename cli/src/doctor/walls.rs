//! GPUs that cannot enforce what a device class requires: memory limits by the NVIDIA driver, or shares of the multiprocessors.

use std::collections::BTreeSet;

use drava_api::config::{self, MemoryEnforcement, Settings};
use drava_api::obstacle::{LimitObstacle, SpatialObstacle};
use drava_api::{DeviceType, names};
use k8s_openapi::api::resource::v1::{Device, DeviceClass};

use super::device::string_attribute;
use super::state::ClusterState;
use super::{Fault, Finding};

/// What a device class can require.
struct Wall {
    fault: Fault,
    /// Field of the config.
    field: &'static str,
    /// Attribute with the obstacle; a class that selects by it, or by `alternative`, gets no device without the wall.
    attribute: &'static str,
    alternative: Option<&'static str>,
    /// CEL expression that selects devices with the wall, without the prefix of the attribute.
    selector: &'static str,
    is_required: fn(&Settings) -> bool,
    /// Problem and remedy of a device.
    obstacle: fn(&Device) -> Option<(&'static str, String)>,
}

const WALLS: [Wall; 2] = [
    Wall {
        fault: Fault::DriverLimitMissing,
        field: "memory.enforcement: driver",
        attribute: names::attribute::MEMORY_ENFORCEMENT_OBSTACLE,
        alternative: Some(names::attribute::MEMORY_ENFORCEMENT),
        selector: "memoryEnforcement == \"driver\"",
        is_required: |settings| settings.memory_enforcement == MemoryEnforcement::Driver,
        obstacle: limit_obstacle,
    },
    Wall {
        fault: Fault::SpatialMissing,
        field: "computePolicy: spatial",
        attribute: names::attribute::SPATIAL_OBSTACLE,
        alternative: None,
        selector: "spatialObstacle == \"none\"",
        is_required: Settings::is_spatial,
        obstacle: spatial_obstacle,
    },
];

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    WALLS.iter().flat_map(|wall| missing(state, wall)).collect()
}

fn missing(state: &ClusterState, wall: &Wall) -> Vec<Finding> {
    let open = state.classes.iter().filter(|class| is_open(class, wall));
    let classes: Vec<&DeviceClass> = open.collect();
    let mut found = BTreeSet::new();
    for slice in state.own_slices() {
        let node = slice.spec.node_name.as_deref().unwrap_or_default();
        let devices = slice.spec.devices.iter().flatten();
        found.extend(devices.filter_map(|device| {
            let (problem, remedy) = (wall.obstacle)(device)?;
            Some((node, problem, remedy))
        }));
    }
    let of_node = |(node, problem, remedy): (&str, &str, String)| {
        let finding = |class: &&DeviceClass| Finding {
            fault: wall.fault,
            object: format!("node {node}"),
            problem: format!(
                "device class {} requires {}, and {problem}",
                class.metadata.name.as_deref().unwrap_or_default(),
                wall.field
            ),
            fix: format!(
                "{remedy}, or select devices with {} in the class",
                wall.selector
            ),
        };
        classes.iter().map(finding).collect::<Vec<_>>()
    };
    found.into_iter().flat_map(of_node).collect()
}

/// Returns whether a class requires the wall and may get a device without.
fn is_open(class: &DeviceClass, wall: &Wall) -> bool {
    let Some(spec) = &class.spec else {
        return false;
    };
    let configs = spec.config.as_deref().unwrap_or_default();
    // An invalid config is another finding.
    let settings = config::resolve_spec(configs, &[], "");
    let is_required = settings.is_ok_and(|settings| (wall.is_required)(&settings));
    let mut selectors = spec.selectors.iter().flatten();
    let is_selected = selectors.any(|selector| {
        let names = |attribute: &str| {
            let cel = selector.cel.as_ref();
            cel.is_some_and(|cel| cel.expression.contains(attribute))
        };
        names(wall.attribute) || wall.alternative.is_some_and(names)
    });
    is_required && !is_selected
}

fn device_type(device: &Device) -> Option<DeviceType> {
    string_attribute(device, names::attribute::TYPE).and_then(DeviceType::parse)
}

fn limit_obstacle(device: &Device) -> Option<(&'static str, String)> {
    let enforcement = string_attribute(device, names::attribute::MEMORY_ENFORCEMENT)?;
    if device_type(device) != Some(DeviceType::Vgpu)
        || enforcement != MemoryEnforcement::Library.as_str()
    {
        return None;
    }
    let obstacle = string_attribute(device, names::attribute::MEMORY_ENFORCEMENT_OBSTACLE);
    // A node driver of another version can publish one that is not known here.
    let obstacle = obstacle.and_then(LimitObstacle::parse);
    let obstacle = obstacle.unwrap_or(LimitObstacle::Failed);
    Some((obstacle.problem(), obstacle.remedy().to_owned()))
}

/// A GPU in an exclusive mode has no shares: only the whole GPU shows the reason.
fn spatial_obstacle(device: &Device) -> Option<(&'static str, String)> {
    if device_type(device) == Some(DeviceType::Mig) {
        return None;
    }
    let obstacle = string_attribute(device, names::attribute::SPATIAL_OBSTACLE)?;
    let obstacle = SpatialObstacle::parse(obstacle)?;
    let uuid = string_attribute(device, names::attribute::UUID).unwrap_or("UUID");
    Some((obstacle.problem(), obstacle.remedy().replace("UUID", uuid)))
}
