//! [`GpuLibrary`] over NVML.
//!
//! `nvml-wrapper` is used where it is correct. MIG instances and placements, instance IDs of events, process lists and
//! struct versions use the symbols of `nvml-wrapper-sys`, because the wrapper lacks them or handles them incorrectly.

use std::collections::HashMap;
use std::ffi::{OsStr, c_char};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{self as sys, NvmlLib};

use crate::{
    CgroupMemory, Event, EventSource, GpuError, GpuInstance, GpuLibrary, GpuUuid, Inventory,
    InventoryError, Memory, MigProfile, OpenError, Placement, Process, ProcessUtilization, Status,
    Telemetry, Utilization, WatchError,
};

mod events;
mod gpus;
mod instances;
mod memory_limits;
mod processes;
mod profiles;
mod readings;
mod telemetry;

/// An initialized NVML library; clones share it. NVML is shut down when the last clone and event source are dropped.
#[derive(Clone)]
pub struct Library {
    shared: Arc<Shared>,
}

/// State that the library shares with its event sources.
struct Shared {
    nvml: Nvml,
    /// Functions of memory limits; `None` before driver 615.
    limits: Option<memory_limits::Functions>,
    /// Handles by UUID: NVML's lookup can take seconds per GPU. Each inventory replaces them.
    handles: Mutex<HashMap<GpuUuid, Handle>>,
    /// Readings of the inventory.
    readings: Mutex<readings::Readings>,
}

/// NVML handle of a GPU, valid while the library is initialized.
#[derive(Clone, Copy)]
struct Handle(sys::nvmlDevice_t);

// SAFETY: NVML is thread-safe (nvml.h, "thread safety"), and a handle is an index into its tables.
unsafe impl Send for Handle {}

/// Calls an NVML function of `$lib`; returns a `Result<(), Status>`.
macro_rules! call {
    ($lib:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $lib.$function.as_ref() {
            Ok(function) => {
                // SAFETY: the symbol has the signature of nvml.h; every pointer argument points to a live value of its
                // type, and counts passed with an array are at most its length.
                let code = unsafe { function($($argument),*) };
                $crate::Status::from_code(code).map_or(Ok(()), Err)
            }
            Err(_) => Err($crate::Status::MissingSymbol(stringify!($function))),
        }
    };
}
use call;

/// Returns the version word of a versioned struct (`NVML_STRUCT_VERSION` in nvml.h).
const fn struct_version<T>(version: u32) -> u32 {
    let size = size_of::<T>();
    assert!(size < 1 << 24, "the struct size exceeds 24 bits");
    #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
    let size = size as u32;
    size | (version << 24)
}

/// Converts an error that means a missing feature to `None`.
fn optional<T>(result: Result<T, Status>) -> Result<Option<T>, Status> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(status) if status.is_absent() => Ok(None),
        Err(status) => Err(status),
    }
}

impl Library {
    /// Loads and initializes the library at `path` (see [`crate::find()`]).
    ///
    /// # Errors
    /// When the library cannot be loaded or initialized (no kernel module, version mismatch, no permission).
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let nvml = Nvml::builder()
            .lib_path(OsStr::new(path))
            .init()
            .map_err(|error| OpenError {
                path: path.to_owned(),
                status: error.into(),
            })?;
        Ok(Self {
            shared: Arc::new(Shared {
                nvml,
                limits: memory_limits::Functions::load(path),
                handles: Mutex::default(),
                readings: Mutex::default(),
            }),
        })
    }
}

impl Shared {
    fn lib(&self) -> &NvmlLib {
        self.nvml.lib()
    }

    fn handles(&self) -> MutexGuard<'_, HashMap<GpuUuid, Handle>> {
        // The map is valid after a panic: every change is one operation.
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the handle of a GPU, cached if possible.
    fn handle(&self, gpu: &GpuUuid) -> Result<Handle, Status> {
        if let Some(handle) = self.handles().get(gpu) {
            return Ok(*handle);
        }
        let device = self.nvml.device_by_uuid(gpu.as_str())?;
        let handle = handle_of(&device);
        self.handles().insert(gpu.clone(), handle);
        Ok(handle)
    }

    fn device(&self, handle: Handle) -> Device<'_> {
        // SAFETY: the handle is of this initialized library, which outlives the borrow.
        unsafe { Device::new(handle.0, &self.nvml) }
    }

    /// Runs `read` on a GPU; the error has operation and GPU.
    fn on_gpu<T>(
        &self,
        gpu: &GpuUuid,
        operation: impl Into<String>,
        read: impl FnOnce(Handle) -> Result<T, Status>,
    ) -> Result<T, GpuError> {
        self.handle(gpu).and_then(read).map_err(|status| GpuError {
            operation: operation.into(),
            gpu: gpu.clone(),
            status,
        })
    }
}

fn handle_of(device: &Device<'_>) -> Handle {
    // SAFETY: the handle is stored only together with its library (in `Shared`, or while `Shared` is borrowed).
    Handle(unsafe { device.handle() })
}

/// Converts a fixed-size C string; invalid UTF-8 is replaced.
fn text(characters: &[c_char]) -> String {
    // Signed on x86, unsigned on Arm.
    let bytes: Vec<u8> = characters
        .iter()
        .flat_map(|character| character.to_ne_bytes())
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl GpuLibrary for Library {
    fn inventory(&self) -> Result<Inventory, InventoryError> {
        self.shared.inventory()
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<Memory, GpuError> {
        self.shared
            .on_gpu(gpu, "read the memory", |handle| self.shared.memory(handle))
    }

    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        bytes: Option<u64>,
    ) -> Result<(), GpuError> {
        let operation = format!("set the memory limit of cgroup {}", cgroup.display());
        self.shared.on_gpu(gpu, operation, |handle| {
            self.shared.set_memory_limit(handle, cgroup, bytes)
        })
    }

    fn cgroup_memory(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<CgroupMemory, GpuError> {
        let operation = format!("read the memory limit of cgroup {}", cgroup.display());
        self.shared.on_gpu(gpu, operation, |handle| {
            self.shared.cgroup_memory(handle, cgroup)
        })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<Process>, GpuError> {
        self.shared.on_gpu(gpu, "read the processes", |handle| {
            self.shared.processes(handle)
        })
    }

    fn utilization(&self, gpu: &GpuUuid) -> Result<Option<Utilization>, GpuError> {
        self.shared.on_gpu(gpu, "read the utilization", |handle| {
            self.shared.utilization(handle)
        })
    }

    fn telemetry(&self, gpu: &GpuUuid) -> Result<Telemetry, GpuError> {
        self.shared.on_gpu(gpu, "read the sensors", |handle| {
            self.shared.telemetry(handle)
        })
    }

    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since_us: u64,
    ) -> Result<Vec<ProcessUtilization>, GpuError> {
        self.shared
            .on_gpu(gpu, "read the utilization by process", |handle| {
                self.shared.process_utilization(handle, since_us)
            })
    }

    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, WatchError> {
        Ok(Box::new(events::EventSet::open(
            Arc::clone(&self.shared),
            gpus,
        )?))
    }

    fn mig_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        self.shared.on_gpu(gpu, "list the MIG instances", |handle| {
            self.shared.instances(handle)
        })
    }

    fn create_mig(
        &self,
        gpu: &GpuUuid,
        profile_id: u32,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        let operation = format!("create a MIG instance of profile {profile_id} at {placement}");
        self.shared.on_gpu(gpu, operation, |handle| {
            self.shared.create_instance(handle, profile_id, placement)
        })
    }

    fn destroy_mig(&self, gpu: &GpuUuid, id: u32) -> Result<(), GpuError> {
        let operation = format!("destroy MIG instance {id}");
        self.shared.on_gpu(gpu, operation, |handle| {
            self.shared.destroy_instance(handle, id)
        })
    }

    fn is_mig_enabled(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        self.shared.on_gpu(gpu, "read the MIG mode", |handle| {
            let mode = optional(self.shared.device(handle).mig_mode().map_err(Status::from))?;
            Ok(mode.is_some_and(|mode| mode.current == sys::NVML_DEVICE_MIG_ENABLE))
        })
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, enabled: bool) -> Result<(), GpuError> {
        let operation = match enabled {
            true => "enable MIG mode",
            false => "disable MIG mode",
        };
        self.shared.on_gpu(gpu, operation, |handle| {
            self.shared.set_mig_mode(handle, enabled)
        })
    }

    fn mig_remaining(&self, gpu: &GpuUuid, profile: &MigProfile) -> Result<u32, GpuError> {
        let operation = format!(
            "read the remaining capacity for MIG profile {}",
            profile.name
        );
        self.shared.on_gpu(gpu, operation, |handle| {
            self.shared.remaining(handle, profile.id)
        })
    }
}

impl EventSource for events::EventSet {
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, WatchError> {
        self.wait(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Version words of nvml.h of driver 580.
    #[test]
    fn struct_versions_match_the_header() {
        assert_eq!(struct_version::<sys::nvmlMemory_v2_t>(2), 0x0200_0028);
        assert_eq!(
            struct_version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2),
            0x0200_0098
        );
        assert_eq!(
            struct_version::<sys::nvmlGpuFabricInfo_v2_t>(2),
            0x0200_0024
        );
    }

    #[test]
    fn converts_only_missing_features_to_none() {
        assert_eq!(optional::<()>(Err(Status::NotSupported)), Ok(None));
        assert_eq!(
            optional::<()>(Err(Status::MissingSymbol("nvmlX"))),
            Ok(None)
        );
        assert_eq!(optional::<()>(Err(Status::GpuLost)), Err(Status::GpuLost));
        assert_eq!(optional(Ok(1)), Ok(Some(1)));
    }

    #[test]
    fn text_ends_at_first_nul() {
        let bytes: Vec<c_char> = b"1g.10gb\0junk"
            .iter()
            .map(|byte| c_char::from_ne_bytes([*byte]))
            .collect();
        assert_eq!(text(&bytes), "1g.10gb");
        assert_eq!(text(&bytes[..3]), "1g.");
    }

    #[test]
    fn open_error_names_the_path() {
        let error = Library::open(Path::new("/nonexistent/libnvidia-ml.so.1"))
            .err()
            .unwrap();
        assert_eq!(
            error.to_string(),
            "cannot initialize NVML from /nonexistent/libnvidia-ml.so.1"
        );
        assert!(matches!(error.status, Status::Load(_)), "{error:?}");
    }
}
