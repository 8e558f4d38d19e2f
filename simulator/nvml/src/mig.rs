//! MIG: mode, GPU instance profiles and their placements.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE, NVML_GPU_INSTANCE_PROFILE_CAPS_GFX,
    nvmlDevice_t, nvmlDeviceAttributes_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t,
    nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t, nvmlReturn_t,
};
use simulator_machine::description::{GpuInstanceProfile, GpuInstanceProfileKind, Mig};
use simulator_machine::protocol::{MigActivation, MigReply, MigRequest};

use crate::abi::{NvmlResult, Out, entry_points, fixed_text, set_list};
use crate::error::NvmlError;
use crate::handle::{AnyDevice, any_device, device};

/// Fills a profile struct: fields of all versions, and fields of one version.
macro_rules! profile_info {
    ($info:ident, $profile:expr, $($field:ident: $value:expr),* $(,)?) => {
        $info {
            id: $profile.id,
            sliceCount: $profile.slices,
            instanceCount: $profile.instances,
            multiprocessorCount: $profile.multiprocessors,
            copyEngineCount: $profile.copy_engines,
            decoderCount: $profile.decoders,
            encoderCount: $profile.encoders,
            jpegCount: $profile.jpeg_engines,
            ofaCount: $profile.ofa_engines,
            memorySizeMB: $profile.memory_mib,
            $($field: $value),*
        }
    };
}

entry_points! {
    fn nvmlDeviceGetMigMode(handle: nvmlDevice_t, current: Out<c_uint>, pending: Out<c_uint>) {
        mig(handle)?;
        let device = device(handle)?;
        let state = device.library.mig(device.gpu)?;
        current.set(state.enabled.into())?;
        pending.set(state.pending.into())
    }

    fn nvmlDeviceSetMigMode(handle: nvmlDevice_t, mode: c_uint, activation: Out<nvmlReturn_t>) {
        mig(handle)?;
        let device = device(handle)?;
        let enabled = match mode {
            NVML_DEVICE_MIG_DISABLE => false,
            NVML_DEVICE_MIG_ENABLE => true,
            _ => return Err(NvmlError::InvalidArgument),
        };
        if activation.is_null() {
            return Err(NvmlError::InvalidArgument);
        }
        require_root()?;
        match device.library.mig_request(device.gpu, MigRequest::SetMode { enabled })? {
            Some(MigReply::Switched(MigActivation::Active)) => activation.set(0),
            Some(MigReply::Switched(MigActivation::InUse)) => activation.set(NvmlError::InUse.into()),
            _ => Err(NvmlError::Unknown),
        }
    }

    fn nvmlDeviceGetMaxMigDeviceCount(handle: nvmlDevice_t, count: Out<c_uint>) {
        count.set(device(handle)?.model()?.mig.as_ref().map_or(0, Mig::max_devices))
    }

    fn nvmlDeviceIsMigDeviceHandle(handle: nvmlDevice_t, is_mig: Out<c_uint>) {
        is_mig.set(matches!(any_device(handle)?, AnyDevice::Mig(_)).into())
    }

    fn nvmlDeviceGetGpuInstanceProfileInfo(handle: nvmlDevice_t, profile: c_uint, info: Out<nvmlGpuInstanceProfileInfo_t>) {
        let profile = profile_of_kind(handle, profile)?;
        info.set(profile_info!(nvmlGpuInstanceProfileInfo_t, profile, isP2pSupported: 0))
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoV(handle: nvmlDevice_t, profile: c_uint, info: Out<nvmlGpuInstanceProfileInfo_v2_t>) {
        versioned_info(profile_of_kind(handle, profile)?, info)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(handle: nvmlDevice_t, id: c_uint, info: Out<nvmlGpuInstanceProfileInfo_v2_t>) {
        versioned_info(profile_of_id(handle, id)?, info)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements(handle: nvmlDevice_t, id: c_uint, placements: Out<nvmlGpuInstancePlacement_t>, count: Out<c_uint>) {
        possible_placements(handle, id, placements, count)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(handle: nvmlDevice_t, id: c_uint, placements: Out<nvmlGpuInstancePlacement_t>, count: Out<c_uint>) {
        possible_placements(handle, id, placements, count)
    }

    fn nvmlDeviceGetAttributes(handle: nvmlDevice_t, attributes: Out<nvmlDeviceAttributes_t>) { device_attributes(handle, attributes) }
    fn nvmlDeviceGetAttributes_v2(handle: nvmlDevice_t, attributes: Out<nvmlDeviceAttributes_t>) { device_attributes(handle, attributes) }
}

/// MIG changes need root.
pub(crate) fn require_root() -> NvmlResult {
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err(NvmlError::NoPermission),
    }
}

/// MIG table of a GPU.
pub(crate) fn mig(handle: nvmlDevice_t) -> NvmlResult<&'static Mig> {
    device(handle)?
        .model()?
        .mig
        .as_ref()
        .ok_or(NvmlError::NotSupported)
}

/// Returns the profile for one of `NVML_GPU_INSTANCE_PROFILE_*`.
fn profile_of_kind(handle: nvmlDevice_t, kind: c_uint) -> NvmlResult<&'static GpuInstanceProfile> {
    let mig = mig(handle)?;
    let index = usize::try_from(kind).map_err(|_| NvmlError::InvalidArgument)?;
    let kind = GpuInstanceProfileKind::ALL
        .get(index)
        .ok_or(NvmlError::InvalidArgument)?;
    mig.profile_of_kind(*kind).ok_or(NvmlError::NotSupported)
}

/// Returns the profile with an id.
fn profile_of_id(handle: nvmlDevice_t, id: c_uint) -> NvmlResult<&'static GpuInstanceProfile> {
    mig(handle)?.profile(id).ok_or(NvmlError::NotSupported)
}

/// Versions 2 and 3; version 3 replaces the peer-to-peer flag by capabilities.
fn versioned_info(
    profile: &GpuInstanceProfile,
    info: Out<nvmlGpuInstanceProfileInfo_v2_t>,
) -> NvmlResult {
    let name = fixed_text(&format!("MIG {}", profile.name));
    let v3 = info.as_version::<nvmlGpuInstanceProfileInfo_v3_t>();
    if let Ok(version) = v3.require_version(3) {
        let capabilities = match profile.kind.graphics() {
            true => NVML_GPU_INSTANCE_PROFILE_CAPS_GFX,
            false => 0,
        };
        return v3.set(profile_info!(
            nvmlGpuInstanceProfileInfo_v3_t,
            profile,
            version: version,
            name: name,
            capabilities: capabilities,
        ));
    }
    let version = info.require_version(2)?;
    info.set(profile_info!(
        nvmlGpuInstanceProfileInfo_v2_t,
        profile,
        version: version,
        isP2pSupported: 0,
        name: name,
    ))
}

/// A null array requests the count.
fn possible_placements(
    handle: nvmlDevice_t,
    id: c_uint,
    placements: Out<nvmlGpuInstancePlacement_t>,
    count: Out<c_uint>,
) -> NvmlResult {
    let table = &profile_of_id(handle, id)?.placements;
    if placements.is_null() {
        return count.set(c_uint::try_from(table.starts.len()).map_err(|_| NvmlError::Unknown)?);
    }
    let size = table.size;
    let list = table.starts.iter().map(|start| nvmlGpuInstancePlacement_t {
        start: *start,
        size,
    });
    set_list(count, placements, list.collect())
}

/// Attributes of a GPU, or of a MIG device and its GPU instance.
fn device_attributes(handle: nvmlDevice_t, attributes: Out<nvmlDeviceAttributes_t>) -> NvmlResult {
    match any_device(handle)? {
        AnyDevice::Gpu(device) => {
            let model = device.model()?;
            attributes.set(nvmlDeviceAttributes_t {
                multiprocessorCount: model.compute.multiprocessors,
                sharedCopyEngineCount: model.compute.copy_engines,
                sharedDecoderCount: 0,
                sharedEncoderCount: 0,
                sharedJpegCount: 0,
                sharedOfaCount: 0,
                gpuInstanceSliceCount: 0,
                computeInstanceSliceCount: 0,
                memorySizeMB: c_ulonglong::from(model.memory.total_bytes >> 20),
            })
        }
        AnyDevice::Mig(mig) => {
            let profile = mig.gpu_instance.profile()?;
            attributes.set(nvmlDeviceAttributes_t {
                multiprocessorCount: mig.compute.multiprocessors,
                sharedCopyEngineCount: profile.copy_engines,
                sharedDecoderCount: profile.decoders,
                sharedEncoderCount: profile.encoders,
                sharedJpegCount: profile.jpeg_engines,
                sharedOfaCount: profile.ofa_engines,
                gpuInstanceSliceCount: profile.slices,
                computeInstanceSliceCount: mig.compute.slices,
                memorySizeMB: profile.memory_mib,
            })
        }
    }
}
