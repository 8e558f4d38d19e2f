//! Explanations of allocation decisions: why a pod is pending, what would have to change, and where pods would run that do not
//! exist.
//!
//! A [`snapshot`] of the cluster is decided by the controller's allocator. `kubectl drava` takes it with the permissions of
//! the user, the controller with its own.

pub mod advice;
pub mod changes;
mod defaults;
pub mod explain;
#[cfg(any(test, feature = "fixture"))]
#[allow(clippy::expect_used, reason = "objects for tests")]
pub mod fixture;
pub mod growth;
pub mod owner;
pub mod simulate;
pub mod snapshot;
pub mod suspension;
mod terminal;

pub use terminal::{printable, table};
