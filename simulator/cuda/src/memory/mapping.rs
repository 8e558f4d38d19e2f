//! Address ranges of this process: mapped or reserved.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use simulator_machine::kernel::PAGE_BYTES;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// A mapped range.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: u64,
    length: usize,
    on_drop: DropAction,
}

/// Effect of dropping a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DropAction {
    Unmapped,
    /// The range lies in a [`Reservation`].
    Reserved,
}

fn pointer(address: u64) -> Result<*mut std::ffi::c_void, Errno> {
    let address = usize::try_from(address).map_err(|_| Errno::NOMEM)?;
    Ok(std::ptr::with_exposed_provenance_mut(address))
}

fn length(bytes: u64) -> Result<usize, Errno> {
    usize::try_from(bytes).map_err(|_| Errno::NOMEM)
}

impl Mapping {
    /// Maps a range of a GPU's memory file at a multiple of the page size.
    pub(crate) fn of_file(memory: &OwnedFd, offset: u64, bytes: u64) -> Result<Self, Errno> {
        Self::of_file_aligned(memory, offset, bytes, PAGE_BYTES)
    }

    /// Maps a range of a GPU's memory file at a multiple of `alignment`, a power of two.
    pub(crate) fn of_file_aligned(
        memory: &OwnedFd,
        offset: u64,
        bytes: u64,
        alignment: u64,
    ) -> Result<Self, Errno> {
        let Reservation(range) = Reservation::new(bytes, alignment)?;
        range.map_file(memory, offset)?;
        Ok(range)
    }

    fn map_file(&self, memory: &OwnedFd, offset: u64) -> Result<(), Errno> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        let base = pointer(self.base)?;
        // SAFETY: the mapping owns the range, and its previous content is unused.
        unsafe { mmap(base, self.length, READ_WRITE, flags, memory, offset) }?;
        Ok(())
    }

    pub(crate) fn anonymous(bytes: u64) -> Result<Self, Errno> {
        let length = length(bytes)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses unused addresses.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, READ_WRITE, flags) }?;
        Ok(Self {
            base: base.expose_provenance() as u64,
            length,
            on_drop: DropAction::Unmapped,
        })
    }

    /// Maps a range of a GPU's memory file at a reserved, unmapped address.
    pub(crate) fn place(
        reservation: &Reservation,
        at: u64,
        memory: &OwnedFd,
        offset: u64,
        bytes: u64,
    ) -> Result<Self, Errno> {
        if !reservation.contains(at, bytes) {
            return Err(Errno::INVAL);
        }
        let range = Self {
            base: at,
            length: length(bytes)?,
            on_drop: DropAction::Reserved,
        };
        range.map_file(memory, offset)?;
        Ok(range)
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
        let Ok(base) = pointer(self.base) else {
            return;
        };
        match self.on_drop {
            DropAction::Unmapped => {
                // SAFETY: the mapping owns the range; pointers into it point to freed memory.
                let _ = unsafe { munmap(base, self.length) };
            }
            DropAction::Reserved => {
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
                // SAFETY: as above; the range stays reserved.
                let _ = unsafe { mmap_anonymous(base, self.length, ProtFlags::empty(), flags) };
            }
        }
    }
}

/// A reserved address range. Mappings placed in it must be dropped first.
#[derive(Debug)]
pub(crate) struct Reservation(Mapping);

impl Reservation {
    /// KernelReserves a range at a multiple of `alignment`, a power of two.
    pub(crate) fn new(bytes: u64, alignment: u64) -> Result<Self, Errno> {
        let padded = bytes.checked_add(alignment).ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let (anywhere, nothing) = (std::ptr::null_mut(), ProtFlags::empty());
        let padded_length = length(padded)?;
        // SAFETY: without MAP_FIXED the kernel chooses unused addresses.
        let start = unsafe { mmap_anonymous(anywhere, padded_length, nothing, flags) }?;
        let start = start.expose_provenance() as u64;
        let base = start.next_multiple_of(alignment);
        let range = Mapping {
            base,
            length: length(bytes)?,
            on_drop: DropAction::Unmapped,
        };
        for (from, to) in [(start, base), (base + bytes, start + padded)] {
            if from < to {
                let (unneeded, length) = (pointer(from)?, length(to - from)?);
                // SAFETY: the part outside the aligned range has no other users.
                unsafe { munmap(unneeded, length) }?;
            }
        }
        Ok(Self(range))
    }

    pub(crate) fn base(&self) -> u64 {
        self.0.base()
    }

    pub(crate) fn length(&self) -> u64 {
        self.0.length()
    }

    pub(crate) fn contains(&self, address: u64, bytes: u64) -> bool {
        address
            .checked_sub(self.base())
            .and_then(|offset| offset.checked_add(bytes))
            .is_some_and(|end| end <= self.length())
    }
}
