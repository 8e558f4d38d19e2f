//! What a share may use. Plain values; how they lie in memory is the business of [`crate::page`].

use crate::id::{DeviceUuid, IdText};

/// Everything a limits page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitsSpec {
    /// UID of the ResourceClaim.
    pub claim_uid: IdText,
    /// Share ID of the allocation result.
    pub share_id: IdText,
    /// The card that the share is a part of.
    pub device_uuid: DeviceUuid,
    /// The part that may change while the claim lives.
    pub limits: Limits,
}

/// The limits of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of device memory, or `None` if only the cores are limited.
    pub memory_limit_bytes: Option<u64>,
    /// What each context on the card is charged ahead for the driver's own use of memory.
    pub driver_reserve_bytes: u64,
    /// What the driver holds by itself beyond what contexts were charged, as the node agent has it from NVML. It counts as
    /// taken; 0 until an agent has spoken.
    pub driver_excess_bytes: u64,
    /// Guaranteed share of GPU time.
    pub cores: Cores,
    /// What happens to GPU time that others leave idle.
    pub compute_policy: ComputePolicy,
    /// Rank among the tenants of the card.
    pub priority: Priority,
    /// What happens to plain allocations beyond the share.
    pub memory_policy: MemoryPolicy,
    /// What hooks do when the usage region cannot be used.
    pub broken_region: BrokenRegion,
    /// Microseconds of GPU time per second that the node agent grants at present; `None` until an agent
    /// has spoken, then the guarantee in `cores` holds.
    pub rate_us_per_s: Option<u32>,
}

impl Limits {
    /// A share that is limited in nothing but memory.
    #[must_use]
    pub fn memory(memory_limit_bytes: u64) -> Self {
        Self {
            memory_limit_bytes: Some(memory_limit_bytes),
            driver_reserve_bytes: 0,
            driver_excess_bytes: 0,
            cores: Cores::BEST_EFFORT,
            compute_policy: ComputePolicy::None,
            priority: Priority::DEFAULT,
            memory_policy: MemoryPolicy::Hard,
            broken_region: BrokenRegion::Closed,
            rate_us_per_s: None,
        }
    }
}

/// Percent of a card's GPU time, 0 to 100. 0 is best effort: no guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cores(u32);

impl Cores {
    /// No guarantee.
    pub const BEST_EFFORT: Self = Self(0);

    /// `None` above 100.
    #[must_use]
    pub const fn new(percent: u32) -> Option<Self> {
        if percent <= 100 {
            Some(Self(percent))
        } else {
            None
        }
    }

    /// 0 to 100.
    #[must_use]
    pub const fn percent(self) -> u32 {
        self.0
    }
}

/// −100 to 100, higher first, default 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(i32);

impl Priority {
    /// 0.
    pub const DEFAULT: Self = Self(0);

    /// `None` outside −100…100.
    #[must_use]
    pub const fn new(value: i32) -> Option<Self> {
        if value >= -100 && value <= 100 {
            Some(Self(value))
        } else {
            None
        }
    }

    /// −100 to 100.
    #[must_use]
    pub const fn value(self) -> i32 {
        self.0
    }
}

/// What happens to GPU time that others leave idle, and whether there is a cap at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputePolicy {
    /// Not metered.
    None,
    /// The guarantee first, then idle time by weight.
    Balance,
    /// Never more than the guarantee.
    Fixed,
    /// Exclusive time slices.
    Token,
}

/// What happens to plain allocations beyond the share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPolicy {
    /// Refused with `CUDA_ERROR_OUT_OF_MEMORY`.
    Hard,
    /// They become managed memory that prefers the host.
    Spill,
}

/// What hooks do when the usage region is missing, too short, of another version or full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokenRegion {
    /// Refuse allocations.
    Closed,
    /// Let allocations through uncounted.
    Open,
}
