//! Placements of a group while pods end for it.

use std::collections::BTreeSet;

use drava_allocator::cluster::Floors;
use drava_allocator::placement::Placement;

use super::holders::Holders;
use super::{Precedence, Room, RoomCause};
use crate::planner::Planner;
use crate::planner::decision::Group;
use crate::planner::demand::Request;
use crate::victims::Candidate;

/// Placements of the pods of a group.
type Placements = Vec<(Request, Placement)>;

/// A search for room.
pub(super) struct Search<'a> {
    pub(super) group: &'a Group,
    pub(super) holders: Holders,
    /// Guaranteed usage of other tenants, which no eviction lowers.
    pub(super) floors: Floors,
    /// UIDs of the pods that end in any case.
    pub(super) ending: &'a BTreeSet<String>,
    pub(super) cause: RoomCause,
}

impl Planner {
    /// Places the required pods of the group one after the other; for a pod that does not fit, the best set of pods ends.
    /// Returns the placements and all pods that end.
    pub(super) fn place_by_ends(
        &mut self,
        search: &Search<'_>,
    ) -> Option<(Placements, BTreeSet<String>)> {
        let holders = &search.holders;
        let mut ended = search.ending.clone();
        let placements = self.place_group(search, |planner, request| {
            planner.presume_ended(holders, &ended);
            if let Ok(placement) = planner.decide(&request.pod_request) {
                return Some(placement);
            }
            let (node, victims) = planner.best_victims(request, search, &ended)?;
            ended.extend(victims);
            planner.presume_ended(holders, &ended);
            let policies = planner.settings.policies;
            let placed = planner
                .cluster
                .decide_on(&node, &request.pod_request, policies);
            placed.ok()
        })?;
        Some((placements, ended))
    }

    /// Returns the room without the victims that the group does not need: each was needed by one of its pods, but a later
    /// one may have made more room than that pod.
    pub(super) fn without_unnecessary(
        &mut self,
        search: &Search<'_>,
        mut placements: Placements,
        mut ended: BTreeSet<String>,
    ) -> Room {
        // The search for one pod returns no unnecessary victim.
        let units = match search.group.required {
            1 => Vec::new(),
            _ => search.holders.units_in(&(&ended - search.ending)),
        };
        for unit in units {
            let fewer: BTreeSet<String> = ended
                .iter()
                .filter(|uid| !unit.pods.contains_key(*uid))
                .cloned()
                .collect();
            self.presume_ended(&search.holders, &fewer);
            let placed = self.place_group(search, |planner, request| {
                planner.decide(&request.pod_request).ok()
            });
            if let Some(placed) = placed
                && self.cluster.keeps(&search.floors)
            {
                placements = placed;
                ended = fewer;
            }
        }
        Room {
            placements,
            victims: &ended - search.ending,
        }
    }

    /// Places as many pods of the group as it needs by `place`, each beside those before it. `None` if too few are placed.
    fn place_group(
        &mut self,
        search: &Search<'_>,
        mut place: impl FnMut(&mut Self, &Request) -> Option<Placement>,
    ) -> Option<Placements> {
        let group = search.group;
        let must_be_guaranteed = search.cause == RoomCause::Eviction(Precedence::Guarantee);
        let mut placements: Placements = Vec::new();
        let mut covered = 0;
        for request in &group.requests {
            if placements.len() + covered == group.required {
                break;
            }
            if request.shares_claim(placements.iter().map(|(other, _)| other)) {
                covered += 1;
                continue;
            }
            let placement = place(self, request)
                .filter(|placement| !must_be_guaranteed || self.cluster.is_guaranteed(placement));
            if let Some(placement) = placement {
                self.assume(request, &placement);
                placements.push((request.clone(), placement));
            }
        }
        for (request, placement) in &placements {
            self.forget(request, placement);
        }
        (placements.len() + covered >= group.required).then_some(placements)
    }
}

impl Holders {
    /// Returns the pods and gangs whose pods are all in the set, those that should end last first.
    fn units_in(&self, uids: &BTreeSet<String>) -> Vec<Candidate> {
        let candidates = self.candidates.values().flatten();
        let mut units: Vec<Candidate> = candidates
            .filter(|unit| unit.pods.keys().all(|uid| uids.contains(uid)))
            .cloned()
            .collect();
        units.sort_by(|one, other| {
            let key = |unit: &Candidate| {
                (
                    std::cmp::Reverse(unit.priority),
                    std::cmp::Reverse(unit.pods.len()),
                    unit.pods.values().min().copied(),
                )
            };
            key(one).cmp(&key(other))
        });
        // A gang holds devices of several nodes.
        units.dedup_by(|one, other| one.pods == other.pods);
        units
    }
}
