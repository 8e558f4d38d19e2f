//! Paths of the driver's files on the node.

use std::path::{Path, PathBuf};

use drava_vgpu_abi::paths;

use crate::node::claim::{ClaimUid, ShareId};
use crate::node::options::Paths;

/// File in the usage directory of a share that the CDI hook empties when the container runtime applies the CDI spec.
pub const PENDING: &str = "pending";

/// Prefix of the file names of the driver's CDI specs; the claim UID and `.json` follow.
pub const SPEC_PREFIX: &str = "gpu.drava.dev-claim-";

/// Prefix of the file names of the CDI specs that claims share; the name of the base and `.json` follow.
pub const BASE_PREFIX: &str = "gpu.drava.dev-base-";

/// Paths below the directories of [`Paths`].
#[derive(Debug, Clone)]
pub struct Layout {
    state_dir: PathBuf,
    run_dir: PathBuf,
    cdi_dir: PathBuf,
}

impl Layout {
    /// Returns the layout of these directories.
    #[must_use]
    pub fn new(paths: &Paths) -> Self {
        Self {
            state_dir: paths.state_dir.clone(),
            run_dir: paths.run_dir.clone(),
            cdi_dir: paths.cdi_dir.clone(),
        }
    }

    /// Directory of state that survives a reboot.
    #[must_use]
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    /// Directory of the CDI specs of all vendors.
    #[must_use]
    pub fn cdi_dir(&self) -> &Path {
        &self.cdi_dir
    }

    /// Directory of the claim records and limits directories.
    #[must_use]
    pub fn claims(&self) -> PathBuf {
        self.state_dir.join("claims")
    }

    /// Directory of the lock files.
    #[must_use]
    pub fn locks(&self) -> PathBuf {
        self.state_dir.join("locks")
    }

    /// Directory of the limits of a claim.
    #[must_use]
    pub fn claim(&self, uid: &ClaimUid) -> PathBuf {
        self.claims().join(uid.as_str())
    }

    /// Limits directory of a share, mounted read-only into its containers.
    #[must_use]
    pub fn limits(&self, uid: &ClaimUid, share: &ShareId) -> PathBuf {
        self.claim(uid).join(share.as_str()).join(paths::LIMITS_DIR)
    }

    /// Record of the faults of GPUs.
    #[must_use]
    pub fn gpu_health(&self) -> PathBuf {
        self.run_dir.join("gpu-health.json")
    }

    /// Directory of the files that name the cgroups with memory limits by the NVIDIA driver, by claim. They end with a reboot, as
    /// the cgroups do.
    #[must_use]
    pub fn cgroup_limits(&self) -> PathBuf {
        self.run_dir.join("cgroup-limits")
    }

    /// Socket for the CDI hooks that ask for these limits.
    #[must_use]
    pub fn cgroup_limits_socket(&self) -> PathBuf {
        self.run_dir.join("cgroup-limits.sock")
    }

    /// Directory of the daemons of MPS, by GPU. They end with a reboot.
    #[must_use]
    pub fn mps(&self) -> PathBuf {
        self.run_dir.join("mps")
    }

    /// Directory of the daemon of MPS of a GPU.
    #[must_use]
    pub fn mps_gpu(&self, gpu: &str) -> PathBuf {
        self.mps().join(gpu)
    }

    /// Directory of the usage regions of all claims.
    #[must_use]
    pub fn usages(&self) -> PathBuf {
        self.run_dir.join(paths::USAGE_DIR)
    }

    /// Directory of the usage regions of a claim.
    #[must_use]
    pub fn claim_usage(&self, uid: &ClaimUid) -> PathBuf {
        self.usages().join(uid.as_str())
    }

    /// File of a share that no container has got yet, see [`PENDING`].
    #[must_use]
    pub fn pending(&self, uid: &ClaimUid, share: &ShareId) -> PathBuf {
        self.usage(uid, share).join(PENDING)
    }

    /// Usage directory of a share: a tmpfs, mounted read-write into its containers.
    #[must_use]
    pub fn usage(&self, uid: &ClaimUid, share: &ShareId) -> PathBuf {
        self.claim_usage(uid).join(share.as_str())
    }
}
