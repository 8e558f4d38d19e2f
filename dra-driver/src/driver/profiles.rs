//! Starts what follows the node profiles.

use tokio::sync::watch;

use super::{Shared, Tasks};
use crate::gpu_health::HealthTable;
use crate::inventory::State;
use crate::plugin::health::Devices;
use crate::profile::status::StatusWriter;
use crate::profile::{self, Watches};
use crate::publish::TaintPolicy;
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
        let stop = self.stop.clone();
        let (watches, watching) = Watches::start(client, node, conditions, intervals, stop.clone());
        tasks.spawn(async move {
            watching.await;
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
