//! One share: its limits page, its usage region, and this process's slot there.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::mem::size_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::ledger::{Rebuild, Region};
use drava_vgpu_abi::page::CURRENT_OFFSET;
use drava_vgpu_abi::region::{SLOT_SIZE, SlotIndex};
use drava_vgpu_abi::{BrokenRegion, DeviceUuid, Limits, MemoryPolicy, PAGE_SIZE};

use crate::path::PathBuffer;
use crate::sys::{self, Fd};

mod attach;
mod compute;
mod mapping;
pub(crate) mod usage;

pub(crate) use attach::AttachError;
use mapping::{map_page, page_words, read_page, view};

/// The words of the region as the protocol steps on them.
#[cfg(not(feature = "kill-points"))]
pub(crate) type RegionWord = AtomicU64;
#[cfg(feature = "kill-points")]
pub(crate) use crate::kill_points::RegionWord;

/// Which of the page's words is the generation hint.
const CURRENT_WORD: usize = CURRENT_OFFSET / size_of::<u64>();

const NO_LIMIT: u64 = u64::MAX;

/// For how long a look for dead processes counts, for each process that was checked_slots at. To look at one takes a
/// system call of half a microsecond; so a program that is refused over and over spends little on looking,
/// and a death is noticed before anybody who learns of it otherwise can ask for memory.
const RECLAIM_VALID_NS: u64 = 8_000;
/// The longest that a look counts, whatever the number of processes.
const MAX_RECLAIM_VALID_NS: u64 = 1_000_000;

const REGION_FLAGS: c_int = libc::O_RDWR | libc::O_NOFOLLOW;

/// A share. All zeroes is none.
pub(crate) struct Share {
    /// Written before the share is published, never after.
    uuid: UnsafeCell<DeviceUuid>,
    /// Paths of the page and the region; as `uuid`.
    page_path: UnsafeCell<PathBuffer>,
    region_path: UnsafeCell<PathBuffer>,
    /// The mapped page; null if the limits come from the environment.
    page: AtomicPtr<AtomicU64>,
    /// The page's generation hint when the limits below were read.
    seen_generation: AtomicU64,
    limit_bytes: AtomicU64,
    driver_reserve_bytes: AtomicU64,
    /// Taken by the driver beyond what it was charged, by the page.
    driver_excess_bytes: AtomicU64,
    fails_open: AtomicU32,
    spills: AtomicU32,
    /// Compute policy, guarantee and rate, see [`Share::set_limits`].
    compute: AtomicU64,
    /// The mapped region; null if it cannot be used.
    region: AtomicPtr<c_void>,
    region_fd: AtomicI32,
    /// Which file that descriptor was opened for.
    region_device: AtomicU64,
    region_inode: AtomicU64,
    slot: AtomicU32,
    generation: AtomicU64,
    /// Until when the last look for dead processes counts, see [`RECLAIM_VALID_NS`]; 0 if it does not.
    reclaimed_until_ns: AtomicU64,
    /// What NVML is asked about.
    usage_reading: usage::UsageReading,
}

/// What can be taken at this moment.
#[derive(Clone, Copy)]
pub(crate) struct Headroom {
    pub(crate) bytes: u64,
    /// Until then there is nothing more that dead processes left.
    pub(crate) valid_until_ns: u64,
}

impl Headroom {
    /// That of both together.
    #[inline]
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            valid_until_ns: self.valid_until_ns.min(other.valid_until_ns),
        }
    }
}

// SAFETY: `uuid` and the paths are written by one thread before the others can see the share; the rest are atomics.
unsafe impl Sync for Share {}

impl Share {
    /// The card.
    pub(crate) fn uuid(&self) -> DeviceUuid {
        // SAFETY: not written any more once the share can be seen.
        unsafe { self.uuid.get().read() }
    }

    pub(crate) fn is_memory_limited(&self) -> bool {
        self.limit_bytes() != NO_LIMIT
    }

    /// The limit at this moment.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.refresh();
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// What this share's processes may take together: the limit less what the driver took unasked.
    fn grantable_bytes(&self) -> u64 {
        let limit = self.limit_bytes();
        if limit == NO_LIMIT {
            return limit;
        }
        limit.saturating_sub(self.driver_excess_bytes.load(Ordering::Relaxed))
    }

    pub(crate) fn driver_reserve_bytes(&self) -> u64 {
        self.refresh();
        self.driver_reserve_bytes.load(Ordering::Relaxed)
    }

    /// Whether plain allocations beyond the limit become managed memory.
    pub(crate) fn spills(&self) -> bool {
        self.refresh();
        self.spills.load(Ordering::Relaxed) != 0
    }

    /// Bytes taken by all processes of the share, and by the driver in them.
    pub(crate) fn used_bytes(&self) -> u64 {
        let counted = self.region().map_or(0, |region| region.total_bytes());
        counted.saturating_add(self.driver_excess_bytes.load(Ordering::Relaxed))
    }

    /// Takes `bytes` if they fit without further ado.
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        let limit = self.grantable_bytes();
        match self.own() {
            Some((region, slot)) => region.reserve(slot, bytes, limit).is_ok(),
            None => self.fails_open(),
        }
    }

    /// Takes `bytes`, or makes sure that they are not there. The caller holds the process's guard.
    pub(crate) fn reserve_or_rebuild(&self, bytes: u64) -> bool {
        let limit = self.grantable_bytes();
        match self.own() {
            Some((region, slot)) => region.reserve_or_rebuild(slot, bytes, limit).is_ok(),
            None => self.fails_open(),
        }
    }

    /// Takes as much of `bytes` as there is.
    pub(crate) fn reserve_up_to(&self, bytes: u64) -> u64 {
        let limit = self.grantable_bytes();
        match self.own() {
            Some((region, slot)) => region.reserve_up_to(slot, bytes, limit),
            None if self.fails_open() => bytes,
            None => 0,
        }
    }

    /// Takes `bytes` whatever the limit.
    pub(crate) fn charge(&self, bytes: u64) {
        if let Some((region, slot)) = self.own() {
            region.charge(slot, bytes);
        }
    }

    /// Returns up to `bytes` and says how much this process held here.
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

    /// Notes that others may open so much of what this process holds.
    pub(crate) fn add_exported_bytes(&self, bytes: u64) {
        if let Some(slot) = self.own_slot() {
            Word::fetch_add(&slot.exported_bytes, bytes);
        }
    }

    /// Takes back what [`Share::add_exported_bytes`] noted.
    pub(crate) fn subtract_exported_bytes(&self, bytes: u64) {
        if let Some(slot) = self.own_slot() {
            Word::fetch_sub(&slot.exported_bytes, bytes);
        }
    }

    /// Notes how much of others' memory this process has open without paying for it.
    pub(crate) fn set_opened_bytes(&self, bytes: u64) {
        if let Some(slot) = self.own_slot() {
            Word::store(&slot.opened_bytes, bytes);
        }
    }

    /// What processes of the share have made available to others.
    pub(crate) fn exported_bytes(&self) -> u64 {
        self.region().map_or(0, |region| region.exported_bytes())
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

    /// What of it can be taken.
    #[inline]
    pub(crate) fn headroom(&self) -> Headroom {
        let limit = self.grantable_bytes();
        let uncounted = |bytes| Headroom {
            bytes,
            valid_until_ns: u64::MAX,
        };
        match self.own() {
            Some((region, _)) => {
                // First, or what is read of the total may be of before that look.
                let valid_until_ns = self.reclaimed_until_ns.load(Ordering::Acquire);
                Headroom {
                    bytes: limit.saturating_sub(region.total_bytes()),
                    valid_until_ns,
                }
            }
            None if self.fails_open() => uncounted(u64::MAX),
            // Nothing is ever taken from a share that cannot be counted in.
            None => uncounted(0),
        }
    }

    /// Clears the slots of dead processes and takes back what they held. The caller holds the process's guard.
    pub(crate) fn reclaim(&self) {
        let Some((region, own)) = self.own() else {
            return;
        };
        let now_ns = sys::now_ns();
        let mut checked_slots = 1u64;
        let mut fd = None;
        // What dead processes left behind is checked_slots at again once it is known who else is dead.
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
                // Getting the lock proves that the owner is dead, and keeps others from the slot meanwhile.
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

    /// A descriptor of the region for locks on other slots. If the program has closed the one that was opened at
    /// first, its number may be another file's by now, on which a lock means nothing; then the region is opened
    /// anew. (The lock on the own slot needs no descriptor: the mapping keeps the open file, and so its locks.)
    /// The caller holds the process's guard.
    fn region_fd(&self) -> Option<Fd> {
        // Stored inverted, so that zeroes mean none.
        let fd = Fd(!self.region_fd.load(Ordering::Relaxed));
        if self.is_region(fd) {
            return Some(fd);
        }
        // SAFETY: not written any more once the share can be seen.
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

    /// Whether the descriptor is one of the file that is mapped.
    fn is_region(&self, fd: Fd) -> bool {
        sys::status(fd).is_some_and(|status| {
            status.device == self.region_device.load(Ordering::Relaxed)
                && status.inode == self.region_inode.load(Ordering::Relaxed)
        })
    }

    fn region(&self) -> Option<Region<'static, RegionWord>> {
        NonNull::new(self.region.load(Ordering::Acquire)).map(view)
    }

    /// The region and this process's slot.
    fn own(&self) -> Option<(Region<'static, RegionWord>, SlotIndex)> {
        let region = self.region()?;
        let slot = SlotIndex::new(usize::try_from(self.slot.load(Ordering::Relaxed)).ok()?)?;
        // Only noise in the region takes a slot from a live_processes process; what that takes then cannot be counted.
        region
            .is_owned(slot, self.generation.load(Ordering::Relaxed))
            .then_some((region, slot))
    }

    /// Reads the page again if its hint says that it changed.
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
        // An unreadable page leaves the limits as they were.
        let Some(content) = read_page(page) else {
            return;
        };
        self.set_limits(&content.spec.limits);
        if content.retired {
            // Until its successor is there this is tried again at each look.
            self.switch_to_successor(page);
        } else {
            self.seen_generation.store(hint, Ordering::Relaxed);
        }
    }

    /// Turns to the page that stands at the path of a retired one.
    fn switch_to_successor(&self, retired: NonNull<AtomicU64>) {
        // SAFETY: not written any more once the share can be seen.
        let path = unsafe { &*self.page_path.get() };
        let Some(fd) = sys::open(None, path.as_c_str(), libc::O_RDONLY, 0) else {
            return;
        };
        let opened = map_page(fd);
        sys::close(fd);
        let Some((mapping, content)) = opened else {
            return;
        };
        let is_successor = !content.retired && content.spec.device_uuid == self.uuid();
        // Other threads may still be reading the retired page, which therefore stays mapped.
        let is_mine = is_successor
            && self
                .page
                .compare_exchange(
                    retired.as_ptr(),
                    mapping.as_ptr(),
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                )
                .is_ok();
        if is_mine {
            self.set_limits(&content.spec.limits);
            self.seen_generation
                .store(content.generation, Ordering::Relaxed);
        } else {
            sys::unmap(mapping.cast(), PAGE_SIZE);
        }
    }

    fn set_limits(&self, limits: &Limits) {
        let limit = limits.memory_limit_bytes.unwrap_or(NO_LIMIT);
        self.limit_bytes.store(limit, Ordering::Relaxed);
        self.driver_reserve_bytes
            .store(limits.driver_reserve_bytes, Ordering::Relaxed);
        self.driver_excess_bytes
            .store(limits.driver_excess_bytes, Ordering::Relaxed);
        let spills = limits.memory_policy == MemoryPolicy::Spill;
        self.spills.store(u32::from(spills), Ordering::Relaxed);
        self.compute.store(compute::pack(limits), Ordering::Relaxed);
        let open = limits.broken_region == BrokenRegion::Open;
        self.fails_open.store(u32::from(open), Ordering::Relaxed);
    }
}
