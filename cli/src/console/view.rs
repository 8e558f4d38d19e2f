//! What the console shows: a pure function of the cluster's state.
//!
//! The page draws this model: it filters and groups, and computes ages and text. Amounts are allocations, as in
//! `kubectl drava top`; claims have what they use beside.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;

use crate::measured::Use;
use crate::natural;
use crate::quota;
use crate::tenant::{self, OwnGpu};
use crate::top::{self, Access, AllocatedAmount, Gpu, Mode, TaintKind};
use drava_explanation::explain::Settings;
use drava_explanation::snapshot::Snapshot;

mod queue;

use queue::{QueuedPod, ReasonCount};

/// Model of the page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct View {
    totals: Totals,
    /// Nodes with GPUs, by name; numbers in names count as numbers.
    nodes: Vec<Node>,
    /// Namespaces with GPUs or pending pods, by name.
    tenants: Vec<Tenant>,
    /// Unbound pods with requests for GPUs, the oldest first.
    queue: Vec<QueuedPod>,
    /// Reasons of the queue, the most frequent first.
    reasons: Vec<ReasonCount>,
    quotas: Vec<quota::Report>,
    /// GPUs of the claims, if ResourceSlices cannot be read.
    own: Vec<OwnGpu>,
    limits: Limits,
    /// Faults of the connection, and what the controller does not publish.
    notices: Vec<String>,
}

/// What the user may not read, which the page must not show as missing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Limits {
    /// The namespace whose claims or pods alone are read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) namespace: Option<String>,
    /// Plural names of kinds that are not read.
    pub(super) hidden: BTreeSet<&'static str>,
    /// A sentence for each limit.
    pub(super) details: Vec<String>,
}

impl Limits {
    /// Plural name of the kind that publishes GPUs.
    pub(super) const SLICES: &str = "resourceslices";
}

/// Sums over the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Totals {
    nodes: usize,
    ready_nodes: usize,
    /// Number of GPUs by [`State`].
    gpus: BTreeMap<State, usize>,
    /// Bytes.
    memory: AllocatedAmount,
    /// Percent of the GPU time of one GPU.
    cores: AllocatedAmount,
    claims: usize,
}

/// What a GPU is drawn as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Whole,
    Shared,
    Partitioned,
    Free,
    /// Free, and reserved for a pod that waits.
    Reserved,
    /// A fault; claims may still have it.
    Unhealthy,
    /// Free, and excluded from allocation by `kubectl drava cordon` or another taint.
    Excluded,
}

/// A node with its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    name: String,
    condition: Condition,
    /// Why its GPUs are not allocated, if its pool is excluded.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    gpus: Vec<NodeGpu>,
}

/// Condition of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Condition {
    Ready,
    NotReady,
    Cordoned,
    /// The Node object does not exist or cannot be read.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct NodeGpu {
    state: State,
    #[serde(flatten)]
    gpu: Gpu,
}

/// What a namespace has.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Tenant {
    namespace: String,
    whole: usize,
    shares: usize,
    partitions: usize,
    /// Bytes.
    memory: u64,
    /// Percent of the GPU time of one GPU.
    cores: u64,
    /// Pods with GPUs.
    pods: usize,
    pending: usize,
    /// Names of the GpuQuotas of the namespace.
    quotas: Vec<String>,
}

/// Returns the model of the page. Without the settings of decisions, pending pods have the reasons of the controller.
pub(super) fn view(
    snapshot: &Snapshot,
    measured: &Use,
    settings: Option<&Settings>,
    limits: Limits,
    mut notices: Vec<String>,
) -> View {
    notices.extend(snapshot.omission());
    let mut gpus = top::gpus(snapshot);
    measured.add_to(&mut gpus);
    let own = if limits.hidden.contains(Limits::SLICES) {
        tenant::gpus_of(&snapshot.claims)
    } else {
        Vec::new()
    };
    let queue = queue::queue(snapshot, settings);
    let quotas = quota::all(snapshot);
    let tenants = tenants(&held(&gpus, &own), &queue, &quotas);
    let nodes = nodes(snapshot, gpus);
    View {
        totals: totals(&nodes),
        reasons: queue::reasons(&queue),
        own,
        limits,
        notices,
        nodes,
        tenants,
        queue,
        quotas,
    }
}

fn nodes(snapshot: &Snapshot, gpus: Vec<Gpu>) -> Vec<Node> {
    let empty = |name: &str| Node {
        name: name.to_owned(),
        condition: condition(snapshot, name),
        problem: None,
        gpus: Vec::new(),
    };
    let mut nodes: BTreeMap<String, Node> = BTreeMap::new();
    for gpu in gpus {
        let node = nodes
            .entry(gpu.node.clone())
            .or_insert_with(|| empty(&gpu.node));
        let state = state(&gpu);
        node.gpus.push(NodeGpu { state, gpu });
    }
    for (pool, node, problem) in snapshot.cluster.excluded_pools() {
        let name = node.unwrap_or(pool);
        let node = nodes.entry(name.to_owned()).or_insert_with(|| empty(name));
        node.problem = Some(format!(
            "pool {pool} is excluded from allocation: {problem}"
        ));
    }
    let mut nodes: Vec<Node> = nodes.into_values().collect();
    nodes.sort_by(|one, other| natural::compare(&one.name, &other.name));
    nodes
}

fn condition(snapshot: &Snapshot, node: &str) -> Condition {
    match snapshot.cluster.node(node) {
        None => Condition::Unknown,
        Some(node) if !node.is_ready() => Condition::NotReady,
        Some(node) if node.is_cordoned() => Condition::Cordoned,
        Some(_) => Condition::Ready,
    }
}

fn state(gpu: &Gpu) -> State {
    let mut taints = gpu.taints.iter().filter(|taint| taint.is_whole_gpu);
    if taints.any(|taint| taint.kind == TaintKind::Unhealthy) {
        return State::Unhealthy;
    }
    match gpu.mode {
        Mode::Whole => State::Whole,
        Mode::Shared => State::Shared,
        Mode::Partitioned => State::Partitioned,
        Mode::Free if gpu.taints.iter().any(|taint| taint.is_whole_gpu) => State::Excluded,
        Mode::Free if !gpu.reserved.is_empty() => State::Reserved,
        Mode::Free => State::Free,
    }
}

fn totals(nodes: &[Node]) -> Totals {
    let mut totals = Totals {
        nodes: nodes.len(),
        ready_nodes: nodes
            .iter()
            .filter(|node| node.condition == Condition::Ready)
            .count(),
        ..Totals::default()
    };
    let mut claims = BTreeSet::new();
    for NodeGpu { state, gpu } in nodes.iter().flat_map(|node| &node.gpus) {
        *totals.gpus.entry(*state).or_default() += 1;
        totals.memory = totals.memory + gpu.memory;
        totals.cores = totals.cores + gpu.cores;
        claims.extend(gpu.claims.iter().map(|claim| claim.name.as_str()));
    }
    totals.claims = claims.len();
    totals
}

/// What a claim has of a GPU.
struct Held<'a> {
    namespace: &'a str,
    access: Access,
    /// Bytes; 0 if only the GPU says it.
    memory: u64,
    /// Percent of the GPU time of one GPU.
    cores: u64,
    pods: &'a [String],
}

/// Returns what claims have of all GPUs, or of those that their claims name.
fn held<'a>(gpus: &'a [Gpu], own: &'a [OwnGpu]) -> Vec<Held<'a>> {
    let of_gpus = gpus.iter().flat_map(|gpu| &gpu.claims).map(|claim| Held {
        namespace: &claim.namespace,
        access: claim.access,
        memory: claim.memory,
        cores: claim.cores,
        pods: &claim.pods,
    });
    let of_own = own.iter().flat_map(|gpu| &gpu.claims).map(|claim| Held {
        namespace: &claim.namespace,
        access: claim.access,
        memory: claim.memory.unwrap_or_default(),
        cores: claim.cores.unwrap_or_default(),
        pods: &claim.pods,
    });
    of_gpus.chain(of_own).collect()
}

fn tenants(held: &[Held<'_>], queue: &[QueuedPod], quotas: &[quota::Report]) -> Vec<Tenant> {
    let mut tenants: BTreeMap<&str, (Tenant, BTreeSet<&str>)> = BTreeMap::new();
    for claim in held {
        let (tenant, pods) = tenants.entry(claim.namespace).or_default();
        match claim.access {
            Access::Whole => tenant.whole += 1,
            Access::Share | Access::Suspended => tenant.shares += 1,
            Access::Partition => tenant.partitions += 1,
        }
        tenant.memory += claim.memory;
        tenant.cores += claim.cores;
        pods.extend(claim.pods.iter().map(String::as_str));
    }
    for pod in queue {
        tenants.entry(&pod.namespace).or_default().0.pending += 1;
    }
    tenants
        .into_iter()
        .map(|(namespace, (tenant, pods))| Tenant {
            namespace: namespace.to_owned(),
            pods: pods.len(),
            quotas: quotas
                .iter()
                .filter(|quota| quota.covers(namespace))
                .map(|quota| quota.quota.clone())
                .collect(),
            ..tenant
        })
        .collect()
}

/// Returns whether all containers of the pod have terminated, or the pod is bound.
fn is_settled(pod: &Pod) -> bool {
    drava_allocator::cluster::is_finished(pod) || drava_allocator::pod::node(pod).is_some()
}

#[cfg(test)]
mod tests;
