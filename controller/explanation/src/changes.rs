//! What would have to change for a pending pod to fit. Every suggestion is tried on the snapshot before it is made.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::cluster::{Cluster, Departure};
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::placement::Policies;
use drava_allocator::pod::claims as pod_claims;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::steps;
use drava_api::Quantity;
use drava_api::names::capacity::MEMORY;
use drava_api::placement_record::PlacementRecord;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::Serialize;

use crate::owner::{hidden, is_known};
use crate::snapshot::Snapshot;

mod quota;

pub use quota::RaisedLimit;
use quota::raised_limits;

/// Maximum number of suggestions to end pods.
const MAX_ENDINGS: usize = 3;
/// Maximum number of trials to end pods; each is a decision on one node.
const MAX_TRIALS: usize = 1000;

/// A change after which the pod fits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Change {
    /// The claim requests less memory.
    #[serde(rename_all = "camelCase")]
    ReduceMemory {
        /// Name of the claim in the pod.
        claim: String,
        /// Name of the request.
        request: String,
        /// Amount that fits, in MiB.
        mib: u64,
    },
    /// These pods end.
    #[serde(rename_all = "camelCase")]
    EndPods {
        /// Node on which the pod fits then.
        node: String,
        /// The pods.
        pods: Vec<Ending>,
    },
    /// Limits of quotas are raised, all of them.
    #[serde(rename_all = "camelCase")]
    RaiseLimits {
        /// The limits.
        limits: Vec<RaisedLimit>,
    },
    /// A change that the controller has described.
    #[serde(rename_all = "camelCase")]
    Described {
        /// The instruction.
        text: String,
    },
}

/// A pod that would have to end.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ending {
    priority: i32,
    /// Namespace and name.
    pod: String,
}

impl Ending {
    fn text(&self) -> String {
        format!("{} (priority {})", self.pod, self.priority)
    }
}

impl Change {
    /// Returns the lowest priority of the pods that end, if pods end.
    pub(crate) fn lowest_ending(&self) -> Option<i32> {
        match self {
            Self::EndPods { pods, .. } => pods.iter().map(|ending| ending.priority).min(),
            Self::ReduceMemory { .. } | Self::RaiseLimits { .. } | Self::Described { .. } => None,
        }
    }

    /// Hides the names of pods of other namespaces.
    pub fn hide_other_namespaces(&mut self, namespace: &str) {
        if let Self::EndPods { pods, .. } = self {
            for ending in pods {
                if !is_known(namespace, &ending.pod) {
                    ending.pod = hidden("pod");
                }
            }
        }
    }

    /// Formats the change as an instruction.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::ReduceMemory {
                claim,
                request,
                mib,
            } => format!("request at most {mib}Mi of memory (claim {claim}, request {request})"),
            Self::EndPods { node, pods } => {
                let other = hidden("pod");
                let (others, named): (Vec<_>, Vec<_>) =
                    pods.iter().partition(|ending| ending.pod == other);
                let named = named.iter().map(|ending| ending.text());
                let others = match others.as_slice() {
                    [] => None,
                    [ending] => Some(ending.text()),
                    endings => Some(format!("{} pods of other namespaces", endings.len())),
                };
                let pods: Vec<String> = named.chain(others).collect();
                format!("end {} on node {node}", pods.join(", "))
            }
            Self::RaiseLimits { limits } => {
                let limits: Vec<String> = limits.iter().map(RaisedLimit::text).collect();
                limits.join(", and ")
            }
            Self::Described { text } => text.clone(),
        }
    }
}

/// Returns changes after which the pod fits, the smallest first. `claims` are its claims with their names in the pod.
#[must_use]
pub fn find(
    snapshot: &mut Snapshot,
    pod: &Pod,
    claims: &[(String, ResourceClaim)],
    policies: Policies,
) -> Vec<Change> {
    let mut changes: Vec<Change> = less_memory(&snapshot.cluster, pod, claims, policies)
        .into_iter()
        .collect();
    if let Some(request) = request(&snapshot.cluster, pod, claims) {
        changes.extend(ended_pods(snapshot, &request, policies));
        let limits = raised_limits(&mut snapshot.cluster, &request, policies);
        changes.extend((!limits.is_empty()).then_some(Change::RaiseLimits { limits }));
    }
    changes
}

fn request(cluster: &Cluster, pod: &Pod, claims: &[(String, ResourceClaim)]) -> Option<PodRequest> {
    let named: Vec<(&str, &ResourceClaim)> = claims
        .iter()
        .map(|(name, claim)| (name.as_str(), claim))
        .collect();
    PodRequest::new(pod, &named, &cluster.classes, &cluster.selectors).ok()
}

/// Returns the largest amount of memory that fits, for a pod with one request for an amount.
fn less_memory(
    cluster: &Cluster,
    pod: &Pod,
    claims: &[(String, ResourceClaim)],
    policies: Policies,
) -> Option<Change> {
    let requests: Vec<(&str, String, Quantity)> = claims
        .iter()
        .flat_map(|(name, claim)| {
            let requests = memory_requests(claim);
            requests.map(move |(request, amount)| (name.as_str(), request, amount))
        })
        .collect();
    let [(claim, name, requested)] = &requests[..] else {
        return None;
    };
    let mut smaller = claims.to_vec();
    let mut fits = |node: &str, mib: u64| {
        smaller
            .iter_mut()
            .for_each(|(_, claim)| set_memory(claim, mib));
        let request = request(cluster, pod, &smaller);
        request.is_some_and(|request| cluster.decide_on(node, &request, policies).is_ok())
    };
    let requested = requested.to_u64_rounded_up()? >> 20;
    let mut most = 0;
    // Few nodes fit more than the best before them.
    for node in steps::counted(cluster.node_names()) {
        let (mut fitting, mut excessive) = (most, requested);
        if excessive - fitting <= 1 || !fits(node, fitting + 1) {
            continue;
        }
        fitting += 1;
        while excessive - fitting > 1 {
            let middle = fitting.midpoint(excessive);
            if fits(node, middle) {
                fitting = middle;
            } else {
                excessive = middle;
            }
        }
        most = fitting;
    }
    (most > 0).then(|| Change::ReduceMemory {
        claim: (*claim).to_owned(),
        request: name.clone(),
        mib: most,
    })
}

/// Returns the requests for an amount of memory, with the amounts.
fn memory_requests(claim: &ResourceClaim) -> impl Iterator<Item = (String, Quantity)> {
    let devices = claim.spec.iter().flat_map(|spec| &spec.devices);
    let requests = devices.flat_map(|devices| devices.requests.iter().flatten());
    requests.filter_map(|request| {
        let capacity = request.exactly.as_ref()?.capacity.as_ref()?;
        let amount = capacity.requests.as_ref()?.get(MEMORY)?;
        Some((request.name.clone(), amount.0.parse().ok()?))
    })
}

/// Replaces the amounts of memory that the claim requests.
fn set_memory(claim: &mut ResourceClaim, mib: u64) {
    let devices = claim.spec.iter_mut().flat_map(|spec| &mut spec.devices);
    let requests = devices.flat_map(|devices| devices.requests.iter_mut().flatten());
    let capacities = requests.filter_map(|request| {
        let capacity = request.exactly.as_mut()?.capacity.as_mut()?;
        capacity.requests.as_mut()?.get_mut(MEMORY)
    });
    for amount in capacities {
        amount.0 = format!("{mib}Mi");
    }
}

/// Pods with devices, and who uses each claim.
#[derive(Default)]
struct Holders {
    /// By UID.
    pods: BTreeMap<String, Ending>,
    /// UIDs of the pods that use a claim.
    consumers: BTreeMap<ObjectKey, BTreeSet<String>>,
    /// The claims that a pod uses, by its UID.
    claims: BTreeMap<String, Vec<ObjectKey>>,
    /// UIDs by node.
    by_node: BTreeMap<String, BTreeSet<String>>,
}

/// Returns sets of pods whose end makes room: the fewest pods first, then those of the lowest priority.
fn ended_pods(snapshot: &mut Snapshot, request: &PodRequest, policies: Policies) -> Vec<Change> {
    let holders = holders(snapshot, request);
    let mut trials = 0;
    let mut found: Vec<(String, BTreeSet<String>)> = Vec::new();
    for (node, uids) in &holders.by_node {
        if trials >= MAX_TRIALS {
            break;
        }
        let mut fits = |ended: &BTreeSet<String>| {
            trials += 1;
            if trials > MAX_TRIALS {
                return false;
            }
            let cluster = &mut snapshot.cluster;
            cluster.presume_gone(&holders.departure(ended));
            cluster.decide_on(node, request, policies).is_ok()
        };
        let single = uids
            .iter()
            .map(|uid| BTreeSet::from([uid.clone()]))
            .filter(|uid| fits(uid));
        let mut sets: Vec<BTreeSet<String>> = single.collect();
        if sets.is_empty() && fits(uids) {
            // Pods of high priority are kept first.
            let mut by_priority: Vec<&String> = uids.iter().collect();
            by_priority.sort_by_key(|uid| std::cmp::Reverse(holders.pods.get(*uid)));
            let mut set = uids.clone();
            for uid in by_priority {
                set.remove(uid);
                if !fits(&set) {
                    set.insert(uid.clone());
                }
            }
            sets.push(set);
        }
        found.extend(sets.into_iter().map(|set| (node.clone(), set)));
    }
    snapshot.cluster.presume_gone(&Departure::default());
    let mut endings: Vec<(usize, Vec<Ending>, String)> = found
        .into_iter()
        .map(|(node, uids)| {
            let mut pods: Vec<Ending> = uids
                .iter()
                .filter_map(|uid| holders.pods.get(uid).cloned())
                .collect();
            pods.sort_by(|a, b| b.cmp(a));
            (pods.len(), pods, node)
        })
        .collect();
    endings.sort();
    endings.truncate(MAX_ENDINGS);
    endings
        .into_iter()
        .map(|(_, pods, node)| Change::EndPods { node, pods })
        .collect()
}

fn holders(snapshot: &Snapshot, request: &PodRequest) -> Holders {
    let mut holders = Holders::default();
    let uid_of = |pod: &Pod| pod.metadata.uid.clone().unwrap_or_default();
    let pods = steps::counted(&snapshot.pods);
    let pods: BTreeMap<String, &Pod> = pods.map(|pod| (uid_of(pod), pod)).collect();
    for claim in steps::counted(&snapshot.claims) {
        let key = object_key(&claim.metadata);
        let nodes: BTreeSet<String> = snapshot.cluster.nodes_of(&key).map(str::to_owned).collect();
        if nodes.is_empty() {
            continue;
        }
        let users: Vec<&Pod> = users(claim, &pods);
        for pod in users.iter().filter(|pod| uid_of(pod) != request.uid) {
            let uid = uid_of(pod);
            for node in &nodes {
                let uids = holders.by_node.entry(node.clone()).or_default();
                uids.insert(uid.clone());
            }
            let (namespace, name) = object_key(&pod.metadata);
            let priority = pod.spec.as_ref().and_then(|spec| spec.priority);
            let ending = Ending {
                priority: priority.unwrap_or_default(),
                pod: format!("{namespace}/{name}"),
            };
            holders.pods.insert(uid.clone(), ending);
            let claims = holders.claims.entry(uid.clone()).or_default();
            claims.push(key.clone());
            holders
                .consumers
                .entry(key.clone())
                .or_default()
                .insert(uid);
        }
    }
    holders
}

/// Returns the pods that use a claim: those that have reserved it, or the one that the controller allocated it for. Without a
/// record of that pod, any that names the claim.
fn users<'a>(claim: &ResourceClaim, by_uid: &BTreeMap<String, &'a Pod>) -> Vec<&'a Pod> {
    let consumers = claim
        .status
        .iter()
        .flat_map(|status| status.reserved_for.iter().flatten());
    let reserved: Vec<&Pod> = consumers
        .filter_map(|consumer| by_uid.get(&consumer.uid).copied())
        .collect();
    if !reserved.is_empty() {
        return reserved;
    }
    if let Some(owner) = PlacementRecord::pod_uid(claim) {
        return by_uid.get(owner).copied().into_iter().collect();
    }
    let pods = steps::counted(by_uid.values().copied());
    pods.filter(|pod| names(pod, claim)).collect()
}

fn names(pod: &Pod, claim: &ResourceClaim) -> bool {
    let mut claims = pod_claims(pod);
    pod.metadata.namespace == claim.metadata.namespace
        && claims.any(|(_, name)| name.is_some() && name == claim.metadata.name.as_deref())
}

impl Holders {
    /// Returns what is free after the end of these pods: a claim is released when all pods that use it have ended.
    fn departure(&self, ended: &BTreeSet<String>) -> Departure {
        let claims = ended.iter().filter_map(|uid| self.claims.get(uid));
        let released = steps::counted(claims.flatten()).filter(|key| {
            let consumers = self.consumers.get(*key);
            consumers.is_some_and(|consumers| consumers.is_subset(ended))
        });
        Departure {
            claims: released.cloned().collect(),
            pods: ended.clone(),
            ..Departure::default()
        }
    }
}

/// Formats the changes after each of which a pod fits.
#[must_use]
pub fn changes_text(pod: &str, changes: &[Change]) -> String {
    if changes.is_empty() {
        return String::new();
    }
    let mut text = format!("\npod {pod} fits after one of these changes:\n");
    for change in changes {
        text.push_str(&format!("- {}\n", change.text()));
    }
    text
}

#[cfg(test)]
mod tests;
