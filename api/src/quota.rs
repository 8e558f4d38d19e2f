//! GpuQuota: how much GPU memory, cores and devices the claims of some namespaces may have.
//!
//! A quota counts what the claims of its namespaces are allocated, over all device classes of drava: a share its amounts, a
//! whole GPU or a MIG partition its capacity, each one device. Admin access is not counted. Several quotas can cover a
//! namespace; a claim is allocated only if all of them allow it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{DeviceType, Quantity};

pub(crate) mod schema;
mod selector;

pub use selector::labels_match;

/// Condition that is false while the usage exceeds the limit.
pub const WITHIN_LIMIT: &str = "WithinLimit";
/// Reason of [`WITHIN_LIMIT`] with status False.
pub const LIMIT_EXCEEDED: &str = "LimitExceeded";
/// Percentage of the limit from which on a quota is almost used up, unless it names another one.
pub const DEFAULT_ALERT_THRESHOLD_PERCENT: u8 = 90;

/// Limits and guarantees of GPU memory, cores and devices for the namespaces of a tenant.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "gpu.drava.dev",
    version = "v1alpha1",
    kind = "GpuQuota",
    plural = "gpuquotas",
    status = "GpuQuotaStatus",
    derive = "PartialEq",
    doc = "Limits and guarantees of GPU memory, cores and devices for the namespaces of a tenant.",
    crates(kube_core = "::kube_core"),
    printcolumn = r#"{"name": "Memory", "type": "string", "jsonPath": ".status.used.memory", "description": "Allocated GPU memory"}"#,
    printcolumn = r#"{"name": "Memory-Limit", "type": "string", "jsonPath": ".spec.limit.memory"}"#,
    printcolumn = r#"{"name": "Cores", "type": "integer", "jsonPath": ".status.used.cores", "description": "Guaranteed percent of GPU time"}"#,
    printcolumn = r#"{"name": "Cores-Limit", "type": "integer", "jsonPath": ".spec.limit.cores"}"#,
    printcolumn = r#"{"name": "Devices", "type": "integer", "jsonPath": ".status.used.devices", "description": "Allocated devices: shares, partitions and whole GPUs"}"#,
    printcolumn = r#"{"name": "Devices-Limit", "type": "integer", "jsonPath": ".spec.limit.devices"}"#,
    printcolumn = r#"{"name": "Within-Limit", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"WithinLimit\")].status"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::spec_rules()))]
pub struct GpuQuotaSpec {
    /// Names of the namespaces. Exactly one of namespaces and namespaceSelector is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::namespaces")]
    pub namespaces: Option<Vec<String>>,
    /// Labels of the namespaces; an empty selector selects all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    /// Devices that count; all if not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_selector: Option<QuotaDeviceSelector>,
    /// Amounts up to which claims are allocated; without limit where not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<QuotaAmounts>,
    /// Amounts that the namespaces get back from others: usage beyond the guarantee is borrowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<QuotaAmounts>,
    /// Amounts of each claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimAmounts>,
    /// Percentage of the limit from which on the alert DravaQuotaAlmostUsed fires; 90 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub alert_threshold_percent: Option<u8>,
}

/// Devices by their model and type. A device must match every list that is set.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::device_selector_rules()))]
pub struct QuotaDeviceSelector {
    /// Values of the device attribute productName, such as NVIDIA H100 80GB HBM3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::product_names")]
    pub product_names: Option<Vec<String>>,
    /// Types of device: gpu (whole GPU), vgpu (share), mig (MIG partition).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::device_types")]
    pub types: Option<Vec<DeviceType>>,
}

/// Amounts of GPU memory, cores and devices.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QuotaAmounts {
    /// GPU memory, such as 40Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::memory")]
    pub memory: Option<Quantity>,
    /// Percent of the GPU time of one GPU; 200 is the time of two GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::count")]
    pub cores: Option<u32>,
    /// Number of shares, MIG partitions and whole GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::count")]
    pub devices: Option<u32>,
}

/// Amounts of each claim.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClaimAmounts {
    /// Amounts of a share whose request names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<ShareAmounts>,
    /// Amounts that the devices of one claim must not exceed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<QuotaAmounts>,
}

/// Amounts of a share.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShareAmounts {
    /// GPU memory, such as 4Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::memory")]
    pub memory: Option<Quantity>,
    /// Percent of the GPU time of one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 100))]
    pub cores: Option<u8>,
}

/// State of a quota, written by the controller.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[serde(rename_all = "camelCase")]
pub struct GpuQuotaStatus {
    /// Generation of the object to which the status belongs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of namespaces that the quota covers.
    #[serde(default)]
    pub namespaces: u32,
    /// Amounts that are allocated, are being written, or are reserved for a pod.
    #[serde(default)]
    pub used: QuotaAmounts,
    /// Used amounts of suspended shares, which get them back when they are resumed.
    #[serde(default)]
    pub suspended: QuotaAmounts,
    /// Used amounts beyond the guarantee, for the resources with a guarantee.
    #[serde(default)]
    pub borrowed: QuotaAmounts,
    /// Amounts left below the limit, for the resources with a limit.
    #[serde(default)]
    pub free: QuotaAmounts,
    /// WithinLimit: whether the usage is within the limit.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// A resource that a quota counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum QuotaResource {
    /// GPU memory.
    Memory,
    /// Percent of the GPU time of one GPU.
    Cores,
    /// Devices.
    Devices,
}

impl QuotaResource {
    /// All resources.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Cores, Self::Devices];

    /// Returns the name of the field.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cores => "cores",
            Self::Devices => "devices",
        }
    }
}

impl QuotaAmounts {
    /// Returns the amount of a resource.
    #[must_use]
    pub fn get(&self, resource: QuotaResource) -> Option<Quantity> {
        match resource {
            QuotaResource::Memory => self.memory,
            QuotaResource::Cores => self.cores.map(|cores| Quantity::count(cores.into())),
            QuotaResource::Devices => self.devices.map(|devices| Quantity::count(devices.into())),
        }
    }

    /// Sets the amount of a resource; fractions of cores are rounded up, amounts below zero are zero.
    pub fn set(&mut self, resource: QuotaResource, amount: Quantity) {
        let count = || {
            let amount = amount.max(Quantity::ZERO).to_u64_rounded_up();
            amount
                .and_then(|amount| u32::try_from(amount).ok())
                .unwrap_or(u32::MAX)
        };
        match resource {
            QuotaResource::Memory => self.memory = Some(amount.max(Quantity::ZERO)),
            QuotaResource::Cores => self.cores = Some(count()),
            QuotaResource::Devices => self.devices = Some(count()),
        }
    }
}

impl GpuQuotaSpec {
    /// Returns the limit of a resource.
    #[must_use]
    pub fn limit(&self, resource: QuotaResource) -> Option<Quantity> {
        self.limit?.get(resource)
    }

    /// Returns the guarantee of a resource.
    #[must_use]
    pub fn guarantee(&self, resource: QuotaResource) -> Option<Quantity> {
        self.guarantee?.get(resource)
    }

    /// Returns the maximum of a resource for one claim.
    #[must_use]
    pub fn claim_maximum(&self, resource: QuotaResource) -> Option<Quantity> {
        self.claim?.max?.get(resource)
    }

    /// Returns the amounts of a share whose request names none.
    #[must_use]
    pub fn share_default(&self) -> ShareAmounts {
        let claim = self.claim.unwrap_or_default();
        claim.default.unwrap_or_default()
    }

    /// Returns the ratio of the limit from which on the quota is almost used up.
    #[must_use]
    pub fn alert_threshold_ratio(&self) -> f64 {
        let percent = self.alert_threshold_percent;
        f64::from(percent.unwrap_or(DEFAULT_ALERT_THRESHOLD_PERCENT)) / 100.0
    }

    /// Returns whether devices of this model and type count.
    #[must_use]
    pub fn selects_device(&self, product_name: Option<&str>, kind: Option<DeviceType>) -> bool {
        let Some(selector) = &self.device_selector else {
            return true;
        };
        let is_model = |names: &Vec<String>| {
            product_name.is_some_and(|product| names.iter().any(|name| name == product))
        };
        let is_type = |types: &Vec<DeviceType>| kind.is_some_and(|kind| types.contains(&kind));
        selector.product_names.as_ref().is_none_or(is_model)
            && selector.types.as_ref().is_none_or(is_type)
    }
}

#[cfg(test)]
mod tests;
