//! Physical memory that other processes can open.
//!
//! A file descriptor keeps exported memory alive like a handle. libcuda does not report its end, so the descriptors
//! are checked when the last handle and mapping are gone, and afterwards before a denial and at a query of the
//! usage. The charge then moves to an open descriptor.
//!
//! Another process of the share that has the memory open is not charged for it ([`crate::limits::imports`]). So the charge
//! stays here as far as the processes of the share have more open than they export.
//!
//! Invariant: no record has a handle as its key or memory after the handle's end. So descriptors are detached from it
//! before.

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use crate::accounts::records::{Descriptor, Origin, Physical};
use crate::driver_api::cuda::CUmemGenericAllocationHandle;
use crate::limits::gpu::Gpu;
use crate::process::Process;
use crate::system::sys::{self, Fd};

/// Position of the file's identity in a key. The low half is the descriptor, the highest bit is unused.
const FILE_SHIFT: u32 = 32;
const FILE_MASK: u64 = 0x7fff_ffff;

/// Returns the key of an open descriptor: a number is reused for another file.
fn key_of(fd: c_int) -> Option<u64> {
    let file = sys::status(Fd(fd))?.inode & FILE_MASK;
    Some(file << FILE_SHIFT | u64::from(fd.cast_unsigned()))
}

fn descriptor_of(key: u64) -> c_int {
    let [a, b, c, d, ..] = key.to_le_bytes();
    c_int::from_le_bytes([a, b, c, d])
}

fn is_open(key: u64) -> bool {
    key_of(descriptor_of(key)) == Some(key)
}

/// Records that other processes may open the memory, by a file descriptor if there is one.
pub(crate) fn add(
    process: &'static Process,
    handle: CUmemGenericAllocationHandle,
    fd: Option<c_int>,
) {
    let before = process.physical.change(handle, |memory| {
        let origin = match memory.origin {
            Origin::Own => Origin::Exported,
            other => other,
        };
        Some(Physical { origin, ..*memory })
    });
    let Some(memory) = before else { return };
    let Some(gpu) = process.gpu(memory.gpu) else {
        return;
    };
    if memory.origin == Origin::Own {
        gpu.export(memory.bytes);
    }
    if let Some(fd) = fd.filter(|_| memory.origin != Origin::Imported)
        && let Some(key) = key_of(fd)
    {
        // A record with this number is of a closed descriptor.
        end_closed(process, |key| descriptor_of(key) != fd);
        let descriptor = Descriptor {
            bytes: 0,
            gpu: gpu.index(),
            memory: handle,
        };
        process.descriptors.insert(key, descriptor);
    }
}

/// The descriptors of memory whose last handle or mapping is about to end.
#[derive(Clone, Copy)]
pub(crate) struct Descriptors(u64);

impl Descriptors {
    pub(crate) const NONE: Self = Self(0);
}

/// Detaches the descriptors of memory from its handle, which may recur.
pub(crate) fn detach(process: &Process, handle: CUmemGenericAllocationHandle) -> Descriptors {
    // No handle has the highest bit.
    let id = process.detached_count.fetch_add(1, Ordering::Relaxed) | 1 << 63;
    rename(process, handle, id);
    Descriptors(id)
}

/// Reverts [`detach`].
pub(crate) fn attach(
    process: &Process,
    descriptors: Descriptors,
    handle: CUmemGenericAllocationHandle,
) {
    if descriptors.0 != Descriptors::NONE.0 {
        rename(process, descriptors.0, handle);
    }
}

/// Replaces the memory of descriptors without a charge.
fn rename(process: &Process, from: u64, to: u64) {
    let renamed = |known: &Descriptor| {
        let is_of_memory = known.bytes == 0 && known.memory == from;
        is_of_memory.then_some(Descriptor {
            memory: to,
            ..*known
        })
    };
    process.descriptors.for_each(|key, known| {
        if renamed(&known).is_some() {
            let change = |known: &Descriptor| Some(renamed(known).unwrap_or(*known));
            process.descriptors.change(key, change);
        }
    });
}

/// Releases exported memory without handles and mappings, unless a descriptor keeps it alive.
pub(crate) fn release(process: &'static Process, gpu: Gpu, descriptors: Descriptors, bytes: u64) {
    let mut is_kept = false;
    process.descriptors.for_each(|key, known| {
        if known.bytes != 0 || known.memory != descriptors.0 {
            return;
        }
        let keeps = !is_kept && is_open(key);
        is_kept |= keeps;
        process.descriptors.change(key, |known| {
            keeps.then_some(Descriptor {
                bytes,
                memory: 0,
                ..*known
            })
        });
    });
    if !is_kept {
        gpu.end_export_charged(bytes);
    }
}

/// Releases the charges of closed descriptors, and of memory that no process of the share has open any more. Returns
/// whether there were any.
pub(crate) fn settle(process: &'static Process, gpu: Gpu) -> bool {
    let has_closed = end_closed(process, is_open);
    gpu.release_left_open() || has_closed
}

/// Removes the descriptors for which `is_open` is false, and releases their charges. Returns whether there were any.
fn end_closed(process: &'static Process, is_open: impl Fn(u64) -> bool) -> bool {
    let mut has_charge = false;
    process.descriptors.for_each(|key, _| {
        if is_open(key) {
            return;
        }
        let Some(closed) = process.descriptors.remove(key) else {
            return;
        };
        if let Some(gpu) = process.gpu(closed.gpu)
            && closed.bytes != 0
        {
            gpu.end_export_charged(closed.bytes);
            has_charge = true;
        }
    });
    has_charge
}
