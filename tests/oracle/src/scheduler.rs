//! Differential test of what a pod finds on a node apart from devices, against the plugins of kube-scheduler.
//!
//! Each case is a small cluster with bound pods and a pending one. The pod must fit on the same nodes, and the nodes must have
//! the same scores: those of the plugins NodeAffinity, TaintToleration, PodTopologySpread and InterPodAffinity, with their
//! default weights.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context as _, Result, bail};
use drava_allocator::cluster::Cluster;
use drava_allocator::placement::Policies;
use drava_allocator::pod_request::PodRequest;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::{Quantity, quota};
use drava_cluster::Kubernetes;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::batch::Range;
use crate::program::Program;

pub mod generator;

/// What a case concentrates on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Taints, labels, resources, and resizes in place.
    NodeFit,
    /// Host ports, pod affinity, anti-affinity, topology spread.
    Neighbors,
    /// Volumes with node affinity and zone labels.
    Volumes,
    /// Preferences of the pod and of those around it.
    Scores,
}

/// A cluster and a pending pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Case {
    nodes: Vec<Node>,
    namespaces: Vec<Namespace>,
    bound: Vec<Pod>,
    volume_claims: Vec<PersistentVolumeClaim>,
    volumes: Vec<PersistentVolume>,
    storage_classes: Vec<StorageClass>,
    pod: Pod,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Answer {
    nodes: BTreeMap<String, Verdict>,
    quantities: Vec<Option<String>>,
    selected: Vec<bool>,
    error: String,
}

/// Verdict of kube-scheduler on a node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Verdict {
    rejection: String,
    score: i64,
    scores: BTreeMap<String, i64>,
}

/// What a batch has found.
#[derive(Debug, Default)]
pub struct Report {
    /// Nodes that both admit.
    pub admitted: u64,
    /// Nodes that neither admits.
    pub rejected: u64,
    /// Cases with a choice between nodes of different scores.
    pub choices: u64,
    /// Differences, with the index of the case.
    pub differences: Vec<(u64, String)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            admitted,
            rejected,
            choices,
            differences,
        } = self;
        write!(
            f,
            "{admitted} nodes admitted, {rejected} rejected, {choices} choices, {} different",
            differences.len()
        )
    }
}

/// Starts the program.
///
/// # Errors
/// When it cannot be built or started.
pub fn program() -> Result<Program> {
    Program::start_of("scheduler", "scheduler", Kubernetes::V1_37)
}

/// Compares the cases of a range.
///
/// # Errors
/// When the program cannot be started or fails.
pub fn run(class: Class, range: Range) -> Result<Report> {
    let mut program = program()?;
    let mut report = Report::default();
    for index in range.first..range.first + range.cases {
        let json = generator::case(range.seed, class, index);
        program.send(&json)?;
        let case: Case = serde_json::from_value(json.clone())
            .with_context(|| format!("parse case {index}: {json}"))?;
        let answer: Answer = program.receive_as()?;
        if !answer.error.is_empty() {
            bail!("case {index}: {}: {json}", answer.error);
        }
        compare(&case, &answer, index, &mut report);
    }
    Ok(report)
}

fn compare(case: &Case, answer: &Answer, index: u64, report: &mut Report) {
    let cluster = cluster(case);
    let request = PodRequest::new(&case.pod, &[], &cluster.classes, &cluster.selectors);
    let Ok(request) = request else {
        return;
    };
    let policies = Policies {
        node: NodePlacementPolicy::Binpack,
        gpu: GpuPlacementPolicy::Binpack,
    };
    let mut differ = |text: String| report.differences.push((index, text));
    let mut best: Option<i64> = None;
    let mut lowest = i64::MAX;
    for (name, verdict) in &answer.nodes {
        let ours = cluster.decide_on(name, &request, policies);
        match (ours, verdict.rejection.is_empty()) {
            (Ok(_), true) => {
                report.admitted += 1;
                best = best.max(Some(verdict.score));
                lowest = lowest.min(verdict.score);
            }
            (Err(_), false) => report.rejected += 1,
            (Ok(_), false) => differ(format!("{name}: only ours admits: {verdict:?}")),
            (Err(why), true) => differ(format!("{name}: only ours rejects: {}", why.summary())),
        }
    }
    let Some(best) = best else {
        return;
    };
    let Ok(placement) = cluster.decide(&request, policies) else {
        return;
    };
    if lowest < best {
        report.choices += 1;
    }
    let chosen = answer.nodes.get(&placement.node);
    let ranking = &placement.ranking;
    let ours = std::iter::once((&placement.node, ranking.score.preference));
    let second = ranking.runner_up.as_ref();
    let ours = ours.chain(second.map(|node| (&node.node, node.score.preference)));
    if chosen.is_none_or(|chosen| chosen.score != best) {
        differ(format!(
            "ours chooses {}, best is {best}: {:?}",
            placement.node, answer.nodes
        ));
    }
    // Without any preference ours has no score.
    let has_scores = ours.clone().any(|(_, score)| score != 0);
    for (name, score) in ours.filter(|_| has_scores) {
        let theirs = answer.nodes.get(name).map(|verdict| verdict.score);
        if theirs != Some(score) {
            differ(format!("{name}: score {score}, {:?}", answer.nodes));
        }
    }
}

fn cluster(case: &Case) -> Cluster {
    let mut cluster = Cluster::default();
    for node in &case.nodes {
        cluster.upsert_node(node);
    }
    for namespace in &case.namespaces {
        cluster.upsert_namespace(namespace);
    }
    for pod in &case.bound {
        cluster.upsert_pod(pod);
    }
    for claim in &case.volume_claims {
        cluster.upsert_volume_claim(claim);
    }
    for volume in &case.volumes {
        cluster.upsert_volume(volume);
    }
    for class in &case.storage_classes {
        cluster.upsert_storage_class(class);
    }
    cluster
}

/// Compares the reading of quantities. Returns the differences; ours refuses what is beyond its range and a point alone.
///
/// # Errors
/// When the program fails.
pub fn quantities(program: &mut Program, texts: &[String]) -> Result<Vec<String>> {
    program.send(&json!({"quantities": texts}))?;
    let answer: Answer = program.receive_as()?;
    let nano = |decimal: &str| -> Option<i128> {
        let (sign, digits) = match decimal.strip_prefix('-') {
            Some(digits) => (-1, digits),
            None => (1, decimal),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let fraction = fraction.trim_end_matches('0');
        let digits = format!("{whole}{fraction:0<9}");
        (fraction.len() <= 9).then_some(())?;
        digits.parse::<i128>().ok().map(|value| sign * value)
    };
    let compared = texts.iter().zip(&answer.quantities);
    let differences = compared.filter_map(|(text, theirs)| {
        let ours = text.parse::<Quantity>().ok().map(Quantity::nano);
        let theirs_nano = theirs.as_deref().and_then(nano);
        // Kubernetes takes what is beyond its range for the nearest number in it.
        let is_nearest = theirs
            .as_deref()
            .is_some_and(|theirs| theirs.trim_start_matches('-') == i64::MAX.to_string());
        let is_limit = ours.is_none() && (is_nearest || theirs_nano.is_none());
        let is_point = text.trim_start_matches(['+', '-']).starts_with('.')
            && !text.contains(|c: char| c.is_ascii_digit());
        (ours != theirs_nano && !is_limit && !is_point)
            .then(|| format!("{text:?}: ours {ours:?}, theirs {theirs:?}"))
    });
    Ok(differences.collect())
}

/// Compares a label selector on sets of labels. Returns the difference.
///
/// # Errors
/// When the program fails.
pub fn selector(
    program: &mut Program,
    selector: &Value,
    labels: &[BTreeMap<String, String>],
) -> Result<Option<String>> {
    program.send(&json!({"selector": selector, "labels": labels}))?;
    let answer: Answer = program.receive_as()?;
    // Kubernetes refuses selectors with unknown operators; the API server stores none.
    if !answer.error.is_empty() {
        return Ok(None);
    }
    let parsed: LabelSelector =
        serde_json::from_value(selector.clone()).context("parse the selector")?;
    let ours = labels
        .iter()
        .map(|labels| quota::labels_match(&parsed, labels));
    let ours: Vec<bool> = ours.collect();
    Ok((ours != answer.selected).then(|| {
        format!(
            "{selector} on {labels:?}: ours {ours:?}, theirs {:?}",
            answer.selected
        )
    }))
}
