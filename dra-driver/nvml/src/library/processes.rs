//! Reading of processes and utilization.

use std::collections::HashMap;

use nvml_wrapper_sys::bindings as sys;

use super::{Handle, Shared, call, optional};
use crate::{Process, ProcessKind, ProcessMemory, ProcessUtilization, Status, Utilization};

/// Maximum number of attempts to read a growing list.
const ATTEMPTS: usize = 8;

impl Shared {
    pub(super) fn processes(&self, handle: Handle) -> Result<Vec<Process>, Status> {
        let compute = list(|count, infos| {
            call!(
                self.lib(),
                nvmlDeviceGetComputeRunningProcesses_v3(handle.0, count, infos)
            )
        })?;
        let graphics = optional(list(|count, infos| {
            call!(
                self.lib(),
                nvmlDeviceGetGraphicsRunningProcesses_v3(handle.0, count, infos)
            )
        }))?;
        Ok(merge(&compute, &graphics.unwrap_or_default()))
    }

    /// Lists the processes that use the GPU through MPS. They are not in the list of compute processes.
    pub(super) fn mps_processes(
        &self,
        handle: Handle,
    ) -> Result<Vec<sys::nvmlProcessInfo_t>, Status> {
        list(|count, infos| {
            call!(
                self.lib(),
                nvmlDeviceGetMPSComputeRunningProcesses_v3(handle.0, count, infos)
            )
        })
    }

    pub(super) fn utilization(&self, handle: Handle) -> Result<Option<Utilization>, Status> {
        let rates = optional(
            self.device(handle)
                .utilization_rates()
                .map_err(Status::from),
        )?;
        Ok(rates.map(|rates| Utilization {
            gpu_percent: rates.gpu,
            memory_percent: rates.memory,
        }))
    }

    pub(super) fn process_utilization(
        &self,
        handle: Handle,
        since_us: u64,
    ) -> Result<Vec<ProcessUtilization>, Status> {
        let samples = list(|count, samples| {
            call!(
                self.lib(),
                nvmlDeviceGetProcessUtilization(handle.0, samples, count, since_us)
            )
        });
        let samples = match samples {
            // NVML returns NOT_FOUND when there is no newer sample.
            Err(Status::NotFound) => Vec::new(),
            other => optional(other)?.unwrap_or_default(),
        };
        // NVML fills the whole buffer; entries without a sample have PID 0.
        let samples = samples
            .into_iter()
            .filter(|sample| sample.pid != 0 && sample.timeStamp > since_us);
        Ok(samples.map(process_utilization).collect())
    }
}

/// Reads a list with NVML's two-step protocol: a call with count 0 returns the length, the next call the list. The list
/// can grow between the calls.
pub(super) fn list<T: Copy>(
    mut read: impl FnMut(*mut std::ffi::c_uint, *mut T) -> Result<(), Status>,
) -> Result<Vec<T>, Status> {
    let mut count = 0;
    match read(&raw mut count, std::ptr::null_mut()) {
        Ok(()) if count == 0 => return Ok(Vec::new()),
        Ok(()) | Err(Status::InsufficientSize) => {}
        Err(status) => return Err(status),
    }
    for _ in 0..ATTEMPTS {
        let capacity = count as usize;
        let mut values: Vec<T> = Vec::with_capacity(capacity);
        match read(&raw mut count, values.as_mut_ptr()) {
            Ok(()) => {
                let filled = (count as usize).min(capacity);
                // SAFETY: NVML wrote `filled` values, which is at most the capacity.
                unsafe { values.set_len(filled) };
                return Ok(values);
            }
            Err(Status::InsufficientSize) => {}
            Err(status) => return Err(status),
        }
    }
    Err(Status::InsufficientSize)
}

/// Merges the lists to one entry per process. A process with both kinds of context counts as compute; the graphics list
/// repeats its memory.
fn merge(compute: &[sys::nvmlProcessInfo_t], graphics: &[sys::nvmlProcessInfo_t]) -> Vec<Process> {
    let mut seen = HashMap::new();
    let mut processes = Vec::with_capacity(compute.len());
    let kinds = [
        (compute, ProcessKind::Compute),
        (graphics, ProcessKind::Graphics),
    ];
    for (info, kind) in kinds
        .into_iter()
        .flat_map(|(infos, kind)| infos.iter().map(move |info| (info, kind)))
    {
        let key = (info.pid, info.gpuInstanceId, info.computeInstanceId);
        if info.pid != 0 && seen.insert(key, ()).is_some() {
            continue;
        }
        processes.push(Process {
            pid: info.pid,
            memory: memory(info.usedGpuMemory),
            gpu_instance: instance(info.gpuInstanceId),
            compute_instance: instance(info.computeInstanceId),
            kind,
        });
    }
    processes
}

fn process_utilization(sample: sys::nvmlProcessUtilizationSample_t) -> ProcessUtilization {
    ProcessUtilization {
        pid: sample.pid,
        timestamp_us: sample.timeStamp,
        sm_percent: sample.smUtil,
        memory_percent: sample.memUtil,
        encoder_percent: sample.encUtil,
        decoder_percent: sample.decUtil,
    }
}

/// Converts the memory; all ones is `NVML_VALUE_NOT_AVAILABLE`.
fn memory(used: u64) -> ProcessMemory {
    if used == u64::MAX {
        ProcessMemory::NotAvailable
    } else {
        ProcessMemory::Used { bytes: used }
    }
}

/// Converts an instance ID; all ones means no instance.
pub(super) fn instance(id: u32) -> Option<u32> {
    (id != u32::MAX).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(pid: u32, used: u64, gpu_instance: u32) -> sys::nvmlProcessInfo_t {
        sys::nvmlProcessInfo_t {
            pid,
            usedGpuMemory: used,
            gpuInstanceId: gpu_instance,
            computeInstanceId: u32::MAX,
        }
    }

    #[test]
    fn lists_process_with_both_contexts_once_as_compute() {
        let merged = merge(
            &[info(7, 100, u32::MAX)],
            &[info(7, 100, u32::MAX), info(8, u64::MAX, u32::MAX)],
        );
        assert_eq!(merged.len(), 2);
        assert_eq!(merged[0].kind, ProcessKind::Compute);
        assert_eq!(merged[0].memory, ProcessMemory::Used { bytes: 100 });
        assert_eq!(merged[1].kind, ProcessKind::Graphics);
        assert_eq!(merged[1].memory, ProcessMemory::NotAvailable);
    }

    #[test]
    fn keeps_instances_and_untranslated_pids_separate() {
        assert_eq!(merge(&[info(7, 1, 1), info(7, 2, 2)], &[]).len(), 2);
        assert_eq!(
            merge(&[info(0, 1, u32::MAX), info(0, 2, u32::MAX)], &[]).len(),
            2
        );
        assert_eq!(merge(&[info(7, 1, 1)], &[])[0].gpu_instance, Some(1));
    }

    #[test]
    fn retries_growing_list() {
        let mut length = 20_u32;
        let values = list(|count, values: *mut u32| {
            // SAFETY: `count` points to a live variable of the caller.
            let count = unsafe { &mut *count };
            if values.is_null() {
                *count = 4;
                return Err(Status::InsufficientSize);
            }
            if *count < length {
                *count = length;
                length = 21;
                return Err(Status::InsufficientSize);
            }
            for position in 0..length {
                let slot = values.wrapping_add(position as usize);
                // SAFETY: the caller's buffer has room for at least `length` values.
                unsafe { slot.write(position) };
            }
            *count = length;
            Ok(())
        })
        .unwrap();
        assert_eq!(values, (0..21).collect::<Vec<u32>>());
    }

    #[test]
    fn reads_empty_list_in_one_call() {
        let mut calls = 0;
        let values: Vec<u32> = list(|_, _| {
            calls += 1;
            Ok(())
        })
        .unwrap();
        assert!(values.is_empty());
        assert_eq!(calls, 1);
    }
}
