//! GPUs that cannot enforce what a device class requires: memory limits by the NVIDIA driver, or shares of the multiprocessors.

use std::collections::{BTreeMap, BTreeSet};

use drava_api::config::{self, MemoryEnforcement, Settings};
use drava_api::node_profile::{GpuIdentity, NodeSettings};
use drava_api::obstacle::{LimitObstacle, SpatialObstacle};
use drava_api::{DeviceType, names};
use k8s_openapi::api::resource::v1::{Device, DeviceAllocationConfiguration, DeviceClass};

use super::device::{int_attribute, string_attribute};
use super::state::ClusterState;
use super::{Fault, Finding};

/// Most nodes that a note names.
const MAX_NODES: usize = 3;

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

/// Returns what is no fault: shares of classes that take any wall, on nodes where libvgpu alone limits their memory.
pub(super) fn notes(state: &ClusterState) -> Vec<String> {
    let [wall, _] = &WALLS;
    let mut nodes: BTreeMap<(&str, String), BTreeSet<&str>> = BTreeMap::new();
    for device in devices(state) {
        let Some((problem, remedy)) = (wall.obstacle)(device.device) else {
            continue;
        };
        let takes_any = |class: &DeviceClass| {
            let of_class = of_class(class, &device, wall);
            let is_auto =
                |settings: &Settings| settings.memory_enforcement == MemoryEnforcement::Auto;
            of_class.is_some_and(|of_class| is_auto(&of_class.settings) && !of_class.is_selected)
        };
        if state.classes.iter().any(takes_any) {
            let of_obstacle = nodes.entry((problem, remedy)).or_default();
            of_obstacle.insert(device.node);
        }
    }
    let note = |((problem, remedy), nodes): ((&str, String), BTreeSet<&str>)| {
        let mut named: Vec<&str> = nodes.iter().copied().take(MAX_NODES).collect();
        let more = format!("{} more", nodes.len().saturating_sub(MAX_NODES));
        if nodes.len() > MAX_NODES {
            named.push(&more);
        }
        format!(
            "libvgpu alone limits the memory of shares on {}: {problem}; {remedy}",
            named.join(", ")
        )
    };
    nodes.into_iter().map(note).collect()
}

/// A device of drava.
struct Published<'a> {
    node: &'a str,
    device: &'a Device,
    /// The profile of its node, and what that sets for options that a class leaves out.
    profile: Option<String>,
    defaults: Settings,
}

fn devices(state: &ClusterState) -> impl Iterator<Item = Published<'_>> {
    let nodes = state.nodes.iter().map(|node| {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        (name, node.metadata.labels.clone().unwrap_or_default())
    });
    let nodes: BTreeMap<&str, BTreeMap<String, String>> = nodes.collect();
    state.own_slices().flat_map(move |slice| {
        let node = slice.spec.node_name.as_deref().unwrap_or_default();
        let labels = nodes.get(node).cloned().unwrap_or_default();
        let devices = slice.spec.devices.iter().flatten();
        devices.map(move |device| {
            let (profile, defaults) = defaults(state, &labels, device);
            Published {
                node,
                device,
                profile,
                defaults,
            }
        })
    })
}

/// Returns what the profile of a node with these labels sets for the shares of a GPU.
fn defaults(
    state: &ClusterState,
    labels: &BTreeMap<String, String>,
    device: &Device,
) -> (Option<String>, Settings) {
    let uuid = string_attribute(device, names::attribute::UUID).unwrap_or_default();
    let gpu = GpuIdentity {
        uuid,
        index: int_attribute(device, names::attribute::INDEX).unwrap_or(u32::MAX),
        product_name: string_attribute(device, names::attribute::PRODUCT_NAME).unwrap_or_default(),
    };
    let profiles = state.profiles.iter().flatten();
    let settings = NodeSettings::resolve(profiles, labels, [gpu]);
    let defaults = settings.gpu(uuid).share_defaults();
    (settings.profile.map(|profile| profile.name), defaults)
}

fn missing(state: &ClusterState, wall: &Wall) -> Vec<Finding> {
    let mut lacking = Vec::new();
    let mut is_anywhere = false;
    for device in devices(state) {
        match (wall.obstacle)(device.device) {
            Some((problem, remedy)) => lacking.push((device, problem, remedy)),
            None => is_anywhere |= (wall.has)(device.device),
        }
    }
    let of_class = |class: &DeviceClass| {
        let name = class.metadata.name.as_deref().unwrap_or_default();
        let finding = |(device, problem, remedy): &(Published<'_>, &str, String)| {
            let (problem, fix) = match requirement(class, device, wall)? {
                Requirement::AnyDevice => (
                    format!("device class {name} requires {}, and {problem}", wall.field),
                    format!(
                        "{remedy}, or select devices with {} in the class",
                        wall.selector
                    ),
                ),
                Requirement::Profile(profile) => (
                    format!(
                        "GpuNodeProfile {profile} requires {} for device class {name}, and {problem}",
                        wall.field
                    ),
                    format!("{remedy}, or change spec.defaults of the profile"),
                ),
                Requirement::Selected if is_anywhere => return None,
                Requirement::Selected => (
                    format!(
                        "device class {name} selects {}, which no GPU of the cluster has: {problem}",
                        wall.selector
                    ),
                    remedy.clone(),
                ),
            };
            Some(Finding {
                fault: wall.fault,
                object: format!("node {}", device.node),
                problem,
                fix,
            })
        };
        lacking.iter().filter_map(finding).collect::<Vec<_>>()
    };
    state.classes.iter().flat_map(of_class).collect()
}

/// How a class requires a wall.
enum Requirement {
    /// A device without it may be allocated, and is refused by the node driver.
    AnyDevice,
    /// The same, by the profile of the node with this name.
    Profile(String),
    /// Only devices with it are allocated.
    Selected,
}

fn requirement(class: &DeviceClass, device: &Published<'_>, wall: &Wall) -> Option<Requirement> {
    let of_class = of_class(class, device, wall)?;
    if !(wall.is_required)(&of_class.settings) {
        return None;
    }
    let is_own = resolved(class, Settings::default()).is_some_and(|own| (wall.is_required)(&own));
    Some(match (of_class.is_selected, is_own, &device.profile) {
        (true, ..) => Requirement::Selected,
        (false, false, Some(profile)) => Requirement::Profile(profile.clone()),
        (false, ..) => Requirement::AnyDevice,
    })
}

/// What a class says of the shares of a device.
struct OfClass {
    settings: Settings,
    /// Whether its selectors name the wall.
    is_selected: bool,
}

/// Returns what a class says of the shares of a device; `None` if they are not of the class, or its config is invalid, which is another
/// finding.
fn of_class(class: &DeviceClass, device: &Published<'_>, wall: &Wall) -> Option<OfClass> {
    let spec = class.spec.as_ref()?;
    let selectors = spec.selectors.iter().flatten();
    let expressions =
        selectors.filter_map(|selector| Some(selector.cel.as_ref()?.expression.as_str()));
    let expressions: Vec<&str> = expressions.collect();
    let name = |text: &str| {
        expressions
            .iter()
            .any(|expression| expression.contains(text))
    };
    // A class without options of drava may be one for whole GPUs, for partitions, or for devices of another driver.
    let is_configured = spec.config.iter().flatten().any(|config| {
        let opaque = config.opaque.as_ref();
        opaque.is_some_and(|opaque| opaque.driver == names::DRIVER)
    });
    let is_of_shares = name(names::DRIVER)
        && ![".type == \"gpu\"", ".type == \"mig\""]
            .iter()
            .any(|kind| name(kind));
    if !is_configured && !is_of_shares {
        return None;
    }
    Some(OfClass {
        settings: resolved(class, device.defaults.clone())?,
        is_selected: name(wall.attribute) || wall.alternative.is_some_and(name),
    })
}

/// Returns the options of a class, over those of a node profile.
fn resolved(class: &DeviceClass, defaults: Settings) -> Option<Settings> {
    let spec = class.spec.as_ref()?;
    let configs = spec.config.iter().flatten();
    let configs = configs.map(|config| DeviceAllocationConfiguration {
        source: "FromClass".to_owned(),
        opaque: config.opaque.clone(),
        requests: None,
    });
    let configs: Vec<_> = configs.collect();
    config::resolve_over(defaults, &configs, "").ok()
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
