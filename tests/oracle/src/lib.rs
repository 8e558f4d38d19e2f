//! Differential test of `drava-allocator` against the structured allocator of Kubernetes.
//!
//! A Go program (`go/`) answers, per case and node, what `k8s.io/dynamic-resource-allocation/structured` decides. Cases
//! are generated from a seed: small clusters with claims near the limit of what fits. A pod must fit on a node exactly
//! when the program says so; every other result is a difference, unless [`exception`] lists it. A [`validator`] written
//! from the enhancement proposals checks the devices that our allocator selects.
//!
//! Upstream does not know containers, so the pods of the cases have none: our rule that the devices of one container are on
//! different GPUs does not apply. kube-scheduler allocates two shares of one GPU to two requests of a claim for one container;
//! ours does not.
//!
//! A second program (`scheduler/`) has the plugins of kube-scheduler for everything but devices: [`scheduler`] compares on
//! which nodes a pod fits, and their scores.

pub mod allocator;
pub mod batch;
pub mod case;
pub mod comparison;
pub mod exception;
pub mod expression;
pub mod generator;
pub mod mutation;
pub mod program;
pub mod random;
pub mod reduction;
pub mod scheduler;
pub mod validator;
