//! Plain data about the processes on a card and how busy it is.

/// A process that holds a context on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// PID in the PID namespace of the caller (NVML translates; 0 where it cannot).
    pub pid: u32,
    /// Device memory that NVML attributes to it.
    pub memory: ProcessMemory,
    /// GPU instance it runs on; `None` without MIG.
    pub gpu_instance: Option<u32>,
    /// Compute instance it runs on; `None` without MIG.
    pub compute_instance: Option<u32>,
    /// What it does there.
    pub kind: ProcessKind,
}

/// Device memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessMemory {
    /// The figure.
    Used {
        /// Bytes.
        bytes: u64,
    },
    /// NVML gives none (WDDM, some virtual machines, MIG without permission).
    NotAvailable,
}

/// What a process does on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessKind {
    /// Compute, graphics as well where it has both kinds of context.
    Compute,
    /// Graphics only: outside CUDA, hence outside libvgpu's limits.
    Graphics,
}

/// How busy a card was in NVML's last sample period (1/6 s to 1 s).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Utilization {
    /// Percent of time in which some kernel ran. Not the share of multiprocessors in use.
    pub gpu_percent: u32,
    /// Percent of time in which device memory was read or written.
    pub memory_percent: u32,
}

/// One sample of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessUtilization {
    /// PID in the PID namespace of the caller.
    pub pid: u32,
    /// When, in µs of the CPU clock; pass the largest one seen to the next call.
    pub timestamp_us: u64,
    /// Percent of time in which a kernel of this process ran.
    pub sm_percent: u32,
    /// Percent of time in which it used device memory.
    pub memory_percent: u32,
    /// Percent of the encoders.
    pub encoder_percent: u32,
    /// Percent of the decoders.
    pub decoder_percent: u32,
}
