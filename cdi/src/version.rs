//! CDI versions, and the lowest version that a specification needs.
//!
//! A runtime rejects a specification with a version newer than its own, or with a field newer than the specification's
//! version. So the lowest sufficient version works with the most runtimes. Source: SPEC.md of CDI, "Versions".

use std::fmt;

use crate::{ContainerEdits, Spec};

/// Released versions of CDI, oldest first. Runtimes do not support versions before 0.3.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// Oldest version that runtimes support.
    V0_3_0,
    /// Mounts have a type.
    V0_4_0,
    /// Device nodes have a host path; device names may start with a digit.
    V0_5_0,
    /// Annotations; dots in the class of a kind.
    V0_6_0,
    /// Additional group ids, Intel RDT.
    V0_7_0,
    /// No change of the format.
    V0_8_0,
    /// No change of the format.
    V1_0_0,
    /// Network devices.
    V1_1_0,
}

const ALL: [(Version, &str); 8] = [
    (Version::V0_3_0, "0.3.0"),
    (Version::V0_4_0, "0.4.0"),
    (Version::V0_5_0, "0.5.0"),
    (Version::V0_6_0, "0.6.0"),
    (Version::V0_7_0, "0.7.0"),
    (Version::V0_8_0, "0.8.0"),
    (Version::V1_0_0, "1.0.0"),
    (Version::V1_1_0, "1.1.0"),
];

impl Version {
    /// Parses a version; a leading `v` is allowed, as in CDI's own parser.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix('v').unwrap_or(text);
        ALL.iter()
            .find(|(_, name)| *name == text)
            .map(|(version, _)| *version)
    }

    /// Returns the lowest version that supports all fields of `spec`. drava uses no field newer than 0.6.0.
    pub(crate) fn needed_by(spec: &Spec) -> Self {
        let annotated = !spec.annotations().is_empty()
            || spec
                .devices()
                .iter()
                .any(|device| !device.annotations.is_empty());
        let dotted_class = spec
            .kind()
            .split_once('/')
            .is_some_and(|(_, class)| class.contains('.'));
        if annotated || dotted_class {
            return Self::V0_6_0;
        }
        let digit_first = spec
            .devices()
            .iter()
            .any(|device| device.name.starts_with(|c: char| c.is_ascii_digit()));
        let host_path = |edits: &ContainerEdits| {
            edits
                .device_nodes
                .iter()
                .any(|node| node.host_path.is_some())
        };
        if digit_first
            || host_path(spec.container_edits())
            || spec
                .devices()
                .iter()
                .any(|device| host_path(&device.container_edits))
        {
            return Self::V0_5_0;
        }
        Self::V0_3_0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ALL
            .iter()
            .find(|(version, _)| version == self)
            .map_or("", |(_, name)| name);
        f.write_str(name)
    }
}
