//! Data types of Multi-Instance GPU. The geometry comes from the NVIDIA driver.

use std::fmt;

/// MIG support and state of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mig {
    /// The GPU does not support MIG.
    NotCapable,
    /// The GPU supports MIG.
    Capable {
        /// Whether MIG mode is enabled.
        enabled: bool,
        /// Whether MIG mode is enabled after the next reset.
        pending: bool,
        /// Profiles by ID. Empty if the driver does not list profiles while MIG mode is disabled.
        profiles: Vec<MigProfile>,
    },
}

/// A GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigProfile {
    /// Profile ID, as printed by `nvidia-smi mig -lgip`.
    pub id: u32,
    /// Name, such as `1g.10gb` or `1g.10gb+me`.
    pub name: String,
    /// Variant of the profile of this size.
    pub variant: MigVariant,
    /// Compute slices, the number before the `g`.
    pub slices: u32,
    /// Maximum number of instances.
    pub instance_count: u32,
    /// Memory of an instance, bytes.
    pub memory_bytes: u64,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Video encoders.
    pub encoders: u32,
    /// JPEG engines.
    pub jpeg_engines: u32,
    /// Optical flow engines.
    pub ofa_engines: u32,
    /// Possible placements, by start.
    pub placements: Vec<Placement>,
}

/// Variant of a profile (`NVML_GPU_INSTANCE_PROFILE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MigVariant {
    /// The plain profile, or one with another memory size.
    Plain,
    /// `+me`: media extensions.
    MediaExtensions,
    /// `+me.all`: all media engines of the GPU.
    AllMediaExtensions,
    /// `-me`: no media engine.
    NoMediaExtensions,
    /// `+gfx`: graphics.
    Graphics,
}

/// A range of memory slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement {
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.start, self.size)
    }
}

/// An existing GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInstance {
    /// ID, unique on the GPU.
    pub id: u32,
    /// Profile ([`MigProfile::id`]).
    pub profile_id: u32,
    /// Placement.
    pub placement: Placement,
    /// Compute instances by ID.
    pub compute_instances: Vec<ComputeInstance>,
}

/// An existing compute instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeInstance {
    /// ID, unique in the GPU instance.
    pub id: u32,
    /// Compute instance profile.
    pub profile_id: u32,
    /// UUID of the MIG device, as in `CUDA_VISIBLE_DEVICES`.
    pub uuid: MigUuid,
}

/// UUID of a MIG device in NVML's spelling: `MIG-` and a lowercase UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MigUuid(String);

impl MigUuid {
    /// Returns the UUID with this text, which is not validated.
    #[must_use]
    pub fn new(uuid: impl Into<String>) -> Self {
        Self(uuid.into())
    }

    /// Returns the UUID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MigUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
