//! Tenants of one simulated card, each in a container with a share of its own, and what the card says they got.
//!
//! The ground on which the tests of `libvgpu` and of the node agent and the benches stand: [`TestBed`] is a machine,
//! [`Share`] the files of a share, [`Tenant`] a process that keeps the card busy as it is told (`tenant.c`).

mod correction;
pub mod library;
mod share;
mod tenant;
mod test_bed;

pub use share::{Share, share};
pub use tenant::Tenant;
pub use test_bed::{TestBed, slow_memory};
