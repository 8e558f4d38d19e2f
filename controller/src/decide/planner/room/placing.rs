//! Placements of a group while pods end for it.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::placement::Placement;
use drava_allocator::searched::Suspended;
use drava_allocator::turn::Turn;

use super::known_victims::KnownVictims;
use super::{Precedence, Room, RoomCause, RoomProgress, Search};
use crate::decide::planner::Planner;
use crate::decide::planner::demand::Request;
use crate::decide::victims::Candidate;

/// Placements of the pods of a group.
type Placements = Vec<(Request, Placement)>;

/// What the search for room has found so far for the pods of a group.
#[derive(Debug, Default)]
pub(super) struct FoundSoFar {
    /// By UID; `None` for a pod that cannot be placed.
    members: BTreeMap<String, Option<Placement>>,
    /// UIDs of the pods that end, apart from those that end in any case.
    victims: BTreeSet<String>,
    known: KnownVictims,
    /// Pods and gangs that may be unnecessary victims, the one to try next last; `None` before all are placed.
    doubtful: Option<Vec<Candidate>>,
}

impl Planner {
    /// Places the required pods of the group one after the other; for a pod that does not fit, the best set of pods ends.
    /// What the search has found is kept when the turn is too short.
    pub(super) fn place_by_ends(
        &mut self,
        search: &Search<'_>,
        turn: &mut Turn,
    ) -> Result<Option<Room>, Suspended> {
        let is_gang = search.group.requests.len() > 1;
        let first = search.group.requests.first();
        let first = first.map(|request| request.pod_request.uid.as_str());
        let before = first.and_then(|first| self.backlog.suspended_decisions.take_room(first));
        let before = before.filter(|before| {
            before.cause == search.cause && self.may_end(&before.found.victims, search)
        });
        let mut room = before.map(|before| before.found).unwrap_or_default();
        let ended = search.ending | &room.victims;
        self.presume_ended(search, &ended);
        // Their tenants may use less than when they were chosen.
        if !self.world.cluster.keeps(&search.floors) {
            room = Box::default();
            self.presume_ended(search, search.ending);
        }
        let mut placements = Placements::new();
        let placed = self.place_group(search, &mut room, &mut placements, turn);
        let spared = match placed {
            // The search for one pod returns no unnecessary victim.
            Ok(true) if is_gang => self.spare_unnecessary(search, &mut room, &mut placements, turn),
            Ok(_) => Ok(()),
            Err(ref suspended) => Err(suspended.clone()),
        };
        for (request, placement) in &placements {
            self.world.forget(&request.pod_request.uid, placement);
        }
        match (spared, placed) {
            (Ok(()), Ok(true)) => Ok(Some(Room {
                placements,
                victims: room.victims,
            })),
            (Ok(()), _) => Ok(None),
            (Err(suspended), _) => {
                if let Some(first) = first {
                    let progress = RoomProgress {
                        cause: search.cause,
                        found: room,
                    };
                    self.backlog.suspended_decisions.set_room(first, progress);
                }
                Err(suspended)
            }
        }
    }

    /// Spares the victims that the group does not need: each was needed by one of its pods, but a later one may have made more
    /// room than that pod. The placements are assumed.
    fn spare_unnecessary(
        &mut self,
        search: &Search<'_>,
        room: &mut FoundSoFar,
        placements: &mut Placements,
        turn: &mut Turn,
    ) -> Result<(), Suspended> {
        let mut doubtful = room.doubtful.take().unwrap_or_else(|| {
            let mut units = self.units_of(&room.victims, search);
            units.reverse();
            units
        });
        let mut has_progress = false;
        while let Some(unit) = doubtful.pop() {
            let pods: BTreeSet<String> = unit.pods.keys().cloned().collect();
            let nodes = pods.iter().flat_map(|uid| self.nodes_of_pod(uid));
            let nodes: BTreeSet<String> = nodes.map(str::to_owned).collect();
            let is_spared = match turn.over_by().filter(|_| has_progress) {
                Some(work) => Err(work.into()),
                None => self.replace_on(&nodes, search, placements, &pods, turn),
            };
            has_progress = true;
            match is_spared {
                Ok(true) => room.victims.retain(|uid| !pods.contains(uid)),
                Ok(false) => {}
                Err(suspended) => {
                    doubtful.push(unit);
                    room.doubtful = Some(doubtful);
                    let placed = placements.iter().map(|(request, placement)| {
                        (request.pod_request.uid.clone(), Some(placement.clone()))
                    });
                    room.members.extend(placed);
                    return Err(suspended);
                }
            }
        }
        Ok(())
    }

    /// Places the pods on these nodes again, so that `spared` pods, which hold devices there, need not end. Returns whether
    /// all fit; otherwise nothing changes. The placements are assumed.
    fn replace_on(
        &mut self,
        nodes: &BTreeSet<String>,
        search: &Search<'_>,
        placements: &mut Placements,
        spared: &BTreeSet<String>,
        turn: &mut Turn,
    ) -> Result<bool, Suspended> {
        let moved: Vec<usize> = (0..placements.len())
            .filter(|index| nodes.contains(&placements[*index].1.node))
            .collect();
        for &index in &moved {
            let (request, placement) = &placements[index];
            self.world.forget(&request.pod_request.uid, placement);
        }
        let back = self.presume_running(spared);
        let mut again: Placements = Vec::new();
        let mut suspended = None;
        for &index in &moved {
            let request = &placements[index].0;
            let placement = self.place(&request.pod_request, turn);
            let placement = placement.unwrap_or_else(|too_short| {
                suspended = Some(too_short);
                None
            });
            let Some(placement) = placement.filter(|each| self.is_allowed(search, each)) else {
                break;
            };
            self.world.assume(request, &placement);
            again.push((request.clone(), placement));
        }
        if again.len() == moved.len() && self.world.cluster.keeps(&search.floors) {
            for (index, placed) in moved.into_iter().zip(again) {
                placements[index] = placed;
            }
            return Ok(true);
        }
        for (request, placement) in &again {
            self.world.forget(&request.pod_request.uid, placement);
        }
        self.world.cluster.presume_also_gone(&back);
        for index in moved {
            let (request, placement) = &placements[index];
            self.world.assume(request, placement);
        }
        suspended.map_or(Ok(false), Err)
    }

    /// Returns whether the group may have this placement.
    fn is_allowed(&self, search: &Search<'_>, placement: &Placement) -> bool {
        let must_be_guaranteed = search.cause == RoomCause::Eviction(Precedence::Guarantee);
        !must_be_guaranteed || self.world.cluster.is_guaranteed(placement)
    }

    /// Places as many pods of the group as it needs, each beside those before it. Returns whether enough are placed. The
    /// placements are assumed.
    fn place_group(
        &mut self,
        search: &Search<'_>,
        room: &mut FoundSoFar,
        placements: &mut Placements,
        turn: &mut Turn,
    ) -> Result<bool, Suspended> {
        let group = search.group;
        let mut covered = 0;
        let mut has_progress = false;
        for request in &group.requests {
            if placements.len() + covered == group.required {
                break;
            }
            let request = match self.beside(request, placements) {
                Ok(None) => {
                    covered += 1;
                    continue;
                }
                Ok(Some(request)) => request,
                Err(_) => continue,
            };
            let uid = &request.pod_request.uid;
            let placement = match room.members.get(uid) {
                Some(None) => None,
                Some(Some(known))
                    if self.still_fits(&request, known, turn) && self.is_allowed(search, known) =>
                {
                    Some(known.clone())
                }
                Some(Some(_)) | None => {
                    if let Some(work) = turn.over_by().filter(|_| has_progress) {
                        return Err(work.into());
                    }
                    has_progress = true;
                    let placed = self.place_member(&request, search, room, turn)?;
                    let placed = placed.filter(|placement| self.is_allowed(search, placement));
                    room.members.insert(uid.clone(), placed.clone());
                    placed
                }
            };
            if let Some(placement) = placement {
                self.world.assume(&request, &placement);
                placements.push((request, placement));
            }
        }
        Ok(placements.len() + covered >= group.required)
    }

    /// Places a pod of the group; if it does not fit, where the best set of pods ends.
    fn place_member(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        room: &mut FoundSoFar,
        turn: &mut Turn,
    ) -> Result<Option<Placement>, Suspended> {
        room.doubtful = None;
        if let Some(placement) = self.place(&request.pod_request, turn)? {
            room.known.node_changed(&placement.node);
            return Ok(Some(placement));
        }
        let placed = self.place_by_victims(request, search, &mut room.known, turn)?;
        Ok(placed.map(|(placement, victims)| {
            let nodes = victims.iter().flat_map(|uid| self.nodes_of_pod(uid));
            room.known.pods_ended(nodes);
            room.known.node_changed(&placement.node);
            room.victims.extend(victims);
            placement
        }))
    }
}
