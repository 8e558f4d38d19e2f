//! Reading of GPU instance profiles and placements.

use nvml_wrapper_sys::bindings as sys;

use super::processes::list;
use super::{Handle, Shared, call, optional, struct_version, text};
use crate::{Memory, MigProfile, MigVariant, Placement, Status};

/// Profile numbers to query: nvml.h has 17 (`NVML_GPU_INSTANCE_PROFILE_COUNT`), newer drivers may have more. NVML rejects
/// unknown numbers.
const NUMBERS: std::ops::Range<u32> = 0..32;

const MIB: u64 = 1 << 20;

impl Shared {
    /// Returns the profiles by ID.
    pub(super) fn profiles(
        &self,
        handle: Handle,
        memory: Memory,
    ) -> Result<Vec<MigProfile>, Status> {
        let mut profiles = Vec::new();
        for number in NUMBERS {
            let Some(info) = self.profile(handle, number)? else {
                continue;
            };
            let placements = optional(self.placements(handle, info.id))?.unwrap_or_default();
            profiles.push(profile(number, &info, placements, memory));
        }
        profiles.sort_by_key(|profile| profile.id);
        Ok(profiles)
    }

    /// Returns the profile with this number; `None` if the GPU has none.
    fn profile(
        &self,
        handle: Handle,
        number: u32,
    ) -> Result<Option<sys::nvmlGpuInstanceProfileInfo_v2_t>, Status> {
        let mut v2 = empty();
        match call!(
            self.lib(),
            nvmlDeviceGetGpuInstanceProfileInfoV(handle.0, number, &raw mut v2)
        ) {
            Ok(()) => return Ok(Some(v2)),
            Err(Status::MissingSymbol(_)) => {}
            Err(status) => return optional(Err(status)),
        }
        let mut v1 = sys::nvmlGpuInstanceProfileInfo_t {
            id: 0,
            isP2pSupported: 0,
            sliceCount: 0,
            instanceCount: 0,
            multiprocessorCount: 0,
            copyEngineCount: 0,
            decoderCount: 0,
            encoderCount: 0,
            jpegCount: 0,
            ofaCount: 0,
            memorySizeMB: 0,
        };
        let read = call!(
            self.lib(),
            nvmlDeviceGetGpuInstanceProfileInfo(handle.0, number, &raw mut v1)
        );
        Ok(optional(read)?.map(|()| without_name(&v1)))
    }

    fn placements(&self, handle: Handle, profile_id: u32) -> Result<Vec<Placement>, Status> {
        let placements: Vec<sys::nvmlGpuInstancePlacement_t> = list(|count, placements| {
            call!(
                self.lib(),
                nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    handle.0, profile_id, placements, count
                )
            )
        })?;
        let mut placements: Vec<Placement> = placements.iter().map(placement).collect();
        placements.sort_unstable();
        Ok(placements)
    }
}

pub(super) fn placement(placement: &sys::nvmlGpuInstancePlacement_t) -> Placement {
    Placement {
        start: placement.start,
        size: placement.size,
    }
}

fn empty() -> sys::nvmlGpuInstanceProfileInfo_v2_t {
    sys::nvmlGpuInstanceProfileInfo_v2_t {
        version: struct_version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2),
        id: 0,
        isP2pSupported: 0,
        sliceCount: 0,
        instanceCount: 0,
        multiprocessorCount: 0,
        copyEngineCount: 0,
        decoderCount: 0,
        encoderCount: 0,
        jpegCount: 0,
        ofaCount: 0,
        memorySizeMB: 0,
        name: [0; 96],
    }
}

/// Converts the profile of a driver before 510, which has no name.
fn without_name(v1: &sys::nvmlGpuInstanceProfileInfo_t) -> sys::nvmlGpuInstanceProfileInfo_v2_t {
    sys::nvmlGpuInstanceProfileInfo_v2_t {
        id: v1.id,
        isP2pSupported: v1.isP2pSupported,
        sliceCount: v1.sliceCount,
        instanceCount: v1.instanceCount,
        multiprocessorCount: v1.multiprocessorCount,
        copyEngineCount: v1.copyEngineCount,
        decoderCount: v1.decoderCount,
        encoderCount: v1.encoderCount,
        jpegCount: v1.jpegCount,
        ofaCount: v1.ofaCount,
        memorySizeMB: v1.memorySizeMB,
        ..empty()
    }
}

fn profile(
    number: u32,
    info: &sys::nvmlGpuInstanceProfileInfo_v2_t,
    placements: Vec<Placement>,
    gpu: Memory,
) -> MigProfile {
    let reported = text(&info.name);
    let reported = reported.strip_prefix("MIG ").unwrap_or(&reported);
    let name = if reported.is_empty() {
        constructed_name(number, info, gpu)
    } else {
        reported.to_owned()
    };
    MigProfile {
        id: info.id,
        variant: variant(&name),
        name,
        slices: info.sliceCount,
        instance_count: info.instanceCount,
        memory_bytes: info.memorySizeMB * MIB,
        multiprocessors: info.multiprocessorCount,
        copy_engines: info.copyEngineCount,
        decoders: info.decoderCount,
        encoders: info.encoderCount,
        jpeg_engines: info.jpegCount,
        ofa_engines: info.ofaCount,
        placements,
    }
}

/// Builds the name as `nvidia-smi` does: slices, memory in GB rounded up to eighths of the GPU, suffix of the number.
fn constructed_name(
    number: u32,
    info: &sys::nvmlGpuInstanceProfileInfo_v2_t,
    gpu: Memory,
) -> String {
    let gigabytes = match gpu {
        Memory::Dedicated { total_bytes, .. } if total_bytes > 0 => {
            let eighths = (info.memorySizeMB * MIB * 8).div_ceil(total_bytes);
            // Rounded half up like the driver's names: an eighth of 40 GB is 5, of 95 GB 12.
            (eighths * total_bytes.div_ceil(1 << 30) * 2 + 8) / 16
        }
        Memory::Dedicated { .. } | Memory::NotSupported => info.memorySizeMB.div_ceil(1024),
    };
    let suffix = match number {
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1
        | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1 => "+me",
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME
        | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME => "+me.all",
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME
        | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_NO_ME => "-me",
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX
        | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX
        | sys::NVML_GPU_INSTANCE_PROFILE_4_SLICE_GFX => "+gfx",
        _ => "",
    };
    format!("{}g.{gigabytes}gb{suffix}", info.sliceCount)
}

fn variant(name: &str) -> MigVariant {
    match name
        .find(['+', '-'])
        .map(|position| name.split_at(position).1)
    {
        Some("+me") => MigVariant::MediaExtensions,
        Some("+me.all") => MigVariant::AllMediaExtensions,
        Some("-me") => MigVariant::NoMediaExtensions,
        Some("+gfx") => MigVariant::Graphics,
        Some(_) | None => MigVariant::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dedicated(mib: u64) -> Memory {
        Memory::Dedicated {
            total_bytes: mib * MIB,
            reserved_bytes: 0,
            used_bytes: 0,
        }
    }

    /// Names of `nvidia-smi mig -lgip`, from public captures.
    #[test]
    fn constructs_names_as_the_driver() {
        for (number, slices, memory_mib, gpu_mib, name) in [
            (0, 1, 4864, 40960, "1g.5gb"),
            (7, 1, 4864, 40960, "1g.5gb+me"),
            (9, 1, 9856, 40960, "1g.10gb"),
            (4, 7, 40192, 40960, "7g.40gb"),
            (0, 1, 9728, 81559, "1g.10gb"),
            (2, 3, 40448, 81559, "3g.40gb"),
            (0, 1, 16384, 143_771, "1g.18gb"),
            (13, 1, 24192, 97887, "1g.24gb-me"),
            (15, 1, 24192, 97887, "1g.24gb+me.all"),
            (10, 1, 24192, 97887, "1g.24gb+gfx"),
        ] {
            let info = sys::nvmlGpuInstanceProfileInfo_v2_t {
                sliceCount: slices,
                memorySizeMB: memory_mib,
                ..empty()
            };
            assert_eq!(
                profile(number, &info, Vec::new(), dedicated(gpu_mib)).name,
                name
            );
        }
    }

    #[test]
    fn prefers_names_of_the_driver() {
        let mut info = empty();
        for (slot, byte) in info.name.iter_mut().zip(b"MIG 2g.20gb+me") {
            *slot = std::ffi::c_char::from_ne_bytes([*byte]);
        }
        let profile = profile(0, &info, Vec::new(), dedicated(40960));
        assert_eq!(profile.name, "2g.20gb+me");
        assert_eq!(profile.variant, MigVariant::MediaExtensions);
    }

    #[test]
    fn derives_variant_from_suffix() {
        assert_eq!(variant("1g.10gb"), MigVariant::Plain);
        assert_eq!(variant("1g.24gb-me"), MigVariant::NoMediaExtensions);
        assert_eq!(variant("1g.24gb+me.all"), MigVariant::AllMediaExtensions);
        assert_eq!(variant("4g.96gb+gfx"), MigVariant::Graphics);
        assert_eq!(variant("1g.10gb+new"), MigVariant::Plain);
    }
}
