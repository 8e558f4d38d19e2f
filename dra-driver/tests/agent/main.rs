//! Tests of the node agent: its decisions for simulated shares in virtual time, and the agent with `libvgpu.so` on a
//! simulated machine.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod allotment;
mod balance;
mod burst;
mod charges;
mod contention;
mod control;
mod detection;
mod enforcement;
mod escape;
mod growth;
mod lending;
mod measurements;
mod memory_model;
mod metrics;
mod node;
mod other_gpu;
mod polling;
mod priority;
mod priority_arbiter;
mod process;
mod region_watch;
mod regions;
mod reserve;
mod schedule;
mod simulated_gpu;
mod simulated_share;
mod suspend;
mod virtual_clock;
mod workload;
