//! CDI spec of a claim. Pure except for reading device files.
//!
//! The spec has one CDI device per allocation result; kubelet passes a container the devices of its requests. Edits that
//! all devices share (libraries, control nodes, hooks) are edits of the spec.

use std::collections::{BTreeMap, BTreeSet};

use drava_api::names;
use drava_cdi::{
    ContainerEdits, Device, Driver, Hook, HookProgram, Invalid, METERED, Mount, NodeError, Part,
    Spec, Substitute, UNMETERED,
};
use drava_nvml::Gpu;
use drava_vgpu_abi::paths;

use super::record::ClaimRecord;
use super::{Access, Delivery, Prepared, Share};
use crate::gpus::inventory::NodeInventory;
use crate::node::artifacts::Artifact;
use crate::node::claim::ClaimUid;
use crate::node::layout::{Layout, MARKER};

/// The CDI spec could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A device file is missing.
    #[error("device {device}: {source}")]
    Node {
        /// The device.
        device: String,
        /// Error with the path of the file.
        source: NodeError,
    },
    /// A partition has no MIG instance.
    #[error("device {device}: the MIG instance is missing")]
    NoInstance {
        /// The device.
        device: String,
    },
    /// The driver root has no library that the stub replaces.
    #[error(
        "the driver root {root} has no library with the SONAME libcuda.so.1, which delivery shim requires"
    )]
    NoStub {
        /// The driver root on the node.
        root: String,
    },
    /// The spec is invalid.
    #[error("invalid CDI spec: {0}")]
    Invalid(Invalid),
}

/// Builds the CDI spec of a record.
///
/// # Errors
/// When a GPU has no device file, or a path is invalid in a spec.
pub fn build(
    record: &ClaimRecord,
    layout: &Layout,
    driver: &Driver,
    inventory: &NodeInventory,
) -> Result<Spec, SpecError> {
    let state_dir = layout.state_dir();
    let hook = HookProgram::new(
        Artifact::Hook
            .path(state_dir, &record.hook)
            .to_string_lossy(),
    );
    let library = Artifact::Library.path(state_dir, &record.library);
    let library = Library {
        host_path: library.to_string_lossy().into_owned(),
        substitutes: substitutes(&record.delivery, layout, driver)?,
    };
    let views: Vec<View<'_>> = record
        .devices
        .iter()
        .map(|device| library.view(&device.access))
        .collect();
    let is_uniform = views
        .windows(2)
        .all(|pair| matches!(pair, [a, b] if a == b));
    let compat = compat(record, driver, inventory, &hook);
    let edits = |view: &View<'_>| {
        let mut edits = driver.edits(view.parts, view.substitutes, &hook);
        edits.hooks.extend(compat.clone());
        edits
    };
    // One process runs all hooks of the common edits, and one those of a device.
    let joined = |mut edits: ContainerEdits| {
        edits.hooks = hook.joined(edits.hooks);
        edits
    };
    let common = match views.first() {
        Some(first) if is_uniform => joined(edits(first)),
        Some(_) | None => ContainerEdits::default(),
    };
    let devices = record.devices.iter().zip(views).map(|(device, view)| {
        let gpu = nodes(device, view.parts, driver)?;
        let mut own = if is_uniform {
            ContainerEdits::default()
        } else {
            edits(&view)
        };
        own.append(gpu);
        if let Some(share) = device.share() {
            let uid = &record.claim.uid;
            let delivery = library.delivery_hook(&view, driver, &hook);
            own.append(share_edits(uid, share, layout, &library, delivery, &hook));
        }
        Ok(Device {
            name: device.cdi_name(&record.claim.uid),
            annotations: annotations(device),
            container_edits: joined(own),
        })
    });
    let devices = devices.collect::<Result<Vec<_>, SpecError>>()?;
    Spec::new(names::CDI_KIND, devices, common).map_err(SpecError::Invalid)
}

/// Checks what [`build`] needs for the devices of a record, before MIG instances exist.
///
/// # Errors
/// When a device file is missing.
pub fn check(record: &ClaimRecord, driver: &Driver) -> Result<(), SpecError> {
    let check = |device: &Prepared| {
        let (gpu, parts) = (&device.gpu, parts(&device.access));
        let checked = match device.partition() {
            Some(_) => driver.check_mig(gpu.minor),
            None => driver.gpu(gpu.minor, &gpu.pci_bus_id, parts).map(drop),
        };
        checked.map_err(|source| node_error(device, source))
    };
    record.devices.iter().try_for_each(check)
}

/// Returns the hook of the CUDA compatibility libraries, if all GPUs of the claim support them.
fn compat(
    record: &ClaimRecord,
    driver: &Driver,
    inventory: &NodeInventory,
    hook: &HookProgram,
) -> Option<Hook> {
    let is_supported = |device: &Prepared| {
        let gpu = inventory.gpu(&device.gpu.uuid);
        gpu.is_some_and(Gpu::has_forward_compatibility)
    };
    if !record.devices.iter().all(is_supported) {
        return None;
    }
    let cuda = inventory.nvml.cuda_driver_version;
    let cuda = cuda.map(|version| format!("{}.{}", version.major, version.minor));
    driver.compat(hook, cuda.as_deref())
}

fn node_error(device: &Prepared, source: NodeError) -> SpecError {
    SpecError::Node {
        device: device.device.clone(),
        source,
    }
}

/// Returns the device files of a device.
fn nodes(device: &Prepared, parts: &[Part], driver: &Driver) -> Result<ContainerEdits, SpecError> {
    let minor = device.gpu.minor;
    let nodes = match device.partition().map(|partition| &partition.instance) {
        Some(Some(instance)) => driver.mig(minor, instance.gpu_instance, instance.compute_instance),
        Some(None) => {
            return Err(SpecError::NoInstance {
                device: device.device.clone(),
            });
        }
        None => driver.gpu(minor, &device.gpu.pci_bus_id, parts),
    };
    nodes.map_err(|source| node_error(device, source))
}

/// `libvgpu.so` and its stubs.
struct Library {
    host_path: String,
    /// Stubs; empty for delivery `preload`.
    substitutes: Vec<Substitute>,
}

/// Parts of the NVIDIA driver that the containers of a device get.
#[derive(PartialEq, Eq)]
struct View<'a> {
    parts: &'static [Part],
    substitutes: &'a [Substitute],
}

impl Library {
    fn view(&self, access: &Access) -> View<'_> {
        // Containers without limits get the original libraries.
        let substitutes = match access {
            Access::Share(_) => self.substitutes.as_slice(),
            Access::Whole | Access::Partition(_) | Access::Admin => &[],
        };
        View {
            parts: parts(access),
            substitutes,
        }
    }

    /// Returns the hook that makes programs load the library.
    fn delivery_hook(&self, view: &View<'_>, driver: &Driver, hook: &HookProgram) -> Hook {
        let stubs: Vec<String> = view
            .substitutes
            .iter()
            .filter_map(|substitute| driver.library(&substitute.soname))
            .map(|library| library.path.clone())
            .collect();
        if stubs.is_empty() {
            hook.preload(paths::LIBRARY)
        } else {
            hook.shim(paths::LIBRARY, &stubs)
        }
    }
}

/// Returns the stubs of a claim. A driver root without NVML gets no stub of it.
fn substitutes(
    delivery: &Delivery,
    layout: &Layout,
    driver: &Driver,
) -> Result<Vec<Substitute>, SpecError> {
    let Delivery::Shim(stubs) = delivery else {
        return Ok(Vec::new());
    };
    let substitutes: Vec<Substitute> = [
        (Artifact::CudaStub, &stubs.cuda, paths::CUDA_STUB),
        (Artifact::NvmlStub, &stubs.nvml, paths::NVML_STUB),
    ]
    .into_iter()
    .map(|(artifact, hash, stub)| Substitute {
        soname: stub.soname.to_string_lossy().into_owned(),
        host_path: artifact
            .path(layout.state_dir(), hash)
            .to_string_lossy()
            .into_owned(),
        original: stub.original_path.to_string_lossy().into_owned(),
    })
    .collect();
    let cuda = substitutes.first().map(|cuda| cuda.soname.as_str());
    if cuda.and_then(|soname| driver.library(soname)).is_none() {
        return Err(SpecError::NoStub {
            root: driver.root().node().display().to_string(),
        });
    }
    Ok(substitutes)
}

fn parts(access: &Access) -> &'static [Part] {
    match access {
        Access::Whole | Access::Partition(_) => UNMETERED,
        Access::Share(share) if share.unmetered => UNMETERED,
        Access::Share(_) | Access::Admin => METERED,
    }
}

/// Returns the edits of a share: the library, the limits directory and the usage directory.
fn share_edits(
    uid: &ClaimUid,
    share: &Share,
    layout: &Layout,
    library: &Library,
    delivery: Hook,
    hook: &HookProgram,
) -> ContainerEdits {
    let inside = format!("{}/{}", paths::RUN_DIR, share.id);
    let limits = layout.limits(uid, &share.id);
    let usage = layout.usage(uid, &share.id);
    ContainerEdits {
        // The marker hook runs last: the marker means that all other edits were applied.
        hooks: vec![
            delivery,
            hook.mark(&format!("{inside}/{}/{MARKER}", paths::USAGE_DIR)),
        ],
        mounts: vec![
            Mount::read_only(&library.host_path, paths::LIBRARY),
            Mount::data(
                limits.to_string_lossy(),
                format!("{inside}/{}", paths::LIMITS_DIR),
            ),
            Mount::read_write(
                usage.to_string_lossy(),
                format!("{inside}/{}", paths::USAGE_DIR),
            ),
        ],
        ..ContainerEdits::default()
    }
}

/// Returns the UUIDs of the GPUs of a spec of [`build`]; `None` if a device has no GPU.
#[must_use]
pub fn gpus(spec: &Spec) -> Option<BTreeSet<String>> {
    let gpu = |device: &Device| device.annotations.get(&annotation(GPU)).cloned();
    spec.devices().iter().map(gpu).collect()
}

/// Annotation with the UUID of the GPU.
const GPU: &str = "gpu";

fn annotation(key: &str) -> String {
    format!("{}/{key}", names::DRIVER)
}

/// Returns annotations that identify the device to a reader of the file.
fn annotations(device: &Prepared) -> BTreeMap<String, String> {
    BTreeMap::from([
        (annotation(GPU), device.gpu.uuid.clone()),
        (annotation("request"), device.request.clone()),
    ])
}
