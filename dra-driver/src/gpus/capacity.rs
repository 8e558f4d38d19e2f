//! Capacity of a GPU: usable memory, driver reserve, and the totals of its shares.
//!
//! The [plan of a GPU](crate::gpus::gpu_plan) and the limits page use these functions, so published, checked and enforced
//! amounts agree.

use drava_api::condition::ConditionReason;
use drava_api::config::Enforcement;
pub use drava_api::unavailable::UnavailableReason;
use drava_nvml::{AddressingMode, ComputeCapability, Gpu, Memory};

/// 1 MiB in bytes, the granularity of memory amounts.
pub const MIB: u64 = 1 << 20;

/// All GPU time, percent.
pub const ALL_CORES: u64 = 100;

/// Amounts of shares of one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShareTotals {
    /// GPU memory, bytes.
    pub memory_bytes: u64,
    /// Percent of GPU time.
    pub cores: u64,
    /// Number of shares.
    pub slots: u64,
}

impl ShareTotals {
    /// Returns the sums.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            cores: self.cores.saturating_add(other.cores),
            slots: self.slots.saturating_add(other.slots),
        }
    }

    /// Returns the larger amount of each resource.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.max(other.memory_bytes),
            cores: self.cores.max(other.cores),
            slots: self.slots.max(other.slots),
        }
    }
}

/// What the shares of one GPU are offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareOffer {
    /// Totals of all shares.
    pub totals: ShareTotals,
    /// Memory that one share can get, and gets by default, bytes: at most that of the GPU.
    pub max_memory_bytes: u64,
    /// Percent of GPU time that a share gets by default.
    pub default_cores: u64,
    /// Whether the shares together get more memory than the GPU has.
    pub is_oversubscribed: bool,
}

/// Returns the memory that programs can allocate, bytes: total minus reserved, rounded down to 1 MiB. `None` when NVML
/// reports no memory size.
#[must_use]
pub fn usable_memory_bytes(gpu: &Gpu) -> Option<u64> {
    match gpu.memory {
        Memory::Dedicated {
            total_bytes,
            reserved_bytes,
            used_bytes: _,
        } => Some(floor_mib(total_bytes.saturating_sub(reserved_bytes))),
        Memory::NotSupported => None,
    }
}

/// Returns the estimated memory of one CUDA context, bytes. Each process of a share is charged this amount in advance,
/// and the same amount is excluded from shares for processes outside shares (monitors).
///
/// A context has local memory and stacks for every resident thread, so its size grows with the number of
/// multiprocessors. 4 MiB each approximates CUDA 12 and 13 (T4 150 MiB, A100 430 MiB, H100 520 MiB). The GA100 chip
/// (compute capability 8.0) takes on an A30, with half of its multiprocessors, almost as much as on an A100 (410 MiB).
#[must_use]
pub fn driver_reserve_bytes(gpu: &Gpu) -> u64 {
    const DEFAULT: u64 = 512 * MIB;
    const GA100: ComputeCapability = ComputeCapability { major: 8, minor: 0 };
    const GA100_LEAST: u64 = 416 * MIB;
    let least = match gpu.compute_capability {
        GA100 => GA100_LEAST,
        _ => 0,
    };
    gpu.multiprocessors
        .map_or(DEFAULT, |count| (u64::from(count) * 4 * MIB).max(least))
}

/// Returns why memory limits cannot be guaranteed on this GPU, as reason and message of the condition `Enforced`; `None` when they
/// can. Heterogeneous memory management (HMM, the default of NVIDIA's open kernel modules) only counts for claims that require
/// enforcement: programs must use host allocations on the GPU on purpose, without any allocation of CUDA.
#[must_use]
pub fn unenforceable(
    gpu: &Gpu,
    enforcement: Enforcement,
) -> Option<(ConditionReason, &'static str)> {
    match (gpu.addressing_mode, enforcement) {
        (Some(AddressingMode::Ats), _) => Some((
            ConditionReason::SharedAddressSpace,
            "the GPU shares page tables with the CPU (ATS); host allocations can reside in GPU memory",
        )),
        (Some(AddressingMode::Hmm), Enforcement::Required) => Some((
            ConditionReason::HeterogeneousMemory,
            "host allocations can migrate to the GPU (HMM), where no limit counts them; load the module nvidia-uvm with \
             uvm_disable_hmm=1",
        )),
        (Some(AddressingMode::Hmm), Enforcement::Report)
        | (Some(AddressingMode::None) | None, _) => None,
    }
}

fn floor_mib(bytes: u64) -> u64 {
    bytes - bytes % MIB
}
