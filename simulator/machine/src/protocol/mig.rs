//! Requests about MIG mode, GPU instances and compute instances of one GPU.

use serde::{Deserialize, Serialize};

use super::ContextId;

/// Ids of an instance, as shown by NVML.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceId {
    /// GPU instance, unique on its GPU.
    pub gpu_instance: u32,
    /// Compute instance, unique in its GPU instance.
    pub compute: u32,
}

/// MIG request for one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigRequest {
    /// All instances.
    State,
    /// Switches MIG mode; reply [`MigReply::Switched`].
    SetMode {
        /// New mode.
        enabled: bool,
    },
    /// Creates a GPU instance; reply [`MigReply::Created`].
    CreateGpuInstance {
        /// Profile id.
        profile: u32,
        /// First memory slice; `None` lets the driver choose.
        start: Option<u32>,
    },
    /// Destroys a GPU instance without compute instances.
    DestroyGpuInstance {
        /// GPU instance id.
        gpu_instance: u32,
    },
    /// Number of GPU instances of a profile that still fit; reply [`MigReply::Capacity`].
    RemainingGpuInstances {
        /// Profile id.
        profile: u32,
    },
    /// Creates a compute instance; reply [`MigReply::Created`].
    CreateComputeInstance {
        /// GPU instance id.
        gpu_instance: u32,
        /// Profile id.
        profile: u32,
        /// First compute slice; `None` lets the driver choose.
        start: Option<u32>,
    },
    /// Destroys a compute instance without processes.
    DestroyComputeInstance {
        /// Instance ids.
        instance: InstanceId,
    },
    /// Number of compute instances of a profile that still fit; reply [`MigReply::Capacity`].
    RemainingComputeInstances {
        /// GPU instance id.
        gpu_instance: u32,
        /// Profile id.
        profile: u32,
    },
    /// Moves a context that the caller just created into a compute instance.
    Enter {
        /// Context.
        context: ContextId,
        /// Instance.
        instance: InstanceId,
    },
}

/// Replies to [`MigRequest`]s that have a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigReply {
    /// To [`MigRequest::State`].
    State(MigState),
    /// To [`MigRequest::SetMode`].
    Switched(MigActivation),
    /// Id of the new instance.
    Created(u32),
    /// Number of instances that still fit.
    Capacity(u32),
}

/// Activation of a new MIG mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigActivation {
    /// In force.
    Active,
    /// Pending, because the GPU is in use.
    InUse,
}

/// MIG state of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigState {
    /// Whether MIG mode is on.
    pub enabled: bool,
    /// Whether MIG mode is on after the next reset.
    pub pending: bool,
    /// GPU instances, by id.
    pub gpu_instances: Vec<GpuInstanceState>,
}

/// One GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuInstanceState {
    /// Id on its GPU.
    pub id: u32,
    /// Profile id.
    pub profile: u32,
    /// First memory slice.
    pub start: u32,
    /// Memory of its contexts and allocations.
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
    /// Profile id.
    pub profile: u32,
    /// First compute slice.
    pub start: u32,
    /// Compute slices.
    pub slices: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// With the prefix `MIG-`.
    pub uuid: String,
    /// NVML index of the MIG device on its GPU, stable until the instance is destroyed.
    pub index: u32,
}
