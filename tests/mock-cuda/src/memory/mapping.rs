//! A range of this process's address space that it owns.

use std::os::fd::OwnedFd;

use drava_mock_machine::kernel::PAGE_BYTES;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: u64,
    length: usize,
}

impl Mapping {
    /// Maps a range of a card's memory.
    pub(crate) fn of_memory(memory: &OwnedFd, offset: u64, bytes: u64) -> Result<Self, Errno> {
        let length = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        let place = Self::aligned(length)?;
        let base = std::ptr::with_exposed_provenance_mut(place.address()?);
        // SAFETY: `place` owns these addresses.
        unsafe { mmap(base, length, access, flags, memory, offset) }?;
        Ok(place)
    }

    /// Addresses without memory that begin at a multiple of the granularity, as all device memory does.
    fn aligned(length: usize) -> Result<Self, Errno> {
        let spare = usize::try_from(PAGE_BYTES).map_err(|_| Errno::NOMEM)?;
        let reserved = length.checked_add(spare).ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let start = std::ptr::null_mut();
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
        let start = unsafe { mmap_anonymous(start, reserved, ProtFlags::empty(), flags) }?;
        let start = start.addr();
        let base = start.next_multiple_of(spare);
        let (before, after) = (base - start, start + spare - base);
        for (part, length) in [(start, before), (base + length, after)] {
            if length != 0 {
                // SAFETY: a part of what was mapped just now, outside of what is kept.
                unsafe { munmap(std::ptr::with_exposed_provenance_mut(part), length) }?;
            }
        }
        Ok(Self {
            base: base as u64,
            length,
        })
    }

    /// Maps fresh host memory.
    pub(crate) fn anonymous(bytes: u64) -> Result<Self, Errno> {
        let length = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, flags) }?;
        Ok(Self {
            base: base.addr() as u64,
            length,
        })
    }

    fn address(&self) -> Result<usize, Errno> {
        usize::try_from(self.base).map_err(|_| Errno::NOMEM)
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn length(&self) -> u64 {
        self.length as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Ok(base) = usize::try_from(self.base) {
            // SAFETY: the range is ours; what still points into it is freed memory to its user.
            let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(base), self.length) };
        }
    }
}
