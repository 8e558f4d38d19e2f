//! The reserved devices, as metrics and users see them: neither allocated nor free.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::division::Division;
use drava_allocator::placement::ClaimPlacement;
use drava_allocator::quota::Charge;
use drava_allocator::usage::{AllocatedDevice, DeviceAccess, DeviceUse};
use drava_api::leader::{
    GpuControllerLeader, GpuControllerLeaderStatus, LEADER_NAME, LeaderSettings, MAX_RESERVATIONS,
    ReservationPurpose, ReservedClaim, ReservedDevice,
};
use drava_api::listed::Change;
use tokio::time::Instant;

use super::{DecisionTime, Planner, Settings};
use crate::action::Action;
use crate::action::status::StatusOutcome;
use crate::decide::ledger::{Ledger, Purpose, Reservation};
use crate::operate::metrics::{DeviceMetrics, NamespaceAmounts, NodeMetrics};
use crate::pods::live_pods::LivePods;

impl Planner {
    /// Returns what the metrics show of the nodes that may have changed since the last call, by name. What is reserved of their
    /// devices is apart from what is allocated.
    pub fn changed_node_metrics(&mut self) -> BTreeMap<String, NodeMetrics> {
        let changed = self.world.cluster.take_changed_nodes();
        let cluster = &self.world.cluster;
        let overcommits = cluster.overcommits().into_iter();
        let overcommitted: BTreeSet<(String, String)> = overcommits
            .map(|overcommit| (overcommit.node, overcommit.gpu))
            .collect();
        let reserved: Vec<AllocatedDevice> = self
            .reserved_claims()
            .flat_map(ClaimPlacement::allocated_devices)
            .collect();
        let reserved = cluster.use_of(&reserved);
        let nothing = DeviceUse::default();
        let metrics = changed.into_iter().map(|node| {
            let devices = cluster.shared_devices_on(&node).map(|(device, in_use)| {
                let reserved = reserved.get(&(&*node, &*device.name)).unwrap_or(&nothing);
                let gpu = (node.clone(), device.gpu.to_string());
                DeviceMetrics {
                    is_gpu_overcommitted: overcommitted.contains(&gpu),
                    ..DeviceMetrics::new(device, in_use, reserved)
                }
            });
            let metrics = NodeMetrics {
                devices: devices.collect(),
                free_memory: cluster.free_memory_on(&node),
            };
            (node, metrics)
        });
        metrics.collect()
    }

    /// Returns what the claims of each namespace have. What is reserved for an eviction counts for the quota only.
    pub(super) fn namespace_amounts(&self) -> BTreeMap<String, NamespaceAmounts> {
        let cluster = &self.world.cluster;
        let mut charges: BTreeMap<&str, Charge> = cluster.namespace_charges().collect();
        for claim in self.reserved_claims() {
            let key = (claim.claim.namespace.clone(), claim.claim.name.clone());
            if let Some(sum) = charges.get_mut(claim.claim.namespace.as_str()) {
                *sum = *sum - cluster.charge_of(&key);
            }
        }
        charges
            .into_iter()
            .filter(|(_, charge)| *charge != Charge::default())
            .map(|(namespace, charge)| (namespace.to_owned(), charge.into()))
            .collect()
    }

    /// Returns the claims with reserved devices.
    fn reserved_claims(&self) -> impl Iterator<Item = &ClaimPlacement> {
        let reservations = self.commitments.ledger.reservations();
        reservations.flat_map(|(_, reservation)| {
            let pods = reservation.pods.iter();
            pods.flat_map(|pod| &pod.placement.claims)
        })
    }

    /// Observes the GpuControllerLeader.
    pub fn leader(&mut self, change: Change<GpuControllerLeader>) {
        match change {
            Change::Applied(leader) => self.reporter.leader_statuses.observe(*leader),
            Change::Deleted(leader) => self.reporter.leader_statuses.remove(&leader.name),
        }
    }

    /// Observes the outcome of a write of the leader's status.
    pub fn leader_status_written(
        &mut self,
        outcome: StatusOutcome<GpuControllerLeader>,
        now: Instant,
    ) {
        self.reporter.leader_statuses.written(outcome, now);
    }

    /// Adds the write of changed reservations.
    pub(super) fn write_leader_status(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        let (ledger, world) = (&self.commitments.ledger, &self.world);
        let due = self.reporter.leader_statuses.due(time.instant, |leader| {
            let is_known = leader.metadata.name.as_deref() == Some(LEADER_NAME);
            is_known.then(|| leader_status(ledger, &world.live_pods, &world.settings))
        });
        actions.extend(due.into_iter().map(Action::WriteLeaderStatus));
    }
}

/// Returns the reservations and settings for users, in a fixed order. Those first in the queue are kept if there are too many.
pub(super) fn leader_status(
    ledger: &Ledger,
    live_pods: &LivePods,
    settings: &Settings,
) -> GpuControllerLeaderStatus {
    let claims = ledger.reservations().flat_map(|(_, reservation)| {
        let pods = reservation.pods.iter();
        pods.flat_map(move |pod| {
            let claims = pod.placement.claims.iter();
            claims.map(move |claim| (reservation, pod.uid.as_str(), claim))
        })
    });
    let mut claims: Vec<(&Reservation, &str, &ClaimPlacement)> = claims.collect();
    claims.sort_by_key(|&(reservation, _, claim)| {
        let id = &claim.claim;
        (&reservation.order, &id.namespace, &id.name)
    });
    let omitted = claims.len().saturating_sub(MAX_RESERVATIONS);
    claims.truncate(MAX_RESERVATIONS);
    let reservations = claims.into_iter().filter_map(|(reservation, uid, claim)| {
        let pod = live_pods.get(uid)?.reference.name.clone()?;
        Some(ReservedClaim {
            namespace: claim.claim.namespace.clone(),
            pod,
            claim: claim.claim.name.clone(),
            purpose: match reservation.purpose {
                Purpose::HeadOfQueue => ReservationPurpose::HeadOfQueue,
                Purpose::Preemption => ReservationPurpose::Preemption,
            },
            devices: claim.allocated_devices().into_iter().map(shown).collect(),
        })
    });
    let mut reservations: Vec<ReservedClaim> = reservations.collect();
    reservations.sort();
    GpuControllerLeaderStatus {
        reservations,
        omitted_reservations: u32::try_from(omitted).unwrap_or(u32::MAX),
        settings: Some(LeaderSettings {
            node_policy: settings.policies.node.as_str().to_owned(),
            gpu_policy: settings.policies.gpu.as_str().to_owned(),
            scheduler_names: settings.schedulers.clone(),
        }),
    }
}

fn shown(device: AllocatedDevice) -> ReservedDevice {
    ReservedDevice {
        capacity: match &device.access {
            DeviceAccess::Share(amounts, _) | DeviceAccess::Suspended(amounts) => {
                let amounts = amounts.iter();
                let amounts = amounts.map(|(name, amount)| (name.clone(), amount.to_string()));
                Some(amounts.collect())
            }
            DeviceAccess::Exclusive | DeviceAccess::Admin(_) => None,
        },
        spatial: matches!(
            device.access,
            DeviceAccess::Share(_, Division::Multiprocessors(_))
        ),
        request: device.request,
        pool: device.pool,
        device: device.device,
    }
}
