//! Packing quality: the allocator of the controller places the pods of a trace, without a cluster.
//!
//! A run is the experiment of Weng et al., *Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation
//! Gradient Descent* (USENIX ATC 2023): pods arrive in random order until they have requested 130% of the GPUs. A pod
//! that fits on no node is dropped; no pod ends, moves or is tried again. The result is the allocated part of all GPUs.

pub mod experiment;
pub mod mig;
pub mod objects;
pub mod recommendation;
pub mod scale;
pub mod trace;
