//! Types and reasons of the conditions that the node driver writes into `status.devices` of a ResourceClaim.
//!
//! `cargo xtask codegen` writes `docs/reference/events.md` from this table.

use std::fmt;

/// Type of a condition of an allocated device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionType {
    /// The device is ready for containers.
    Prepared,
    /// Containers of the claim cannot exceed the limits of the device.
    Enforced,
    /// The GPU of the device is healthy.
    Healthy,
    /// The share of the base claim has the capacity of the device, which a companion claim holds.
    Granted,
    /// The processes of the claim are in host memory, and the GPU has none of their memory.
    Suspended,
    /// The share has used no GPU time since the transition.
    Idle,
}

impl ConditionType {
    /// All types.
    pub const ALL: [Self; 6] = [
        Self::Prepared,
        Self::Enforced,
        Self::Healthy,
        Self::Granted,
        Self::Suspended,
        Self::Idle,
    ];

    /// Value of the condition's field `type`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prepared => "Prepared",
            Self::Enforced => "Enforced",
            Self::Healthy => "Healthy",
            Self::Granted => "Granted",
            Self::Suspended => "Suspended",
            Self::Idle => "Idle",
        }
    }

    /// Meaning of the status True.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Prepared => "The device is ready for containers.",
            Self::Enforced => "Containers of the claim cannot exceed the limits of the device.",
            Self::Healthy => "The GPU of the device is healthy.",
            Self::Granted => {
                "The share of the base claim has the capacity of the device, which a companion claim holds."
            }
            Self::Suspended => {
                "The processes of the claim are in host memory, and the GPU has none of their memory."
            }
            Self::Idle => "The share has used no GPU time since `lastTransitionTime`.",
        }
    }
}

macro_rules! condition_reasons {
    ($($name:ident: $type:ident, $status:literal, $meaning:literal;)*) => {
        /// Reason of a condition. The names are part of the interface.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum ConditionReason {
            $(#[doc = $meaning] $name,)*
        }

        impl ConditionReason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Value of the condition's field `reason`.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Type of the condition.
            #[must_use]
            pub const fn condition_type(self) -> ConditionType {
                match self {
                    $(Self::$name => ConditionType::$type,)*
                }
            }

            /// Status of the condition: True or False.
            #[must_use]
            pub const fn status(self) -> bool {
                match self {
                    $(Self::$name => $status,)*
                }
            }

            /// Cause of the status.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => $meaning,)*
                }
            }
        }
    };
}

condition_reasons! {
    Prepared: Prepared, true, "The node driver prepared the device.";
    IncompatibleClaims: Prepared, false, "A container has a claim with `computePolicy: spatial` and another claim for GPUs; none of \
        its containers starts.";
    Interposed: Enforced, true, "libvgpu enforces the limits of the share.";
    LimitedByDriver: Enforced, true, "The NVIDIA driver limits the memory of the share's containers, and libvgpu enforces all limits.";
    Partly: Enforced, false, "The memory of the share is limited. Its part of the multiprocessors is not: MPS takes it from an \
        environment variable that the containers can change.";
    WholeGpu: Enforced, true, "The claim has the whole GPU.";
    Partition: Enforced, true, "The claim has a MIG partition, which the GPU isolates.";
    AdminAccess: Enforced, false, "The claim has admin access, which has no limits.";
    CdiIgnored: Enforced, false, "The container runtime ignored the CDI devices of the claim.";
    MemoryOverLimit: Enforced, false, "The processes of the claim use more GPU memory than its limit.";
    OtherGpuUsed: Enforced, false, "A process of the claim uses a GPU that the claim does not have.";
    ProcessNotCounted: Enforced, false, "A process of the claim uses the GPU without libvgpu.";
    SharedAddressSpace: Enforced, false, "The GPU shares page tables with the CPU (ATS), so host memory can reside in \
        GPU memory.";
    HeterogeneousMemory: Enforced, false, "The claim has `enforcement: required`, and host memory can migrate to the GPU (HMM), \
        where no limit counts it.";
    Unmetered: Enforced, false, "The device class mounts graphics and video libraries, whose allocations no limit \
        covers.";
    UsageRegionDamaged: Enforced, false, "The usage region of the share is damaged or missing.";
    NoFault: Healthy, true, "The GPU answers NVML and has no fault.";
    GpuFault: Healthy, false, "The GPU or the MIG instance reported a fault, such as a fatal XID, or needs a reset.";
    GpuLost: Healthy, false, "The GPU has fallen off the bus.";
    GpuNotResponding: Healthy, false, "NVML calls for the GPU do not return.";
    Granted: Granted, true, "The node driver added the capacity to the limits of the base claim.";
    InUse: Granted, false, "The companion claim is being deleted, and the share of the base claim uses more memory than it keeps.";
    Released: Granted, false, "The companion claim is being deleted, and the share has given its capacity back.";
    BaseNotPrepared: Granted, false, "The base claim is not prepared on the node: its pod does not run there so far, or no more.";
    Refused: Granted, false, "The claim cannot add its capacity to the base claim.";
    Suspended: Suspended, true, "All processes are checkpointed and NVML shows none of their memory, or there are no \
        processes. New processes wait.";
    Demanded: Suspended, true, "As Suspended, and a program of the share has called CUDA since: it waits until the share is resumed.";
    StateLost: Suspended, true, "As Suspended, and the node was restarted since: the state of its programs is lost, so its pod is evicted.";
    Resuming: Suspended, false, "The processes are being restored: the claim uses its GPU memory again.";
    Resumed: Suspended, false, "All processes run.";
    SuspendRefused: Suspended, false, "The shares cannot be suspended. Nothing was locked, or all was unlocked again.";
    SuspendFailed: Suspended, false, "The suspension failed and was undone. It is tried again while the claim is to be \
        suspended.";
    NoGpuTime: Idle, true, "No program of the share has used GPU time for a minute, or for up to ten minutes if the share often does so.";
    UsesGpu: Idle, false, "A program of the share uses GPU time again, the share was resumed, or the node driver was restarted.";
}

impl fmt::Display for ConditionReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
