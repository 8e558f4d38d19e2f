//! The oracle's view of the machine, for tests and `simulator-machine ctl status`.

use serde::{Deserialize, Serialize};

use crate::protocol::{GpuIndex, InstanceId, MemoryLimitsState, MigState, Refusal};

use super::Kernel;

/// The whole machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineStatus {
    /// The GPUs in order.
    pub gpus: Vec<GpuStatus>,
    /// Open connections, including NVML clients.
    pub connections: usize,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// Index and minor number.
    pub index: u32,
    /// UUID.
    pub uuid: String,
    /// Total memory.
    pub total_bytes: u64,
    /// Reserved by the driver.
    pub reserved_bytes: u64,
    /// Allocated by contexts and allocations.
    pub used_bytes: u64,
    /// Highest `used_bytes` since the start or the last reset of this mark.
    pub peak_bytes: u64,
    /// Memory that processes held when they ended, since the start or the last reset of that mark. The mark can include
    /// it: a process's memory is freed when its end is detected.
    pub freed_at_exit_bytes: u64,
    /// Free.
    pub free_bytes: u64,
    /// Time with any kernel running.
    pub busy_nanos: u64,
    /// Percentage of the last sampling period.
    pub gpu_percent: u32,
    /// Processes with a context.
    pub processes: Vec<ProcessStatus>,
    /// MIG state.
    pub mig: MigState,
    /// Memory limits, by cgroup.
    pub memory_limits: Vec<LimitStatus>,
}

/// Memory limits of one cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitStatus {
    /// Path of the cgroup in its hierarchy.
    pub cgroup: String,
    /// The limits.
    pub limits: MemoryLimitsState,
    /// Memory that counts against them.
    pub used_bytes: u64,
}

/// One process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessStatus {
    /// PID as the daemon sees it, of the connecting process, even if only a forked child lives.
    pub pid: u32,
    /// Memory of its contexts and allocations.
    pub used_bytes: u64,
    /// Instance, in MIG mode.
    pub instance: Option<InstanceId>,
    /// Kernels completed.
    pub kernels: u64,
    /// Time in which it held the GPU with a kernel running.
    pub busy_nanos: u64,
}

impl Kernel {
    /// Restarts the high-water mark of a GPU's memory.
    ///
    /// # Errors
    /// If the GPU does not exist.
    pub fn reset_peak(&mut self, gpu: GpuIndex) -> Result<(), Refusal> {
        self.gpu_mut(gpu)?.ledger.reset_peak();
        Ok(())
    }

    /// Returns the current state.
    #[must_use]
    pub fn status(&self) -> MachineStatus {
        let gpus = (0u32..).zip(&self.gpus).zip(&self.description.gpus);
        let gpus = gpus.map(|((index, gpu), described)| GpuStatus {
            index,
            uuid: described.uuid.clone(),
            total_bytes: gpu.model.memory.total_bytes,
            reserved_bytes: gpu.model.memory.reserved_bytes,
            used_bytes: gpu.ledger.taken_bytes(),
            peak_bytes: gpu.ledger.peak_bytes(),
            freed_at_exit_bytes: gpu.ledger.freed_at_exit_bytes(),
            free_bytes: gpu.ledger.free_bytes(),
            busy_nanos: gpu.engine.busy(),
            gpu_percent: gpu.sensors().utilization.gpu_percent,
            mig: self.mig_state(GpuIndex(index)).unwrap_or_default(),
            memory_limits: self.limits_of(GpuIndex(index)),
            processes: self
                .processes(GpuIndex(index))
                .into_iter()
                .map(|process| {
                    let (kernels, busy_nanos) = self.usage(GpuIndex(index), process.pid);
                    ProcessStatus {
                        pid: process.pid,
                        used_bytes: process.used_bytes,
                        instance: process.instance,
                        kernels,
                        busy_nanos,
                    }
                })
                .collect(),
        });
        MachineStatus {
            gpus: gpus.collect(),
            connections: self.clients.len(),
        }
    }

    /// Kernels and busy time of a process on a GPU.
    pub(super) fn usage(&self, gpu: GpuIndex, pid: u32) -> (u64, u64) {
        let of_process = self.contexts.iter().filter(|(_, context)| {
            let client = self.clients.get(&context.client);
            context.gpu == gpu && client.is_some_and(|client| client.pid == pid)
        });
        let usage = of_process.filter_map(|(id, _)| Some(self.gpu(gpu).ok()?.engine.usage(*id)));
        usage.fold((0, 0), |(kernels, busy), (more, longer)| {
            (kernels + more, busy + longer)
        })
    }
}
