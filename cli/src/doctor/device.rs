//! Published GPUs.

use std::collections::BTreeSet;

use drava_api::unavailable::UnavailableReason;
use drava_api::{DeviceType, names};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, ResourceClaim};

use super::state::ClusterState;
use super::{Fault, Finding};

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let mut findings: Vec<Finding> = state
        .excluded_pools
        .iter()
        .map(|problem| excluded(problem))
        .collect();
    findings.extend(state.unreadable.iter().map(unreadable));
    let mut gates = BTreeSet::new();
    for slice in state.own_slices() {
        let spec = &slice.spec;
        let node = spec.node_name.as_deref().unwrap_or_default();
        for device in spec.devices.iter().flatten() {
            gates.extend(missing_gates(device, state.is_managed()));
            findings.extend(unusable(state, &spec.pool.name, node, device));
        }
    }
    findings.extend(gates.into_iter().map(|(gate, field)| Finding {
        fault: Fault::FieldsDropped,
        object: "API server".to_owned(),
        problem: format!("devices of drava have no field {field}, because the feature gate {gate} is off"),
        fix: format!(
            "start kube-apiserver, kube-scheduler, kube-controller-manager and the kubelets with --feature-gates={gate}=true"
        ),
    }));
    findings
}

fn excluded(problem: &str) -> Finding {
    Finding {
        fault: Fault::PoolExcluded,
        object: "resourceslices".to_owned(),
        problem: problem.to_owned(),
        fix: "restart the node driver of the node".to_owned(),
    }
}

fn unreadable((kind, object): &(String, String)) -> Finding {
    let (name, cause) = object.split_once(": ").unwrap_or((object, ""));
    let effect = match kind.as_str() {
        "ResourceClaim" => {
            "; its devices count as taken, and no other device of their pools is allocated"
        }
        _ => "; drava works without it",
    };
    Finding {
        fault: Fault::ObjectUnreadable,
        object: format!("{} {name}", kind.to_lowercase()),
        problem: format!("the object cannot be read: {cause}{effect}"),
        fix: "repair the field or delete the object; update drava if a newer release wrote it"
            .to_owned(),
    }
}

/// Returns the gates whose fields the API server has dropped, with the field.
fn missing_gates(device: &Device, is_managed: bool) -> Vec<(&'static str, &'static str)> {
    let mut gates = Vec::new();
    let kind = string_attribute(device, names::attribute::TYPE).and_then(DeviceType::parse);
    if kind == Some(DeviceType::Vgpu) && device.allow_multiple_allocations != Some(true) {
        gates.push(("DRAConsumableCapacity", "allowMultipleAllocations"));
    }
    if device.consumes_counters.as_ref().is_none_or(Vec::is_empty) {
        gates.push(("DRAPartitionableDevices", "consumesCounters"));
    }
    let mut taints = device.taints.iter().flatten();
    if is_managed && !taints.any(|taint| taint.key == names::MANAGED_TAINT) {
        gates.push(("DRADeviceTaints", "taints"));
    }
    gates
}

/// Returns the value of an attribute with or without the domain of drava.
pub(super) fn string_attribute<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    attribute(device, name)?.string.as_deref()
}

/// Returns an attribute that is a number, if it is one of `u32`.
pub(super) fn int_attribute(device: &Device, name: &str) -> Option<u32> {
    u32::try_from(attribute(device, name)?.int?).ok()
}

fn attribute<'a>(device: &'a Device, name: &str) -> Option<&'a DeviceAttribute> {
    let attributes = device.attributes.as_ref()?;
    let own = attributes.get(name);
    own.or_else(|| attributes.get(&format!("{}/{name}", names::DRIVER)))
}

/// Returns the finding about a device that must not be used.
fn unusable(state: &ClusterState, pool: &str, node: &str, device: &Device) -> Option<Finding> {
    let mut taints = device.taints.iter().flatten();
    let taint = taints.find(|taint| taint.key == names::UNHEALTHY_TAINT)?;
    let value = taint.value.as_deref();
    match value.and_then(UnavailableReason::parse) {
        None => Some(unhealthy(node, device, value.unwrap_or("no reason"))),
        Some(UnavailableReason::ForeignInstance) => Some(foreign_instance(node, device)),
        // Found by the resources and slices of the other owner.
        Some(UnavailableReason::DevicePlugin | UnavailableReason::OtherDriver) => None,
        Some(reason) => unavailable(state, pool, node, device, reason),
    }
}

/// Returns the finding about partitions of a GPU: one for all, the counter set has the name of the GPU.
fn foreign_instance(node: &str, device: &Device) -> Finding {
    let counters = device.consumes_counters.iter().flatten().next();
    let gpu = counters.map_or(&device.name, |counters| &counters.counter_set);
    Finding {
        fault: Fault::ForeignInstance,
        object: format!("{gpu} of node {node}"),
        problem: "MIG instances that drava did not create exclude partitions".to_owned(),
        fix:
            "find them with nvidia-smi mig -lgi on the node, and destroy those that are not in use"
                .to_owned(),
    }
}

fn unhealthy(node: &str, device: &Device, value: &str) -> Finding {
    Finding {
        fault: Fault::GpuUnhealthy,
        object: format!("device {} of node {node}", device.name),
        problem: format!("the GPU is unhealthy: {value}"),
        fix: match value {
            "fabric-not-ready" => {
                "start the fabric manager of the NVIDIA driver's version on the node (nvidia-fabricmanager, with nvlsm on HGX B200 \
                 and later)"
                    .to_owned()
            }
            "memory-repair-failed" => "replace the GPU".to_owned(),
            _ => format!(
                "see kubectl get events --field-selector involvedObject.name={node}, and repair or reset the GPU"
            ),
        },
    }
}

/// Returns the finding about a device that its GPU does not offer any longer. After a change of the mode or of the node
/// profile, the node driver withdraws the device itself when no claim holds it.
fn unavailable(
    state: &ClusterState,
    pool: &str,
    node: &str,
    device: &Device,
    reason: UnavailableReason,
) -> Option<Finding> {
    let holders = holders(state, pool, &device.name);
    let is_mode = matches!(
        reason,
        UnavailableReason::Mig | UnavailableReason::MigDisabled
    );
    if holders.is_empty() && is_mode {
        return None;
    }
    let uuid = string_attribute(device, names::attribute::UUID).unwrap_or("UUID");
    // A reset requires that the GPU is drained.
    let deletion = (!holders.is_empty() && !reason.is_reset())
        .then(|| format!("delete the pods that use {}", holders.join(", ")));
    let fixes: Vec<String> = [reason.remedy_of_gpu(uuid), deletion]
        .into_iter()
        .flatten()
        .collect();
    (!fixes.is_empty()).then(|| Finding {
        fault: Fault::DeviceUnavailable,
        object: format!("device {} of node {node}", device.name),
        problem: reason.problem().to_owned(),
        fix: fixes.join(", or "),
    })
}

/// Returns the claims that hold a device.
fn holders(state: &ClusterState, pool: &str, device: &str) -> Vec<String> {
    let holds = |claim: &&ResourceClaim| {
        let allocation = claim
            .status
            .as_ref()
            .and_then(|status| status.allocation.as_ref());
        let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
        let mut results = devices
            .iter()
            .flat_map(|devices| devices.results.iter().flatten());
        results.any(|result| {
            result.driver == names::DRIVER && result.pool == pool && result.device == device
        })
    };
    let name = |claim: &ResourceClaim| {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let meta = &claim.metadata;
        format!(
            "resourceclaim {}/{}",
            part(&meta.namespace),
            part(&meta.name)
        )
    };
    state.claims.iter().filter(holds).map(name).collect()
}
