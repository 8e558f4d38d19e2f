//! MIG mode of GPUs that follows the claims.
//!
//! In the modes `mig` and `dynamic` of the node profile, a GPU that needs no reset is in MIG mode if and only if the last claim
//! that was prepared on it has partitions. The overcommit check has passed, so no other claim uses the GPU in another way. MIG
//! mode is switched when a claim needs it, not when a claim ends: that would switch more often.

use std::collections::BTreeMap;

use drava_api::node_profile::Mode;
use drava_nvml::{GpuUuid, Mig};

use super::{Applier, Failure};
use crate::gpus::gpu_plan::can_switch_mig_mode;
use crate::gpus::inventory::NodeInventory;
use crate::prepare::effects::Effects;
use crate::prepare::{Access, Prepared};

impl<E: Effects> Applier<E> {
    /// Switches MIG mode of the GPUs of a claim as its devices need it.
    ///
    /// # Errors
    /// When a program holds a GPU, or it has MIG instances that drava did not create.
    pub(super) fn ensure_mig_mode(
        &self,
        devices: &[Prepared],
        inventory: &NodeInventory,
    ) -> Result<(), Failure> {
        let mut wanted: BTreeMap<&str, (&Prepared, bool)> = BTreeMap::new();
        for device in devices {
            let enabled = match device.access {
                Access::Partition(_) => true,
                Access::Whole | Access::Share(_) => false,
                Access::Admin => continue,
            };
            if follows_claims(inventory, &device.gpu.uuid) {
                wanted.insert(&device.gpu.uuid, (device, enabled));
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let _gpus = self.locks.gpus(wanted.keys().copied())?;
        for (uuid, (device, enabled)) in wanted {
            let gpu = GpuUuid::new(uuid);
            self.effects
                .ensure_mig_mode(&gpu, device.gpu.minor, enabled)
                .map_err(|source| Failure::MigMode {
                    device: device.device.clone(),
                    source,
                })?;
        }
        Ok(())
    }
}

/// Returns whether MIG mode of a GPU follows the claims.
fn follows_claims(inventory: &NodeInventory, uuid: &str) -> bool {
    let is_switched = matches!(inventory.gpu_settings(uuid).mode, Mode::Mig | Mode::Dynamic);
    is_switched
        && inventory
            .gpu(uuid)
            .is_some_and(|gpu| matches!(gpu.mig, Mig::Capable { .. }) && can_switch_mig_mode(gpu))
}
