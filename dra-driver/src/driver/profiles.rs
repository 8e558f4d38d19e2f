//! Starts what follows the node profiles.

use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::ResourceExt as _;
use tokio::sync::watch;

use super::{Shared, Tasks};
use crate::gpu_health::HealthTable;
use crate::gpus::inventory::{RescanRequests, State};
use crate::gpus::nvml_gate::{self, Gate};
use crate::kubelet::claims::blocking;
use crate::kubelet::plugin::health::Devices;
use crate::publish::TaintPolicy;
use crate::publish::profile::status::StatusWriter;
use crate::publish::profile::{self, Objects, Watches};
use crate::publish::writer::{Published, Publisher};

impl Shared {
    /// Watches the node profiles and combines them with the discovered GPUs.
    pub(super) fn follow_profiles(
        &self,
        tasks: &mut Tasks,
        discovered: watch::Receiver<State>,
        published: &watch::Sender<Published>,
        state: watch::Sender<State>,
    ) -> Watches {
        let (client, node) = (self.client.clone(), &self.config.node);
        let (conditions, intervals) = (self.conditions.clone(), self.config.profile_intervals);
        let (guard, stop) = (self.config.guard, self.stop.clone());
        let (watches, watching) =
            Watches::start(client, node, conditions, intervals, guard, stop.clone());
        tasks.spawn(async move {
            Box::pin(watching).await;
            Ok("watch of node profiles")
        });
        let following = profile::follow(
            discovered,
            watches.clone(),
            published.subscribe(),
            state,
            stop,
        );
        tasks.spawn(async move {
            following.await;
            Ok("node profiles")
        });
        watches
    }

    /// Closes NVML while the Node object requests it.
    pub(super) fn follow_release(
        &self,
        tasks: &mut Tasks,
        gate: Gate,
        discovery: RescanRequests,
        mut node: watch::Receiver<Objects<NodeObject>>,
    ) {
        let stop = self.stop.clone();
        tasks.spawn(async move {
            loop {
                let requested = release(&node.borrow_and_update());
                let (gate, wanted) = (gate.clone(), requested.clone());
                // Waits for the events of the GPUs.
                let changed = blocking(move || gate.set_closed(wanted)).await;
                if changed.unwrap_or(false) {
                    tracing::info!(reason = requested, "the request of the Node object to release NVML changed");
                    discovery.rescan().await;
                }
                tokio::select! {
                    () = stop.cancelled() => break,
                    changed = node.changed() => if changed.is_err() { stop.cancelled().await; break },
                }
            }
            Ok("release of NVML")
        });
    }

    /// Returns the publisher and the writer of the status of node profiles.
    pub(super) fn publishing(
        &self,
        health: &HealthTable,
        devices: watch::Sender<Devices>,
        published: watch::Sender<Published>,
        profiles: Watches,
    ) -> (Publisher, StatusWriter) {
        let status = StatusWriter {
            client: self.client.clone(),
            node: self.config.node.clone(),
            profiles: profiles.profiles,
            published: published.subscribe(),
            reporter: self.reporter.clone(),
            intervals: self.config.profile_intervals,
        };
        let publisher = Publisher {
            client: self.client.clone(),
            node: self.config.node.clone(),
            taints: TaintPolicy {
                scheduling: self.config.scheduling,
                unhealthy: self.config.unhealthy_effect,
            },
            gpus: self.gpus.clone(),
            health: health.subscribe(),
            devices,
            conditions: self.conditions.clone(),
            reporter: self.reporter.clone(),
            retained_grace: self.config.retained_grace,
            published,
        };
        (publisher, status)
    }
}

/// Returns why the Node object requests the release of NVML.
fn release(node: &Objects<NodeObject>) -> Option<String> {
    let mut nodes = node.iter().flat_map(|nodes| nodes.values());
    nodes.find_map(|node| nvml_gate::requested_release(node.annotations(), node.labels()))
}
