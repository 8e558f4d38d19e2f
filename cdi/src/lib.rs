//! CDI: the model of a specification, what of the NVIDIA driver goes into it, and the directory it is written to.
//!
//! The way of a claim's specification is *discover → edits → normalise → write*:
//! [`Driver::discover`] finds the user-space driver under a [`DriverRoot`] once, [`Driver::edits`] turns the
//! [`Part`]s that a device may have into [`ContainerEdits`], [`Spec::new`] puts edits in order and checks them, and
//! [`SpecDir::write`] replaces the file atomically. The same input gives the same bytes.
//!
//! Only the fields of CDI that drava uses are modelled; anything else in a file is an error when it is read, because
//! only our own files are. Source: <https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md>.
//!
//! It knows nothing of claims, limits or NVML: the driver says which devices get which edits.

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
    Binary, DiscoverError, Driver, DriverRoot, Library, METERED, NodeError, Part, RootError,
    Substitute, UNMETERED,
};
pub use edits::{ContainerEdits, DeviceNode, Hook, HookName, Mount};
pub use hook::{HookProgram, Link};
pub use spec::{Device, ReadError, Spec};
pub use store::{SpecDir, StoreError};
pub use validate::Invalid;
pub use version::Version;
