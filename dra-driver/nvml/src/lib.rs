//! Safe access to NVML for the node driver.
//!
//! Only this crate calls NVML; apart from `libvgpu`, only this product crate has `unsafe` code. The API returns owned
//! data ([`Inventory`], [`Card`], [`Process`], [`Event`]), never handles. Callers use the trait [`GpuLibrary`], which
//! tests implement over plain data.
//!
//! The crate supports NVML since driver 450. A missing symbol or an unsupported query makes one value unknown (`None`,
//! [`Memory::NotSupported`]) and does not fail the inventory. A GPU that has fallen off the bus is listed in
//! [`Inventory::faults`]; the other GPUs are still listed. So is a GPU whose calls hang; if it was read before, it stays in
//! [`Inventory::cards`] as it was.
//!
//! The crate makes no decisions and does not read sysfs.

mod card;
mod error;
mod event;
mod find;
mod library;
mod mig;
mod process;
mod status;
mod telemetry;

pub use card::{
    AddressingMode, Card, CardFault, ComputeCapability, ComputeMode, CudaVersion, Fabric,
    FabricState, GpuUuid, Inventory, Memory, MemoryRepair,
};
pub use error::{CardError, InventoryError, OpenError, WatchError};
pub use event::{Event, EventKind, EventSource, RecoveryAction};
pub use find::{FindError, find};
pub use library::Library;
pub use mig::{ComputeInstance, GpuInstance, Mig, MigProfile, MigUuid, MigVariant, Placement};
pub use process::{Process, ProcessKind, ProcessMemory, ProcessUtilization, Utilization};
pub use status::Status;
pub use telemetry::Telemetry;

/// GPUs of one node.
///
/// [`Library`] implements the trait over NVML; tests implement it over plain data. Calls block, some for seconds on a
/// busy GPU, so async callers need a separate thread.
pub trait GpuLibrary: Send + Sync {
    /// Reads the inventory.
    ///
    /// # Errors
    /// When NVML cannot list the GPUs. A fault of one GPU is a [`CardFault`] instead.
    fn inventory(&self) -> Result<Inventory, InventoryError>;

    /// Reads the memory of a GPU.
    ///
    /// # Errors
    /// [`CardError`] with the GPU's UUID.
    fn memory(&self, card: &GpuUuid) -> Result<Memory, CardError>;

    /// Lists the processes with a context on the GPU, with their memory. PIDs are of the caller's PID namespace.
    ///
    /// # Errors
    /// [`CardError`] with the GPU's UUID.
    fn processes(&self, card: &GpuUuid) -> Result<Vec<Process>, CardError>;

    /// Reads the utilization in NVML's last sample period; `None` when the GPU reports none (MIG mode).
    ///
    /// # Errors
    /// [`CardError`] with the GPU's UUID.
    fn utilization(&self, card: &GpuUuid) -> Result<Option<Utilization>, CardError>;

    /// Reads the sensors of a GPU.
    ///
    /// # Errors
    /// [`CardError`] with the GPU's UUID.
    fn telemetry(&self, card: &GpuUuid) -> Result<Telemetry, CardError>;

    /// Reads the samples by process newer than `since_us`, µs of the CPU clock; 0 returns all samples.
    ///
    /// # Errors
    /// [`CardError`] with the GPU's UUID.
    fn process_utilization(
        &self,
        card: &GpuUuid,
        since_us: u64,
    ) -> Result<Vec<ProcessUtilization>, CardError>;

    /// Registers `cards` for health events.
    ///
    /// # Errors
    /// [`WatchError`] when a GPU cannot be registered or no event set can be created.
    fn watch(&self, cards: &[GpuUuid]) -> Result<Box<dyn EventSource>, WatchError>;

    /// Lists the GPU instances of the GPU with their compute instances.
    ///
    /// # Errors
    /// [`CardError`] with the GPU's UUID.
    fn mig_instances(&self, card: &GpuUuid) -> Result<Vec<GpuInstance>, CardError>;

    /// Creates a GPU instance of the profile with this ID at `placement`, with one compute instance that uses all of it. A
    /// failed creation is rolled back.
    ///
    /// # Errors
    /// [`CardError`]; [`Status::InsufficientResources`] when slices or engines are in use.
    fn create_mig(
        &self,
        card: &GpuUuid,
        profile_id: u32,
        placement: Placement,
    ) -> Result<GpuInstance, CardError>;

    /// Destroys the GPU instance `id` and its compute instances. Succeeds when the instance does not exist.
    ///
    /// # Errors
    /// [`CardError`]; [`Status::InUse`] while a process uses the instance.
    fn destroy_mig(&self, card: &GpuUuid, id: u32) -> Result<(), CardError>;

    /// Returns whether MIG mode is on.
    ///
    /// # Errors
    /// [`CardError`] with the GPU's UUID.
    fn is_mig_enabled(&self, card: &GpuUuid) -> Result<bool, CardError>;

    /// Switches MIG mode. If the mode does not take effect at once, it stays as it was: nothing changes at the next reset.
    ///
    /// # Errors
    /// [`CardError`]; [`Status::InUse`] while a program uses the GPU, [`Status::ResetRequired`] on a GPU that needs a reset.
    fn set_mig_mode(&self, card: &GpuUuid, enabled: bool) -> Result<(), CardError>;

    /// Returns the number of GPU instances of `profile` that can still be created.
    ///
    /// # Errors
    /// [`CardError`] with the GPU's UUID.
    fn mig_remaining(&self, card: &GpuUuid, profile: &MigProfile) -> Result<u32, CardError>;
}
