//! MIG instances of the partitions of a claim.
//!
//! The record names profile, placement and boot before an instance is created and until it is destroyed, and drava reserves
//! only slices that no instance uses. So an instance belongs to a claim if a record of this boot has its profile and
//! placement; every other instance was created outside of drava and is never changed. Instances are changed under the lock
//! of their GPU.

use drava_api::names;
use drava_nvml::{GpuInstance, GpuUuid, Placement, Status};

use super::{Applier, Failure, Origin};
use crate::gpus::inventory::Recorded;
use crate::node::claim::ClaimUid;
use crate::prepare::effects::{EffectError, Effects, Ensured};
use crate::prepare::record::{
    ClaimRecord, Loaded, RecordError, RecordStore, instance_keys, partitions, spatial_gpus,
};
use crate::prepare::{Access, Instance, Partition, Prepared};

/// Returns the MIG instances that records of this boot name, and the numbers of the GPUs of all records. An instance of a
/// released claim, which has no pod any more and is held by a program, counts as one that drava did not create: no claim can
/// have its slices.
///
/// # Errors
/// When the records cannot be read.
pub fn recorded(
    store: &RecordStore,
    boot_id: &str,
    is_released: impl Fn(&ClaimUid) -> bool,
) -> Result<Recorded, RecordError> {
    let mut recorded = Recorded::default();
    for uid in store.list()?.recorded {
        if let Loaded::Present(record) = store.load(&uid)? {
            let mut devices = record.devices;
            recorded.numbers.extend(devices.iter().filter_map(|device| {
                let number = names::gpu_number(&device.device)?;
                Some((GpuUuid::new(device.gpu.uuid.clone()), number))
            }));
            let spatial = spatial_gpus(&devices).into_iter();
            recorded.spatial.extend(spatial.map(GpuUuid::new));
            devices.retain(|device| {
                let partition = device.partition();
                partition.is_some_and(|partition| partition.boot_id == boot_id)
                    && !is_released(&uid)
            });
            recorded.instances.extend(instance_keys(&devices));
        }
    }
    Ok(recorded)
}

impl<E: Effects> Applier<E> {
    /// Sets the boot of new partitions. A new claim needs slices that no instance uses. The caller holds the locks of the
    /// GPUs.
    pub(super) fn reserve_slices(
        &self,
        devices: &mut [Prepared],
        origin: Origin,
    ) -> Result<(), Failure> {
        for device in devices {
            let gpu = GpuUuid::new(device.gpu.uuid.clone());
            let Access::Partition(partition) = &mut device.access else {
                continue;
            };
            if origin != Origin::Rebuilt {
                let instances = self.effects.instances(&gpu)?;
                if let Some(used) = instances.iter().find(|other| overlap(other, partition)) {
                    return Err(Failure::ForeignInstance {
                        device: device.device.clone(),
                        gpu: gpu.to_string(),
                        instance: used.id,
                        placement: used.placement,
                    });
                }
            }
            self.effects.boot_id().clone_into(&mut partition.boot_id);
        }
        Ok(())
    }

    /// Finds or creates the MIG instances of a record. If a new claim does not get all of them, it keeps none.
    pub(super) fn ensure_instances(
        &self,
        record: &mut ClaimRecord,
        origin: Origin,
    ) -> Result<Ensured, Failure> {
        let gpus: Vec<String> = partitions(&record.devices)
            .map(|(gpu, _)| gpu.to_string())
            .collect();
        if gpus.is_empty() {
            return Ok(Ensured::Present);
        }
        let _gpus = self.locks.gpus(gpus.iter().map(String::as_str))?;
        let boot_id = self.effects.boot_id();
        let is_outdated = |(_, partition): (_, &Partition)| partition.boot_id != boot_id;
        if partitions(&record.devices).any(is_outdated) {
            // No instance survives a reboot.
            self.reserve_slices(&mut record.devices, origin)?;
            self.effects.save_record(record)?;
        }
        let mut created = Vec::new();
        let outcome = self.ensure_each(&mut record.devices, origin, &mut created);
        if outcome.is_err() && origin == Origin::New {
            for (gpu, id) in &created {
                self.effects.destroy_instance(gpu, *id)?;
            }
            // Without the record no other instance of the same geometry counts as one of this claim.
            self.effects.remove_record(&record.claim.uid)?;
        }
        outcome.map(|()| match created.is_empty() {
            true => Ensured::Present,
            false => Ensured::Created,
        })
    }

    /// Returns whether MIG instances of a claim exist.
    pub(super) fn has_instances(&self, uid: &ClaimUid) -> bool {
        let Ok(Loaded::Present(record)) = self.store.load(uid) else {
            return false;
        };
        partitions(&record.devices).any(|(gpu, partition)| {
            let instances = self.effects.instances(&gpu).unwrap_or_default();
            partition.boot_id == self.effects.boot_id()
                && instances
                    .iter()
                    .any(|instance| partition.is_geometry_of(instance))
        })
    }

    fn ensure_each(
        &self,
        devices: &mut [Prepared],
        origin: Origin,
        created: &mut Vec<(GpuUuid, u32)>,
    ) -> Result<(), Failure> {
        for device in devices {
            let gpu = GpuUuid::new(device.gpu.uuid.clone());
            let Access::Partition(partition) = &mut device.access else {
                continue;
            };
            let instances = self.effects.instances(&gpu)?;
            let own =
                |other: &GpuInstance| origin != Origin::New && partition.is_geometry_of(other);
            let found = match instances.into_iter().find(own) {
                Some(present) if !present.compute_instances.is_empty() => Some(present),
                Some(incomplete) => {
                    // The driver died before it created the compute instance.
                    self.effects.destroy_instance(&gpu, incomplete.id)?;
                    None
                }
                None => None,
            };
            let found = match found {
                Some(present) => present,
                None => {
                    let new = self.effects.create_instance(&gpu, partition);
                    let new = new.map_err(|source| Failure::Partition {
                        device: device.device.clone(),
                        source,
                    })?;
                    created.push((gpu.clone(), new.id));
                    new
                }
            };
            let compute = found.compute_instances.first();
            let compute = compute.ok_or_else(|| Failure::NoComputeInstance {
                device: device.device.clone(),
                instance: found.id,
            })?;
            partition.instance = Some(Instance {
                gpu_instance: found.id,
                compute_instance: compute.id,
                uuid: compute.uuid.clone(),
            });
        }
        Ok(())
    }

    /// Destroys the MIG instances of a claim. Succeeds when they, their GPU or MIG mode are gone.
    pub(super) fn destroy_instances(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        let Loaded::Present(record) = self.store.load(uid)? else {
            return Ok(());
        };
        let boot_id = self.effects.boot_id();
        let own: Vec<_> = partitions(&record.devices)
            .filter(|(_, partition)| partition.boot_id == boot_id)
            .collect();
        let gpus = own.iter().map(|(gpu, _)| gpu.as_str());
        let _gpus = self.locks.gpus(gpus)?;
        for (gpu, partition) in own {
            let instances = match self.effects.instances(&gpu) {
                Err(error) if is_gone(&error) => continue,
                instances => instances?,
            };
            let geometry = |other: &&GpuInstance| partition.is_geometry_of(other);
            if let Some(instance) = instances.iter().find(geometry) {
                self.effects.destroy_instance(&gpu, instance.id)?;
            }
        }
        Ok(())
    }
}

fn overlap(instance: &GpuInstance, partition: &Partition) -> bool {
    let end = |placement: Placement| placement.start.saturating_add(placement.size);
    let (one, other) = (instance.placement, partition.placement());
    one.start < end(other) && other.start < end(one)
}

/// Returns whether the GPU, or MIG mode of the GPU, is gone. All its instances are gone then.
fn is_gone(error: &EffectError) -> bool {
    match error {
        EffectError::Gpu(error) => {
            error.status.is_absent() || matches!(error.status, Status::NotFound | Status::GpuLost)
        }
        _ => false,
    }
}
