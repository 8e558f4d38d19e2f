//! What the driver knows about the GPUs of its node, read through NVML.
//!
//! This is the only crate that calls NVML, and with `libvgpu` the only product crate with `unsafe`. It hands out
//! owned plain data ([`Inventory`], [`Card`], [`Process`], [`Event`]) and never a borrowed handle, so callers need
//! not know that NVML exists: they see [`GpuLibrary`], which a test can implement over a vector of cards.
//!
//! NVML of very different ages is met in the field. A symbol that a library lacks, or a query that a card does not
//! support, makes that one fact unknown (`None`, [`Memory::NotSupported`]); it never fails the whole inventory.
//! A card that has fallen off the bus is listed in [`Inventory::faults`] and hides no other card.
//!
//! It does not decide anything: what is published, refused or repaired is the driver's matter. It does not read
//! sysfs either; what NVML does not say is not here.

mod card;
mod error;
mod event;
mod find;
mod library;
mod mig;
mod process;
mod status;

pub use card::{
    AddressingMode, Card, CardFault, ComputeCapability, ComputeMode, CudaVersion, Fabric, GpuUuid,
    Inventory, Memory,
};
pub use error::{CardError, InventoryError, OpenError, WatchError};
pub use event::{Event, EventKind, EventSource};
pub use find::{FindError, find};
pub use library::Library;
pub use mig::{ComputeInstance, GpuInstance, Mig, MigProfile, MigUuid, MigVariant, Placement};
pub use process::{Process, ProcessKind, ProcessMemory, ProcessUtilization, Utilization};
pub use status::Status;

/// The GPUs of one node, as the driver uses them.
///
/// [`Library`] implements it over NVML; tests implement it over plain data. Calls block (some for seconds on a busy
/// card), so an async caller keeps them on a thread of their own.
pub trait GpuLibrary: Send + Sync {
    /// Everything that is known about the node's cards.
    ///
    /// # Errors
    /// Only when NVML cannot even say which cards exist; a single bad card is a [`CardFault`] instead.
    fn inventory(&self) -> Result<Inventory, InventoryError>;

    /// Device memory of one card now.
    ///
    /// # Errors
    /// [`CardError`] with the card's UUID.
    fn memory(&self, card: &GpuUuid) -> Result<Memory, CardError>;

    /// Processes that hold a context on the card, with their memory. PIDs are those of this process's PID namespace.
    ///
    /// # Errors
    /// [`CardError`] with the card's UUID.
    fn processes(&self, card: &GpuUuid) -> Result<Vec<Process>, CardError>;

    /// How busy the card was in NVML's last sample period; `None` where the card does not say (MIG mode).
    ///
    /// # Errors
    /// [`CardError`] with the card's UUID.
    fn utilization(&self, card: &GpuUuid) -> Result<Option<Utilization>, CardError>;

    /// Per-process samples newer than `since_us` (µs of the CPU clock, 0 for all that NVML still has).
    ///
    /// # Errors
    /// [`CardError`] with the card's UUID.
    fn process_utilization(
        &self,
        card: &GpuUuid,
        since_us: u64,
    ) -> Result<Vec<ProcessUtilization>, CardError>;

    /// Starts to watch `cards` for health events. A card that cannot be watched is an error that names it.
    ///
    /// # Errors
    /// [`WatchError`] with the card, or when NVML has no event set to give.
    fn watch(&self, cards: &[GpuUuid]) -> Result<Box<dyn EventSource>, WatchError>;

    /// GPU instances that exist on the card, with their compute instances, whoever made them.
    ///
    /// # Errors
    /// [`CardError`] with the card's UUID.
    fn mig_instances(&self, card: &GpuUuid) -> Result<Vec<GpuInstance>, CardError>;

    /// Creates a GPU instance of `profile` at exactly `placement`, and one compute instance that fills it.
    /// Nothing is left behind when it fails.
    ///
    /// # Errors
    /// [`CardError`]; [`Status::InsufficientResources`] where the slices or engines are taken.
    fn create_mig(
        &self,
        card: &GpuUuid,
        profile: &MigProfile,
        placement: Placement,
    ) -> Result<GpuInstance, CardError>;

    /// Destroys the GPU instance `id` and its compute instances. Succeeds when it is gone already.
    ///
    /// # Errors
    /// [`CardError`]; [`Status::InUse`] while a process holds it.
    fn destroy_mig(&self, card: &GpuUuid, id: u32) -> Result<(), CardError>;

    /// How many more GPU instances of `profile` the card can take now.
    ///
    /// # Errors
    /// [`CardError`] with the card's UUID.
    fn mig_remaining(&self, card: &GpuUuid, profile: &MigProfile) -> Result<u32, CardError>;
}
