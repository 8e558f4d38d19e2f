//! The reserved devices, as metrics and users see them: neither allocated nor free.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::placement::ClaimPlacement;
use drava_allocator::quota::Charge;
use drava_allocator::usage::{AllocatedDevice, DeviceAccess, DeviceUse};
use drava_api::leader::{MAX_RESERVATIONS, Reservation, ReservationPurpose, ReservedDevice};

use super::Planner;
use crate::decide::ledger::Purpose;
use crate::operate::metrics::{DeviceMetrics, NamespaceAmounts};

impl Planner {
    /// Returns the shareable devices, with what is reserved of them apart from what is allocated. `overcommitted` has nodes with
    /// UUIDs of GPUs.
    pub(super) fn device_metrics(
        &self,
        overcommitted: &BTreeSet<(String, String)>,
    ) -> Vec<DeviceMetrics> {
        let cluster = &self.world.cluster;
        let reserved: Vec<AllocatedDevice> = self
            .reserved_claims()
            .flat_map(|(_, _, claim)| claim.allocated_devices())
            .collect();
        let reserved = cluster.use_of(&reserved);
        let nothing = DeviceUse::default();
        let devices = cluster.shared_devices().map(|(node, device, in_use)| {
            let reserved = reserved.get(&(node, &*device.name)).unwrap_or(&nothing);
            let gpu = (node.to_owned(), device.gpu.to_string());
            DeviceMetrics {
                is_gpu_overcommitted: overcommitted.contains(&gpu),
                ..DeviceMetrics::new(node, device, in_use, reserved)
            }
        });
        devices.collect()
    }

    /// Returns what the claims of each namespace have. What is reserved for an eviction counts for the quota only.
    pub(super) fn namespace_amounts(&self) -> BTreeMap<String, NamespaceAmounts> {
        let cluster = &self.world.cluster;
        let mut charges: BTreeMap<&str, Charge> = cluster.namespace_charges().collect();
        for (_, _, claim) in self.reserved_claims() {
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

    /// Returns the claims with reserved devices, each with the UID of its pod.
    fn reserved_claims(&self) -> impl Iterator<Item = (&str, Purpose, &ClaimPlacement)> {
        let reservations = self.commitments.ledger.reservations();
        reservations.flat_map(|(_, reservation)| {
            let placements = reservation.placements.iter();
            placements.flat_map(|(uid, placement)| {
                let claims = placement.claims.iter();
                claims.map(|claim| (uid.as_str(), reservation.purpose, claim))
            })
        })
    }

    /// Returns the reservations for users, in a fixed order.
    pub(super) fn reservations(&self) -> Vec<Reservation> {
        let reservations = self.reserved_claims().filter_map(|(uid, purpose, claim)| {
            let pod = self.world.live_pods.get(uid)?.reference.name.clone()?;
            let devices = claim.allocated_devices();
            let devices = devices.into_iter().map(|device| ReservedDevice {
                capacity: match &device.access {
                    DeviceAccess::Share(amounts) => {
                        let amounts = amounts.iter();
                        let amounts =
                            amounts.map(|(name, amount)| (name.clone(), amount.to_string()));
                        Some(amounts.collect())
                    }
                    DeviceAccess::Exclusive | DeviceAccess::Admin(_) => None,
                },
                request: device.request,
                pool: device.pool,
                device: device.device,
            });
            Some(Reservation {
                namespace: claim.claim.namespace.clone(),
                pod,
                claim: claim.claim.name.clone(),
                purpose: match purpose {
                    Purpose::HeadOfQueue => ReservationPurpose::HeadOfQueue,
                    Purpose::Preemption => ReservationPurpose::Preemption,
                },
                devices: devices.collect(),
            })
        });
        let mut reservations: Vec<Reservation> = reservations.collect();
        reservations.sort();
        reservations.truncate(MAX_RESERVATIONS);
        reservations
    }
}
