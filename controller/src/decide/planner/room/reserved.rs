//! The reservation that keeps the devices of a pod that would fit without it.

use std::collections::BTreeSet;

use drava_allocator::explanation::Explanation;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::searched::{Suspended, Undecided};
use drava_allocator::turn::Turn;
use drava_api::reason::Reason;

use crate::decide::ledger::{Owner, Purpose, Reservation};
use crate::decide::planner::Planner;
use crate::decide::planner::decision::Group;
use crate::pods::pod::qualified_name;

/// Nodes of one reservation that are tried; a gang may have reserved devices on many.
const MAX_NODES: usize = 8;

impl Planner {
    /// Returns for whom the devices are reserved that would serve a single pod, which fits on no other.
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
                reservation
                    .placements
                    .iter()
                    .all(|(uid, _)| *uid != request.uid)
            })
            .map(|(owner, reservation)| (owner.clone(), reservation.clone()))
            .collect();
        if others.is_empty() {
            return Ok(None);
        }
        if let Some(known) = self
            .backlog
            .rejections
            .at(&self.world)
            .reserved_for(request)
        {
            return Ok(known.clone());
        }
        // The ledger keeps the reservations, only the cluster forgets them for this decision.
        for (_, reservation) in &others {
            for key in reservation.claims() {
                self.world.cluster.forget(&key);
            }
            for (uid, _) in &reservation.placements {
                self.world.cluster.forget_pod(uid);
            }
        }
        // A pod that fits on no node fits without the reservations on one of theirs, if at all.
        let fitting = self.fitting_reservation(request, &others, turn);
        for (_, reservation) in &others {
            self.keep_reserved(reservation);
        }
        let explanation = fitting?.and_then(|(owner, purpose, node)| {
            let owner = match owner {
                Owner::Pod(uid) => {
                    format!(
                        "pod {}",
                        qualified_name(&self.world.live_pods.get(uid)?.reference)
                    )
                }
                Owner::Gang(gang) => format!("gang {}", gang.qualified()),
            };
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
            self.backlog
                .rejections
                .at(&self.world)
                .reserved(request, explanation.clone());
        }
        Ok(explanation)
    }

    /// Returns the owner of the first of these reservations that keeps the devices of a pod, and the node.
    fn fitting_reservation<'r>(
        &self,
        request: &PodRequest,
        reservations: &'r [(Owner, Reservation)],
        turn: &mut Turn,
    ) -> Result<Option<(&'r Owner, Purpose, String)>, Suspended> {
        let policies = self.world.settings.policies;
        for (owner, reservation) in reservations {
            let nodes: BTreeSet<&str> = reservation
                .placements
                .iter()
                .map(|(_, placement)| placement.node.as_str())
                .collect();
            for node in nodes.into_iter().take(MAX_NODES) {
                match self
                    .world
                    .cluster
                    .decide_on_in(node, request, policies, turn)
                {
                    Ok(_) => return Ok(Some((owner, reservation.purpose, node.to_owned()))),
                    Err(Undecided::Rejected(_)) => {}
                    Err(Undecided::Suspended(suspended)) => return Err(suspended),
                }
            }
        }
        Ok(None)
    }
}
