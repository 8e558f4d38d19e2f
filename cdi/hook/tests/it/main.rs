//! The hook against bundles with a real dynamic loader: what counts is what the loader does afterwards.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests, and what they are made of"
)]

mod bundle;
mod hostile;
mod ldcache;
mod mark;
mod preload;
mod shim;
mod symlinks;
