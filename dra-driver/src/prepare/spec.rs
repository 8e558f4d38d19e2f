//! The CDI spec of a claim: what each of its containers gets. Pure but for looking at device files.
//!
//! One CDI device per allocation result; kubelet gives a container only those of the requests it names. What all have
//! in common (libraries, control nodes, hooks) stands once for the spec where every device wants the same of it.

use drava_api::names;
use drava_cdi::{
    ContainerEdits, Device, Driver, HookProgram, Invalid, METERED, Mount, NodeError, Part, Spec,
    UNMETERED,
};
use drava_vgpu_abi::paths;

use super::record::Record;
use super::{Access, Prepared, Share};
use crate::artifacts::Artifact;
use crate::claim::ClaimUid;
use crate::layout::Layout;

/// File that the CDI hook leaves in the usage directory of a share: the container runtime has applied the CDI spec.
pub const MARK: &str = "injected";

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
    /// A container runtime would refuse the spec.
    #[error("its CDI spec would be invalid: {0}")]
    Invalid(Invalid),
}

/// Builds the spec of what `record` says.
///
/// # Errors
/// When a card has no device file, or a path cannot be put into a spec.
pub fn build(record: &Record, layout: &Layout, driver: &Driver) -> Result<Spec, SpecError> {
    let state_dir = layout.state_dir();
    let hook = HookProgram::new(
        Artifact::Hook
            .path(state_dir, &record.hook)
            .to_string_lossy(),
    );
    let library = Artifact::Library.path(state_dir, &record.library);
    let parts: Vec<&[Part]> = record
        .devices
        .iter()
        .map(|device| parts(&device.access))
        .collect();
    let all_alike = parts
        .windows(2)
        .all(|pair| matches!(pair, [a, b] if a == b));
    let common = match parts.first() {
        Some(first) if all_alike => driver.edits(first, &hook),
        Some(_) | None => ContainerEdits::default(),
    };
    let devices = record.devices.iter().zip(parts).map(|(device, parts)| {
        let card = driver
            .card(device.card.minor, &device.card.pci_bus_id, parts)
            .map_err(|source| SpecError::Node {
                device: device.device.clone(),
                source,
            })?;
        let mut edits = if all_alike {
            ContainerEdits::default()
        } else {
            driver.edits(parts, &hook)
        };
        edits.append(card);
        if let Some(share) = device.share() {
            edits.append(share_edits(
                &record.claim.uid,
                share,
                layout,
                &library.to_string_lossy(),
                &hook,
            ));
        }
        Ok(Device {
            name: device.cdi_name(&record.claim.uid),
            annotations: annotations(device),
            container_edits: edits,
        })
    });
    let devices = devices.collect::<Result<Vec<_>, SpecError>>()?;
    Spec::new(names::CDI_KIND, devices, common).map_err(SpecError::Invalid)
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
    library: &str,
    hook: &HookProgram,
) -> ContainerEdits {
    let inside = format!("{}/{}", paths::RUN_DIR, share.id);
    let limits = layout.limits(uid, &share.id);
    let usage = layout.usage(uid, &share.id);
    ContainerEdits {
        // The mark last: it says that everything before it was done.
        hooks: vec![
            hook.preload(paths::LIBRARY),
            hook.mark(&format!("{inside}/{}/{MARK}", paths::USAGE_DIR)),
        ],
        mounts: vec![
            Mount::read_only(library, paths::LIBRARY),
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
