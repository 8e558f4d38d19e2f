//! Tests of the node agent: its decisions against simulated tenants in virtual time, and the agent itself beside
//! `libvgpu.so` on a simulated machine.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod allot;
mod balance;
mod control;
mod detect;
mod escape;
mod figures;
mod idle;
mod lending;
mod machine;
mod node;
mod precedence;
mod priority;
mod regions;
mod reserve;
mod shares;
mod tenants;
mod token;
