//! Tests of the node agent: its decisions against simulated tenants in virtual time, and the agent itself beside
//! `libvgpu.so` on a simulated machine.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod allot;
mod balance;
mod detect;
#[allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "the tests of libvgpu use the rest"
)]
#[path = "../../../libvgpu/tests/compute/tenants.rs"]
mod ground;
#[allow(dead_code, reason = "the tests of libvgpu use the rest")]
#[path = "../../../libvgpu/tests/limits/interposer.rs"]
mod interposer;
mod machine;
mod node;
mod tenants;
mod token;
