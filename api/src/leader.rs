//! GpuControllerLeader: the replica of the controller that may write allocations, as admission reads it.
//!
//! The Lease elects; this object repeats its holder for the ValidatingAdmissionPolicy `drava-controller-lease`. The Lease
//! itself cannot be the parameter of the policy: the API server stops its watch of a built-in type for good when the last
//! binding with that type is deleted, and compares with the old holder after the binding exists again (Kubernetes 1.37.1,
//! `policySource.ensureParamsForPolicyLocked`). Its watch of a custom resource starts again with the definition.
//!
//! Its status shows what only the leader knows: the devices that it reserves for pods which wait, and its settings, so that
//! `kubectl drava explain`, `simulate` and the console decide as it does. No decision of the controller reads it.

use std::collections::BTreeMap;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Name of the only object.
pub const LEADER_NAME: &str = "drava-controller";

/// The replica of the controller that may write allocations.
#[derive(
    CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default,
)]
#[kube(
    group = "gpu.drava.dev",
    version = "v1alpha1",
    kind = "GpuControllerLeader",
    plural = "gpucontrollerleaders",
    status = "GpuControllerLeaderStatus",
    derive = "PartialEq",
    doc = "The replica of the controller that may write allocations. Written by the controller; do not edit.",
    crates(kube_core = "::kube_core"),
    printcolumn = r#"{"name": "Holder", "type": "string", "jsonPath": ".spec.holder", "description": "Pod of the leader"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GpuControllerLeaderSpec {
    /// Name of the pod that holds the Lease drava-controller.
    pub holder: String,
}

/// Maximum number of claims with reserved devices in the status.
pub const MAX_RESERVATIONS: usize = 200;

/// What the leader reserves, and how it decides.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct GpuControllerLeaderStatus {
    /// Devices that are reserved for pods which wait; at most 200 claims, of the pods that are first in the queue. They are
    /// not allocated.
    #[serde(default)]
    pub reservations: Vec<ReservedClaim>,
    /// Number of claims with reserved devices that are not listed because there are too many.
    #[serde(default)]
    pub omitted_reservations: u32,
    /// Settings of the decisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<LeaderSettings>,
}

/// Values of the chart that decide where pods run.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct LeaderSettings {
    /// Policy for nodes: `scheduling.nodePolicy`.
    pub node_policy: String,
    /// Policy for the GPUs of a node: `scheduling.gpuPolicy`.
    pub gpu_policy: String,
    /// Schedulers whose pods are served: `scheduling.schedulerNames`.
    pub scheduler_names: Vec<String>,
}

/// Devices that are reserved for a claim.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct ReservedClaim {
    /// Namespace of the pod and the claim.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the claim.
    pub claim: String,
    /// Why the devices are reserved.
    pub purpose: ReservationPurpose,
    /// The devices.
    pub devices: Vec<ReservedDevice>,
}

/// Why devices are reserved.
#[derive(
    JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord,
)]
pub enum ReservationPurpose {
    /// The pod is the head of the queue, and waits for the end of other pods.
    HeadOfQueue,
    /// Other pods end for the pod.
    Preemption,
}

/// A reserved device.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct ReservedDevice {
    /// Name of the request.
    pub request: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Amounts of a share, by capacity; absent if the claim gets the device alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<BTreeMap<String, String>>,
    /// Whether the share is one of the multiprocessors, which only claims of the same namespace have beside it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spatial: bool,
}
