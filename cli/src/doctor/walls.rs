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
    /// Whether a device without an obstacle has the wall.
    has: fn(&Device) -> bool,
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
        has: |device| {
            let enforcement = string_attribute(device, names::attribute::MEMORY_ENFORCEMENT);
            enforcement == Some(MemoryEnforcement::Driver.as_str())
        },
        obstacle: limit_obstacle,
    },
    Wall {
        fault: Fault::SpatialMissing,
        field: "computePolicy: spatial",
        attribute: names::attribute::SPATIAL_OBSTACLE,
        alternative: None,
        selector: "spatialObstacle == \"none\"",
        is_required: Settings::is_spatial,
        has: |device| {
            string_attribute(device, names::attribute::SPATIAL_OBSTACLE) == Some("none")
                && device_type(device) == Some(DeviceType::Vgpu)
        },
        obstacle: spatial_obstacle,
    },
];

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    WALLS.iter().flat_map(|wall| missing(state, wall)).collect()
}

fn missing(state: &ClusterState, wall: &Wall) -> Vec<Finding> {
    let mut found = BTreeSet::new();
    let mut is_anywhere = false;
    for slice in state.own_slices() {
        let node = slice.spec.node_name.as_deref().unwrap_or_default();
        for device in slice.spec.devices.iter().flatten() {
            match (wall.obstacle)(device) {
                Some((problem, remedy)) => {
                    found.insert((node, problem, remedy));
                }
                None => is_anywhere |= (wall.has)(device),
            }
        }
    }
    let requirements = state.classes.iter().filter_map(|class| {
        let name = class.metadata.name.as_deref().unwrap_or_default();
        Some((name, requirement(class, wall)?))
    });
    let of_class = |(class, requirement): (&str, Requirement)| {
        let finding = |(node, problem, remedy): &(&str, &str, String)| {
            let (problem, fix) = match requirement {
                Requirement::OfAnyDevice => (
                    format!(
                        "device class {class} requires {}, and {problem}",
                        wall.field
                    ),
                    format!(
                        "{remedy}, or select devices with {} in the class",
                        wall.selector
                    ),
                ),
                Requirement::OfSelected if is_anywhere => return None,
                Requirement::OfSelected => (
                    format!(
                        "device class {class} selects {}, which no GPU of the cluster has: {problem}",
                        wall.selector
                    ),
                    remedy.clone(),
                ),
            };
            Some(Finding {
                fault: wall.fault,
                object: format!("node {node}"),
                problem,
                fix,
            })
        };
        found.iter().filter_map(finding).collect::<Vec<_>>()
    };
    requirements.flat_map(of_class).collect()
}

/// How a class requires a wall.
#[derive(Clone, Copy)]
enum Requirement {
    /// A device without it may be allocated, and is refused by the node driver.
    OfAnyDevice,
    /// Only devices with it are allocated.
    OfSelected,
}

fn requirement(class: &DeviceClass, wall: &Wall) -> Option<Requirement> {
    let spec = class.spec.as_ref()?;
    let configs = spec.config.as_deref().unwrap_or_default();
    // An invalid config is another finding.
    let settings = config::resolve_spec(configs, &[], "").ok()?;
    if !(wall.is_required)(&settings) {
        return None;
    }
    let mut selectors = spec.selectors.iter().flatten();
    let is_selected = selectors.any(|selector| {
        let names = |attribute: &str| {
            let cel = selector.cel.as_ref();
            cel.is_some_and(|cel| cel.expression.contains(attribute))
        };
        names(wall.attribute) || wall.alternative.is_some_and(names)
    });
    Some(match is_selected {
        true => Requirement::OfSelected,
        false => Requirement::OfAnyDevice,
    })
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
