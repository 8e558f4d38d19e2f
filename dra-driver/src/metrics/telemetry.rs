//! Telemetry of the GPUs: sensor readings and XIDs, written by [`crate::metrics::gpu_monitor`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drava_api::xid::{XidClass, XidPolicy};
use drava_nvml::{GpuUuid, Telemetry};

use crate::gpus::inventory::NodeInventory;

/// Maximum number of distinct XIDs of a GPU; further numbers are counted as [`Xid::Other`].
const MAX_XIDS: usize = 32;

/// Identity of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// NVML index.
    pub index: u32,
    /// Marketing name.
    pub model: String,
    /// PCI address.
    pub pci_bus_id: String,
    /// Version of the NVIDIA driver.
    pub driver_version: String,
}

/// Number of a critical error of the NVIDIA driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Xid {
    /// A number.
    Number(u64),
    /// A number beyond the first [`MAX_XIDS`].
    Other,
}

/// A GPU with its telemetry.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuEntry {
    /// Identity; `None` for a GPU that was never readable.
    pub info: Option<GpuInfo>,
    /// Last reading, and the Unix time of it in seconds.
    pub sample: Option<(Telemetry, f64)>,
    /// Number of XIDs.
    pub xids: BTreeMap<Xid, u64>,
}

/// GPUs by UUID; clones share the table.
#[derive(Debug, Clone, Default)]
pub struct GpuTable(Arc<Mutex<BTreeMap<GpuUuid, GpuEntry>>>);

impl GpuTable {
    /// Returns the GPUs.
    #[must_use]
    pub fn entries(&self) -> BTreeMap<GpuUuid, GpuEntry> {
        self.lock().clone()
    }

    /// Sets which GPUs exist. Removed GPUs disappear with their counts.
    pub fn set_inventory(&self, inventory: &NodeInventory) {
        let nvml = &inventory.nvml;
        let mut table = self.lock();
        // A GPU that left the bus often has no readable UUID.
        table.retain(|uuid, _| {
            let mut faults = nvml.faults.iter();
            nvml.gpus.iter().any(|gpu| gpu.uuid == *uuid)
                || faults.any(|fault| fault.gpu.as_ref().is_none_or(|gpu| gpu == uuid))
        });
        for gpu in &nvml.gpus {
            let entry = table.entry(gpu.uuid.clone()).or_default();
            entry.info = Some(GpuInfo {
                index: gpu.index,
                model: gpu.name.clone(),
                pci_bus_id: gpu.pci_bus_id.clone(),
                driver_version: nvml.driver_version.clone(),
            });
        }
    }

    /// Sets the reading of a GPU.
    pub fn set_sample(&self, gpu: &GpuUuid, telemetry: Telemetry, unix_seconds: f64) {
        if let Some(entry) = self.lock().get_mut(gpu) {
            entry.sample = Some((telemetry, unix_seconds));
        }
    }

    /// Counts an XID of a GPU.
    pub fn count_xid(&self, gpu: &GpuUuid, number: u64) {
        if let Some(entry) = self.lock().get_mut(gpu) {
            let xid = Xid::Number(number);
            let is_full = entry.xids.len() >= MAX_XIDS && !entry.xids.contains_key(&xid);
            *entry
                .xids
                .entry(if is_full { Xid::Other } else { xid })
                .or_default() += 1;
        }
    }

    /// Returns the number of XIDs of a GPU that programs cause.
    #[must_use]
    pub fn application_xids(&self, gpu: &str) -> u64 {
        let rules = XidPolicy::default();
        let is_of_program = |xid: &Xid| match xid {
            Xid::Number(number) => rules.class(*number) == XidClass::Application,
            Xid::Other => false,
        };
        let table = self.lock();
        let entry = table.get(&GpuUuid::new(gpu));
        let xids = entry.into_iter().flat_map(|entry| &entry.xids);
        let caused = xids.filter(|(xid, _)| is_of_program(xid));
        caused.map(|(_, count)| count).sum()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, GpuEntry>> {
        // The table is valid after a panic: every change is one operation.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
