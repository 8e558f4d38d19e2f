//! The queue: unbound pods with requests for GPUs, each with the reason.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use drava_allocator::object::object_key;
use drava_api::names::{self, GANG_ANNOTATION};
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Serialize;

use super::is_settled;
use drava_explanation::explain::{self, Depth, Settings, State};
use drava_explanation::snapshot::Snapshot;

/// Most pods that are explained: each takes a decision of the allocator. The others have the reason of the controller.
const MAX_EXPLAINED: usize = 300;

/// An unbound pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct QueuedPod {
    pub(super) namespace: String,
    pod: String,
    /// Unix time of its creation, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<i64>,
    /// What its claims request.
    requests: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gang: Option<String>,
    /// By the condition of the pod for pods beyond the first [`MAX_EXPLAINED`], and without the permissions to explain.
    #[serde(flatten)]
    explanation: PodExplanation,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodExplanation {
    state: State,
    /// Code of the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    summary: String,
    /// Devices that are reserved for the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reserved: Vec<String>,
}

/// Number of pods with a reason, or with a state for pods without a reason: each pod counts once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReasonCount {
    /// Code of the reason or of the state.
    code: &'static str,
    meaning: &'static str,
    pods: usize,
}

/// Returns the queue, the oldest pod first.
pub(super) fn queue(snapshot: &Snapshot, settings: Option<&Settings>) -> Vec<QueuedPod> {
    let mut pods: Vec<&Pod> = snapshot
        .pods
        .iter()
        .filter(|pod| !is_settled(pod) && may_request_gpus(pod))
        .collect();
    pods.sort_by_key(|pod| (created(pod).unwrap_or(i64::MAX), object_key(&pod.metadata)));
    let mut explained = 0;
    let queued = pods.into_iter().filter_map(|pod| {
        let settings = settings.filter(|_| explained < MAX_EXPLAINED);
        let report = match settings {
            None => {
                let mut report = explain::Report::of_condition(pod);
                report.reason = reason_in(&report.summary);
                report
            }
            Some(settings) => {
                let report = explain::of_pod(snapshot, pod, settings, Depth::Nodes);
                // Not drava's.
                if report.state == State::NoGpuRequest {
                    return None;
                }
                explained += 1;
                report
            }
        };
        Some(queued(snapshot, pod, report))
    });
    queued.collect()
}

fn queued(snapshot: &Snapshot, pod: &Pod, report: explain::Report) -> QueuedPod {
    let (namespace, name) = object_key(&pod.metadata);
    let claims = drava_allocator::pod::claims(pod).filter_map(|(_, name)| {
        let name = name?;
        let mut claims = snapshot.claims.iter();
        claims.find(|claim| {
            claim.metadata.name.as_deref() == Some(name)
                && claim.metadata.namespace.as_ref() == Some(&namespace)
        })
    });
    let annotations = pod.metadata.annotations.as_ref();
    QueuedPod {
        requests: claims.flat_map(requests).collect(),
        gang: annotations.and_then(|annotations| annotations.get(GANG_ANNOTATION).cloned()),
        created: created(pod),
        explanation: PodExplanation {
            state: report.state,
            reason: report.reason.map(Reason::as_str),
            summary: report.summary,
            reserved: report.reserved,
        },
        pod: name,
        namespace,
    }
}

/// Returns the first reason that a condition names: `InvalidRequest: …` or `0/2 nodes: 2 InsufficientMemory (…), …`.
fn reason_in(condition: &str) -> Option<Reason> {
    let mut words = condition.split([' ', ':']);
    words.find_map(|word| {
        Reason::ALL
            .iter()
            .find(|code| code.as_str() == word)
            .copied()
    })
}

/// Counts the reasons, the most frequent first.
pub(super) fn reasons(queue: &[QueuedPod]) -> Vec<ReasonCount> {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for PodExplanation { state, reason, .. } in queue.iter().map(|pod| &pod.explanation) {
        let reason = reason.and_then(reason_in);
        let code = match reason {
            Some(reason) => (reason.as_str(), reason.meaning()),
            None => (state.as_str(), meaning(*state)),
        };
        *counts.entry(code).or_default() += 1;
    }
    let counts = counts.into_iter();
    let mut reasons: Vec<ReasonCount> = counts
        .map(|((code, meaning), pods)| ReasonCount {
            code,
            meaning,
            pods,
        })
        .collect();
    reasons.sort_by_key(|reason| Reverse(reason.pods));
    reasons
}

/// Returns the meaning of the state of an unbound pod without a reason.
const fn meaning(state: State) -> &'static str {
    match state {
        State::Feasible => "A node is feasible; the controller allocates the claims.",
        State::Allocated => "The claims are allocated; the scheduler binds the pod.",
        State::Gated => "The pod has scheduling gates of other controllers.",
        State::Waiting | State::Infeasible | State::Rejected | State::WaitingForClaim => {
            "The controller has not allocated the claims."
        }
        State::Finished => "The pod has finished.",
        State::Unknown | State::NoGpuRequest | State::Placed => {
            "The controller has not decided on the pod."
        }
    }
}

/// Returns whether the pod has claims or extended resources, of which an explanation may be about drava.
fn may_request_gpus(pod: &Pod) -> bool {
    let mut claims = drava_allocator::pod::claims(pod);
    claims.next().is_some() || {
        let mut resources = drava_allocator::pod::extended_resources(pod);
        resources.next().is_some()
    }
}

fn created(pod: &Pod) -> Option<i64> {
    let created = pod.metadata.creation_timestamp.as_ref()?;
    Some(created.0.as_second())
}

/// Returns the requests of a claim, such as `2 × vgpu.drava.dev: GPU time 30%, memory 8Gi`.
fn requests(claim: &ResourceClaim) -> Vec<String> {
    let devices = claim.spec.iter().flat_map(|spec| &spec.devices);
    let requests = devices.flat_map(|devices| &devices.requests);
    let texts = requests.flatten().map(|request| {
        let exact = request.exactly.iter().map(|request| {
            let amounts = request.capacity.as_ref();
            let amounts = amounts.and_then(|capacity| capacity.requests.as_ref());
            let is_all = request.allocation_mode.as_deref() == Some("All");
            text(&request.device_class_name, is_all, request.count, amounts)
        });
        let alternatives = request.first_available.iter().flatten().map(|request| {
            let amounts = request.capacity.as_ref();
            let amounts = amounts.and_then(|capacity| capacity.requests.as_ref());
            let is_all = request.allocation_mode.as_deref() == Some("All");
            text(&request.device_class_name, is_all, request.count, amounts)
        });
        exact.chain(alternatives).collect::<Vec<_>>().join(" or ")
    });
    texts.collect()
}

fn text(
    class: &str,
    is_all: bool,
    count: Option<i64>,
    amounts: Option<&BTreeMap<String, Quantity>>,
) -> String {
    let mut text = match (is_all, count.unwrap_or(1)) {
        (true, _) => format!("all {class}"),
        (false, 1) => class.to_owned(),
        (false, count) => format!("{count} × {class}"),
    };
    for (index, (name, amount)) in amounts.into_iter().flatten().enumerate() {
        text.push_str(if index == 0 { ": " } else { ", " });
        let amount = &amount.0;
        if name == names::capacity::CORES {
            text.push_str(&format!("GPU time {amount}%"));
        } else {
            text.push_str(&format!("{name} {amount}"));
        }
    }
    text
}
