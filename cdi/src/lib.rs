//! CDI: model of a specification, selection of NVIDIA driver files, and the directory of specifications.
//!
//! Pipeline of a claim's specification, *discover → edits → normalize → write*: [`Driver::discover`] scans a
//! [`DriverRoot`] once, [`Driver::edits`] turns the [`Part`]s that a device may use into [`ContainerEdits`],
//! [`Spec::new`] sorts and validates the edits, and [`SpecDir::write`] replaces the file atomically. The same input
//! gives the same bytes.
//!
//! The model has only the CDI fields that drava writes. Any other field is a parse error, because only files written by
//! drava are parsed. Source: <https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md>.
//!
//! The crate does not depend on claims, limits or NVML: the node driver selects the edits of each device.

#![forbid(unsafe_code)]

mod discover;
mod edits;
pub mod elf;
mod hook;
pub mod ldcache;
mod spec;
mod store;
mod validate;
mod version;

pub use discover::{
    Binary, DataFile, DiscoverError, Driver, DriverRoot, Library, METERED, NodeError, Part,
    RootError, Substitute, UNMETERED,
};
pub use edits::{ContainerEdits, DeviceNode, DeviceNumber, Hook, HookName, Mount};
pub use hook::{HookProgram, Link, THEN};
pub use spec::{Device, ReadError, Spec};
pub use store::{SpecDir, StoreError};
pub use validate::Invalid;
pub use version::Version;
