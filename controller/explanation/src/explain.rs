//! `kubectl drava explain pod`: state of a pod's allocation, with the blockers of each node and GPU, or with the reason
//! for the node and the GPUs of an allocated pod.

use std::collections::BTreeMap;

use drava_allocator::claim::ClaimId;
use drava_allocator::claim_problem::{ClaimProblem, Claims, resolve};
use drava_allocator::cluster::{Cluster, is_finished};
use drava_allocator::explanation::{DeviceVerdict, Explanation, NodeVerdict};
use drava_allocator::gang;
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::placement::Policies;
use drava_allocator::pod;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::usage::AllocatedDevice;
use drava_api::explanation::PlacementExplanationStatus;
use drava_api::names;
use drava_api::placement_record::PlacementRecord;
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::Serialize;

use crate::advice;
use crate::changes::{self, Change, changes_text};
use crate::growth;
use crate::snapshot::{Held, Snapshot};
use crate::suspension;
use crate::terminal::{printable, table};

pub mod claim;

/// State of a pod's allocation with its explanation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pod: String,
    /// Stable code.
    pub state: State,
    /// Explanation in one line.
    pub summary: String,
    /// Code of the reason, unless the pod is allocated or a node is feasible.
    #[serde(skip)]
    pub reason: Option<Reason>,
    /// Number of nodes per reason code, if no node is feasible.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons: BTreeMap<String, usize>,
    /// Blockers by node and device, if no node is feasible.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blockers: Vec<Blocker>,
    /// Why the node and the GPUs were selected, if all claims are allocated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    placements: Vec<ClaimReason>,
    /// After each of them the pod fits, if no node is feasible.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
    /// Devices that are reserved for the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<String>,
    /// Likely mistakes in the pod and its claims, companions that do not add to its shares, and what the explanation does not
    /// know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub advice: Vec<String>,
    /// The pods or gangs for which the only devices are reserved that fit the pod; the summary says so.
    #[serde(skip)]
    held: Option<Held>,
}

/// State of a pod's allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum State {
    /// The pod requests no devices of this driver.
    NoGpuRequest,
    /// The pod is bound to a node.
    Placed,
    /// The pod has finished; its claims may be gone.
    Finished,
    /// A claim of the pod does not exist, or cannot be used.
    WaitingForClaim,
    /// The pod has scheduling gates of other controllers.
    Gated,
    /// All claims are allocated; kube-scheduler has not bound the pod.
    Allocated,
    /// A node is feasible; the controller has not allocated the claims.
    Feasible,
    /// A node is feasible apart from what the controller alone knows: a reservation for another pod, for instance.
    Waiting,
    /// No node is feasible.
    Infeasible,
    /// The request is invalid.
    Rejected,
    /// Neither the cluster nor the controller says.
    Unknown,
}

/// Blocker of one node or device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Blocker {
    /// Name of the node.
    pub node: String,
    /// Empty for a blocker of the node.
    pub device: String,
    /// Reason code.
    pub reason: String,
    /// Figures.
    pub detail: String,
}

/// Why the node and the GPUs of a claim were selected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct ClaimReason {
    /// Namespace and name of the claim.
    claim: String,
    /// Reason that the controller recorded with the allocation; scores are those at that time.
    reason: Option<String>,
}

/// Settings of the controller that its decisions depend on.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Policies for nodes and GPUs.
    pub policies: Policies,
    /// Names of the schedulers whose pods are served.
    pub schedulers: Vec<String>,
}

/// Why nothing is explained.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// The pod does not exist.
    #[error("cannot find pod {name} in namespace {namespace}; use -n for another namespace")]
    PodMissing {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// The claim does not exist.
    #[error("cannot find claim {name} in namespace {namespace}; use -n for another namespace")]
    ClaimMissing {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
}

/// Explains a pod, with changes after which it fits.
///
/// # Errors
/// If the pod does not exist.
pub fn pod_with_changes(
    snapshot: &mut Snapshot,
    namespace: &str,
    name: &str,
    settings: &Settings,
) -> Result<Report, ExplainError> {
    let mut report = pod(snapshot, namespace, name, settings)?;
    if report.state != State::Infeasible {
        return Ok(report);
    }
    let pod = snapshot.pods.iter().find(|pod| is(pod, namespace, name));
    if let Some(pod) = pod.cloned()
        && let Ok(claims) = resolve(&pod, &&*snapshot)
    {
        let claims: Vec<(String, ResourceClaim)> = claims
            .into_iter()
            .map(|(name, claim)| (name, claim.clone()))
            .collect();
        report.changes = changes::find(snapshot, &pod, &claims, settings.policies);
    }
    Ok(report)
}

/// Explains a pod.
///
/// # Errors
/// If the pod does not exist.
pub fn pod(
    snapshot: &mut Snapshot,
    namespace: &str,
    name: &str,
    settings: &Settings,
) -> Result<Report, ExplainError> {
    let found = snapshot.pods.iter().find(|pod| is(pod, namespace, name));
    let pod = found.cloned().ok_or_else(|| ExplainError::PodMissing {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    })?;
    let mut report = of_pod(snapshot, &pod, settings, Depth::Devices);
    report.advice = advice_of(snapshot, &pod);
    if report.state == State::Placed {
        let companions = growth::of_pod(snapshot, &pod, settings.policies);
        report.advice.extend(companions);
    }
    // The text of a condition names no pod of another namespace.
    let is_reserved = report.reason == Some(Reason::Reserved) && report.state == State::Waiting;
    if (report.state == State::Feasible || is_reserved)
        && !snapshot.reservations.is_empty()
        && let Stage::Requesting(request) = stage(snapshot, &pod, &settings.schedulers)
    {
        let key = object_key(&pod.metadata);
        if let Some(held) = snapshot.waits_for_reserved(&key, &request, settings.policies) {
            report.state = State::Waiting;
            report.reason = Some(Reason::Reserved);
            report.summary = held.explanation(None).summary();
            report.held = Some(held);
        }
    }
    if matches!(report.state, State::Feasible | State::Waiting) {
        report.advice.extend(snapshot.omission());
    }
    Ok(report)
}

/// Returns the devices that are reserved for a pod, each with its pool.
fn reserved(snapshot: &Snapshot, namespace: &str, pod: &str) -> Vec<String> {
    let reservations = snapshot.reservations.iter();
    let own =
        reservations.filter(|reserved| reserved.namespace == namespace && reserved.pod == pod);
    let devices = own.flat_map(|reserved| &reserved.devices);
    devices
        .map(|device| format!("{} of pool {}", device.device, device.pool))
        .collect()
}

/// Returns the likely mistakes in a pod and its claims.
fn advice_of(snapshot: &Snapshot, pod: &Pod) -> Vec<String> {
    let Ok(claims) = resolve(pod, &snapshot) else {
        return Vec::new();
    };
    let known = snapshot.known();
    let own = claims.iter().filter(|(_, claim)| snapshot.is_own(claim));
    let own = own.map(|(entry, _)| entry.clone()).collect();
    let mut found = advice::of_pod(pod, &own);
    for (_, claim) in &claims {
        let id = ClaimId::of(claim);
        let spec = claim.spec.iter();
        let of_claim = spec.flat_map(|spec| advice::of_claim(&id.namespace, spec, "spec", known));
        found.extend(of_claim.map(|text| format!("claim {id}: {text}")));
    }
    found
}

/// Level of detail of an explanation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Reasons by node, as the controller finds them; fast in large clusters.
    Nodes,
    /// Reasons by node and device.
    Devices,
}

/// Explains a pod of the snapshot.
pub fn of_pod(snapshot: &Snapshot, pod: &Pod, settings: &Settings, depth: Depth) -> Report {
    let (namespace, name) = object_key(&pod.metadata);
    let mut report = Report::new(pod);
    report.reserved = reserved(snapshot, &namespace, &name);
    if is_finished(pod) {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        report.state = State::Finished;
        report.summary = format!(
            "the pod has finished ({}); it keeps no devices",
            phase.unwrap_or_default()
        );
        return report;
    }
    (report.state, report.summary) = match stage(snapshot, pod, &settings.schedulers) {
        Stage::WithoutClaim(problem) => {
            report.reason = Some(Reason::ClaimMissing);
            (State::WaitingForClaim, problem.to_string())
        }
        Stage::Rejected(explanation) => {
            report.reason = Some(explanation.reason());
            (State::Rejected, explanation.summary())
        }
        Stage::Allocated {
            devices,
            reasons,
            suspended,
        } => {
            report.placements = reasons;
            // A member of a gang waits with the others, also without claims.
            let waits = lacks_members(snapshot, pod).or_else(|| waiting_reason(pod));
            match waits.filter(|_| devices.is_empty() && pod::node(pod).is_none()) {
                Some((reason, text)) => {
                    report.reason = Some(reason);
                    (State::Waiting, text)
                }
                None => {
                    let (state, summary) = allocated(&devices, pod);
                    let parts: Vec<String> = std::iter::once(summary).chain(suspended).collect();
                    (state, parts.join("; "))
                }
            }
        }
        Stage::Gated(gates) => (
            State::Gated,
            format!(
                "the pod has scheduling gates {}; the controller ignores the pod until they are removed",
                gates.join(", ")
            ),
        ),
        // No change of the cluster helps until the others exist. The condition may have an older number of them.
        Stage::Requesting(_) if let Some((reason, text)) = lacks_members(snapshot, pod) => {
            report.reason = Some(reason);
            (State::Waiting, text)
        }
        Stage::Requesting(request) => {
            let decision = match depth {
                Depth::Nodes => snapshot.cluster.decide(&request, settings.policies),
                Depth::Devices => snapshot.cluster.explain(&request, settings.policies),
            };
            let planned = waiting_reason(pod);
            report.reason = planned.as_ref().map(|(reason, _)| *reason);
            match decision {
                Ok(_) if let Some((_, text)) = planned => (State::Waiting, text),
                Ok(placement) if let Some(gang) = gang::name_of(pod) => (
                    State::Feasible,
                    format!(
                        "node {} is feasible for this pod; its gang {gang} is allocated when enough members fit at the same \
                         time, so explain the others, too",
                        placement.node
                    ),
                ),
                Ok(placement) => (
                    State::Feasible,
                    format!(
                        "node {} is feasible; the controller allocates within seconds, otherwise check the log of \
                         drava-controller",
                        placement.node
                    ),
                ),
                Err(explanation) => {
                    report.reason.get_or_insert(explanation.reason());
                    report.add_verdicts(&explanation, depth);
                    let state = match explanation {
                        Explanation::Rejected { .. } => State::Rejected,
                        Explanation::Nodes(_) => State::Infeasible,
                    };
                    let summary = planned.map(|(_, text)| text);
                    (state, summary.unwrap_or_else(|| explanation.summary()))
                }
            }
        }
    };
    report
}

/// Stage of a pod before the allocator runs.
enum Stage<'a> {
    /// A claim does not exist, or cannot be used.
    WithoutClaim(ClaimProblem),
    /// The request is invalid.
    Rejected(Explanation),
    /// The pod requests nothing beyond these allocated devices.
    Allocated {
        devices: Vec<String>,
        reasons: Vec<ClaimReason>,
        /// Which of its claims are suspended, and what they wait for.
        suspended: Vec<String>,
    },
    /// The pod has these scheduling gates of other controllers.
    Gated(Vec<&'a str>),
    /// The pod requests devices.
    Requesting(Box<PodRequest>),
}

fn stage<'a>(snapshot: &Snapshot, pod: &'a Pod, schedulers: &[String]) -> Stage<'a> {
    let claims = match resolve(pod, &snapshot) {
        Ok(claims) => claims,
        Err(problem) => return Stage::WithoutClaim(problem),
    };
    let named: Vec<(&str, &ResourceClaim)> = claims
        .iter()
        .map(|(name, claim)| (name.as_str(), *claim))
        .collect();
    let cluster = &snapshot.cluster;
    let request = match PodRequest::new(pod, &named, &cluster.classes, &cluster.selectors) {
        Ok(request) => request,
        Err(error) => return Stage::Rejected(Explanation::from(error)),
    };
    if request.claims.is_empty() {
        if pod::node(pod).is_none()
            && let Some(explanation) = request
                .unallocatable
                .or_else(|| unknown_class(cluster, &named))
        {
            return Stage::Rejected(explanation);
        }
        let mut devices = Vec::new();
        let mut reasons = Vec::new();
        let mut suspended = Vec::new();
        for (_, claim) in named {
            let allocated = AllocatedDevice::of_claim(claim);
            let state = suspension::state(cluster, claim).filter(|_| !allocated.is_empty());
            suspended.extend(state.map(|state| format!("claim {}: {state}", ClaimId::of(claim))));
            reasons.extend(allocated.first().map(|device| ClaimReason {
                claim: device.claim.to_string(),
                reason: placement_reason(claim),
            }));
            devices.extend(
                allocated
                    .iter()
                    .map(|device| format!("{} of pool {}", device.device, device.pool)),
            );
        }
        return Stage::Allocated {
            devices,
            reasons,
            suspended,
        };
    }
    let gates = gates(pod);
    if !gates.is_empty() {
        return Stage::Gated(gates);
    }
    if !pod::is_served(pod, schedulers) {
        return Stage::Rejected(Explanation::scheduler_not_served(pod, schedulers));
    }
    Stage::Requesting(Box::new(request))
}

/// Returns that a claim names a class which does not exist; which driver is meant is then unknown.
pub(crate) fn unknown_class(
    cluster: &Cluster,
    claims: &[(&str, &ResourceClaim)],
) -> Option<Explanation> {
    let mut claims = claims.iter();
    claims.find_map(|(_, claim)| {
        let problem = advice::unknown_class_of(claim, &cluster.classes)?;
        let message = format!("claim {}: {problem}", ClaimId::of(claim));
        Some(Explanation::rejected(Reason::UnknownClass, message))
    })
}

/// Returns the condition of the pod in which the controller says why it waits.
fn own_condition(pod: &Pod) -> Option<&PodCondition> {
    condition(pod, names::ALLOCATED_CONDITION)
}

fn condition<'a>(pod: &'a Pod, name: &str) -> Option<&'a PodCondition> {
    let mut conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions.find(|condition| condition.type_ == name)
}

/// Returns why the pod waits, if that is something that the controller alone knows, such as a reservation: the reason in the
/// condition of the pod.
fn waiting_reason(pod: &Pod) -> Option<(Reason, String)> {
    let own = own_condition(pod)?;
    let text = own.message.as_deref().filter(|_| own.status == "False")?;
    let (code, _) = text.split_once(": ")?;
    let reason = Reason::ALL.iter().find(|reason| reason.as_str() == code)?;
    let is_of_queue = matches!(
        reason,
        Reason::WaitingForGang
            | Reason::WaitingForDeletion
            | Reason::WaitingForSuspension
            | Reason::Reserved
            | Reason::RolloutBlocked
            | Reason::NotBound
            | Reason::InvalidGang
            | Reason::CostlySearch
            | Reason::CostlySelectors
    );
    is_of_queue.then(|| (*reason, printable(text)))
}

/// Returns that the gang of a pod has too few members to start, if none of them has started.
fn lacks_members(snapshot: &Snapshot, pod: &Pod) -> Option<(Reason, String)> {
    let gang = gang::of(pod).ok()??;
    let members: Vec<&Pod> = snapshot.members(&gang.name).collect();
    let has_started = members.iter().any(|member| pod::node(member).is_some());
    if has_started || members.len() >= gang.min {
        return None;
    }
    let (name, existing, min) = (gang.name, members.len(), gang.min);
    let text = format!("gang {name}: {existing} of {min} members exist");
    let explanation = Explanation::rejected(Reason::WaitingForGang, text);
    Some((explanation.reason(), explanation.summary()))
}

/// Returns the reason that the controller recorded when it allocated the claim.
fn placement_reason(claim: &ResourceClaim) -> Option<String> {
    Some(printable(&PlacementRecord::of(claim)?.reason))
}

/// What keeps a pod whose claims are allocated.
const NOT_BOUND: &str = "kube-scheduler has not bound the pod, check the pod's events";

/// Returns the state of a pod that requests nothing beyond these allocated devices.
fn allocated(devices: &[String], pod: &Pod) -> (State, String) {
    let list = devices.join(", ");
    match (devices.is_empty(), pod::node(pod)) {
        (true, _) => (
            State::NoGpuRequest,
            format!("the pod requests no devices of {}", names::DRIVER),
        ),
        (false, Some(node)) => (State::Placed, format!("bound to node {node} with {list}")),
        (false, None) if all_gates(pod).any(|gate| gate == names::ALLOCATION_GATE) => (
            State::Allocated,
            format!(
                "allocated {list}; the controller removes the scheduling gate {} within seconds, otherwise check the log of \
                 drava-controller",
                names::ALLOCATION_GATE
            ),
        ),
        (false, None) => (State::Allocated, format!("allocated {list}; {NOT_BOUND}")),
    }
}

fn is(pod: &Pod, namespace: &str, name: &str) -> bool {
    pod.metadata.namespace.as_deref() == Some(namespace)
        && pod.metadata.name.as_deref() == Some(name)
}

/// Returns the scheduling gates of a pod.
fn all_gates(pod: &Pod) -> impl Iterator<Item = &str> {
    let gates = pod.spec.iter();
    let gates = gates.flat_map(|spec| spec.scheduling_gates.iter().flatten());
    gates.map(|gate| gate.name.as_str())
}

/// Returns the gates of other controllers.
fn gates(pod: &Pod) -> Vec<&str> {
    all_gates(pod)
        .filter(|gate| *gate != names::ALLOCATION_GATE)
        .collect()
}

impl<'a> Claims<&'a ResourceClaim> for &'a Snapshot {
    fn claim(&self, (namespace, name): &ObjectKey) -> Option<&'a ResourceClaim> {
        self.claims.iter().find(|claim| {
            claim.metadata.namespace.as_ref() == Some(namespace)
                && claim.metadata.name.as_ref() == Some(name)
        })
    }

    fn unreadable(&self, (namespace, name): &ObjectKey) -> Option<String> {
        let object = format!("{namespace}/{name}: ");
        self.unreadable
            .iter()
            .filter(|(kind, _)| kind == "ResourceClaim")
            .find_map(|(_, text)| text.strip_prefix(&object).map(str::to_owned))
    }

    fn has_template(&self, key: &ObjectKey) -> Option<bool> {
        let templates = self.templates.as_ref()?;
        Some(templates.contains(key))
    }
}

fn blockers(verdict: &NodeVerdict) -> Vec<Blocker> {
    if verdict.devices.is_empty() {
        return vec![Blocker {
            node: verdict.node.clone(),
            device: String::new(),
            reason: verdict.reason.to_string(),
            detail: verdict.detail.clone(),
        }];
    }
    let of_device = |device: &DeviceVerdict| Blocker {
        node: verdict.node.clone(),
        device: device.device.clone(),
        reason: device.reason.to_string(),
        detail: device.detail.clone(),
    };
    verdict.devices.iter().map(of_device).collect()
}

impl State {
    /// All states.
    const ALL: [Self; 11] = [
        Self::NoGpuRequest,
        Self::Placed,
        Self::Finished,
        Self::WaitingForClaim,
        Self::Gated,
        Self::Allocated,
        Self::Feasible,
        Self::Waiting,
        Self::Infeasible,
        Self::Rejected,
        Self::Unknown,
    ];

    /// State in the status of a PlacementExplanation of a pod that does not exist.
    pub const POD_MISSING: &'static str = "PodMissing";

    /// Returns the code.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoGpuRequest => "NoGpuRequest",
            Self::Placed => "Placed",
            Self::Finished => "Finished",
            Self::WaitingForClaim => "WaitingForClaim",
            Self::Gated => "Gated",
            Self::Allocated => "Allocated",
            Self::Feasible => "Feasible",
            Self::Waiting => "Waiting",
            Self::Infeasible => "Infeasible",
            Self::Rejected => "Rejected",
            Self::Unknown => "Unknown",
        }
    }
}

impl Report {
    /// Creates the report of a pod that requests no devices.
    fn new(pod: &Pod) -> Self {
        let (namespace, name) = object_key(&pod.metadata);
        Self {
            pod: format!("{namespace}/{name}"),
            state: State::NoGpuRequest,
            summary: String::new(),
            reason: None,
            reasons: BTreeMap::new(),
            blockers: Vec::new(),
            placements: Vec::new(),
            changes: Vec::new(),
            reserved: Vec::new(),
            advice: Vec::new(),
            held: None,
        }
    }

    /// Returns the report of the controller about a pod; none if the controller knows no such pod.
    #[must_use]
    pub fn of_status(pod: &Pod, status: PlacementExplanationStatus) -> Option<Self> {
        if status.state == State::POD_MISSING {
            return None;
        }
        let mut states = State::ALL.into_iter();
        let state = states.find(|state| state.as_str() == status.state);
        let reasons = status.reasons.into_iter();
        let blockers = status.blockers.into_iter();
        let changes = status.changes.into_iter();
        Some(Self {
            // A newer controller may have more states.
            state: state.unwrap_or(State::Unknown),
            summary: status.summary,
            reasons: reasons
                .map(|(reason, nodes)| (reason, usize::try_from(nodes).unwrap_or(usize::MAX)))
                .collect(),
            blockers: blockers
                .map(|blocker| Blocker {
                    node: blocker.node,
                    device: blocker.device.unwrap_or_default(),
                    reason: blocker.reason,
                    detail: blocker.detail,
                })
                .collect(),
            changes: changes.map(|text| Change::Described { text }).collect(),
            reserved: status.reserved,
            advice: status.advice,
            ..Self::new(pod)
        })
    }

    /// Returns what the condition of a pod says.
    #[must_use]
    pub fn of_condition(pod: &Pod) -> Self {
        let (state, summary) = match (own_condition(pod), pod::node(pod)) {
            (_, Some(node)) => {
                let stopped = condition(pod, names::RUNNING_CONDITION);
                let stopped = stopped.filter(|condition| condition.status == "False");
                let stopped = stopped.and_then(|condition| condition.message.as_deref());
                let stopped = stopped.map(|message| format!("; {}", printable(message)));
                let stopped = stopped.unwrap_or_default();
                (State::Placed, format!("bound to node {node}{stopped}"))
            }
            (Some(condition), None) if condition.status == "True" => {
                (State::Allocated, format!("allocated; {NOT_BOUND}"))
            }
            (Some(condition), None) => {
                let message = condition.message.as_deref().unwrap_or_default();
                (State::Waiting, printable(message))
            }
            (None, None) => (
                State::Unknown,
                format!(
                    "the pod has no condition {}: it requests no devices of {}, or the controller has not decided",
                    names::ALLOCATED_CONDITION,
                    names::DRIVER
                ),
            ),
        };
        Self {
            state,
            summary,
            ..Self::new(pod)
        }
    }

    /// Hides the names of pods of other namespaces than the pod's.
    pub fn hide_other_namespaces(&mut self) {
        let namespace = self.pod.split('/').next().unwrap_or_default();
        for change in &mut self.changes {
            change.hide_other_namespaces(namespace);
        }
        if let Some(held) = &self.held {
            self.summary = held.explanation(Some(namespace)).summary();
        }
    }

    fn add_verdicts(&mut self, explanation: &Explanation, depth: Depth) {
        let Explanation::Nodes(verdicts) = explanation else {
            return;
        };
        for verdict in verdicts.iter() {
            *self.reasons.entry(verdict.reason.to_string()).or_default() += 1;
            if depth == Depth::Devices {
                self.blockers.extend(blockers(verdict));
            }
        }
    }

    /// Returns whether the blocker is a device of another type on a node with devices of the requested type.
    fn is_irrelevant(&self, blocker: &Blocker) -> bool {
        let other_type = Reason::TypeMismatch.as_str();
        blocker.reason == other_type
            && self
                .blockers
                .iter()
                .any(|other| other.node == blocker.node && other.reason != other_type)
    }

    /// Formats the report as text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("pod {}: {}\n", self.pod, self.summary);
        if !self.blockers.is_empty() {
            let rows: Vec<_> = self
                .blockers
                .iter()
                .filter(|blocker| !self.is_irrelevant(blocker))
                .map(|blocker| {
                    vec![
                        blocker.node.clone(),
                        if blocker.device.is_empty() {
                            "–".to_owned()
                        } else {
                            blocker.device.clone()
                        },
                        blocker.reason.clone(),
                        blocker.detail.clone(),
                    ]
                })
                .collect();
            text.push('\n');
            text.push_str(&table(&["NODE", "DEVICE", "REASON", "DETAIL"], rows));
        }
        text.push_str(&changes_text(&self.pod, &self.changes));
        for placement in &self.placements {
            text.push_str(&match &placement.reason {
                Some(reason) => {
                    format!("claim {}, at allocation: {reason}\n", placement.claim)
                }
                None => format!(
                    "claim {}: no reason recorded; the controller has not allocated the claim\n",
                    placement.claim
                ),
            });
        }
        if !self.reserved.is_empty() {
            text.push_str(&format!(
                "reserved for the pod until others end: {}\n",
                self.reserved.join(", ")
            ));
        }
        for advice in &self.advice {
            text.push_str(&format!("note: {advice}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests;
