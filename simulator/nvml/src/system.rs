//! Initialization, error texts, versions.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{nvmlReturn_t, nvmlSystemDriverBranchInfo_t};

use crate::abi::{Out, entry_points, fixed_text};
use crate::error::{self, NvmlError};
use crate::library::{initialize, library, require_initialized, shut_down};

entry_points! {
    fn nvmlInit() { initialize() }
    fn nvmlInit_v2() { initialize() }
    fn nvmlInitWithFlags(_flags: c_uint) { initialize() }
    fn nvmlShutdown() { shut_down() }

    fn nvmlSystemGetDriverVersion(version: Out<c_char>, length: c_uint) {
        version.set_text(length, &library()?.machine().driver_version)
    }

    fn nvmlSystemGetNVMLVersion(version: Out<c_char>, length: c_uint) {
        version.set_text(length, &library()?.machine().nvml_version)
    }

    fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) { version.set(cuda_version()?) }
    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) { version.set(cuda_version()?) }

    fn nvmlSystemGetDriverBranch(info: Out<nvmlSystemDriverBranchInfo_t>, length: c_uint) {
        let machine = library()?.machine();
        let version = info.require_version(1)?;
        let major = machine.driver_version.split('.').next().unwrap_or_default();
        let branch = format!("r{major}_00");
        if usize::try_from(length).is_ok_and(|length| branch.len() >= length) {
            return Err(NvmlError::InsufficientSize);
        }
        info.set(nvmlSystemDriverBranchInfo_t { version, branch: fixed_text(&branch) })
    }

    fn nvmlSystemGetProcessName(pid: c_uint, name: Out<c_char>, length: c_uint) {
        require_initialized()?;
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NvmlError::NotFound)?;
        let program = command.split(|byte| *byte == 0).next().unwrap_or_default();
        let mut program = String::from_utf8_lossy(program).into_owned();
        let room = usize::try_from(length).map_err(|_| NvmlError::InvalidArgument)?.saturating_sub(1);
        while program.len() > room {
            program.pop();
        }
        name.set_text(length, &program)
    }
}

/// `13000` for CUDA 13.0.
fn cuda_version() -> Result<c_int, NvmlError> {
    let version = library()?.machine().cuda_version;
    c_int::try_from(version.major * 1000 + version.minor * 10).map_err(|_| NvmlError::Unknown)
}

/// `nvmlErrorString`: available before initialization, as in the real library.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: nvmlReturn_t) -> *const c_char {
    error::text(code).as_ptr()
}
