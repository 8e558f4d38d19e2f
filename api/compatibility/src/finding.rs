//! Refusals and warnings of a translation, each with the field of the pod.

use std::fmt;

/// Largest number of devices of a claim (ResourceClaim API).
pub(super) const MAX_DEVICES: u64 = 32;

/// Longest CEL expression of a claim in bytes (ResourceClaim API).
pub(super) const MAX_EXPRESSION_BYTES: usize = 10 << 10;

/// A field that cannot be translated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {cause}")]
pub struct Refusal {
    /// Path of the field in the pod.
    pub field: String,
    /// Cause.
    pub cause: RefusalCause,
}

/// Why a field cannot be translated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RefusalCause {
    /// The pod cannot be decoded.
    #[error("the pod is malformed: {problem}")]
    Malformed {
        /// Message of the decoder.
        problem: String,
    },
    /// The amount is not a whole number of at least 0.
    #[error("{value} is not a whole number; use one, such as 1")]
    NotCount {
        /// The value.
        value: String,
    },
    /// The amount of memory is more than any GPU has, as if it counted bytes.
    #[error("{}", memory_out_of_range(.text, *.unit_mib, *.amount))]
    MemoryOutOfRange {
        /// The value as the pod has it.
        text: String,
        /// MiB of one unit.
        unit_mib: u64,
        /// The amount to request if the value counts bytes.
        amount: Option<u64>,
    },
    /// Limit and request differ.
    #[error(
        "limit {limit} and request {request} differ; extended resources have one amount, remove the request"
    )]
    LimitAndRequestDiffer {
        /// The limit.
        limit: u64,
        /// The request.
        request: u64,
    },
    /// The container uses resources of two device plugins.
    #[error(
        "the container also requests {other}; use the resources of one device plugin per container"
    )]
    SeveralFamilies {
        /// Resource of the other device plugin.
        other: String,
    },
    /// The container requests partitions of two profiles.
    #[error(
        "the container also requests {other}; CUDA uses one MIG partition per process, request each profile in a container of \
         its own"
    )]
    SeveralProfiles {
        /// Resource of the other profile.
        other: String,
    },
    /// More devices than a claim can have.
    #[error(
        "the pod requests {count} GPUs, a claim has at most {MAX_DEVICES} devices; use several pods"
    )]
    TooManyDevices {
        /// Number of devices of all containers.
        count: u64,
    },
    /// The percentage is beyond 100.
    #[error("{percent}% is more than a GPU; use 1 to 100")]
    PercentageOutOfRange {
        /// The value.
        percent: u64,
    },
    /// The mode is unknown.
    #[error("mode {mode:?} has no equivalent; use hami-core or mig, or remove the annotation")]
    UnknownMode {
        /// The value.
        mode: String,
    },
    /// Two annotations for the mode differ.
    #[error("{mode:?} contradicts the annotation {other}; remove one of them")]
    ModesDiffer {
        /// The value.
        mode: String,
        /// The other annotation.
        other: &'static str,
    },
    /// A partition is requested without an amount of memory.
    #[error("mode mig needs an amount of memory to select a partition; add {resource} in MiB")]
    PartitionWithoutMemory {
        /// Resource with the amount.
        resource: String,
    },
    /// A UUID of a MIG partition, which exists only while a claim holds the partition.
    #[error(
        "{uuid:?} is not the UUID of a GPU; MIG partitions are created on demand, name the UUID of the GPU or a profile"
    )]
    NotGpuUuid {
        /// The value.
        uuid: String,
    },
    /// The policy has no equivalent.
    #[error("policy {policy:?} has no equivalent; use binpack or spread, or remove the annotation")]
    UnknownPolicy {
        /// The value.
        policy: String,
    },
    /// The value is not a boolean.
    #[error("{value:?} is not a boolean; use true or false")]
    NotBoolean {
        /// The value.
        value: String,
    },
    /// The list of models or UUIDs is too long for a selector.
    #[error(
        "the list is too long for a selector of {MAX_EXPRESSION_BYTES} bytes; use fewer values"
    )]
    ListTooLong,
    /// The resource has no amount.
    #[error(
        "a GPU shared by time-slicing has no amount of memory; request an amount, such as {example}"
    )]
    WithoutAmount {
        /// Resource to use instead.
        example: String,
    },
}

fn memory_out_of_range(text: &str, unit_mib: u64, amount: Option<u64>) -> String {
    let unit = match unit_mib {
        1 => "MiB".to_owned(),
        unit => format!("{unit} MiB"),
    };
    let action = match amount {
        Some(amount) => format!("use {amount}"),
        None => "request less".to_owned(),
    };
    format!("{text} is more memory than a GPU has, because the resource counts in {unit}; {action}")
}

/// All fields of a pod that cannot be translated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusals(pub Vec<Refusal>);

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, refusal) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{refusal}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Refusals {}

/// A field whose meaning changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Path of the field in the pod.
    pub field: String,
    /// The change.
    pub cause: WarningCause,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.cause)
    }
}

/// Change of meaning.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WarningCause {
    /// 100 cores are a whole GPU, whose memory has no limit.
    WholeGpuWithoutMemoryLimit,
    /// More cores than a GPU has.
    CoresReduced {
        /// The value.
        cores: u64,
    },
    /// An amount of memory takes precedence over a percentage.
    PercentageIgnored,
    /// The amount exceeds the largest share of the cluster.
    MemoryReduced {
        /// Requested MiB.
        requested_mib: u64,
        /// MiB of the largest share.
        largest_mib: u64,
    },
    /// The GPU of an init container stays allocated while the pod runs.
    HeldByInitContainer,
    /// The policy is a preference without equivalent.
    PolicyIgnored {
        /// The value.
        policy: String,
    },
    /// A policy of GPUs as the policy of nodes.
    PolicyWithoutEquivalent {
        /// The value.
        policy: String,
    },
    /// The annotation has no equivalent.
    AnnotationIgnored,
    /// The variable lifts the limit of cores, which only a device class may do.
    CoresNotCapped,
    /// The runtime class may inject GPUs without a claim.
    RuntimeClass {
        /// The value.
        name: String,
    },
    /// Several partitions of a container are partitions of different GPUs.
    PartitionsOfDifferentGpus,
    /// A privileged container can use every GPU of its node.
    Privileged,
    /// The scheduler is kept.
    SchedulerKept {
        /// The value.
        scheduler: String,
    },
    /// The scheduler is replaced by the default scheduler.
    SchedulerReplaced {
        /// The value.
        scheduler: String,
    },
}

impl fmt::Display for WarningCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WholeGpuWithoutMemoryLimit => f.write_str(
                "100 cores are a whole GPU; the container can use all its memory, not only the requested amount",
            ),
            Self::CoresReduced { cores } => write!(f, "{cores} cores are reduced to 100, a whole GPU"),
            Self::PercentageIgnored => {
                f.write_str("the percentage is ignored, because the container also requests an amount of memory")
            }
            Self::MemoryReduced {
                requested_mib,
                largest_mib,
            } => write!(
                f,
                "{requested_mib} MiB are reduced to {largest_mib} MiB, the largest share of the cluster"
            ),
            Self::HeldByInitContainer => f.write_str(
                "the GPU of the init container stays allocated while the pod runs; request the same amounts in a \
                 container to use one GPU for both",
            ),
            Self::PolicyIgnored { policy } => {
                write!(f, "policy {policy:?} is ignored: the first policy of the list applies")
            }
            Self::PolicyWithoutEquivalent { policy } => {
                write!(f, "policy {policy:?} has no equivalent and is ignored")
            }
            Self::AnnotationIgnored => f.write_str("the annotation has no equivalent and is ignored"),
            Self::CoresNotCapped => f.write_str(
                "cores become a guarantee without a cap; the compute policy of the device class decides about idle time",
            ),
            Self::RuntimeClass { name } => write!(
                f,
                "runtime class {name:?} may inject GPUs without a claim; remove it, the container runtime injects claims by CDI"
            ),
            Self::PartitionsOfDifferentGpus => f.write_str(
                "the partitions are of different GPUs, because CUDA uses one MIG partition per process; give each partition a \
                 container of its own to use partitions of one GPU",
            ),
            Self::Privileged => {
                f.write_str("a privileged container can use every GPU of its node, without limits")
            }
            Self::SchedulerKept { scheduler } => write!(
                f,
                "scheduler {scheduler:?} is kept; its pods get GPUs only if scheduling.schedulerNames of the drava \
                 chart lists it"
            ),
            Self::SchedulerReplaced { scheduler } => {
                write!(f, "scheduler {scheduler:?} is replaced by the default scheduler")
            }
        }
    }
}

/// Findings so far.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) refusals: Vec<Refusal>,
    warnings: Vec<Warning>,
}

impl Findings {
    pub(super) fn refuse(&mut self, field: impl Into<String>, cause: RefusalCause) {
        self.refusals.push(Refusal {
            field: field.into(),
            cause,
        });
    }

    pub(super) fn warn(&mut self, field: impl Into<String>, cause: WarningCause) {
        self.warnings.push(Warning {
            field: field.into(),
            cause,
        });
    }

    /// Returns the warnings.
    ///
    /// # Errors
    /// With the refusals, if there are any.
    pub(super) fn finish(self) -> Result<Vec<Warning>, Refusals> {
        if self.refusals.is_empty() {
            Ok(self.warnings)
        } else {
            Err(Refusals(self.refusals))
        }
    }
}
