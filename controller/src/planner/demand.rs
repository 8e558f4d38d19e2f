//! What a pending pod needs from this driver.

use std::sync::Arc;

use drava_allocator::explanation::Explanation;
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::pod::{claims, is_served, is_unschedulable};
use drava_allocator::pod_request::PodRequest;
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::Planner;
use crate::event::PendingEvent;
use crate::ledger::Ledger;
use crate::queue::pending_pod::PendingPod;
use crate::{claim, pod};

/// Claims with their names in the pod.
pub(super) type NamedClaims = Vec<(String, Arc<ResourceClaim>)>;

/// Demand of a pending pod.
pub(super) enum Demand {
    /// Nothing now: a claim is in flight.
    Nothing,
    /// Nothing: its claims are allocated or for other drivers.
    Allocated,
    /// A claim does not exist so far.
    Unknown,
    /// Devices for its claims, or only a node as a member of a gang without claims.
    Devices(Box<Request>),
    /// Its claims cannot be served.
    Unservable(Explanation, NamedClaims),
}

/// A pod that needs devices, or a node for its gang.
#[derive(Clone)]
pub(super) struct Request {
    /// Name of the pod.
    pub(super) name: String,
    pub(super) pod_request: PodRequest,
    pub(super) claims: NamedClaims,
}

impl Request {
    /// Returns whether a claim of the pod has selectors, besides those of its classes.
    pub(super) fn has_selectors(&self) -> bool {
        let claims = self.pod_request.claims.iter();
        let mut requests = claims.flat_map(|claim| &claim.requests);
        requests.any(|request| {
            let mut alternatives = request.alternatives.iter();
            alternatives.any(|alternative| !alternative.selectors.is_empty())
        })
    }

    /// Returns whether a claim of the pod is among those of the other pods.
    pub(super) fn shares_claim<'a>(&self, mut others: impl Iterator<Item = &'a Self>) -> bool {
        others.any(|other| {
            let mut claims = other.pod_request.claims.iter();
            claims.any(|claim| self.pod_request.claims.iter().any(|own| own.id == claim.id))
        })
    }
}

impl Planner {
    /// Returns the demand of a pending pod.
    pub(super) fn demand(&self, uid: &str) -> Demand {
        let Some(pending) = self.queue.get(uid) else {
            return Demand::Nothing;
        };
        let Some(claims) = resolve(&self.ledger, &pending.pod) else {
            return Demand::Unknown;
        };
        // A claim may be in flight for another pod; the outcome of that job activates this pod.
        let is_pending =
            |claim: &ResourceClaim| self.ledger.is_pending(&object_key(&claim.metadata));
        if claims.iter().any(|(_, claim)| is_pending(claim)) {
            return Demand::Nothing;
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
        match pod_request {
            Ok(pod_request) if pod_request.claims.is_empty() => match pod_request.unallocatable {
                // The scheduler may still find devices of another driver.
                Some(explanation) if is_unschedulable(&pending.pod) => {
                    Demand::Unservable(explanation, claims)
                }
                _ if waits_for_gang(pending, &pod_request) => devices(pending, pod_request, claims),
                _ => Demand::Allocated,
            },
            Ok(_) if !is_served(&pending.pod, &self.settings.schedulers) => Demand::Unservable(
                Explanation::scheduler_not_served(&pending.pod, &self.settings.schedulers),
                claims,
            ),
            Ok(pod_request) => devices(pending, pod_request, claims),
            Err(error) => Demand::Unservable(Explanation::from(error), claims),
        }
    }
}

impl Planner {
    /// Reports the deletion of a claim at the pods that wait for it and name it themselves: kube-scheduler ignores gated pods,
    /// and no controller creates the claim again.
    pub(super) fn report_deleted_claim(&mut self, key: &ObjectKey) {
        for uid in self.queue.users_of(key) {
            let Some(pending) = self.queue.get(&uid) else {
                continue;
            };
            let entries = pending.pod.spec.iter();
            let mut entries = entries.flat_map(|spec| spec.resource_claims.iter().flatten());
            if entries.any(|entry| entry.resource_claim_name.as_ref() == Some(&key.1)) {
                let explanation = Explanation::rejected(
                    Reason::ClaimMissing,
                    format!(
                        "claim {} was deleted; create it again, or delete the pod",
                        key.1
                    ),
                );
                let regarding = pod::reference(&pending.pod);
                self.state_events
                    .push(PendingEvent::unschedulable(regarding, &explanation));
            }
        }
    }
}

/// Returns whether the pod has no claims for this driver and is gated until its gang is allocated.
fn waits_for_gang(pending: &PendingPod, pod_request: &PodRequest) -> bool {
    pending.gang().is_some()
        && pod::has_allocation_gate(&pending.pod)
        && pod_request.pinned_by.is_empty()
        && !pending.is_placed
}

fn devices(pending: &PendingPod, mut pod_request: PodRequest, claims: NamedClaims) -> Demand {
    pod_request.avoided_nodes = pending.avoided_nodes().iter().cloned().collect();
    Demand::Devices(Box::new(Request {
        name: pending.pod.metadata.name.clone().unwrap_or_default(),
        pod_request,
        claims,
    }))
}

/// Returns the pod's claims; `None` while a claim is missing or belongs to another pod.
fn resolve(ledger: &Ledger, pod: &Pod) -> Option<NamedClaims> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    claims(pod)
        .map(|(name, object)| {
            let claim = ledger.claim(&(namespace.clone(), object?.to_owned()))?;
            let is_usable =
                claim.metadata.deletion_timestamp.is_none() && claim::belongs_to(claim, pod);
            is_usable.then(|| (name.to_owned(), Arc::clone(claim)))
        })
        .collect()
}
