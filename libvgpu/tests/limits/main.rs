//! `libvgpu.so` in front of the simulated driver: real processes, real files, real deaths.
//!
//! The program under limits is `subject.c`; the machine's ledger is the oracle.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

mod arrays;
mod crowd;
mod deaths;
mod doors;
mod figures;
mod graphs;
mod hostile;
mod interposer;
mod loaders;
mod memory;
mod pools;
mod processes;
mod robustness;
mod shared_pools;
mod shares;
mod sharing;
mod shim;
mod standalone;
mod storm;
mod subject;
mod view;
mod view_clients;
mod view_processes;
mod view_records;
mod view_utilization;
