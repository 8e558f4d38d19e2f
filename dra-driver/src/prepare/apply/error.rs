//! Why a claim was not prepared or unprepared.

use drava_nvml::Placement;

use crate::node::claim::{ClaimRef, ClaimUid};
use crate::node::lock::LockError;
use crate::prepare::apply::backing::{RECLAIM_WAIT, Unreturned};
use crate::prepare::effects::EffectError;
use crate::prepare::overcommit::{Conflict, Holders};
use crate::prepare::plan::PlanError;
use crate::prepare::record::RecordError;
use crate::prepare::spec::SpecError;

/// A claim was not prepared or unprepared.
#[derive(Debug, thiserror::Error)]
#[error("claim {claim}")]
pub struct ApplyError {
    /// The claim.
    pub claim: ClaimRef,
    /// Cause.
    #[source]
    pub failure: Box<Failure>,
}

impl ApplyError {
    /// Returns whether a program holds a MIG instance of the claim.
    #[must_use]
    pub fn is_instance_held(&self) -> bool {
        let failure = self.failure.as_ref();
        matches!(failure, Failure::Effect(EffectError::InstanceHeld { .. }))
    }
}

/// Cause of an [`ApplyError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The claim or its allocation is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The claim would overcommit a GPU.
    #[error(transparent)]
    Conflict(#[from] Box<Conflict>),
    /// Another claim holds an unknown amount of these GPUs.
    #[error(
        "the record of claim {0} is damaged or lost and is being rebuilt from the API server; free capacity of its GPUs is \
         unknown until then, kubelet retries"
    )]
    DamagedRecord(ClaimUid),
    /// Another build wrote the record of this claim, or of a claim on the same GPUs.
    #[error(
        "cannot use the record of claim {claim} ({reason}); run the node driver that wrote the record, or drain the node \
         with it before a downgrade"
    )]
    UnsupportedRecord {
        /// Claim of the record.
        claim: ClaimUid,
        /// Difference to this build.
        reason: String,
    },
    /// MIG mode of the GPU could not be switched.
    #[error("device {device}")]
    MigMode {
        /// The device.
        device: String,
        /// Error with the programs that hold the GPU.
        #[source]
        source: EffectError,
    },
    /// The MIG instance of a partition could not be created.
    #[error("device {device}")]
    Partition {
        /// The device.
        device: String,
        /// Error of NVML.
        #[source]
        source: EffectError,
    },
    /// An instance that drava did not create uses the slices of a partition.
    #[error(
        "device {device}: MIG instance {instance} (slices {placement}) of GPU {gpu}, which drava did not create, uses its \
         slices; destroy that instance, or delete the pod to release the allocation"
    )]
    ForeignInstance {
        /// The device.
        device: String,
        /// UUID of the GPU.
        gpu: String,
        /// ID of the GPU instance.
        instance: u32,
        /// Its memory slices.
        placement: Placement,
    },
    /// A MIG instance has no compute instance.
    #[error("device {device}: MIG instance {instance} has no compute instance")]
    NoComputeInstance {
        /// The device.
        device: String,
        /// ID of the GPU instance.
        instance: u32,
    },
    /// Containers of an earlier allocation of the claim run.
    #[error(
        "containers of an earlier allocation of the claim still run ({0}); kubelet retries, delete the pod that uses it"
    )]
    StillRunning(String),
    /// The GPU of a prepared device is not on the node, and another GPU has its device file.
    #[error(
        "device {device}: GPU {gpu} is not on this node, and its device file belongs to GPU {other}; delete the pod to \
         release the allocation"
    )]
    GpuMissing {
        /// The device.
        device: String,
        /// UUID of the GPU.
        gpu: String,
        /// UUID of the other GPU.
        other: String,
    },
    /// Another share has not given back memory that this claim is guaranteed.
    #[error(
        "device {device}: memory that was free is lent, and was not given back within {} s by: {holders} ({cause}); kubelet retries",
        RECLAIM_WAIT.as_secs()
    )]
    Unreturned {
        /// The device.
        device: String,
        /// Claims of these shares.
        holders: Holders,
        /// Why it is not back.
        cause: Unreturned,
    },
    /// The CDI spec could not be built.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The node could not be changed.
    #[error(transparent)]
    Effect(#[from] EffectError),
    /// Claim records could not be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A lock was not acquired.
    #[error(transparent)]
    Lock(#[from] LockError),
}
