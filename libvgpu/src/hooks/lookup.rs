//! `cuInit` and the result of `cuGetProcAddress`: entry points inside libcuda.
//!
//! `cuGetProcAddress` resolves a base name, version and flags in a way that only libcuda knows. So libcuda resolves
//! first, and its pointer is compared with the originals of the hooks of that base name, looked up both by name and
//! by the version and flags of each hook's ABI. Equal pointers are the same function with the same signature; any
//! other pointer, such as one of a newer ABI, is returned unchanged.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr::NonNull;

use crate::driver_api::cuda::{CUDA_SUCCESS, CUresult};
use crate::driver_api::driver;
use crate::driver_api::functions::cuInit;
use crate::hooks::hook::Hook;
use crate::process::Process;
use crate::system::sys::SavedErrno;

/// Finds the hook with a base name for which the predicate is true.
pub(crate) type Find = fn(&CStr, &dyn Fn(&Hook) -> bool) -> Option<&'static Hook>;

/// Finds the process's limits before libcuda opens its device files: when the process ends, the kernel closes those
/// before the file whose lock marks the process as alive.
pub(crate) unsafe fn init(original: cuInit::Function, flags: c_uint) -> CUresult {
    let _ = Process::get();
    // SAFETY: the caller's arguments.
    let result = unsafe { original(flags) };
    driver::note_initialization(result == CUDA_SUCCESS);
    result
}

/// Replaces the resolved function by its hook.
///
/// # Safety
/// `symbol` is null or a terminated string; `function` is null or points to a pointer.
pub(crate) unsafe fn replace(
    symbol: *const c_char,
    function: *mut *mut c_void,
    ask: impl Fn(&CStr, c_int, u64) -> Option<NonNull<c_void>>,
    find: Find,
) {
    if symbol.is_null() || function.is_null() {
        return;
    }
    let _errno = SavedErrno::new();
    // SAFETY: not null, and terminated by the caller's contract.
    let base = unsafe { CStr::from_ptr(symbol) };
    // SAFETY: not null, and valid by the caller's contract.
    let Some(found) = NonNull::new(unsafe { function.read() }) else {
        return;
    };
    let is_same = |hook: &Hook| {
        hook.original.address() == Some(found)
            || ask(hook.base, hook.since, hook.flags) == Some(found)
    };
    if let Some(hook) = find(base, &is_same)
        && hook.is_needed()
    {
        hook.original.address_or(found);
        // SAFETY: not null, and valid by the caller's contract.
        unsafe { function.write(hook.wrapper()) };
    }
}
