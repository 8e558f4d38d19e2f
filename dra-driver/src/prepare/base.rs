//! Edits that the devices of many claims share, as CDI devices of their own. Pure, except that discovered sockets are checked.
//!
//! kubelet passes a container a base before each device of a claim, so the CDI spec of a claim has only what differs. The name
//! of a base never changes, since kubelet keeps it with the claim and does not ask again when a container restarts. The content
//! follows the NVIDIA driver and the installed CDI hook.
//!
//! A base and a claim can be of two versions of the node driver. They meet only by paths in the container, which are those of
//! [`drava_vgpu_abi::paths`]: the hook of a base finds the shares of the container among its mounts.

use std::collections::BTreeMap;

use drava_api::names;
use drava_cdi::{
    ContainerEdits, Device, Driver, HookProgram, Invalid, METERED, Part, Spec, UNMETERED,
};
use drava_vgpu_abi::paths;
use serde::{Deserialize, Serialize};

use super::Access;
use crate::node::layout::PENDING;

/// Location of the edits that a claim shares with others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CommonEdits {
    /// The CDI spec of the claim: kubelet knows no other device. Default of records of older builds.
    #[default]
    InClaim,
    /// Bases.
    InBases {
        /// Whether the containers prefer the CUDA compatibility libraries of newer images, see [`Driver::compat`].
        compat: bool,
    },
}

/// A CDI device with the edits that all devices with one access have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Base {
    kind: BaseKind,
    compat: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum BaseKind {
    /// Shares.
    Share,
    /// Shares with graphics and video libraries.
    UnmeteredShare,
    /// Whole GPUs and MIG partitions.
    Whole,
    /// Access without allocation.
    Admin,
}

impl Base {
    /// Returns the base of devices with this access.
    #[must_use]
    pub fn of(access: &Access, compat: bool) -> Self {
        let kind = match access {
            Access::Share(share) if share.unmetered => BaseKind::UnmeteredShare,
            Access::Share(_) => BaseKind::Share,
            Access::Whole | Access::Partition(_) => BaseKind::Whole,
            Access::Admin => BaseKind::Admin,
        };
        Self { kind, compat }
    }

    /// Returns the name of the device, unique in its kind.
    #[must_use]
    pub fn name(self) -> &'static str {
        match (self.kind, self.compat) {
            (BaseKind::Share, false) => "share",
            (BaseKind::Share, true) => "share-compat",
            (BaseKind::UnmeteredShare, false) => "unmetered-share",
            (BaseKind::UnmeteredShare, true) => "unmetered-share-compat",
            (BaseKind::Whole, false) => "whole",
            (BaseKind::Whole, true) => "whole-compat",
            (BaseKind::Admin, false) => "admin",
            (BaseKind::Admin, true) => "admin-compat",
        }
    }

    /// Returns the qualified name, as used by kubelet and runtimes.
    #[must_use]
    pub fn qualified_name(self) -> String {
        format!("{}={}", names::CDI_BASE_KIND, self.name())
    }

    /// Returns the parts of the NVIDIA driver in the containers.
    #[must_use]
    pub fn parts(self) -> &'static [Part] {
        match self.kind {
            BaseKind::Whole | BaseKind::UnmeteredShare => UNMETERED,
            BaseKind::Share | BaseKind::Admin => METERED,
        }
    }

    /// Returns the edits. One process runs all hooks. The driver supports CUDA up to `cuda_version`.
    #[must_use]
    pub fn edits(
        self,
        driver: &Driver,
        hook: &HookProgram,
        cuda_version: Option<&str>,
    ) -> ContainerEdits {
        let mut edits = driver.edits(self.parts(), hook);
        if self.compat {
            edits.hooks.extend(driver.compat(hook, cuda_version));
        }
        match self.kind {
            BaseKind::Share | BaseKind::UnmeteredShare => {
                let stubs = [paths::CUDA_STUB, paths::NVML_STUB].into_iter();
                let replaced = stubs
                    .filter_map(|stub| driver.library(&stub.soname.to_string_lossy()))
                    .map(|library| library.path.clone());
                let replaced: Vec<String> = replaced.collect();
                edits.hooks.push(hook.preload(paths::LIBRARY, &replaced));
                // Last: it shows that all other edits were applied.
                let (run, usage) = (paths::RUN_DIR, paths::USAGE_DIR);
                edits
                    .hooks
                    .push(hook.mark(&format!("{run}/*/{usage}/{PENDING}")));
            }
            BaseKind::Whole | BaseKind::Admin => {}
        }
        edits.hooks = hook.joined(edits.hooks);
        edits
    }

    /// Returns the CDI spec.
    ///
    /// # Errors
    /// When a path of the driver is invalid in a spec.
    pub fn spec(
        self,
        driver: &Driver,
        hook: &HookProgram,
        cuda_version: Option<&str>,
    ) -> Result<Spec, Invalid> {
        let mut edits = self.edits(driver, hook, cuda_version);
        // Runtimes apply the edits of the spec once to a container, and those of the device, which needs one, for each mention.
        let device = Device {
            name: self.name().to_owned(),
            annotations: BTreeMap::new(),
            container_edits: ContainerEdits {
                env: std::mem::take(&mut edits.env),
                ..ContainerEdits::default()
            },
        };
        Spec::new(names::CDI_BASE_KIND, [device], edits)
    }
}
