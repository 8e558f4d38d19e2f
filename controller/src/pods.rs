//! Pods, their gangs and their claims: what the controller reads from them.

pub(crate) mod claim;
pub(crate) mod live_pods;
pub(crate) mod pod;
pub mod pod_condition;
pub mod pod_group;

pub(crate) use drava_allocator::gang;
