//! Annotations of a pod that select GPUs and policies for all of its containers.

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy, Placement};
use drava_api::names;

use super::finding::{Findings, MAX_EXPRESSION_BYTES, RefusalCause, WarningCause};
use super::pod::PodView;

const MODES: [&str; 2] = ["volcano.sh/vgpu-mode", "nvidia.com/vgpu-mode"];
const USE_TYPE: &str = "nvidia.com/use-gputype";
const AVOID_TYPE: &str = "nvidia.com/nouse-gputype";
const USE_UUID: [&str; 2] = ["nvidia.com/use-gpuuuid", "volcano.sh/vgpu-use-gpuuuid"];
const AVOID_UUID: [&str; 2] = ["nvidia.com/nouse-gpuuuid", "volcano.sh/vgpu-nouse-gpuuuid"];
const NUMA_BIND: &str = "nvidia.com/numa-bind";
const NODE_POLICY: &str = "hami.io/node-scheduler-policy";
const GPU_POLICY: &str = "hami.io/gpu-scheduler-policy";
/// Annotations without equivalent.
const IGNORED: [&str; 2] = [
    "hami.io/device-scoring-weights",
    "volcano.sh/vgpu-podgroup-policy",
];

/// Kind of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// libvgpu enforces the share.
    Vgpu,
    /// A MIG partition.
    Mig,
}

/// Options of all GPUs of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct PodOptions {
    pub(super) mode: Option<Mode>,
    /// CEL expressions that a device satisfies.
    pub(super) selectors: Vec<String>,
    pub(super) placement: Option<Placement>,
    /// All GPUs of a container belong to one NUMA node.
    pub(super) binds_numa: bool,
}

/// Reads the annotations, and the fields of the spec that concern all containers.
pub(super) fn read(pod: &PodView, findings: &mut Findings) -> PodOptions {
    if let Some(name) = &pod.spec.runtime_class_name
        && name.contains("nvidia")
    {
        let name = name.clone();
        findings.warn("spec.runtimeClassName", WarningCause::RuntimeClass { name });
    }
    for name in IGNORED {
        if pod.annotation(name).is_some() {
            findings.warn(field(name), WarningCause::AnnotationIgnored);
        }
    }
    let node = policy(pod, NODE_POLICY, node_policy, findings);
    let gpu = policy(pod, GPU_POLICY, gpu_policy, findings);
    PodOptions {
        mode: mode(pod, findings),
        selectors: selectors(pod, findings),
        placement: (node.is_some() || gpu.is_some()).then_some(Placement { node, gpu }),
        binds_numa: is_set(pod, NUMA_BIND, findings),
    }
}

fn field(annotation: &str) -> String {
    format!("metadata.annotations[{annotation}]")
}

fn mode(pod: &PodView, findings: &mut Findings) -> Option<Mode> {
    let mut found: Option<(&'static str, Mode)> = None;
    for name in MODES {
        let Some(value) = pod.annotation(name) else {
            continue;
        };
        let mode = match value {
            "hami-core" => Mode::Vgpu,
            "mig" => Mode::Mig,
            // An empty value selects no mode.
            "" => continue,
            other => {
                let mode = other.to_owned();
                findings.refuse(field(name), RefusalCause::UnknownMode { mode });
                continue;
            }
        };
        match found {
            Some((other, first)) if first != mode => {
                let mode = value.to_owned();
                findings.refuse(field(name), RefusalCause::ModesDiffer { mode, other });
            }
            _ => found = Some((name, mode)),
        }
    }
    found.map(|(_, mode)| mode)
}

/// Returns the policy among nodes, of which HAMi has binpack and spread.
fn node_policy(item: &str) -> Option<NodePlacementPolicy> {
    match item {
        "binpack" => Some(NodePlacementPolicy::Binpack),
        "spread" => Some(NodePlacementPolicy::Spread),
        _ => None,
    }
}

/// Returns the policy among GPUs.
fn gpu_policy(item: &str) -> Option<GpuPlacementPolicy> {
    match item {
        "binpack" => Some(GpuPlacementPolicy::Binpack),
        "spread" => Some(GpuPlacementPolicy::Spread),
        "topology-aware" => Some(GpuPlacementPolicy::Topology),
        "numa" => Some(GpuPlacementPolicy::Numa),
        _ => None,
    }
}

/// Returns the policy of an annotation. HAMi accepts a list, the most preferred policy first; only the first one counts.
fn policy<T>(
    pod: &PodView,
    name: &str,
    equivalent: impl Fn(&str) -> Option<T>,
    findings: &mut Findings,
) -> Option<T> {
    let mut found = None;
    for item in items(pod.annotation(name)?) {
        let policy = item.to_owned();
        match equivalent(item) {
            Some(policy) if found.is_none() => found = Some(policy),
            Some(_) => findings.warn(field(name), WarningCause::PolicyIgnored { policy }),
            None if gpu_policy(item).is_some() => {
                findings.warn(
                    field(name),
                    WarningCause::PolicyWithoutEquivalent { policy },
                );
            }
            None => findings.refuse(field(name), RefusalCause::UnknownPolicy { policy }),
        }
    }
    found
}

fn is_set(pod: &PodView, name: &str, findings: &mut Findings) -> bool {
    match pod.annotation(name) {
        None | Some("" | "false") => false,
        Some("true") => true,
        Some(other) => {
            let value = other.to_owned();
            findings.refuse(field(name), RefusalCause::NotBoolean { value });
            false
        }
    }
}

fn selectors(pod: &PodView, findings: &mut Findings) -> Vec<String> {
    let mut selectors = Vec::new();
    let mut add = |name: &str, expression: String, findings: &mut Findings| {
        if expression.len() > MAX_EXPRESSION_BYTES {
            findings.refuse(field(name), RefusalCause::ListTooLong);
        } else {
            selectors.push(expression);
        }
    };
    for (name, is_wanted) in [(USE_TYPE, true), (AVOID_TYPE, false)] {
        let models: Vec<&str> = items(pod.annotation(name).unwrap_or_default()).collect();
        if !models.is_empty() {
            add(name, model_expression(&models, is_wanted), findings);
        }
    }
    for (names, is_wanted) in [(USE_UUID, true), (AVOID_UUID, false)] {
        for name in names {
            let uuids: Vec<&str> = items(pod.annotation(name).unwrap_or_default()).collect();
            for uuid in uuids.iter().filter(|uuid| !uuid.starts_with("GPU-")) {
                let uuid = (*uuid).to_owned();
                findings.refuse(field(name), RefusalCause::NotGpuUuid { uuid });
            }
            if !uuids.is_empty() {
                add(name, uuid_expression(&uuids, is_wanted), findings);
            }
        }
    }
    selectors
}

/// Returns the items of a comma-separated list.
fn items(list: &str) -> impl Iterator<Item = &str> {
    list.split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty())
}

/// Models match as in HAMi: a part of the product name, case-insensitive. HAMi puts `NVIDIA-` before the product name.
fn model_expression(models: &[&str], is_wanted: bool) -> String {
    let attribute = format!(
        "device.attributes[{}].{}.lowerAscii()",
        literal(names::DRIVER),
        names::attribute::PRODUCT_NAME
    );
    let any = models
        .iter()
        .map(|model| {
            let model = model.to_ascii_lowercase();
            let model = model.strip_prefix("nvidia-").unwrap_or(&model);
            format!("{attribute}.contains({})", literal(model))
        })
        .collect::<Vec<_>>()
        .join(" || ");
    if is_wanted { any } else { format!("!({any})") }
}

fn uuid_expression(uuids: &[&str], is_wanted: bool) -> String {
    let list = uuids
        .iter()
        .map(|uuid| literal(uuid))
        .collect::<Vec<_>>()
        .join(", ");
    let attribute = format!(
        "device.attributes[{}].{}",
        literal(names::DRIVER),
        names::attribute::UUID
    );
    let any = format!("{attribute} in [{list}]");
    if is_wanted { any } else { format!("!({any})") }
}

/// Returns a CEL string literal. The escapes of JSON are escapes of CEL too, so that no value can end the literal.
fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
