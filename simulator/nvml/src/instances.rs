//! MIG: GPU instances, compute instances, MIG devices.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT, NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX,
    NVML_COMPUTE_INSTANCE_PROFILE_COUNT, nvmlComputeInstance_t, nvmlComputeInstanceInfo_t,
    nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlComputeInstanceProfileInfo_v3_t, nvmlDevice_t,
    nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
};
use simulator_machine::description::ComputeInstanceProfile;
use simulator_machine::protocol::{InstanceId, MigReply, MigRequest};

use crate::abi::{In, NvmlResult, Out, entry_points, fixed_text, set_list};
use crate::error::NvmlError;
use crate::handle::{
    AnyDevice, Device, GpuInstance, MigDevice, any_device, compute_instance,
    compute_instance_handle, device, gpu_instance, gpu_instance_handle, handle as handle_of,
    mig_handle, visible_devices,
};
use crate::mig::{mig, require_root};

/// Fills a compute instance profile struct: fields of all versions, shared engines, and fields of
/// one version.
macro_rules! compute_profile_info {
    ($info:ident, $profile:expr, $shared:expr, $($field:ident: $value:expr),* $(,)?) => {
        $info {
            id: $profile.id,
            sliceCount: $profile.slices,
            instanceCount: $profile.instances,
            multiprocessorCount: $profile.multiprocessors,
            sharedCopyEngineCount: $shared.copy_engines,
            sharedDecoderCount: $shared.decoders,
            sharedEncoderCount: $shared.encoders,
            sharedJpegCount: $shared.jpeg_engines,
            sharedOfaCount: $shared.ofa_engines,
            $($field: $value),*
        }
    };
}

entry_points! {
    fn nvmlDeviceCreateGpuInstance(handle: nvmlDevice_t, profile: c_uint, instance: Out<nvmlGpuInstance_t>) {
        create_gpu_instance(handle, profile, None, instance)
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(handle: nvmlDevice_t, profile: c_uint, placement: In<nvmlGpuInstancePlacement_t>, instance: Out<nvmlGpuInstance_t>) {
        let nvmlGpuInstancePlacement_t { start, size } = placement.get()?;
        let known = mig(handle)?.profile(profile).ok_or(NvmlError::NotSupported)?;
        if size != known.placements.size {
            return Err(NvmlError::InvalidArgument);
        }
        create_gpu_instance(handle, profile, Some(start), instance)
    }

    fn nvmlGpuInstanceDestroy(handle: nvmlGpuInstance_t) {
        let instance = gpu_instance(handle)?;
        require_root()?;
        let gpu_instance = instance.state.id;
        done(instance.device, MigRequest::DestroyGpuInstance { gpu_instance })
    }

    // The array has capacity for the profile's maximum; the count is an output only.
    fn nvmlDeviceGetGpuInstances(handle: nvmlDevice_t, profile: c_uint, instances: Out<nvmlGpuInstance_t>, count: Out<c_uint>) {
        let device = partitioned(handle)?;
        mig(handle)?.profile(profile).ok_or(NvmlError::InvalidArgument)?;
        let all = device.library.mig(device.gpu)?.gpu_instances;
        let of_profile = all.iter().filter(|instance| instance.profile == profile);
        let handles: Vec<_> = of_profile.map(|instance| gpu_instance_handle(device.gpu, instance.id)).collect();
        count.set(c_uint::try_from(handles.len()).map_err(|_| NvmlError::Unknown)?)?;
        instances.set_all(handles.into_iter())
    }

    fn nvmlDeviceGetGpuInstanceById(handle: nvmlDevice_t, id: c_uint, instance: Out<nvmlGpuInstance_t>) {
        let device = partitioned(handle)?;
        let all = device.library.mig(device.gpu)?.gpu_instances;
        let found = all.iter().any(|known| known.id == id);
        if !found {
            return Err(NvmlError::NotFound);
        }
        instance.set(gpu_instance_handle(device.gpu, id))
    }

    fn nvmlGpuInstanceGetInfo(handle: nvmlGpuInstance_t, info: Out<nvmlGpuInstanceInfo_t>) {
        let instance = gpu_instance(handle)?;
        let size = instance.profile()?.placements.size;
        info.set(nvmlGpuInstanceInfo_t {
            device: handle_of(instance.device.gpu),
            id: instance.state.id,
            profileId: instance.state.profile,
            placement: nvmlGpuInstancePlacement_t { start: instance.state.start, size },
        })
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(handle: nvmlDevice_t, profile: c_uint, count: Out<c_uint>) {
        capacity(partitioned(handle)?, MigRequest::RemainingGpuInstances { profile }, count)
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(handle: nvmlGpuInstance_t, profile: c_uint, engines: c_uint, info: Out<nvmlComputeInstanceProfileInfo_t>) {
        let instance = gpu_instance(handle)?;
        let (profile, shared) = (compute_profile(&instance, profile, engines)?, instance.profile()?);
        info.set(compute_profile_info!(nvmlComputeInstanceProfileInfo_t, profile, shared,))
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(handle: nvmlGpuInstance_t, profile: c_uint, engines: c_uint, info: Out<nvmlComputeInstanceProfileInfo_v2_t>) {
        let instance = gpu_instance(handle)?;
        versioned_info(&instance, compute_profile(&instance, profile, engines)?, info)
    }

    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(handle: nvmlGpuInstance_t, profile: c_uint, count: Out<c_uint>) {
        let GpuInstance { device, state } = gpu_instance(handle)?;
        capacity(device, MigRequest::RemainingComputeInstances { gpu_instance: state.id, profile }, count)
    }

    // A null array requests the count.
    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(handle: nvmlGpuInstance_t, profile: c_uint, placements: Out<nvmlComputeInstancePlacement_t>, count: Out<c_uint>) {
        let instance = gpu_instance(handle)?;
        let size = compute_profile(&instance, profile, 0)?.slices;
        let starts = instance.profile()?.compute_starts(size);
        if placements.is_null() {
            return count.set(c_uint::try_from(starts.len()).map_err(|_| NvmlError::Unknown)?);
        }
        let place = |start| nvmlComputeInstancePlacement_t { start, size };
        set_list(count, placements, starts.into_iter().map(place).collect())
    }

    fn nvmlGpuInstanceCreateComputeInstance(handle: nvmlGpuInstance_t, profile: c_uint, instance: Out<nvmlComputeInstance_t>) {
        create_compute_instance(handle, profile, None, instance)
    }

    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(handle: nvmlGpuInstance_t, profile: c_uint, placement: In<nvmlComputeInstancePlacement_t>, instance: Out<nvmlComputeInstance_t>) {
        let nvmlComputeInstancePlacement_t { start, size } = placement.get()?;
        if size != compute_profile(&gpu_instance(handle)?, profile, 0)?.slices {
            return Err(NvmlError::InvalidArgument);
        }
        create_compute_instance(handle, profile, Some(start), instance)
    }

    fn nvmlComputeInstanceDestroy(handle: nvmlComputeInstance_t) {
        let found = compute_instance(handle)?;
        require_root()?;
        done(found.device(), MigRequest::DestroyComputeInstance { instance: found.id() })
    }

    fn nvmlGpuInstanceGetComputeInstances(handle: nvmlGpuInstance_t, profile: c_uint, instances: Out<nvmlComputeInstance_t>, count: Out<c_uint>) {
        let GpuInstance { device, state } = gpu_instance(handle)?;
        let of_profile = state.compute_instances.iter().filter(|one| one.profile == profile);
        let handles: Vec<_> = of_profile
            .map(|one| compute_instance_handle(device.gpu, InstanceId { gpu_instance: state.id, compute: one.id }))
            .collect();
        count.set(c_uint::try_from(handles.len()).map_err(|_| NvmlError::Unknown)?)?;
        instances.set_all(handles.into_iter())
    }

    fn nvmlGpuInstanceGetComputeInstanceById(handle: nvmlGpuInstance_t, id: c_uint, instance: Out<nvmlComputeInstance_t>) {
        let GpuInstance { device, state } = gpu_instance(handle)?;
        if !state.compute_instances.iter().any(|one| one.id == id) {
            return Err(NvmlError::NotFound);
        }
        instance.set(compute_instance_handle(device.gpu, InstanceId { gpu_instance: state.id, compute: id }))
    }

    fn nvmlComputeInstanceGetInfo(handle: nvmlComputeInstance_t, info: Out<nvmlComputeInstanceInfo_t>) { compute_info(handle, info) }
    fn nvmlComputeInstanceGetInfo_v2(handle: nvmlComputeInstance_t, info: Out<nvmlComputeInstanceInfo_t>) { compute_info(handle, info) }

    fn nvmlDeviceGetMigDeviceHandleByIndex(handle: nvmlDevice_t, index: c_uint, found: Out<nvmlDevice_t>) {
        let device = device(handle)?;
        if index >= mig(handle)?.max_devices() {
            return Err(NvmlError::InvalidArgument);
        }
        let devices = visible_devices(device.library, device.gpu)?;
        if let Some(mig) = devices.iter().find(|mig| mig.compute.index == index) {
            return found.set(mig_handle(device.gpu, mig.id()));
        }
        Err(NvmlError::NotFound)
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: nvmlDevice_t, gpu: Out<nvmlDevice_t>) {
        gpu.set(handle_of(mig_device(handle)?.device().gpu))
    }

    fn nvmlDeviceGetGpuInstanceId(handle: nvmlDevice_t, id: Out<c_uint>) {
        id.set(mig_device(handle)?.id().gpu_instance)
    }

    fn nvmlDeviceGetComputeInstanceId(handle: nvmlDevice_t, id: Out<c_uint>) {
        id.set(mig_device(handle)?.id().compute)
    }
}

/// Resolves a MIG device; whole GPUs are rejected.
fn mig_device(handle: nvmlDevice_t) -> NvmlResult<MigDevice> {
    match any_device(handle)? {
        AnyDevice::Mig(mig) => Ok(mig),
        AnyDevice::Gpu(_) => Err(NvmlError::NotSupported),
    }
}

/// Resolves a GPU in MIG mode.
fn partitioned(handle: nvmlDevice_t) -> NvmlResult<Device> {
    mig(handle)?;
    let device = device(handle)?;
    match device.library.mig(device.gpu)?.enabled {
        true => Ok(device),
        false => Err(NvmlError::NotSupported),
    }
}

fn done(device: Device, request: MigRequest) -> NvmlResult {
    device.library.mig_request(device.gpu, request)?;
    Ok(())
}

fn created(device: Device, request: MigRequest) -> NvmlResult<u32> {
    match device.library.mig_request(device.gpu, request)? {
        Some(MigReply::Created(id)) => Ok(id),
        _ => Err(NvmlError::Unknown),
    }
}

fn capacity(device: Device, request: MigRequest, count: Out<c_uint>) -> NvmlResult {
    match device.library.mig_request(device.gpu, request)? {
        Some(MigReply::Capacity(left)) => count.set(left),
        _ => Err(NvmlError::Unknown),
    }
}

fn create_gpu_instance(
    handle: nvmlDevice_t,
    profile: c_uint,
    start: Option<u32>,
    instance: Out<nvmlGpuInstance_t>,
) -> NvmlResult {
    let device = partitioned(handle)?;
    if instance.is_null() {
        return Err(NvmlError::InvalidArgument);
    }
    require_root()?;
    let gpu_instance = created(device, MigRequest::CreateGpuInstance { profile, start })?;
    instance.set(gpu_instance_handle(device.gpu, gpu_instance))
}

fn create_compute_instance(
    handle: nvmlGpuInstance_t,
    profile: c_uint,
    start: Option<u32>,
    instance: Out<nvmlComputeInstance_t>,
) -> NvmlResult {
    let GpuInstance { device, state } = gpu_instance(handle)?;
    if instance.is_null() {
        return Err(NvmlError::InvalidArgument);
    }
    require_root()?;
    let gpu_instance = state.id;
    let request = MigRequest::CreateComputeInstance {
        gpu_instance,
        profile,
        start,
    };
    let compute = created(device, request)?;
    instance.set(compute_instance_handle(
        device.gpu,
        InstanceId {
            gpu_instance,
            compute,
        },
    ))
}

/// Returns the profile for one of `NVML_COMPUTE_INSTANCE_PROFILE_*`. Compute instances share the
/// engines of their GPU instance.
fn compute_profile(
    instance: &GpuInstance,
    profile: c_uint,
    engines: c_uint,
) -> NvmlResult<ComputeInstanceProfile> {
    if profile >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT
        || engines >= NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT
    {
        return Err(NvmlError::InvalidArgument);
    }
    let table = instance.device.model()?.mig.as_ref();
    let table = table.ok_or(NvmlError::NotSupported)?;
    let profile = table.compute_profile(instance.profile()?, profile);
    profile.ok_or(NvmlError::NotSupported)
}

/// Versions 2 and 3; version 3 adds a set of capabilities.
fn versioned_info(
    instance: &GpuInstance,
    profile: ComputeInstanceProfile,
    info: Out<nvmlComputeInstanceProfileInfo_v2_t>,
) -> NvmlResult {
    let shared = instance.profile()?;
    let name = compute_name(&shared.name, shared.slices, profile.slices);
    let name = fixed_text(&format!("MIG {name}"));
    let v3 = info.as_version::<nvmlComputeInstanceProfileInfo_v3_t>();
    if let Ok(version) = v3.require_version(3) {
        let capabilities = match shared.kind.graphics() {
            true => NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX,
            false => 0,
        };
        return v3.set(compute_profile_info!(
            nvmlComputeInstanceProfileInfo_v3_t,
            profile,
            shared,
            version: version,
            name: name,
            capabilities: capabilities,
        ));
    }
    let version = info.require_version(2)?;
    info.set(compute_profile_info!(
        nvmlComputeInstanceProfileInfo_v2_t,
        profile,
        shared,
        version: version,
        name: name,
    ))
}

/// `3g.40gb` if a compute instance has all slices of its GPU instance, otherwise `1c.3g.40gb`.
fn compute_name(gpu_instance: &str, gpu_slices: u32, slices: u32) -> String {
    if slices == gpu_slices {
        gpu_instance.to_owned()
    } else {
        format!("{slices}c.{gpu_instance}")
    }
}

/// The name of a MIG device's profile.
pub(crate) fn instance_name(device: &MigDevice) -> NvmlResult<String> {
    let gpu_instance = device.gpu_instance.profile()?;
    Ok(compute_name(
        &gpu_instance.name,
        gpu_instance.slices,
        device.compute.slices,
    ))
}

fn compute_info(handle: nvmlComputeInstance_t, info: Out<nvmlComputeInstanceInfo_t>) -> NvmlResult {
    let found = compute_instance(handle)?;
    let gpu = found.device().gpu;
    info.set(nvmlComputeInstanceInfo_t {
        // NVIDIA's header says "parent device"; its DRA driver reads the UUID of the MIG device from this handle.
        device: mig_handle(gpu, found.id()),
        gpuInstance: gpu_instance_handle(gpu, found.id().gpu_instance),
        id: found.compute.id,
        profileId: found.compute.profile,
        placement: nvmlComputeInstancePlacement_t {
            start: found.compute.start,
            size: found.compute.slices,
        },
    })
}
