//! System interface of the modules under test, implemented with Rust's allocator.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// The size of a memory page.
const ALIGNMENT: usize = 4096;

pub(crate) fn map_zeroes(size: usize) -> Option<NonNull<c_void>> {
    // SAFETY: the size is not zero.
    NonNull::new(unsafe { alloc_zeroed(layout(size)) }.cast())
}

pub(crate) fn unmap(address: NonNull<c_void>, size: usize) {
    // SAFETY: callers give back what `map_zeroes` gave and hold no reference into it.
    unsafe { dealloc(address.as_ptr().cast(), layout(size)) };
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, ALIGNMENT).unwrap()
}

/// Alignment of locked ranges.
const WORD: usize = 8;

/// A file with one mapping, shared by all callers.
pub(crate) struct File {
    memory: NonNull<c_void>,
    size: usize,
    /// Lock state of the range that begins at each word.
    locked: Vec<AtomicBool>,
}

// SAFETY: the memory is accessed only through atomics.
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
