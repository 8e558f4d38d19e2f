//! Node driver of drava: kubelet's DRA plugin for the GPUs of one node, and the node agent.
//!
//! | Module | Responsibility |
//! |---|---|
//! | [`gpus`] | discovery of GPUs, the devices and amounts that they offer, other owners, NVML |
//! | [`node`] | files, mounts, locks and processes of the node, options |
//! | [`mps`] | daemons of MPS for spatial shares |
//! | [`prepare`] | prepare and unprepare of claims: plan, record, limits page, CDI spec, MIG instances |
//! | [`gpu_health`] | health of the GPUs from sensors and events |
//! | [`report`] | events, device statuses of claims, conditions of the driver |
//! | [`kubelet`] | kubelet's gRPC services |
//! | [`agent`] | GPU time, memory limits and violations of running shares |
//! | [`suspend`] | suspension of shares: what is done next, and calls about processes |
//! | [`repair`] | lost and orphaned state, ignored CDI specs, health of claims, removal |
//! | [`operate`] | probes and log |
//! | [`metrics`] | `/metrics` and `/debug/state` |
//! | [`publish`] | ResourceSlices, with the settings of GpuNodeProfiles |
//! | [`driver`] | the tasks of all of them |
//!
//! Each module depends on those above it only, which a test checks.
//!
//! Decisions are pure functions: [`gpus::gpu_plan::GpuPlan::new`], [`publish::desired`], [`publish::diff`], [`prepare::plan`], [`prepare::overcommit`],
//! [`repair::reconcile::decide`], [`suspend::decide`], [`gpu_health::state`]. [`driver::run`] starts the tasks around them.

#![forbid(unsafe_code)]

pub mod agent;
pub mod driver;
pub mod gpu_health;
pub mod gpus;
pub mod kubelet;
pub mod metrics;
pub mod mps;
pub mod node;
pub mod operate;
pub mod prepare;
pub mod publish;
pub mod repair;
pub mod report;
pub mod suspend;
