//! CDI specs of a claim. Pure except for reading device files and written specs.
//!
//! The spec has one CDI device per allocation result; kubelet passes a container the devices of its requests. What the devices of
//! all claims share (libraries, control nodes, hooks) is in bases, see [`super::base`].

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use drava_api::names;
use drava_cdi::{
    ContainerEdits, Device, Driver, HookProgram, Invalid, Mount, NodeError, Part, Spec, SpecDir,
    Substitute,
};
use drava_nvml::Gpu;
use drava_vgpu_abi::paths;

use super::base::{Base, CommonEdits};
use super::record::ClaimRecord;
use super::{Delivery, Prepared, Share};
use crate::gpus::capacity::ALL_CORES;
use crate::gpus::inventory::NodeInventory;
use crate::mps;
use crate::node::artifacts::Artifact;
use crate::node::claim::ClaimUid;
use crate::node::layout::{Layout, SPEC_PREFIX};

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

/// CDI specs that the containers of a claim need.
#[derive(Debug)]
pub struct Specs {
    /// Edits that the claim shares with others.
    pub bases: BTreeMap<Base, Spec>,
    /// Edits of the claim.
    pub claim: Spec,
}

/// Builds the CDI specs of a record.
///
/// # Errors
/// When a GPU has no device file, or a path is invalid in a spec.
pub fn build(
    record: &ClaimRecord,
    layout: &Layout,
    driver: &Driver,
    inventory: &NodeInventory,
) -> Result<Specs, SpecError> {
    let state_dir = layout.state_dir();
    let hook = HookProgram::new(
        Artifact::Hook
            .path(state_dir, &record.hook)
            .to_string_lossy(),
    );
    let library = Artifact::Library.path(state_dir, &record.library);
    let library = Library {
        host_path: library.to_string_lossy().into_owned(),
        stubs: driver.substituted(&substitutes(&record.delivery, layout, driver)?),
    };
    let compat = match record.common {
        CommonEdits::InClaim => has_compat(&record.devices, inventory),
        CommonEdits::InBases { compat } => compat,
    };
    let cuda = inventory.nvml.cuda_driver_version;
    let cuda = cuda.map(|version| format!("{}.{}", version.major, version.minor));
    let (mut bases, mut devices) = (BTreeMap::new(), Vec::new());
    for device in &record.devices {
        let base = Base::of(&device.access, compat);
        let mut own = nodes(device, base.parts(), driver)?;
        if let Some(share) = device.share() {
            own.mounts = share_mounts(&record.claim.uid, share, layout, &library);
            if share.is_spatial() {
                let dir = layout.mps_gpu(&device.gpu.uuid);
                let inside = [("pipe", mps::PIPE_DIRECTORY), ("shm", "/dev/shm")];
                let [pipe, shm] = inside.map(|(name, to)| (dir.join(name), to));
                own.mounts
                    .push(Mount::data(pipe.0.to_string_lossy(), pipe.1));
                own.mounts
                    .push(Mount::read_write(shm.0.to_string_lossy(), shm.1));
                own.env
                    .push(format!("CUDA_MPS_PIPE_DIRECTORY={}", mps::PIPE_DIRECTORY));
                if share.cores > 0 {
                    let part = share.cores.min(ALL_CORES);
                    own.env
                        .push(format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={part}"));
                }
            }
            if share.limited_by_driver {
                let socket = layout.cgroup_limits_socket();
                let (claim, share) = (record.claim.uid.as_str(), share.id.as_str());
                own.hooks
                    .push(hook.limit(&socket.to_string_lossy(), claim, share));
            }
        }
        let container_edits = match record.common {
            CommonEdits::InClaim => {
                let mut all = base.edits(driver, &hook, cuda.as_deref());
                all.overlay(own);
                all
            }
            CommonEdits::InBases { .. } => {
                if let Entry::Vacant(missing) = bases.entry(base) {
                    let spec = base.spec(driver, &hook, cuda.as_deref());
                    missing.insert(spec.map_err(SpecError::Invalid)?);
                }
                own
            }
        };
        devices.push(Device {
            name: device.cdi_name(&record.claim.uid),
            annotations: annotations(device),
            container_edits,
        });
    }
    let claim = Spec::new(names::CDI_KIND, devices, ContainerEdits::default());
    Ok(Specs {
        bases,
        claim: claim.map_err(SpecError::Invalid)?,
    })
}

/// Returns the qualified names of the CDI devices of a device, in the order in which runtimes apply them.
#[must_use]
pub fn device_ids(record: &ClaimRecord, device: &Prepared) -> Vec<String> {
    let base = match record.common {
        CommonEdits::InClaim => None,
        CommonEdits::InBases { compat } => Some(Base::of(&device.access, compat).qualified_name()),
    };
    let own = format!("{}={}", names::CDI_KIND, device.cdi_name(&record.claim.uid));
    base.into_iter().chain([own]).collect()
}

/// Returns the bases of a record.
#[must_use]
pub fn bases(record: &ClaimRecord) -> BTreeSet<Base> {
    let CommonEdits::InBases { compat } = record.common else {
        return BTreeSet::new();
    };
    let devices = record.devices.iter();
    devices
        .map(|device| Base::of(&device.access, compat))
        .collect()
}

/// Returns whether all GPUs of a claim support the CUDA compatibility libraries of newer images.
#[must_use]
pub fn has_compat(devices: &[Prepared], inventory: &NodeInventory) -> bool {
    devices.iter().all(|device| {
        let gpu = inventory.gpu(&device.gpu.uuid);
        gpu.is_some_and(Gpu::has_forward_compatibility)
    })
}

/// Checks what [`build`] needs for the devices of a record, before MIG instances exist.
///
/// # Errors
/// When a device file is missing.
pub fn check(record: &ClaimRecord, driver: &Driver) -> Result<(), SpecError> {
    let check = |device: &Prepared| {
        let (gpu, parts) = (&device.gpu, Base::of(&device.access, false).parts());
        let checked = match device.partition() {
            Some(_) => driver.check_mig(gpu.minor),
            None => driver.gpu(gpu.minor, &gpu.pci_bus_id, parts).map(drop),
        };
        checked.map_err(|source| node_error(device, source))
    };
    record.devices.iter().try_for_each(check)
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
    /// Mounts of the stubs; none for delivery `preload`.
    stubs: Vec<Mount>,
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

/// Returns the mounts of a share: the library, the limits directory and the usage directory.
fn share_mounts(uid: &ClaimUid, share: &Share, layout: &Layout, library: &Library) -> Vec<Mount> {
    let inside = format!("{}/{}", paths::RUN_DIR, share.id);
    let limits = layout.limits(uid, &share.id);
    let usage = layout.usage(uid, &share.id);
    let mut mounts = vec![
        Mount::read_only(&library.host_path, paths::LIBRARY),
        Mount::data(
            limits.to_string_lossy(),
            format!("{inside}/{}", paths::LIMITS_DIR),
        ),
        Mount::read_write(
            usage.to_string_lossy(),
            format!("{inside}/{}", paths::USAGE_DIR),
        ),
    ];
    mounts.extend(library.stubs.iter().cloned());
    mounts
}

/// Returns the UUIDs of the GPUs of a spec of [`build`]; `None` if a device has no GPU.
#[must_use]
pub fn gpus(spec: &Spec) -> Option<BTreeSet<String>> {
    let gpu = |device: &Device| device.annotations.get(&annotation(GPU)).cloned();
    spec.devices().iter().map(gpu).collect()
}

/// Returns the GPUs that the CDI spec of a claim names; `None` without a valid spec.
#[must_use]
pub fn held_gpus(layout: &Layout, claim: &ClaimUid) -> Option<BTreeSet<String>> {
    let specs = SpecDir::new(layout.cdi_dir(), SPEC_PREFIX);
    gpus(&specs.read(claim.as_str()).ok().flatten()?)
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
