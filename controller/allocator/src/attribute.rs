//! Device attributes.

use drava_api::names;
use k8s_openapi::api::resource::v1 as dra;

/// Value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attribute {
    /// Boolean.
    Bool(bool),
    /// Integer.
    Int(i64),
    /// String.
    String(String),
    /// Semantic version.
    Version(semver::Version),
    /// List of values of one type (KEP-5491, alpha).
    List(Vec<Attribute>),
}

impl Attribute {
    /// Parses a published value.
    ///
    /// # Errors
    /// When the value has no known type, or a version is malformed.
    pub fn parse(attribute: &dra::DeviceAttribute) -> Result<Self, String> {
        let version = |text: &String| {
            semver::Version::parse(text)
                .map_err(|error| format!("{text:?} is not a semantic version: {error}"))
        };
        if let Some(value) = attribute.int {
            Ok(Self::Int(value))
        } else if let Some(value) = attribute.bool {
            Ok(Self::Bool(value))
        } else if let Some(value) = &attribute.string {
            Ok(Self::String(value.clone()))
        } else if let Some(value) = &attribute.version {
            Ok(Self::Version(version(value)?))
        } else if let Some(values) = &attribute.ints {
            Ok(Self::List(values.iter().copied().map(Self::Int).collect()))
        } else if let Some(values) = &attribute.bools {
            Ok(Self::List(values.iter().copied().map(Self::Bool).collect()))
        } else if let Some(values) = &attribute.strings {
            Ok(Self::List(
                values.iter().cloned().map(Self::String).collect(),
            ))
        } else if let Some(values) = &attribute.versions {
            let versions = values.iter().map(|text| version(text).map(Self::Version));
            Ok(Self::List(versions.collect::<Result<_, _>>()?))
        } else {
            Err("unsupported attribute value".to_owned())
        }
    }
}

/// Attributes that differ from GPU to GPU, or from node to node. All others are equal on the nodes of one kind.
const OF_GPU: [&str; 4] = [
    names::attribute::UUID,
    names::attribute::PARENT_UUID,
    names::attribute::NVLINK_DOMAIN,
    names::attribute::PCI_BUS_ID,
];

/// Returns whether an attribute of this name, without its domain, differs from GPU to GPU.
pub(crate) fn is_of_gpu(name: &str) -> bool {
    let of_gpu = |known: &str| known.rsplit('/').next() == Some(name);
    OF_GPU.into_iter().any(of_gpu)
}
