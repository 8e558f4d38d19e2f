//! Prepare and unprepare: the state of a claim on the node.
//!
//! | Step | Module |
//! |---|---|
//! | devices of the allocation | [`plan`] (pure) |
//! | conflicts with prepared claims | [`overcommit`] (pure) |
//! | CDI spec of the claim | [`spec`] |
//! | CDI devices that claims share | [`base`] (pure) |
//! | changes on the node | [`effects`] |
//! | claim record | [`record`] |
//! | versions of artifacts, also after loss of a record | [`recover`] |
//! | order of the steps | [`apply`] |
//! | MIG instances | [`apply::partitions`] |
//! | whether a claim is in use | [`liveness`] |
//! | memory limits by the NVIDIA driver | [`cgroup_limits`] |
//! | what companion claims add to shares | [`companion`] (pure) |
//! | daemons of MPS for spatial shares | [`crate::mps`] |
//!
//! Invariants:
//! - The record is written before the first effect and removed after the last effect. All state of a claim has a record,
//!   and overcommit checks see the claim. The record is the only durable write.
//! - Prepare is idempotent from any state: existing state is kept, missing state is created. The limits page of a live
//!   claim is never rewritten.
//! - The state of a claim whose record another build wrote is not changed.
//! - Unprepare needs the API server for no claim, and the GPU library only for a claim with MIG instances of this boot.

use drava_api::config::{ComputePolicy, Enforcement, MemoryPolicy, Priority};
use drava_nvml::{GpuInstance, MigUuid, Placement};
use serde::de::{Deserializer, IntoDeserializer as _};
use serde::{Deserialize, Serialize};

use crate::gpus::capacity::ShareTotals;
use crate::node::artifacts::{Installed, Stubs};
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::node::options;

pub mod apply;
pub mod base;
pub mod cgroup_limits;
pub mod companion;
pub mod effects;
pub(crate) mod limits;
pub mod liveness;
pub mod overcommit;
pub mod plan;
pub mod record;
pub mod recover;
pub mod spec;

/// GPU of a prepared device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRef {
    /// UUID of the GPU.
    pub uuid: String,
    /// Number of the device file `/dev/nvidia<minor>`.
    pub minor: u32,
    /// PCI address as in sysfs.
    pub pci_bus_id: String,
}

/// One allocation result on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prepared {
    /// Name of the main request.
    pub request: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// GPU of the device.
    pub gpu: GpuRef,
    /// Access of the claim to the device.
    pub access: Access,
}

/// Access of a claim to a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RecordedAccess", into = "RecordedAccess")]
pub enum Access {
    /// Exclusive use of the whole GPU.
    Whole,
    /// A share whose limits libvgpu enforces.
    Share(Share),
    /// A MIG partition.
    Partition(Partition),
    /// Access without allocation, for monitoring (`adminAccess`).
    Admin,
}

/// Access in a record.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
enum RecordedAccess {
    Whole,
    Share(Share),
    /// A share with a limit above its guarantee. A build that does not know this kind leaves the GPUs of the claim alone: it would
    /// give lent memory to other claims.
    BurstShare(Share),
    /// A share that lends what it does not use of its guarantee. A build that does not know this kind leaves the GPU alone: it would
    /// never give the share what is lent.
    LendingShare(Share),
    /// A share of the multiprocessors. A build that does not know this kind leaves the GPU alone, whose programs are clients of MPS.
    SpatialShare(Share),
    Partition(Partition),
    Admin,
}

impl From<Access> for RecordedAccess {
    fn from(access: Access) -> Self {
        match access {
            Access::Whole => Self::Whole,
            Access::Share(share) if share.is_spatial() => Self::SpatialShare(share),
            Access::Share(share) if share.can_burst() => Self::BurstShare(share),
            Access::Share(share) if share.lends_idle => Self::LendingShare(share),
            Access::Share(share) => Self::Share(share),
            Access::Partition(partition) => Self::Partition(partition),
            Access::Admin => Self::Admin,
        }
    }
}

impl From<RecordedAccess> for Access {
    fn from(access: RecordedAccess) -> Self {
        match access {
            RecordedAccess::Whole => Self::Whole,
            RecordedAccess::Share(share)
            | RecordedAccess::BurstShare(share)
            | RecordedAccess::LendingShare(share)
            | RecordedAccess::SpatialShare(share) => Self::Share(share),
            RecordedAccess::Partition(partition) => Self::Partition(partition),
            RecordedAccess::Admin => Self::Admin,
        }
    }
}

/// A share of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// ID of the share.
    pub id: ShareId,
    /// GPU memory of the claim itself, bytes.
    pub memory_bytes: u64,
    /// The most memory that the share may use while the GPU has memory that no claim holds, bytes; `None` for no more than its
    /// guarantee.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Whether that includes what other shares are guaranteed and do not use.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bursts_idle: bool,
    /// Whether other shares may use what this one is guaranteed and does not use.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lends_idle: bool,
    /// Whether it may be suspended, so its programs show that they want it back. Records of older builds do not say.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub can_suspend: bool,
    /// Guaranteed percent of GPU time; 0 is best effort.
    pub cores: u64,
    /// Slots of the GPU that the share uses.
    pub slots: u64,
    /// Enforcement of GPU time. Records of older builds may have `token`, exclusive time slices, whose guarantee is the same.
    #[serde(deserialize_with = "recorded_policy")]
    pub compute_policy: ComputePolicy,
    /// Priority among the shares of the GPU.
    pub priority: Priority,
    /// Behavior at the memory limit.
    pub memory_policy: MemoryPolicy,
    /// Whether the NVIDIA driver limits the memory of its containers, too. An older build that drops the field starts containers
    /// without that limit.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub limited_by_driver: bool,
    /// Action on processes that exceed or bypass the limits. Records of older builds lack the field.
    #[serde(default)]
    pub enforcement: Enforcement,
    /// Whether graphics and video libraries of the NVIDIA driver are mounted.
    pub unmetered: bool,
    /// What companion claims add to the share while its containers run. Records of older builds lack the field; an older build
    /// that drops it keeps the limits page.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub grants: Vec<Grant>,
    /// Suspension, once the share was suspended for the first time. An older build that drops the field counts the share as
    /// running, and its page still says that processes wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspension: Option<Suspension>,
}

/// What is recorded of the suspension of a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Suspension {
    /// Phase.
    pub phase: Phase,
    /// Processes that were locked, or were about to be.
    #[serde(default)]
    pub processes: Vec<HeldProcess>,
    /// GPU memory that they had, bytes.
    #[serde(default)]
    pub bytes: u64,
    /// Time until the GPU was free, milliseconds.
    #[serde(default)]
    pub millis: u64,
    /// Boot of the node in which it began; empty in records of older builds.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// When the GPU was free, since the epoch; 0 before, and in records of older builds. An older build drops it, and the metric of the
    /// time is absent then.
    #[serde(default)]
    pub free_since_seconds: u64,
}

impl Suspension {
    /// Returns what is recorded of a phase without processes.
    #[must_use]
    pub const fn new(phase: Phase) -> Self {
        Self {
            phase,
            processes: Vec::new(),
            bytes: 0,
            millis: 0,
            boot_id: String::new(),
            free_since_seconds: 0,
        }
    }
}

/// Phase of a suspension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// Processes may be locked and checkpointed. No one was told that the memory is free.
    Suspending,
    /// The memory is free. The controller may have been told.
    Suspended,
    /// Processes may be restored once the API server has said that the controller knows.
    Resuming,
    /// All processes run.
    Running,
}

/// A process that a suspension holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldProcess {
    /// PID on the node.
    pub pid: u32,
    /// Start time, clock ticks since boot: tells it from a later process with its PID.
    pub start_time: u64,
}

/// What a companion claim adds to a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    /// The companion claim.
    pub claim: ClaimRef,
    /// GPU memory, bytes.
    pub memory_bytes: u64,
    /// Guaranteed percent of GPU time.
    pub cores: u64,
    /// Slots of the GPU.
    pub slots: u64,
    /// Whether the share gives it back: its limits are lowered as soon as its use allows it. Until then it holds the capacity.
    #[serde(default)]
    pub is_ending: bool,
}

impl Share {
    /// Returns whether the share may use more memory than it is guaranteed.
    #[must_use]
    pub const fn can_burst(&self) -> bool {
        self.limit_bytes.is_some()
    }

    /// Returns whether the share has a part of the multiprocessors of its GPU instead of a part of the time.
    #[must_use]
    pub fn is_spatial(&self) -> bool {
        self.compute_policy == ComputePolicy::Spatial
    }

    /// Returns the capacity that the share holds, with all grants.
    #[must_use]
    pub fn held(&self) -> ShareTotals {
        self.sum(|_| true)
    }

    /// Returns the capacity that the share keeps when the grants that end are given back.
    #[must_use]
    pub fn kept(&self) -> ShareTotals {
        self.sum(|grant| !grant.is_ending)
    }

    /// Returns whether processes that are not yet on the GPU wait; `None` if the share was never suspended.
    #[must_use]
    pub fn is_suspended(&self) -> Option<bool> {
        let suspension = self.suspension.as_ref()?;
        Some(suspension.phase != Phase::Running)
    }

    /// Returns whether the share uses nothing of its GPU until it is resumed.
    #[must_use]
    pub fn is_off_gpu(&self) -> bool {
        self.suspended_bytes().is_some()
    }

    /// Returns the GPU memory that its processes had, bytes, while it uses nothing of its GPU.
    #[must_use]
    pub fn suspended_bytes(&self) -> Option<u64> {
        let suspension = self.suspension.as_ref()?;
        (suspension.phase == Phase::Suspended).then_some(suspension.bytes)
    }

    /// Returns the capacity that no other claim of the GPU can have. While the share is off its GPU, its own memory and time are
    /// free; its slot and all that companions add are not, because other claims are allocated beside them.
    #[must_use]
    pub fn counted(&self) -> ShareTotals {
        let held = self.held();
        if !self.is_off_gpu() {
            return held;
        }
        ShareTotals {
            memory_bytes: held.memory_bytes.saturating_sub(self.memory_bytes),
            cores: held.cores.saturating_sub(self.cores),
            slots: held.slots,
        }
    }

    /// Returns since when it uses nothing of its GPU, seconds since the epoch; `None` while it does, and for records of older builds.
    #[must_use]
    pub fn suspended_since(&self) -> Option<u64> {
        let suspension = self.suspension.as_ref()?;
        let is_known = suspension.phase == Phase::Suspended && suspension.free_since_seconds > 0;
        is_known.then_some(suspension.free_since_seconds)
    }

    fn sum(&self, counts: impl Fn(&Grant) -> bool) -> ShareTotals {
        let own = ShareTotals {
            memory_bytes: self.memory_bytes,
            cores: self.cores,
            slots: self.slots,
        };
        let grants = self.grants.iter().filter(|grant| counts(grant));
        grants.fold(own, |sum, grant| sum.plus(grant.amounts()))
    }
}

impl Grant {
    /// Returns its amounts.
    #[must_use]
    pub const fn amounts(&self) -> ShareTotals {
        ShareTotals {
            memory_bytes: self.memory_bytes,
            cores: self.cores,
            slots: self.slots,
        }
    }
}

fn recorded_policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ComputePolicy, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.as_str() {
        "token" => Ok(ComputePolicy::Balance),
        policy => ComputePolicy::deserialize(policy.into_deserializer()),
    }
}

/// A MIG partition of a GPU: one GPU instance with one compute instance.
///
/// Profile, placement and boot identify the instance: no two instances of a GPU have the same memory slices, and none
/// survives a reboot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Partition {
    /// Name of the profile, such as `1g.10gb`.
    pub profile: String,
    /// ID of the profile.
    pub profile_id: u32,
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
    /// Boot of the node in which the instance was created; empty before the record is written.
    pub boot_id: String,
    /// The instance, found by its identity at each prepare; not in the record.
    #[serde(skip)]
    pub instance: Option<Instance>,
}

/// IDs of an existing MIG instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// ID of the GPU instance.
    pub gpu_instance: u32,
    /// ID of the compute instance.
    pub compute_instance: u32,
    /// UUID of the MIG device.
    pub uuid: MigUuid,
}

impl Partition {
    /// Returns the memory slices.
    #[must_use]
    pub const fn placement(&self) -> Placement {
        Placement {
            start: self.start,
            size: self.size,
        }
    }

    /// Returns whether `instance` has the profile and placement of this partition.
    #[must_use]
    pub fn is_geometry_of(&self, instance: &GpuInstance) -> bool {
        (instance.profile_id, instance.placement) == (self.profile_id, self.placement())
    }
}

/// Delivery of libvgpu to the containers of a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Delivery {
    /// `/etc/ld.so.preload`; the default of records of older builds.
    #[default]
    Preload,
    /// These stubs, which replace libraries of the NVIDIA driver.
    Shim(Stubs),
}

impl Delivery {
    /// Returns the delivery that the option selects, with the installed stubs.
    #[must_use]
    pub fn from_option(option: options::Delivery, installed: &Installed) -> Self {
        match option {
            options::Delivery::Preload => Self::Preload,
            options::Delivery::Shim => Self::Shim(installed.stubs.clone()),
        }
    }
}

impl Prepared {
    /// Returns the share; `None` for other access.
    #[must_use]
    pub fn share(&self) -> Option<&Share> {
        match &self.access {
            Access::Share(share) => Some(share),
            Access::Whole | Access::Partition(_) | Access::Admin => None,
        }
    }

    /// Returns the share for changes; `None` for other access.
    pub fn share_mut(&mut self) -> Option<&mut Share> {
        match &mut self.access {
            Access::Share(share) => Some(share),
            Access::Whole | Access::Partition(_) | Access::Admin => None,
        }
    }

    /// Returns the partition; `None` for other access.
    #[must_use]
    pub fn partition(&self) -> Option<&Partition> {
        match &self.access {
            Access::Partition(partition) => Some(partition),
            Access::Whole | Access::Share(_) | Access::Admin => None,
        }
    }

    /// Returns the name of the CDI device. The name is unique on the node and stable.
    #[must_use]
    pub fn cdi_name(&self, uid: &ClaimUid) -> String {
        match self.share() {
            Some(share) => format!("{uid}-{}-{}-{}", self.request, self.device, share.id),
            None => format!("{uid}-{}-{}", self.request, self.device),
        }
    }

    /// Returns whether both are the same device with the same amounts. Policies may differ: they can change during the
    /// life of a claim.
    #[must_use]
    pub fn is_same_allocation(&self, other: &Self) -> bool {
        let allocation = |device: &Self| {
            let share = device.share().map(|share| {
                (
                    share.id.clone(),
                    share.memory_bytes,
                    share.cores,
                    share.slots,
                )
            });
            let admin = device.access == Access::Admin;
            (
                device.request.clone(),
                device.pool.clone(),
                device.device.clone(),
                device.gpu.uuid.clone(),
                admin,
                share,
            )
        };
        allocation(self) == allocation(other)
    }
}
