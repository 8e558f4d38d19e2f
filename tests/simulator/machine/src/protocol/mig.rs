//! Requests about MIG mode, GPU instances and compute instances of one card.

use serde::{Deserialize, Serialize};

use super::ContextId;

/// Which instance of a card: the ids that NVML shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceId {
    /// GPU instance, unique on its card.
    pub gpu: u32,
    /// Compute instance, unique in its GPU instance.
    pub compute: u32,
}

/// What is asked of a card's partitioning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigRequest {
    /// Everything that exists.
    State,
    /// Switches MIG mode; answered with [`MigReply::Switched`].
    SetMode {
        /// On.
        enabled: bool,
    },
    /// Creates a GPU instance; answered with [`MigReply::Created`].
    CreateGpuInstance {
        /// Its profile.
        profile: u32,
        /// Its first memory slice; without one the driver chooses.
        start: Option<u32>,
    },
    /// Destroys a GPU instance that has no compute instances.
    DestroyGpuInstance {
        /// Which.
        gpu: u32,
    },
    /// How many more GPU instances of a profile fit; answered with [`MigReply::Capacity`].
    RemainingGpuInstances {
        /// The profile.
        profile: u32,
    },
    /// Creates a compute instance; answered with [`MigReply::Created`].
    CreateComputeInstance {
        /// In which GPU instance.
        gpu: u32,
        /// Its profile.
        profile: u32,
        /// Its first compute slice; without one the driver chooses.
        start: Option<u32>,
    },
    /// Destroys a compute instance that no process uses.
    DestroyComputeInstance {
        /// Which.
        instance: InstanceId,
    },
    /// How many more compute instances of a profile fit; answered with [`MigReply::Capacity`].
    RemainingComputeInstances {
        /// In which GPU instance.
        gpu: u32,
        /// The profile.
        profile: u32,
    },
    /// Runs a context, which the caller has just created, in a compute instance.
    Enter {
        /// Which context.
        context: ContextId,
        /// Where.
        instance: InstanceId,
    },
}

/// Answers to [`MigRequest`]s that have a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigReply {
    /// To [`MigRequest::State`].
    State(MigState),
    /// To [`MigRequest::SetMode`].
    Switched(MigActivation),
    /// The id of what was created.
    Created(u32),
    /// How many more fit.
    Capacity(u32),
}

/// Whether a new MIG mode is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigActivation {
    /// It is.
    Active,
    /// It is pending, because somebody uses the card.
    InUse,
}

/// Partitioning of one card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigState {
    /// MIG mode is on.
    pub enabled: bool,
    /// MIG mode after the next reset.
    pub pending: bool,
    /// GPU instances, by id.
    pub gpu_instances: Vec<GpuInstanceState>,
}

/// One GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuInstanceState {
    /// Id on its card.
    pub id: u32,
    /// Id of its profile.
    pub profile: u32,
    /// First memory slice.
    pub start: u32,
    /// Memory taken by contexts and allocations in it.
    pub used_bytes: u64,
    /// Compute instances, by id.
    pub compute_instances: Vec<ComputeInstanceState>,
}

/// One compute instance, which is one MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComputeInstanceState {
    /// Id in its GPU instance.
    pub id: u32,
    /// Id of its profile.
    pub profile: u32,
    /// First compute slice.
    pub start: u32,
    /// Compute slices.
    pub slices: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// `MIG-` and a UUID.
    pub uuid: String,
    /// NVML's index of the MIG device on its card; kept until the instance is destroyed.
    pub index: u32,
}
