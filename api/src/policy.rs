//! GpuPolicy: which placement policies and limits of evictions apply to the claims of some namespaces, of some device
//! classes, or of the cluster.
//!
//! Precedence for the fields `node` and `gpu`: the claim's config, unless the policy that applies denies it; the policy of the
//! namespace; the config of the device class; the policy of the device class; the policy of the cluster; the flags of the
//! controller. The other fields come from the policy of the namespace, of the device class or of the cluster, the first that
//! has the field. Of several policies of one level that select the same claims the first by name applies.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube_derive::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::config::{GpuPlacementPolicy, NodePlacementPolicy};
use crate::quota::labels_match;

/// Condition that is false while another policy applies to claims that this one selects.
pub const APPLIED: &str = "Applied";
/// Reason of [`APPLIED`] with status False.
pub const CONFLICT: &str = "Conflict";

/// Placement policies and limits of evictions for the claims of some namespaces, of some device classes, or of the cluster.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "gpu.drava.dev",
    version = "v1alpha1",
    kind = "GpuPolicy",
    plural = "gpupolicies",
    status = "GpuPolicyStatus",
    derive = "PartialEq",
    doc = "Placement policies and limits of evictions for the claims of some namespaces, of some device classes, or of the cluster.",
    crates(kube_core = "::kube_core"),
    printcolumn = r#"{"name": "Node", "type": "string", "jsonPath": ".spec.node"}"#,
    printcolumn = r#"{"name": "GPU", "type": "string", "jsonPath": ".spec.gpu"}"#,
    printcolumn = r#"{"name": "Applied", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Applied\")].status"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [json!({
    "rule": "!(has(self.namespaceSelector) && has(self.deviceClasses))",
    "message": "namespaceSelector and deviceClasses exclude each other",
})]))]
pub struct GpuPolicySpec {
    /// Labels of the namespaces whose claims the policy selects; an empty selector selects all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    /// Device classes whose claims the policy selects. Without both selectors it selects all claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "class_names")]
    pub device_classes: Option<Vec<String>>,
    /// Placement among nodes: binpack (the fullest first), spread (the emptiest first) or leastFragmentation (keeps free GPUs
    /// usable for the usual requests).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "node_placement_policy")]
    pub node: Option<NodePlacementPolicy>,
    /// Placement among the GPUs of a node: as among nodes, or topology (GPUs that share an NVLink domain, a NUMA node or a PCIe
    /// root first) or numa (GPUs of one NUMA node first).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "gpu_placement_policy")]
    pub gpu: Option<GpuPlacementPolicy>,
    /// Whether the config of a claim replaces the fields node and gpu of this policy; true by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim_override: Option<bool>,
    /// Device of requests that a share and a MIG partition can serve: vgpu (shares first, the default), mig (partitions first) or
    /// fit (a GPU that is in use first, then the least memory beyond the request).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "preference")]
    pub prefer: Option<Preference>,
    /// Limits of evictions for other pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preemption: Option<PreemptionLimits>,
}

/// Which device is preferred for requests that a share and a MIG partition can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Preference {
    /// A share.
    Vgpu,
    /// A MIG partition.
    Mig,
    /// A GPU that is in use, then the device with the least memory beyond the request.
    Fit,
}

impl Preference {
    /// All preferences.
    pub const ALL: [Self; 3] = [Self::Vgpu, Self::Mig, Self::Fit];

    /// Returns the value in the object.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Vgpu => "vgpu",
            Self::Mig => "mig",
            Self::Fit => "fit",
        }
    }
}

/// Limits of evictions for other pods. They hold for pods with a claim that the policy selects.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct PreemptionLimits {
    /// Time in seconds that a pod waits, from its creation, before others are evicted for it; 0 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "seconds")]
    pub delay_seconds: Option<u32>,
    /// Time in seconds, from its binding to a node, in which a pod is not evicted for others; 0 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "seconds")]
    pub minimum_runtime_seconds: Option<u32>,
}

/// State of a policy, written by the controller.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[serde(rename_all = "camelCase")]
pub struct GpuPolicyStatus {
    /// Generation of the object to which the status belongs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Applied: whether the policy applies to all claims that it selects.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// What a policy selects. A higher level precedes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicyLevel {
    /// All claims.
    Cluster,
    /// The claims of device classes.
    Class,
    /// The claims of namespaces.
    Namespace,
}

impl GpuPolicySpec {
    /// Returns what the policy selects.
    #[must_use]
    pub const fn level(&self) -> PolicyLevel {
        if self.namespace_selector.is_some() {
            PolicyLevel::Namespace
        } else if self.device_classes.is_some() {
            PolicyLevel::Class
        } else {
            PolicyLevel::Cluster
        }
    }

    /// Returns whether the policy selects the claims of a namespace with these labels; a policy of another level does not.
    #[must_use]
    pub fn selects_namespace(&self, labels: &BTreeMap<String, String>) -> bool {
        let selector = self.namespace_selector.as_ref();
        selector.is_some_and(|selector| labels_match(selector, labels))
    }

    /// Returns whether the policy selects the claims of a class; a policy of another level does not.
    #[must_use]
    pub fn selects_class(&self, class: &str) -> bool {
        self.level() == PolicyLevel::Class
            && self
                .device_classes
                .iter()
                .flatten()
                .any(|name| name == class)
    }

    /// Returns whether the config of a claim replaces the fields of this policy.
    #[must_use]
    pub fn allows_override(&self) -> bool {
        self.claim_override.unwrap_or(true)
    }
}

/// At most 30 days.
fn seconds(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "minimum": 0, "maximum": 2_592_000})
}

fn preference(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": Preference::ALL.map(Preference::as_str)})
}

fn class_names(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": 1,
        "maxItems": 64,
        "x-kubernetes-list-type": "set",
        "items": {"type": "string", "minLength": 1, "maxLength": 253},
    })
}

fn node_placement_policy(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": NodePlacementPolicy::ALL.map(NodePlacementPolicy::as_str)})
}

fn gpu_placement_policy(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": GpuPlacementPolicy::ALL.map(GpuPlacementPolicy::as_str)})
}
