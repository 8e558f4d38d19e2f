//! Tests of the node driver: pure decisions, and the whole driver with a fake kubelet, an in-memory API server and the
//! libraries of a simulated machine.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod api_server;
mod apply;
mod burst;
mod cdi_ignored;
mod claims;
mod cluster;
mod coexistence;
mod crash;
mod delivery;
mod driver_limits;
mod driver_process;
mod durability;
mod enforcement_events;
mod exporter;
mod fixture;
mod gpu_health;
mod idle;
mod kubelet;
mod limits_killed;
mod live_node;
mod measurements;
mod metrics;
mod mounts;
mod namespace;
mod node;
mod orphans;
mod overcommit;
mod partitions;
mod plan;
mod profile;
mod profile_offer;
mod publish;
mod readiness;
mod real_nodes;
mod recipes;
mod record;
#[cfg(debug_assertions)]
mod record_versions;
mod recovery;
mod resizes;
mod retained;
mod rollback;
mod rolling_update;
mod slice_changes;
mod slices;
mod spatial;
mod stop;
mod suspend;
mod suspensions_killed;
mod tenant;

mod walls;
