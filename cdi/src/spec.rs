//! A CDI specification and its JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::validate::{self, Invalid};
use crate::{ContainerEdits, Version};

/// A CDI specification: valid, in canonical order, with the lowest version that supports all its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    kind: String,
    annotations: BTreeMap<String, String>,
    devices: Vec<Device>,
    container_edits: ContainerEdits,
}

/// A device of a specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Name, unique in its kind on the node.
    pub name: String,
    /// Annotations; runtimes ignore them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Edits of a container that references the device. Never empty: runtimes reject empty edits.
    pub container_edits: ContainerEdits,
}

/// JSON form of a specification.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    cdi_version: String,
    kind: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    devices: Vec<Device>,
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    container_edits: ContainerEdits,
}

/// A file is not a specification written by drava.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file is not JSON of the expected form.
    #[error("cannot parse the CDI spec")]
    Parse(#[source] serde_json::Error),
    /// The version is unknown, or too low for a field of the specification.
    #[error(
        "cdiVersion {found} does not support all fields of the spec: {needed} or later is required"
    )]
    Version {
        /// Version in the file.
        found: String,
        /// Lowest sufficient version.
        needed: Version,
    },
    /// A runtime would reject a value.
    #[error("the CDI spec is invalid")]
    Invalid(#[source] Invalid),
}

impl Spec {
    /// Sorts and validates devices and edits.
    ///
    /// `kind` is `<vendor>/<class>`; `container_edits` apply to every container that references one of the devices.
    ///
    /// # Errors
    /// [`Invalid`] with the path of the field that a runtime would reject, or that contradicts another field.
    pub fn new(
        kind: impl Into<String>,
        devices: impl IntoIterator<Item = Device>,
        container_edits: ContainerEdits,
    ) -> Result<Self, Invalid> {
        Self::with_annotations(kind, BTreeMap::new(), devices, container_edits)
    }

    /// As [`Spec::new`], with annotations of the specification.
    ///
    /// # Errors
    /// As [`Spec::new`].
    pub fn with_annotations(
        kind: impl Into<String>,
        annotations: BTreeMap<String, String>,
        devices: impl IntoIterator<Item = Device>,
        container_edits: ContainerEdits,
    ) -> Result<Self, Invalid> {
        let mut devices: Vec<Device> = devices
            .into_iter()
            .map(|device| Device {
                container_edits: device.container_edits.normalized(),
                ..device
            })
            .collect();
        devices.sort_by(|a, b| a.name.cmp(&b.name));
        let spec = Self {
            kind: kind.into(),
            annotations,
            devices,
            container_edits: container_edits.normalized(),
        };
        validate::spec(&spec)?;
        Ok(spec)
    }

    /// Returns `<vendor>/<class>`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Returns the annotations of the specification.
    #[must_use]
    pub fn annotations(&self) -> &BTreeMap<String, String> {
        &self.annotations
    }

    /// Returns the devices, sorted by name.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the edits for every container that references one of the devices.
    #[must_use]
    pub fn container_edits(&self) -> &ContainerEdits {
        &self.container_edits
    }

    /// Returns the qualified name `<vendor>/<class>=<device>` of a device, as used by kubelet and runtimes.
    #[must_use]
    pub fn qualified_name(&self, device: &Device) -> String {
        format!("{}={}", self.kind, device.name)
    }

    /// Returns the lowest CDI version that supports all fields of the specification.
    #[must_use]
    pub fn version(&self) -> Version {
        Version::needed_by(self)
    }

    /// Returns the specification as JSON. The same specification gives the same bytes.
    #[must_use]
    pub fn to_json(&self) -> String {
        let file = File {
            cdi_version: self.version().to_string(),
            kind: self.kind.clone(),
            annotations: self.annotations.clone(),
            devices: self.devices.clone(),
            container_edits: self.container_edits.clone(),
        };
        #[expect(
            clippy::expect_used,
            reason = "strings, lists and maps with string keys always serialize"
        )]
        let mut json = serde_json::to_string_pretty(&file).expect("a CDI spec serializes");
        json.push('\n');
        json
    }

    /// Parses a specification written by drava.
    ///
    /// # Errors
    /// [`ReadError`] when the file is not JSON, has fields that drava does not write, or is invalid.
    pub fn from_json(json: &[u8]) -> Result<Self, ReadError> {
        let file: File = serde_json::from_slice(json).map_err(ReadError::Parse)?;
        let spec = Self::with_annotations(
            file.kind,
            file.annotations,
            file.devices,
            file.container_edits,
        )
        .map_err(ReadError::Invalid)?;
        let needed = spec.version();
        match Version::parse(&file.cdi_version) {
            Some(version) if version >= needed => Ok(spec),
            Some(_) | None => Err(ReadError::Version {
                found: file.cdi_version,
                needed,
            }),
        }
    }
}
