//! Pods that hold devices, and the simulation of their end.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use drava_allocator::cluster::{Departure, Floors};
use drava_allocator::object::ObjectKey;
use drava_allocator::steps;
use drava_allocator::turn::Turn;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use super::{RoomCause, Search};
use crate::decide::planner::Planner;
use crate::decide::victims::Candidate;
use crate::pods::claim;
use crate::pods::gang::GangName;
use crate::pods::live_pods::LivePod;
use crate::pods::pod_group::Disruption;

/// Units of a simulation, about 40 µs beside its checks of devices. A turn has enough of them for the subsets of ten pods.
const SIMULATION_UNITS: u64 = 80;

/// Units of each pod beyond ten that ends in a simulation, about 12 µs.
const VICTIM_UNITS: u64 = 24;

/// Returns the units of a simulation of the end of these pods.
pub(super) fn simulation_units(pods: &BTreeSet<String>) -> u64 {
    let beyond = u64::try_from(pods.len().saturating_sub(10)).unwrap_or(u64::MAX);
    SIMULATION_UNITS.saturating_add(beyond.saturating_mul(VICTIM_UNITS))
}

/// Units of finding out whether a pod may end, about 4 µs.
const CANDIDATE_UNITS: u64 = 8;

/// Units of visiting a pod that holds something, about 4 µs.
pub(super) const HOLDER_UNITS: u64 = 8;

/// Units of finding out for how many devices its end makes room, about 6 µs.
pub(super) const ROOM_UNITS: u64 = 12;

/// UIDs of the members of gangs that end together, the oldest first.
pub(super) type MembersOfGangs = BTreeMap<GangName, Vec<String>>;

impl Search<'_> {
    /// Returns whether the shares of a pod that ends are suspended: where others end, it gives their memory and GPU time only.
    fn is_suspended(&self, uid: &str) -> bool {
        let is_cause = self.cause == RoomCause::Suspension;
        self.suspending.contains(uid) || is_cause && !self.ending.contains(uid)
    }
}

impl Planner {
    /// Returns the guaranteed usage of other tenants when the pods have ended that end in any case.
    pub(super) fn floors(&mut self, search: &Search<'_>) -> Floors {
        let Some(first) = search.group.requests.first() else {
            return Floors::default();
        };
        self.presume_ended(search, search.ending);
        let namespace = self.namespace_of(&first.pod_request.uid);
        self.world.cluster.floors(&namespace)
    }

    /// Removes the candidates of a node whose end would lower the guaranteed usage of other tenants.
    pub(super) fn retain_allowed(
        &mut self,
        candidates: &mut Vec<Candidate>,
        search: &Search<'_>,
        turn: &mut Turn,
    ) {
        let mut keeps = |pods: BTreeSet<String>| {
            turn.count(simulation_units(&pods));
            let gone = self.departure(search, &pods);
            let cluster = &mut self.world.cluster;
            cluster.try_without(&gone, |cluster| cluster.keeps(&search.floors))
        };
        let pods_of = |candidate: &Candidate| candidate.pods.keys().cloned().collect();
        // Fewer pods lower the usage less.
        let all: Vec<BTreeSet<String>> = candidates.iter().map(pods_of).collect();
        if !search.floors.is_empty() && !keeps(all.into_iter().flatten().collect()) {
            candidates.retain(|candidate| keeps(pods_of(candidate)));
        }
    }

    /// Presumes that exactly these pods have ended: a claim is released when all pods that use it have.
    pub(super) fn presume_ended(&mut self, search: &Search<'_>, ended: &BTreeSet<String>) {
        self.world.cluster.presume_gone(&Departure::default());
        self.presume_also_ended(search, ended);
    }

    /// Presumes that these pods have ended as well. Returns what is gone because of them.
    pub(super) fn presume_also_ended(
        &mut self,
        search: &Search<'_>,
        ended: &BTreeSet<String>,
    ) -> Departure {
        let also = self.departure(search, ended);
        self.world.cluster.presume_also_gone(&also);
        also
    }

    /// Returns what is gone, beside what is presumed gone, when these pods have ended.
    pub(super) fn departure(&self, search: &Search<'_>, ended: &BTreeSet<String>) -> Departure {
        let presumed = self.world.cluster.presumed_gone();
        let gone = &presumed.pods;
        let (suspended, ended): (Vec<&String>, Vec<&String>) =
            ended.iter().partition(|uid| search.is_suspended(uid));
        let also = ended.into_iter().filter(|uid| !gone.contains(*uid));
        let also: BTreeSet<String> = also.cloned().collect();
        let is_gone = |uid: &str| gone.contains(uid) || also.contains(uid);
        let claims = self.claims_of(&also).filter(|key| {
            let is_held = self.world.cluster.nodes_of(key).next().is_some();
            let claim = self.commitments.ledger.claim(key).filter(|_| is_held);
            claim.is_some_and(|claim| self.are_consumers(key, claim, is_gone))
        });
        // What companions add stays in use while a share is suspended.
        let suspended = suspended.iter().flat_map(|uid| self.own_claims(uid));
        let suspended = suspended.filter(|key| !presumed.suspended.contains(*key));
        Departure {
            claims: claims.cloned().collect(),
            suspended: suspended.cloned().collect(),
            pods: also,
        }
    }

    /// Presumes that these pods have not ended. Returns what is not gone because of them.
    pub(super) fn presume_running(&mut self, pods: &BTreeSet<String>) -> Departure {
        let gone = self.world.cluster.presumed_gone();
        let suspended = self.claims_of(pods);
        let suspended = suspended.filter(|key| gone.suspended.contains(*key));
        let pods = pods & &gone.pods;
        let claims = self.claims_of(&pods);
        let claims = claims.filter(|key| gone.claims.contains(*key));
        let back = Departure {
            claims: claims.cloned().collect(),
            suspended: suspended.cloned().collect(),
            pods,
        };
        self.world.cluster.presume_back(&back);
        back
    }

    /// Returns the claims of pods that hold devices or have held them.
    fn claims_of(&self, pods: &BTreeSet<String>) -> impl Iterator<Item = &ObjectKey> {
        pods.iter().flat_map(|uid| self.claims_of_pod(uid))
    }

    pub(super) fn claims_of_pod(&self, uid: &str) -> impl Iterator<Item = &ObjectKey> {
        let companions = self.backlog.companions.of_pod(uid);
        self.own_claims(uid).iter().chain(companions)
    }

    /// Returns the claims that the spec of a pod names.
    fn own_claims(&self, uid: &str) -> &[ObjectKey] {
        let claims = match self.world.live_pods.get(uid) {
            Some(pod) => Some(pod.claims.as_slice()),
            None => self.world.ended_pods.claims(uid),
        };
        claims.unwrap_or_default()
    }

    /// Returns whether this is true of all [`Self::consumers`] of an allocated claim.
    fn are_consumers(
        &self,
        key: &ObjectKey,
        claim: &ResourceClaim,
        is_true: impl Fn(&str) -> bool,
    ) -> bool {
        let mut are_all = true;
        self.for_each_consumer(key, claim, |uid| are_all &= is_true(uid));
        are_all
    }

    /// Visits all [`Self::consumers`] of an allocated claim. Each trial of a search does, so it collects them only where they are
    /// not simply listed.
    fn for_each_consumer(
        &self,
        key: &ObjectKey,
        claim: &ResourceClaim,
        mut visit: impl FnMut(&str),
    ) {
        let is_listed = claim::consumers(claim).next().is_some();
        match is_listed && claim::consuming_gangs(claim).next().is_none() {
            true => claim::consumers(claim).for_each(visit),
            false => self.consumers(key, claim).iter().for_each(|uid| visit(uid)),
        }
    }

    /// Returns the UIDs of the pods that use an allocated claim.
    fn consumers(&self, key: &ObjectKey, claim: &ResourceClaim) -> BTreeSet<String> {
        let mut uids: BTreeSet<String> = claim::consumers(claim).map(str::to_owned).collect();
        for gang in claim::consuming_gangs(claim) {
            let members = self.world.live_pods.members(&gang);
            uids.extend(members.map(|(uid, _)| uid.to_owned()));
        }
        if uids.is_empty() {
            // The pod can have ended, or can be replaced by another one.
            let pod = claim::allocated_for(claim).filter(|uid| self.references(uid, key));
            uids.extend(pod.map(str::to_owned));
            uids.extend(self.backlog.queue.users_of(key));
        }
        uids
    }

    /// Returns the unfinished pods that hold something on a node, by UID, whether they may end, or are presumed gone, or not.
    pub(super) fn holders_on<'a>(&'a self, node: &'a str) -> Vec<(&'a str, &'a LivePod)> {
        let live_pods = &self.world.live_pods;
        // Members of gangs without claims hold the other resources of their nodes.
        let mut holders: Vec<_> = live_pods
            .without_claims_on(node)
            .filter_map(|uid| live_pods.get_key_value(uid))
            .collect();
        for key in steps::counted(self.world.cluster.claims_on(node)) {
            if let Some(claim) = self.commitments.ledger.claim(key) {
                self.for_each_consumer(key, claim, |uid| {
                    holders.extend(live_pods.get_key_value(uid));
                });
            }
        }
        holders.sort_unstable_by_key(|(uid, _)| *uid);
        holders.dedup_by_key(|(uid, _)| *uid);
        holders
    }

    /// Returns the first node from there on where pods may hold something, by name.
    pub(super) fn next_node(&self, from: Bound<&str>) -> Option<String> {
        let with_pools = self.world.cluster.next_node_with_pools(from);
        let without_claims = self.world.live_pods.next_node_without_claims(from);
        let nodes = with_pools.into_iter().chain(without_claims);
        nodes.min().map(str::to_owned)
    }

    /// Returns the pods of a node that may end. Those that are presumed gone hold nothing.
    pub(super) fn candidates_on(
        &mut self,
        node: &str,
        search: &Search<'_>,
        turn: &mut Turn,
    ) -> Vec<Candidate> {
        let mut holders = self.holders_on(node);
        let gone = &self.world.cluster.presumed_gone().pods;
        holders.retain(|(uid, _)| !gone.contains(*uid));
        let mut in_minimum_runtime = Vec::new();
        let mut candidates = Vec::new();
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        for (uid, _) in &holders {
            let unit = self.unit(uid, &search.gangs);
            // Of a gang that ends as a whole, several pods may be here.
            if unit.len() < 2 || unit.first().is_some_and(|(first, _)| seen.insert(first)) {
                candidates.extend(self.candidate(&unit, search, &mut in_minimum_runtime));
            }
        }
        let ending = candidates.iter().map(|candidate| candidate.pods.len());
        let pods = u64::try_from(holders.len() + ending.sum::<usize>()).unwrap_or(u64::MAX);
        turn.count(pods.saturating_mul(CANDIDATE_UNITS));
        for (uid, end) in in_minimum_runtime {
            self.backlog.in_minimum_runtime.set(uid, end);
        }
        candidates
    }

    /// Returns pods that end together as a candidate, if they may end. Notes the ends of the minimum runtimes that forbid it.
    fn candidate(
        &self,
        unit: &[(&str, &LivePod)],
        search: &Search<'_>,
        in_minimum_runtime: &mut Vec<(String, Instant)>,
    ) -> Option<Candidate> {
        let is_waiting = search.cause == RoomCause::Wait;
        // Of a pod that is not bound, the allocation is released: not one that is being written or reserved.
        let is_in_motion = |pod: &LivePod| {
            let mut claims = pod.claims.iter();
            !pod.is_bound && !claims.all(|key| self.commitments.ledger.can_be_freed(key))
        };
        let may_end = |(uid, pod): &(&str, &LivePod)| {
            pod.grace_period_end.is_none()
                && (is_waiting || !is_in_motion(pod))
                && !search.ending.contains(*uid)
                && !search.own.contains(uid)
                && !self.backlog.protected.contains(*uid)
        };
        if unit.is_empty() || !unit.iter().all(may_end) {
            return None;
        }
        let priorities = unit.iter().map(|(_, pod)| (search.priority_of)(pod));
        let priorities: Option<Vec<i32>> = priorities.collect();
        let priority = priorities.and_then(|all| all.into_iter().max())?;
        if !is_waiting {
            let before = in_minimum_runtime.len();
            in_minimum_runtime.extend(unit.iter().filter_map(|(uid, pod)| {
                let end = self.minimum_runtime_end(pod, search.time)?;
                Some(((*uid).to_owned(), end))
            }));
            if in_minimum_runtime.len() > before {
                return None;
            }
        }
        let pods = unit
            .iter()
            .map(|(uid, pod)| ((*uid).to_owned(), pod.created));
        Some(Candidate {
            pods: pods.collect(),
            priority,
        })
    }

    /// Returns the pods and gangs to which these pods belong and that may end, those that should end last first.
    pub(super) fn units_of(&self, uids: &BTreeSet<String>, search: &Search<'_>) -> Vec<Candidate> {
        let units = uids.iter().map(|uid| self.unit(uid, &search.gangs));
        let mut units: Vec<Candidate> = units
            .filter_map(|unit| self.candidate(&unit, search, &mut Vec::new()))
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
        // Those of one gang are equal.
        units.dedup_by(|one, other| one.pods == other.pods);
        units
    }

    /// Returns whether all these pods may end.
    pub(super) fn may_end(&self, uids: &BTreeSet<String>, search: &Search<'_>) -> bool {
        uids.iter().all(|uid| {
            let unit = self.unit(uid, &search.gangs);
            let candidate = self.candidate(&unit, search, &mut Vec::new());
            candidate.is_some()
        })
    }

    /// Returns the nodes on which a pod holds something.
    pub(super) fn nodes_of_pod(&self, uid: &str) -> impl Iterator<Item = &str> {
        let claims = self.claims_of_pod(uid);
        let nodes = claims.flat_map(|key| self.world.cluster.nodes_of(key));
        nodes.chain(self.world.live_pods.node_without_claims(uid))
    }

    /// Returns the names of all nodes on which pods may hold something.
    pub(super) fn nodes_with_holders(&self) -> BTreeSet<String> {
        let first = self.next_node(Bound::Unbounded);
        let nodes = std::iter::successors(first, |node| self.next_node(Bound::Excluded(node)));
        nodes.collect()
    }

    /// Returns the pods that end with this one: the members of its gang that hold devices or are bound. The newest members
    /// beyond the number that the gang needs end alone, unless its PodGroup says otherwise.
    fn unit(&self, uid: &str, gangs: &RefCell<MembersOfGangs>) -> Vec<(&str, &LivePod)> {
        let Some((uid, pod)) = self.world.live_pods.get_key_value(uid) else {
            return Vec::new();
        };
        match &pod.gang {
            None => vec![(uid, pod)],
            Some(gang) => {
                if pod.disruption == Disruption::Single {
                    return vec![(uid, pod)];
                }
                let mut gangs = gangs.borrow_mut();
                let members = gangs
                    .entry(gang.clone())
                    .or_insert_with(|| self.ending_together(gang));
                let mut elastic = members.iter().skip(pod.gang_min.unwrap_or(1));
                let mut is_elastic = || elastic.any(|member| *member == uid);
                if pod.disruption == Disruption::Elastic && is_elastic() {
                    return vec![(uid, pod)];
                }
                let members = members.iter();
                let members = members.filter_map(|uid| self.world.live_pods.get_key_value(uid));
                members.collect()
            }
        }
    }

    /// Returns the UIDs of the members of a gang that hold devices or are bound, the oldest first.
    fn ending_together(&self, gang: &GangName) -> Vec<String> {
        let members = self.world.live_pods.members(gang);
        let mut members: Vec<_> = members
            .filter(|(uid, pod)| pod.is_bound || self.holds_devices(uid, pod))
            .collect();
        members.sort_by_key(|(uid, pod)| (pod.created, *uid));
        members.into_iter().map(|(uid, _)| uid.to_owned()).collect()
    }

    fn references(&self, uid: &str, key: &ObjectKey) -> bool {
        let pod = self.world.live_pods.get(uid);
        pod.is_some_and(|pod| pod.claims.contains(key))
    }

    fn holds_devices(&self, uid: &str, pod: &LivePod) -> bool {
        let mut claims = pod
            .claims
            .iter()
            .filter_map(|key| self.commitments.ledger.claim(key));
        claims.any(|claim| {
            let is_consumer = claim::consumers(claim).any(|consumer| consumer == uid);
            let of_gang =
                || claim::consuming_gangs(claim).any(|gang| pod.gang.as_ref() == Some(&gang));
            // Without a record it is for any pod that names it.
            let is_owner = || match claim::allocated_for(claim) {
                Some(owner) => owner == uid,
                None => !claim::is_reserved(claim),
            };
            claim::is_allocated(claim) && (is_consumer || is_owner() || of_gang())
        })
    }
}
