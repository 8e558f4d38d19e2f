//! Ranges of this process's address space that it owns: with memory behind them, or only reserved.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use simulator_machine::kernel::PAGE_BYTES;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// A range with memory behind it.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: u64,
    length: usize,
    end: End,
}

/// What becomes of a range when its mapping is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Unmapped,
    /// It lies in a [`Reservation`].
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
    /// Maps a range of a card's memory, at a multiple of the granularity as all device memory.
    pub(crate) fn of_memory(memory: &OwnedFd, offset: u64, bytes: u64) -> Result<Self, Errno> {
        Self::aligned(memory, offset, bytes, PAGE_BYTES)
    }

    /// Maps a range of a card's memory at a multiple of `alignment`, a power of two.
    pub(crate) fn aligned(
        memory: &OwnedFd,
        offset: u64,
        bytes: u64,
        alignment: u64,
    ) -> Result<Self, Errno> {
        let Reservation(range) = Reservation::new(bytes, alignment)?;
        range.back(memory, offset)?;
        Ok(range)
    }

    /// Puts a card's memory behind the range.
    fn back(&self, memory: &OwnedFd, offset: u64) -> Result<(), Errno> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        let base = pointer(self.base)?;
        // SAFETY: the range is ours, and what was behind it is not used any more.
        unsafe { mmap(base, self.length, READ_WRITE, flags, memory, offset) }?;
        Ok(())
    }

    /// Maps fresh host memory.
    pub(crate) fn anonymous(bytes: u64) -> Result<Self, Errno> {
        let length = length(bytes)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, READ_WRITE, flags) }?;
        Ok(Self {
            base: base.expose_provenance() as u64,
            length,
            end: End::Unmapped,
        })
    }

    /// Maps a range of a card's memory at a reserved address where nothing is mapped yet.
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
            end: End::Reserved,
        };
        range.back(memory, offset)?;
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
        match self.end {
            End::Unmapped => {
                // SAFETY: the range is ours; what still points into it is freed memory to its user.
                let _ = unsafe { munmap(base, self.length) };
            }
            End::Reserved => {
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
                // SAFETY: as above; the range stays reserved.
                let _ = unsafe { mmap_anonymous(base, self.length, ProtFlags::empty(), flags) };
            }
        }
    }
}

/// A range that nothing else will be mapped into. What is placed in it must be dropped first.
#[derive(Debug)]
pub(crate) struct Reservation(Mapping);

impl Reservation {
    /// Reserves a range whose first byte is a multiple of `alignment`, a power of two.
    pub(crate) fn new(bytes: u64, alignment: u64) -> Result<Self, Errno> {
        let padded = bytes.checked_add(alignment).ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let (anywhere, nothing) = (std::ptr::null_mut(), ProtFlags::empty());
        let padded_length = length(padded)?;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
        let start = unsafe { mmap_anonymous(anywhere, padded_length, nothing, flags) }?;
        let start = start.expose_provenance() as u64;
        let base = start.next_multiple_of(alignment);
        let range = Mapping {
            base,
            length: length(bytes)?,
            end: End::Unmapped,
        };
        for (from, to) in [(start, base), (base + bytes, start + padded)] {
            if from < to {
                let (unneeded, length) = (pointer(from)?, length(to - from)?);
                // SAFETY: the part before or behind the aligned range, which nobody else knows of.
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

    /// Whether a range lies in this one.
    pub(crate) fn contains(&self, address: u64, bytes: u64) -> bool {
        address
            .checked_sub(self.base())
            .and_then(|offset| offset.checked_add(bytes))
            .is_some_and(|end| end <= self.length())
    }
}
