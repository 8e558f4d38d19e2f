//! The opaque config of a claim or class: `VgpuConfig` in `gpu.drava.dev/v1alpha1`.
//!
//! [`VgpuConfig`] is one document as written: all fields are optional, unknown fields are rejected, errors name the field
//! path. [`resolve`] merges the documents of an allocation (defaults of the GPU, then class, then claim) into [`Settings`], which has
//! no optional limits. Class config comes from the administrator and is trusted. Claim config comes from the tenant and
//! **can only be stricter** than the class: [`Layer`] lists the allowed fields. Amounts (memory, cores) are capacity
//! requests of the claim, not config, except `memory.percent`.

use std::fmt;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceClaimConfiguration, DeviceClassConfiguration,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Quantity, names};

mod burst;
mod layer;

pub use burst::{BurstError, MemoryBurst, MemoryReclaim};
pub use layer::{ForbiddenField, Layer, Settings};

/// Value of `kind` in the opaque config.
pub const KIND: &str = "VgpuConfig";

/// One opaque config document. Missing fields keep the value of the layer below.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VgpuConfig {
    /// `gpu.drava.dev/v1alpha1`.
    pub api_version: String,
    /// `VgpuConfig`.
    pub kind: String,
    /// Enforcement of GPU time. A claim may only choose `fixed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_policy: Option<ComputePolicy>,
    /// Priority among the shares of one GPU, −100 to 100. A claim may choose up to the class's `maxPriority`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// Highest priority that a claim may choose; default: the class's `priority`. Class only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_priority: Option<Priority>,
    /// Device memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryConfig>,
    /// Reaction to a process that bypasses or exceeds its limits. Class only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<Enforcement>,
    /// Placement of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// Mounts the graphics, video and Vulkan libraries of the NVIDIA driver, whose allocations no limit covers. Class only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmetered: Option<bool>,
    /// Suspension of the claim's shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend: Option<SuspendConfig>,
}

/// Suspension of shares: their memory goes to the host, and their programs stand still until they are resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(
    rename_all = "camelCase",
    deny_unknown_fields,
    expecting = "an object; use suspend: {allowed: true}"
)]
pub struct SuspendConfig {
    /// Whether the claim may be suspended; default: no. A claim cannot allow what its class denies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<bool>,
    /// Longest time in seconds for which the claim is suspended for other pods: its pod is evicted then. Default: no limit. A claim
    /// may choose up to the class's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_suspend_seconds: Option<Seconds>,
}

/// A time of at least one second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub struct Seconds(u32);

impl Seconds {
    /// Returns the time.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_secs(self.0 as u64)
    }
}

impl TryFrom<i64> for Seconds {
    type Error = String;

    fn try_from(value: i64) -> Result<Self, String> {
        u32::try_from(value)
            .ok()
            .filter(|seconds| *seconds > 0)
            .map(Self)
            .ok_or_else(|| format!("{value} is out of range, use 1 to {}", u32::MAX))
    }
}

impl From<Seconds> for i64 {
    fn from(seconds: Seconds) -> Self {
        Self::from(seconds.0)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s", self.0)
    }
}

/// Enforcement of a share's GPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum ComputePolicy {
    /// Guaranteed; idle time of other shares is added.
    #[default]
    Balance,
    /// A hard cap, also on an idle GPU.
    Fixed,
    /// A part of the multiprocessors instead of a part of the time: the programs are clients of MPS. The GPU serves one namespace
    /// only. Only in a device class, so not in the schema of node profiles.
    #[schemars(skip)]
    Spatial,
    /// Not metered.
    None,
}

/// Priority among the shares of one GPU: −100 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub struct Priority(i8);

impl Priority {
    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> i8 {
        self.0
    }
}

impl TryFrom<i64> for Priority {
    type Error = String;

    fn try_from(value: i64) -> Result<Self, String> {
        i8::try_from(value)
            .ok()
            .filter(|priority| (-100..=100).contains(priority))
            .map(Self)
            .ok_or_else(|| format!("{value} is out of range, use -100 to 100"))
    }
}

impl From<Priority> for i64 {
    fn from(priority: Priority) -> Self {
        Self::from(priority.0)
    }
}

/// Percent of a GPU's memory: 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub struct Percent(u8);

impl Percent {
    /// Returns the number, 1 to 100.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<i64> for Percent {
    type Error = String;

    fn try_from(value: i64) -> Result<Self, String> {
        u8::try_from(value)
            .ok()
            .filter(|percent| (1..=100).contains(percent))
            .map(Self)
            .ok_or_else(|| format!("{value} is out of range, use 1 to 100"))
    }
}

impl From<Percent> for i64 {
    fn from(percent: Percent) -> Self {
        Self::from(percent.0)
    }
}

/// Device memory of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryConfig {
    /// Percent of the allocated GPU's memory instead of an amount. Claim only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<Percent>,
    /// Reaction to allocations beyond the limit. Class only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<MemoryPolicy>,
    /// What limits the memory. Class only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<MemoryEnforcement>,
    /// The most that the share may use while memory of the GPU is free. A claim may choose up to the class's `maxLimit`. Claim only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Quantity>,
    /// Highest `limit` that a claim may choose; default: none. Class only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_limit: Option<Quantity>,
    /// Memory that the share uses beyond its guarantee. A claim may choose up to the class's `maxBurst`. Claim only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<MemoryBurst>,
    /// The most that a claim may choose as `burst`; default: `unallocated`. Class only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_burst: Option<MemoryBurst>,
    /// Whether shares with `burst: idle` may use what a claim of the class is guaranteed and does not use; default: no. Class only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lend_idle: Option<bool>,
    /// How the share gives that memory back. Claim only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaim: Option<MemoryReclaim>,
}

/// Reaction to allocations beyond the memory limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum MemoryPolicy {
    /// Allocations fail with `CUDA_ERROR_OUT_OF_MEMORY`.
    #[default]
    Hard,
    /// Plain allocations beyond the limit use host memory.
    Spill,
}

/// What limits the memory of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum MemoryEnforcement {
    /// The NVIDIA driver and libvgpu where the driver can, else libvgpu.
    #[default]
    Auto,
    /// The NVIDIA driver and libvgpu. Claims are refused on GPUs whose driver cannot.
    Driver,
    /// libvgpu.
    Library,
}

impl MemoryEnforcement {
    /// Returns the value in config and attributes.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Driver => "driver",
            Self::Library => "library",
        }
    }
}

/// Reaction to a process that bypasses or exceeds its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Enforcement {
    /// The process is reported.
    #[default]
    Report,
    /// The process is killed.
    Required,
}

/// Placement policies of one claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Placement {
    /// Among nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodePlacementPolicy>,
    /// Among the GPUs of a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuPlacementPolicy>,
}

/// Preference among feasible nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NodePlacementPolicy {
    /// The fullest first.
    Binpack,
    /// The emptiest first.
    Spread,
    /// The node first on which the free GPUs stay usable for the requests that this cluster usually has.
    LeastFragmentation,
}

impl NodePlacementPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Binpack, Self::Spread, Self::LeastFragmentation];

    /// Returns the value in config and flags.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Binpack => "binpack",
            Self::Spread => "spread",
            Self::LeastFragmentation => "leastFragmentation",
        }
    }
}

impl std::str::FromStr for NodePlacementPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.as_str() == text)
            .ok_or_else(|| unknown_policy(text, &Self::ALL.map(Self::as_str)))
    }
}

/// Preference among the feasible GPUs of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GpuPlacementPolicy {
    /// The fullest first.
    Binpack,
    /// The emptiest first.
    Spread,
    /// GPUs that share an NVLink domain, a NUMA node or a PCIe root first, from the smallest such group that suffices;
    /// then the fullest first.
    Topology,
    /// GPUs of one NUMA node first, from the smallest group that suffices; then the fullest first.
    Numa,
    /// The GPU first with which the free GPUs of the node stay usable for the requests that this cluster usually has.
    LeastFragmentation,
}

impl GpuPlacementPolicy {
    /// All policies.
    pub const ALL: [Self; 5] = [
        Self::Binpack,
        Self::Spread,
        Self::Topology,
        Self::Numa,
        Self::LeastFragmentation,
    ];

    /// Returns the value in config and flags.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Binpack => "binpack",
            Self::Spread => "spread",
            Self::Topology => "topology",
            Self::Numa => "numa",
            Self::LeastFragmentation => "leastFragmentation",
        }
    }
}

impl std::str::FromStr for GpuPlacementPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.as_str() == text)
            .ok_or_else(|| unknown_policy(text, &Self::ALL.map(Self::as_str)))
    }
}

fn unknown_policy(text: &str, known: &[&str]) -> String {
    format!("unknown policy {text:?}, use one of {}", known.join(", "))
}

/// Error of an opaque config.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The document has another kind or version.
    #[error(
        "config is {api_version} {kind}; expected {} {KIND}",
        names::API_VERSION
    )]
    WrongKind {
        /// `apiVersion` of the document.
        api_version: String,
        /// `kind` of the document.
        kind: String,
    },
    /// A field is unknown, has the wrong type or a value out of range.
    #[error("config field {path}: {source}")]
    Field {
        /// Path of the field, such as `memory.percent`.
        path: String,
        /// Cause.
        source: serde_json::Error,
    },
    /// The policy of exclusive time slices.
    #[error(
        "config field computePolicy: `token` does not exist; use `balance` (cores are guaranteed, idle time of other \
         shares is added) or `fixed` (never more than cores)"
    )]
    TimeSlices,
    /// The limit of a share that bursts is invalid.
    #[error(transparent)]
    Burst(#[from] BurstError),
    /// A claim with `computePolicy: spatial` that may be suspended.
    #[error(
        "config field suspend.allowed: not together with computePolicy: spatial; the NVIDIA driver cannot checkpoint clients of MPS"
    )]
    SpatialSuspend,
    /// A claim with `computePolicy: spatial` and a limit beyond its request.
    #[error(
        "config field memory.limit: not together with computePolicy: spatial; memory is taken back by ending programs, which disturbs the \
         others of the same MPS server"
    )]
    SpatialBurst,
    /// The field or value is not allowed in its layer.
    #[error(transparent)]
    Forbidden(#[from] ForbiddenField),
}

impl ConfigError {
    /// Returns the error of the config of a request for this device class, which is named where it decides.
    #[must_use]
    pub fn for_class(&self, class: &str) -> String {
        match self {
            Self::Forbidden(field) if field.layer == Layer::Claim => {
                format!("{self}; device class {class}")
            }
            _ => self.to_string(),
        }
    }
}

/// Checks the config of a device class.
///
/// # Errors
/// If a document is invalid or sets a field that is not allowed in a class.
pub fn check_class(configs: &[DeviceClassConfiguration]) -> Result<(), ConfigError> {
    // The documents of a class apply to all requests.
    resolve_spec(configs, &[], "").map(|_| ())
}

impl VgpuConfig {
    /// Decodes one document.
    ///
    /// # Errors
    /// If the document is not an object of this kind and version, or a field is unknown or invalid.
    pub fn decode(parameters: &Value) -> Result<Self, ConfigError> {
        let text_of = |key| {
            parameters
                .get(key)
                .and_then(Value::as_str)
                .unwrap_or_default()
        };
        let (api_version, kind) = (text_of("apiVersion"), text_of("kind"));
        if parameters.is_object() && (api_version != names::API_VERSION || kind != KIND) {
            return Err(ConfigError::WrongKind {
                api_version: non_empty(api_version, "without apiVersion"),
                kind: non_empty(kind, "without kind"),
            });
        }
        if text_of("computePolicy") == "token" {
            return Err(ConfigError::TimeSlices);
        }
        serde_path_to_error::deserialize(parameters).map_err(|error| ConfigError::Field {
            path: match error.path().to_string() {
                root if root == "." => "(document)".to_owned(),
                path => path,
            },
            source: error.into_inner(),
        })
    }
}

fn non_empty(text: &str, otherwise: &str) -> String {
    if text.is_empty() { otherwise } else { text }.to_owned()
}

/// One document with its layer and the requests to which it applies (empty: all).
#[derive(Debug, Clone)]
struct Document<'a> {
    layer: Layer,
    requests: &'a [String],
    parameters: &'a Value,
}

/// Returns the settings of `request` (its main name, or `main/sub`) from the config of an allocation.
///
/// # Errors
/// If a document that applies is invalid or sets a field that its layer does not allow.
pub fn resolve(
    configs: &[DeviceAllocationConfiguration],
    request: &str,
) -> Result<Settings, ConfigError> {
    resolve_over(Settings::default(), configs, request)
}

/// Like [`resolve`], with `defaults` for what no document sets.
///
/// # Errors
/// Like [`resolve`].
pub fn resolve_over(
    defaults: Settings,
    configs: &[DeviceAllocationConfiguration],
    request: &str,
) -> Result<Settings, ConfigError> {
    let documents: Vec<_> = configs
        .iter()
        .filter_map(|config| {
            let opaque = config
                .opaque
                .as_ref()
                .filter(|opaque| opaque.driver == names::DRIVER)?;
            Some(Document {
                layer: if config.source == "FromClass" {
                    Layer::Class
                } else {
                    Layer::Claim
                },
                requests: config.requests.as_deref().unwrap_or_default(),
                parameters: &opaque.parameters.0,
            })
        })
        .collect();
    resolve_documents(defaults, &documents, request)
}

/// Like [`resolve`], before an allocation exists: from the config of the request's class and of the claim.
///
/// # Errors
/// Like [`resolve`].
pub fn resolve_spec(
    class: &[DeviceClassConfiguration],
    claim: &[DeviceClaimConfiguration],
    request: &str,
) -> Result<Settings, ConfigError> {
    let of_class = class.iter().filter_map(|config| {
        let opaque = config
            .opaque
            .as_ref()
            .filter(|opaque| opaque.driver == names::DRIVER)?;
        Some(Document {
            layer: Layer::Class,
            requests: &[],
            parameters: &opaque.parameters.0,
        })
    });
    let of_claim = claim.iter().filter_map(|config| {
        let opaque = config
            .opaque
            .as_ref()
            .filter(|opaque| opaque.driver == names::DRIVER)?;
        Some(Document {
            layer: Layer::Claim,
            requests: config.requests.as_deref().unwrap_or_default(),
            parameters: &opaque.parameters.0,
        })
    });
    let documents: Vec<_> = of_class.chain(of_claim).collect();
    resolve_documents(Settings::default(), &documents, request)
}

/// Returns the placement policies that the config of the claim sets for a request, without those of the class.
///
/// # Errors
/// When a document cannot be decoded.
pub fn claim_placement(
    claim: &[DeviceClaimConfiguration],
    request: &str,
) -> Result<Placement, ConfigError> {
    let mut placement = Placement::default();
    for config in claim {
        let requests = config.requests.as_deref().unwrap_or_default();
        let opaque = config.opaque.as_ref();
        let Some(opaque) = opaque.filter(|opaque| opaque.driver == names::DRIVER) else {
            continue;
        };
        if applies(requests, request) {
            let own = VgpuConfig::decode(&opaque.parameters.0)?
                .placement
                .unwrap_or_default();
            placement.node = own.node.or(placement.node);
            placement.gpu = own.gpu.or(placement.gpu);
        }
    }
    Ok(placement)
}

fn resolve_documents(
    mut settings: Settings,
    documents: &[Document<'_>],
    request: &str,
) -> Result<Settings, ConfigError> {
    for layer in [Layer::Class, Layer::Claim] {
        for document in documents {
            if document.layer == layer && applies(document.requests, request) {
                settings = settings.under(&VgpuConfig::decode(document.parameters)?, layer)?;
            }
        }
    }
    if settings.is_spatial() && settings.suspend_allowed == Some(true) {
        return Err(ConfigError::SpatialSuspend);
    }
    if settings.is_spatial() && settings.memory_limit.is_some() {
        return Err(ConfigError::SpatialBurst);
    }
    Ok(settings)
}

/// Returns whether a config for `requests` applies to `request`. An empty list applies to all requests; a main name
/// includes its alternatives.
fn applies(requests: &[String], request: &str) -> bool {
    let main = request.split_once('/').map_or(request, |(main, _)| main);
    requests.is_empty() || requests.iter().any(|name| name == request || name == main)
}

#[cfg(test)]
mod tests;
