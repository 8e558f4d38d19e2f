//! Tests of the crate's public face: a made-up driver root in, a specification out.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests, and what they are made of"
)]

mod discover;
mod driver_root;
mod elf;
mod ldcache;
mod oracle;
mod spec;
mod store;
