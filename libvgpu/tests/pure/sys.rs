//! What the parts want of the system, from Rust's own allocator.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// As large as a page of memory.
const ALIGNMENT: usize = 4096;

pub(crate) fn map_zeroes(size: usize) -> Option<NonNull<c_void>> {
    // SAFETY: nobody asks for no bytes.
    NonNull::new(unsafe { alloc_zeroed(layout(size)) }.cast())
}

pub(crate) fn unmap(address: NonNull<c_void>, size: usize) {
    // SAFETY: callers give back what `map_zeroes` gave and hold no reference into it.
    unsafe { dealloc(address.as_ptr().cast(), layout(size)) };
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, ALIGNMENT).unwrap()
}

/// What locks begin at multiples of.
const WORD: usize = 8;

/// A file that is mapped as often as one likes, always at the same address.
pub(crate) struct File {
    memory: NonNull<c_void>,
    size: usize,
    /// Whether what begins at each word is locked.
    locked: Vec<AtomicBool>,
}

// SAFETY: what the pointer points to is looked at through atomics alone.
unsafe impl Sync for File {}
// SAFETY: as above.
unsafe impl Send for File {}

impl File {
    pub(crate) fn of_zeroes(size: usize) -> &'static Self {
        Box::leak(Box::new(Self {
            memory: map_zeroes(size).unwrap(),
            size,
            locked: (0..size / WORD).map(|_| AtomicBool::new(false)).collect(),
        }))
    }
}

pub(crate) fn yield_now() {
    std::thread::yield_now();
}

pub(crate) fn sleep_us(us: u64) {
    std::thread::sleep(std::time::Duration::from_micros(us));
}

/// An open file.
#[derive(Clone, Copy)]
pub(crate) struct Fd(pub(crate) &'static File);

pub(crate) struct FileStatus {
    pub(crate) size: u64,
}

pub(crate) fn status(fd: Fd) -> Option<FileStatus> {
    let size = fd.0.size as u64;
    Some(FileStatus { size })
}

pub(crate) fn map_file(fd: Fd, size: usize, _writable: bool) -> Option<NonNull<c_void>> {
    (size <= fd.0.size).then_some(fd.0.memory)
}

pub(crate) fn lock(fd: Fd, offset: usize, _length: usize) -> bool {
    !fd.0.locked[offset / WORD].swap(true, Ordering::SeqCst)
}

pub(crate) fn unlock(fd: Fd, offset: usize, _length: usize) {
    fd.0.locked[offset / WORD].store(false, Ordering::SeqCst);
}
