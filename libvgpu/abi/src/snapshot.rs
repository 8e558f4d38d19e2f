//! Reading a region from outside, as bytes: for the node agent, which maps nothing that tenants can truncate.
//!
//! The bytes are hostile input. Whatever they are, reading them ends with numbers and without a panic; what the
//! numbers mean beyond their own share is for the reader to bound.

use crate::ledger::{MAX_BYTES, Owner};
use crate::region::{
    REGION_ABI_VERSION, REGION_MAGIC, REGION_SIZE, SLOT_COUNT, SLOT_SIZE, SLOTS_OFFSET, SlotIndex,
};
use core::fmt;

/// Why bytes are not a usage region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionError {
    /// Fewer than [`REGION_SIZE`] bytes: the file was truncated.
    Short {
        /// How many there were.
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
                "usage region has ABI version {found}, this build knows {REGION_ABI_VERSION}"
            ),
        }
    }
}

impl core::error::Error for RegionError {}

/// A share's numbers at about one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareUsage {
    /// Bytes taken by all processes.
    pub total_bytes: u64,
    /// Highest total ever.
    pub peak_bytes: u64,
    /// Allocations refused.
    pub denied: u64,
    /// Slots reclaimed from dead processes.
    pub reclaimed: u64,
    /// Microseconds of GPU time that the share may still use; negative is debt.
    pub credit_us: i64,
    /// When a process last took GPU time or waited for it, microseconds of `CLOCK_MONOTONIC`; 0 is never.
    pub last_demand_us: u64,
    /// Launches that went ahead after the longest wait without credit or token.
    pub admission_timeouts: u64,
    /// Until when what was launched will keep the card busy, microseconds of `CLOCK_MONOTONIC`; 0 where nobody says so.
    pub busy_until_us: u64,
}

/// A process's numbers at about one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Which slot. Whether the owner lives, the lock on the slot's bytes says.
    pub slot: SlotIndex,
    /// Who wrote it, by its own account.
    pub owner: Owner,
    /// Rises with each owner of the slot.
    pub generation: u64,
    /// Bytes taken.
    pub used_bytes: u64,
    /// Highest `used_bytes`.
    pub peak_bytes: u64,
    /// Part of `used_bytes` charged for the driver's own use.
    pub driver_bytes: u64,
    /// Part of `used_bytes` that other processes may open.
    pub exported_bytes: u64,
    /// Allocations refused.
    pub denied: u64,
    /// Microseconds of GPU time used.
    pub gpu_time_us: u64,
    /// Microseconds spent waiting for GPU time.
    pub throttled_us: u64,
    /// Kernels, graphs, fills and copies on the card that were launched.
    pub launches: u64,
    /// Single launches of at least [`crate::bucket::LONG_KERNEL_US`].
    pub long_kernels: u64,
    /// The longest launch, microseconds.
    pub longest_kernel_us: u64,
}

/// A region's content.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a> {
    bytes: &'a [u8],
}

impl<'a> Snapshot<'a> {
    /// Reads a region's header. A region that nobody has used yet is empty, not an error.
    ///
    /// # Errors
    /// If the bytes cannot be a region of this ABI version.
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

    /// The share's own numbers.
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
        }
    }

    /// The slots that somebody owns or owned until it died.
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
