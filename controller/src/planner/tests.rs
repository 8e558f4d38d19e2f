//! Scenarios of managed mode.

mod allocation;
mod cluster;
mod events;
mod metrics;
mod release;
mod unallocatable;
