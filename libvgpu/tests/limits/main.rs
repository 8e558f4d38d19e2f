//! `libvgpu.so` in front of the simulated driver, with real processes, files and kills.
//!
//! The program under test is `test_process.c`. Its results are compared with the ledger of the simulated machine.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

mod arrays;
mod crash_points;
mod entry_points;
mod graphs;
mod hostile;
mod interposer;
mod loaders;
mod measurements;
mod memory;
mod memory_info;
mod modules;
mod nvml_clients;
mod nvml_load;
mod nvml_processes;
mod nvml_records;
mod nvml_utilization;
mod pools;
mod processes;
mod programs;
mod recipes;
mod robustness;
mod shared_memory;
mod shared_pools;
mod shares;
mod shim;
mod standalone;
mod stress;
mod test_process;
mod threads;
