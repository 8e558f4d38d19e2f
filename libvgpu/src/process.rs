//! State of this process: its limits, the GPUs that they apply to, and its charges.
//!
//! All state is in one mapping that the kernel fills with zeroes in a forked child, and all zeroes means "not
//! initialized". So a child finds its limits and takes its own slot at its first call, without `atfork` handlers
//! and without a PID check per call. The parent's pointers are invalid in the child, since CUDA contexts do not
//! survive a fork. (The child inherits the descriptor that carries the parent's lock, as it inherits the device
//! files that keep the parent's memory allocated.)

use core::mem::size_of;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::DeviceUuid;

use crate::accounts::blocks::Blocks;
use crate::accounts::cache_charge::{Cache, Report};
use crate::accounts::charge_map::{Charge, ChargeMap};
use crate::accounts::pool_free_space::PoolFreeSpace;
use crate::accounts::records::{
    Binding, Context, Descriptor, GraphNeed, LibraryImage, LibraryPart, Mapping, Physical,
    TotalNeed,
};
use crate::accounts::shared_chunks::SharedChunks;
use crate::limits::discovery;
use crate::limits::environment::{self, Environment};
use crate::limits::gpu::Gpu;
use crate::limits::share::Share;
use crate::limits::shares::{LimitsSource, Shares};
use crate::meter::Meter;
use crate::system::guard::{Guard, PendingReservations, SharedGate};
use crate::system::sys;

/// Number of CUDA ordinals with a cached GPU.
pub(crate) const MAX_DEVICES: usize = 64;

const NEW: u32 = 0;
const STARTING: u32 = 1;
const READY: u32 = 2;

/// State of a process. All zeroes is not initialized.
pub(crate) struct Process {
    phase: AtomicU32,
    pool_guard: AtomicU32,
    import_guard: AtomicU32,
    /// Calls that may use memory that is already charged, see [`SharedGate`].
    pub(crate) reuse_gate: SharedGate,
    /// Calls that have reserved the most that they may need.
    pub(crate) pending_reservations: PendingReservations,
    source: AtomicU32,
    /// Limits from the environment, if it applies.
    pub(crate) environment: Environment,
    pub(crate) shares: Shares,
    /// Per CUDA ordinal.
    pub(crate) devices: [Device; MAX_DEVICES],
    /// Linear memory, by pointer.
    pub(crate) pointers: ChargeMap<Charge>,
    /// Blocks of its small allocations.
    pub(crate) blocks: Blocks,
    /// Arrays and mipmapped arrays, by handle.
    pub(crate) arrays: ChargeMap<Charge>,
    /// Physical memory of the virtual memory management API, by handle.
    pub(crate) physical: ChargeMap<Physical>,
    /// Its mappings, by address.
    pub(crate) mappings: ChargeMap<Mapping>,
    /// Its mappings to parts of sparse arrays.
    pub(crate) array_mappings: ChargeMap<Binding>,
    /// Physical memory bound to multicast objects, by object and offset.
    pub(crate) bindings: ChargeMap<Binding>,
    /// File descriptors of exported physical memory, by descriptor and file.
    pub(crate) descriptors: ChargeMap<Descriptor>,
    /// How often descriptors were detached from a handle.
    pub(crate) detached_count: AtomicU64,
    /// Imported memory of other APIs and processes, by the importing object.
    pub(crate) externals: ChargeMap<Charge>,
    /// Contexts that are not primary, by handle.
    pub(crate) contexts: ChargeMap<Context>,
    /// Reserved size of memory pools, by pool.
    pub(crate) pools: ChargeMap<Cache>,
    /// Latest reported sizes of pools and of graph memory, with the keys of their charges.
    pub(crate) cache_reports: ChargeMap<Report>,
    /// Number of queries of these sizes.
    pub(crate) cache_queries: AtomicU64,
    /// Queries and trims of pools that must not be destroyed meanwhile.
    pub(crate) pool_gate: SharedGate,
    /// Free space in them.
    pub(crate) pool_free_space: PoolFreeSpace,
    /// Memory that other processes may have open: linear memory by IPC handle, pool memory by pointer.
    pub(crate) exported: SharedChunks,
    /// Memory of other processes that was opened in the same ways.
    pub(crate) opened: SharedChunks,
    /// Memory of modules, by handle, and of libraries in contexts.
    pub(crate) modules: ChargeMap<Charge>,
    /// Libraries with global variables, by handle.
    pub(crate) libraries: ChargeMap<LibraryImage>,
    /// Their contexts, with the keys of their charges.
    pub(crate) library_parts: ChargeMap<LibraryPart>,
    /// Charges of libraries in contexts; neither must be destroyed meanwhile.
    pub(crate) library_gate: SharedGate,
    /// Memory for the limits of contexts (heap, stacks, output), by context and limit.
    pub(crate) limits: ChargeMap<Charge>,
    /// Whether any graph of the process may have allocation nodes.
    pub(crate) allocates_in_graphs: AtomicU32,
    /// Largest memory need of executable graphs, by handle.
    pub(crate) graphs: ChargeMap<GraphNeed>,
    /// Size of the graph memory cache, by device.
    pub(crate) graph_pools: ChargeMap<Cache>,
    /// Total need of all graphs ever launched, by device.
    pub(crate) graph_needs: ChargeMap<TotalNeed>,
    /// Metering of launches.
    pub(crate) meter: Meter,
}

/// Cached state of a CUDA device.
pub(crate) struct Device {
    /// 0 unknown, 1 unlimited, 2 denied, 3 + index of the GPU's first share.
    pub(crate) target: AtomicU32,
    /// 0, or one more than the bytes charged for the primary context.
    pub(crate) charged: AtomicU64,
    /// Serializes creation and end of the primary context.
    pub(crate) primary_gate: SharedGate,
    /// The primary context, once this process has retained it.
    pub(crate) primary: AtomicU64,
}

/// The word of the limits page of the process's only share that says whether it is suspended; null if there is none, or the share may
/// not be suspended. The mapping is never removed, and a forked child inherits it.
static SUSPENDED: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// Lets [`show_demand`] follow the share of the process. A process with several shares is never suspended.
fn follow_demand<'a>(mut shares: impl Iterator<Item = &'a Share>) {
    let only = shares.next().filter(|_| shares.next().is_none());
    let only = only.filter(|share| share.can_be_suspended());
    let word = only.and_then(Share::suspended_word);
    let word = word.map_or(ptr::null_mut(), |word| ptr::from_ref(word).cast_mut());
    SUSPENDED.store(word, Ordering::Release);
}

/// Shows the node driver that a program wants its suspended share to be resumed. Precedes each call that libcuda may block.
///
/// A call that reads the word just before the share is suspended, and reaches libcuda after that, is blocked without a demand; the
/// next call of any thread has one.
#[inline(always)]
pub(crate) fn show_demand() {
    let word = SUSPENDED.load(Ordering::Relaxed);
    // SAFETY: null, or a word of a page that stays mapped.
    let Some(word) = (unsafe { word.as_ref() }) else {
        return;
    };
    if word.load(Ordering::Relaxed) != 0 {
        show_demand_now();
    }
}

#[cold]
#[inline(never)]
fn show_demand_now() {
    if let Some(process) = Process::get() {
        process.shares().for_each(Share::demand_resume);
    }
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

impl Process {
    /// Returns this process with its limits. `None` without memory for its state.
    pub(crate) fn get() -> Option<&'static Self> {
        let process = match Self::mapped() {
            Some(process) => process,
            // SAFETY: as in `mapped`.
            None => unsafe { install()?.as_ref() },
        };
        if process.phase.load(Ordering::Acquire) != READY {
            process.start();
        }
        Some(process)
    }

    /// Returns this process if its state is mapped; it may not be initialized.
    #[inline]
    pub(crate) fn mapped() -> Option<&'static Self> {
        let pointer = NonNull::new(PROCESS.load(Ordering::Acquire))?;
        // SAFETY: mapped, zeroed, and never unmapped; all zeroes is a `Process`, which consists of atomics and numbers.
        Some(unsafe { pointer.as_ref() })
    }

    #[cold]
    fn start(&self) {
        loop {
            match self
                .phase
                .compare_exchange(NEW, STARTING, Ordering::Acquire, Ordering::Acquire)
            {
                Ok(_) => break,
                Err(READY) => return,
                Err(_) => sys::yield_now(),
            }
        }
        let source = discovery::find_shares(&self.shares, environment::run_directory)
            .unwrap_or_else(|| self.environment.read());
        follow_demand(self.shares());
        self.source.store(source as u32, Ordering::Relaxed);
        self.phase.store(READY, Ordering::Release);
    }

    /// Returns the source of the limits.
    pub(crate) fn source(&self) -> LimitsSource {
        LimitsSource::of(self.source.load(Ordering::Relaxed))
    }

    /// Returns whether anything is limited.
    pub(crate) fn is_limited(&self) -> bool {
        self.source() != LimitsSource::None
    }

    /// Returns whether the memory of any GPU is limited.
    pub(crate) fn is_memory_limited(&self) -> bool {
        match self.source() {
            LimitsSource::None => false,
            LimitsSource::Pages => self.shares().any(Share::is_memory_limited),
            LimitsSource::Environment => self.environment.limits_memory(),
            LimitsSource::UnreadablePages | LimitsSource::InvalidEnvironment => true,
        }
    }

    /// Returns whether the time of any GPU is metered.
    pub(crate) fn is_metered(&self) -> bool {
        match self.source() {
            LimitsSource::Pages | LimitsSource::UnreadablePages => {
                self.shares().any(Share::is_metered)
            }
            LimitsSource::Environment => self.environment.limits_cores(),
            LimitsSource::None | LimitsSource::InvalidEnvironment => false,
        }
    }

    /// Returns whether the share of the process may be suspended.
    pub(crate) fn can_be_suspended(&self) -> bool {
        self.shares().any(Share::can_be_suspended)
    }

    /// Returns the shares found so far.
    pub(crate) fn shares(&self) -> impl Iterator<Item = &Share> {
        self.shares.iter()
    }

    /// See [`Shares::guard`].
    pub(crate) fn guard(&self) -> Guard<'_> {
        self.shares.guard()
    }

    /// Returns the process of a GPU.
    #[inline]
    pub(crate) fn of(_gpu: Gpu) -> &'static Self {
        // SAFETY: a GPU refers to shares in the state, so the state is mapped; it is never unmapped.
        unsafe { &*PROCESS.load(Ordering::Acquire) }
    }

    /// Returns the GPU with this UUID, if it has a share.
    pub(crate) fn gpu_of(&'static self, uuid: DeviceUuid) -> Option<Gpu> {
        Gpu::of(&self.shares, uuid)
    }

    /// Returns the GPU with that [`Gpu::index`].
    pub(crate) fn gpu(&'static self, index: u8) -> Option<Gpu> {
        Gpu::at(&self.shares, index)
    }

    /// Locks the charges of libcuda's caches. libcuda is not called.
    pub(crate) fn pool_guard(&self) -> Guard<'_> {
        Guard::acquire(&self.pool_guard)
    }

    /// Locks charges for imported physical memory. [`Process::guard`] may be acquired inside; libcuda is not
    /// called.
    pub(crate) fn import_guard(&self) -> Guard<'_> {
        Guard::acquire(&self.import_guard)
    }
}

#[cold]
fn install() -> Option<NonNull<Process>> {
    let size = size_of::<Process>();
    let mapping = sys::map_zeroes(size)?;
    if !sys::wipe_on_fork(mapping, size) {
        crate::system::log::line(format_args!(
            "madvise(MADV_WIPEONFORK) failed: Linux 4.14 or later required; not counting forked children separately"
        ));
    }
    let mine = mapping.cast::<Process>();
    match PROCESS.compare_exchange(
        ptr::null_mut(),
        mine.as_ptr(),
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        Ok(_) => Some(mine),
        Err(theirs) => {
            sys::unmap(mapping, size);
            NonNull::new(theirs)
        }
    }
}
