//! Published GPUs.

use std::collections::BTreeSet;

use drava_api::{DeviceType, names};
use k8s_openapi::api::resource::v1::Device;

use super::state::ClusterState;
use super::{Fault, Finding};

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let mut findings: Vec<Finding> = state
        .excluded_pools
        .iter()
        .map(|problem| excluded(problem))
        .collect();
    let mut gates = BTreeSet::new();
    for slice in state.own_slices() {
        let spec = &slice.spec;
        let node = spec.node_name.as_deref().unwrap_or_default();
        for device in spec.devices.iter().flatten() {
            gates.extend(missing_gates(device, state.is_managed()));
            findings.extend(unhealthy(node, device));
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

/// Returns the gates whose fields the API server has dropped, with the field.
fn missing_gates(device: &Device, is_managed: bool) -> Vec<(&'static str, &'static str)> {
    let mut gates = Vec::new();
    let attributes = device.attributes.as_ref();
    let kind = attributes
        .and_then(|attributes| {
            let qualified = format!("{}/{}", names::DRIVER, names::attribute::TYPE);
            attributes
                .get(names::attribute::TYPE)
                .or_else(|| attributes.get(&qualified))
        })
        .and_then(|value| DeviceType::parse(value.string.as_deref()?));
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

fn unhealthy(node: &str, device: &Device) -> Option<Finding> {
    let mut taints = device.taints.iter().flatten();
    let taint = taints.find(|taint| taint.key == names::UNHEALTHY_TAINT)?;
    if matches!(
        taint.value.as_deref(),
        Some(names::DEVICE_PLUGIN | names::OTHER_DRIVER)
    ) {
        // Found by the resources and slices of the other owner.
        return None;
    }
    if taint.value.as_deref() == Some(names::FOREIGN_INSTANCE) {
        // One finding for all partitions of the GPU, whose counter set has its name.
        let counters = device.consumes_counters.iter().flatten().next();
        let gpu = counters.map_or(&device.name, |counters| &counters.counter_set);
        return Some(Finding {
            fault: Fault::ForeignInstance,
            object: format!("{gpu} of node {node}"),
            problem: "MIG instances that drava did not create exclude partitions".to_owned(),
            fix: "find them with nvidia-smi mig -lgi on the node, and destroy those that are not in use"
                .to_owned(),
        });
    }
    Some(Finding {
        fault: Fault::GpuUnhealthy,
        object: format!("device {} of node {node}", device.name),
        problem: format!(
            "the GPU is unhealthy: {}",
            taint.value.as_deref().unwrap_or("no reason")
        ),
        fix: format!(
            "see kubectl get events --field-selector involvedObject.name={node}, and repair or reset the GPU"
        ),
    })
}
