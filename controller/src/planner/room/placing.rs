//! Placements of a group while pods end for it.

use std::collections::BTreeSet;

use drava_allocator::placement::Placement;

use super::holders::{Holders, NodesOfPod};
use super::known_victims::KnownVictims;
use super::{Precedence, Room, RoomCause, Search};
use crate::planner::Planner;
use crate::planner::demand::Request;
use crate::victims::Candidate;

/// Placements of the pods of a group.
type Placements = Vec<(Request, Placement)>;

impl Planner {
    /// Places the required pods of the group one after the other; for a pod that does not fit, the best set of pods ends.
    /// Returns the placements and all pods that end.
    pub(super) fn place_by_ends(
        &mut self,
        search: &Search<'_>,
    ) -> Option<(Placements, BTreeSet<String>)> {
        let holders = &search.holders;
        let mut ended = search.ending.clone();
        let mut known = KnownVictims::default();
        // A single pod needs no known victims.
        let nodes_of_pod = match search.group.requests.len() {
            1 => NodesOfPod::new(),
            _ => holders.nodes_of_pod(),
        };
        self.presume_ended(holders, &ended);
        let placements = self.place_group(search, |planner, request| {
            if let Some(placement) = planner.place(&request.pod_request) {
                known.node_changed(&placement.node);
                return Some(placement);
            }
            let (placement, victims) = planner.place_by_victims(request, search, &mut known)?;
            known.pods_ended(&nodes_of_pod, &victims);
            known.node_changed(&placement.node);
            ended.extend(victims);
            Some(placement)
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
        if search.group.requests.len() == 1 {
            // The search for one pod returns no unnecessary victim.
            return Room {
                placements,
                victims: &ended - search.ending,
            };
        }
        for (request, placement) in &placements {
            self.assume(request, placement);
        }
        let nodes_of_pod = search.holders.nodes_of_pod();
        for unit in search.holders.units_in(&(&ended - search.ending)) {
            let pods: BTreeSet<String> = unit.pods.into_keys().collect();
            let nodes = pods.iter().filter_map(|uid| nodes_of_pod.get(uid.as_str()));
            let nodes: BTreeSet<&str> = nodes.flatten().copied().collect();
            if self.replace_on(&nodes, search, &mut placements, &pods) {
                ended.retain(|uid| !pods.contains(uid));
            }
        }
        for (request, placement) in &placements {
            self.forget(request, placement);
        }
        Room {
            placements,
            victims: &ended - search.ending,
        }
    }

    /// Places the pods on these nodes anew, so that `spared` pods, which hold devices there, need not end. Returns whether
    /// all fit; otherwise nothing changes. The placements are assumed.
    fn replace_on(
        &mut self,
        nodes: &BTreeSet<&str>,
        search: &Search<'_>,
        placements: &mut Placements,
        spared: &BTreeSet<String>,
    ) -> bool {
        let moved: Vec<usize> = (0..placements.len())
            .filter(|index| nodes.contains(placements[*index].1.node.as_str()))
            .collect();
        for &index in &moved {
            let (request, placement) = &placements[index];
            self.forget(request, placement);
        }
        let back = self.presume_running(spared);
        let mut anew: Placements = Vec::new();
        for &index in &moved {
            let request = &placements[index].0;
            let placement = self.place(&request.pod_request);
            let Some(placement) = placement.filter(|each| self.is_allowed(search, each)) else {
                break;
            };
            self.assume(request, &placement);
            anew.push((request.clone(), placement));
        }
        if anew.len() == moved.len() && self.world.cluster.keeps(&search.floors) {
            for (index, placed) in moved.into_iter().zip(anew) {
                placements[index] = placed;
            }
            return true;
        }
        for (request, placement) in &anew {
            self.forget(request, placement);
        }
        self.world.cluster.presume_also_gone(&back);
        for index in moved {
            let (request, placement) = &placements[index];
            self.assume(request, placement);
        }
        false
    }

    /// Returns whether the group may have this placement.
    fn is_allowed(&self, search: &Search<'_>, placement: &Placement) -> bool {
        let must_be_guaranteed = search.cause == RoomCause::Eviction(Precedence::Guarantee);
        !must_be_guaranteed || self.world.cluster.is_guaranteed(placement)
    }

    /// Places as many pods of the group as it needs by `place`, each beside those before it. `None` if too few are placed.
    fn place_group(
        &mut self,
        search: &Search<'_>,
        mut place: impl FnMut(&mut Self, &Request) -> Option<Placement>,
    ) -> Option<Placements> {
        let group = search.group;
        let mut placements: Placements = Vec::new();
        let mut covered = 0;
        for request in &group.requests {
            if placements.len() + covered == group.required {
                break;
            }
            let request = match self.beside(request, &placements) {
                Ok(None) => {
                    covered += 1;
                    continue;
                }
                Ok(Some(request)) => request,
                Err(_) => continue,
            };
            let placement = place(self, &request);
            let placement = placement.filter(|placement| self.is_allowed(search, placement));
            if let Some(placement) = placement {
                self.assume(&request, &placement);
                placements.push((request, placement));
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
