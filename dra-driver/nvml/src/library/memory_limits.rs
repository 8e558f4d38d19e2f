//! Memory limits of cgroups, which NVML has since driver 615. The bindings are older, so the functions are looked up here.

use std::ffi::{CString, c_char, c_uint};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nvml_wrapper_sys::bindings as sys;

use super::{Handle, Shared};
use crate::{CgroupMemory, Status};

/// `NVML_DEVICE_MEMORY_LIMIT_MAX`: no limit.
const NO_LIMIT: u64 = u64::MAX;

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct SetLimits {
    name_space: *const c_char,
    soft_limit: u64,
    hard_limit: u64,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
struct GetLimits {
    name_space: *const c_char,
    soft_limit: u64,
    hard_limit: u64,
    current_used: u64,
}

/// The functions; a library before driver 615 has none.
pub(super) struct Functions {
    set: unsafe extern "C" fn(sys::nvmlDevice_t, *mut SetLimits) -> sys::nvmlReturn_t,
    get: unsafe extern "C" fn(sys::nvmlDevice_t, *mut GetLimits) -> sys::nvmlReturn_t,
    /// Keeps the functions loaded.
    _library: libloading::Library,
}

impl Functions {
    /// Looks the functions up in the library at `path`, which is loaded already.
    pub(super) fn load(path: &Path) -> Option<Self> {
        // SAFETY: the library was loaded and initialized from this path; loading it again only counts its users.
        let library = unsafe { libloading::Library::new(path) }.ok()?;
        // SAFETY: the signature of nvml.h of driver 615.
        let set = unsafe { library.get(b"nvmlDeviceSetMemoryLimits_v1\0") };
        let set = *set.ok()?;
        // SAFETY: the signature of nvml.h of driver 615.
        let get = unsafe { library.get(b"nvmlDeviceGetMemoryLimits_v1\0") };
        let get = *get.ok()?;
        Some(Self {
            set,
            get,
            _library: library,
        })
    }
}

impl Shared {
    fn limit_functions(&self) -> Result<&Functions, Status> {
        let missing = Status::MissingSymbol("nvmlDeviceSetMemoryLimits_v1");
        self.limits.as_ref().ok_or(missing)
    }

    pub(super) fn set_memory_limit(
        &self,
        handle: Handle,
        cgroup: &Path,
        bytes: Option<u64>,
    ) -> Result<(), Status> {
        let functions = self.limit_functions()?;
        let name = name_space(cgroup)?;
        // Without guaranteed memory: the kernel would keep it when the cgroup goes.
        let mut limits = SetLimits {
            name_space: name.as_ptr(),
            soft_limit: 0,
            hard_limit: bytes.unwrap_or(NO_LIMIT),
        };
        // SAFETY: reads one struct of nvml.h, whose string lives longer than the call.
        checked(unsafe { (functions.set)(handle.0, &raw mut limits) })
    }

    pub(super) fn cgroup_memory(
        &self,
        handle: Handle,
        cgroup: &Path,
    ) -> Result<CgroupMemory, Status> {
        let functions = self.limit_functions()?;
        let name = name_space(cgroup)?;
        let mut limits = GetLimits {
            name_space: name.as_ptr(),
            soft_limit: 0,
            hard_limit: 0,
            current_used: 0,
        };
        // SAFETY: reads and writes one struct of nvml.h, whose string lives longer than the call.
        checked(unsafe { (functions.get)(handle.0, &raw mut limits) })?;
        Ok(CgroupMemory {
            limit_bytes: Some(limits.hard_limit).filter(|bytes| *bytes != NO_LIMIT),
            used_bytes: limits.current_used,
        })
    }
}

fn name_space(cgroup: &Path) -> Result<CString, Status> {
    CString::new(cgroup.as_os_str().as_bytes()).map_err(|_| Status::InvalidArgument)
}

fn checked(code: c_uint) -> Result<(), Status> {
    Status::from_code(code).map_or(Ok(()), Err)
}
