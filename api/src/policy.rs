//! GpuPolicy: which placement policies, limits of evictions and rules for idle shares apply to the claims of some namespaces, of some device
//! classes, or of the cluster.
//!
//! Precedence for the fields `node` and `gpu`: the claim's config, unless the policy that applies denies it; the policy of the
//! namespace; the config of the device class; the policy of the device class; the policy of the cluster; the flags of the
//! controller. The other fields come from the policy of the namespace, of the device class or of the cluster, the first that
//! has the field. Of several policies of one level that select the same claims the first by name applies.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

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
    /// What is done with shares that use no GPU time. Without it, nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<IdlePolicy>,
}

/// What is done with a share that uses no GPU time.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct IdlePolicy {
    /// Time without GPU time after which the action follows, such as 1h or 90m; at least 1m.
    #[schemars(schema_with = "idle_after")]
    pub after: IdleAfter,
    /// What is done: event (an event of the pod), suspend (the share is suspended until a program calls CUDA; an event if it cannot
    /// be) or evict (the pod is evicted, as far as PodDisruptionBudgets allow it).
    #[schemars(schema_with = "idle_action")]
    pub action: IdleAction,
}

/// A time in hours, minutes and seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IdleAfter(Duration);

impl IdleAfter {
    /// Returns the time.
    #[must_use]
    pub const fn duration(self) -> Duration {
        self.0
    }
}

/// A text is not a time such as `1h`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the time {0:?}; write hours, minutes and seconds, such as 1h30m")]
pub struct IdleAfterError(String);

impl TryFrom<String> for IdleAfter {
    type Error = IdleAfterError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let error = || IdleAfterError(text.clone());
        let (mut rest, mut seconds) = (text.as_str(), 0u64);
        for (unit, size) in [('h', 3600), ('m', 60), ('s', 1)] {
            let Some((number, after)) = rest.split_once(unit) else {
                continue;
            };
            let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
            let number = number.parse::<u32>().ok().filter(|_| is_number);
            let number = number.ok_or_else(error)?;
            seconds += u64::from(number) * size;
            rest = after;
        }
        match rest.is_empty() && !text.is_empty() {
            true => Ok(Self(Duration::from_secs(seconds))),
            false => Err(error()),
        }
    }
}

impl fmt::Display for IdleAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let parts = [
            (seconds / 3600, 'h'),
            (seconds / 60 % 60, 'm'),
            (seconds % 60, 's'),
        ];
        for (number, unit) in parts.into_iter().filter(|(number, _)| *number > 0) {
            write!(f, "{number}{unit}")?;
        }
        if seconds == 0 {
            f.write_str("0s")
        } else {
            Ok(())
        }
    }
}

impl From<IdleAfter> for String {
    fn from(after: IdleAfter) -> Self {
        after.to_string()
    }
}

/// What is done with an idle share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum IdleAction {
    /// An event of its pod.
    Event,
    /// The share is suspended until a program calls CUDA.
    Suspend,
    /// The pod is evicted.
    Evict,
}

impl IdleAction {
    /// All actions.
    pub const ALL: [Self; 3] = [Self::Event, Self::Suspend, Self::Evict];

    /// Returns the value in the object.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Suspend => "suspend",
            Self::Evict => "evict",
        }
    }
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

/// At least a minute: the node driver reports no shorter times.
fn idle_after(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "pattern": "^([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,5}s)?$",
        "minLength": 2,
        "maxLength": 18,
        "x-kubernetes-validations": [{
            "rule": "duration(self) >= duration('1m')",
            "message": "at least 1m",
        }],
    })
}

fn idle_action(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": IdleAction::ALL.map(IdleAction::as_str)})
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
