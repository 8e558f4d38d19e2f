//! Memory limits of cgroups in the driver.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::MachineDescription;

/// First release of the driver whose NVML has `nvmlDeviceSetMemoryLimits_v1`.
pub const MEMORY_LIMITS_RELEASE: u32 = 615;

/// Where the real driver expects cgroup v2.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Memory limits of cgroups. The default is a driver that has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MemoryLimits {
    /// What counts and limits the memory.
    pub backend: MemoryLimitBackend,
    /// Directory that stands for the mount point of cgroup v2: a process is in the directory whose file `cgroup.procs` lists
    /// it or its nearest listed ancestor, else in the root. For computers whose cgroups a test must not change.
    pub cgroup_root: Option<PathBuf>,
}

impl MemoryLimits {
    /// Mount point of cgroup v2.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.cgroup_root
            .as_deref()
            .unwrap_or_else(|| Path::new(CGROUPS))
    }
}

/// What counts and limits the memory of cgroups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MemoryLimitBackend {
    /// Nothing: limits are not supported.
    #[default]
    None,
    /// The `dmem` controller of the kernel (Linux 6.14): a limit covers the cgroups below. All ancestors must have the
    /// controller enabled.
    Dmem,
    /// The driver itself: a limit covers processes of exactly this cgroup.
    Misc,
}

impl MemoryLimitBackend {
    /// Whether a limit of a cgroup covers memory that a process of `cgroup` allocated.
    #[must_use]
    pub fn covers(self, limited: &str, cgroup: &str) -> bool {
        match self {
            Self::None => false,
            Self::Misc => limited == cgroup,
            Self::Dmem => {
                limited == "/"
                    || cgroup
                        .strip_prefix(limited)
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
        }
    }
}

impl MachineDescription {
    /// Release of the driver, the first number of its version.
    #[must_use]
    pub fn driver_release(&self) -> u32 {
        let release = self.driver_version.split('.').next();
        release.and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Whether the NVML library has the functions of memory limits.
    #[must_use]
    pub fn has_memory_limits(&self) -> bool {
        self.driver_release() >= MEMORY_LIMITS_RELEASE
    }

    pub(super) fn check_memory_limits(&self) -> Result<(), String> {
        if self.memory_limits.backend != MemoryLimitBackend::None && !self.has_memory_limits() {
            return Err(format!(
                "memoryLimits.backend: driver {} has no memory limits; they begin with release {MEMORY_LIMITS_RELEASE}",
                self.driver_version
            ));
        }
        Ok(())
    }
}
