//! Which artifacts the containers of a claim use: those of now, or, where the claim's record was damaged, those that its
//! CDI spec names.
//!
//! Containers that run keep the libvgpu and the way of delivery that they started with, and so must those that join
//! them. A damaged record is rebuilt from the API server, which knows nothing of that. Pure.

use std::ffi::OsStr;
use std::path::Path;

use drava_cdi::{ContainerEdits, Spec};

use super::{Delivery, Prepared};
use crate::artifacts::{Artifact, Installed, Stubs};
use crate::claim::ClaimUid;
use crate::options;

/// Artifacts that the containers of a claim use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Used {
    /// Content hash of `libvgpu.so`.
    pub library: String,
    /// Content hash of the CDI hook.
    pub hook: String,
    /// How the library gets into the containers.
    pub delivery: Delivery,
}

impl Used {
    /// What a claim gets that is prepared now.
    #[must_use]
    pub fn now(delivery: options::Delivery, installed: &Installed) -> Self {
        Self {
            library: installed.library.clone(),
            hook: installed.hook.clone(),
            delivery: Delivery::of(delivery, installed),
        }
    }

    /// What `spec`, which is there for the claim, was made with; `None` where it is of other devices than these, so that
    /// no container of theirs was made with it. What it does not name, because no device of the claim needs it, is as
    /// now.
    #[must_use]
    pub fn of_spec(
        spec: &Spec,
        uid: &ClaimUid,
        devices: &[Prepared],
        state_dir: &Path,
        delivery: options::Delivery,
        installed: &Installed,
    ) -> Option<Self> {
        let mut names: Vec<String> = devices.iter().map(|device| device.cdi_name(uid)).collect();
        names.sort();
        if !spec.devices().iter().map(|device| &device.name).eq(&names) {
            return None;
        }
        let hash = |artifact| {
            let mut files = edits(spec).flat_map(files);
            files.find_map(|file| hash_of(artifact, file, state_dir))
        };
        let now = Self::now(delivery, installed);
        let library = hash(Artifact::Library);
        let delivery = match (&library, hash(Artifact::CudaStub)) {
            (None, _) => now.delivery,
            (Some(_), None) => Delivery::Preload,
            (Some(_), Some(cuda)) => Delivery::Shim(Stubs {
                cuda,
                // A driver without NVML has no place for its stub.
                nvml: hash(Artifact::NvmlStub).unwrap_or_else(|| installed.stubs.nvml.clone()),
            }),
        };
        Some(Self {
            library: library.unwrap_or(now.library),
            hook: hash(Artifact::Hook).unwrap_or(now.hook),
            delivery,
        })
    }
}

fn edits(spec: &Spec) -> impl Iterator<Item = &ContainerEdits> {
    let of_devices = spec.devices().iter().map(|device| &device.container_edits);
    std::iter::once(spec.container_edits()).chain(of_devices)
}

/// Files on the node that containers, or hooks for them, use.
fn files(edits: &ContainerEdits) -> impl Iterator<Item = &Path> {
    let mounts = edits.mounts.iter().map(|mount| &mount.host_path);
    let hooks = edits.hooks.iter().map(|hook| &hook.path);
    mounts.chain(hooks).map(Path::new)
}

/// The version of `artifact` that lies at `path`.
fn hash_of(artifact: Artifact, path: &Path, state_dir: &Path) -> Option<String> {
    let hash = path.parent()?.file_name().and_then(OsStr::to_str)?;
    (artifact.path(state_dir, hash) == path).then(|| hash.to_owned())
}
