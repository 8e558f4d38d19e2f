//! Objects of lists and watches, decoded one by one: one that this build cannot read hides no other.
//!
//! The API server accepts objects that typed decoding refuses: times at the end of the year 9999, opaque parameters that are
//! nested more than 128 levels deep, fields of a newer release. Every writer of an object can put such a value into it, so a
//! list that is decoded as a whole fails for the whole cluster because of one tenant's object. `Api<Listed<K>>` reads the
//! same lists and watches as `Api<K>`.
//!
//! `metadata.managedFields`, the bookkeeping of the API server, is not decoded at all: no decision reads it.
//!
//! An unreadable object keeps what its users need: its identity, and for a claim the devices that are allocated to it. An
//! unreadable claim must not be skipped, because its devices would be allocated twice.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube_core::Resource;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::{RawValue, to_raw_value};

mod tracker;

pub use tracker::{Change, DeletedObject, Tracked, Tracker};

/// An object of a list or a watch. It is read from JSON text.
#[derive(Debug, Clone)]
pub enum Listed<K> {
    /// The object.
    Object(Box<K>),
    /// An object that this build cannot read.
    Unreadable(Box<Unreadable>),
}

/// An object that this build cannot read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Unreadable {
    /// Name, namespace, UID and resource version.
    pub metadata: ObjectMeta,
    /// For a claim: the devices that are allocated to it, of all drivers.
    #[serde(default)]
    pub devices: Vec<HeldDevice>,
    /// Field and cause.
    pub cause: String,
}

/// A device that is allocated to an unreadable claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldDevice {
    /// Driver of the device.
    pub driver: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
}

impl<K> Listed<K> {
    /// Returns the object; `None` for one that cannot be read.
    #[must_use]
    pub fn object(self) -> Option<K> {
        match self {
            Self::Object(object) => Some(*object),
            Self::Unreadable(_) => None,
        }
    }

    /// Separates the objects from those that cannot be read.
    pub fn split(items: impl IntoIterator<Item = Self>) -> (Vec<K>, Vec<Unreadable>) {
        let (mut objects, mut unreadable) = (Vec::new(), Vec::new());
        for item in items {
            match item {
                Self::Object(object) => objects.push(*object),
                Self::Unreadable(object) => unreadable.push(*object),
            }
        }
        (objects, unreadable)
    }
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Listed<K> {
    /// Fails only for what is no Kubernetes object.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Only delimits the object: neither depth nor numbers have limits.
        let json = Box::<RawValue>::deserialize(deserializer)?;
        let json = without_bookkeeping(json.get()).map_err(D::Error::custom)?;
        match serde_json::from_str(&json) {
            Ok(object) => Ok(Self::Object(Box::new(object))),
            Err(_) => {
                let skeleton: Skeleton = serde_json::from_str(&json).map_err(D::Error::custom)?;
                Ok(Self::Unreadable(Box::new(
                    skeleton.unreadable(cause::<K>(&json)),
                )))
            }
        }
    }
}

/// Returns the text of an object without `metadata.managedFields`.
fn without_bookkeeping(json: &str) -> serde_json::Result<Cow<'_, str>> {
    const BOOKKEEPING: &str = "managedFields";
    if !json.contains(BOOKKEEPING) {
        return Ok(Cow::Borrowed(json));
    }
    let mut object: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(json)?;
    let Some(metadata) = object.get_mut("metadata") else {
        return Ok(Cow::Borrowed(json));
    };
    let mut fields: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(metadata.get())?;
    fields.remove(BOOKKEEPING);
    let kept = to_raw_value(&fields)?;
    *metadata = &kept;
    serde_json::to_string(&object).map(Cow::Owned)
}

/// Returns why the text is no `K`, with the field.
fn cause<K: DeserializeOwned>(json: &str) -> String {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    match serde_path_to_error::deserialize::<_, K>(&mut deserializer) {
        Ok(_) => String::new(),
        Err(error) => {
            let path = error.path().to_string();
            let cause = error.into_inner().to_string();
            // The position is that of a text that no user sees.
            let cause = cause.split(" at line ").next().unwrap_or_default();
            format!("{path}: {cause}")
        }
    }
}

/// What is read of an unreadable object. The rest is skipped, whatever it is.
#[derive(Deserialize)]
struct Skeleton {
    metadata: SkeletonMetadata,
    #[serde(default)]
    status: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SkeletonMetadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
}

#[derive(Deserialize)]
struct SkeletonStatus {
    #[serde(default)]
    allocation: Option<SkeletonAllocation>,
}

#[derive(Deserialize)]
struct SkeletonAllocation {
    #[serde(default)]
    devices: Option<SkeletonDevices>,
}

#[derive(Deserialize)]
struct SkeletonDevices {
    #[serde(default)]
    results: Option<Vec<HeldDevice>>,
}

impl Skeleton {
    fn unreadable(self, cause: String) -> Unreadable {
        // The API server enforces the types of a claim's status; other kinds may have any status.
        let status: Option<SkeletonStatus> = self
            .status
            .and_then(|status| serde_json::from_str(status.get()).ok());
        let allocation = status.and_then(|status| status.allocation);
        let devices = allocation.and_then(|allocation| allocation.devices);
        Unreadable {
            metadata: ObjectMeta {
                name: self.metadata.name,
                namespace: self.metadata.namespace,
                uid: self.metadata.uid,
                resource_version: self.metadata.resource_version,
                ..ObjectMeta::default()
            },
            devices: devices
                .and_then(|devices| devices.results)
                .unwrap_or_default(),
            cause,
        }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let name = self.metadata.name.as_deref().unwrap_or_default();
        let separator = if namespace.is_empty() { "" } else { "/" };
        write!(f, "{namespace}{separator}{name}: {}", self.cause)
    }
}

impl<K: Resource> Resource for Listed<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic)
    }

    fn group(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::group(dynamic)
    }

    fn version(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::version(dynamic)
    }

    fn plural(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        match self {
            Self::Object(object) => object.meta(),
            Self::Unreadable(object) => &object.metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Self::Object(object) => object.meta_mut(),
            Self::Unreadable(object) => &mut object.metadata,
        }
    }
}

#[cfg(test)]
mod tests;
