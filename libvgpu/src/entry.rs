//! `dlsym`: the entry point of programs that load libraries at run time.
//!
//! Names that do not begin like a CUDA or NVML function continue in glibc's `dlsym` with a jump, not a call: for
//! `RTLD_NEXT` it finds the caller by the return address.
//!
//! The other entry points: direct linking (the hooks are exported under the original names) and `cuGetProcAddress`
//! ([`crate::hooks::lookup`]).

use core::ffi::{CStr, c_char, c_void};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::driver_api::driver::{self, Library, RTLD_DEFAULT, RTLD_NEXT};
use crate::hooks::hook::Hook;
use crate::system::log;
use crate::system::sys::SavedErrno;
use crate::wiring;

/// Next step of `dlsym`: return `address` if `answered` is not 0, else jump there.
#[repr(C)]
struct Route {
    answered: usize,
    address: *mut c_void,
}

/// glibc's `dlsym`, with CUDA and NVML functions replaced by the hooks that the process's limits need.
///
/// # Safety
/// As for `dlsym`: `name` is a terminated string, `handle` a handle of `dlopen` or a pseudo handle.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "endbr64",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {route}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "mov rax, rdx",
        "jz 2f",
        "ret",
        "2:",
        "jmp rax",
        route = sym route,
    )
}

/// glibc's `dlsym`, with CUDA and NVML functions replaced by the hooks that the process's limits need.
///
/// # Safety
/// As for `dlsym`: `name` is a terminated string, `handle` a handle of `dlopen` or a pseudo handle.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, -32]!",
        "stp x0, x1, [sp, 16]",
        "bl {route}",
        "mov x17, x0",
        "mov x16, x1",
        "ldp x0, x1, [sp, 16]",
        "ldp x29, x30, [sp], 32",
        "cbz x17, 2f",
        "mov x0, x16",
        "ret",
        "2:",
        "br x16",
        route = sym route,
    )
}

extern "C" fn route(handle: *mut c_void, name: *const c_char) -> Route {
    match resolve(handle, name) {
        Some(address) => Route {
            answered: 1,
            address,
        },
        None => Route {
            answered: 0,
            address: driver::real_dlsym().map_or(null_dlsym as *mut c_void, NonNull::as_ptr),
        },
    }
}

/// Fallback if glibc's `dlsym` is not found: no symbol exists.
extern "C" fn null_dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

/// Returns `None` if glibc's `dlsym` resolves the name.
fn resolve(handle: *mut c_void, name: *const c_char) -> Option<*mut c_void> {
    if name.is_null() {
        return None;
    }
    // SAFETY: not null, and `dlsym`'s callers pass a terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    let bytes = name.to_bytes();
    if !bytes.starts_with(b"cu") && !bytes.starts_with(b"nvml") {
        return None;
    }
    let hook = wiring::find(bytes)?;
    let _errno = SavedErrno::new();
    if handle == RTLD_NEXT {
        return None;
    }
    if handle == RTLD_DEFAULT && hook.library.handle().is_some() {
        return None;
    }
    let found = match driver::symbol(handle, name) {
        // The program's global scope contains our own symbol even without an NVIDIA library. The next definition
        // counts; if there is none, `dlerror` reports that.
        Some(found) if found.as_ptr() == hook.wrapper() && hook.library.handle().is_none() => {
            driver::symbol(RTLD_NEXT, name)
        }
        found => found,
    };
    let Some(found) = found else {
        return Some(ptr::null_mut());
    };
    if handle != RTLD_DEFAULT
        && let Some(handle) = NonNull::new(handle)
    {
        hook.library.select(found);
        hook.library.adopt(handle);
    }
    let original = hook.original.address_or(found);
    // A function of that name in another library is returned unchanged; a stub's symbol is ours.
    if found != original && found.as_ptr() != hook.wrapper() {
        return Some(of_other_library(hook, found));
    }
    Some(if hook.is_needed() {
        hook.wrapper()
    } else {
        original.as_ptr()
    })
}

/// Returns the address for a function of a library that is not the one in use. A second libcuda would be without limits:
/// the hooks call the functions of one.
fn of_other_library(hook: &Hook, found: NonNull<c_void>) -> *mut c_void {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    let second = match hook.library {
        Library::Cuda if hook.is_needed() => hook.library.name_of(found),
        Library::Cuda | Library::Nvml => None,
    };
    let Some(second) = second else {
        return found.as_ptr();
    };
    if !IS_REPORTED.swap(true, Ordering::Relaxed) {
        log::line(format_args!(
            "cannot limit {}: the program uses another libcuda already; denying its use; load one libcuda only (in Julia \
             with JULIA_CUDA_USE_COMPAT=false)",
            second.to_str().unwrap_or("?")
        ));
    }
    driver::refused as *mut c_void
}
