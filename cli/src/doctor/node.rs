//! Nodes with GPUs: kubelet, node driver, other owners of the GPUs.

use std::collections::BTreeSet;

use drava_api::event::EventReason;
use drava_api::{DeviceType, Quantity, names};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::jiff::Timestamp;

use super::device::string_attribute;
use super::state::{About, ClusterState, Version, is_ready};
use super::{Fault, Finding};

/// Seconds by which a report can precede the change of readiness that it explains.
const EVENT_MARGIN_SECONDS: i64 = 60;

/// Oldest kubelet: older ones connect in a way that drava's gRPC server rejects.
const OLDEST_KUBELET: Version = Version(1, 34);

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, node) in state.gpu_nodes() {
        let object = format!("node {name}");
        findings.extend(kubelet(&object, node));
        let mut owners = device_plugins(&object, node);
        owners.extend(other_drivers(state, &object, name));
        findings.extend(partition_destroyer(state, &object, name));
        // A driver that does not publish because of another owner is not ready.
        let driver = driver(state, &object, name);
        findings.extend(driver.filter(|finding| {
            owners.is_empty() || matches!(finding.fault, Fault::DriverPodMissing)
        }));
        findings.append(&mut owners);
        findings.extend(runtime(state, &object, name));
    }
    findings
}

fn kubelet(object: &str, node: &Node) -> Option<Finding> {
    let info = node.status.as_ref()?.node_info.as_ref()?;
    let version = Version::parse(&info.kubelet_version)?;
    (version < OLDEST_KUBELET).then(|| Finding {
        fault: Fault::KubeletTooOld,
        object: object.to_owned(),
        problem: format!(
            "kubelet {} is older than {}.{} and cannot connect to the node driver",
            info.kubelet_version, OLDEST_KUBELET.0, OLDEST_KUBELET.1
        ),
        fix: "upgrade the kubelet".to_owned(),
    })
}

fn driver(state: &ClusterState, object: &str, node: &str) -> Option<Finding> {
    let namespace = state.namespace();
    let pods: Vec<&Pod> = state.driver_pods(node).collect();
    let Some(pod) = pods.first() else {
        return Some(Finding {
            fault: Fault::DriverPodMissing,
            object: object.to_owned(),
            problem: "no pod of the node driver runs on the node".to_owned(),
            fix: format!(
                "tolerate the taints of the node with driver.tolerations of the drava chart, or see kubectl describe \
                 daemonset -n {namespace} drava-dra-driver"
            ),
        });
    };
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    // During an update two pods run; one ready pod serves.
    if !pods.iter().any(|pod| is_ready(pod)) {
        let reported = reported_cause(state, node, pod);
        let cause = waiting(pod)
            .or(reported)
            .unwrap_or_else(|| "it reports no cause".to_owned());
        let (fault, fix) = match known_fault(&cause) {
            Some((fault, fix)) => (fault, fix.to_owned()),
            None => (
                Fault::DriverNotReady,
                format!("see kubectl logs -n {namespace} {pod_name}"),
            ),
        };
        return Some(Finding {
            fault,
            object: object.to_owned(),
            problem: format!("node driver {namespace}/{pod_name} is not ready: {cause}"),
            fix,
        });
    }
    let is_published = state.own_slices().any(|slice| of_node(slice, node));
    (!is_published).then(|| Finding {
        fault: Fault::NotPublished,
        object: object.to_owned(),
        problem: "the node driver is ready and publishes no device".to_owned(),
        fix: format!("see kubectl logs -n {namespace} {pod_name}"),
    })
}

/// Returns the fault of a cause that the node driver reports, with its fix.
fn known_fault(cause: &str) -> Option<(Fault, &'static str)> {
    if cause.starts_with("records: ") {
        Some((
            Fault::RecordsNewer,
            "run the version of drava that wrote the records (helm rollback), or drain the node with it before the downgrade",
        ))
    } else if cause.starts_with("artifacts: ") && cause.contains("is mounted noexec on the node") {
        Some((
            Fault::StateDirNoexec,
            "set driver.stateDir of the drava chart to a directory whose file system allows programs: /home/kubernetes/bin/drava \
             on GKE",
        ))
    } else if cause.starts_with("gpus: ") && cause.contains("libnvidia-ml.so") {
        Some((
            Fault::DriverRootWrong,
            "set driver.driverRoot of the drava chart to the root of the NVIDIA driver: / on the host, /run/nvidia/driver with \
             the GPU operator",
        ))
    } else {
        None
    }
}

/// Returns the cause that the node driver has reported since the pod is not ready. A known fault precedes conditions that
/// follow from it. Reports before the creation of the pod are those of its predecessor. The newest report counts: each names
/// all conditions that are unmet then.
fn reported_cause(state: &ClusterState, node: &str, pod: &Pod) -> Option<String> {
    let not_ready = not_ready_since(pod).map(|since| since.as_second() - EVENT_MARGIN_SECONDS);
    let created = pod.metadata.creation_timestamp.as_ref();
    let created = created.map(|created| created.0.as_second());
    let since = not_ready.max(created).unwrap_or(i64::MIN);
    let causes: Vec<&str> = state
        .events_since(About::Node(node), "NotReady", since)
        .filter(|cause| !cause.ends_with(": not yet"))
        .collect();
    let known = causes.iter().rfind(|cause| known_fault(cause).is_some());
    known.or(causes.last()).map(|cause| (*cause).to_owned())
}

/// Returns when the pod became not ready, or was created.
fn not_ready_since(pod: &Pod) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|one| one.type_ == "Ready")?;
    ready.last_transition_time.as_ref().map(|time| time.0)
}

/// Returns why a container of the pod does not run, with the message of its last end.
fn waiting(pod: &Pod) -> Option<String> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.iter().find_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.clone().unwrap_or_default();
        let ended = status
            .last_state
            .as_ref()
            .and_then(|state| state.terminated.as_ref());
        let message = ended
            .and_then(|ended| ended.message.as_deref())
            .or(waiting.message.as_deref())
            .unwrap_or_default()
            .trim();
        Some(if message.is_empty() {
            reason
        } else {
            format!("{reason}: {message}")
        })
    })
}

fn of_node(slice: &ResourceSlice, node: &str) -> bool {
    slice.spec.node_name.as_deref() == Some(node)
}

/// Returns the fault of the container runtime that the node driver has reported last.
fn runtime(state: &ClusterState, object: &str, node: &str) -> Option<Finding> {
    let event = |reason: EventReason| state.timed_event(About::Node(node), reason.as_str());
    let misconfigured = event(EventReason::RuntimeMisconfigured);
    let unchecked = event(EventReason::RuntimeUnchecked);
    let (problem, reported) = misconfigured
        .into_iter()
        .chain(unchecked)
        .max_by_key(|(_, time)| *time)?;
    let corrected = event(EventReason::RuntimeCorrected);
    if corrected.is_some_and(|(_, corrected)| corrected >= reported) {
        return None;
    }
    let (problem, fix) = problem.split_once("; ")?;
    Some(Finding {
        fault: if unchecked.is_some_and(|(_, time)| time == reported) {
            Fault::RuntimeUnchecked
        } else if problem.contains("enable_cdi") {
            Fault::CdiOff
        } else {
            Fault::NvidiaDefaultRuntime
        },
        object: object.to_owned(),
        problem: problem.to_owned(),
        fix: fix.to_owned(),
    })
}

fn device_plugins(object: &str, node: &Node) -> Vec<Finding> {
    let allocatable = node
        .status
        .as_ref()
        .and_then(|status| status.allocatable.as_ref());
    allocatable
        .into_iter()
        .flatten()
        .filter(|(name, _)| names::is_device_plugin_resource(name))
        .filter(|(_, amount)| Quantity::try_from(*amount).is_ok_and(|amount| !amount.is_zero()))
        .map(|(name, amount)| Finding {
            fault: Fault::DevicePlugin,
            object: object.to_owned(),
            problem: format!(
                "a device plugin offers {name}: {}, the GPUs of drava",
                amount.0
            ),
            fix: "remove the device plugin from the node; a GPU has one owner".to_owned(),
        })
        .collect()
}

/// Returns drivers that publish GPUs which drava publishes, or would publish if its driver were ready.
fn other_drivers(state: &ClusterState, object: &str, node: &str) -> Vec<Finding> {
    let own: BTreeSet<&str> = state
        .own_slices()
        .filter(|slice| of_node(slice, node))
        .flat_map(uuids)
        .collect();
    let is_driver_ready = state.driver_pods(node).any(is_ready);
    let is_shared = |uuid: &str| {
        own.contains(uuid)
            || (!is_driver_ready && (uuid.starts_with("GPU-") || uuid.starts_with("MIG-")))
    };
    let mut drivers = BTreeSet::new();
    for slice in state.slices.iter().filter(|slice| of_node(slice, node)) {
        let spec = &slice.spec;
        if spec.driver != names::DRIVER && uuids(slice).any(is_shared) {
            drivers.insert(spec.driver.as_str());
        }
    }
    let finding = |driver: &str| Finding {
        fault: Fault::OtherDriver,
        object: object.to_owned(),
        problem: format!("DRA driver {driver} publishes GPUs of drava"),
        fix: format!(
            "remove {driver} from the node, or remove the label {} of the node",
            names::ENABLED_LABEL
        ),
    };
    drivers.into_iter().map(finding).collect()
}

/// NVIDIA's DRA driver.
const NVIDIA_DRIVER: &str = "gpu.nvidia.com";

/// Finds a driver beside drava that creates MIG instances by claim, also of GPUs that drava does not publish: at its start it destroys
/// the instances on the node that it did not create.
fn partition_destroyer(state: &ClusterState, object: &str, node: &str) -> Option<Finding> {
    let devices = |driver: &'static str| {
        let slices = state.slices.iter();
        let slices =
            slices.filter(move |slice| slice.spec.driver == driver && of_node(slice, node));
        slices.flat_map(|slice| slice.spec.devices.iter().flatten())
    };
    let is_partition = |device: &Device| {
        string_attribute(device, names::attribute::TYPE) == Some(DeviceType::Mig.as_str())
    };
    // Instances that exist already take nothing from a counter.
    let is_by_claim = |device: &Device| {
        let counters = device.consumes_counters.as_ref();
        is_partition(device) && counters.is_some_and(|counters| !counters.is_empty())
    };
    let is_found =
        devices(names::DRIVER).any(is_partition) && devices(NVIDIA_DRIVER).any(is_by_claim);
    is_found.then(|| Finding {
        fault: Fault::OtherDriver,
        object: object.to_owned(),
        problem: format!(
            "DRA driver {NVIDIA_DRIVER} creates MIG partitions by claim, and destroys those of drava when it starts"
        ),
        fix: "turn its feature gate DynamicMIG off on nodes where drava has partitions (docs/compatibility.md)".to_owned(),
    })
}

/// Returns the UUIDs of GPUs in the attributes of a slice's devices.
fn uuids(slice: &ResourceSlice) -> impl Iterator<Item = &str> {
    let devices = slice.spec.devices.iter().flatten();
    devices.flat_map(|device: &Device| {
        let attributes = device.attributes.iter().flatten();
        attributes.filter_map(|(name, value)| {
            // Other drivers qualify the attribute, or name that of a partition's GPU differently.
            let name = name.rsplit('/').next().unwrap_or(name);
            matches!(name, names::attribute::UUID | names::attribute::PARENT_UUID)
                .then_some(value.string.as_deref())
                .flatten()
        })
    })
}
