//! Tests of the hook against bundles with a real dynamic loader, which must load the right libraries afterwards.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests and their fixtures"
)]

mod bundle;
mod compat;
mod crun;
mod hostile;
mod ldcache;
mod limit;
mod mark;
mod params;
mod preload;
mod shim;
mod symlinks;
