//! What a node can enforce, what it says about it, and what claims get: the same for every combination of NVIDIA driver, kernel,
//! cgroups and class. `docs/security.md` has the table.

use std::fs;
use std::path::Path;

use drava_api::config::ComputePolicy;
use drava_api::obstacle::{LimitObstacle, SpatialObstacle};
use drava_dra_driver::gpus::inventory::NodeInventory;
use drava_dra_driver::prepare::plan::plan;
use drava_nvml::ComputeMode;
use k8s_openapi::api::resource::v1::Device;
use serde_json::{Value, json};
use simulator_machine::testing::{Machine, skips_without_root};

use crate::driver_limits::{CONTAINER, Limited, SHARE_BYTES, b200, one_b200, only, probed};
use crate::fixture::Allocated::Share;
use crate::fixture::{POOL, claim_ref, claim_with, config, h100x2};
use crate::publish::{desired, devices};

/// What the driver of a machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Nvidia {
    /// Release 580.
    Old,
    /// Release 615 with this backend.
    New(&'static str),
}

/// Cgroups of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// Version 2; all ancestors of containers enable the controllers that the kernel has.
    Delegated,
    /// Version 2; an ancestor enables no controller, as systemd leaves it.
    MissingAncestor,
    /// Version 2; an ancestor of the container refuses to enable one.
    RefusingAncestor,
    /// Version 2; the root refuses.
    RefusingRoot,
    /// Version 1.
    V1,
}

const LAYOUTS: [Layout; 5] = [
    Layout::Delegated,
    Layout::MissingAncestor,
    Layout::RefusingAncestor,
    Layout::RefusingRoot,
    Layout::V1,
];

const ANCESTORS: [&str; 3] = ["", "kubepods", "kubepods/pod"];

/// Creates the directories of a container.
fn lay_out(root: &Path, layout: Layout, has_dmem: bool) {
    fs::create_dir_all(root.join(CONTAINER.trim_start_matches('/'))).unwrap();
    if layout == Layout::V1 {
        return;
    }
    let controllers = if has_dmem {
        "cpu dmem memory"
    } else {
        "cpu memory"
    };
    fs::write(root.join("cgroup.controllers"), controllers).unwrap();
    for ancestor in ANCESTORS {
        let control = root.join(ancestor).join("cgroup.subtree_control");
        let refuses = match layout {
            Layout::RefusingRoot => ancestor.is_empty(),
            Layout::RefusingAncestor => ancestor == "kubepods/pod",
            Layout::Delegated | Layout::MissingAncestor | Layout::V1 => false,
        };
        if refuses {
            // Cannot be written, also by root.
            fs::create_dir(control).unwrap();
            continue;
        }
        let is_enabled = layout == Layout::Delegated && has_dmem;
        fs::write(control, if is_enabled { "+dmem" } else { "" }).unwrap();
    }
}

/// The table of the documentation: whether the NVIDIA driver limits memory on a node.
fn documented(nvidia: Nvidia, has_dmem: bool, layout: Layout) -> Result<(), LimitObstacle> {
    match (nvidia, layout) {
        (Nvidia::Old, _) => Err(LimitObstacle::OldDriver),
        (_, Layout::V1) => Err(LimitObstacle::NoCgroupV2),
        (Nvidia::New("misc"), _) => Ok(()),
        (Nvidia::New(_), Layout::RefusingRoot) if has_dmem => Err(LimitObstacle::NotEnabled),
        (Nvidia::New(_), _) if !has_dmem => Err(LimitObstacle::NoController),
        (Nvidia::New("none"), _) => Err(LimitObstacle::Refused),
        (Nvidia::New(_), _) => Ok(()),
    }
}

/// Whether the hook of a container gets its limit on a node whose driver can.
fn limits_container(nvidia: Nvidia, layout: Layout) -> bool {
    nvidia == Nvidia::New("misc") || layout != Layout::RefusingAncestor
}

fn text(device: &Device, name: &str) -> String {
    let attributes = device.attributes.as_ref().unwrap();
    attributes[name].string.clone().unwrap()
}

fn class(enforcement: &str, policy: &str) -> Value {
    config(
        "FromClass",
        &json!({"memory": {"enforcement": enforcement}, "computePolicy": policy}),
    )
}

/// Whether the NVIDIA driver limits the memory of a claim of this class, and its policy; or why it is refused.
fn planned(inventory: &NodeInventory, class: &Value) -> Result<(bool, ComputePolicy), String> {
    let claim = claim_with(1, &[Share(0, "8Gi", "30")], class);
    let devices = plan(&claim_ref(1), Some(&claim), POOL, inventory);
    let devices = devices.map_err(|error| error.to_string())?;
    let share = devices[0].share().unwrap();
    Ok((share.limited_by_driver, share.compute_policy))
}

/// Checks that the node publishes the obstacle, and that claims of each class get what it requires or are refused with it.
fn check_claims(node: &NodeInventory, can: Result<(), LimitObstacle>, context: &str) {
    for device in devices(&desired(node)) {
        let enforcement = text(device, "memoryEnforcement");
        assert_eq!(enforcement == "driver", can.is_ok(), "{context}");
        let obstacle = text(device, "memoryEnforcementObstacle");
        let expected = can.map_or_else(LimitObstacle::as_str, |()| "none");
        assert_eq!(obstacle, expected, "{context}");
    }
    for (policy, expected) in [
        ("balance", ComputePolicy::Balance),
        ("fixed", ComputePolicy::Fixed),
        ("spatial", ComputePolicy::Spatial),
    ] {
        for enforcement in ["auto", "driver", "library"] {
            let context = format!("{context}, {enforcement}, {policy}");
            let found = planned(node, &class(enforcement, policy));
            match (enforcement, can) {
                ("library", _) => assert_eq!(found, Ok((false, expected)), "{context}"),
                ("auto", _) => assert_eq!(found, Ok((can.is_ok(), expected)), "{context}"),
                (_, Ok(())) => assert_eq!(found, Ok((true, expected)), "{context}"),
                (_, Err(obstacle)) => {
                    let refused = found.unwrap_err();
                    for part in ["memory.enforcement: driver", &obstacle.to_string()] {
                        assert!(refused.contains(part), "{context}: {refused}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_node_has_the_documented_wall_and_names_it() {
    if skips_without_root() {
        return;
    }
    let mut combinations = 0;
    for nvidia in [
        Nvidia::Old,
        Nvidia::New("none"),
        Nvidia::New("dmem"),
        Nvidia::New("misc"),
    ] {
        for (layout, has_dmem) in LAYOUTS
            .into_iter()
            .flat_map(|one| [(one, true), (one, false)])
        {
            let context = format!("{nvidia:?}, dmem {has_dmem}, {layout:?}");
            let root = tempfile::tempdir().unwrap();
            lay_out(root.path(), layout, has_dmem);
            let machine = match nvidia {
                Nvidia::Old => {
                    let old = one_b200().replace("\"615.71\"", "\"580.65.06\"");
                    let old = old.replace("memoryLimits: {backend: dmem}", "");
                    Machine::start(&old).unwrap()
                }
                Nvidia::New(backend) => b200(root.path(), backend),
            };
            let can = only(probed(&machine, root.path()));
            assert_eq!(can, documented(nvidia, has_dmem, layout), "{context}");
            let mut node = h100x2();
            for gpu in &node.nvml.gpus {
                node.driver_limits.insert(gpu.uuid.clone(), can);
            }
            check_claims(&node, can, &context);
            combinations += 9;
            if can.is_ok() {
                check_hook(nvidia, layout, has_dmem, &context);
            }
        }
    }
    assert_eq!(combinations, 360);
}

/// A container gets its limit, or does not start with a reason.
fn check_hook(nvidia: Nvidia, layout: Layout, has_dmem: bool, context: &str) {
    let Nvidia::New(backend) = nvidia else {
        panic!("{context}")
    };
    let limited = Limited::with(backend, |root| lay_out(root, layout, has_dmem));
    let answer = limited.limit(CONTAINER);
    if limits_container(nvidia, layout) {
        assert_eq!(answer, Ok(()), "{context}");
        assert_eq!(limited.held(), [(CONTAINER.to_owned(), SHARE_BYTES)]);
        return;
    }
    let refused = answer.unwrap_err();
    for part in ["controller dmem in", "kubepods/pod/cgroup.subtree_control"] {
        assert!(refused.contains(part), "{context}: {refused}");
    }
    assert_eq!(limited.held(), [], "{context}");
}

#[test]
fn refuses_spatial_shares_with_the_reason_that_the_node_publishes() {
    let with = |obstacle| {
        let mut node = h100x2();
        match obstacle {
            SpatialObstacle::NoMps | SpatialObstacle::NoLoader | SpatialObstacle::Directory => {
                node.mps = Err(obstacle);
            }
            SpatialObstacle::Exclusive => {
                node.nvml.gpus[0].compute_mode = ComputeMode::ExclusiveProcess;
            }
            SpatialObstacle::Prohibited => {
                node.nvml.gpus[0].compute_mode = ComputeMode::Prohibited;
            }
            SpatialObstacle::OldGpu => node.nvml.gpus[0].compute_capability.major = 6,
            SpatialObstacle::OtherMps => node.nvml.gpus[0].has_mps_clients = true,
        }
        node
    };
    let able = h100x2();
    for enforcement in ["auto", "library"] {
        let spatial = planned(&able, &class(enforcement, "spatial"));
        assert_eq!(spatial, Ok((false, ComputePolicy::Spatial)));
    }
    for device in devices(&desired(&able)) {
        assert_eq!(text(device, "spatialObstacle"), "none");
    }
    for obstacle in SpatialObstacle::ALL {
        let node = with(*obstacle);
        let uuid = node.nvml.gpus[0].uuid.to_string();
        let pool = desired(&node);
        let of_gpu = devices(&pool).into_iter();
        let of_gpu = of_gpu.filter(|device| text(device, "uuid") == uuid);
        let published: Vec<String> = of_gpu.map(|one| text(one, "spatialObstacle")).collect();
        // A GPU in the compute mode Prohibited has no device.
        assert_eq!(
            published.is_empty(),
            *obstacle == SpatialObstacle::Prohibited
        );
        assert!(
            published.iter().all(|one| one == obstacle.as_str()),
            "{published:?}"
        );
        let refused = planned(&node, &class("auto", "spatial")).unwrap_err();
        for part in [
            "gpu-0-vgpu",
            "computePolicy: spatial",
            &obstacle.of_gpu(&uuid),
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        // Shares of the time are another matter.
        let by_time = planned(&node, &class("auto", "balance"));
        assert_eq!(by_time, Ok((false, ComputePolicy::Balance)));
    }
}
