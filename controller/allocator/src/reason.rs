//! Rejections of a request by devices and nodes: their reason codes, and one line for users.

use std::fmt;

use drava_api::quota::QuotaResource;
use drava_api::reason::Reason;
use drava_api::{Quantity, names};

use crate::taint::Taint;

/// How a GPU is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuUse {
    /// Allocated to one claim.
    Exclusive,
    /// Claims have shares.
    Shared,
    /// Claims have MIG partitions.
    Partitioned,
    /// Other MIG partitions have the slices or engines of the partition.
    Slices,
    /// A device of unknown type is allocated.
    Unknown,
}

/// Why one device cannot serve a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejection {
    /// The device is not of the class.
    ClassMismatch,
    /// A selector of the request does not select the device.
    SelectorMismatch,
    /// The request names a capacity that the device lacks.
    CapacityUndefined {
        /// Name of the capacity.
        name: String,
    },
    /// A taint is not tolerated.
    Tainted(Taint),
    /// The amount exceeds what one request may consume.
    AboveMaximum {
        /// Name of the capacity.
        name: String,
        /// Amount requested.
        requested: Quantity,
        /// Maximum of one request.
        maximum: Quantity,
    },
    /// The device is allocated to another claim.
    InUse,
    /// Another device of the same GPU is in use.
    GpuInUse(GpuUse),
    /// Too little capacity is free.
    Capacity {
        /// Name of the capacity.
        name: String,
        /// Amount requested.
        requested: Quantity,
        /// Amount free.
        free: Quantity,
        /// Amount published.
        total: Quantity,
    },
    /// The device is selected for another request of the claim.
    AlreadySelected,
    /// The device violates a constraint of the claim.
    Constraint {
        /// Attribute of the constraint.
        attribute: String,
    },
    /// A container of the pod has another device of the same GPU.
    SameGpu {
        /// Name of the container.
        container: String,
    },
    /// A quota does not allow the device.
    Quota(Box<QuotaRejection>),
    /// The device is not published.
    Unpublished,
}

impl Rejection {
    /// Returns the code of the reason.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::ClassMismatch => Reason::TypeMismatch,
            Self::SelectorMismatch => Reason::SelectorMismatch,
            Self::CapacityUndefined { .. } => Reason::InsufficientCapacity,
            Self::Tainted(taint) if taint.is_unhealthy() => Reason::Unhealthy,
            Self::Tainted(_) => Reason::Tainted,
            Self::AboveMaximum { name, .. } | Self::Capacity { name, .. } => match name.as_str() {
                names::capacity::MEMORY => Reason::InsufficientMemory,
                names::capacity::CORES => Reason::InsufficientCores,
                names::capacity::SLOTS => Reason::SlotsExhausted,
                _ => Reason::InsufficientCapacity,
            },
            Self::InUse | Self::GpuInUse(_) => Reason::ExclusiveConflict,
            Self::AlreadySelected => Reason::InsufficientDevices,
            Self::Constraint { .. } | Self::SameGpu { .. } => Reason::TopologyUnsatisfied,
            Self::Quota(_) => Reason::QuotaExceeded,
            Self::Unpublished => Reason::PoolIncomplete,
        }
    }

    /// Returns how close the device came to serving the request. The closest rejection of a node is reported.
    #[must_use]
    pub fn closeness(&self) -> u8 {
        match self {
            Self::Unpublished => 0,
            Self::ClassMismatch => 1,
            Self::SelectorMismatch => 2,
            Self::CapacityUndefined { .. } => 3,
            Self::Tainted(_) => 4,
            Self::AlreadySelected => 5,
            Self::AboveMaximum { .. } => 6,
            Self::InUse | Self::GpuInUse(_) => 7,
            Self::Capacity { name, .. } => match name.as_str() {
                names::capacity::MEMORY => 10,
                names::capacity::CORES => 9,
                _ => 8,
            },
            Self::Constraint { .. } => 11,
            Self::SameGpu { .. } => 12,
            // The quota has to be free first, whatever becomes of the device.
            Self::Quota(_) => 13,
        }
    }

    /// Returns whether the device is of the requested type.
    #[must_use]
    pub const fn is_of_requested_type(&self) -> bool {
        !matches!(
            self,
            Self::Unpublished | Self::ClassMismatch | Self::SelectorMismatch
        )
    }

    /// Returns whether the device could not serve the request even if no claim were allocated.
    #[must_use]
    pub const fn is_permanent(&self) -> bool {
        matches!(
            self,
            Self::CapacityUndefined { .. } | Self::AboveMaximum { .. }
        )
    }

    /// Returns the free amount of the insufficient capacity, for comparing rejections.
    #[must_use]
    pub fn free(&self) -> Quantity {
        match self {
            Self::Capacity { free, .. } => *free,
            Self::AboveMaximum { maximum, .. } => *maximum,
            _ => Quantity::ZERO,
        }
    }

    /// Returns the detail for an event; `device` is `node/device`.
    #[must_use]
    pub fn detail(&self, device: &str) -> String {
        match self {
            Self::ClassMismatch | Self::SelectorMismatch | Self::AlreadySelected => String::new(),
            Self::InUse | Self::GpuInUse(GpuUse::Exclusive) => {
                format!("{device} is allocated exclusively")
            }
            Self::GpuInUse(GpuUse::Shared) => format!("{device} is shared by other claims"),
            Self::GpuInUse(GpuUse::Partitioned) => format!("{device} is partitioned"),
            Self::GpuInUse(GpuUse::Slices) => {
                format!("{device} has no free slices for the partition")
            }
            Self::GpuInUse(GpuUse::Unknown) => format!("{device} is in use"),
            Self::CapacityUndefined { name } => format!("no capacity {name:?} on {device}"),
            Self::Tainted(taint) => {
                if taint.is_unhealthy() && !taint.value.is_empty() {
                    taint.value.clone()
                } else {
                    taint.to_string()
                }
            }
            Self::AboveMaximum {
                name,
                requested,
                maximum,
            } => match name.as_str() {
                names::capacity::MEMORY => format!(
                    "requested memory {} exceeds the largest GPU, {} on {device}",
                    bytes(*requested),
                    bytes(*maximum)
                ),
                _ => {
                    format!(
                        "requested {name} {requested} exceeds the maximum {maximum} on {device}"
                    )
                }
            },
            Self::Capacity { name, free, .. } => match name.as_str() {
                names::capacity::MEMORY => {
                    format!("most free memory {} on {device}", bytes(*free))
                }
                names::capacity::CORES => format!("most free cores {free}% on {device}"),
                names::capacity::SLOTS => String::new(),
                _ => format!("most free {name} {free} on {device}"),
            },
            Self::Constraint { attribute } => format!("constraint on {attribute} is not satisfied"),
            Self::SameGpu { container } => {
                format!("container {container} needs devices of different GPUs")
            }
            Self::Quota(rejection) => rejection.to_string(),
            Self::Unpublished => format!("{device} is not published"),
        }
    }
}

/// Why a quota does not allow a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaRejection {
    /// Name of the quota.
    pub quota: String,
    /// The resource.
    pub resource: QuotaResource,
    /// Amount requested, at least.
    pub requested: Quantity,
    /// What the amount exceeds.
    pub bound: Bound,
}

/// Bound of a quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bound {
    /// Limit of all claims.
    Limit {
        /// Amount in use.
        used: Quantity,
        /// The limit.
        limit: Quantity,
    },
    /// Maximum of one claim.
    ClaimMaximum(Quantity),
}

impl fmt::Display for QuotaRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            quota,
            resource,
            requested,
            bound,
        } = self;
        let text = |value: &Quantity| quota_amount(*resource, *value);
        let name = resource.as_str();
        match bound {
            Bound::Limit { used, limit } => write!(
                f,
                "quota {quota}: {name} {} of {} used, {} requested",
                text(used),
                text(limit),
                text(requested)
            ),
            Bound::ClaimMaximum(maximum) => write!(
                f,
                "quota {quota}: {name} {} requested by one claim, {} allowed",
                text(requested),
                text(maximum)
            ),
        }
    }
}

/// Formats an amount of a resource that quotas count: `6 GiB`, `30%`, `2`.
#[must_use]
pub fn quota_amount(resource: QuotaResource, value: Quantity) -> String {
    // Without a suffix: 2000, not 2k.
    let count = || value.to_u64_rounded_up().unwrap_or_default();
    match resource {
        QuotaResource::Memory => bytes(value),
        QuotaResource::Cores => format!("{}%", count()),
        QuotaResource::Devices => count().to_string(),
    }
}

/// Formats an amount of memory: `6 GiB`, `1.5 GiB`, `512 MiB`.
#[must_use]
pub fn bytes(amount: Quantity) -> String {
    let bytes = amount.to_u64_rounded_up().unwrap_or_default();
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift {
            let (whole, rest) = (bytes >> shift, bytes & ((1 << shift) - 1));
            // Rounded down: the amount reported as free must be available.
            let tenths = (rest * 10) >> shift;
            return if tenths == 0 {
                format!("{whole} {unit}")
            } else {
                format!("{whole}.{tenths} {unit}")
            };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_memory_with_binary_units() {
        for (text, expected) in [
            ("6Gi", "6 GiB"),
            ("1536Mi", "1.5 GiB"),
            ("512Mi", "512 MiB"),
            ("81038Mi", "79.1 GiB"),
            ("0", "0 B"),
            ("1Ti", "1 TiB"),
        ] {
            assert_eq!(bytes(text.parse().unwrap()), expected);
        }
    }
}
