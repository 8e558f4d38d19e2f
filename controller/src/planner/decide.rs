//! The decision for one waiting pod: devices for its claims, or why it has to wait on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_allocator::cluster::{ObjectKey, object_key};
use drava_allocator::explanation::Explanation;
use drava_allocator::node::PodDemand;
use drava_allocator::placement::Placement;
use drava_allocator::pod_request::PodRequest;
use drava_api::event::EventReason;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use super::{Moment, Planner};
use crate::action::{Action, ClaimWrite, Job};
use crate::notice::Notice;
use crate::waiting::Phase;
use crate::{allocation, claim, pod};

impl Planner {
    /// Decides for one waiting pod and says what follows.
    pub(super) fn plan(&mut self, uid: &str, moment: &Moment, actions: &mut Vec<Action>) {
        let Some(waiting) = self.waiting.get_mut(uid) else {
            return;
        };
        waiting.phase = Phase::Parked;
        let Some(claims) = resolve(&self.claims, &waiting.pod) else {
            return;
        };
        // Another pod's job writes one of them; its outcome wakes this pod.
        let being_written =
            |claim: &ResourceClaim| self.cluster.is_assumed(&object_key(&claim.metadata));
        if claims.iter().any(|(_, claim)| being_written(claim)) {
            return;
        }
        let named: Vec<(&str, &ResourceClaim)> = claims
            .iter()
            .map(|(name, claim)| (name.as_str(), claim.as_ref()))
            .collect();
        let ask = PodRequest::new(
            &waiting.pod,
            &named,
            &self.cluster.classes,
            &self.cluster.selectors,
        );
        let decision = match ask {
            Ok(ask) if ask.claims.is_empty() => return,
            Ok(mut ask) => {
                ask.avoided_nodes = waiting.avoided(moment.instant).cloned().collect();
                self.decide(uid, &mut ask)
            }
            Err(error) => Err(Explanation::from(error)),
        };
        match decision {
            Ok((placement, ask)) => {
                self.start_writing(uid, &placement, &ask, &claims, moment, actions)
            }
            Err(explanation) => self.explain(uid, &explanation, &claims, moment.instant, actions),
        }
    }

    /// Decides for the pod; claims that it shares with other waiting pods are planned for all of them if that works.
    fn decide(
        &self,
        uid: &str,
        ask: &mut PodRequest,
    ) -> Result<(Placement, PodRequest), Explanation> {
        let sharers = self.sharers(uid, ask);
        if !sharers.is_empty() {
            let mut joint = ask.clone();
            joint.sharers = sharers;
            if let Ok(placement) = self.cluster.decide(&joint, self.settings.policies) {
                return Ok((placement, joint));
            }
        }
        let placement = self.cluster.decide(ask, self.settings.policies)?;
        Ok((placement, ask.clone()))
    }

    /// What the other waiting pods that share a claim with this one need of a node.
    fn sharers(&self, uid: &str, ask: &PodRequest) -> Vec<PodDemand> {
        let others: BTreeSet<String> = ask
            .claims
            .iter()
            .flat_map(|claim| {
                self.waiting
                    .users_of(&(claim.id.namespace.clone(), claim.id.name.clone()))
            })
            .filter(|other| other != uid)
            .collect();
        others
            .iter()
            .filter_map(|other| self.waiting.get(other))
            .map(|waiting| PodDemand::of(&waiting.pod))
            .collect()
    }

    fn start_writing(
        &mut self,
        uid: &str,
        placement: &Placement,
        ask: &PodRequest,
        claims: &[(String, Arc<ResourceClaim>)],
        moment: &Moment,
        actions: &mut Vec<Action>,
    ) {
        let Some(waiting) = self.waiting.get_mut(uid) else {
            return;
        };
        let writes: Vec<_> = placement
            .claims
            .iter()
            .filter_map(|placed| {
                let claim = claims
                    .iter()
                    .map(|(_, claim)| claim)
                    .find(|claim| claim.metadata.uid.as_deref() == Some(&placed.claim.uid))?;
                Some(ClaimWrite {
                    claim: Arc::clone(claim),
                    allocation: allocation::build(
                        claim,
                        placed,
                        &placement.node,
                        &self.cluster.classes,
                        moment.time.clone(),
                        &mut self.share_ids,
                    ),
                    summary: allocation::summary(placed, &placement.node),
                })
            })
            .collect();
        waiting.phase = Phase::Writing;
        self.writing += 1;
        self.notices.forget(uid);
        let job = Job {
            pod_uid: uid.to_owned(),
            pod: pod::reference(&waiting.pod),
            node: placement.node.clone(),
            writes,
        };
        self.cluster.assume(placement);
        self.cluster
            .assume_pod(uid, &placement.node, ask.demand.requests.clone());
        actions.push(Action::Allocate(job));
    }

    fn explain(
        &mut self,
        uid: &str,
        explanation: &Explanation,
        claims: &[(String, Arc<ResourceClaim>)],
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let Some(waiting) = self.waiting.get(uid) else {
            return;
        };
        let message = explanation.summary();
        let unallocated = claims
            .iter()
            .map(|(_, claim)| claim)
            .filter(|claim| !claim::is_allocated(claim))
            .map(|claim| claim::reference(claim));
        for regarding in std::iter::once(pod::reference(&waiting.pod)).chain(unallocated) {
            let notice = Notice {
                regarding,
                reason: EventReason::GpuUnschedulable,
                message: message.clone(),
            };
            actions.extend(self.notices.offer(notice, now).map(Action::Tell));
        }
    }
}

/// The pod's claims by the name that the pod calls them; `None` while one is missing, or is not (yet) the pod's.
fn resolve(
    claims: &BTreeMap<ObjectKey, Arc<ResourceClaim>>,
    pod: &Pod,
) -> Option<Vec<(String, Arc<ResourceClaim>)>> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    pod::claims(pod)
        .map(|(name, object)| {
            let claim = claims.get(&(namespace.clone(), object?.to_owned()))?;
            let usable =
                claim.metadata.deletion_timestamp.is_none() && claim::belongs_to(claim, pod);
            usable.then(|| (name.to_owned(), Arc::clone(claim)))
        })
        .collect()
}
