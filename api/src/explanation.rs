//! PlacementExplanation: the explanation of a pod's allocation, on request and for a limited time.
//!
//! Who may create the object in a namespace may read the explanations of the pods of that namespace. It names no pod of
//! another namespace.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_derive::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Time after which the controller deletes an explanation without `ttlSeconds`.
const DEFAULT_TTL: Duration = Duration::from_secs(3600);

/// Maximum number of blockers in the status.
pub const MAX_BLOCKERS: usize = 64;

/// Request for the explanation of a pod's allocation.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "gpu.drava.dev",
    version = "v1alpha1",
    kind = "PlacementExplanation",
    plural = "placementexplanations",
    namespaced,
    status = "PlacementExplanationStatus",
    derive = "PartialEq",
    doc = "Request for the explanation of a pod's allocation.",
    crates(kube_core = "::kube_core"),
    printcolumn = r#"{"name": "Pod", "type": "string", "jsonPath": ".spec.podName"}"#,
    printcolumn = r#"{"name": "State", "type": "string", "jsonPath": ".status.state"}"#,
    printcolumn = r#"{"name": "Summary", "type": "string", "jsonPath": ".status.summary"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct PlacementExplanationSpec {
    /// Name of a pod of the namespace.
    #[schemars(length(min = 1, max = 253))]
    pub pod_name: String,
    /// Time in seconds after which the object is deleted; 3600 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "ttl_seconds")]
    pub ttl_seconds: Option<u32>,
}

/// The explanation, written by the controller.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[serde(rename_all = "camelCase")]
pub struct PlacementExplanationStatus {
    /// State of the pod's allocation: Infeasible, Feasible, Waiting, Gated, Allocated, Placed, Rejected, WaitingForClaim,
    /// NoGpuRequest, Finished, or PodMissing.
    #[serde(default)]
    pub state: String,
    /// Explanation in one line.
    #[serde(default)]
    pub summary: String,
    /// Number of nodes by reason code.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons: BTreeMap<String, u32>,
    /// Why nodes and devices do not fit; at most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blockers: Vec<PlacementBlocker>,
    /// Changes after each of which the pod fits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<String>,
    /// Devices that are reserved for the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<String>,
    /// Likely mistakes in the pod and its claims.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub advice: Vec<String>,
    /// When the explanation changed last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_at: Option<Time>,
}

/// Why a node or a device does not fit.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct PlacementBlocker {
    /// Name of the node.
    pub node: String,
    /// Name of the device; absent for a blocker of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Reason code.
    pub reason: String,
    /// Figures.
    #[serde(default)]
    pub detail: String,
}

impl PlacementExplanationSpec {
    /// Returns the time after which the object is deleted.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        let seconds = self.ttl_seconds.map(u64::from);
        seconds.map_or(DEFAULT_TTL, Duration::from_secs)
    }
}

/// At least a second and at most 7 days.
fn ttl_seconds(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "minimum": 1, "maximum": 604_800})
}
