//! The mapped files of a share: reads the limits page and views the usage region.

use core::ffi::c_void;
use core::mem::size_of;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::ledger::{Owner, Region};
use drava_vgpu_abi::region::{
    Header, REGION_ABI_VERSION, REGION_MAGIC, SLOT_COUNT, SLOT_SIZE, SLOTS_OFFSET, Slot, SlotIndex,
};
use drava_vgpu_abi::{LimitsPage, PAGE_SIZE, decode};

use super::{AttachError, RegionWord};
use crate::limits::identity;
use crate::system::log;
use crate::system::sys::{self, Fd};

const PAGE_WORDS: usize = PAGE_SIZE / size_of::<u64>();

/// Number of attempts to read a page that is being changed.
const PAGE_READS: u32 = 16;

/// Maps a page and decodes it.
pub(super) fn map_page(fd: Fd) -> Option<(NonNull<AtomicU64>, LimitsPage)> {
    if sys::status(fd)?.size < PAGE_SIZE as u64 {
        return None;
    }
    let mapping = sys::map_file(fd, PAGE_SIZE, false)?.cast::<AtomicU64>();
    let page = read_page(mapping);
    if page.is_none() {
        sys::unmap(mapping.cast(), PAGE_SIZE);
    }
    page.map(|page| (mapping, page))
}

pub(super) fn page_words(page: NonNull<AtomicU64>) -> &'static [AtomicU64] {
    // SAFETY: `map_page` mapped a whole page, which stays mapped while the share refers to it.
    unsafe { slice::from_raw_parts(page.as_ptr(), PAGE_WORDS) }
}

/// Copies and decodes a mapped page. The node driver may be changing it; a torn copy is read again.
pub(super) fn read_page(page: NonNull<AtomicU64>) -> Option<LimitsPage> {
    for _ in 0..PAGE_READS {
        let mut copy = [0u8; PAGE_SIZE];
        for (target, word) in copy
            .chunks_exact_mut(size_of::<u64>())
            .zip(page_words(page))
        {
            target.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
        }
        match decode(&copy) {
            Ok(page) => return Some(page),
            Err(drava_vgpu_abi::PageError::Records) => core::hint::spin_loop(),
            Err(error) => {
                log::line(format_args!("{error}"));
                return None;
            }
        }
    }
    log::line(format_args!("{}", drava_vgpu_abi::PageError::Records));
    None
}

pub(super) fn view(mapping: NonNull<c_void>) -> Region<'static, RegionWord> {
    // SAFETY: `REGION_SIZE` bytes are mapped, aligned to a page and never unmapped while the share refers to it.
    let header = unsafe { mapping.cast::<Header<RegionWord>>().as_ref() };
    // SAFETY: the slots begin inside that mapping.
    let slots = unsafe { mapping.byte_add(SLOTS_OFFSET) }.cast::<Slot<RegionWord>>();
    // SAFETY: `SLOT_COUNT` slots end with the mapping; all of their words are atomics.
    let slots = unsafe { slice::from_raw_parts(slots.as_ptr(), SLOT_COUNT) };
    Region::new(header, slots)
}

/// Initializes a new region, or checks that it has this version.
pub(super) fn check(region: &Region<'_, RegionWord>) -> Result<(), AttachError> {
    let header = region.header();
    for (word, value) in [
        (&header.abi_version, REGION_ABI_VERSION),
        (&header.magic, REGION_MAGIC),
    ] {
        match Word::compare_exchange(word, 0, value) {
            Ok(_) => {}
            Err(found) if found == value => {}
            Err(_) => return Err(AttachError::Content),
        }
    }
    Ok(())
}

/// Takes a free slot, or else the slot of a dead process.
pub(super) fn acquire_slot(
    region: &Region<'_, RegionWord>,
    fd: Fd,
) -> Result<(SlotIndex, u64), AttachError> {
    let owner: Owner = identity::own();
    for must_be_free in [true, false] {
        for index in (0..SLOT_COUNT).filter_map(SlotIndex::new) {
            // An orphaned slot still counts memory; see `Region::reclaim_slot`.
            if (must_be_free && !region.is_free(index)) || region.is_orphaned(index) {
                continue;
            }
            if !sys::lock(fd, index.offset(), SLOT_SIZE) {
                continue;
            }
            // The slot may have been taken, and its owner may have died, since its state was read.
            if !must_be_free || region.is_free(index) {
                let generation = region.acquire_slot(index, owner).ok_or(AttachError::Full)?;
                return Ok((index, generation));
            }
            sys::unlock(fd, index.offset(), SLOT_SIZE);
        }
    }
    Err(AttachError::Full)
}
