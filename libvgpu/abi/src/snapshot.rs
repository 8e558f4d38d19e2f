//! Decodes a region from bytes: for the node agent, which maps no file that tenants can truncate.
//!
//! The bytes are hostile input. Decoding never panics and always returns numbers; the caller bounds what they mean
//! for other shares.

use crate::ledger::{MAX_BYTES, Owner};
use crate::region::{
    REGION_ABI_VERSION, REGION_MAGIC, REGION_SIZE, SLOT_COUNT, SLOT_SIZE, SLOTS_OFFSET, SlotIndex,
};
use core::fmt;

/// Reason why bytes are not a usage region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionError {
    /// Fewer than [`REGION_SIZE`] bytes: the file was truncated.
    Short {
        /// Actual length.
        len: usize,
    },
    /// The first word is neither zero nor the region's magic.
    Magic,
    /// Another ABI version.
    Version {
        /// The version found.
        found: u64,
    },
}

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { len } => write!(f, "usage region has {len} of {REGION_SIZE} bytes"),
            Self::Magic => f.write_str("file is not a usage region"),
            Self::Version { found } => write!(
                f,
                "usage region has ABI version {found}, expected {REGION_ABI_VERSION}"
            ),
        }
    }
}

impl core::error::Error for RegionError {}

/// Counters of a share, read at about one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareUsage {
    /// Bytes used by all processes.
    pub total_bytes: u64,
    /// Highest total.
    pub peak_bytes: u64,
    /// Allocations denied.
    pub denied: u64,
    /// Slots reclaimed from dead processes.
    pub reclaimed: u64,
    /// GPU time that the share may still use, microseconds; negative is debt.
    pub credit_us: i64,
    /// When a process last took GPU time or waited for it, microseconds of `CLOCK_MONOTONIC`; 0 is never.
    pub last_demand_us: u64,
    /// Launches admitted after the longest wait without credit.
    pub admission_timeouts: u64,
    /// Estimated end of the launched work, microseconds of `CLOCK_MONOTONIC`; 0 if not reported.
    pub busy_until_us: u64,
    /// When a process last waited for memory of the limit that other shares use, microseconds of `CLOCK_MONOTONIC`; 0 is never.
    pub memory_demand_us: u64,
    /// The suspension that a process demands to end, as in the limits page; 0 is none.
    pub demanded: u64,
}

/// Counters of a process, read at about one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Slot index. The lock on the slot's bytes says whether the owner is alive.
    pub slot: SlotIndex,
    /// Owner, as the process itself wrote it.
    pub owner: Owner,
    /// Generation, which increases with each owner of the slot.
    pub generation: u64,
    /// Bytes used.
    pub used_bytes: u64,
    /// Highest `used_bytes`.
    pub peak_bytes: u64,
    /// Part of `used_bytes` charged for libcuda's own memory.
    pub driver_bytes: u64,
    /// Part of `used_bytes` that other processes may open.
    pub exported_bytes: u64,
    /// Allocations denied.
    pub denied: u64,
    /// GPU time used, microseconds.
    pub gpu_time_us: u64,
    /// Time spent waiting for GPU time, microseconds.
    pub throttled_us: u64,
    /// Number of launched kernels, graphs, fills and copies on the GPU.
    pub launches: u64,
    /// Launches of at least [`crate::bucket::LONG_KERNEL_US`].
    pub long_kernels: u64,
    /// Duration of the longest launch, microseconds.
    pub longest_kernel_us: u64,
}

/// Content of a region.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a> {
    bytes: &'a [u8],
}

impl<'a> Snapshot<'a> {
    /// Decodes a region's header. A region that was never used is empty, not an error.
    ///
    /// # Errors
    /// If the bytes are not a region of this ABI version.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, RegionError> {
        let Some(bytes) = bytes.get(..REGION_SIZE) else {
            return Err(RegionError::Short { len: bytes.len() });
        };
        let magic = word(bytes, 0);
        if magic != REGION_MAGIC && magic != 0 {
            return Err(RegionError::Magic);
        }
        let found = word(bytes, 8);
        if found != REGION_ABI_VERSION && found != 0 {
            return Err(RegionError::Version { found });
        }
        Ok(Self { bytes })
    }

    /// Returns the share's counters.
    #[must_use]
    pub fn share(&self) -> ShareUsage {
        ShareUsage {
            total_bytes: word(self.bytes, 128) & MAX_BYTES,
            peak_bytes: word(self.bytes, 136),
            denied: word(self.bytes, 256),
            reclaimed: word(self.bytes, 272),
            credit_us: word(self.bytes, 384).cast_signed(),
            last_demand_us: word(self.bytes, 400),
            admission_timeouts: word(self.bytes, 408),
            busy_until_us: word(self.bytes, 416),
            memory_demand_us: word(self.bytes, 424),
            demanded: word(self.bytes, 432),
        }
    }

    /// Returns the slots that have an owner, alive or dead.
    pub fn processes(&self) -> impl Iterator<Item = ProcessUsage> + 'a {
        let bytes = self.bytes;
        (0..SLOT_COUNT).filter_map(move |index| {
            let slot = SlotIndex::new(index)?;
            let start = SLOTS_OFFSET.checked_add(index.checked_mul(SLOT_SIZE)?)?;
            process(slot, bytes.get(start..)?)
        })
    }
}

fn process(slot: SlotIndex, bytes: &[u8]) -> Option<ProcessUsage> {
    let state = word(bytes, 0);
    if state & 0xff != 1 {
        return None;
    }
    Some(ProcessUsage {
        slot,
        owner: Owner {
            pid: u32::try_from(word(bytes, 8)).unwrap_or(0),
            start_time: word(bytes, 16),
            pid_namespace: word(bytes, 24),
        },
        generation: state >> 8,
        used_bytes: word(bytes, 32),
        driver_bytes: word(bytes, 48),
        peak_bytes: word(bytes, 56),
        exported_bytes: word(bytes, 64),
        denied: word(bytes, 128),
        gpu_time_us: word(bytes, 136),
        throttled_us: word(bytes, 144),
        launches: word(bytes, 152),
        long_kernels: word(bytes, 160),
        longest_kernel_us: word(bytes, 168),
    })
}

fn word(bytes: &[u8], offset: usize) -> u64 {
    bytes
        .get(offset..)
        .and_then(|rest| rest.first_chunk::<8>())
        .map_or(0, |word| u64::from_ne_bytes(*word))
}
