//! Tenants of one simulated GPU, each in a container with its own share, and the GPU time that they get.
//!
//! Used by the tests of `libvgpu` and of the node agent, and by the benchmarks: [`TestBed`] is a machine, [`Share`] the
//! files of a share, [`Tenant`] a process that runs GPU work on command (`tenant.c`).

mod correction;
pub mod library;
mod share;
mod tenant;
mod test_bed;

pub use share::{Share, share};
pub use tenant::Tenant;
pub use test_bed::{TestBed, slow_memory};
