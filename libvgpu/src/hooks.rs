//! The bodies of the hooks, by subject. [`crate::table`] maps each function to its body.

pub(crate) mod array;
pub(crate) mod context;
pub(crate) mod driver_cache;
pub(crate) mod exported;
pub(crate) mod external;
pub(crate) mod free;
pub(crate) mod graph;
pub(crate) mod graph_memory;
pub(crate) mod green;
pub(crate) mod ipc;
pub(crate) mod launch;
pub(crate) mod lookup;
pub(crate) mod memory;
pub(crate) mod memory_info;
pub(crate) mod module;
pub(crate) mod multicast;
pub(crate) mod nvml;
pub(crate) mod physical;
pub(crate) mod physical_use;
pub(crate) mod pool;
pub(crate) mod primary;
pub(crate) mod shared_memory;
pub(crate) mod sparse;
pub(crate) mod transfer;
pub(crate) mod vmm;
