//! MIG instances: list, create, destroy.

use std::collections::HashMap;
use std::ptr::null_mut;

use nvml_wrapper_sys::bindings as sys;

use super::profiles::placement;
use super::{Handle, Shared, call, optional};
use crate::{ComputeInstance, GpuInstance, Memory, MigProfile, MigUuid, Placement, Status};

/// Compute instance profile numbers to query; nvml.h has 8.
const COMPUTE_NUMBERS: std::ops::Range<u32> = 0..16;

/// UUIDs of MIG devices by (GPU instance, compute instance).
type Uuids = HashMap<(u32, u32), MigUuid>;

impl Shared {
    pub(super) fn instances(&self, handle: Handle) -> Result<Vec<GpuInstance>, Status> {
        let uuids = self.mig_uuids(handle)?;
        let mut instances = Vec::new();
        for profile in self.profiles(handle, Memory::NotSupported)? {
            for instance in self.instances_of(handle, &profile)? {
                instances.push(self.instance(instance, &uuids)?);
            }
        }
        instances.sort_by_key(|instance| instance.id);
        Ok(instances)
    }

    pub(super) fn create_instance(
        &self,
        handle: Handle,
        profile_id: u32,
        placement: Placement,
    ) -> Result<GpuInstance, Status> {
        let wanted = sys::nvmlGpuInstancePlacement_t {
            start: placement.start,
            size: placement.size,
        };
        let mut instance: sys::nvmlGpuInstance_t = null_mut();
        call!(
            self.lib(),
            nvmlDeviceCreateGpuInstanceWithPlacement(
                handle.0,
                profile_id,
                &raw const wanted,
                &raw mut instance
            )
        )?;
        self.create_compute_instance(handle, instance).inspect_err(|_| {
            // Best effort: the first error is returned, and the next listing shows the remaining instance.
            if let Err(status) = self.destroy(instance) {
                tracing::warn!(profile_id, %placement, %status, "cannot destroy the incomplete MIG instance");
            }
        })
    }

    /// Creates a compute instance that uses all of the GPU instance.
    fn create_compute_instance(
        &self,
        handle: Handle,
        instance: sys::nvmlGpuInstance_t,
    ) -> Result<GpuInstance, Status> {
        let largest = self
            .compute_profiles(instance)?
            .into_iter()
            .rev()
            .max_by_key(|profile| profile.multiprocessorCount)
            .ok_or(Status::NotSupported)?;
        let mut compute: sys::nvmlComputeInstance_t = null_mut();
        call!(
            self.lib(),
            nvmlGpuInstanceCreateComputeInstance(instance, largest.id, &raw mut compute)
        )?;
        self.instance(instance, &self.mig_uuids(handle)?)
    }

    pub(super) fn destroy_instance(&self, handle: Handle, id: u32) -> Result<(), Status> {
        let mut instance: sys::nvmlGpuInstance_t = null_mut();
        match call!(
            self.lib(),
            nvmlDeviceGetGpuInstanceById(handle.0, id, &raw mut instance)
        ) {
            Ok(()) => self.destroy(instance),
            // Disabling MIG mode destroyed the instances.
            Err(Status::NotFound | Status::NotSupported) => Ok(()),
            Err(status) => Err(status),
        }
    }

    /// Destroys a GPU instance and its compute instances.
    fn destroy(&self, instance: sys::nvmlGpuInstance_t) -> Result<(), Status> {
        for profile in self.compute_profiles(instance)? {
            for compute in self.compute_instances_of(instance, &profile)? {
                call!(self.lib(), nvmlComputeInstanceDestroy(compute))?;
            }
        }
        call!(self.lib(), nvmlGpuInstanceDestroy(instance))
    }

    pub(super) fn set_mig_mode(&self, handle: Handle, enabled: bool) -> Result<(), Status> {
        let set = |enabled: bool| {
            let mode = match enabled {
                true => sys::NVML_DEVICE_MIG_ENABLE,
                false => sys::NVML_DEVICE_MIG_DISABLE,
            };
            let mut activation = sys::nvmlReturn_enum_NVML_SUCCESS;
            call!(
                self.lib(),
                nvmlDeviceSetMigMode(handle.0, mode, &raw mut activation)
            )?;
            Ok::<_, Status>(Status::from_code(activation))
        };
        match set(enabled)? {
            None => Ok(()),
            Some(status) => {
                // NVML keeps the mode as pending; a later reset would switch it unasked.
                set(!enabled)?;
                Err(status)
            }
        }
    }

    pub(super) fn remaining(&self, handle: Handle, profile_id: u32) -> Result<u32, Status> {
        let mut count = 0;
        call!(
            self.lib(),
            nvmlDeviceGetGpuInstanceRemainingCapacity(handle.0, profile_id, &raw mut count)
        )?;
        Ok(count)
    }

    fn instances_of(
        &self,
        handle: Handle,
        profile: &MigProfile,
    ) -> Result<Vec<sys::nvmlGpuInstance_t>, Status> {
        // The buffer must hold the maximum number of instances; the count is output only.
        let mut instances: Vec<sys::nvmlGpuInstance_t> =
            vec![null_mut(); profile.instance_count as usize];
        let mut count = profile.instance_count;
        let read = call!(
            self.lib(),
            nvmlDeviceGetGpuInstances(handle.0, profile.id, instances.as_mut_ptr(), &raw mut count)
        );
        let count = optional(read)?.map_or(0, |()| count as usize);
        instances.truncate(count);
        Ok(instances)
    }

    fn instance(
        &self,
        instance: sys::nvmlGpuInstance_t,
        uuids: &Uuids,
    ) -> Result<GpuInstance, Status> {
        let mut info = sys::nvmlGpuInstanceInfo_t {
            device: null_mut(),
            id: 0,
            profileId: 0,
            placement: sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 },
        };
        call!(self.lib(), nvmlGpuInstanceGetInfo(instance, &raw mut info))?;
        let mut compute_instances = Vec::new();
        for profile in self.compute_profiles(instance)? {
            for compute in self.compute_instances_of(instance, &profile)? {
                compute_instances.push(self.compute_instance(compute, info.id, uuids)?);
            }
        }
        compute_instances.sort_by_key(|compute| compute.id);
        Ok(GpuInstance {
            id: info.id,
            profile_id: info.profileId,
            placement: placement(&info.placement),
            compute_instances,
        })
    }

    fn compute_profiles(
        &self,
        instance: sys::nvmlGpuInstance_t,
    ) -> Result<Vec<sys::nvmlComputeInstanceProfileInfo_t>, Status> {
        let mut profiles = Vec::new();
        for number in COMPUTE_NUMBERS {
            let mut info = sys::nvmlComputeInstanceProfileInfo_t {
                id: 0,
                sliceCount: 0,
                instanceCount: 0,
                multiprocessorCount: 0,
                sharedCopyEngineCount: 0,
                sharedDecoderCount: 0,
                sharedEncoderCount: 0,
                sharedJpegCount: 0,
                sharedOfaCount: 0,
            };
            let read = call!(
                self.lib(),
                nvmlGpuInstanceGetComputeInstanceProfileInfo(
                    instance,
                    number,
                    sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
                    &raw mut info
                )
            );
            if optional(read)?.is_some() {
                profiles.push(info);
            }
        }
        Ok(profiles)
    }

    fn compute_instances_of(
        &self,
        instance: sys::nvmlGpuInstance_t,
        profile: &sys::nvmlComputeInstanceProfileInfo_t,
    ) -> Result<Vec<sys::nvmlComputeInstance_t>, Status> {
        let mut computes: Vec<sys::nvmlComputeInstance_t> =
            vec![null_mut(); profile.instanceCount as usize];
        let mut count = profile.instanceCount;
        call!(
            self.lib(),
            nvmlGpuInstanceGetComputeInstances(
                instance,
                profile.id,
                computes.as_mut_ptr(),
                &raw mut count
            )
        )?;
        computes.truncate(count as usize);
        Ok(computes)
    }

    fn compute_instance(
        &self,
        compute: sys::nvmlComputeInstance_t,
        gpu_instance: u32,
        uuids: &Uuids,
    ) -> Result<ComputeInstance, Status> {
        let mut info = sys::nvmlComputeInstanceInfo_t {
            device: null_mut(),
            gpuInstance: null_mut(),
            id: 0,
            profileId: 0,
            placement: sys::nvmlComputeInstancePlacement_t { start: 0, size: 0 },
        };
        call!(
            self.lib(),
            nvmlComputeInstanceGetInfo_v2(compute, &raw mut info)
        )?;
        let uuid = uuids
            .get(&(gpu_instance, info.id))
            .ok_or(Status::NotFound)?
            .clone();
        Ok(ComputeInstance {
            id: info.id,
            profile_id: info.profileId,
            uuid,
        })
    }

    fn mig_uuids(&self, handle: Handle) -> Result<Uuids, Status> {
        let device = self.device(handle);
        let count = optional(device.mig_device_count().map_err(Status::from))?.unwrap_or(0);
        let mut uuids = Uuids::new();
        for index in 0..count {
            // Destroyed instances leave gaps in the indices; without MIG mode every index fails.
            let mut mig: sys::nvmlDevice_t = null_mut();
            match call!(
                self.lib(),
                nvmlDeviceGetMigDeviceHandleByIndex(handle.0, index, &raw mut mig)
            ) {
                Ok(()) => {}
                Err(Status::NotFound | Status::NotSupported | Status::InvalidArgument) => continue,
                Err(status) => return Err(status),
            }
            let (mut gpu_instance, mut compute_instance) = (0, 0);
            call!(
                self.lib(),
                nvmlDeviceGetGpuInstanceId(mig, &raw mut gpu_instance)
            )?;
            call!(
                self.lib(),
                nvmlDeviceGetComputeInstanceId(mig, &raw mut compute_instance)
            )?;
            let uuid = self.device(Handle(mig)).uuid()?;
            uuids.insert((gpu_instance, compute_instance), MigUuid::new(uuid));
        }
        Ok(uuids)
    }
}
