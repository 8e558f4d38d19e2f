//! The reservation that keeps the devices of a pod that would fit without it.

use drava_allocator::explanation::Explanation;
use drava_allocator::node::PodDemand;
use drava_api::reason::Reason;

use crate::ledger::{Owner, Purpose, Reservation};
use crate::planner::Planner;
use crate::planner::decision::Group;
use crate::pod::qualified_name;

impl Planner {
    /// Returns for whom the devices are reserved that would serve a single pod, which fits on no other.
    pub(in crate::planner) fn reserved_room(&mut self, group: &Group) -> Option<Explanation> {
        let [request] = &group.requests[..] else {
            return None;
        };
        let request = &request.pod_request;
        let others: Vec<(Owner, Reservation)> = self
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
            return None;
        }
        if let Some(known) = self.rejections.reserved_for(request) {
            return known.clone();
        }
        // The ledger keeps the reservations, only the cluster forgets them for this decision.
        for (_, reservation) in &others {
            for key in reservation.claims() {
                self.cluster.forget(&key);
            }
            for (uid, _) in &reservation.placements {
                self.cluster.forget_pod(uid);
            }
        }
        let placement = self.place(request);
        for (_, reservation) in &others {
            for (uid, placement) in &reservation.placements {
                let demand = self
                    .queue
                    .get(uid)
                    .map(|pending| PodDemand::of(&pending.pod));
                self.keep(placement, reservation.purpose);
                if let Some(demand) = demand {
                    self.cluster.assume_pod(uid, &placement.node, &demand);
                }
            }
        }
        let explanation = placement.and_then(|placement| {
            let node = placement.node;
            let mut others = others.iter();
            let (owner, reservation) = others.find(|(_, reservation)| {
                let mut reserved = reservation.placements.iter();
                reserved.any(|(_, placement)| placement.node == node)
            })?;
            let owner = match owner {
                Owner::Pod(uid) => {
                    format!(
                        "pod {}",
                        qualified_name(&self.live_pods.get(uid)?.reference)
                    )
                }
                Owner::Gang(gang) => format!("gang {gang}"),
            };
            let why = match reservation.purpose {
                Purpose::HeadOfQueue => "the head of the queue",
                Purpose::Preemption => "for which other pods end",
            };
            let message =
                format!("the pod fits on {node}, but its devices are reserved for {owner}, {why}");
            Some(Explanation::rejected(Reason::Reserved, message))
        });
        self.rejections.reserved(request, explanation.clone());
        explanation
    }
}
