//! Scenarios of managed mode.

mod allocation;
mod cluster;
mod events;
mod release;
mod unallocatable;
