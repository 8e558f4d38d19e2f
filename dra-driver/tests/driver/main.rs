//! Tests of the node driver, from pure decisions to the whole driver between a fake kubelet, an API server in memory
//! and the libraries of a simulated machine.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod agent;
mod api_server;
mod apply;
mod cdi_ignored;
mod claims;
mod crash;
mod delivery;
mod fixture;
mod guard;
mod harness;
mod kubelet;
mod mounts;
mod node;
mod orphans;
mod plan;
mod publish;
mod readiness;
mod record;
mod recovery;
mod retained;
mod slices;
mod update;
