//! Decides which devices a pod's claims get, from the state of the cluster alone: no client, no clock, no async.
//!
//! Rankings of nodes, compiled selectors and their results on devices are remembered behind locks. They save work and change no
//! decision, with one exception: a costly selector fails on every device once its evaluations have used up its units. How much
//! one decision may do before others is an argument, its [`turn::Turn`].
//!
//! [`cluster::Cluster`] receives Kubernetes objects one by one. Its [`decide`](cluster::Cluster::decide) returns the
//! placement of a pod, or an explanation of why there is none. The controller feeds it from watches, the command line
//! from lists, tests from literals. The result does not depend on the order in which objects arrive.
//!
//! Semantics follow the structured allocator of Kubernetes (KEP-4381, KEP-4815, KEP-5055, KEP-5075).

pub mod attribute;
pub mod capacity;
pub mod claim;
pub mod claim_problem;
pub mod cluster;
pub mod decision;
pub mod device;
pub mod division;
pub mod explanation;
pub mod fragmentation;
pub mod gang;
pub mod known;
pub mod node;
pub mod object;
pub mod observed;
pub mod placement;
pub mod pod;
pub mod pod_request;
pub mod pool;
pub mod quota;
mod ranking;
pub mod reason;
pub mod score;
pub mod search;
pub mod searched;
pub mod selector;
pub mod shortfall;
pub mod steps;
pub mod taint;
pub mod topology;
pub mod turn;
pub mod usage;

#[cfg(test)]
mod fixture;
