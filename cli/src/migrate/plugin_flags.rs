//! DaemonSets of device plugins: they exclude drava from their nodes, and their flags have equivalents.

use serde_json::Value;

use super::Refused;

/// Flags of the device plugins of NVIDIA, HAMi and Volcano, with what replaces them.
const FLAGS: [(&str, &str); 7] = [
    (
        "--resource-name",
        "the names are those of compatibility.settings.resources of the drava chart",
    ),
    ("--device-split-count", "set splitCount in a GpuNodeProfile"),
    (
        "--device-memory-scaling",
        "set memoryScaling and oversubscription in a GpuNodeProfile",
    ),
    (
        "--device-cores-scaling",
        "set coreScaling in a GpuNodeProfile",
    ),
    (
        "--gpu-strategy",
        "each claim selects a share, a MIG partition or a whole GPU by its device class",
    ),
    (
        "--mig-strategy",
        "claims select MIG profiles; no strategy is needed",
    ),
    ("--device-list-strategy", "drava injects devices by CDI"),
];

/// Parts of the image names of device plugins.
const IMAGES: [&str; 3] = ["k8s-device-plugin", "volcano-vgpu-device-plugin", "/hami"];

fn containers(object: &Value) -> impl Iterator<Item = &Value> {
    let containers = object.pointer("/spec/template/spec/containers");
    containers.and_then(Value::as_array).into_iter().flatten()
}

/// Returns whether a DaemonSet runs a device plugin for NVIDIA GPUs.
pub(super) fn is_device_plugin(object: &Value) -> bool {
    containers(object).any(|container| {
        let image = container["image"].as_str().unwrap_or_default();
        IMAGES.iter().any(|name| image.contains(name))
    })
}

/// Returns the refusal of a device plugin, with what replaces each of its flags.
pub(super) fn refusal(object: &Value) -> Refused {
    let mut reasons = vec![
        "spec.template: a device plugin and drava exclude each other on a node; do not apply it"
            .to_owned(),
    ];
    for (index, container) in containers(object).enumerate() {
        for list in ["command", "args"] {
            let words = container[list].as_array().into_iter().flatten();
            for word in words.filter_map(Value::as_str) {
                let name = word.split_once('=').map_or(word, |(name, _)| name);
                let known = FLAGS.iter().find(|(flag, _)| *flag == name);
                reasons.extend(known.map(|(_, replacement)| {
                    format!("spec.template.spec.containers[{index}].{list}[{word}]: {replacement}")
                }));
            }
        }
    }
    Refused(reasons)
}
