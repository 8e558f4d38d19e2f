//! What a card has to give: usable memory, the driver's own use, and the totals that its shares must not exceed.
//!
//! The publisher, the prepare guard and the limits page take these from here, so that what is offered, what is
//! checked and what is enforced are the same figures.

use std::fmt;

use drava_nvml::{AddressingMode, Card, ComputeMode, Memory, Mig};

/// 1 MiB, the step of every memory amount.
pub const MIB: u64 = 1 << 20;

/// Shares that one card takes at most ("slots") until a node profile says otherwise.
pub const DEFAULT_SPLIT_COUNT: u64 = 10;

/// Percent of a card's compute.
pub const ALL_CORES: u64 = 100;

/// Totals over all shares of one card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareTotals {
    /// Device memory.
    pub memory_bytes: u64,
    /// Percent of the card's compute.
    pub cores: u64,
    /// Number of shares.
    pub slots: u64,
}

/// What a card is published as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishMode {
    /// The whole card, and shares of it.
    WholeAndShares(ShareTotals),
    /// The whole card only, and why it is not shared.
    WholeOnly(UnavailableReason),
    /// Nothing, and why.
    Unpublished(UnavailableReason),
}

/// Why a card is not offered, or not fully. Its text says what a person can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnavailableReason {
    /// MIG mode is on.
    Mig,
    /// Compute mode Prohibited.
    Prohibited,
    /// Compute mode Exclusive_Process.
    ExclusiveProcess,
    /// Confidential computing.
    ConfidentialComputing,
    /// NVML has no figure for the card's memory.
    NoMemoryFigure,
    /// The driver's own use leaves nothing.
    NoMemory,
}

impl UnavailableReason {
    /// In one word, as the value of a taint.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Mig => "mig-mode",
            Self::Prohibited => "compute-mode-prohibited",
            Self::ExclusiveProcess => "compute-mode-exclusive-process",
            Self::ConfidentialComputing => "confidential-computing",
            Self::NoMemoryFigure => "no-memory-figure",
            Self::NoMemory => "no-memory",
        }
    }
}

impl fmt::Display for UnavailableReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mig => {
                "MIG mode is on; partitions are not served yet, turn MIG mode off to use the card"
            }
            Self::Prohibited => {
                "compute mode is Prohibited; `nvidia-smi -c DEFAULT` makes the card usable"
            }
            Self::ExclusiveProcess => {
                "compute mode is Exclusive_Process; `nvidia-smi -c DEFAULT` allows shares"
            }
            Self::ConfidentialComputing => {
                "the node runs in confidential computing mode, in which memory is not shared"
            }
            Self::NoMemoryFigure => "the card gives no figure for its memory",
            Self::NoMemory => "the card has no memory to share",
        })
    }
}

/// Decides what `card` is published as.
#[must_use]
pub fn publish_mode(card: &Card, confidential_computing: bool) -> PublishMode {
    if matches!(card.mig, Mig::Capable { enabled: true, .. }) {
        return PublishMode::Unpublished(UnavailableReason::Mig);
    }
    match card.compute_mode {
        ComputeMode::Prohibited => return PublishMode::Unpublished(UnavailableReason::Prohibited),
        ComputeMode::ExclusiveProcess => {
            return PublishMode::WholeOnly(UnavailableReason::ExclusiveProcess);
        }
        ComputeMode::Default | ComputeMode::Unknown => {}
    }
    if confidential_computing {
        return PublishMode::WholeOnly(UnavailableReason::ConfidentialComputing);
    }
    let Some(usable) = usable_memory_bytes(card) else {
        return PublishMode::WholeOnly(UnavailableReason::NoMemoryFigure);
    };
    let memory_bytes = usable.saturating_sub(floor_mib(driver_reserve_bytes(card) + MIB - 1));
    if memory_bytes == 0 {
        return PublishMode::WholeOnly(UnavailableReason::NoMemory);
    }
    PublishMode::WholeAndShares(ShareTotals {
        memory_bytes,
        cores: ALL_CORES,
        slots: DEFAULT_SPLIT_COUNT,
    })
}

/// Memory that programs can allocate: total − reserved, rounded down to 1 MiB. `None` where the card gives no figure.
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

/// Memory that the driver takes for one context: the estimate that each process of a share is charged ahead, and the
/// margin that is kept from sharing for processes of no share (monitors).
///
/// A context holds local memory and stacks for every resident thread, so it grows with the number of multiprocessors;
/// 4 MiB for each is near what CUDA 12 and 13 take (T4 about 150, A100 about 430, H100 about 520 MiB).
#[must_use]
pub fn driver_reserve_bytes(card: &Card) -> u64 {
    const UNKNOWN_CARD: u64 = 512 * MIB;
    card.multiprocessors
        .map_or(UNKNOWN_CARD, |count| u64::from(count) * 4 * MIB)
}

/// Why no hard memory limit can be promised on this card; `None` where it can.
#[must_use]
pub fn unenforceable(card: &Card) -> Option<&'static str> {
    match card.addressing_mode {
        Some(AddressingMode::Ats) => Some(
            "the card shares page tables with the CPU (ATS); host allocations can live in its memory",
        ),
        Some(AddressingMode::None | AddressingMode::Hmm) | None => None,
    }
}

fn floor_mib(bytes: u64) -> u64 {
    bytes - bytes % MIB
}
