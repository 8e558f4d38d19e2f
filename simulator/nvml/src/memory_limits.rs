//! Memory limits of cgroups: since driver 615. `nvml.h` of the bindings is older, so the structs are written here.

use std::ffi::c_char;

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use simulator_machine::protocol::{MemoryLimitsRequest, MemoryLimitsState, Reply, Request};

use crate::abi::{NvmlResult, Out, Text, entry_points, text_at};
use crate::error::NvmlError;
use crate::handle::{AnyDevice, any_device};

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SetMemoryLimits {
    name_space: *mut c_char,
    soft_limit: u64,
    hard_limit: u64,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct GetMemoryLimits {
    name_space: *mut c_char,
    soft_limit: u64,
    hard_limit: u64,
    current_used: u64,
}

entry_points! {
    fn nvmlDeviceSetMemoryLimits_v1(handle: nvmlDevice_t, limits: Out<SetMemoryLimits>) {
        let given = limits.get()?;
        let limits = MemoryLimitsState {
            soft_bytes: given.soft_limit,
            hard_bytes: given.hard_limit,
        };
        match request(handle, text_at(given.name_space), MemoryLimitsRequest::Set(limits))? {
            Reply::Done => Ok(()),
            _ => Err(NvmlError::Unknown),
        }
    }

    fn nvmlDeviceGetMemoryLimits_v1(handle: nvmlDevice_t, limits: Out<GetMemoryLimits>) {
        let given = limits.get()?;
        let reply = request(handle, text_at(given.name_space), MemoryLimitsRequest::Get)?;
        let Reply::MemoryLimits { limits: found, used_bytes } = reply else {
            return Err(NvmlError::Unknown);
        };
        limits.set(GetMemoryLimits {
            soft_limit: found.soft_bytes,
            hard_limit: found.hard_bytes,
            current_used: used_bytes,
            ..given
        })
    }
}

fn request(handle: nvmlDevice_t, cgroup: Text, request: MemoryLimitsRequest) -> NvmlResult<Reply> {
    let AnyDevice::Gpu(device) = any_device(handle)? else {
        return Err(NvmlError::NotSupported);
    };
    let cgroup = cgroup.get()?;
    device.library.request(&Request::MemoryLimits {
        gpu: device.gpu,
        cgroup,
        request,
    })
}
