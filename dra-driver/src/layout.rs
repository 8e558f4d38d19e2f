//! Where the driver keeps things on the node. The one place that spells these paths.

use std::path::{Path, PathBuf};

use drava_vgpu_abi::paths;

use crate::claim::{ClaimUid, ShareId};
use crate::options::Paths;

/// File that the CDI hook leaves in the usage directory of a share: the container runtime has applied the CDI spec.
pub const MARK: &str = "injected";

/// Begins the file names of the CDI specs that the driver writes; the claim UID and `.json` follow.
pub const SPEC_PREFIX: &str = "gpu.drava.dev-claim-";

/// Paths on the node.
#[derive(Debug, Clone)]
pub struct Layout {
    state_dir: PathBuf,
    run_dir: PathBuf,
    cdi_dir: PathBuf,
}

impl Layout {
    /// Below the directories of the command line.
    #[must_use]
    pub fn new(paths: &Paths) -> Self {
        Self {
            state_dir: paths.state_dir.clone(),
            run_dir: paths.run_dir.clone(),
            cdi_dir: paths.cdi_dir.clone(),
        }
    }

    /// What must survive a reboot.
    #[must_use]
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    /// CDI specs of all vendors.
    #[must_use]
    pub fn cdi_dir(&self) -> &Path {
        &self.cdi_dir
    }

    /// Records, and the claims' limits directories.
    #[must_use]
    pub fn claims(&self) -> PathBuf {
        self.state_dir.join("claims")
    }

    /// Lock files.
    #[must_use]
    pub fn locks(&self) -> PathBuf {
        self.state_dir.join("locks")
    }

    /// Limits of all shares of a claim.
    #[must_use]
    pub fn claim(&self, uid: &ClaimUid) -> PathBuf {
        self.claims().join(uid.as_str())
    }

    /// Directory that the containers of a share see read-only.
    #[must_use]
    pub fn limits(&self, uid: &ClaimUid, share: &ShareId) -> PathBuf {
        self.claim(uid).join(share.as_str()).join(paths::LIMITS_DIR)
    }

    /// Usage regions of all claims.
    #[must_use]
    pub fn usages(&self) -> PathBuf {
        self.run_dir.join(paths::USAGE_DIR)
    }

    /// Usage regions of all shares of a claim.
    #[must_use]
    pub fn claim_usage(&self, uid: &ClaimUid) -> PathBuf {
        self.usages().join(uid.as_str())
    }

    /// File that shows that a container runtime has given the share to a container.
    #[must_use]
    pub fn marker(&self, uid: &ClaimUid, share: &ShareId) -> PathBuf {
        self.usage(uid, share).join(MARK)
    }

    /// Mount point of a share's tmpfs, which its containers see writable.
    #[must_use]
    pub fn usage(&self, uid: &ClaimUid, share: &ShareId) -> PathBuf {
        self.claim_usage(uid).join(share.as_str())
    }
}
