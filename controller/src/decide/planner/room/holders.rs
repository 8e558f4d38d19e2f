//! Pods that hold devices, and the simulation of their end.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::cluster::{Departure, Floors};
use drava_allocator::object::ObjectKey;
use drava_allocator::turn::Turn;

use super::{RoomCause, Search};
use crate::decide::planner::decision::Group;
use crate::decide::planner::{DecisionTime, Planner};
use crate::decide::victims::Candidate;
use crate::pods::claim;
use crate::pods::gang::GangName;
use crate::pods::live_pods::LivePod;
use crate::pods::pod_group::Disruption;

/// Units of a simulation, beside its checks of devices.
pub(super) const SIMULATION_UNITS: u64 = 20;

/// Nodes on which each pod holds devices, by its UID.
pub(super) type NodesOfPod<'a> = BTreeMap<&'a str, Vec<&'a str>>;

/// The members of gangs that end together, the oldest first.
type MembersOfGangs<'a> = BTreeMap<&'a GangName, Vec<(&'a str, &'a LivePod)>>;

/// Which pods hold what.
pub(super) struct Holders {
    /// UIDs of the pods that use an allocated claim.
    pub(super) consumers: BTreeMap<ObjectKey, BTreeSet<String>>,
    /// Pods that may end, by the node of their devices.
    pub(super) candidates: BTreeMap<String, Vec<Candidate>>,
    /// UIDs of the pods whose shares are suspended: where others end, they give their memory and GPU time only.
    pub(super) suspended: BTreeSet<String>,
}

impl Holders {
    /// Returns the number of pods that hold devices, a pod of several nodes once for each: the work to find them.
    pub(super) fn len(&self) -> u64 {
        let claims = self.consumers.values().map(BTreeSet::len);
        let candidates = self.candidates.values().flatten();
        let pods = candidates.map(|candidate| candidate.pods.len());
        u64::try_from(claims.chain(pods).sum::<usize>()).unwrap_or(u64::MAX)
    }

    /// Returns the nodes on which each pod that may end holds devices.
    pub(super) fn nodes_of_pod(&self) -> NodesOfPod<'_> {
        let mut nodes = NodesOfPod::new();
        for (node, candidates) in &self.candidates {
            for uid in candidates
                .iter()
                .flat_map(|candidate| candidate.pods.keys())
            {
                nodes.entry(uid).or_default().push(node);
            }
        }
        nodes
    }
}

impl Planner {
    /// Returns the guaranteed usage of other tenants when the pods have ended that end in any case.
    pub(super) fn floors(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        holders: &Holders,
    ) -> Floors {
        let Some(first) = group.requests.first() else {
            return Floors::default();
        };
        self.presume_ended(holders, ending);
        let namespace = self.namespace_of(&first.pod_request.uid);
        self.world.cluster.floors(&namespace)
    }

    /// Returns the pods of a node that may end, without those whose end would lower the guaranteed usage of other tenants.
    pub(super) fn candidates_on<'s>(
        &mut self,
        node: &str,
        search: &'s Search<'_>,
        turn: &mut Turn,
    ) -> Cow<'s, [Candidate]> {
        let Some(candidates) = search.holders.candidates.get(node) else {
            return Cow::default();
        };
        let mut keeps = |pods: BTreeSet<String>| {
            turn.count(SIMULATION_UNITS);
            let gone = self.presume_also_ended(&search.holders, &pods);
            let keeps = self.world.cluster.keeps(&search.floors);
            self.world.cluster.presume_back(&gone);
            keeps
        };
        let pods_of = |candidate: &Candidate| candidate.pods.keys().cloned().collect();
        // Fewer pods lower the usage less.
        let all: Vec<BTreeSet<String>> = candidates.iter().map(pods_of).collect();
        if search.floors.is_empty() || keeps(all.into_iter().flatten().collect()) {
            return candidates.into();
        }
        let mut candidates = candidates.clone();
        candidates.retain(|candidate| keeps(pods_of(candidate)));
        candidates.into()
    }

    /// Presumes that exactly these pods have ended: a claim is released when all pods that use it have.
    pub(super) fn presume_ended(&mut self, holders: &Holders, ended: &BTreeSet<String>) {
        self.world.cluster.presume_gone(&Departure::default());
        self.presume_also_ended(holders, ended);
    }

    /// Presumes that these pods have ended as well. Returns what is gone because of them.
    pub(super) fn presume_also_ended(
        &mut self,
        holders: &Holders,
        ended: &BTreeSet<String>,
    ) -> Departure {
        let presumed = self.world.cluster.presumed_gone();
        let (suspended, ended): (BTreeSet<String>, BTreeSet<String>) = ended
            .iter()
            .cloned()
            .partition(|uid| holders.suspended.contains(uid));
        let gone = &presumed.pods;
        let also = &ended - gone;
        let is_gone = |uid: &String| gone.contains(uid) || ended.contains(uid);
        let claims = self.claims_of(&also).filter(|key| {
            let consumers = holders.consumers.get(*key);
            consumers.is_some_and(|consumers| consumers.iter().all(is_gone))
        });
        // What companions add stays in use while a share is suspended.
        let suspended = suspended.iter().flat_map(|uid| self.own_claims(uid));
        let suspended = suspended.filter(|key| !presumed.suspended.contains(*key));
        let also = Departure {
            claims: claims.cloned().collect(),
            suspended: suspended.cloned().collect(),
            pods: also,
        };
        self.world.cluster.presume_also_gone(&also);
        also
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
        pods.iter().flat_map(|uid| {
            let companions = self.backlog.companions.of_pod(uid);
            self.own_claims(uid).iter().chain(companions)
        })
    }

    /// Returns the claims that the spec of a pod names.
    fn own_claims(&self, uid: &str) -> &[ObjectKey] {
        let claims = match self.world.live_pods.get(uid) {
            Some(pod) => Some(pod.claims.as_slice()),
            None => self.world.ended_pods.claims(uid),
        };
        claims.unwrap_or_default()
    }

    /// Returns which pods use the allocated claims, and which of them may end.
    pub(super) fn holders(
        &self,
        group: &Group,
        ending: &BTreeSet<String>,
        cause: RoomCause,
        priority_of: impl Fn(&LivePod) -> Option<i32>,
        time: &DecisionTime,
    ) -> Holders {
        let mut consumers: BTreeMap<ObjectKey, BTreeSet<String>> = BTreeMap::new();
        let mut pods_on: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for (key, claim) in self.commitments.ledger.claims() {
            let nodes: BTreeSet<&str> = self.world.cluster.nodes_of(key).collect();
            if nodes.is_empty() {
                continue;
            }
            let mut uids: BTreeSet<String> = claim::consumers(claim).map(str::to_owned).collect();
            for gang in claim::consuming_gangs(claim) {
                uids.extend(
                    self.world
                        .live_pods
                        .members(&gang)
                        .map(|(uid, _)| uid.to_owned()),
                );
            }
            if uids.is_empty() {
                // The pod can have ended, or can be replaced by another one.
                let pod = claim::allocated_for(claim).filter(|uid| self.references(uid, key));
                uids.extend(pod.map(str::to_owned));
                uids.extend(self.backlog.queue.users_of(key));
            }
            for node in nodes {
                pods_on
                    .entry(node)
                    .or_default()
                    .extend(uids.iter().cloned());
            }
            consumers.insert(key.clone(), uids);
        }
        // Members of gangs without claims hold the other resources of their nodes.
        let members = self.world.live_pods.iter();
        for (uid, _) in members.filter(|(_, pod)| pod.is_bound && pod.claims.is_empty()) {
            if let Some(node) = self.world.cluster.node_of_pod(uid) {
                pods_on.entry(node).or_default().insert(uid.to_owned());
            }
        }
        let requests = group.requests.iter();
        let own: BTreeSet<&str> = requests
            .map(|request| request.pod_request.uid.as_str())
            .collect();
        let is_protected = |uid: &str| {
            let until = self.backlog.protected.get(uid);
            until.is_some_and(|until| time.instant < *until)
                || cause != RoomCause::Wait && self.backlog.in_minimum_runtime.contains_key(uid)
        };
        let mut gangs = MembersOfGangs::new();
        let mut candidates: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
        for (node, uids) in pods_on {
            let mut seen: BTreeSet<Vec<&str>> = BTreeSet::new();
            for uid in &uids {
                let unit = self.unit(uid, &mut gangs);
                let is_deleted = |(_, pod): &(&str, &LivePod)| pod.grace_period_end.is_some();
                // Of a pod that is not bound, the allocation is released: not one that is being written or reserved.
                let is_in_motion = |(_, pod): &(&str, &LivePod)| {
                    !pod.is_bound
                        && !pod
                            .claims
                            .iter()
                            .all(|key| self.commitments.ledger.can_be_freed(key))
                };
                if ending.contains(uid)
                    || unit.iter().any(is_deleted)
                    || cause != RoomCause::Wait && unit.iter().any(is_in_motion)
                    || unit
                        .iter()
                        .any(|(uid, _)| own.contains(uid) || is_protected(uid))
                    || !seen.insert(unit.iter().map(|(uid, _)| *uid).collect())
                {
                    continue;
                }
                let priorities: Option<Vec<i32>> =
                    unit.iter().map(|(_, pod)| priority_of(pod)).collect();
                if let Some(priority) = priorities.and_then(|all| all.into_iter().max()) {
                    candidates
                        .entry(node.to_owned())
                        .or_default()
                        .push(Candidate {
                            pods: unit
                                .iter()
                                .map(|(uid, pod)| ((*uid).to_owned(), pod.created))
                                .collect(),
                            priority,
                        });
                }
            }
        }
        let mut suspended = self.suspending_pods();
        if cause == RoomCause::Suspension {
            let pods = candidates.values().flatten();
            suspended.extend(pods.flat_map(|candidate| candidate.pods.keys().cloned()));
        }
        Holders {
            consumers,
            candidates,
            suspended,
        }
    }

    /// Returns the pods that end with this one: the members of its gang that hold devices or are bound. The newest members
    /// beyond the number that the gang needs end alone, unless its PodGroup says otherwise.
    fn unit<'s>(
        &'s self,
        uid: &str,
        gangs: &mut MembersOfGangs<'s>,
    ) -> Vec<(&'s str, &'s LivePod)> {
        let Some((uid, pod)) = self.world.live_pods.get_key_value(uid) else {
            return Vec::new();
        };
        match &pod.gang {
            None => vec![(uid, pod)],
            Some(gang) => {
                if pod.disruption == Disruption::Single {
                    return vec![(uid, pod)];
                }
                let members = gangs
                    .entry(gang)
                    .or_insert_with(|| self.ending_together(gang));
                let mut elastic = members.iter().skip(pod.gang_min.unwrap_or(1));
                let mut is_elastic = || elastic.any(|(member, _)| *member == uid);
                if pod.disruption == Disruption::Elastic && is_elastic() {
                    return vec![(uid, pod)];
                }
                members.clone()
            }
        }
    }

    /// Returns the members of a gang that hold devices or are bound, the oldest first.
    fn ending_together(&self, gang: &GangName) -> Vec<(&str, &LivePod)> {
        let members = self.world.live_pods.members(gang);
        let mut members: Vec<_> = members
            .filter(|(uid, pod)| pod.is_bound || self.holds_devices(uid, pod))
            .collect();
        members.sort_by_key(|(uid, pod)| (pod.created, *uid));
        members
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
