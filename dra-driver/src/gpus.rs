//! The GPUs of the node: discovery, the devices and amounts that they offer, who else owns them.

pub mod capacity;
pub mod cgroups;
pub mod coexistence;
pub mod device_files;
pub mod driver_limits;
pub mod gpu_plan;
pub mod inventory;
pub mod mps_directories;
pub mod mps_programs;
pub mod nvml_gate;
