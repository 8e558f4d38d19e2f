//! Process lists.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessDetail_v1_t, nvmlProcessDetailList_t, nvmlProcessInfo_t,
    nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t,
};
use simulator_machine::protocol::{InstanceId, ProcessState, ReportedValue};

use crate::abi::{NvmlResult, Out, array_at, entry_points, set_list};
use crate::error::NvmlError;
use crate::handle::{AnyDevice, any_device};

/// Ids of processes outside of MIG.
const NO_INSTANCE: c_uint = c_uint::MAX;

entry_points! {
    fn nvmlDeviceGetComputeRunningProcesses(handle: nvmlDevice_t, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v1_t>) {
        set_list(count, infos, compute(handle)?.iter().map(Process::v1).collect())
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(handle: nvmlDevice_t, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v2_t>) {
        set_list(count, infos, compute(handle)?.iter().map(Process::v2).collect())
    }

    // Version 3 has the layout of version 2.
    fn nvmlDeviceGetComputeRunningProcesses_v3(handle: nvmlDevice_t, count: Out<c_uint>, infos: Out<nvmlProcessInfo_t>) {
        set_list(count, infos, compute(handle)?.iter().map(Process::v2).collect())
    }

    fn nvmlDeviceGetRunningProcessDetailList(handle: nvmlDevice_t, list: Out<nvmlProcessDetailList_t>) {
        list.require_version(1)?;
        let mut asked = list.get()?;
        let found = match asked.mode {
            MODE_COMPUTE => compute(handle)?,
            MODE_MPS => mps_clients(handle)?,
            MODE_GRAPHICS => {
                any_device(handle)?;
                Vec::new()
            }
            _ => return Err(NvmlError::InvalidArgument),
        };
        let room = asked.numProcArrayEntries;
        asked.numProcArrayEntries = c_uint::try_from(found.len()).map_err(|_| NvmlError::Unknown)?;
        list.set(asked)?;
        if room < asked.numProcArrayEntries {
            return Err(NvmlError::InsufficientSize);
        }
        array_at(asked.procArray).set_all(found.iter().map(Process::detail))
    }

    // No graphics.
    fn nvmlDeviceGetGraphicsRunningProcesses(handle: nvmlDevice_t, count: Out<c_uint>, _infos: Out<nvmlProcessInfo_v1_t>) { no_processes(handle, count) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(handle: nvmlDevice_t, count: Out<c_uint>, _infos: Out<nvmlProcessInfo_v2_t>) { no_processes(handle, count) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(handle: nvmlDevice_t, count: Out<c_uint>, _infos: Out<nvmlProcessInfo_t>) { no_processes(handle, count) }

    fn nvmlDeviceGetMPSComputeRunningProcesses(handle: nvmlDevice_t, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v1_t>) {
        set_list(count, infos, mps_clients(handle)?.iter().map(Process::v1).collect())
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(handle: nvmlDevice_t, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v2_t>) {
        set_list(count, infos, mps_clients(handle)?.iter().map(Process::v2).collect())
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(handle: nvmlDevice_t, count: Out<c_uint>, infos: Out<nvmlProcessInfo_t>) {
        set_list(count, infos, mps_clients(handle)?.iter().map(Process::v2).collect())
    }
}

/// `NVML_PROCESS_MODE_*`
const MODE_COMPUTE: c_uint = 0;
const MODE_GRAPHICS: c_uint = 1;
const MODE_MPS: c_uint = 2;

struct Process {
    pid: c_uint,
    used_bytes: u64,
    instance: Option<InstanceId>,
    is_mps_client: bool,
}

impl Process {
    fn v1(&self) -> nvmlProcessInfo_v1_t {
        nvmlProcessInfo_v1_t {
            pid: self.pid,
            usedGpuMemory: self.used_bytes,
        }
    }

    fn v2(&self) -> nvmlProcessInfo_v2_t {
        nvmlProcessInfo_v2_t {
            pid: self.pid,
            usedGpuMemory: self.used_bytes,
            gpuInstanceId: self
                .instance
                .map_or(NO_INSTANCE, |instance| instance.gpu_instance),
            computeInstanceId: self
                .instance
                .map_or(NO_INSTANCE, |instance| instance.compute),
        }
    }
}

impl Process {
    fn detail(&self) -> nvmlProcessDetail_v1_t {
        let v2 = self.v2();
        nvmlProcessDetail_v1_t {
            pid: v2.pid,
            usedGpuMemory: v2.usedGpuMemory,
            gpuInstanceId: v2.gpuInstanceId,
            computeInstanceId: v2.computeInstanceId,
            // No confidential computing.
            usedGpuCcProtectedMemory: 0,
        }
    }
}

/// A MIG device lists its own processes, a GPU those of all its instances.
fn compute(handle: nvmlDevice_t) -> NvmlResult<Vec<Process>> {
    let (device, only) = match any_device(handle)? {
        AnyDevice::Gpu(device) => (device, None),
        AnyDevice::Mig(mig) => (mig.device(), Some(mig.id())),
    };
    let processes = device.reporting(ReportedValue::Processes)?.processes;
    let process = |process: ProcessState| Process {
        pid: process.pid,
        used_bytes: process.used_bytes,
        instance: process.instance,
        is_mps_client: process.is_mps_client,
    };
    let shown = processes.into_iter().map(process);
    Ok(shown
        .filter(|process| only.is_none() || process.instance == only)
        .collect())
}

/// Clients of MPS servers. The list of compute processes has them too, and the servers.
fn mps_clients(handle: nvmlDevice_t) -> NvmlResult<Vec<Process>> {
    let processes = compute(handle)?.into_iter();
    Ok(processes.filter(|process| process.is_mps_client).collect())
}

fn no_processes(handle: nvmlDevice_t, count: Out<c_uint>) -> NvmlResult {
    any_device(handle)?;
    count.set(0)
}
