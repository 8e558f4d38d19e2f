//! The decision for one pending pod: devices for its claims, or the explanation of why it stays pending.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_allocator::cluster::{ObjectKey, object_key};
use drava_allocator::explanation::Explanation;
use drava_allocator::node::PodDemand;
use drava_allocator::placement::Placement;
use drava_allocator::pod::{claims, is_served, is_unschedulable};
use drava_allocator::pod_request::PodRequest;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use super::{DecisionTime, JobInFlight, Planner};
use crate::action::{Action, AllocationJob, ClaimWrite};
use crate::event::PendingEvent;
use crate::queue::pending_pod::Phase;
use crate::{allocation, claim, pod};

/// Claims with their names in the pod.
type NamedClaims = Vec<(String, Arc<ResourceClaim>)>;

impl Planner {
    /// Decides for one pending pod and adds the resulting actions.
    pub(super) fn schedule(&mut self, uid: &str, time: &DecisionTime, actions: &mut Vec<Action>) {
        let Some(pending) = self.queue.get_mut(uid) else {
            return;
        };
        pending.phase = Phase::Unschedulable;
        let Some(claims) = resolve(&self.claims, &pending.pod) else {
            return;
        };
        // A claim may be in flight for another pod; the outcome of that job activates this pod.
        let is_in_flight =
            |claim: &ResourceClaim| self.cluster.is_assumed(&object_key(&claim.metadata));
        if claims.iter().any(|(_, claim)| is_in_flight(claim)) {
            return;
        }
        let named: Vec<(&str, &ResourceClaim)> = claims
            .iter()
            .map(|(name, claim)| (name.as_str(), claim.as_ref()))
            .collect();
        let pod_request = PodRequest::new(
            &pending.pod,
            &named,
            &self.cluster.classes,
            &self.cluster.selectors,
        );
        let decision = match pod_request {
            Ok(pod_request) if pod_request.claims.is_empty() => match pod_request.unallocatable {
                // The scheduler may still find devices of another driver.
                Some(explanation) if is_unschedulable(&pending.pod) => Err(explanation),
                _ => return,
            },
            Ok(_) if !is_served(&pending.pod, &self.settings.schedulers) => Err(
                Explanation::scheduler_not_served(&pending.pod, &self.settings.schedulers),
            ),
            Ok(mut pod_request) => {
                pod_request.avoided_nodes = pending.avoided_nodes().iter().cloned().collect();
                let placement = self.decide(uid, &pod_request);
                placement.map(|placement| (placement, pod_request))
            }
            Err(error) => Err(Explanation::from(error)),
        };
        match decision {
            Ok((placement, pod_request)) => {
                actions.extend(self.start_job(uid, &placement, &pod_request, &claims, time));
            }
            Err(explanation) => {
                self.report_unschedulable(uid, &explanation, &claims, time.instant, actions);
            }
        }
    }

    /// Decides for the pod. Prefers a node on which all pending pods that share its claims fit.
    fn decide(&self, uid: &str, pod_request: &PodRequest) -> Result<Placement, Explanation> {
        let sharers = self.sharers(uid, pod_request);
        if !sharers.is_empty() {
            let mut joint = pod_request.clone();
            joint.sharers = sharers;
            if let Ok(placement) = self.cluster.decide(&joint, self.settings.policies) {
                return Ok(placement);
            }
        }
        self.cluster.decide(pod_request, self.settings.policies)
    }

    /// Returns the demand of the other pending pods that share a claim with this one.
    fn sharers(&self, uid: &str, pod_request: &PodRequest) -> Vec<PodDemand> {
        let others: BTreeSet<String> = pod_request
            .claims
            .iter()
            .flat_map(|claim| {
                self.queue
                    .users_of(&(claim.id.namespace.clone(), claim.id.name.clone()))
            })
            .filter(|other| other != uid)
            .collect();
        others
            .iter()
            .filter_map(|other| self.queue.get(other))
            .map(|pending| PodDemand::of(&pending.pod))
            .collect()
    }

    fn start_job(
        &mut self,
        uid: &str,
        placement: &Placement,
        pod_request: &PodRequest,
        claims: &NamedClaims,
        time: &DecisionTime,
    ) -> Option<Action> {
        let pending = self.queue.get_mut(uid)?;
        let pod = pod::reference(&pending.pod);
        let mut events = Vec::new();
        let mut writes = Vec::new();
        for placed in &placement.claims {
            let Some((_, claim)) = claims
                .iter()
                .find(|(_, claim)| claim.metadata.uid.as_deref() == Some(&placed.claim.uid))
            else {
                continue;
            };
            let placement_reason = placement.reason(placed);
            events.push(PendingEvent::allocated(
                claim::reference(claim),
                placed,
                &placement_reason,
                &placement.node,
                pod.name.as_deref().unwrap_or_default(),
            ));
            writes.push(ClaimWrite {
                claim: Arc::clone(claim),
                allocation: allocation::build(
                    claim,
                    placed,
                    &placement.node,
                    &self.cluster.classes,
                    time.time.clone(),
                    &mut self.share_ids,
                ),
                placement_reason,
            });
        }
        pending.phase = Phase::Allocating;
        pending.reason = None;
        let claims = writes.iter().map(|write| object_key(&write.claim.metadata));
        let job = JobInFlight {
            claims: claims.collect(),
            events,
        };
        self.in_flight.insert(uid.to_owned(), job);
        self.deduplicator.forget(uid);
        self.cluster.assume(placement);
        self.cluster
            .assume_pod(uid, &placement.node, pod_request.demand.requests.clone());
        Some(Action::Allocate(AllocationJob {
            pod_uid: uid.to_owned(),
            pod,
            node: placement.node.clone(),
            writes,
        }))
    }

    /// Reports the explanation on the pod and on its unallocated claims.
    fn report_unschedulable(
        &mut self,
        uid: &str,
        explanation: &Explanation,
        claims: &NamedClaims,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let Some(pending) = self.queue.get_mut(uid) else {
            return;
        };
        pending.set_unfit_nodes(explanation.unfit_nodes().map(str::to_owned));
        pending.reason = Some(explanation.reason());
        let unallocated = claims
            .iter()
            .map(|(_, claim)| claim)
            .filter(|claim| !claim::is_allocated(claim))
            .map(|claim| claim::reference(claim));
        for regarding in std::iter::once(pod::reference(&pending.pod)).chain(unallocated) {
            let event = PendingEvent::unschedulable(regarding, explanation);
            actions.extend(
                self.deduplicator
                    .filter(event, now)
                    .map(Action::PublishEvent),
            );
        }
    }
}

/// Returns the pod's claims; `None` while a claim is missing or belongs to another pod.
fn resolve(known: &BTreeMap<ObjectKey, Arc<ResourceClaim>>, pod: &Pod) -> Option<NamedClaims> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    claims(pod)
        .map(|(name, object)| {
            let claim = known.get(&(namespace.clone(), object?.to_owned()))?;
            let is_usable =
                claim.metadata.deletion_timestamp.is_none() && claim::belongs_to(claim, pod);
            is_usable.then(|| (name.to_owned(), Arc::clone(claim)))
        })
        .collect()
}
