//! Safe access to NVML for the node driver.
//!
//! [`checkpoint`] calls libcuda to hold and move other processes. It is for a process of its own that ends after one call.
//!
//! Only this crate calls NVML; apart from `libvgpu`, only this product crate has `unsafe` code. The API returns owned
//! data ([`Inventory`], [`Gpu`], [`Process`], [`Event`]), never handles. Callers use the trait [`GpuLibrary`], which
//! tests implement over plain data.
//!
//! The crate supports NVML since driver 450. A missing symbol or an unsupported query makes one value unknown (`None`,
//! [`Memory::NotSupported`]) and does not fail the inventory. A GPU that has fallen off the bus is listed in
//! [`Inventory::faults`]; the other GPUs are still listed. So is a GPU whose calls hang; if it was read before, it stays in
//! [`Inventory::gpus`] as it was.
//!
//! The crate makes no decisions and does not read sysfs.

use std::path::Path;

pub mod checkpoint;
mod error;
mod event;
mod fabric;
mod find;
mod gpu;
mod library;
mod mig;
mod process;
mod status;
mod telemetry;

pub use error::{GpuError, InventoryError, OpenError, WatchError};
pub use event::{Event, EventKind, EventSource, RecoveryAction};
pub use fabric::{Fabric, FabricDefect, FabricHealth, FabricState};
pub use find::{FindError, find};
pub use gpu::{
    AddressingMode, CgroupMemory, ComputeCapability, ComputeMode, CudaVersion, Gpu, GpuFault,
    GpuUuid, Inventory, Memory, MemoryRepair,
};
pub use library::Library;
pub use mig::{ComputeInstance, GpuInstance, Mig, MigProfile, MigUuid, MigVariant, Placement};
pub use process::{Process, ProcessKind, ProcessMemory, ProcessUtilization, Utilization};
pub use status::Status;
pub use telemetry::{Sensor, Telemetry};

/// GPUs of one node.
///
/// [`Library`] implements the trait over NVML; tests implement it over plain data. Calls block, some for seconds on a
/// busy GPU, so async callers need a separate thread.
pub trait GpuLibrary: Send + Sync {
    /// Reads the inventory.
    ///
    /// # Errors
    /// When NVML cannot list the GPUs. A fault of one GPU is a [`GpuFault`] instead.
    fn inventory(&self) -> Result<Inventory, InventoryError>;

    /// Reads the memory of a GPU.
    ///
    /// # Errors
    /// [`GpuError`] with the GPU's UUID.
    fn memory(&self, gpu: &GpuUuid) -> Result<Memory, GpuError>;

    /// Limits the GPU memory of a cgroup, given by its directory; `None` removes the limit. Managed memory does not count.
    ///
    /// # Errors
    /// [`GpuError`]; [`Status::MissingSymbol`] before driver 615, [`Status::NotSupported`] by a driver or GPU that cannot, or
    /// below an ancestor without the controller.
    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        bytes: Option<u64>,
    ) -> Result<(), GpuError>;

    /// Reads the GPU memory of a cgroup, given by its directory.
    ///
    /// # Errors
    /// As [`Self::set_memory_limit`].
    fn cgroup_memory(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<CgroupMemory, GpuError>;

    /// Lists the processes with a context on the GPU, with their memory. PIDs are of the caller's PID namespace.
    ///
    /// # Errors
    /// [`GpuError`] with the GPU's UUID.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<Process>, GpuError>;

    /// Reads the utilization in NVML's last sample period; `None` when the GPU reports none (MIG mode).
    ///
    /// # Errors
    /// [`GpuError`] with the GPU's UUID.
    fn utilization(&self, gpu: &GpuUuid) -> Result<Option<Utilization>, GpuError>;

    /// Reads the sensors of a GPU.
    ///
    /// # Errors
    /// [`GpuError`] with the GPU's UUID.
    fn telemetry(&self, gpu: &GpuUuid) -> Result<Telemetry, GpuError>;

    /// Reads the samples by process newer than `since_us`, µs of the CPU clock; 0 returns all samples.
    ///
    /// # Errors
    /// [`GpuError`] with the GPU's UUID.
    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since_us: u64,
    ) -> Result<Vec<ProcessUtilization>, GpuError>;

    /// Registers `gpus` for health events.
    ///
    /// # Errors
    /// [`WatchError`] when a GPU cannot be registered or no event set can be created.
    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, WatchError>;

    /// Lists the GPU instances of the GPU with their compute instances.
    ///
    /// # Errors
    /// [`GpuError`] with the GPU's UUID.
    fn mig_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError>;

    /// Creates a GPU instance of the profile with this ID at `placement`, with one compute instance that uses all of it. A
    /// failed creation is rolled back.
    ///
    /// # Errors
    /// [`GpuError`]; [`Status::InsufficientResources`] when slices or engines are in use.
    fn create_mig(
        &self,
        gpu: &GpuUuid,
        profile_id: u32,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError>;

    /// Destroys the GPU instance `id` and its compute instances. Succeeds when the instance does not exist.
    ///
    /// # Errors
    /// [`GpuError`]; [`Status::InUse`] while a process uses the instance.
    fn destroy_mig(&self, gpu: &GpuUuid, id: u32) -> Result<(), GpuError>;

    /// Returns whether MIG mode is on.
    ///
    /// # Errors
    /// [`GpuError`] with the GPU's UUID.
    fn is_mig_enabled(&self, gpu: &GpuUuid) -> Result<bool, GpuError>;

    /// Switches MIG mode. If the mode does not take effect at once, it stays as it was: nothing changes at the next reset.
    ///
    /// # Errors
    /// [`GpuError`]; [`Status::InUse`] while a program uses the GPU, [`Status::ResetRequired`] on a GPU that needs a reset.
    fn set_mig_mode(&self, gpu: &GpuUuid, enabled: bool) -> Result<(), GpuError>;

    /// Returns the number of GPU instances of `profile` that can still be created.
    ///
    /// # Errors
    /// [`GpuError`] with the GPU's UUID.
    fn mig_remaining(&self, gpu: &GpuUuid, profile: &MigProfile) -> Result<u32, GpuError>;
}
