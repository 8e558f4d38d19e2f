//! Preferences between nodes: preferred node affinity, preferred pod affinity and anti-affinity of the pod and of those around
//! it, topology spread that does not forbid, and taints with the effect PreferNoSchedule.
//!
//! Scores and weights are those of kube-scheduler: plugins NodeAffinity, InterPodAffinity, PodTopologySpread and TaintToleration
//! with their default settings. Its default constraints for pods without a topology spread are left out: they need the
//! Services and owners of the pod.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::TopologySpreadConstraint;

use super::neighbors::{Neighbor, Surroundings, is_counted};
use super::{NodeInfo, PodDemand};

/// Highest score of a plugin.
const MAX_SCORE: i64 = 100;
const TAINT_WEIGHT: i64 = 3;
const NODE_AFFINITY_WEIGHT: i64 = 2;
const POD_AFFINITY_WEIGHT: i64 = 2;
const SPREAD_WEIGHT: i64 = 2;

/// Label of the node's own name.
const HOSTNAME: &str = "kubernetes.io/hostname";

/// What the pods around a pod mean to its preferences.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Preferences {
    /// Sum of the weights of pods that attract or repel, by label of their node.
    attraction: BTreeMap<(String, String), i64>,
    spreads: Vec<SoftSpread>,
}

/// A topology spread constraint that does not forbid.
#[derive(Debug, PartialEq)]
struct SoftSpread {
    topology_key: String,
    max_skew: i32,
    /// Counted pods by value of the key; by name of the node for [`HOSTNAME`].
    counts: BTreeMap<String, i64>,
}

impl NodeInfo {
    /// Returns whether pods without a toleration should avoid the node.
    pub(crate) fn has_soft_taints(&self) -> bool {
        self.taints
            .iter()
            .any(|taint| taint.effect == "PreferNoSchedule")
    }

    fn soft_taints(&self, pod: &PodDemand) -> i64 {
        let taints = self.taints.iter();
        let soft =
            taints.filter(|taint| taint.effect == "PreferNoSchedule" && !pod.tolerates(taint));
        i64::try_from(soft.count()).unwrap_or(i64::MAX)
    }
}

impl PodDemand {
    /// Returns whether the pod has preferences about other pods.
    pub(crate) fn has_neighbor_preferences(&self) -> bool {
        !self.rules.prefers.is_empty() || self.rules.soft_spreads().next().is_some()
    }

    /// Returns whether the pod prefers nodes by their labels.
    pub(crate) fn has_node_preferences(&self) -> bool {
        !self.preferred_affinity.is_empty()
    }

    /// Computes what the pods around it mean to the preferences of this one.
    pub(crate) fn preferences<'a>(
        &self,
        around: &Surroundings<'a, impl Iterator<Item = (&'a str, &'a Neighbor)> + Clone>,
    ) -> Preferences {
        let nodes = around.nodes;
        let mut attraction: BTreeMap<(String, String), i64> = BTreeMap::new();
        for (node, other) in around.pods.clone() {
            let own = self.rules.prefers.iter();
            let own = own.filter(|(term, _)| term.matches(other, around.namespaces));
            let of_other = other.prefers.iter();
            let of_other =
                of_other.filter(|(term, _)| term.matches(&self.neighbor, around.namespaces));
            for (term, weight) in own.chain(of_other) {
                let node = nodes.get(node);
                if let Some(value) = node.and_then(|node| node.labels.get(&term.topology_key)) {
                    let domain = (term.topology_key.clone(), value.clone());
                    *attraction.entry(domain).or_default() += *weight;
                }
            }
        }
        let spreads = self.rules.soft_spreads();
        let spreads = spreads.map(|spread| self.soft_spread(spread, nodes, around.pods.clone()));
        Preferences {
            attraction,
            spreads: spreads.collect(),
        }
    }

    fn soft_spread<'a>(
        &self,
        spread: &TopologySpreadConstraint,
        nodes: &'a BTreeMap<String, NodeInfo>,
        pods: impl Iterator<Item = (&'a str, &'a Neighbor)>,
    ) -> SoftSpread {
        let key = &spread.topology_key;
        let mut counts: BTreeMap<String, i64> = BTreeMap::new();
        for (name, _) in pods.filter(|(_, other)| is_counted(spread, &self.neighbor, other)) {
            let Some(node) = nodes.get(name) else {
                continue;
            };
            // The pods of a node count for it in any case.
            let domain = match key.as_str() {
                HOSTNAME => Some(name),
                _ if !self.has_soft_keys(node) || !self.includes(spread, name, node) => None,
                _ => node.label(key),
            };
            if let Some(domain) = domain {
                *counts.entry(domain.to_owned()).or_default() += 1;
            }
        }
        SoftSpread {
            topology_key: key.clone(),
            max_skew: spread.max_skew,
            counts,
        }
    }

    fn has_soft_keys(&self, node: &NodeInfo) -> bool {
        let mut spreads = self.rules.soft_spreads();
        spreads.all(|spread| node.labels.contains_key(&spread.topology_key))
    }

    /// Returns the score of each of the nodes on which the pod fits.
    pub(crate) fn node_scores(
        &self,
        preferences: &Preferences,
        nodes: &[(&str, &NodeInfo)],
    ) -> Vec<i64> {
        let taints = nodes.iter().map(|(_, node)| node.soft_taints(self));
        let taints = by_highest(taints.collect());
        let affinity = nodes.iter().map(|(name, node)| {
            let terms = self.preferred_affinity.iter();
            let preferred = terms.filter(|term| node.satisfies(name, &term.preference));
            preferred.map(|term| i64::from(term.weight)).sum()
        });
        let affinity = by_highest(affinity.collect());
        let attraction = nodes.iter().map(|(_, node)| {
            let domains = preferences.attraction.iter();
            let of_node = domains.filter(|((key, value), _)| node.label(key) == Some(value));
            of_node.map(|(_, weight)| *weight).sum()
        });
        let attraction = between_extremes(attraction.collect());
        let spread = self.spread_scores(preferences, nodes);
        (taints.into_iter().zip(affinity).zip(attraction).zip(spread))
            .map(|(((taints, affinity), attraction), spread)| {
                TAINT_WEIGHT * (MAX_SCORE - taints)
                    + NODE_AFFINITY_WEIGHT * affinity
                    + POD_AFFINITY_WEIGHT * attraction
                    + SPREAD_WEIGHT * spread
            })
            .collect()
    }

    fn spread_scores(&self, preferences: &Preferences, nodes: &[(&str, &NodeInfo)]) -> Vec<i64> {
        if preferences.spreads.is_empty() {
            return vec![0; nodes.len()];
        }
        let scored = |node: &NodeInfo| self.has_soft_keys(node);
        let number = nodes.iter().filter(|(_, node)| scored(node)).count();
        let weights = preferences.spreads.iter().map(|spread| {
            let domains = nodes.iter().filter(|(_, node)| scored(node));
            let domains = domains.filter_map(|(_, node)| node.label(&spread.topology_key));
            let size = match spread.topology_key.as_str() {
                HOSTNAME => number,
                _ => domains.collect::<BTreeSet<_>>().len(),
            };
            size_weight(size)
        });
        let weights: Vec<f64> = weights.collect();
        let raw = nodes.iter().map(|(name, node)| {
            scored(node).then(|| {
                let spreads = preferences.spreads.iter().zip(&weights);
                let sum: f64 = spreads
                    .map(|(spread, weight)| {
                        let domain = match spread.topology_key.as_str() {
                            HOSTNAME => Some(*name),
                            key => node.label(key),
                        };
                        let count = domain.and_then(|domain| spread.counts.get(domain));
                        float(count.copied().unwrap_or_default()) * weight
                            + f64::from(spread.max_skew - 1)
                    })
                    .sum();
                rounded(sum)
            })
        });
        let raw: Vec<Option<i64>> = raw.collect();
        let (lowest, highest) = extremes(raw.iter().copied().flatten());
        raw.into_iter()
            .map(|raw| match raw {
                None => 0,
                Some(_) if highest == 0 => MAX_SCORE,
                Some(raw) => MAX_SCORE * (highest + lowest - raw) / highest,
            })
            .collect()
    }
}

impl Preferences {
    /// Returns whether the pods around prefer no node.
    pub(crate) fn is_empty(&self) -> bool {
        self.attraction.is_empty() && self.spreads.is_empty()
    }
}

/// Returns the weight of a constraint with this number of domains: the larger it is, the more one pod counts.
fn size_weight(size: usize) -> f64 {
    float(i64::try_from(size + 2).unwrap_or(i64::MAX)).ln()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of pods and nodes are small"
)]
fn float(value: i64) -> f64 {
    value as f64
}

#[expect(clippy::cast_possible_truncation, reason = "saturates")]
fn rounded(value: f64) -> i64 {
    value.round() as i64
}

fn extremes(values: impl Iterator<Item = i64> + Clone) -> (i64, i64) {
    let lowest = values.clone().min().unwrap_or_default();
    (lowest, values.max().unwrap_or_default())
}

/// Returns the values as fractions of the highest one.
fn by_highest(values: Vec<i64>) -> Vec<i64> {
    let (_, highest) = extremes(values.iter().copied());
    let fraction = |value: i64| (MAX_SCORE * value).checked_div(highest).unwrap_or_default();
    values.into_iter().map(fraction).collect()
}

/// Returns the values as fractions of the range between the lowest and the highest one.
fn between_extremes(values: Vec<i64>) -> Vec<i64> {
    let (lowest, highest) = extremes(values.iter().copied());
    let range = float(highest - lowest);
    let fraction = |value: i64| match highest > lowest {
        true => truncated(float(MAX_SCORE) * (float(value - lowest) / range)),
        false => 0,
    };
    values.into_iter().map(fraction).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "a score up to 100")]
fn truncated(score: f64) -> i64 {
    score as i64
}
