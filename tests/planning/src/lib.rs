//! Speed of the planner: the time of decisions about preemption, gangs and quotas, and its size, without a cluster.
//!
//! The shapes are those of the scale suite of KAI-Scheduler, so that its published times can stand beside them.

pub mod cluster;
pub mod objects;
pub mod scale;
pub mod scenario;
