//! Versions of the artifacts that the containers of a claim use. Pure.
//!
//! All containers of a claim use the libvgpu and the delivery of the first. The API server, from which a damaged record
//! is rebuilt, does not have the versions; they are recovered from the CDI spec.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use drava_cdi::{ContainerEdits, Spec};

use super::{Delivery, Prepared};
use crate::node::artifacts::{Artifact, Installed, Stubs};
use crate::node::claim::ClaimUid;
use crate::node::options;

/// Versions of the artifacts of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactVersions {
    /// Content hash of `libvgpu.so`.
    pub library: String,
    /// Content hash of the CDI hook.
    pub hook: String,
    /// Delivery of the library.
    pub delivery: Delivery,
    /// Whether kubelet knows the bases of the claim.
    pub has_bases: bool,
}

impl ArtifactVersions {
    /// Returns the versions for a new claim.
    #[must_use]
    pub fn current(delivery: options::Delivery, installed: &Installed) -> Self {
        Self {
            library: installed.library.clone(),
            hook: installed.hook.clone(),
            delivery: Delivery::from_option(delivery, installed),
            has_bases: true,
        }
    }

    /// Returns the versions in the claim's CDI spec; `None` when the spec has other devices, so that no container of these
    /// devices was created with it. Artifacts that the spec does not name get the current version.
    #[must_use]
    pub fn from_spec(
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
        let current = Self::current(delivery, installed);
        let library = hash(Artifact::Library);
        let delivery = match (&library, hash(Artifact::CudaStub)) {
            (None, _) => current.delivery,
            (Some(_), None) => Delivery::Preload,
            (Some(_), Some(cuda)) => Delivery::Shim(Stubs {
                cuda,
                // A driver root without NVML has no stub of it.
                nvml: hash(Artifact::NvmlStub).unwrap_or_else(|| installed.stubs.nvml.clone()),
            }),
        };
        Some(Self {
            library: library.unwrap_or(current.library),
            hook: hash(Artifact::Hook).unwrap_or(current.hook),
            delivery,
            has_bases: edits(spec).all(|edits| edits.hooks.is_empty()),
        })
    }
}

/// Returns the hashes of the artifacts that a CDI spec names.
#[must_use]
pub fn named(spec: &Spec, state_dir: &Path) -> BTreeSet<String> {
    let artifacts = [
        Artifact::Library,
        Artifact::Hook,
        Artifact::CudaStub,
        Artifact::NvmlStub,
    ];
    let hashes = edits(spec).flat_map(files).flat_map(|file| {
        let hash = move |artifact| hash_of(artifact, file, state_dir);
        artifacts.into_iter().filter_map(hash)
    });
    hashes.collect()
}

fn edits(spec: &Spec) -> impl Iterator<Item = &ContainerEdits> {
    let of_devices = spec.devices().iter().map(|device| &device.container_edits);
    std::iter::once(spec.container_edits()).chain(of_devices)
}

/// Returns the host paths of mounts and hooks.
fn files(edits: &ContainerEdits) -> impl Iterator<Item = &Path> {
    let mounts = edits.mounts.iter().map(|mount| &mount.host_path);
    let hooks = edits.hooks.iter().map(|hook| &hook.path);
    mounts.chain(hooks).map(Path::new)
}

/// Returns the hash of `artifact` if `path` is a version of it.
fn hash_of(artifact: Artifact, path: &Path, state_dir: &Path) -> Option<String> {
    let hash = path.parent()?.file_name().and_then(OsStr::to_str)?;
    (artifact.path(state_dir, hash) == path).then(|| hash.to_owned())
}
