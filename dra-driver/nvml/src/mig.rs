//! Plain data about Multi-Instance GPU. All geometry comes from the driver; none is built in.

use std::fmt;

/// MIG on one card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mig {
    /// The card has no MIG.
    NotCapable,
    /// The card can be partitioned.
    Capable {
        /// MIG mode is on.
        enabled: bool,
        /// MIG mode after the next reset of the card.
        pending: bool,
        /// Profiles that the card offers, by profile id. Drivers that refuse to list them with MIG mode off leave
        /// it empty.
        profiles: Vec<MigProfile>,
    },
}

/// A GPU instance profile of one card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigProfile {
    /// Id that creation takes (`nvidia-smi mig -lgip` prints it).
    pub id: u32,
    /// Name, such as `1g.10gb` or `1g.10gb+me`.
    pub name: String,
    /// What sets it apart from the plain profile of the same size.
    pub variant: MigVariant,
    /// Compute slices, the number before the `g`.
    pub slices: u32,
    /// Instances of this profile on an empty card.
    pub instance_count: u32,
    /// Device memory of an instance.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
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
    /// Where an instance can lie on an empty card, by start.
    pub placements: Vec<Placement>,
}

/// What sets a profile apart from the plain one of the same size (`NVML_GPU_INSTANCE_PROFILE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MigVariant {
    /// Nothing, or only its amount of memory.
    Plain,
    /// `+me`: media extensions.
    MediaExtensions,
    /// `+me.all`: all media engines of the card.
    AllMediaExtensions,
    /// `-me`: no media engine.
    NoMediaExtensions,
    /// `+gfx`: graphics.
    Graphics,
}

/// A run of memory slices.
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

/// A GPU instance that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInstance {
    /// Id on its card.
    pub id: u32,
    /// Profile it was made from ([`MigProfile::id`]).
    pub profile_id: u32,
    /// Where it lies.
    pub placement: Placement,
    /// Its compute instances, by id.
    pub compute_instances: Vec<ComputeInstance>,
}

/// A compute instance that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeInstance {
    /// Id within its GPU instance.
    pub id: u32,
    /// Compute instance profile it was made from.
    pub profile_id: u32,
    /// UUID of the MIG device, which is what CUDA programs name.
    pub uuid: MigUuid,
}

/// UUID of a MIG device as NVML spells it: `MIG-` and a lowercase UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MigUuid(String);

impl MigUuid {
    /// Wraps a UUID in NVML's spelling.
    #[must_use]
    pub fn new(uuid: impl Into<String>) -> Self {
        Self(uuid.into())
    }

    /// The UUID as text.
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
