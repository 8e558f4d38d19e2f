//! Scenarios of managed mode.

mod allocation;
mod cluster;
mod companions;
mod conditions;
mod events;
mod gang;
mod gang_victims;
mod gate;
mod histories;
mod metrics;
mod missing_claims;
mod neighbors;
mod overcommit;
mod policy;
mod preemption;
mod quota;
mod readers;
mod release;
mod reservation;
mod reserved_devices;
mod round;
mod search;
mod unallocatable;
mod unreadable;
