//! The driver API as programs use it, on real processes; the daemon's ledger is the oracle.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each call passes valid pointers of this test's own"
)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod api;
mod arrays;
mod captures;
mod context;
mod graphs;
mod launches;
mod lookup;
mod memory;
mod pointers;
mod pools;
mod processes;
mod sharing;
mod streams;
mod virtual_memory;
