//! Data types of processes and utilization.

/// A process with a context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// PID in the PID namespace of the caller (translated by NVML; 0 if not possible).
    pub pid: u32,
    /// GPU memory of the process.
    pub memory: ProcessMemory,
    /// GPU instance; `None` without MIG.
    pub gpu_instance: Option<u32>,
    /// Compute instance; `None` without MIG.
    pub compute_instance: Option<u32>,
    /// Kind of the contexts.
    pub kind: ProcessKind,
}

/// GPU memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessMemory {
    /// Memory in use.
    Used {
        /// Bytes.
        bytes: u64,
    },
    /// NVML reports no value (WDDM, some virtual machines, MIG without permission).
    NotAvailable,
}

/// Kind of the contexts of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessKind {
    /// Compute, or compute and graphics.
    Compute,
    /// Graphics only; libvgpu does not limit graphics.
    Graphics,
}

/// Utilization of a GPU in NVML's last sample period (1/6 s to 1 s).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Utilization {
    /// Percent of time with at least one running kernel; not the percentage of multiprocessors in use.
    pub gpu_percent: u32,
    /// Percent of time with memory reads or writes.
    pub memory_percent: u32,
}

/// Utilization sample of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessUtilization {
    /// PID in the PID namespace of the caller.
    pub pid: u32,
    /// Time of the sample, µs of the CPU clock. Pass the maximum to the next call.
    pub timestamp_us: u64,
    /// Percent of time with a running kernel of the process.
    pub sm_percent: u32,
    /// Percent of time with memory reads or writes of the process.
    pub memory_percent: u32,
    /// Percent of encoder time.
    pub encoder_percent: u32,
    /// Percent of decoder time.
    pub decoder_percent: u32,
}
