//! The reservation that keeps the devices of a pod that would fit without it.

use std::collections::BTreeSet;

use drava_allocator::explanation::Explanation;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::searched::{Suspended, Undecided};
use drava_allocator::turn::Turn;
use drava_api::reason::Reason;
use drava_explanation::owner::name_for;

use crate::decide::ledger::{Owner, Purpose, Reservation};
use crate::decide::planner::Planner;
use crate::decide::planner::decision::Group;
use crate::decide::planner::world::World;
use crate::pods::pod::qualified_name;

/// Nodes of one reservation that are tried; a gang may have reserved devices on many.
const MAX_NODES: usize = 8;

impl Planner {
    /// Returns which pod or gang has reserved the devices that would serve a single pod, which fits on no others.
    ///
    /// # Errors
    /// When the turn is too short.
    pub(in crate::decide::planner) fn reserved_room(
        &mut self,
        group: &Group,
        turn: &mut Turn,
    ) -> Result<Option<Explanation>, Suspended> {
        let [request] = &group.requests[..] else {
            return Ok(None);
        };
        let request = &request.pod_request;
        let others: Vec<(Owner, Reservation)> = self
            .commitments
            .ledger
            .reservations()
            .filter(|(_, reservation)| {
                let mut pods = reservation.pods.iter();
                pods.all(|pod| pod.uid != request.uid)
            })
            .map(|(owner, reservation)| (owner.clone(), reservation.clone()))
            .collect();
        if others.is_empty() {
            return Ok(None);
        }
        let reserved = &self.backlog.rejections.at(&self.world).reserved;
        if let Some(known) = reserved.of(request).next() {
            return Ok(known.clone());
        }
        // A pod that fits on no node fits without the reservations on one of theirs, if at all.
        let fitting = self.world.without(&others, |world| {
            fitting_reservation(world, request, &others, turn)
        });
        let reader = request.claims.first();
        let reader = reader.map_or("", |claim| claim.id.namespace.as_str());
        let explanation = fitting?.and_then(|(owner, purpose, node)| {
            let (kind, name) = match owner {
                Owner::Pod(uid) => {
                    let pod = self.world.live_pods.get(uid)?;
                    ("pod", qualified_name(&pod.reference))
                }
                Owner::Gang(gang) => ("gang", gang.qualified()),
            };
            // The readers of the pod's events and condition may know the names of its namespace.
            let owner = name_for(reader, kind, &name);
            let why = match purpose {
                Purpose::HeadOfQueue => "the head of the queue",
                Purpose::Preemption => "for which other pods end",
            };
            let message =
                format!("the pod fits on {node}, but its devices are reserved for {owner}, {why}");
            Some(Explanation::rejected(Reason::Reserved, message))
        });
        // Otherwise the searches were too short to tell.
        if !turn.is_out_of_searches() {
            let rejections = self.backlog.rejections.at(&self.world);
            rejections.reserved.add(request, explanation.clone());
        }
        Ok(explanation)
    }
}

/// Returns the owner of the first of these reservations that keeps the devices of a pod, and the node.
fn fitting_reservation<'r>(
    world: &World,
    request: &PodRequest,
    reservations: &'r [(Owner, Reservation)],
    turn: &mut Turn,
) -> Result<Option<(&'r Owner, Purpose, String)>, Suspended> {
    let policies = world.settings.policies;
    for (owner, reservation) in reservations {
        let pods = reservation.pods.iter();
        let nodes: BTreeSet<&str> = pods.map(|pod| pod.placement.node.as_str()).collect();
        for node in nodes.into_iter().take(MAX_NODES) {
            match world.cluster.decide_on_in(node, request, policies, turn) {
                Ok(_) => return Ok(Some((owner, reservation.purpose, node.to_owned()))),
                Err(Undecided::Rejected(_)) => {}
                Err(Undecided::Suspended(suspended)) => return Err(suspended),
            }
        }
    }
    Ok(None)
}
