//! Layout of the usage region: the memory and GPU time used by the processes of a share, in one file that they all
//! map.
//!
//! ```text
//!      0  header: magic, version, highest slot in use, total, counters
//!   4096  slot 0 ┐
//!   4352  slot 1 │ 1024 slots of 256 bytes, one per process, never moved
//!      …         ┘
//! ```
//!
//! A file of [`REGION_SIZE`] zero bytes is an empty region: the creator of the file (the node driver, or the first
//! process of the share) writes nothing, so no region is ever half initialized.
//!
//! **Ownership of a slot is an open-file-description lock** (`F_OFD_SETLK`) on the bytes of the slot, held for the
//! life of the process; the kernel releases it however the process ends. The `state` word says whether the content
//! is valid; only the lock says whether the owner is alive. Tenants can write anything here: numbers are
//! bounds-checked, and no value in the region can raise a limit.

use core::mem::{offset_of, size_of};
use core::sync::atomic::AtomicU64;

/// Number of slots: the most processes of one share that can be counted at the same time.
pub const SLOT_COUNT: usize = 1024;

/// Size of a slot and of the byte range that its owner locks.
pub const SLOT_SIZE: usize = 256;

/// Offset of slot 0.
pub const SLOTS_OFFSET: usize = 4096;

/// Size of the region and of its file. A tmpfs for one region needs this size plus one page for the directory.
pub const REGION_SIZE: usize = SLOTS_OFFSET + SLOT_COUNT * SLOT_SIZE;

/// First word of a region that was used at least once.
pub const REGION_MAGIC: u64 = u64::from_le_bytes(*b"DRAVAUSE");

/// Version of this layout.
pub const REGION_ABI_VERSION: u64 = 1;

/// Index of a slot, below [`SLOT_COUNT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(u16);

impl SlotIndex {
    /// Returns `None` if there is no such slot.
    #[must_use]
    pub fn new(index: usize) -> Option<Self> {
        if index < SLOT_COUNT {
            u16::try_from(index).ok().map(Self)
        } else {
            None
        }
    }

    /// Returns the index.
    #[must_use]
    pub fn get(self) -> usize {
        usize::from(self.0)
    }

    /// Returns the offset of the slot, and of its owner's lock, in the file.
    #[must_use]
    pub fn offset(self) -> usize {
        SLOTS_OFFSET + self.get() * SLOT_SIZE
    }

    /// Returns the slot's rebuild mark in the total, unique and not zero.
    #[must_use]
    pub(crate) fn rebuild_mark(self) -> u16 {
        self.0 + 1
    }
}

/// The header: counters of the share.
#[repr(C, align(128))]
pub struct Header<A = AtomicU64> {
    /// 0 (never used) or [`REGION_MAGIC`].
    pub magic: A,
    /// 0 (never used) or [`REGION_ABI_VERSION`].
    pub abi_version: A,
    /// One more than the highest slot ever owned, which shortens scans. Never decreases.
    pub slots_in_use: A,
    reserved_0: [u64; 13],
    /// Bytes used by all processes (low 48 bits) and a rebuild mark (high 16 bits), see [`crate::ledger`].
    pub total: A,
    /// Highest total.
    pub peak_bytes: A,
    reserved_1: [u64; 14],
    /// Allocations denied.
    pub denied: A,
    /// Number of rebuilds of the total.
    pub epoch: A,
    /// Slots reclaimed from dead processes.
    pub reclaimed: A,
    reserved_2: [u64; 13],
    /// GPU time that the share may still use, microseconds, two's complement; negative is debt. See
    /// [`crate::bucket`].
    pub credit_us: A,
    /// Time of the last refill of the credit, microseconds of `CLOCK_MONOTONIC`.
    pub refilled_us: A,
    /// When a process last took GPU time or waited for it, microseconds of `CLOCK_MONOTONIC`; 0 is never. Shows
    /// demand to the node agent: updated with each lease, so at least once per [`crate::bucket::LEASE_US`] of GPU
    /// time, and every [`crate::bucket::MAX_SLEEP_US`] while a launch waits.
    pub last_demand_us: A,
    /// Launches admitted without credit after [`crate::bucket::MAX_ADMISSION_WAIT_US`].
    pub admission_timeouts: A,
    /// Estimated end of the work launched so far, if the share has the GPU alone, microseconds of
    /// `CLOCK_MONOTONIC`. Only written if the limits page asks for it, see [`crate::page::NOTIFY_OFFSET`].
    pub busy_until_us: A,
    /// When a process last waited for memory of the limit that other shares use, microseconds of `CLOCK_MONOTONIC`; 0 is never.
    /// Written before the wait, and again during it. See [`crate::Limits::lent_bytes`].
    pub memory_demand_us: A,
    /// The word at [`crate::page::SUSPENDED_OFFSET`] when a process last called libcuda while it was not 0: a demand to resume the
    /// share, if the page still has that word.
    pub demanded: A,
    reserved_3: [u64; 9],
}

/// A slot: counters of one process.
#[repr(C, align(128))]
pub struct Slot<A = AtomicU64> {
    /// 0 free, 1 owned, 2 orphaned, in the low byte; above it the generation, which increases with each owner. An
    /// orphaned slot counts a dead owner's memory that other processes may still have open, see
    /// [`crate::ledger::Region::reclaim_slot`].
    pub state: A,
    /// Process ID in the owner's own PID namespace.
    pub pid: A,
    /// Start time of the owner, clock ticks since boot (`/proc/self/stat` field 22).
    pub start_time: A,
    /// Inode of the owner's PID namespace.
    pub pid_namespace: A,
    /// Bytes used.
    pub used_bytes: A,
    /// Bytes of pending changes to `used_bytes` and the total.
    pub in_flight_bytes: A,
    /// Part of `used_bytes` that is charged for libcuda's own memory.
    pub driver_bytes: A,
    /// Highest `used_bytes`.
    pub peak_bytes: A,
    /// Part of `used_bytes` that other processes may open; processes of the same share are not charged again.
    pub exported_bytes: A,
    /// Memory of other processes that the owner has open without a charge.
    pub opened_bytes: A,
    reserved_0: [u64; 6],
    /// Allocations denied.
    pub denied: A,
    /// GPU time used, microseconds: the charges for launches, corrected to the measurements; overlapping streams
    /// count once. Never decreases: a negative correction is subtracted from later charges. Written with each
    /// lease, so late by at most [`crate::bucket::LEASE_US`] per thread.
    pub gpu_time_us: A,
    /// Time that launches waited for GPU time, microseconds, summed over threads.
    pub throttled_us: A,
    /// Number of launched kernels, graphs, fills and copies on the GPU. Written with each lease.
    pub launches: A,
    /// Launches that took at least [`crate::bucket::LONG_KERNEL_US`]: a running kernel is not interrupted, so the
    /// share cannot be throttled for shorter times.
    pub long_kernels: A,
    /// Duration of the longest launch, microseconds.
    pub longest_kernel_us: A,
    reserved_1: [u64; 10],
}

const _: () = {
    assert!(size_of::<Slot>() == SLOT_SIZE);
    assert!(size_of::<Header>() <= SLOTS_OFFSET);
    assert!(REGION_SIZE == 266_240);
    assert!(offset_of!(Header, magic) == 0);
    assert!(offset_of!(Header, abi_version) == 8);
    assert!(offset_of!(Header, slots_in_use) == 16);
    assert!(offset_of!(Header, total) == 128);
    assert!(offset_of!(Header, peak_bytes) == 136);
    assert!(offset_of!(Header, denied) == 256);
    assert!(offset_of!(Header, epoch) == 264);
    assert!(offset_of!(Header, reclaimed) == 272);
    assert!(offset_of!(Header, credit_us) == 384);
    assert!(offset_of!(Header, refilled_us) == 392);
    assert!(offset_of!(Header, last_demand_us) == 400);
    assert!(offset_of!(Header, admission_timeouts) == 408);
    assert!(offset_of!(Header, busy_until_us) == 416);
    assert!(offset_of!(Header, memory_demand_us) == 424);
    assert!(offset_of!(Header, demanded) == 432);
    assert!(offset_of!(Slot, state) == 0);
    assert!(offset_of!(Slot, pid) == 8);
    assert!(offset_of!(Slot, start_time) == 16);
    assert!(offset_of!(Slot, pid_namespace) == 24);
    assert!(offset_of!(Slot, used_bytes) == 32);
    assert!(offset_of!(Slot, in_flight_bytes) == 40);
    assert!(offset_of!(Slot, driver_bytes) == 48);
    assert!(offset_of!(Slot, peak_bytes) == 56);
    assert!(offset_of!(Slot, exported_bytes) == 64);
    assert!(offset_of!(Slot, opened_bytes) == 72);
    assert!(offset_of!(Slot, denied) == 128);
    assert!(offset_of!(Slot, gpu_time_us) == 136);
    assert!(offset_of!(Slot, throttled_us) == 144);
    assert!(offset_of!(Slot, launches) == 152);
    assert!(offset_of!(Slot, long_kernels) == 160);
    assert!(offset_of!(Slot, longest_kernel_us) == 168);
};

impl<A> Header<A> {
    /// Returns a header whose words come from `zero`, for models and tests; mapped memory needs no constructor.
    pub fn from_words(mut zero: impl FnMut() -> A) -> Self {
        Self {
            magic: zero(),
            abi_version: zero(),
            slots_in_use: zero(),
            reserved_0: [0; 13],
            total: zero(),
            peak_bytes: zero(),
            reserved_1: [0; 14],
            denied: zero(),
            epoch: zero(),
            reclaimed: zero(),
            reserved_2: [0; 13],
            credit_us: zero(),
            refilled_us: zero(),
            last_demand_us: zero(),
            admission_timeouts: zero(),
            busy_until_us: zero(),
            memory_demand_us: zero(),
            demanded: zero(),
            reserved_3: [0; 9],
        }
    }
}

impl<A> Slot<A> {
    /// Returns a slot whose words come from `zero`, for models and tests; mapped memory needs no constructor.
    pub fn from_words(mut zero: impl FnMut() -> A) -> Self {
        Self {
            state: zero(),
            pid: zero(),
            start_time: zero(),
            pid_namespace: zero(),
            used_bytes: zero(),
            in_flight_bytes: zero(),
            driver_bytes: zero(),
            peak_bytes: zero(),
            exported_bytes: zero(),
            opened_bytes: zero(),
            reserved_0: [0; 6],
            denied: zero(),
            gpu_time_us: zero(),
            throttled_us: zero(),
            launches: zero(),
            long_kernels: zero(),
            longest_kernel_us: zero(),
            reserved_1: [0; 10],
        }
    }
}
