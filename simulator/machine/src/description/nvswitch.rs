//! NVSwitches: PCI devices that connect the GPUs of a baseboard.

use serde::{Deserialize, Serialize};

use super::{Architecture, BusId, GpuDescription, MachineDescription};

/// NVSwitches of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvSwitches {
    /// PCI device id in the high half, vendor id (`10de`) in the low half.
    pub pci_device_id: u32,
    /// PCI address of each.
    pub bus_ids: Vec<BusId>,
}

impl MachineDescription {
    /// Returns whether a GPU can be used only while the fabric manager runs, although NVML reports no fabric of it: GPUs on
    /// NVSwitches before Hopper.
    #[must_use]
    pub fn needs_unreported_fabric(&self, gpu: &GpuDescription) -> bool {
        let model = self.model(gpu);
        self.nvswitches.is_some()
            && gpu.fabric.is_none()
            && model.nvlink.is_some()
            && model.architecture < Architecture::Hopper
    }
}
