//! The exported hooks: which body each function has, and when a program gets it.
//!
//! `hooks!` expands each line of [`crate::driver_api::functions`] to the exported `extern "C"` symbol and the entry that `dlsym`,
//! `cuGetProcAddress` and the tests look up.

use core::ffi::{CStr, c_void};

use crate::driver_api::driver::Library;
use crate::driver_api::functions::{for_each_hook, name_of};
use crate::hooks::hook::{Hook, Purpose};

/// Returns the hook with this name.
pub(crate) fn find(name: &[u8]) -> Option<&'static Hook> {
    HOOKS.iter().find(|hook| hook.name.to_bytes() == name)
}

/// Names for which `cuGetProcAddress` returns a function with another base name from some version on.
const OTHER_BASES: [(&CStr, &CStr); 1] = [(c"cuGraphInstantiate", c"cuGraphInstantiateWithFlags")];

/// Returns the hook that `cuGetProcAddress` may return for `base` and for which `is_same` is true.
pub(crate) fn find_by_base(base: &CStr, is_same: &dyn Fn(&Hook) -> bool) -> Option<&'static Hook> {
    let mut others = OTHER_BASES.iter();
    let other = others.find_map(|(name, other)| (*name == base).then_some(*other));
    HOOKS.iter().find(|hook| {
        hook.library == Library::Cuda
            && (hook.base == base || Some(hook.base) == other)
            && is_same(hook)
    })
}

macro_rules! hooks {
    ($(
        $purpose:ident $library:ident $name:ident($($argument:ident: $type:ty),* $(,)?)
            = $base:literal $since:literal $(+ $flags:ident)? => $body:path;
    )*) => {
        $(
            #[expect(non_snake_case, reason = "names are those of cuda.h and nvml.h")]
            mod $name {
                #[allow(unused_imports, reason = "not every signature needs all of them")]
                use super::bodies::*;
                use crate::driver_api::functions::$name::ORIGINAL;

                /// Hook of the function with this name.
                ///
                /// # Safety
                /// As for the original function.
                #[unsafe(no_mangle)]
                pub(super) unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                    let Some(original) = ORIGINAL.get() else {
                        return Library::$library.missing_error();
                    };
                    if const { shows_demand(Library::$library, Purpose::$purpose) } {
                        show_demand();
                    }
                    // SAFETY: the caller obeys the original's contract, which the body shares.
                    unsafe { $body(original, $($argument),*) }
                }
            }
        )*

        static HOOKS: &[Hook] = &[
            $(Hook {
                name: name_of(concat!(stringify!($name), "\0")),
                base: $base,
                since: $since,
                flags: 0 $(| crate::driver_api::cuda::$flags)?,
                library: Library::$library,
                original: crate::driver_api::functions::$name::ORIGINAL.symbol(),
                purpose: Purpose::$purpose,
                wrapper: || $name::$name as *mut c_void,
            },)*
        ];
    };
}

/// Names in the lines of [`crate::driver_api::functions`].
mod bodies {
    pub(super) use super::lookup;
    pub(super) use crate::driver_api::functions::types::*;
    pub(super) use crate::hooks::hook::{Purpose, shows_demand};
    pub(super) use crate::hooks::metering::{Legacy, PerThread};
    pub(super) use crate::hooks::*;
    pub(super) use crate::process::show_demand;
}

/// The bodies that look up hooks.
mod lookup {
    use core::ffi::CStr;
    use core::ptr::{self, NonNull};

    use super::find_by_base;
    use crate::driver_api::cuda::CUDA_SUCCESS;
    use crate::driver_api::functions::types::*;
    use crate::driver_api::functions::{cuGetProcAddress, cuGetProcAddress_v2};
    use crate::hooks::lookup::replace;

    pub(crate) use crate::hooks::lookup::init;

    pub(crate) unsafe fn get_proc_address(
        original: cuGetProcAddress::Function,
        symbol: *const c_char,
        function: *mut *mut c_void,
        version: c_int,
        flags: u64,
    ) -> c_int {
        // SAFETY: the caller's arguments.
        let result = unsafe { original(symbol, function, version, flags) };
        let ask = |base: &CStr, version, flags| {
            let mut found = ptr::null_mut();
            // SAFETY: the name is terminated and `found` takes one pointer.
            let result = unsafe { original(base.as_ptr(), &raw mut found, version, flags) };
            NonNull::new(found).filter(|_| result == CUDA_SUCCESS)
        };
        if result == CUDA_SUCCESS {
            // SAFETY: libcuda accepted both pointers.
            unsafe { replace(symbol, function, ask, find_by_base) };
        }
        result
    }

    pub(crate) unsafe fn get_proc_address_v2(
        original: cuGetProcAddress_v2::Function,
        symbol: *const c_char,
        function: *mut *mut c_void,
        version: c_int,
        flags: u64,
        status: *mut c_int,
    ) -> c_int {
        // SAFETY: the caller's arguments.
        let result = unsafe { original(symbol, function, version, flags, status) };
        let ask = |base: &CStr, version, flags| {
            let mut found = ptr::null_mut();
            let status = ptr::null_mut();
            // SAFETY: the name is terminated, `found` takes one pointer, the status may be null.
            let result = unsafe { original(base.as_ptr(), &raw mut found, version, flags, status) };
            NonNull::new(found).filter(|_| result == CUDA_SUCCESS)
        };
        if result == CUDA_SUCCESS {
            // SAFETY: libcuda accepted both pointers.
            unsafe { replace(symbol, function, ask, find_by_base) };
        }
        result
    }
}

for_each_hook!(hooks);
