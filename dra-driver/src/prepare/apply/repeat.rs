//! Checks of a repeated prepare: the claim or the GPUs changed since the record was written.

use super::{Applier, Failure};
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::ClaimUid;
use crate::prepare::Prepared;
use crate::prepare::effects::Effects;
use crate::prepare::liveness::Liveness;

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
