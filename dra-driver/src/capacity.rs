//! Capacity of a GPU: usable memory, driver reserve, and the totals of its shares.
//!
//! The [plan of a GPU](crate::card_plan) and the limits page use these functions, so published, checked and enforced
//! amounts agree.

use std::fmt;

use drava_api::names;
use drava_nvml::{AddressingMode, Card, Memory};

/// 1 MiB in bytes, the granularity of memory amounts.
pub const MIB: u64 = 1 << 20;

/// All GPU time, percent.
pub const ALL_CORES: u64 = 100;

/// Totals of all shares of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareTotals {
    /// GPU memory, bytes.
    pub memory_bytes: u64,
    /// Percent of GPU time.
    pub cores: u64,
    /// Number of shares.
    pub slots: u64,
}

impl ShareTotals {
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

/// Reason why a GPU, or devices of a GPU, are not published or not usable. The text has the remedy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnavailableReason {
    /// MIG mode is enabled, so the GPU has partitions only.
    Mig,
    /// MIG mode is disabled, so the GPU has no partitions.
    MigDisabled,
    /// MIG mode is enabled, and NVML lists no profile.
    NoMigProfiles,
    /// A MIG instance that drava did not create uses the slices or engines.
    ForeignInstance,
    /// Compute mode Prohibited.
    Prohibited,
    /// Compute mode Exclusive_Process.
    ExclusiveProcess,
    /// Processes use the GPU through MPS.
    Mps,
    /// Confidential computing.
    ConfidentialComputing,
    /// NVML reports no memory size.
    NoMemoryFigure,
    /// The driver reserve uses all memory.
    NoMemory,
    /// The node profile excludes the GPU.
    ProfileExcluded,
    /// The mode of the node profile excludes the device.
    ProfileMode,
    /// The node profile does not list the MIG profile.
    ProfileMigProfiles,
    /// The node profile pins other partitions.
    ProfileMigLayout,
    /// The node profile changes amounts of the device.
    ProfileAmounts,
    /// A device plugin offers the GPUs of the node.
    DevicePlugin,
    /// Another DRA driver publishes the GPU.
    OtherDriver,
    /// The mode of the node profile needs MIG mode, which takes a reset of the GPU.
    ResetForMig,
    /// The mode of the node profile needs MIG mode off, which takes a reset of the GPU.
    ResetForShares,
}

impl UnavailableReason {
    /// Returns the reason as the value of a taint.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Mig => "mig-mode",
            Self::MigDisabled => "mig-mode-disabled",
            Self::NoMigProfiles => "no-mig-profiles",
            Self::ForeignInstance => names::FOREIGN_INSTANCE,
            Self::Prohibited => "compute-mode-prohibited",
            Self::ExclusiveProcess => "compute-mode-exclusive-process",
            Self::Mps => "mps",
            Self::ConfidentialComputing => "confidential-computing",
            Self::NoMemoryFigure => "no-memory-figure",
            Self::NoMemory => "no-memory",
            Self::ProfileExcluded => "profile-excluded",
            Self::ProfileMode => "profile-mode",
            Self::ProfileMigProfiles => "profile-mig-profiles",
            Self::ProfileMigLayout => "profile-mig-layout",
            Self::ProfileAmounts => "profile-amounts",
            Self::DevicePlugin => names::DEVICE_PLUGIN,
            Self::OtherDriver => names::OTHER_DRIVER,
            Self::ResetForMig | Self::ResetForShares => "reset-required",
        }
    }

    /// Returns whether a reset of the GPU is required for what the node profile says.
    #[must_use]
    pub const fn is_reset(self) -> bool {
        matches!(self, Self::ResetForMig | Self::ResetForShares)
    }

    /// Returns the text for the GPU with this UUID: commands name the GPU.
    #[must_use]
    pub fn of_gpu(self, uuid: &str) -> String {
        self.to_string().replace("UUID", uuid)
    }

    /// Returns whether the administrator's node profile or another owner of the GPU is the reason, so that the device
    /// itself works.
    #[must_use]
    pub const fn is_of_profile(self) -> bool {
        match self {
            Self::ProfileExcluded
            | Self::ProfileMode
            | Self::ProfileMigProfiles
            | Self::ProfileMigLayout
            | Self::ProfileAmounts
            | Self::DevicePlugin
            | Self::OtherDriver => true,
            Self::Mig
            | Self::MigDisabled
            | Self::NoMigProfiles
            | Self::ForeignInstance
            | Self::Prohibited
            | Self::ExclusiveProcess
            | Self::Mps
            | Self::ConfidentialComputing
            | Self::NoMemoryFigure
            | Self::NoMemory
            | Self::ResetForMig
            | Self::ResetForShares => false,
        }
    }
}

impl fmt::Display for UnavailableReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mig => {
                "MIG mode is enabled, so the GPU has partitions only; run `nvidia-smi -mig 0` to use it whole or shared"
            }
            Self::MigDisabled => {
                "MIG mode is disabled, so the GPU has no partitions; run `nvidia-smi -mig 1` to partition it"
            }
            Self::NoMigProfiles => {
                "MIG mode is enabled, and NVML lists no profile; upgrade the NVIDIA driver, or run `nvidia-smi -mig 0`"
            }
            Self::ForeignInstance => {
                "a MIG instance that drava did not create uses its slices or engines; run `nvidia-smi mig -lgi` to find it"
            }
            Self::Prohibited => {
                "compute mode is Prohibited; run `nvidia-smi -c DEFAULT` to use the GPU"
            }
            Self::ExclusiveProcess => {
                "compute mode is Exclusive_Process; run `nvidia-smi -c DEFAULT` to allow shares"
            }
            Self::Mps => {
                "processes use the GPU through MPS, which bypasses the limits of shares; stop the MPS control daemon to \
                 allow shares"
            }
            Self::ConfidentialComputing => {
                "confidential computing is on, which excludes shares"
            }
            Self::NoMemoryFigure => "NVML reports no memory size for the GPU",
            Self::NoMemory => "the GPU has no memory to share",
            Self::ProfileExcluded => "the node profile excludes the GPU",
            Self::ProfileMode => "the mode of the node profile excludes the device",
            Self::ProfileMigProfiles => "the node profile does not list the MIG profile",
            Self::ProfileMigLayout => "the node profile pins other MIG partitions",
            Self::ResetForMig => {
                "the node profile needs MIG mode, which this GPU changes at a reset only; drain the GPU, then run \
                 `nvidia-smi -mig 1 -i UUID` and `nvidia-smi --gpu-reset -i UUID`"
            }
            Self::ResetForShares => {
                "the node profile needs MIG mode off, which this GPU changes at a reset only; drain the GPU, then run \
                 `nvidia-smi -mig 0 -i UUID` and `nvidia-smi --gpu-reset -i UUID`"
            }
            Self::ProfileAmounts => "the node profile changes the amounts of the device",
            Self::DevicePlugin => {
                "a device plugin offers the GPUs of this node; remove it from the node, or the label gpu.drava.dev/enabled"
            }
            Self::OtherDriver => {
                "another DRA driver publishes the GPU; remove it from the node, or the label gpu.drava.dev/enabled"
            }
        })
    }
}

/// Returns the memory that programs can allocate, bytes: total minus reserved, rounded down to 1 MiB. `None` when NVML
/// reports no memory size.
#[must_use]
pub fn usable_memory_bytes(card: &Card) -> Option<u64> {
    match card.memory {
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
/// multiprocessors. 4 MiB each approximates CUDA 12 and 13 (T4 150 MiB, A100 430 MiB, H100 520 MiB).
#[must_use]
pub fn driver_reserve_bytes(card: &Card) -> u64 {
    const DEFAULT: u64 = 512 * MIB;
    card.multiprocessors
        .map_or(DEFAULT, |count| u64::from(count) * 4 * MIB)
}

/// Returns the reason why memory limits cannot be guaranteed on this GPU; `None` when they can.
#[must_use]
pub fn unenforceable(card: &Card) -> Option<&'static str> {
    match card.addressing_mode {
        Some(AddressingMode::Ats) => Some(
            "the GPU shares page tables with the CPU (ATS); host allocations can reside in GPU memory",
        ),
        Some(AddressingMode::None | AddressingMode::Hmm) | None => None,
    }
}

fn floor_mib(bytes: u64) -> u64 {
    bytes - bytes % MIB
}
