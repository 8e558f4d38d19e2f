//! Rejections of a request by devices and nodes: their reason codes, and one line for users.

use std::fmt;

use drava_api::quota::QuotaResource;
use drava_api::reason::Reason;
use drava_api::{Quantity, names};

use crate::claim::ConstraintRule;
use crate::taint::Taint;

/// Qualified name of the attribute that is equal for the devices of a GPU.
const UUID: &str = "gpu.drava.dev/uuid";

/// How a GPU is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuUse {
    /// Allocated to one claim.
    Exclusive,
    /// Claims have shares.
    Shared,
    /// Claims have shares of its time.
    SharedByTime,
    /// Claims have shares of its multiprocessors, with which a share of another namespace or of its time cannot be together.
    SharedByMultiprocessors,
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
    ClassMismatch {
        /// Name of the class.
        class: String,
    },
    /// The request is for a percentage of a GPU's memory, and the device has no shares.
    PercentageOfWhole,
    /// A selector of the request does not select the device.
    SelectorMismatch,
    /// The request names a capacity that the device lacks.
    CapacityUndefined {
        /// Name of the capacity.
        name: String,
        /// Names of the capacities that the device has.
        published: Vec<String>,
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
        /// Relation between the values.
        rule: ConstraintRule,
        /// Attribute of the constraint.
        attribute: String,
        /// Whether the device lacks the attribute.
        is_missing: bool,
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
            Self::ClassMismatch { .. } | Self::PercentageOfWhole => Reason::TypeMismatch,
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
            Self::ClassMismatch { .. } => 1,
            Self::PercentageOfWhole => 2,
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
            Self::Unpublished
                | Self::ClassMismatch { .. }
                | Self::PercentageOfWhole
                | Self::SelectorMismatch
        )
    }

    /// Returns whether the device could not serve the request even if no claim were allocated.
    #[must_use]
    pub const fn is_permanent(&self) -> bool {
        matches!(
            self,
            Self::PercentageOfWhole | Self::CapacityUndefined { .. } | Self::AboveMaximum { .. }
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
            Self::ClassMismatch { class } if class == names::class::MIG => format!(
                "{device} is not of class {class}; a node profile with mode mig or dynamic makes partitions of GPUs with MIG"
            ),
            Self::ClassMismatch { class } => format!("{device} is not of class {class}"),
            Self::PercentageOfWhole => format!(
                "{device} has no shares, and memory.percent is a share; use class vgpu.drava.dev or fraction.drava.dev"
            ),
            Self::SelectorMismatch => format!("the selectors of the request exclude {device}"),
            Self::AlreadySelected => {
                format!("{device} is selected for another request of the claim")
            }
            Self::InUse | Self::GpuInUse(GpuUse::Exclusive) => {
                format!("{device} is allocated exclusively")
            }
            Self::GpuInUse(GpuUse::Shared) => format!("{device} is shared by other claims"),
            Self::GpuInUse(GpuUse::SharedByTime) => {
                format!("{device} is shared by time, not by multiprocessors")
            }
            Self::GpuInUse(GpuUse::SharedByMultiprocessors) => format!(
                "the multiprocessors of {device} are divided among claims of another namespace or class"
            ),
            Self::GpuInUse(GpuUse::Partitioned) => format!("{device} is partitioned"),
            Self::GpuInUse(GpuUse::Slices) => {
                format!("{device} has no free slices for the partition")
            }
            Self::GpuInUse(GpuUse::Unknown) => format!("{device} is in use"),
            Self::CapacityUndefined { name, published } => format!(
                "no capacity {name:?} on {device}, which has {}",
                published.join(", ")
            ),
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
                names::capacity::SLOTS => "every GPU has its maximum number of shares".to_owned(),
                _ => format!("most free {name} {free} on {device}"),
            },
            Self::Constraint {
                attribute,
                is_missing: true,
                ..
            } => format!("{device} has no {attribute}, which a constraint of the claim compares"),
            Self::Constraint {
                rule, attribute, ..
            } => match rule {
                ConstraintRule::Match => {
                    format!(
                        "the free devices differ in {attribute}, by which the claim matches them"
                    )
                }
                ConstraintRule::Distinct if attribute == UUID => {
                    format!("the claim needs devices of different GPUs (distinctAttribute {UUID})")
                }
                ConstraintRule::Distinct => {
                    format!(
                        "the free devices have too few values of {attribute}, which the claim distinguishes"
                    )
                }
            },
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
    fn every_rejection_has_reason_and_detail() {
        let amount = Quantity::count(1);
        let capacities = ["memory", "cores", "slots", "decoders"];
        let name = |name: &str| name.to_owned();
        let above = capacities.map(|capacity| Rejection::AboveMaximum {
            name: name(capacity),
            requested: amount,
            maximum: amount,
        });
        let insufficient = capacities.map(|capacity| Rejection::Capacity {
            name: name(capacity),
            requested: amount,
            free: amount,
            total: amount,
        });
        let in_use = [
            GpuUse::Exclusive,
            GpuUse::Shared,
            GpuUse::SharedByTime,
            GpuUse::SharedByMultiprocessors,
            GpuUse::Partitioned,
            GpuUse::Slices,
            GpuUse::Unknown,
        ]
        .map(Rejection::GpuInUse);
        let taint = |key: &str, value: &str| {
            let taint = serde_json::json!({"key": key, "value": value, "effect": "NoSchedule"});
            let taint: k8s_openapi::api::resource::v1::DeviceTaint =
                serde_json::from_value(taint).unwrap();
            Rejection::Tainted(Taint::foreign(&taint).unwrap())
        };
        let constraint = |rule, is_missing| Rejection::Constraint {
            rule,
            attribute: name("gpu.drava.dev/uuid"),
            is_missing,
        };
        let quota = |bound| {
            Rejection::Quota(Box::new(QuotaRejection {
                quota: name("q"),
                resource: QuotaResource::Devices,
                requested: amount,
                bound,
            }))
        };
        let others = [
            Rejection::ClassMismatch { class: name("c") },
            Rejection::PercentageOfWhole,
            Rejection::SelectorMismatch,
            Rejection::CapacityUndefined {
                name: name("x"),
                published: vec![name("memory")],
            },
            taint("gpu.drava.dev/unhealthy", "xid-79"),
            taint("gpu.drava.dev/unhealthy", ""),
            taint("example.com/reserved", ""),
            Rejection::InUse,
            Rejection::AlreadySelected,
            constraint(ConstraintRule::Match, false),
            constraint(ConstraintRule::Distinct, false),
            constraint(ConstraintRule::Match, true),
            Rejection::SameGpu {
                container: name("c"),
            },
            quota(Bound::ClaimMaximum(amount)),
            quota(Bound::Limit {
                used: amount,
                limit: amount,
            }),
            Rejection::Unpublished,
        ];
        let all = above
            .into_iter()
            .chain(insufficient)
            .chain(in_use)
            .chain(others);
        for rejection in all {
            assert_ne!(rejection.detail("n1/gpu-0").trim(), "", "{rejection:?}");
            // Each kind of rejection is above.
            match rejection {
                Rejection::ClassMismatch { .. }
                | Rejection::PercentageOfWhole
                | Rejection::SelectorMismatch
                | Rejection::CapacityUndefined { .. }
                | Rejection::Tainted(_)
                | Rejection::AboveMaximum { .. }
                | Rejection::InUse
                | Rejection::GpuInUse(_)
                | Rejection::Capacity { .. }
                | Rejection::AlreadySelected
                | Rejection::Constraint { .. }
                | Rejection::SameGpu { .. }
                | Rejection::Quota(_)
                | Rejection::Unpublished => {}
            }
        }
    }

    #[test]
    fn details_name_what_exists_and_what_helps() {
        let undefined = Rejection::CapacityUndefined {
            name: "mem".to_owned(),
            published: ["cores", "memory", "slots"].map(str::to_owned).into(),
        };
        assert_eq!(
            undefined.detail("n1/gpu-0"),
            "no capacity \"mem\" on n1/gpu-0, which has cores, memory, slots"
        );
        let partition = Rejection::ClassMismatch {
            class: names::class::MIG.to_owned(),
        };
        assert_eq!(
            partition.detail("n1/gpu-0"),
            "n1/gpu-0 is not of class mig.drava.dev; a node profile with mode mig or dynamic makes partitions of GPUs with MIG"
        );
    }

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
