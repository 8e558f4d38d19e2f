//! One share: its limits page, its usage region, and this process's slot in the region.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::mem::size_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::ledger::{Rebuild, Region};
use drava_vgpu_abi::page::CURRENT_OFFSET;
use drava_vgpu_abi::region::{SLOT_SIZE, SlotIndex};
use drava_vgpu_abi::{BrokenRegion, DeviceUuid, Limits, MemoryPolicy};

use crate::system::path::PathBuffer;
use crate::system::sys::{self, Fd};

mod attach;
mod compute;
mod lending;
mod mapping;
pub(crate) mod usage;

pub(crate) use attach::AttachError;
use mapping::{page_words, read_page, view};

/// A word of the region.
#[cfg(not(feature = "kill-points"))]
pub(crate) type RegionWord = AtomicU64;
#[cfg(feature = "kill-points")]
pub(crate) use crate::system::kill_points::RegionWord;

/// Index of the generation hint among the page's words.
const CURRENT_WORD: usize = CURRENT_OFFSET / size_of::<u64>();

const NO_LIMIT: u64 = u64::MAX;

/// How long a reclaim stays valid, per checked slot. A check takes a system call of half a microsecond. So a
/// program whose requests are denied repeatedly spends little time on checks, and a reclaim finds a death before
/// another process that learns of it can request memory.
const RECLAIM_VALID_NS: u64 = 8_000;
/// Longest validity of a reclaim, whatever the number of slots.
const MAX_RECLAIM_VALID_NS: u64 = 1_000_000;

const REGION_FLAGS: c_int = libc::O_RDWR | libc::O_NOFOLLOW;

/// A share. All zeroes is none.
pub(crate) struct Share {
    /// Written before the share is published, never after.
    uuid: UnsafeCell<DeviceUuid>,
    /// Path of the region; written as `uuid`.
    region_path: UnsafeCell<PathBuffer>,
    /// The mapped page; null if the limits come from the environment.
    page: AtomicPtr<AtomicU64>,
    /// Generation hint of the page when the limits below were read.
    seen_generation: AtomicU64,
    limit_bytes: AtomicU64,
    driver_reserve_bytes: AtomicU64,
    /// Memory of libcuda beyond the charged contexts, from the page.
    driver_excess_bytes: AtomicU64,
    /// What the contexts are charged too much, from the page.
    driver_surplus_bytes: AtomicU64,
    /// Part of the limit that other shares use, from the page.
    lent_bytes: AtomicU64,
    fails_open: AtomicU32,
    spills: AtomicU32,
    can_suspend: AtomicU32,
    /// Compute policy, guarantee and rate, see [`Share::set_limits`].
    compute: AtomicU64,
    /// The mapped region; null if it is unusable.
    region: AtomicPtr<c_void>,
    region_fd: AtomicI32,
    /// File that the descriptor was opened for.
    region_device: AtomicU64,
    region_inode: AtomicU64,
    slot: AtomicU32,
    generation: AtomicU64,
    /// End of the last reclaim's validity, see [`RECLAIM_VALID_NS`]; 0 if there was none.
    reclaimed_until_ns: AtomicU64,
    /// Last reading for NVML.
    usage_reading: usage::UsageReading,
}

/// Available memory at one moment.
#[derive(Clone, Copy)]
pub(crate) struct Headroom {
    pub(crate) bytes: u64,
    /// Until then no memory of dead processes can be reclaimed.
    pub(crate) valid_until_ns: u64,
}

impl Headroom {
    /// Returns the sum.
    #[inline]
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            valid_until_ns: self.valid_until_ns.min(other.valid_until_ns),
        }
    }
}

// SAFETY: `uuid` and the paths are written by one thread before the share is published; the other fields are atomics.
unsafe impl Sync for Share {}

impl Share {
    /// Returns the GPU's UUID.
    pub(crate) fn uuid(&self) -> DeviceUuid {
        // SAFETY: never written after the share is published.
        unsafe { self.uuid.get().read() }
    }

    pub(crate) fn is_memory_limited(&self) -> bool {
        self.limit_bytes() != NO_LIMIT
    }

    /// Returns the current limit.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.refresh();
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// Returns what processes of this share may charge together: the limit without what other shares use, corrected by the agent's
    /// figures.
    fn grantable_bytes(&self) -> u64 {
        let limit = self.limit_bytes();
        if limit == NO_LIMIT {
            return limit;
        }
        limit
            .saturating_add(self.surplus_bytes())
            .saturating_sub(self.driver_excess_bytes.load(Ordering::Relaxed))
            .saturating_sub(self.lent_bytes.load(Ordering::Relaxed))
    }

    /// Returns what the contexts are charged too much. The agent measures it once per second, and processes end
    /// meanwhile, with the agent too: it never exceeds half of the charges of the contexts that are there. (The agent
    /// lets a context be charged twice its estimate at most, and the estimate stays charged.)
    fn surplus_bytes(&self) -> u64 {
        match self.driver_surplus_bytes.load(Ordering::Relaxed) {
            0 => 0,
            surplus => {
                let charged = self.region().map_or(0, |region| region.driver_bytes());
                surplus.min(charged / 2)
            }
        }
    }

    /// Returns the estimated memory of libcuda per context; `None` if the limits come from the environment.
    pub(crate) fn driver_reserve_bytes(&self) -> Option<u64> {
        self.refresh();
        let has_page = !self.page.load(Ordering::Acquire).is_null();
        has_page.then(|| self.driver_reserve_bytes.load(Ordering::Relaxed))
    }

    /// Returns whether plain allocations beyond the limit become managed memory.
    pub(crate) fn spills(&self) -> bool {
        self.refresh();
        self.spills.load(Ordering::Relaxed) != 0
    }

    /// Returns the bytes used by all processes of the share, including libcuda.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.counted_bytes()
            .saturating_add(self.driver_excess_bytes.load(Ordering::Relaxed))
            .saturating_sub(self.surplus_bytes())
    }

    /// Returns the bytes charged by all processes of the share.
    pub(crate) fn counted_bytes(&self) -> u64 {
        self.region().map_or(0, |region| region.total_bytes())
    }

    /// Reserves `bytes` if they are available without a rebuild.
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        let limit = self.grantable_bytes();
        match self.own() {
            Some((region, slot)) => region.reserve(slot, bytes, limit).is_ok(),
            None => self.fails_open(),
        }
    }

    /// Reserves `bytes`, after a rebuild if needed. The caller holds the process's guard.
    pub(crate) fn reserve_or_rebuild(&self, bytes: u64) -> bool {
        let limit = self.grantable_bytes();
        match self.own() {
            Some((region, slot)) => region.reserve_or_rebuild(slot, bytes, limit).is_ok(),
            None => self.fails_open(),
        }
    }

    /// Reserves up to `bytes`, as much as is available, and returns the amount.
    pub(crate) fn reserve_up_to(&self, bytes: u64) -> u64 {
        let limit = self.grantable_bytes();
        match self.own() {
            Some((region, slot)) => region.reserve_up_to(slot, bytes, limit),
            None if self.fails_open() => bytes,
            None => 0,
        }
    }

    /// Charges `bytes` whatever the limit.
    pub(crate) fn charge(&self, bytes: u64) {
        if let Some((region, slot)) = self.own() {
            region.charge(slot, bytes);
        }
    }

    /// Releases up to `bytes` and returns the amount that this process had here.
    pub(crate) fn release(&self, bytes: u64) -> u64 {
        self.own()
            .map_or(0, |(region, slot)| region.release(slot, bytes))
    }

    pub(crate) fn add_driver_bytes(&self, bytes: u64) {
        if let Some((region, slot)) = self.own()
            && let Some(slot) = region.slot(slot)
        {
            Word::fetch_add(&slot.driver_bytes, bytes);
        }
    }

    pub(crate) fn subtract_driver_bytes(&self, bytes: u64) {
        if let Some((region, slot)) = self.own()
            && let Some(slot) = region.slot(slot)
        {
            Word::fetch_sub(&slot.driver_bytes, bytes);
        }
    }

    /// Records that other processes may open `bytes` of this process's memory.
    pub(crate) fn add_exported_bytes(&self, bytes: u64) {
        if let Some(slot) = self.own_slot() {
            Word::fetch_add(&slot.exported_bytes, bytes);
        }
    }

    /// Reverts [`Share::add_exported_bytes`].
    pub(crate) fn subtract_exported_bytes(&self, bytes: u64) {
        if let Some(slot) = self.own_slot() {
            Word::fetch_sub(&slot.exported_bytes, bytes);
        }
    }

    /// Publishes how much memory of other processes this process has open without a charge.
    pub(crate) fn set_opened_bytes(&self, bytes: u64) {
        if let Some(slot) = self.own_slot() {
            Word::store(&slot.opened_bytes, bytes);
        }
    }

    /// Returns the bytes that the share's processes have exported.
    pub(crate) fn exported_bytes(&self) -> u64 {
        self.region().map_or(0, |region| region.exported_bytes())
    }

    /// Returns the bytes that the share's processes have open without a charge.
    pub(crate) fn opened_bytes(&self) -> u64 {
        self.region().map_or(0, |region| region.opened_bytes())
    }

    pub(crate) fn count_denied(&self) {
        let Some((region, slot)) = self.own() else {
            return;
        };
        Word::fetch_add(&region.header().denied, 1);
        if let Some(slot) = region.slot(slot) {
            Word::fetch_add(&slot.denied, 1);
        }
    }

    /// Returns the available memory.
    #[inline]
    pub(crate) fn headroom(&self) -> Headroom {
        let limit = self.grantable_bytes();
        let uncounted = |bytes| Headroom {
            bytes,
            valid_until_ns: u64::MAX,
        };
        match self.own() {
            Some((region, _)) => {
                // Read first: a total read before the reclaim would be outdated.
                let valid_until_ns = self.reclaimed_until_ns.load(Ordering::Acquire);
                Headroom {
                    bytes: limit.saturating_sub(region.total_bytes()),
                    valid_until_ns,
                }
            }
            None if self.fails_open() => uncounted(u64::MAX),
            // A share without a usable region grants nothing.
            None => uncounted(0),
        }
    }

    /// Reclaims the slots and the memory of dead processes. The caller holds the process's guard.
    pub(crate) fn reclaim(&self) {
        let Some((region, own)) = self.own() else {
            return;
        };
        let now_ns = sys::now_ns();
        let mut checked_slots = 1u64;
        let mut fd = None;
        // Orphaned slots are checked again after all deaths are known.
        for is_first in [true, false] {
            for index in (0..region.slots().len()).filter_map(SlotIndex::new) {
                let is_due = if is_first {
                    !region.is_free(index)
                } else {
                    region.is_orphaned(index)
                };
                if index == own || !is_due {
                    continue;
                }
                fd = fd.or_else(|| self.region_fd());
                let Some(fd) = fd else { return };
                checked_slots = checked_slots.saturating_add(1);
                // Holding the lock proves that the owner is dead, and excludes other processes from the slot.
                if sys::lock(fd, index.offset(), SLOT_SIZE) {
                    region.reclaim_slot(index);
                    sys::unlock(fd, index.offset(), SLOT_SIZE);
                }
            }
        }
        if region.rebuild(own) == Rebuild::Exact && now_ns != 0 {
            let valid_ns = checked_slots
                .saturating_mul(RECLAIM_VALID_NS)
                .min(MAX_RECLAIM_VALID_NS);
            self.reclaimed_until_ns
                .store(now_ns.saturating_add(valid_ns), Ordering::Release);
        }
    }

    fn fails_open(&self) -> bool {
        self.fails_open.load(Ordering::Relaxed) != 0
    }

    /// Returns a descriptor of the region for locks on other slots. If the program has closed the original
    /// descriptor, its number may belong to another file, on which a lock has no effect; then the region is
    /// reopened. (The lock on the own slot needs no descriptor: the mapping keeps the open file, and so its locks.)
    /// The caller holds the process's guard.
    fn region_fd(&self) -> Option<Fd> {
        // Stored inverted: zero means none.
        let fd = Fd(!self.region_fd.load(Ordering::Relaxed));
        if self.is_region(fd) {
            return Some(fd);
        }
        // SAFETY: never written after the share is published.
        let path = unsafe { &*self.region_path.get() };
        let fd = sys::open(None, path.as_c_str(), REGION_FLAGS, 0)
            .and_then(sys::above_standard_streams)?;
        if self.is_region(fd) {
            self.region_fd.store(!fd.0, Ordering::Relaxed);
            return Some(fd);
        }
        sys::close(fd);
        None
    }

    /// Returns whether the descriptor refers to the mapped file.
    fn is_region(&self, fd: Fd) -> bool {
        sys::status(fd).is_some_and(|status| {
            status.device == self.region_device.load(Ordering::Relaxed)
                && status.inode == self.region_inode.load(Ordering::Relaxed)
        })
    }

    fn region(&self) -> Option<Region<'static, RegionWord>> {
        NonNull::new(self.region.load(Ordering::Acquire)).map(view)
    }

    /// Returns the region and this process's slot.
    fn own(&self) -> Option<(Region<'static, RegionWord>, SlotIndex)> {
        let region = self.region()?;
        let slot = SlotIndex::new(usize::try_from(self.slot.load(Ordering::Relaxed)).ok()?)?;
        // Only corruption of the region takes a slot from a live process; then its usage cannot be counted.
        region
            .is_owned(slot, self.generation.load(Ordering::Relaxed))
            .then_some((region, slot))
    }

    /// Reads the page again if its hint has changed.
    fn refresh(&self) {
        let Some(page) = NonNull::new(self.page.load(Ordering::Acquire)) else {
            return;
        };
        let hint = page_words(page)
            .get(CURRENT_WORD)
            .map_or(0, |word| word.load(Ordering::Acquire));
        if hint != self.seen_generation.load(Ordering::Relaxed) {
            self.reread(page, hint);
        }
    }

    #[cold]
    fn reread(&self, page: NonNull<AtomicU64>, hint: u64) {
        // An unreadable page leaves the limits unchanged.
        let Some(content) = read_page(page) else {
            return;
        };
        self.set_limits(&content.spec.limits);
        self.seen_generation.store(hint, Ordering::Relaxed);
    }

    fn set_limits(&self, limits: &Limits) {
        let limit = limits.memory_limit_bytes.unwrap_or(NO_LIMIT);
        self.limit_bytes.store(limit, Ordering::Relaxed);
        self.driver_reserve_bytes
            .store(limits.driver_reserve_bytes, Ordering::Relaxed);
        self.driver_excess_bytes
            .store(limits.driver_excess_bytes, Ordering::Relaxed);
        self.driver_surplus_bytes
            .store(limits.driver_surplus_bytes, Ordering::Relaxed);
        self.lent_bytes.store(limits.lent_bytes, Ordering::Relaxed);
        let spills = limits.memory_policy == MemoryPolicy::Spill;
        self.spills.store(u32::from(spills), Ordering::Relaxed);
        self.compute.store(compute::pack(limits), Ordering::Relaxed);
        let open = limits.broken_region == BrokenRegion::Open;
        self.fails_open.store(u32::from(open), Ordering::Relaxed);
        let can_suspend = u32::from(limits.can_suspend);
        self.can_suspend.store(can_suspend, Ordering::Relaxed);
    }
}
