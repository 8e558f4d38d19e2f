//! A hook: a function of the NVIDIA libraries that the library replaces.

use core::ffi::{CStr, c_void};

use crate::driver_api::driver::{Library, Symbol};
use crate::process::Process;

/// Purpose of a hook. A program gets the hook only if the process is limited in that respect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Needed by every limit: the lookup of functions, which never blocks.
    Lookup,
    /// Needed by every limit.
    Any,
    /// Memory.
    Memory,
    /// GPU time.
    Compute,
    /// The demand to resume a suspended share, which all purposes but [`Self::Lookup`] have in addition.
    Demand,
}

/// Returns whether a hook shows a demand before its call; see [`crate::process::show_demand`].
pub(crate) const fn shows_demand(library: Library, purpose: Purpose) -> bool {
    matches!(library, Library::Cuda) && !matches!(purpose, Purpose::Lookup)
}

/// One hook.
pub(crate) struct Hook {
    /// Exported name: the original name of exactly this ABI.
    pub(crate) name: &'static CStr,
    /// Name in `cuGetProcAddress`.
    pub(crate) base: &'static CStr,
    /// CUDA version, as in `CUDA_VERSION`, since which `cuGetProcAddress` returns this ABI for `base`.
    pub(crate) since: i32,
    /// Flags with which `cuGetProcAddress` returns this ABI.
    pub(crate) flags: u64,
    /// Library of the original function.
    pub(crate) library: Library,
    /// The original function.
    pub(crate) original: &'static Symbol,
    pub(crate) purpose: Purpose,
    pub(crate) wrapper: fn() -> *mut c_void,
}

impl Hook {
    /// Returns the exported function.
    pub(crate) fn wrapper(&self) -> *mut c_void {
        (self.wrapper)()
    }

    /// Returns whether the process's limits need this hook. If not, the program gets the original function.
    pub(crate) fn is_needed(&self) -> bool {
        // Without memory for the process's state nothing can be counted; then the hooks deny.
        let Some(process) = Process::get() else {
            return true;
        };
        match self.purpose {
            Purpose::Lookup | Purpose::Any => process.is_limited(),
            Purpose::Memory => process.is_memory_limited(),
            Purpose::Compute => process.is_metered() || process.can_be_suspended(),
            Purpose::Demand => process.can_be_suspended(),
        }
    }
}
