//! Node driver of drava: kubelet's DRA plugin for the GPUs of one node, and the node agent.
//!
//! | Module | Responsibility |
//! |---|---|
//! | [`options`] | command line and environment |
//! | [`inventory`], [`capacity`], [`gpu_plan`] | discovery of GPUs, and the devices and amounts that they offer |
//! | [`profile`] | settings of the GPUs from GpuNodeProfiles |
//! | [`publish`] | ResourceSlices |
//! | [`plugin`], [`proto`] | kubelet's gRPC services |
//! | [`claims`], [`prepare`] | prepare and unprepare |
//! | [`reconcile`] | removal of orphaned and repair of incomplete claim state |
//! | [`injection`] | detection of container runtimes that ignore CDI |
//! | [`gpu_monitor`], [`gpu_health`], [`health_report`] | sensors and events of GPUs, their health, its reports |
//! | [`agent`] | GPU time, memory limits and violations of running shares |
//! | [`report`], [`conditions`], [`health`] | events, device statuses, readiness |
//! | [`metrics`], [`log`] | `/metrics`, `/debug/state`, the log and its filter |
//! | [`layout`], [`directories`], [`artifacts`], [`files`], [`lock`], [`mounts`], [`selinux`] | files and mounts on the node |
//! | [`device_files`] | device files of the NVIDIA driver |
//! | [`claim`], [`pods`], [`process`] | identities of claims and shares, the pods that use claims, and the processes of the node |
//!
//! Decisions are pure functions: [`gpu_plan::GpuPlan::new`], [`publish::desired`], [`publish::diff`], [`prepare::plan`], [`prepare::overcommit`],
//! [`reconcile::decide`], [`gpu_health::state`]. [`driver::run`] starts the tasks around them. `use` lines between these modules form a DAG.

#![forbid(unsafe_code)]

pub mod agent;
pub mod artifacts;
pub mod capacity;
pub mod claim;
pub mod claims;
pub mod coexistence;
pub mod conditions;
pub mod device_files;
pub mod directories;
pub mod driver;
pub mod files;
pub mod gpu_health;
pub mod gpu_monitor;
pub mod gpu_plan;
pub mod gpu_users;
pub mod health;
pub mod health_report;
pub mod injection;
pub mod inventory;
pub mod layout;
pub mod lock;
pub mod log;
pub mod metrics;
pub mod mounts;
pub mod nvml_gate;
pub mod options;
pub mod plugin;
pub mod pods;
pub mod prepare;
pub mod process;
pub mod profile;
pub mod proto;
pub mod publish;
pub mod reconcile;
pub mod removal;
pub mod report;
pub mod runtime_config;
pub mod selinux;
