//! What this process knows: its limits, the cards they apply to, and what it holds.
//!
//! All of it lies in one mapping that the kernel fills with zeroes in a forked child, and all zeroes means "not
//! yet looked". So a child finds its limits and takes a slot of its own at its first call, without `atfork`
//! handlers and without asking for its process ID at every call; its parent's pointers mean nothing to it,
//! since CUDA contexts do not survive a fork. (The child does inherit the descriptor that carries the parent's
//! lock, as it inherits the device files that keep the parent's memory taken.)

use core::mem::size_of;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::blocks::{Blocks, SmallArrays};
use crate::charge_map::ChargeMap;
use crate::destroyed_pools::DestroyedPools;
use crate::discovery;
use crate::environment::{self, Environment};
use crate::guard::{Guard, PendingReservations, SharedGate};
use crate::imports::Imports;
use crate::meter::Meter;
use crate::pool_free_space::PoolFreeSpace;
use crate::share::Share;
use crate::shared_chunks::SharedChunks;
use crate::shares::{LimitsSource, MAX_SHARES, Shares};
use crate::sys;

/// CUDA ordinals whose card is remembered.
pub(crate) const MAX_DEVICES: usize = 64;

const NEW: u32 = 0;
const STARTING: u32 = 1;
const READY: u32 = 2;

/// State of a process. All zeroes is a process that has not looked yet.
pub(crate) struct Process {
    phase: AtomicU32,
    guard: AtomicU32,
    pool_guard: AtomicU32,
    import_guard: AtomicU32,
    /// Calls that may take memory which the process has paid for already, see [`SharedGate`].
    pub(crate) reuse_gate: SharedGate,
    /// Calls that have reserved the most that they may need.
    pub(crate) pending_reservations: PendingReservations,
    source: AtomicU32,
    /// What the environment says, if it counts.
    pub(crate) environment: Environment,
    pub(crate) shares: Shares,
    /// Per CUDA ordinal.
    pub(crate) devices: [Device; MAX_DEVICES],
    /// Linear memory, by pointer.
    pub(crate) pointers: ChargeMap,
    /// Blocks that small allocations of it share.
    pub(crate) blocks: Blocks,
    /// Arrays and mipmapped arrays, by handle.
    pub(crate) arrays: ChargeMap,
    /// Those of them that share blocks, by the card's index.
    pub(crate) small_arrays: [SmallArrays; MAX_SHARES],
    /// Physical memory of the virtual memory management API, by handle.
    pub(crate) physical: ChargeMap,
    /// Mappings of it, by address.
    pub(crate) mappings: ChargeMap,
    /// Mappings of it to parts of sparse arrays.
    pub(crate) array_mappings: ChargeMap,
    /// Physical memory that is bound to multicast objects, by object and place.
    pub(crate) bindings: ChargeMap,
    /// Memory of other APIs and processes that was imported, by the object that holds it.
    pub(crate) externals: ChargeMap,
    /// Contexts that are not primary, by handle; `context` is how often each was attached to, or marks a part of another.
    pub(crate) contexts: ChargeMap,
    /// What memory pools have reserved, by pool.
    pub(crate) pools: ChargeMap,
    /// What is free in them.
    pub(crate) pool_free_space: PoolFreeSpace,
    /// Those that were destroyed before everything in them was freed.
    pub(crate) destroyed_pools: DestroyedPools,
    /// Memory that others may have opened: linear by IPC handle, of pools by pointer.
    pub(crate) exported: SharedChunks,
    /// Memory of others that was opened in the same ways.
    pub(crate) opened: SharedChunks,
    /// What was opened of each card, by the card's index.
    pub(crate) imports: [Imports; MAX_SHARES],
    /// What executable graphs may need when they are launched, by handle.
    pub(crate) graphs: ChargeMap,
    /// What the driver keeps for graphs, by device.
    pub(crate) graph_pools: ChargeMap,
    /// What all graphs ever made for a device need together, by device.
    pub(crate) graph_needs: ChargeMap,
    /// Launches.
    pub(crate) meter: Meter,
}

/// What is remembered of a CUDA device.
pub(crate) struct Device {
    /// 0 not looked up, 1 unlimited, 2 refused, 3 + index of the card's first share.
    pub(crate) target: AtomicU32,
    /// 0, or one more than the bytes that are charged for the primary context.
    pub(crate) charged: AtomicU64,
    /// Whoever makes or ends the primary context.
    pub(crate) primary_gate: SharedGate,
    /// The primary context, once this process retained it.
    pub(crate) primary: AtomicU64,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

impl Process {
    /// This process, with its limits found. `None` if there is no memory for its state.
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

    /// This process if it has state at all, which may be all zeroes: not looked yet.
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
        self.source.store(source as u32, Ordering::Relaxed);
        self.phase.store(READY, Ordering::Release);
    }

    /// Where the limits come from.
    pub(crate) fn source(&self) -> LimitsSource {
        LimitsSource::of(self.source.load(Ordering::Relaxed))
    }

    /// Whether anything at all is limited.
    pub(crate) fn is_limited(&self) -> bool {
        self.source() != LimitsSource::None
    }

    /// Whether the memory of any card is limited.
    pub(crate) fn is_memory_limited(&self) -> bool {
        match self.source() {
            LimitsSource::None => false,
            LimitsSource::Pages => self.shares().any(Share::is_memory_limited),
            LimitsSource::Environment => self.environment.limits_memory(),
            LimitsSource::UnreadablePages | LimitsSource::InvalidEnvironment => true,
        }
    }

    /// Whether the GPU time of any card is metered.
    pub(crate) fn is_metered(&self) -> bool {
        match self.source() {
            LimitsSource::Pages | LimitsSource::UnreadablePages => {
                self.shares().any(Share::is_metered)
            }
            LimitsSource::Environment => self.environment.limits_cores(),
            LimitsSource::None | LimitsSource::InvalidEnvironment => false,
        }
    }

    /// The shares found so far.
    pub(crate) fn shares(&self) -> impl Iterator<Item = &Share> {
        self.shares.iter()
    }

    /// Excludes other threads of this process from what only one may do: take dead slots and rebuild totals,
    /// attach shares, count references. Short, and never while the driver is called.
    pub(crate) fn guard(&self) -> Guard<'_> {
        Guard::acquire(&self.guard)
    }

    /// Lets one thread at a time ask the driver what it keeps, or to give some of that back, and note the answer.
    pub(crate) fn pool_guard(&self) -> Guard<'_> {
        Guard::acquire(&self.pool_guard)
    }

    /// Lets one thread at a time pay for imported physical memory. [`Process::guard`] may be taken within; the driver is
    /// not called.
    pub(crate) fn import_guard(&self) -> Guard<'_> {
        Guard::acquire(&self.import_guard)
    }
}

#[cold]
fn install() -> Option<NonNull<Process>> {
    let size = size_of::<Process>();
    let mapping = sys::map_zeroes(size)?;
    if !sys::wipe_on_fork(mapping, size) {
        crate::log::line(format_args!(
            "madvise(MADV_WIPEONFORK) failed, Linux 4.14 is needed: forked children are not counted apart"
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
