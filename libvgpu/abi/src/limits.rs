//! The limits of a share as plain values. [`crate::page`] defines their bytes.

use crate::id::{DeviceUuid, IdText};

/// Content of a limits page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitsSpec {
    /// UID of the ResourceClaim.
    pub claim_uid: IdText,
    /// Share ID of the allocation result.
    pub share_id: IdText,
    /// GPU that the share is a part of.
    pub device_uuid: DeviceUuid,
    /// The part that may change during the claim's lifetime.
    pub limits: Limits,
}

/// Limits of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of GPU memory; `None` if only the cores are limited.
    pub memory_limit_bytes: Option<u64>,
    /// Estimated memory of libcuda per context, charged when a context is created.
    pub driver_reserve_bytes: u64,
    /// Memory of libcuda beyond the charged contexts, as the node agent measures with NVML. Counts as used; 0 until
    /// the agent reports.
    pub driver_excess_bytes: u64,
    /// What contexts are charged beyond the memory that they have turned out to need; 0 until the agent reports.
    pub driver_surplus_bytes: u64,
    /// Part of the memory limit that other shares use: the share does not get it before they have given it back. Programs see the
    /// whole limit. See [`crate::region::Header::memory_demand_us`].
    pub lent_bytes: u64,
    /// Guaranteed share of GPU time.
    pub cores: Cores,
    /// Use of idle GPU time.
    pub compute_policy: ComputePolicy,
    /// Priority among the shares of the GPU.
    pub priority: Priority,
    /// Handling of plain allocations beyond the limit.
    pub memory_policy: MemoryPolicy,
    /// Behavior of the hooks if the usage region is unusable.
    pub broken_region: BrokenRegion,
    /// Whether the share may be suspended. If not, no call of a program passes through libvgpu only to show a demand, see
    /// [`crate::page::SUSPENDED_OFFSET`].
    pub can_suspend: bool,
    /// Microseconds of GPU time per second that the node agent grants; `None` until the agent sets a rate, then the
    /// guarantee in `cores` applies.
    pub rate_us_per_s: Option<u32>,
}

impl Limits {
    /// Returns limits that restrict memory only.
    #[must_use]
    pub fn memory(memory_limit_bytes: u64) -> Self {
        Self {
            memory_limit_bytes: Some(memory_limit_bytes),
            driver_reserve_bytes: 0,
            driver_excess_bytes: 0,
            driver_surplus_bytes: 0,
            lent_bytes: 0,
            cores: Cores::BEST_EFFORT,
            compute_policy: ComputePolicy::None,
            priority: Priority::DEFAULT,
            memory_policy: MemoryPolicy::Hard,
            broken_region: BrokenRegion::Closed,
            can_suspend: false,
            rate_us_per_s: None,
        }
    }
}

/// Percent of GPU time, 0 to 100. 0 is best effort: no guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cores(u32);

impl Cores {
    /// No guarantee.
    pub const BEST_EFFORT: Self = Self(0);

    /// Returns `None` above 100.
    #[must_use]
    pub const fn new(percent: u32) -> Option<Self> {
        if percent <= 100 {
            Some(Self(percent))
        } else {
            None
        }
    }

    /// Returns 0 to 100.
    #[must_use]
    pub const fn percent(self) -> u32 {
        self.0
    }
}

/// Priority, −100 to 100; a higher value comes first. The default is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(i32);

impl Priority {
    /// 0.
    pub const DEFAULT: Self = Self(0);

    /// Returns `None` outside −100…100.
    #[must_use]
    pub const fn new(value: i32) -> Option<Self> {
        if value >= -100 && value <= 100 {
            Some(Self(value))
        } else {
            None
        }
    }

    /// Returns −100 to 100.
    #[must_use]
    pub const fn value(self) -> i32 {
        self.0
    }
}

/// How GPU time is limited, and which share uses idle time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputePolicy {
    /// GPU time is not metered.
    None,
    /// The guarantee first, then idle time by weight.
    Balance,
    /// Never more than the guarantee.
    Fixed,
}

/// Handling of plain allocations beyond the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPolicy {
    /// Denied with `CUDA_ERROR_OUT_OF_MEMORY`.
    Hard,
    /// Replaced by managed memory with the host as preferred location.
    Spill,
}

/// Behavior of the hooks if the usage region is missing, too short, of another version or full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokenRegion {
    /// Deny allocations.
    Closed,
    /// Allow allocations without counting them.
    Open,
}
