//! Release of NVML on request, so that the NVIDIA kernel modules can be unloaded while the node driver runs.
//!
//! An open NVML has the device files open. Everything in the driver that uses NVML opens it through a [`Gate`]; closing the
//! gate closes all libraries and event sources, also those that their users keep, and their calls fail like those of an
//! unloaded kernel module until the gate is opened. The health of GPUs needs an open NVML (XIDs are events), so NVML is not
//! released without a request: the annotation [`names::RELEASE_NVML`] of the Node, or the labels of an upgrade by NVIDIA's GPU
//! operator, see [`requested_release`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use drava_api::names::{self, gpu_operator};
use drava_nvml::{
    CgroupMemory, Event, EventSource, GpuError, GpuInstance, GpuLibrary, GpuUuid, Inventory,
    InventoryError, Memory, MigProfile, Placement, Process, ProcessUtilization, Status, Telemetry,
    Utilization, WatchError,
};

use crate::gpus::inventory::{OpenLibrary, Source};

/// A library that the gate can close.
type LibrarySlot = Mutex<Option<Arc<dyn GpuLibrary>>>;

/// An event source that the gate can close.
type EventSlot = Mutex<Option<Box<dyn EventSource>>>;

/// Gate of NVML; clones share it.
#[derive(Clone, Default)]
pub struct Gate(Arc<Mutex<Gated>>);

#[derive(Default)]
struct Gated {
    /// Reason of a closed gate.
    closed: Option<String>,
    libraries: Vec<Weak<LibrarySlot>>,
    events: Vec<Weak<EventSlot>>,
}

/// Locks a mutex. The values are valid after a panic: every change is one operation.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    /// Returns the source with libraries of this gate.
    #[must_use]
    pub fn gated(&self, source: Source) -> Source {
        let (mut open, gate) = (source.open, self.clone());
        Source {
            open: Box::new(move || gate.open_with(&mut open)),
            observe: self.gated_open(source.observe),
            ..source
        }
    }

    fn gated_open(&self, open: OpenLibrary) -> OpenLibrary {
        let gate = self.clone();
        Arc::new(move || gate.open_with(|| open()))
    }

    fn open_with(
        &self,
        mut open: impl FnMut() -> Result<Box<dyn GpuLibrary>, String>,
    ) -> Result<Box<dyn GpuLibrary>, String> {
        if let Some(reason) = lock(&self.0).closed.clone() {
            return Err(reason);
        }
        let library: Arc<dyn GpuLibrary> = Arc::from(open()?);
        let slot = Arc::new(Mutex::new(Some(library)));
        let mut gated = lock(&self.0);
        // Closed while the library was opened.
        if let Some(reason) = gated.closed.clone() {
            return Err(reason);
        }
        gated.libraries.retain(|slot| slot.strong_count() > 0);
        gated.libraries.push(Arc::downgrade(&slot));
        drop(gated);
        Ok(Box::new(GatedLibrary {
            gate: self.clone(),
            slot,
        }))
    }

    /// Closes the gate for a reason, or opens it. Closing closes NVML as soon as the calls in progress return. Returns whether
    /// that changed anything.
    pub fn set_closed(&self, reason: Option<String>) -> bool {
        let mut gated = lock(&self.0);
        let is_changed = gated.closed != reason;
        gated.closed = reason;
        let (libraries, events) = match gated.closed.is_some() {
            true => (
                std::mem::take(&mut gated.libraries),
                std::mem::take(&mut gated.events),
            ),
            false => (Vec::new(), Vec::new()),
        };
        drop(gated);
        for slot in events.iter().filter_map(Weak::upgrade) {
            drop(lock(&slot).take());
        }
        for slot in libraries.iter().filter_map(Weak::upgrade) {
            drop(lock(&slot).take());
        }
        is_changed
    }
}

/// Returns why a Node with these annotations and labels requests the release of NVML; `None` without a request.
#[must_use]
pub fn requested_release(
    annotations: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
) -> Option<String> {
    let annotation = annotations.get(names::RELEASE_NVML);
    if annotation.is_some_and(|value| value != "false") {
        return Some(format!(
            "NVML is released on request; remove the annotation {} of the Node",
            names::RELEASE_NVML
        ));
    }
    let is_request = |(key, value): &(&String, &String)| {
        (key.starts_with(gpu_operator::DEPLOY) && value.starts_with(gpu_operator::PAUSED))
            || (*key == gpu_operator::UPGRADE_STATE && *value == gpu_operator::RESTART_REQUIRED)
    };
    let (key, value) = labels.iter().find(is_request)?;
    Some(format!(
        "NVML is released while the GPU operator changes the NVIDIA driver or its GPUs: label {key}={value} of the Node"
    ))
}

/// A library of a gate.
struct GatedLibrary {
    gate: Gate,
    slot: Arc<LibrarySlot>,
}

impl GatedLibrary {
    fn library(&self) -> Result<Arc<dyn GpuLibrary>, Status> {
        lock(&self.slot).clone().ok_or(Status::DriverNotLoaded)
    }

    /// Calls the library for a GPU.
    fn call<T>(
        &self,
        gpu: &GpuUuid,
        call: impl FnOnce(&dyn GpuLibrary) -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let library = self.library().map_err(|status| GpuError {
            operation: "use NVML".to_owned(),
            gpu: gpu.clone(),
            status,
        })?;
        call(library.as_ref())
    }
}

impl GpuLibrary for GatedLibrary {
    fn inventory(&self) -> Result<Inventory, InventoryError> {
        let query = "the number of GPUs";
        let library = self.library();
        let library = library.map_err(|status| InventoryError { query, status })?;
        library.inventory()
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<Memory, GpuError> {
        self.call(gpu, |library| library.memory(gpu))
    }

    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        bytes: Option<u64>,
    ) -> Result<(), GpuError> {
        self.call(gpu, |library| library.set_memory_limit(gpu, cgroup, bytes))
    }

    fn cgroup_memory(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<CgroupMemory, GpuError> {
        self.call(gpu, |library| library.cgroup_memory(gpu, cgroup))
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<Process>, GpuError> {
        self.call(gpu, |library| library.processes(gpu))
    }

    fn utilization(&self, gpu: &GpuUuid) -> Result<Option<Utilization>, GpuError> {
        self.call(gpu, |library| library.utilization(gpu))
    }

    fn telemetry(&self, gpu: &GpuUuid) -> Result<Telemetry, GpuError> {
        self.call(gpu, |library| library.telemetry(gpu))
    }

    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since_us: u64,
    ) -> Result<Vec<ProcessUtilization>, GpuError> {
        self.call(gpu, |library| library.process_utilization(gpu, since_us))
    }

    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, WatchError> {
        let library = self.library().map_err(WatchError::Create)?;
        let slot = Arc::new(Mutex::new(Some(library.watch(gpus)?)));
        drop(library);
        let mut gated = lock(&self.gate.0);
        if gated.closed.is_some() {
            return Err(WatchError::Create(Status::DriverNotLoaded));
        }
        gated.events.retain(|slot| slot.strong_count() > 0);
        gated.events.push(Arc::downgrade(&slot));
        drop(gated);
        Ok(Box::new(GatedEvents(slot)))
    }

    fn mig_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        self.call(gpu, |library| library.mig_instances(gpu))
    }

    fn create_mig(
        &self,
        gpu: &GpuUuid,
        profile_id: u32,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        self.call(gpu, |library| {
            library.create_mig(gpu, profile_id, placement)
        })
    }

    fn destroy_mig(&self, gpu: &GpuUuid, id: u32) -> Result<(), GpuError> {
        self.call(gpu, |library| library.destroy_mig(gpu, id))
    }

    fn is_mig_enabled(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        self.call(gpu, |library| library.is_mig_enabled(gpu))
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, enabled: bool) -> Result<(), GpuError> {
        self.call(gpu, |library| library.set_mig_mode(gpu, enabled))
    }

    fn mig_remaining(&self, gpu: &GpuUuid, profile: &MigProfile) -> Result<u32, GpuError> {
        self.call(gpu, |library| library.mig_remaining(gpu, profile))
    }
}

/// An event source of a gate.
struct GatedEvents(Arc<EventSlot>);

impl EventSource for GatedEvents {
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, WatchError> {
        // Closing waits for this call, at most `timeout`.
        match lock(&self.0).as_mut() {
            Some(source) => source.next(timeout),
            None => Err(WatchError::Wait(Status::DriverNotLoaded)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_nvml_for_upgrades_only() {
        let map = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let none = BTreeMap::new();
        for (key, value) in [
            ("nvidia.com/gpu.deploy.client", "paused-for-driver-upgrade"),
            ("nvidia.com/gpu.deploy.dcgm", "paused-for-driver-upgrade"),
            ("nvidia.com/gpu.deploy.client", "paused-for-mig-change"),
            (
                "nvidia.com/gpu-driver-upgrade-state",
                "pod-restart-required",
            ),
        ] {
            let reason = requested_release(&none, &map(key, value)).unwrap();
            assert!(reason.contains(&format!("label {key}={value}")), "{reason}");
        }
        for (key, value) in [
            ("nvidia.com/gpu.deploy.driver", "true"),
            ("nvidia.com/gpu.deploy.dcgm", "false"),
            ("nvidia.com/gpu-driver-upgrade-state", "drain-required"),
            ("nvidia.com/gpu-driver-upgrade-state", "validation-required"),
            ("nvidia.com/gpu-driver-upgrade-state", "upgrade-done"),
            ("example.com/paused", "paused-for-driver-upgrade"),
        ] {
            assert_eq!(
                requested_release(&none, &map(key, value)),
                None,
                "{key}={value}"
            );
        }
        assert!(requested_release(&map(names::RELEASE_NVML, ""), &none).is_some());
        assert_eq!(
            requested_release(&map(names::RELEASE_NVML, "false"), &none),
            None
        );
    }
}
