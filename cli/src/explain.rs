//! `kubectl drava explain pod`: what stands in the way of a pod, node by node and card by card.

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use drava_allocator::explanation::{DeviceVerdict, Explanation, NodeVerdict};
use drava_allocator::placement::Policies;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::reason::Reason;
use drava_allocator::usage::AllocatedDevice;
use drava_api::names;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::Serialize;

use crate::snapshot::Snapshot;
use crate::table::columns;

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    pod: String,
    /// Stable word for what is the case.
    state: State,
    /// One line.
    summary: String,
    /// Reason codes with the number of nodes, when no node fits.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    reasons: BTreeMap<String, usize>,
    /// Obstacles by node and device, when no node fits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    obstacles: Vec<Obstacle>,
}

/// What is the case with a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum State {
    /// It does not ask for devices of this driver.
    NotConcerned,
    /// It runs on a node, or has ended.
    Placed,
    /// A claim of it does not exist yet.
    WaitingForClaim,
    /// Somebody holds it back.
    Gated,
    /// All of its claims are allocated; kube-scheduler is to bind it.
    Allocated,
    /// It fits; the controller is to allocate.
    Fits,
    /// It does not fit.
    DoesNotFit,
    /// It can never be served as it is.
    Refused,
}

/// What stands in the way at one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Obstacle {
    node: String,
    /// Empty for an obstacle of the whole node.
    device: String,
    reason: String,
    detail: String,
}

/// Explains a pod.
///
/// # Errors
/// When there is no such pod.
pub(crate) fn pod(
    snapshot: &Snapshot,
    namespace: &str,
    name: &str,
    policies: Policies,
) -> anyhow::Result<Report> {
    let pod = snapshot
        .pods
        .iter()
        .find(|pod| is(pod, namespace, name))
        .with_context(|| {
            format!("there is no pod {name} in namespace {namespace}; use -n for another namespace")
        })?;
    let mut report = Report {
        pod: format!("{namespace}/{name}"),
        state: State::NotConcerned,
        summary: String::new(),
        reasons: BTreeMap::new(),
        obstacles: Vec::new(),
    };
    (report.state, report.summary) = match stage(snapshot, pod)? {
        Stage::WithoutClaim(name) => (
            State::WaitingForClaim,
            format!(
                "its claim {name} does not exist yet: kube-controller-manager makes it from the template, or somebody has to create it"
            ),
        ),
        Stage::Refused(explanation) => (State::Refused, explanation.summary()),
        Stage::Served(held) => served(&held, node(pod)),
        Stage::Gated(gates) => (
            State::Gated,
            format!(
                "it is held by the scheduling gates {}; nobody plans it before they are removed",
                gates.join(", ")
            ),
        ),
        Stage::Asking(ask) => match snapshot.cluster.decide(&ask, policies) {
            Ok(placement) => (
                State::Fits,
                format!(
                    "it fits on node {}, and the controller should allocate it within seconds; if not, look at the log \
                     of drava-controller",
                    placement.node
                ),
            ),
            Err(explanation) => {
                report.add_obstacles(&explanation);
                let state = match explanation {
                    Explanation::Rejected { .. } => State::Refused,
                    Explanation::Nodes(_) => State::DoesNotFit,
                };
                (state, explanation.summary())
            }
        },
    };
    Ok(report)
}

/// How far a pod has come.
enum Stage<'a> {
    /// This claim of it does not exist.
    WithoutClaim(String),
    /// What it asks for is wrong in itself.
    Refused(Explanation),
    /// It asks for nothing beyond what it holds: these devices.
    Served(Vec<String>),
    /// These scheduling gates hold it.
    Gated(Vec<&'a str>),
    /// It asks for devices.
    Asking(Box<PodRequest>),
}

fn stage<'a>(snapshot: &Snapshot, pod: &'a Pod) -> anyhow::Result<Stage<'a>> {
    let claims = match claims_of(snapshot, pod)? {
        Claims::Found(claims) => claims,
        Claims::Missing(name) => return Ok(Stage::WithoutClaim(name)),
    };
    let named: Vec<(&str, &ResourceClaim)> = claims
        .iter()
        .map(|(name, claim)| (name.as_str(), *claim))
        .collect();
    let cluster = &snapshot.cluster;
    let ask = match PodRequest::new(pod, &named, &cluster.classes, &cluster.selectors) {
        Ok(ask) => ask,
        Err(error) => return Ok(Stage::Refused(Explanation::from(error))),
    };
    if ask.claims.is_empty() {
        let held = named
            .iter()
            .flat_map(|(_, claim)| AllocatedDevice::of_claim(claim))
            .map(|allocated| format!("{} of pool {}", allocated.device, allocated.pool));
        return Ok(Stage::Served(held.collect()));
    }
    let gates = gates(pod);
    if !gates.is_empty() {
        return Ok(Stage::Gated(gates));
    }
    Ok(Stage::Asking(Box::new(ask)))
}

/// A pod that asks for nothing beyond what it holds.
fn served(held: &[String], node: Option<&str>) -> (State, String) {
    let devices = held.join(", ");
    match (held.is_empty(), node) {
        (true, _) => (
            State::NotConcerned,
            format!("it asks for no devices of {}", names::DRIVER),
        ),
        (false, Some(node)) => (
            State::Placed,
            format!("it is on node {node} with {devices}"),
        ),
        (false, None) => (
            State::Allocated,
            format!("it has {devices}; kube-scheduler is to bind it, see the events of the pod"),
        ),
    }
}

/// The node that the pod is bound to.
fn node(pod: &Pod) -> Option<&str> {
    let node = pod.spec.as_ref()?.node_name.as_deref()?;
    (!node.is_empty()).then_some(node)
}

fn is(pod: &Pod, namespace: &str, name: &str) -> bool {
    pod.metadata.namespace.as_deref() == Some(namespace)
        && pod.metadata.name.as_deref() == Some(name)
}

fn gates(pod: &Pod) -> Vec<&str> {
    let gates = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.scheduling_gates.as_deref());
    gates
        .unwrap_or_default()
        .iter()
        .map(|gate| gate.name.as_str())
        .collect()
}

enum Claims<'a> {
    /// Each with the name by which the pod calls it.
    Found(Vec<(String, &'a ResourceClaim)>),
    /// This one is not there.
    Missing(String),
}

fn claims_of<'a>(snapshot: &'a Snapshot, pod: &Pod) -> anyhow::Result<Claims<'a>> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let Some(spec) = &pod.spec else {
        bail!("the pod has no spec");
    };
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.resource_claim_statuses.as_deref())
        .unwrap_or_default();
    let mut found = Vec::new();
    for entry in spec.resource_claims.iter().flatten() {
        let status = statuses.iter().find(|status| status.name == entry.name);
        let object = match (&entry.resource_claim_name, status) {
            (Some(name), _) => name.clone(),
            (None, Some(status)) => match &status.resource_claim_name {
                Some(name) => name.clone(),
                // The template asks for nothing.
                None => continue,
            },
            (None, None) => return Ok(Claims::Missing(entry.name.clone())),
        };
        let claim = snapshot.claims.iter().find(|claim| {
            claim.metadata.namespace.as_deref() == Some(namespace)
                && claim.metadata.name.as_deref() == Some(&object)
        });
        match claim {
            Some(claim) => found.push((entry.name.clone(), claim)),
            None => return Ok(Claims::Missing(object)),
        }
    }
    Ok(Claims::Found(found))
}

fn obstacles(verdict: &NodeVerdict) -> Vec<Obstacle> {
    if verdict.devices.is_empty() {
        return vec![Obstacle {
            node: verdict.node.clone(),
            device: String::new(),
            reason: verdict.reason.to_string(),
            detail: verdict.detail.clone(),
        }];
    }
    let of_device = |device: &DeviceVerdict| Obstacle {
        node: verdict.node.clone(),
        device: device.device.clone(),
        reason: device.reason.to_string(),
        detail: device.detail.clone(),
    };
    verdict.devices.iter().map(of_device).collect()
}

impl Report {
    fn add_obstacles(&mut self, explanation: &Explanation) {
        let Explanation::Nodes(verdicts) = explanation else {
            return;
        };
        for verdict in verdicts {
            *self.reasons.entry(verdict.reason.to_string()).or_default() += 1;
            self.obstacles.extend(obstacles(verdict));
        }
    }

    /// A device of another type says nothing where the node has devices of the right one.
    fn is_noise(&self, obstacle: &Obstacle) -> bool {
        let other_type = Reason::TypeMismatch.as_str();
        obstacle.reason == other_type
            && self
                .obstacles
                .iter()
                .any(|other| other.node == obstacle.node && other.reason != other_type)
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("pod {}: {}\n", self.pod, self.summary);
        if !self.obstacles.is_empty() {
            let rows: Vec<_> = self
                .obstacles
                .iter()
                .filter(|obstacle| !self.is_noise(obstacle))
                .map(|obstacle| {
                    vec![
                        obstacle.node.clone(),
                        if obstacle.device.is_empty() {
                            "–".to_owned()
                        } else {
                            obstacle.device.clone()
                        },
                        obstacle.reason.clone(),
                        obstacle.detail.clone(),
                    ]
                })
                .collect();
            text.push('\n');
            text.push_str(&columns(&["NODE", "DEVICE", "REASON", "DETAIL"], &rows));
        }
        text
    }
}

#[cfg(test)]
pub(crate) mod tests;
