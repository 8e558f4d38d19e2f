//! What a pending pod needs from this driver.

use std::sync::Arc;

use drava_allocator::claim_problem::{ClaimProblem, resolve};
use drava_allocator::explanation::Explanation;
use drava_allocator::object::object_key;
use drava_allocator::placement::Placement;
use drava_allocator::pod::{is_served, is_unschedulable};
use drava_allocator::pod_request::PodRequest;
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Planner;
use crate::decide::allocation;
use crate::decide::queue::pending_pod::PendingPod;
use crate::pods::pod;

/// Claims with their names in the pod.
pub(super) type NamedClaims = Vec<(String, Arc<ResourceClaim>)>;

/// Demand of a pending pod.
pub(super) enum Demand {
    /// Nothing now: a claim is in flight.
    Nothing,
    /// Nothing: its claims are allocated or for other drivers.
    Allocated,
    /// A claim does not exist, or cannot be used.
    Unusable(ClaimProblem),
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
}

impl Planner {
    /// Returns the demand of a pending pod.
    pub(super) fn demand(&self, uid: &str) -> Demand {
        let Some(pending) = self.backlog.queue.get(uid) else {
            return Demand::Nothing;
        };
        let claims = match resolve(&pending.pod, self) {
            Ok(claims) => claims,
            Err(problem) => return Demand::Unusable(problem),
        };
        // A claim may be in flight for another pod; the outcome of that job activates this pod.
        let is_pending = |claim: &ResourceClaim| {
            self.commitments
                .ledger
                .is_pending(&object_key(&claim.metadata))
        };
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
            &self.world.cluster.classes,
            &self.world.cluster.selectors,
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
            Ok(_) if self.world.cluster.has_unknown_limits(pending.namespace()) => {
                Demand::Unservable(Explanation::unknown_namespace(pending.namespace()), claims)
            }
            Ok(_) if !is_served(&pending.pod, &self.world.settings.schedulers) => {
                Demand::Unservable(
                    Explanation::scheduler_not_served(
                        &pending.pod,
                        &self.world.settings.schedulers,
                    ),
                    claims,
                )
            }
            Ok(pod_request) => devices(pending, pod_request, claims),
            Err(error) => Demand::Unservable(Explanation::from(error), claims),
        }
    }
}

impl Planner {
    /// Returns what a member of a gang still needs beside those that are placed: they allocate the claims that it shares with
    /// them, and the pod must follow these to their node. `None` if they allocate all its claims.
    pub(super) fn beside(
        &self,
        request: &Request,
        placed: &[(Request, Placement)],
    ) -> Result<Option<Request>, Explanation> {
        let placement_of = |claim: &ResourceClaim| {
            placed.iter().find_map(|(_, placement)| {
                let mut claims = placement.claims.iter();
                let found =
                    claims.find(|found| Some(&found.claim.uid) == claim.metadata.uid.as_ref());
                Some((placement, found?))
            })
        };
        let is_shared = |(_, claim): &(String, Arc<ResourceClaim>)| placement_of(claim).is_some();
        let Some(pending) = self.backlog.queue.get(&request.pod_request.uid) else {
            return Ok(None);
        };
        if !request.claims.iter().any(is_shared) {
            return Ok(Some(request.clone()));
        }
        let as_allocated = |(name, claim): &(String, Arc<ResourceClaim>)| {
            let Some((placement, found)) = placement_of(claim) else {
                return (name.clone(), Arc::clone(claim));
            };
            let mut allocated = claim.as_ref().clone();
            // Neither the time nor the names of shares matter to the decision.
            let allocation = allocation::build(
                claim,
                found,
                &placement.node,
                &self.world.cluster.classes,
                Time(Timestamp::UNIX_EPOCH),
                String::new,
            );
            allocated.status.get_or_insert_default().allocation = Some(allocation);
            (name.clone(), Arc::new(allocated))
        };
        let claims: NamedClaims = request.claims.iter().map(as_allocated).collect();
        let named: Vec<(&str, &ResourceClaim)> = claims
            .iter()
            .map(|(name, claim)| (name.as_str(), claim.as_ref()))
            .collect();
        let (classes, selectors) = (&self.world.cluster.classes, &self.world.cluster.selectors);
        let mut rest = PodRequest::new(&pending.pod, &named, classes, selectors)?;
        if rest.claims.is_empty() {
            return Ok(None);
        }
        rest.avoided_nodes
            .clone_from(&request.pod_request.avoided_nodes);
        Ok(Some(Request {
            name: request.name.clone(),
            pod_request: rest,
            claims,
        }))
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
