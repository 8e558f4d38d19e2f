//! A region word that kills its process with `SIGKILL` after a chosen step. For a test build only.
//!
//! `DRAVA_KILL_AFTER=n` kills the process right after its `n`th step that changes the region, as `kill -9` at that
//! moment would. `DRAVA_KILL_TRACE=file` appends a line with the source location of each step to the file.

use core::ffi::{CStr, c_char};
use core::panic::Location;
use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::atomic::Word;

use crate::system::path::PathBuffer;
use crate::system::sys;

unsafe extern "C" {
    fn secure_getenv(name: *const c_char) -> *const c_char;
    fn atoi(text: *const c_char) -> i32;
}

/// A word of the region; each change is a step.
#[repr(transparent)]
pub(crate) struct RegionWord(AtomicU64);

/// Number of steps so far.
static STEPS: AtomicU64 = AtomicU64::new(0);

#[track_caller]
fn step() {
    trace(Location::caller());
    // SAFETY: the name is terminated.
    let limit = unsafe { secure_getenv(c"DRAVA_KILL_AFTER".as_ptr()) };
    if limit.is_null() {
        return;
    }
    // SAFETY: not null and terminated.
    let limit = u64::try_from(unsafe { atoi(limit) }).unwrap_or(0);
    let steps = STEPS.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
    if steps == limit {
        // SAFETY: no arguments.
        let own = unsafe { libc::getpid() };
        // SAFETY: takes numbers.
        unsafe { libc::kill(own, libc::SIGKILL) };
    }
}

/// Appends the step to the trace file, if set.
fn trace(step: &Location<'_>) {
    // SAFETY: the name is terminated.
    let file = unsafe { secure_getenv(c"DRAVA_KILL_TRACE".as_ptr()) };
    if file.is_null() {
        return;
    }
    // SAFETY: not null and terminated.
    let file = unsafe { CStr::from_ptr(file) };
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT;
    let Some(file) = sys::open(None, file, flags, 0o600) else {
        return;
    };
    if let Some(line) = PathBuffer::new(format_args!("{}:{}\n", step.file(), step.line())) {
        let line = line.as_c_str();
        // SAFETY: the kernel reads as many bytes of the line.
        unsafe { libc::write(file.0, line.as_ptr().cast(), line.count_bytes()) };
    }
    sys::close(file);
}

impl Word for RegionWord {
    fn load(&self) -> u64 {
        Word::load(&self.0)
    }

    #[track_caller]
    fn store(&self, value: u64) {
        Word::store(&self.0, value);
        step();
    }

    #[track_caller]
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        let result = Word::compare_exchange(&self.0, current, new);
        if result.is_ok() {
            step();
        }
        result
    }

    #[track_caller]
    fn fetch_add(&self, value: u64) -> u64 {
        let found = Word::fetch_add(&self.0, value);
        step();
        found
    }

    #[track_caller]
    fn fetch_sub(&self, value: u64) -> u64 {
        let found = Word::fetch_sub(&self.0, value);
        step();
        found
    }
}
