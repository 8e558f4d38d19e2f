//! Decides which devices a pod's claims get, as a pure function over cluster state.
//!
//! No client, no clock, no async: [`cluster::Cluster`] is fed Kubernetes objects one by one; its
//! [`decide`](cluster::Cluster::decide) answers, for a pod, either with a placement or with an explanation. The controller feeds it from watches, the command line from
//! lists, tests from literals; all get the same answer, whatever the order in which the objects arrived.
//!
//! Semantics follow the structured allocator of Kubernetes (KEP-4381, KEP-4815, KEP-5055, KEP-5075).

pub mod ask;
pub mod attribute;
pub mod capacity;
pub mod claim;
pub mod cluster;
pub mod decision;
pub mod device;
pub mod explanation;
pub mod node;
pub mod placement;
pub mod pool;
pub mod reason;
pub mod search;
pub mod selector;
pub mod taint;
pub mod usage;

#[cfg(test)]
mod fixture;
