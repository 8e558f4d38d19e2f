//! The driver API in real processes, checked against the daemon's ledger.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each call passes valid pointers of the test"
)]
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod api;
mod arrays;
mod batches;
mod captures;
mod checkpoints;
mod context;
mod external;
mod graph_nodes;
mod graphs;
mod green;
mod launches;
mod lookup;
mod memory;
mod modules;
mod multicast;
mod pointers;
mod pools;
mod processes;
mod settings;
mod sharing;
mod side_effects;
mod sparse;
mod stream_memory;
mod streams;
mod virtual_memory;
