//! Tests of the public API: from a fake driver root to a specification.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests and their fixtures"
)]

mod discover;
mod driver_root;
mod elf;
mod installs;
mod ldcache;
mod nvcdi;
mod oracle;
mod spec;
mod store;
