//! A region whose user dies by `SIGKILL` after a chosen step: in a build for tests, never in the product.
//!
//! `DRAVA_KILL_AFTER=n` lets the process live through `n` steps that change the region and kills it right after
//! the last of them, as `kill -9` at that moment would.

use core::ffi::c_char;
use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::atomic::Word;

unsafe extern "C" {
    fn secure_getenv(name: *const c_char) -> *const c_char;
    fn atoi(text: *const c_char) -> i32;
}

/// A word of the region, each change of which is a step.
#[repr(transparent)]
pub(crate) struct RegionWord(AtomicU64);

/// Steps taken so far.
static STEPS: AtomicU64 = AtomicU64::new(0);

fn step() {
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

impl Word for RegionWord {
    fn load(&self) -> u64 {
        Word::load(&self.0)
    }

    fn store(&self, value: u64) {
        Word::store(&self.0, value);
        step();
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        let result = Word::compare_exchange(&self.0, current, new);
        if result.is_ok() {
            step();
        }
        result
    }

    fn fetch_add(&self, value: u64) -> u64 {
        let found = Word::fetch_add(&self.0, value);
        step();
        found
    }

    fn fetch_sub(&self, value: u64) -> u64 {
        let found = Word::fetch_sub(&self.0, value);
        step();
        found
    }
}
