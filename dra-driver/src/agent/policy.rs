//! Decisions of the agent. Pure: plain data in, decisions out; no I/O and no clock.

pub mod activity;
pub mod allotment;
pub mod burst;
pub mod contention;
pub mod control;
pub mod detection;
pub mod idle;
pub mod occupancy;
pub mod priority;
pub mod rate_limiter;
pub mod reserve;
pub mod schedule;
pub mod share_metrics;
pub mod usage_counters;
