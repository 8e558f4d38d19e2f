//! GpuControllerLeader: the replica of the controller that may write allocations, as admission reads it.
//!
//! The Lease elects; this object repeats its holder for the ValidatingAdmissionPolicy `drava-controller-lease`. The Lease
//! itself cannot be the parameter of the policy: the API server stops its watch of a built-in type for good when the last
//! binding with that type is deleted, and compares with the old holder after the binding exists again (Kubernetes 1.37.1,
//! `policySource.ensureParamsForPolicyLocked`). Its watch of a custom resource starts again with the definition.

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
