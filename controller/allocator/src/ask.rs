//! What one pod asks for: its claims for this driver, what its containers see of them, and what pins it to nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, NodeSelector, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::claim::{self, ClaimError, ClaimId, ClaimSpec, Classes, Ownership};
use crate::node::PodDemand;
use crate::search::question::ContainerDevices;
use crate::selector::Selectors;
use crate::usage::Holding;

/// What one pod asks for.
#[derive(Debug, Clone, Default)]
pub struct PodAsk {
    /// UID of the pod.
    pub uid: String,
    /// What it needs of a node.
    pub demand: PodDemand,
    /// Claims of this driver that are to be allocated, in the order of the pod.
    pub claims: Vec<ClaimSpec>,
    /// Nodes to which claims allocated before pin the pod, with the claim.
    pub pinned: Vec<(ClaimId, NodeSelector)>,
    /// Nodes that were tried in vain a short while ago; taken only when there is no other.
    pub avoid: BTreeSet<String>,
    /// What other pods that share the claims need of the same node.
    pub companions: Vec<PodDemand>,
    containers: Vec<ContainerClaims>,
}

/// What a container sees of the claims, before cards are known.
#[derive(Debug, Clone, Default)]
struct ContainerClaims {
    name: String,
    sees: Vec<(usize, Option<String>)>,
    holds: Vec<(String, String)>,
}

impl PodAsk {
    /// Of a pod with its claims, each with the name by which the pod calls it.
    ///
    /// # Errors
    /// When one of the claims concerns this driver and cannot be served.
    pub fn new(
        pod: &Pod,
        claims: &[(&str, &ResourceClaim)],
        classes: &impl Classes,
        selectors: &Selectors,
    ) -> Result<Self, ClaimError> {
        let mut ask = Self {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            demand: PodDemand::of(pod),
            ..Self::default()
        };
        ask.containers = containers(pod)
            .map(|container| ContainerClaims {
                name: container.name.clone(),
                ..ContainerClaims::default()
            })
            .collect();
        for (pod_claim, object) in claims {
            if let Some(allocation) = object
                .status
                .as_ref()
                .and_then(|status| status.allocation.as_ref())
            {
                if let Some(selector) = &allocation.node_selector {
                    ask.pinned.push((ClaimId::of(object), selector.clone()));
                }
                ask.note_held(pod, pod_claim, object);
                continue;
            }
            match claim::classify(object, classes, selectors) {
                Ownership::Foreign => {}
                Ownership::Refused(error) => return Err(error),
                Ownership::Ours(spec) => {
                    let position = ask.claims.len();
                    // The same claim under two names is allocated once.
                    let position = match ask.claims.iter().position(|known| known.id == spec.id) {
                        Some(known) => known,
                        None => {
                            ask.claims.push(*spec);
                            position
                        }
                    };
                    ask.note_seen(pod, pod_claim, position);
                }
            }
        }
        Ok(ask)
    }

    fn note_seen(&mut self, pod: &Pod, pod_claim: &str, position: usize) {
        for (container, noted) in containers(pod).zip(&mut self.containers) {
            for request in seen_requests(container, pod_claim) {
                noted.sees.push((position, request));
            }
        }
    }

    fn note_held(&mut self, pod: &Pod, pod_claim: &str, object: &ResourceClaim) {
        let holdings = Holding::of_claim(object);
        for (container, noted) in containers(pod).zip(&mut self.containers) {
            for request in seen_requests(container, pod_claim) {
                let main = |holding: &Holding| {
                    let main = holding
                        .request
                        .split_once('/')
                        .map_or(holding.request.as_str(), |(main, _)| main);
                    request.as_deref().is_none_or(|request| request == main)
                };
                noted.holds.extend(
                    holdings
                        .iter()
                        .filter(|holding| main(holding))
                        .map(|holding| (holding.pool.clone(), holding.device.clone())),
                );
            }
        }
    }

    /// What the containers see, with the cards that they have already; `card_of` finds a card by pool and device.
    pub(crate) fn containers(
        &self,
        card_of: impl Fn(&str, &str) -> Option<Arc<str>>,
    ) -> Vec<ContainerDevices> {
        self.containers
            .iter()
            .filter(|container| !container.sees.is_empty())
            .map(|container| ContainerDevices {
                name: container.name.clone(),
                sees: container.sees.clone(),
                cards: container
                    .holds
                    .iter()
                    .filter_map(|(pool, device)| card_of(pool, device))
                    .collect(),
            })
            .collect()
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    })
}

/// Requests of the claim that the container names; `None` for the whole claim.
fn seen_requests<'a>(
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
