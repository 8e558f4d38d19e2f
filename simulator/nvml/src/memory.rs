//! Memory queries.

use nvml_wrapper_sys::bindings::{
    nvmlBAR1Memory_t, nvmlConfComputeMemSizeInfo_t, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t,
};
use simulator_machine::description::MIB;
use simulator_machine::protocol::ReportedValue;

use crate::abi::{NvmlResult, Out, entry_points};
use crate::error::NvmlError;
use crate::handle::{AnyDevice, any_device, device};

entry_points! {
    // Version 1 has no reserved field: the driver's reserve counts as used.
    fn nvmlDeviceGetMemoryInfo(handle: nvmlDevice_t, memory: Out<nvmlMemory_t>) {
        let amounts = amounts(any_device(handle)?)?;
        memory.set(nvmlMemory_t {
            total: amounts.total,
            free: amounts.free(),
            used: amounts.used + amounts.reserved,
        })
    }

    fn nvmlDeviceGetMemoryInfo_v2(handle: nvmlDevice_t, memory: Out<nvmlMemory_v2_t>) {
        let device = any_device(handle)?;
        let version = memory.require_version(2)?;
        let amounts = amounts(device)?;
        memory.set(nvmlMemory_v2_t {
            version,
            total: amounts.total,
            reserved: amounts.reserved,
            free: amounts.free(),
            used: amounts.used,
        })
    }

    // BAR1: the memory size rounded up to a power of two, on data center GPUs.
    fn nvmlDeviceGetBAR1MemoryInfo(handle: nvmlDevice_t, bar1: Out<nvmlBAR1Memory_t>) {
        let amounts = amounts(any_device(handle)?)?;
        let bar1Total = amounts.total.next_power_of_two();
        let bar1Used = MIB;
        bar1.set(nvmlBAR1Memory_t { bar1Total, bar1Free: bar1Total - bar1Used, bar1Used })
    }

    // Confidential computing is off: all memory is unprotected.
    fn nvmlDeviceGetConfComputeMemSizeInfo(handle: nvmlDevice_t, sizes: Out<nvmlConfComputeMemSizeInfo_t>) {
        let total = amounts(any_device(handle)?)?.total;
        sizes.set(nvmlConfComputeMemSizeInfo_t { protectedMemSizeKib: 0, unprotectedMemSizeKib: total >> 10 })
    }

    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(handle: nvmlDevice_t, memory: Out<nvmlMemory_t>) {
        amounts(any_device(handle)?)?;
        memory.set(nvmlMemory_t { total: 0, free: 0, used: 0 })
    }

    fn nvmlDeviceGetMemoryBusWidth(handle: nvmlDevice_t, width: Out<std::ffi::c_uint>) {
        width.set(device(handle)?.model()?.memory.bus_width_bits)
    }
}

struct MemoryAmounts {
    total: u64,
    reserved: u64,
    used: u64,
}

impl MemoryAmounts {
    fn free(&self) -> u64 {
        self.total
            .saturating_sub(self.reserved)
            .saturating_sub(self.used)
    }
}

fn amounts(device: AnyDevice) -> NvmlResult<MemoryAmounts> {
    let device = match device {
        AnyDevice::Gpu(device) => device,
        AnyDevice::Mig(mig) => {
            mig.device().reporting(ReportedValue::Memory)?;
            return Ok(MemoryAmounts {
                total: mig.gpu_instance.profile()?.memory_bytes(),
                reserved: 0,
                used: mig.gpu_instance.state.used_bytes,
            });
        }
    };
    let memory = &device.model()?.memory;
    if !memory.reported_by_nvml {
        return Err(NvmlError::NotSupported);
    }
    let state = device.reporting(ReportedValue::Memory)?;
    Ok(match state.cgroup_memory {
        Some(cgroup) if cgroup.hard_bytes < memory.usable_bytes() => MemoryAmounts {
            total: cgroup.hard_bytes,
            reserved: 0,
            used: cgroup.used_bytes,
        },
        _ => MemoryAmounts {
            total: memory.total_bytes,
            reserved: memory.reserved_bytes,
            used: state.used_bytes,
        },
    })
}
