//! The CDI spec of a claim: what each of its containers gets. Pure but for looking at device files.
//!
//! One CDI device per allocation result; kubelet gives a container only those of the requests it names. What all have
//! in common (libraries, control nodes, hooks) stands once for the spec where every device wants the same of it.

use drava_api::names;
use drava_cdi::{
    ContainerEdits, Device, Driver, Hook, HookProgram, Invalid, METERED, Mount, NodeError, Part,
    Spec, Substitute, UNMETERED,
};
use drava_vgpu_abi::paths;

use super::record::ClaimRecord;
use super::{Access, Delivery, Prepared, Share};
use crate::artifacts::Artifact;
use crate::claim::ClaimUid;
use crate::layout::{Layout, MARK};

/// The containers' view could not be put together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A device file is missing.
    #[error("device {device}: {source}")]
    Node {
        /// The device.
        device: String,
        /// Which file.
        source: NodeError,
    },
    /// There is nothing that the stub could stand before.
    #[error(
        "the driver root {root} has no library with the SONAME libcuda.so.1, in whose place its stub could be (delivery shim)"
    )]
    NoStub {
        /// The driver root on the node.
        root: String,
    },
    /// A container runtime would refuse the spec.
    #[error("its CDI spec would be invalid: {0}")]
    Invalid(Invalid),
}

/// Builds the spec of what `record` says.
///
/// # Errors
/// When a card has no device file, or a path cannot be put into a spec.
pub fn build(record: &ClaimRecord, layout: &Layout, driver: &Driver) -> Result<Spec, SpecError> {
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
    let all_alike = views
        .windows(2)
        .all(|pair| matches!(pair, [a, b] if a == b));
    let edits = |view: &View<'_>| driver.edits(view.parts, view.substitutes, &hook);
    let common = match views.first() {
        Some(first) if all_alike => edits(first),
        Some(_) | None => ContainerEdits::default(),
    };
    let devices = record.devices.iter().zip(views).map(|(device, view)| {
        let card = driver
            .card(device.card.minor, &device.card.pci_bus_id, view.parts)
            .map_err(|source| SpecError::Node {
                device: device.device.clone(),
                source,
            })?;
        let mut own = if all_alike {
            ContainerEdits::default()
        } else {
            edits(&view)
        };
        own.append(card);
        if let Some(share) = device.share() {
            let uid = &record.claim.uid;
            let delivered = library.delivered(&view, driver, &hook);
            own.append(share_edits(uid, share, layout, &library, delivered, &hook));
        }
        Ok(Device {
            name: device.cdi_name(&record.claim.uid),
            annotations: annotations(device),
            container_edits: own,
        })
    });
    let devices = devices.collect::<Result<Vec<_>, SpecError>>()?;
    Spec::new(names::CDI_KIND, devices, common).map_err(SpecError::Invalid)
}

/// `libvgpu.so`, and what leads programs to it.
struct Library {
    host_path: String,
    /// Stubs; none where it is preloaded.
    substitutes: Vec<Substitute>,
}

/// What of the driver a device's containers see.
#[derive(PartialEq, Eq)]
struct View<'a> {
    parts: &'static [Part],
    substitutes: &'a [Substitute],
}

impl Library {
    fn view(&self, access: &Access) -> View<'_> {
        // A card that is limited by nothing has the driver's own libraries.
        let substitutes = match access {
            Access::Share(_) => self.substitutes.as_slice(),
            Access::Whole | Access::Admin => &[],
        };
        View {
            parts: parts(access),
            substitutes,
        }
    }

    /// The hook that makes sure that programs meet it.
    fn delivered(&self, view: &View<'_>, driver: &Driver, hook: &HookProgram) -> Hook {
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

/// The stubs of a claim. A node without NVML needs none of it.
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
        Access::Whole => UNMETERED,
        Access::Share(share) if share.unmetered => UNMETERED,
        Access::Share(_) | Access::Admin => METERED,
    }
}

/// What makes a device a share: the library, what it may use, and where it counts.
fn share_edits(
    uid: &ClaimUid,
    share: &Share,
    layout: &Layout,
    library: &Library,
    delivered: Hook,
    hook: &HookProgram,
) -> ContainerEdits {
    let inside = format!("{}/{}", paths::RUN_DIR, share.id);
    let limits = layout.limits(uid, &share.id);
    let usage = layout.usage(uid, &share.id);
    ContainerEdits {
        // The mark last: it says that everything before it was done.
        hooks: vec![
            delivered,
            hook.mark(&format!("{inside}/{}/{MARK}", paths::USAGE_DIR)),
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

/// For whoever reads the file.
fn annotations(device: &Prepared) -> std::collections::BTreeMap<String, String> {
    [
        ("card", device.card.uuid.clone()),
        ("request", device.request.clone()),
    ]
    .into_iter()
    .map(|(key, value)| (format!("{}/{key}", names::DRIVER), value))
    .collect()
}
