//! The bodies of the hooks, by subject. [`crate::driver_api::functions`] names the body of each function.

pub(crate) mod hook;

pub(crate) mod array;
pub(crate) mod context;
pub(crate) mod demand;
pub(crate) mod driver_cache;
pub(crate) mod ending_references;
pub(crate) mod exported;
pub(crate) mod external;
pub(crate) mod free;
pub(crate) mod freed_bytes;
pub(crate) mod graph;
pub(crate) mod graph_memory;
pub(crate) mod green;
pub(crate) mod ipc;
pub(crate) mod launch;
pub(crate) mod library;
pub(crate) mod lookup;
pub(crate) mod memory;
pub(crate) mod memory_info;
pub(crate) mod metering;
pub(crate) mod module;
pub(crate) mod multicast;
pub(crate) mod nvml;
pub(crate) mod physical;
pub(crate) mod pool;
pub(crate) mod primary;
pub(crate) mod shared_memory;
pub(crate) mod sparse;
pub(crate) mod streams;
pub(crate) mod transfer;
pub(crate) mod vmm;
