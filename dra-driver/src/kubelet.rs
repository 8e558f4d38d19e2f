//! Kubelet's gRPC services, and the claims that they prepare and unprepare.

pub mod claims;
pub mod plugin;
pub mod proto;
