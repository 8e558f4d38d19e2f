//! MIG tables: GPU instance profiles of a model and their placements.
//!
//! Placements are in memory slices. The axis has 4 (A30), 8 (A100, H100 and relatives) or 12 slices
//! (RTX PRO 6000).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// MIG properties of a GPU model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mig {
    /// Width of the placement axis.
    pub memory_slices: u32,
    /// Requirement of a MIG mode change.
    pub switch: MigSwitch,
    /// GPU instance profiles.
    pub profiles: Vec<GpuInstanceProfile>,
}

/// When a requested MIG mode becomes the current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MigSwitch {
    /// When the GPU is idle (Hopper and later).
    Live,
    /// At a reset of the GPU (Ampere); until then the request is pending.
    Reset,
}

/// One GPU instance profile, as `nvidia-smi mig -lgip` lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuInstanceProfile {
    /// Name without the `MIG ` prefix, such as `1g.10gb+me`.
    pub name: String,
    /// NVML profile.
    pub kind: GpuInstanceProfileKind,
    /// Id that `nvidia-smi` prints and that creates instances.
    pub id: u32,
    /// Compute slices.
    pub slices: u32,
    /// Maximum number on one GPU.
    pub instances: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Possible placements.
    pub placements: Placements,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders.
    #[serde(default)]
    pub decoders: u32,
    /// Video encoders.
    #[serde(default)]
    pub encoders: u32,
    /// JPEG engines.
    #[serde(default)]
    pub jpeg_engines: u32,
    /// Optical flow engines.
    #[serde(default)]
    pub ofa_engines: u32,
}

/// `{starts}:size` in memory slices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Placements {
    /// Start slices.
    pub starts: Vec<u32>,
    /// Size in slices.
    pub size: u32,
}

/// NVML's GPU instance profiles (`NVML_GPU_INSTANCE_PROFILE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[expect(missing_docs, reason = "names of NVML")]
pub enum GpuInstanceProfileKind {
    #[serde(rename = "1_SLICE")]
    Slice1,
    #[serde(rename = "2_SLICE")]
    Slice2,
    #[serde(rename = "3_SLICE")]
    Slice3,
    #[serde(rename = "4_SLICE")]
    Slice4,
    #[serde(rename = "7_SLICE")]
    Slice7,
    #[serde(rename = "8_SLICE")]
    Slice8,
    #[serde(rename = "6_SLICE")]
    Slice6,
    #[serde(rename = "1_SLICE_REV1")]
    Slice1Rev1,
    #[serde(rename = "2_SLICE_REV1")]
    Slice2Rev1,
    #[serde(rename = "1_SLICE_REV2")]
    Slice1Rev2,
    #[serde(rename = "1_SLICE_GFX")]
    Slice1Gfx,
    #[serde(rename = "2_SLICE_GFX")]
    Slice2Gfx,
    #[serde(rename = "4_SLICE_GFX")]
    Slice4Gfx,
    #[serde(rename = "1_SLICE_NO_ME")]
    Slice1NoMe,
    #[serde(rename = "2_SLICE_NO_ME")]
    Slice2NoMe,
    #[serde(rename = "1_SLICE_ALL_ME")]
    Slice1AllMe,
    #[serde(rename = "2_SLICE_ALL_ME")]
    Slice2AllMe,
}

impl GpuInstanceProfileKind {
    /// All, in the order of their values in `nvml.h`.
    pub const ALL: [Self; 17] = [
        Self::Slice1,
        Self::Slice2,
        Self::Slice3,
        Self::Slice4,
        Self::Slice7,
        Self::Slice8,
        Self::Slice6,
        Self::Slice1Rev1,
        Self::Slice2Rev1,
        Self::Slice1Rev2,
        Self::Slice1Gfx,
        Self::Slice2Gfx,
        Self::Slice4Gfx,
        Self::Slice1NoMe,
        Self::Slice2NoMe,
        Self::Slice1AllMe,
        Self::Slice2AllMe,
    ];

    /// Whether instances can render (`NVML_GPU_INSTANCE_PROFILE_CAPS_GFX`).
    #[must_use]
    pub fn graphics(self) -> bool {
        matches!(self, Self::Slice1Gfx | Self::Slice2Gfx | Self::Slice4Gfx)
    }
}

impl Mig {
    /// Returns the profile of a kind.
    #[must_use]
    pub fn profile_of_kind(&self, kind: GpuInstanceProfileKind) -> Option<&GpuInstanceProfile> {
        self.profiles.iter().find(|profile| profile.kind == kind)
    }

    /// Returns the profile with an id.
    #[must_use]
    pub fn profile(&self, id: u32) -> Option<&GpuInstanceProfile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// Maximum number of MIG devices of a GPU.
    #[must_use]
    pub fn max_devices(&self) -> u32 {
        self.profiles
            .iter()
            .map(|profile| profile.instances.max(profile.slices))
            .max()
            .unwrap_or(0)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let mut ids = BTreeSet::new();
        let mut kinds = BTreeSet::new();
        for profile in &self.profiles {
            let name = &profile.name;
            if !ids.insert(profile.id) {
                return Err(format!("profile {name}: duplicate id {}", profile.id));
            }
            if !kinds.insert(profile.kind) {
                return Err(format!("profile {name}: duplicate kind"));
            }
            let Placements { starts, size } = &profile.placements;
            let last = starts.iter().max();
            match last.and_then(|last| last.checked_add(*size)) {
                Some(end) if *size > 0 && end <= self.memory_slices => {}
                _ => {
                    return Err(format!(
                        "profile {name}: placements exceed the {} memory slices",
                        self.memory_slices
                    ));
                }
            }
        }
        Ok(())
    }
}

/// One compute instance profile of a GPU instance, as `nvidia-smi mig -lcip` lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeInstanceProfile {
    /// NVML profile number (`NVML_COMPUTE_INSTANCE_PROFILE_*`), which is also the id that creates
    /// compute instances.
    pub id: u32,
    /// Compute slices.
    pub slices: u32,
    /// Maximum number in one GPU instance.
    pub instances: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
}

/// Slices of `NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE` to `_7_SLICE`, by number.
const COMPUTE_SLICES: [u32; 5] = [1, 2, 3, 4, 7];

impl GpuInstanceProfile {
    /// Memory in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib * super::MIB
    }

    /// Start slices of compute instances of a size in a GPU instance of this profile.
    #[must_use]
    pub fn compute_starts(&self, slices: u32) -> Vec<u32> {
        let slices = slices.max(1);
        (0..self.slices / slices).map(|at| at * slices).collect()
    }
}

impl Mig {
    /// Returns the compute instance profile with an id in GPU instances of a profile.
    ///
    /// Drivers list 1c, 2c and 4c for four slices, but no 3c. A compute instance of all slices has
    /// all multiprocessors; smaller ones have as many per slice as the smallest GPU instance.
    #[must_use]
    pub fn compute_profile(
        &self,
        gpu_instance: &GpuInstanceProfile,
        id: u32,
    ) -> Option<ComputeInstanceProfile> {
        let slices = *COMPUTE_SLICES.get(usize::try_from(id).ok()?)?;
        if slices > gpu_instance.slices || (slices == 3 && gpu_instance.slices == 4) {
            return None;
        }
        let multiprocessors = if slices == gpu_instance.slices {
            gpu_instance.multiprocessors
        } else {
            let smallest = self.profile_of_kind(GpuInstanceProfileKind::Slice1)?;
            smallest.multiprocessors * slices
        };
        Some(ComputeInstanceProfile {
            id,
            slices,
            instances: gpu_instance.slices / slices,
            multiprocessors,
        })
    }
}
