//! The custom resource `GpuNodeProfile`: what the GPUs of the selected nodes offer.
//!
//! | Part | Module |
//! |---|---|
//! | fields that an administrator writes | this module |
//! | settings of each GPU of a node, precedence of profiles | [`settings`] (pure) |
//! | reports of the node drivers | [`status`] (pure) |
//!
//! The API server validates profiles by the schema and by the CEL rules below. A reader tolerates what an older schema let
//! through: such a value has no effect.

use std::collections::BTreeMap;

use kube_derive::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Quantity;
use crate::config::{ComputePolicy, Enforcement, MemoryEnforcement, MemoryPolicy};

pub mod settings;
pub mod status;

pub use settings::{GpuIdentity, GpuSettings, NodeSettings, ProfileVersion};
pub use status::{GpuNodeProfileStatus, NodeState, NodeStatus, WaitingDevice};

/// What the GPUs of the selected nodes offer. Of several profiles that select a node, the first by name applies.
#[derive(
    CustomResource, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "gpu.drava.dev",
    version = "v1alpha1",
    kind = "GpuNodeProfile",
    plural = "gpunodeprofiles",
    doc = "What the GPUs of the selected nodes offer: mode, shares, partitions, exclusions.",
    status = "GpuNodeProfileStatus",
    derive = "Default",
    derive = "PartialEq",
    crates(kube_core = "::kube_core"),
    printcolumn = r#"{"name": "Mode", "type": "string", "jsonPath": ".spec.mode"}"#,
    printcolumn = r#"{"name": "Nodes", "type": "integer", "jsonPath": ".status.nodeCount"}"#,
    printcolumn = r#"{"name": "Applied", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Applied\")].status"}"#,
    printcolumn = r#"{"name": "Conflict", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Conflict\")].status"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = spec_rules()))]
pub struct GpuNodeProfileSpec {
    /// Labels that a node must have; without labels, the profile selects every node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Settings of every GPU of the node.
    #[serde(flatten)]
    pub offer: Offer,
    /// Suspended shares of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend: Option<SuspendBudget>,
    /// GPUs that are not published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclude: Option<Exclude>,
    /// Settings of single GPUs or models. Entries apply in the order of the list; a later entry wins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub devices: Vec<DeviceOverride>,
}

/// Settings of a GPU. A missing field keeps its value: that of the profile in an entry of `devices`, the default otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Offer {
    /// Devices that the GPU is published as. Default: auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Memory that the shares of the GPU get together, as a multiple of its memory: 0.1 to 10 in steps of 0.01. One share
    /// gets at most the memory of the GPU. Above 1, `oversubscription` is required. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_scaling: Option<Scaling>,
    /// What happens when the shares of an oversubscribed GPU use more memory than it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oversubscription: Option<Oversubscription>,
    /// GPU time that the shares of the GPU get together, as a multiple of its time: 0.1 to 10 in steps of 0.01. Above 1,
    /// guarantees shrink in proportion while all shares are busy. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core_scaling: Option<Scaling>,
    /// Maximum number of shares of the GPU. Default: 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 1, max = 1024))]
    pub split_count: Option<u32>,
    /// Percent of GPU time that a share gets if its request has no `cores`; 0 is best effort. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 0, max = 100))]
    pub default_cores: Option<u8>,
    /// Options of the shares (VgpuConfig) that neither device class nor claim sets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defaults: Option<ShareDefaults>,
    /// MIG partitions of the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigOffer>,
    /// XIDs with another effect on the health of the GPU than in the chart's values and in docs/reference/health.md.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xids: Option<XidOverrides>,
}

/// What the suspended shares of a node may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SuspendBudget {
    /// Host memory of all suspended shares of the node together: no further share is suspended beyond it. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::quota::schema::memory")]
    pub host_memory: Option<Quantity>,
}

/// XIDs (error numbers of the NVIDIA driver) with another effect on the health of a GPU. In both lists, `fatal` wins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct XidOverrides {
    /// XIDs that do not make the GPU unhealthy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<i32>", length(max = 256), inner(range(min = 1)))]
    pub ignore: Vec<u32>,
    /// XIDs that make the GPU unhealthy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<i32>", length(max = 256), inner(range(min = 1)))]
    pub fatal: Vec<u32>,
}

/// Devices that a GPU is published as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// Partitions if MIG mode is on; otherwise the whole GPU and shares.
    #[default]
    Auto,
    /// The whole GPU only.
    Exclusive,
    /// Shares only.
    Vgpu,
    /// MIG partitions only. MIG mode is enabled when the first partition is prepared, on GPUs that need no reset for it
    /// (Hopper and newer).
    Mig,
    /// The whole GPU, shares and MIG partitions. MIG mode is switched while no claim holds the GPU, on GPUs that need no
    /// reset for it (Hopper and newer); other GPUs are as in mode auto.
    Dynamic,
}

impl Mode {
    /// Returns the value in the profile and of the attribute [`crate::names::attribute::MODE`].
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Exclusive => "exclusive",
            Self::Vgpu => "vgpu",
            Self::Mig => "mig",
            Self::Dynamic => "dynamic",
        }
    }
}

/// What happens when the shares of an oversubscribed GPU use more memory than it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Oversubscription {
    /// Plain allocations use host memory (`memory.policy: spill`, unless the device class sets another policy).
    Spill,
    /// Allocations fail; a share has no guarantee that it gets its memory.
    BestEffort,
}

/// A multiple of what a GPU has: 0.1 to 10, in steps of 0.01.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Scaling(u16);

impl Scaling {
    /// Exactly what the GPU has.
    pub const ONE: Self = Self(100);

    /// Returns `amount` times the multiple, rounded down.
    #[must_use]
    pub fn of(self, amount: u64) -> u64 {
        let scaled = u128::from(amount) * u128::from(self.0) / 100;
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }

    /// Returns whether the multiple is more than the GPU has.
    #[must_use]
    pub const fn oversubscribes(self) -> bool {
        self.0 > Self::ONE.0
    }
}

impl Default for Scaling {
    fn default() -> Self {
        Self::ONE
    }
}

impl TryFrom<f64> for Scaling {
    type Error = String;

    fn try_from(value: f64) -> Result<Self, String> {
        (10..=1000u16)
            .find(|hundredths| (f64::from(*hundredths) - value * 100.0).abs() < 0.5)
            .map(Self)
            .ok_or_else(|| format!("{value} is out of range, use 0.1 to 10"))
    }
}

impl From<Scaling> for f64 {
    fn from(scaling: Scaling) -> Self {
        Self::from(scaling.0) / 100.0
    }
}

impl JsonSchema for Scaling {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Scaling".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "minimum": 0.1, "maximum": 10})
    }
}

/// Options of shares that neither device class nor claim sets; the fields are those of `VgpuConfig`. They apply to claims
/// that are prepared from then on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShareDefaults {
    /// Enforcement of GPU time. Default: balance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_policy: Option<ComputePolicy>,
    /// Device memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryDefaults>,
    /// Reaction to a process that bypasses or exceeds its limits. Default: report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<Enforcement>,
}

/// Device memory of shares.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemoryDefaults {
    /// Reaction to allocations beyond the limit. Default: hard, or spill with `oversubscription: spill`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<MemoryPolicy>,
    /// What limits the memory. Default: auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<MemoryEnforcement>,
}

/// MIG partitions of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigOffer {
    /// Names of the profiles that are published, such as `1g.10gb`. Default: all profiles of the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), inner(length(min = 1, max = 64)))]
    pub profiles: Option<Vec<String>>,
    /// The partitions that are published; other placements are not. Default: all placements. Entries that the GPU cannot
    /// have are ignored. Of entries that overlap, the first claim decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub layout: Option<Vec<PinnedPartition>>,
}

/// A MIG partition at a fixed place of the GPU.
#[derive(
    Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct PinnedPartition {
    /// Name of the profile, such as `1g.10gb`.
    #[schemars(length(min = 1, max = 64))]
    pub profile: String,
    /// First memory slice.
    #[schemars(with = "i32", range(min = 0, max = 31))]
    pub start: u32,
}

/// GPUs that are not published. A GPU is excluded if one of the lists has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Exclude {
    /// UUIDs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 64)))]
    pub uuids: Vec<String>,
    /// NVML indices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<i32>", length(max = 256), inner(range(min = 0)))]
    pub indices: Vec<u32>,
    /// Product names, as in the attribute `productName`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 128)))]
    pub product_names: Vec<String>,
}

/// Settings of a GPU or a model. Exactly one of `uuid`, `index` and `productName` selects it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = override_rules()))]
pub struct DeviceOverride {
    /// UUID of the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub uuid: Option<String>,
    /// NVML index of the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 0))]
    pub index: Option<u32>,
    /// Product name of the GPUs, as in the attribute `productName`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    pub product_name: Option<String>,
    /// The settings.
    #[serde(flatten)]
    pub offer: Offer,
}

/// CEL rules of [`Offer`], which is part of two objects.
fn offer_rules() -> Vec<Value> {
    vec![json!({
        "rule": "!has(self.defaultCores) || !has(self.coreScaling) || double(self.defaultCores) <= 100.0 * self.coreScaling",
        "message": "defaultCores exceeds the GPU time that coreScaling leaves; lower defaultCores or raise coreScaling",
    })]
}

fn spec_rules() -> Value {
    let mut rules = offer_rules();
    rules.push(json!({
        "rule": "!has(self.memoryScaling) || self.memoryScaling <= 1.0 || has(self.oversubscription)",
        "message": "memoryScaling above 1 requires oversubscription: spill or bestEffort",
    }));
    rules.push(json!({
        "rule": "!has(self.devices) || has(self.oversubscription) || self.devices.all(d, !has(d.memoryScaling) || d.memoryScaling <= 1.0 || has(d.oversubscription))",
        "message": "an entry of devices with memoryScaling above 1 requires oversubscription: spill or bestEffort",
    }));
    Value::Array(rules)
}

fn override_rules() -> Value {
    let mut rules = offer_rules();
    rules.push(json!({
        "rule": "[has(self.uuid), has(self.index), has(self.productName)].exists_one(selector, selector)",
        "message": "an entry of devices requires exactly one of uuid, index and productName",
    }));
    Value::Array(rules)
}

#[cfg(test)]
mod tests;
