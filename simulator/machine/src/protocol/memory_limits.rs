//! Memory limits of cgroups.

use serde::{Deserialize, Serialize};

/// Memory limits of one cgroup on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryLimitsState {
    /// Bytes that are guaranteed; 0 for none.
    pub soft_bytes: u64,
    /// Bytes that can be allocated at most; [`Self::NO_LIMIT`] for no limit.
    pub hard_bytes: u64,
}

impl MemoryLimitsState {
    /// `NVML_DEVICE_MEMORY_LIMIT_MAX`.
    pub const NO_LIMIT: u64 = u64::MAX;
    /// No limits.
    pub const NONE: Self = Self {
        soft_bytes: 0,
        hard_bytes: Self::NO_LIMIT,
    };
}

/// Request about the memory limits of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemoryLimitsRequest {
    /// Limits and use.
    Get,
    /// Replaces the limits; administrators only.
    Set(MemoryLimitsState),
}

/// The memory of the cgroup of a process, when that cgroup itself has a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupMemory {
    /// The limit.
    pub hard_bytes: u64,
    /// Memory that counts against it.
    pub used_bytes: u64,
}
