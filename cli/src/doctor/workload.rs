//! Pods: limits that are not enforced, claims that cannot be prepared or lack state on their node, GPUs without a claim.

use drava_api::condition::{ConditionReason, ConditionType};
use drava_api::event::EventReason;
use drava_api::names;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::state::{About, ClusterState};
use super::{Fault, Finding};

/// Event of the kubelet when a container cannot be created.
const CREATION_FAILED: &str = "Failed";

/// Fix of a missing device file of unified memory.
const LOAD_UVM: &str = "load the module on the node: nvidia-modprobe -u -c 0, and keep it loaded with nvidia-persistenced";

/// Errors of a connection to a socket without a server.
const NOT_SERVED: [&str; 3] = [
    "connection refused",
    "no such file or directory",
    "connection error",
];

/// Event of the kubelet.
const PREPARE_FAILED: &str = "FailedPrepareDynamicResources";

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let mut findings = not_enforced(state);
    findings.extend(state_missing(state));
    let nodes: Vec<&str> = state.gpu_nodes().map(|(name, _)| name).collect();
    for pod in &state.pods {
        let Some(node) = drava_allocator::pod::node(pod).filter(|node| nodes.contains(node)) else {
            continue;
        };
        findings.extend(prepare_failed(state, pod, node));
        findings.extend(injection_failed(state, pod, node));
        findings.extend(unclaimed(pod, node));
    }
    findings
}

/// Finds claims whose state on the node is missing and was not repaired since.
fn state_missing(state: &ClusterState) -> Vec<Finding> {
    let finding = |claim: &ResourceClaim| {
        let about = About::Namespaced("ResourceClaim", &claim.metadata);
        let event = |reason: EventReason| state.timed_event(about, reason.as_str());
        let (problem, reported) = event(EventReason::ClaimStateMissing)?;
        let is_repaired = event(EventReason::ClaimStateRepaired)
            .is_some_and(|(_, repaired)| repaired >= reported);
        (!is_repaired && claim.status.as_ref()?.allocation.is_some()).then(|| Finding {
            fault: Fault::StateMissing,
            object: format!("resourceclaim {}", object(&claim.metadata)),
            problem: problem.to_owned(),
            fix: "remove the cause; the node driver repeats the repair every few seconds"
                .to_owned(),
        })
    };
    state.claims.iter().filter_map(finding).collect()
}

/// Returns the fix of a condition, if the condition is a fault.
fn fix(reason: ConditionReason) -> Option<&'static str> {
    match reason {
        ConditionReason::CdiIgnored => {
            Some("set enable_cdi = true in containerd's config; restart containerd and the pod")
        }
        ConditionReason::ProcessNotCounted => Some(
            "use an image with glibc and a dynamically linked program that keeps /etc/ld.so.preload; restart the pod",
        ),
        ConditionReason::HeterogeneousMemory => Some(
            "load the module nvidia-uvm on the node with uvm_disable_hmm=1 (options in /etc/modprobe.d), or use a class without \
             enforcement: required",
        ),
        ConditionReason::OtherGpuUsed => Some(
            "run the pod without privileges and volumes of /dev, or request the GPU in a claim",
        ),
        ConditionReason::MemoryOverLimit | ConditionReason::UsageRegionDamaged => {
            Some("restart the pod, and report the program to drava")
        }
        ConditionReason::Prepared
        | ConditionReason::Interposed
        | ConditionReason::LimitedByDriver
        | ConditionReason::Partly
        | ConditionReason::WholeGpu
        | ConditionReason::Partition
        | ConditionReason::AdminAccess
        | ConditionReason::SharedAddressSpace
        | ConditionReason::Unmetered
        | ConditionReason::NoFault => None,
        // The command that grows a share says so, and events do.
        ConditionReason::Granted
        | ConditionReason::InUse
        | ConditionReason::Released
        | ConditionReason::BaseNotPrepared
        | ConditionReason::Refused => None,
        // The controller evicts instead, and says so; after a request by hand, the command does.
        ConditionReason::Suspended
        | ConditionReason::Demanded
        | ConditionReason::StateLost
        | ConditionReason::Resuming
        | ConditionReason::Resumed
        | ConditionReason::SuspendRefused
        | ConditionReason::SuspendFailed => None,
        // What a policy does with idle shares, events of their pods say.
        ConditionReason::NoGpuTime | ConditionReason::UsesGpu => None,
        // kubelet's event at the pod, which is a finding of its own.
        ConditionReason::IncompatibleClaims => None,
        // Found by the taint of the device.
        ConditionReason::GpuFault
        | ConditionReason::GpuLost
        | ConditionReason::GpuNotResponding => None,
    }
}

fn not_enforced(state: &ClusterState) -> Vec<Finding> {
    let mut findings = Vec::new();
    for claim in &state.claims {
        let devices = claim
            .status
            .iter()
            .flat_map(|status| status.devices.iter().flatten());
        let conditions = devices
            .filter(|device| device.driver == names::DRIVER)
            .flat_map(|device| device.conditions.iter().flatten());
        for condition in conditions {
            let reason = ConditionReason::ALL
                .iter()
                .find(|reason| reason.as_str() == condition.reason);
            let Some(fix) = reason.and_then(|reason| fix(*reason)) else {
                continue;
            };
            if condition.type_ == ConditionType::Enforced.as_str() && condition.status == "False" {
                findings.push(Finding {
                    fault: Fault::NotEnforced,
                    object: format!("resourceclaim {}", object(&claim.metadata)),
                    problem: format!(
                        "limits are not enforced: {}: {}",
                        condition.reason, condition.message
                    ),
                    fix: fix.to_owned(),
                });
            }
        }
    }
    findings
}

/// Namespace and name.
pub(super) fn object(
    metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
) -> String {
    format!(
        "{}/{}",
        metadata.namespace.as_deref().unwrap_or_default(),
        metadata.name.as_deref().unwrap_or_default()
    )
}

fn prepare_failed(state: &ClusterState, pod: &Pod, node: &str) -> Option<Finding> {
    let is_pending = pod.status.as_ref()?.phase.as_deref() == Some("Pending");
    let name = pod.metadata.name.as_deref()?;
    let message = state
        .event(About::Namespaced("Pod", &pod.metadata), PREPARE_FAILED)
        .filter(|_| is_pending)?;
    // The kubelet names the driver that it cannot call, or the claim that the driver has rejected with a remedy.
    let mut fault = Fault::PrepareFailed;
    // A remedy can have a CEL expression with attributes of the driver.
    let attributes = format!("attributes[\"{}\"]", names::DRIVER);
    let names_driver = message.replace(&attributes, "").contains(names::DRIVER);
    let fix = if message.contains("/dev/nvidia-uvm") {
        fault = Fault::UvmMissing;
        LOAD_UVM.to_owned()
    } else if names_driver {
        if NOT_SERVED.iter().any(|text| message.contains(text)) {
            fault = Fault::StaleSocket;
        }
        format!(
            "restart the node driver of the node: kubectl delete pod -n {} --field-selector spec.nodeName={node} -l \
             app.kubernetes.io/component=driver",
            state.namespace()
        )
    } else if own_claims(state, pod).any(|claim| message.contains(claim)) {
        format!(
            "see kubectl describe pod {name}, and remove the cause; the kubelet repeats the call"
        )
    } else {
        return None;
    };
    Some(Finding {
        fault,
        object: format!("pod {}", object(&pod.metadata)),
        problem: format!("the kubelet of node {node} cannot prepare the claims: {message}"),
        fix,
    })
}

/// Finds pods whose devices containerd cannot inject.
fn injection_failed(state: &ClusterState, pod: &Pod, node: &str) -> Option<Finding> {
    let is_pending = pod.status.as_ref()?.phase.as_deref() == Some("Pending");
    let message = state
        .event(About::Namespaced("Pod", &pod.metadata), CREATION_FAILED)
        .filter(|_| is_pending)?;
    let (fault, fix) = if message.contains("CDI support is explicitly disabled") {
        (
            Fault::CdiOff,
            "set enable_cdi = true in containerd's config, and restart containerd",
        )
    } else if message.contains("CDI") && message.contains("/dev/nvidia-uvm") {
        (Fault::UvmMissing, LOAD_UVM)
    } else {
        return None;
    };
    Some(Finding {
        fault,
        object: format!("pod {}", object(&pod.metadata)),
        problem: format!("containerd of node {node} cannot create a container: {message}"),
        fix: fix.to_owned(),
    })
}

/// Returns the names of the pod's claims with devices of drava.
fn own_claims<'a>(state: &'a ClusterState, pod: &'a Pod) -> impl Iterator<Item = &'a str> {
    let claims = drava_allocator::pod::claims(pod).filter_map(|(_, claim)| claim);
    claims.filter(|name| {
        let found = state.claims.iter().find(|claim| {
            claim.metadata.namespace == pod.metadata.namespace
                && claim.metadata.name.as_deref() == Some(name)
        });
        let allocation = found.and_then(|claim| claim.status.as_ref()?.allocation.as_ref());
        let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
        let results = devices.and_then(|devices| devices.results.as_ref());
        let mut results = results.into_iter().flatten();
        results.any(|result| result.driver == names::DRIVER)
    })
}

/// Finds pods to which the NVIDIA container runtime gives all GPUs. DaemonSets of nodes, such as exporters, do so on purpose.
fn unclaimed(pod: &Pod, node: &str) -> Option<Finding> {
    let spec = pod.spec.as_ref()?;
    let is_running = pod.status.as_ref()?.phase.as_deref() == Some("Running");
    let mut owners = pod.metadata.owner_references.iter().flatten();
    if !is_running
        || spec
            .resource_claims
            .as_ref()
            .is_some_and(|claims| !claims.is_empty())
        || owners.any(|owner| owner.kind == "DaemonSet")
    {
        return None;
    }
    let variable = spec
        .containers
        .iter()
        .flat_map(|container| container.env.iter().flatten())
        .find(|variable| {
            variable.name == "NVIDIA_VISIBLE_DEVICES"
                && !matches!(variable.value.as_deref(), None | Some("" | "none" | "void"))
        });
    let cause = if variable.is_some() {
        "NVIDIA_VISIBLE_DEVICES is set".to_owned()
    } else {
        let class = spec
            .runtime_class_name
            .as_ref()
            .filter(|class| class.contains("nvidia"))?;
        format!("its runtime class is {class}")
    };
    Some(Finding {
        fault: Fault::UnclaimedAccess,
        object: format!("pod {}", object(&pod.metadata)),
        problem: format!("the pod has no claim and can see the GPUs of node {node}: {cause}"),
        fix: "give the pod a claim, or set NVIDIA_VISIBLE_DEVICES=void; make runc the default runtime".to_owned(),
    })
}
