//! Checks of a repeated prepare: the claim or the GPUs changed since the record was written.

use drava_api::obstacle::LimitObstacle;
use drava_nvml::GpuUuid;

use super::{Applier, Failure, Repairs};
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::ClaimUid;
use crate::prepare::Prepared;
use crate::prepare::effects::Effects;
use crate::prepare::liveness::Liveness;
use crate::prepare::record::ClaimRecord;

/// Whether an obstacle stays as long as the node is up: another try does not find the limits again.
fn is_lasting(obstacle: LimitObstacle) -> bool {
    !matches!(obstacle, LimitObstacle::NotTried | LimitObstacle::Failed)
}

impl<E: Effects> Applier<E> {
    /// Checks that no container of the earlier allocation of a claim runs: its limits and devices would be taken away.
    pub(super) fn check_ended(&self, uid: &ClaimUid, earlier: &[Prepared]) -> Result<(), Failure> {
        let evidence = match self.effects.liveness(uid, earlier) {
            Liveness::Ended => return Ok(()),
            Liveness::Running(evidence) => evidence.to_string(),
            Liveness::Unknown(reason) => format!("its processes are unknown: {reason}"),
        };
        Err(Failure::StillRunning(evidence))
    }

    /// Decides again that libvgpu alone limits the shares of a claim, on a node that came back without the limits of the NVIDIA driver, for
    /// example with an older one: no container of the claim would start. `planned` is what the claim gets on the present node, so its class
    /// takes any limit. A container that runs has the limit that it started with.
    pub(super) fn follow_lost_limit(
        &self,
        record: &mut ClaimRecord,
        planned: &[Prepared],
        inventory: &NodeInventory,
        repairs: &mut Repairs,
    ) -> Result<(), Failure> {
        let is_lost = |planned: &Prepared| {
            let tried = inventory.driver_limit(&GpuUuid::new(&planned.gpu.uuid));
            planned
                .share()
                .is_some_and(|share| !share.limited_by_driver)
                && tried.is_err_and(is_lasting)
        };
        let mut devices = record.devices.clone();
        let lost = devices.iter_mut().zip(planned);
        let lost = lost.filter(|(_, planned)| is_lost(planned));
        let mut is_changed = false;
        for share in lost.filter_map(|(device, _)| device.share_mut()) {
            is_changed |= share.limited_by_driver;
            share.limited_by_driver = false;
        }
        let uid = &record.claim.uid;
        if !is_changed || self.effects.liveness(uid, &record.devices) != Liveness::Ended {
            return Ok(());
        }
        self.effects.remove_cgroup_limits(uid)?;
        record.devices = devices;
        self.effects.save_record(record)?;
        repairs.0.push(
            "libvgpu alone limits its memory, because the NVIDIA driver of the node no longer can"
                .to_owned(),
        );
        Ok(())
    }
}

/// Sets minor number and PCI address of the GPUs, which can change at a reboot, by UUID.
///
/// # Errors
/// When another GPU has the device file of a GPU that is not on the node.
pub(super) fn refresh_gpus(
    devices: &mut [Prepared],
    inventory: &NodeInventory,
) -> Result<(), Failure> {
    for device in devices {
        if let Some(gpu) = inventory.gpu(&device.gpu.uuid) {
            device.gpu.minor = gpu.minor;
            device.gpu.pci_bus_id.clone_from(&gpu.pci_bus_id);
        } else if let Some(other) = inventory.gpu_by_minor(device.gpu.minor) {
            return Err(Failure::GpuMissing {
                device: device.device.clone(),
                gpu: device.gpu.uuid.clone(),
                other: other.uuid.to_string(),
            });
        }
    }
    Ok(())
}
