//! The request of one pod: its claims for this driver, the containers that use them, and its node constraints.

use std::collections::BTreeSet;
use std::sync::Arc;

use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::{Container, NodeSelector, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::claim::{
    self, Alternative, ClaimError, ClaimId, ClaimProblem, ClaimSpec, Classes, Count, Ownership,
};
use crate::division::Division;
use crate::explanation::Explanation;
use crate::node::PodDemand;
use crate::pod::{self, containers};
use crate::search::input::ContainerDevices;
use crate::searched::SearchedNodes;
use crate::selector::{DriverMatch, Selectors};
use crate::usage::{AllocatedDevice, DeviceAccess};

/// Request of one pod.
#[derive(Debug, Clone, Default)]
pub struct PodRequest {
    /// UID of the pod.
    pub uid: String,
    /// Demand on the node.
    pub demand: PodDemand,
    /// Unallocated claims for this driver, in the order of the pod.
    pub claims: Vec<ClaimSpec>,
    /// Allocated claims with the nodes to which they pin the pod.
    pub pinned_by: Vec<(ClaimId, NodeSelector)>,
    /// Nodes on which the pod could not be bound a short while ago; they are selected last.
    pub avoided_nodes: BTreeSet<String>,
    /// What earlier turns of a suspended decision have found; `None` for a decision that cannot go on in another turn.
    pub searched: Option<Arc<SearchedNodes>>,
    /// Demand of other pods that share the claims and must run on the same node.
    pub sharers: Vec<PodDemand>,
    /// Demand that devices of this driver match and that this controller does not allocate. The pod waits for ever if
    /// its scheduler finds no devices of another driver.
    pub unallocatable: Option<Explanation>,
    containers: Vec<ContainerClaims>,
}

/// Claims of one container.
#[derive(Debug, Clone, Default, PartialEq)]
struct ContainerClaims {
    name: String,
    /// Position of an unallocated claim, and its request if the container names one.
    unallocated: Vec<(usize, Option<String>)>,
    /// Pool and device of allocated claims.
    allocated: Vec<(String, String)>,
}

/// A claim for this driver, allocated or not.
struct OwnClaim<'a> {
    /// Name in the pod.
    entry: &'a str,
    id: ClaimId,
    is_spatial: bool,
}

impl PodRequest {
    /// Creates the request of a pod from its claims, each with its name in the pod.
    ///
    /// # Errors
    /// When a claim for this driver cannot be served.
    pub fn new(
        pod: &Pod,
        claims: &[(&str, &ResourceClaim)],
        classes: &impl Classes,
        selectors: &Selectors,
    ) -> Result<Self, ClaimError> {
        let mut pod_request = Self {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            demand: PodDemand::of(pod),
            ..Self::default()
        };
        pod_request.containers = containers(pod)
            .map(|container| ContainerClaims {
                name: container.name.clone(),
                ..ContainerClaims::default()
            })
            .collect();
        let mut own = Vec::new();
        for (pod_claim, object) in claims {
            if let Some(allocation) = object
                .status
                .as_ref()
                .and_then(|status| status.allocation.as_ref())
            {
                if let Some(selector) = &allocation.node_selector {
                    pod_request
                        .pinned_by
                        .push((ClaimId::of(object), selector.clone()));
                }
                own.extend(OwnClaim::of_allocated(pod_claim, object));
                pod_request.add_allocated(pod, pod_claim, object);
                continue;
            }
            match claim::classify(object, classes, selectors) {
                Ownership::Foreign => {}
                Ownership::Rejected(error) => return Err(error),
                Ownership::Undetermined(error) => {
                    pod_request
                        .unallocatable
                        .get_or_insert_with(|| Explanation::from(error));
                }
                Ownership::Ours(spec) => {
                    own.push(OwnClaim {
                        entry: pod_claim,
                        id: spec.id.clone(),
                        is_spatial: spec.may_be_spatial(),
                    });
                    let next = pod_request.claims.len();
                    // A claim that the pod lists under two names is allocated once.
                    let position = match pod_request
                        .claims
                        .iter()
                        .position(|known| known.id == spec.id)
                    {
                        Some(known) => known,
                        None => {
                            pod_request.claims.push(*spec);
                            next
                        }
                    };
                    pod_request.add_unallocated(pod, pod_claim, position);
                }
            }
        }
        if let Some(error) = incompatible(pod, &own) {
            return Err(error);
        }
        if pod_request.unallocatable.is_none() {
            pod_request.unallocatable = extended_resource(pod, classes, selectors);
        }
        Ok(pod_request)
    }

    /// Returns whether a decision for the other request, of a pod without an assumed node, is one for this request, too.
    #[must_use]
    pub fn is_equivalent(&self, other: &Self) -> bool {
        let are_equal = |(one, other): (&ClaimSpec, &ClaimSpec)| {
            one.requests == other.requests
                && one.constraints == other.constraints
                && one.own_placement == other.own_placement
                && one.class_placement == other.class_placement
                && one.id.namespace == other.id.namespace
        };
        let shares_nothing = self.sharers.is_empty() && other.sharers.is_empty();
        shares_nothing
            && self.pinned_by.is_empty()
            && other.pinned_by.is_empty()
            && self.claims.len() == other.claims.len()
            && self.claims.iter().zip(&other.claims).all(are_equal)
            && self.demand == other.demand
            && self.avoided_nodes == other.avoided_nodes
            && self.containers == other.containers
    }

    /// Returns whether the pod has one request without alternatives.
    #[must_use]
    pub fn is_single(&self) -> bool {
        matches!(&self.claims[..], [claim] if matches!(&claim.requests[..], [request] if request.alternatives.len() == 1))
    }

    /// Returns the only request of the pod, if it is one for several devices that has no alternatives.
    #[must_use]
    pub fn several(&self) -> Option<&Alternative> {
        if !self.is_single() {
            return None;
        }
        let request = self.claims.first()?.requests.first()?;
        let alternative = request.alternatives.first()?;
        let is_several = matches!(alternative.count, Count::Exactly(count) if count > 1);
        (is_several && !alternative.admin_access).then_some(alternative)
    }

    /// Returns whether a request, or an alternative of one, is for all devices.
    pub(crate) fn requests_all(&self) -> bool {
        self.claims
            .iter()
            .flat_map(|claim| &claim.requests)
            .flat_map(|request| &request.alternatives)
            .any(|alternative| alternative.count == Count::All)
    }

    fn add_unallocated(&mut self, pod: &Pod, pod_claim: &str, position: usize) {
        for (container, claims) in containers(pod).zip(&mut self.containers) {
            for request in requests_of(container, pod_claim) {
                claims.unallocated.push((position, request));
            }
        }
    }

    fn add_allocated(&mut self, pod: &Pod, pod_claim: &str, object: &ResourceClaim) {
        let devices = AllocatedDevice::of_claim(object);
        for (container, claims) in containers(pod).zip(&mut self.containers) {
            for request in requests_of(container, pod_claim) {
                let is_used = |device: &AllocatedDevice| {
                    let main = device
                        .request
                        .split_once('/')
                        .map_or(device.request.as_str(), |(main, _)| main);
                    request.as_deref().is_none_or(|request| request == main)
                };
                claims.allocated.extend(
                    devices
                        .iter()
                        .filter(|device| is_used(device))
                        .map(|device| (device.pool.clone(), device.device.clone())),
                );
            }
        }
    }

    /// Returns the containers that use unallocated claims. `gpu_of` finds a GPU by pool and device.
    pub(crate) fn containers(
        &self,
        gpu_of: impl Fn(&str, &str) -> Option<Arc<str>>,
    ) -> Vec<ContainerDevices> {
        self.containers
            .iter()
            .filter(|container| !container.unallocated.is_empty())
            .map(|container| ContainerDevices {
                name: container.name.clone(),
                requests: container.unallocated.clone(),
                gpus: container
                    .allocated
                    .iter()
                    .filter_map(|(pool, device)| gpu_of(pool, device))
                    .collect(),
            })
            .collect()
    }
}

impl<'a> OwnClaim<'a> {
    /// Returns an allocated claim, if it has devices of this driver.
    fn of_allocated(entry: &'a str, object: &ResourceClaim) -> Option<Self> {
        let devices = AllocatedDevice::of_claim(object);
        let is_spatial = |device: &AllocatedDevice| matches!(&device.access, DeviceAccess::Share(_, division) if *division != Division::Time);
        (!devices.is_empty()).then(|| Self {
            entry,
            id: ClaimId::of(object),
            is_spatial: devices.iter().any(is_spatial),
        })
    }
}

/// Returns why the claims of a container do not go together: a program is a client of one MPS daemon, which serves one GPU. The node
/// driver refuses such a pod, too, but only after it is bound.
fn incompatible(pod: &Pod, claims: &[OwnClaim<'_>]) -> Option<ClaimError> {
    containers(pod).find_map(|container| {
        let is_used = |claim: &&OwnClaim<'_>| requests_of(container, claim.entry).next().is_some();
        let used: Vec<_> = claims.iter().filter(is_used).collect();
        let spatial = used.iter().find(|claim| claim.is_spatial)?;
        // A claim that the pod lists under two names is one claim.
        let other = used.iter().find(|claim| claim.id != spatial.id)?;
        Some(ClaimError {
            claim: Box::new(spatial.id.clone()),
            problem: ClaimProblem::Incompatible {
                container: container.name.clone(),
                other: other.id.to_string(),
            },
        })
    })
}

/// Explains the first extended resource of a class whose devices can be of this driver (KEP-5004). Such a request has no
/// claim before the pod is bound, so this controller cannot allocate it.
fn extended_resource(
    pod: &Pod,
    classes: &impl Classes,
    selectors: &Selectors,
) -> Option<Explanation> {
    pod::extended_resources(pod).find_map(|(container, resource)| {
        let class = classes.of_extended_resource(resource)?;
        let name = class.metadata.name.as_deref().unwrap_or_default();
        let can_match =
            claim::class_match(name, Some(class), selectors) != DriverMatch::Other;
        can_match.then(|| {
            Explanation::rejected(
                Reason::ExtendedResource,
                format!(
                    "container {container} requests {resource}: the controller allocates ResourceClaims only; \
                     use a claim for device class {name}"
                ),
            )
        })
    })
}

/// Returns the requests of the claim that the container names; `None` for the whole claim.
fn requests_of<'a>(
    container: &'a Container,
    pod_claim: &'a str,
) -> impl Iterator<Item = Option<String>> + 'a {
    container
        .resources
        .iter()
        .flat_map(|resources| resources.claims.iter().flatten())
        .filter(move |claim| claim.name == pod_claim)
        .map(|claim| claim.request.clone().filter(|request| !request.is_empty()))
}
