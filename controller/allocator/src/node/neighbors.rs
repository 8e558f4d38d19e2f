//! Rules of pods about other pods: host ports, pod affinity and anti-affinity, and topology spread constraints. Those that
//! forbid are decided here, the others by [`super::preferences`]. The API server has merged `matchLabelKeys` into the selectors.
//!
//! Sources: the plugins NodePorts, InterPodAffinity and PodTopologySpread of kube-scheduler.

use std::collections::{BTreeMap, BTreeSet};

use drava_api::quota::labels_match;
use k8s_openapi::api::core::v1::{
    Pod, PodAffinityTerm, TopologySpreadConstraint, WeightedPodAffinityTerm,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::{NodeInfo, PodDemand};

/// Labels of the namespaces, by name.
pub type NamespaceLabels = BTreeMap<String, BTreeMap<String, String>>;

/// What a pod means to other pods.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Neighbor {
    namespace: String,
    labels: BTreeMap<String, String>,
    ports: Vec<HostPort>,
    /// Required anti-affinity, which pods that come later must respect, too; each term once.
    avoids: Vec<PodTerm>,
    /// Pods that come later are attracted by its affinity, or repelled with a negative weight.
    pub(super) prefers: Vec<(PodTerm, i64)>,
    is_terminating: bool,
}

/// Rules of a pod about the pods that are there before it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct NeighborRules {
    requires: Vec<PodTerm>,
    /// Preferred affinity, and with negative weights preferred anti-affinity.
    pub(super) prefers: Vec<(PodTerm, i64)>,
    spreads: Vec<TopologySpreadConstraint>,
}

/// Why a node is excluded by anti-affinity of the pod, or of another one.
pub(crate) const AVOIDED: &str = "pod anti-affinity excludes the node";

/// A port of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostPort {
    /// `None` is every address of the node: only 0.0.0.0 for kube-scheduler.
    address: Option<String>,
    protocol: String,
    port: i32,
}

impl HostPort {
    fn conflicts_with(&self, other: &Self) -> bool {
        let is_same_address =
            self.address.is_none() || other.address.is_none() || self.address == other.address;
        is_same_address && self.protocol == other.protocol && self.port == other.port
    }
}

/// A term of pod affinity or anti-affinity.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PodTerm {
    pub(super) topology_key: String,
    selector: Option<LabelSelector>,
    namespaces: BTreeSet<String>,
    namespace_selector: Option<LabelSelector>,
}

impl PodTerm {
    fn of(term: &PodAffinityTerm, namespace: &str) -> Self {
        let mut namespaces: BTreeSet<String> = term.namespaces.iter().flatten().cloned().collect();
        if namespaces.is_empty() && term.namespace_selector.is_none() {
            namespaces.insert(namespace.to_owned());
        }
        Self {
            topology_key: term.topology_key.clone(),
            selector: term.label_selector.clone(),
            namespaces,
            namespace_selector: term.namespace_selector.clone(),
        }
    }

    /// Returns the label of nodes that divides them into domains.
    pub(crate) fn topology_key(&self) -> &str {
        &self.topology_key
    }

    /// Returns the namespaces to which the term applies; `None` if a selector adds others.
    pub(crate) fn namespaces(&self) -> Option<&BTreeSet<String>> {
        let has_names_only = self.namespace_selector.is_none();
        has_names_only.then_some(&self.namespaces)
    }

    /// Returns whether the term is about the pod.
    pub(crate) fn matches(&self, pod: &Neighbor, namespaces: &NamespaceLabels) -> bool {
        let is_namespace = self.namespaces.contains(&pod.namespace)
            || self.namespace_selector.as_ref().is_some_and(|selector| {
                let none = BTreeMap::new();
                labels_match(selector, namespaces.get(&pod.namespace).unwrap_or(&none))
            });
        is_namespace && selects(self.selector.as_ref(), pod)
    }
}

/// A missing selector selects nothing, an empty one everything.
fn selects(selector: Option<&LabelSelector>, pod: &Neighbor) -> bool {
    selector.is_some_and(|selector| labels_match(selector, &pod.labels))
}

impl Neighbor {
    /// Reads a Pod object.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let affinity = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref());
        let avoids = affinity
            .and_then(|affinity| affinity.pod_anti_affinity.as_ref())
            .and_then(|terms| {
                terms
                    .required_during_scheduling_ignored_during_execution
                    .as_ref()
            });
        let mut distinct: Vec<PodTerm> = Vec::new();
        for term in avoids.into_iter().flatten() {
            let term = PodTerm::of(term, &namespace);
            if !distinct.contains(&term) {
                distinct.push(term);
            }
        }
        // Required affinity has the default weight of kube-scheduler for the pods that come later.
        let requires = required_affinity(pod, &namespace).map(|term| (term, 1));
        Self {
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            ports: host_ports(pod),
            avoids: distinct,
            prefers: requires
                .chain(preferred_affinity(pod, &namespace))
                .collect(),
            is_terminating: pod.metadata.deletion_timestamp.is_some(),
            namespace,
        }
    }

    /// Returns whether pods that come later are attracted or repelled by this one.
    pub(crate) const fn has_preferences(&self) -> bool {
        !self.prefers.is_empty()
    }

    /// Returns whether pods that come later must keep away from this one.
    pub(crate) const fn has_anti_affinity(&self) -> bool {
        !self.avoids.is_empty()
    }

    /// Returns the terms of required anti-affinity.
    pub(crate) fn avoids(&self) -> impl Iterator<Item = &PodTerm> {
        self.avoids.iter()
    }

    /// Returns the namespace of the pod.
    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }
}

impl NeighborRules {
    pub(super) fn of(pod: &Pod) -> Self {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let spec = pod.spec.as_ref();
        let spreads = spec.and_then(|spec| spec.topology_spread_constraints.as_ref());
        Self {
            requires: required_affinity(pod, &namespace).collect(),
            prefers: preferred_affinity(pod, &namespace).collect(),
            spreads: spreads.into_iter().flatten().cloned().collect(),
        }
    }

    /// Returns the topology spread constraints that forbid.
    fn spreads(&self) -> impl Iterator<Item = &TopologySpreadConstraint> {
        let spreads = self.spreads.iter();
        spreads.filter(|spread| spread.when_unsatisfiable == "DoNotSchedule")
    }

    /// Returns the topology spread constraints that do not forbid.
    pub(super) fn soft_spreads(&self) -> impl Iterator<Item = &TopologySpreadConstraint> {
        let spreads = self.spreads.iter();
        spreads.filter(|spread| spread.when_unsatisfiable == "ScheduleAnyway")
    }
}

fn required_affinity<'a>(pod: &'a Pod, namespace: &'a str) -> impl Iterator<Item = PodTerm> + 'a {
    let affinity = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref());
    let terms = affinity.and_then(|affinity| affinity.pod_affinity.as_ref());
    let terms = terms.and_then(|terms| {
        terms
            .required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let terms = terms.into_iter().flatten();
    terms.map(move |term| PodTerm::of(term, namespace))
}

/// Returns the terms of preferred affinity and anti-affinity, the latter with negative weights.
fn preferred_affinity<'a>(
    pod: &'a Pod,
    namespace: &'a str,
) -> impl Iterator<Item = (PodTerm, i64)> + 'a {
    let affinity = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref());
    let attract = affinity.and_then(|affinity| affinity.pod_affinity.as_ref());
    let attract = attract.and_then(|terms| {
        terms
            .preferred_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let repel = affinity.and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let repel = repel.and_then(|terms| {
        terms
            .preferred_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let weighted = move |sign: i64| {
        move |term: &WeightedPodAffinityTerm| {
            let weight = sign * i64::from(term.weight);
            (PodTerm::of(&term.pod_affinity_term, namespace), weight)
        }
    };
    let attract = attract.into_iter().flatten().map(weighted(1));
    attract.chain(repel.into_iter().flatten().map(weighted(-1)))
}

/// Returns whether a topology spread constraint of a pod counts another one. kube-scheduler counts no pod by a selector
/// without requirements.
pub(super) fn is_counted(
    spread: &TopologySpreadConstraint,
    pod: &Neighbor,
    other: &Neighbor,
) -> bool {
    let has_requirements = spread.label_selector.as_ref().is_some_and(|selector| {
        let labels = selector.match_labels.as_ref();
        let expressions = selector.match_expressions.as_ref();
        labels.is_some_and(|labels| !labels.is_empty())
            || expressions.is_some_and(|expressions| !expressions.is_empty())
    });
    has_requirements
        && !other.is_terminating
        && other.namespace == pod.namespace
        && selects(spread.label_selector.as_ref(), other)
}

/// Ports of the node that the containers and sidecars use.
fn host_ports(pod: &Pod) -> Vec<HostPort> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    let is_sidecar = |container: &&k8s_openapi::api::core::v1::Container| {
        container.restart_policy.as_deref() == Some("Always")
    };
    let init = spec.init_containers.iter().flatten().filter(is_sidecar);
    init.chain(&spec.containers)
        .flat_map(|container| container.ports.iter().flatten())
        .filter_map(|port| {
            let address = port.host_ip.clone();
            Some(HostPort {
                address: address.filter(|address| !["", "0.0.0.0"].contains(&&**address)),
                protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
                port: port.host_port.filter(|port| *port > 0)?,
            })
        })
        .collect()
}

/// The pods of the cluster and its nodes, as the rules of one pod see them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Surroundings<'a, P> {
    /// Nodes by name.
    pub(crate) nodes: &'a BTreeMap<String, NodeInfo>,
    /// The other pods with their nodes.
    pub(crate) pods: P,
    pub(crate) namespaces: &'a NamespaceLabels,
}

/// Nodes that the rules of a pod exclude.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Exclusions {
    /// Nodes on which a pod uses a host port of this one.
    ports: BTreeMap<String, i32>,
    /// Label keys and values of the nodes that the pod's anti-affinity excludes.
    avoided: BTreeSet<(String, String)>,
    /// Values of a label key that pod affinity requires. `None` requires the key only: the pod is the first one.
    required: Vec<(String, Option<BTreeSet<String>>)>,
    /// Values of a label key that a topology spread constraint allows.
    spread: Vec<(String, BTreeSet<String>)>,
}

impl PodDemand {
    /// Returns whether the pods around it decide where the pod can run.
    #[must_use]
    pub fn has_neighbor_rules(&self) -> bool {
        let Self {
            neighbor, rules, ..
        } = self;
        !neighbor.ports.is_empty()
            || neighbor.has_anti_affinity()
            || !rules.requires.is_empty()
            || rules.spreads().next().is_some()
    }

    /// Computes which nodes the rules of the pod exclude because of the pods around it.
    pub(crate) fn exclusions<'a>(
        &self,
        around: &Surroundings<'a, impl Iterator<Item = (&'a str, &'a Neighbor)> + Clone>,
    ) -> Exclusions {
        let value = |node: &str, key: &str| around.nodes.get(node)?.labels.get(key);
        let mut exclusions = Exclusions::default();
        let mut friends: Vec<&str> = Vec::new();
        for (node, other) in around.pods.clone() {
            let own = self.neighbor.ports.iter();
            let mut conflicts =
                own.filter(|port| other.ports.iter().any(|used| used.conflicts_with(port)));
            if let Some(port) = conflicts.next() {
                exclusions.ports.insert(node.to_owned(), port.port);
            }
            let avoided = self.neighbor.avoids.iter();
            for term in avoided.filter(|term| term.matches(other, around.namespaces)) {
                if let Some(value) = value(node, &term.topology_key) {
                    let domain = (term.topology_key.clone(), value.clone());
                    exclusions.avoided.insert(domain);
                }
            }
            let mut required = self.rules.requires.iter();
            if !self.rules.requires.is_empty()
                && required.all(|term| term.matches(other, around.namespaces))
            {
                // A node without any of the keys has no friends.
                let mut keys = self.rules.requires.iter().map(|term| &term.topology_key);
                if keys.any(|key| value(node, key).is_some()) {
                    friends.push(node);
                }
            }
        }
        let is_first = friends.is_empty()
            && (self.rules.requires.iter())
                .all(|term| term.matches(&self.neighbor, around.namespaces));
        exclusions.required = (self.rules.requires.iter())
            .map(|term| {
                let key = &term.topology_key;
                let values = friends.iter().filter_map(|node| value(node, key).cloned());
                (key.clone(), (!is_first).then(|| values.collect()))
            })
            .collect();
        exclusions.spread = (self.rules.spreads())
            .map(|spread| {
                let allowed = self.allowed(spread, around.nodes, around.pods.clone());
                (spread.topology_key.clone(), allowed)
            })
            .collect();
        exclusions
    }

    /// Returns whether the pods of a node count for a topology spread constraint.
    pub(super) fn includes(
        &self,
        spread: &TopologySpreadConstraint,
        name: &str,
        node: &NodeInfo,
    ) -> bool {
        let honors_taints = spread.node_taints_policy.as_deref() == Some("Honor");
        let honors_affinity = spread.node_affinity_policy.as_deref() != Some("Ignore");
        (!honors_affinity || node.is_selected(name, self).is_ok())
            && (!honors_taints || node.is_tolerated(self).is_ok())
    }

    /// Returns the values of the topology key where one more pod keeps the skew.
    fn allowed<'a>(
        &self,
        spread: &TopologySpreadConstraint,
        nodes: &'a BTreeMap<String, NodeInfo>,
        pods: impl Iterator<Item = (&'a str, &'a Neighbor)>,
    ) -> BTreeSet<String> {
        let has_all_keys = |node: &NodeInfo| {
            let mut keys = self.rules.spreads().map(|spread| &spread.topology_key);
            keys.all(|key| node.labels.contains_key(key))
        };
        let counts_node =
            |name: &str, node: &NodeInfo| has_all_keys(node) && self.includes(spread, name, node);
        let domains = nodes
            .iter()
            .filter(|(name, node)| counts_node(name, node))
            .filter_map(|(name, node)| {
                Some((
                    name.as_str(),
                    node.labels.get(&spread.topology_key)?.as_str(),
                ))
            });
        let domains: BTreeMap<&str, &str> = domains.collect();
        let mut counts: BTreeMap<&str, i64> = domains.values().map(|domain| (*domain, 0)).collect();
        for (node, other) in pods {
            if let Some(domain) = domains.get(node)
                && is_counted(spread, &self.neighbor, other)
                && let Some(count) = counts.get_mut(domain)
            {
                *count += 1;
            }
        }
        let needed = spread.min_domains.and_then(|min| usize::try_from(min).ok());
        let fewest = if needed.is_some_and(|needed| counts.len() < needed) {
            0
        } else {
            counts.values().copied().min().unwrap_or_default()
        };
        let own = i64::from(selects(spread.label_selector.as_ref(), &self.neighbor));
        counts
            .into_iter()
            .filter(|(_, count)| count + own - fewest <= i64::from(spread.max_skew))
            .map(|(domain, _)| domain.to_owned())
            .collect()
    }
}

impl Exclusions {
    /// Checks whether the pods of the cluster allow the pod on a node.
    ///
    /// # Errors
    /// The first obstacle.
    pub(crate) fn admit(&self, name: &str, node: &NodeInfo) -> Result<(), String> {
        if let Some(port) = self.ports.get(name) {
            return Err(format!("host port {port} is in use"));
        }
        let has = |(key, value): &(String, String)| node.labels.get(key) == Some(value);
        if self.avoided.iter().any(has) {
            return Err(AVOIDED.to_owned());
        }
        let has_one_of = |key: &String, values: Option<&BTreeSet<String>>| {
            let value = node.labels.get(key);
            value.is_some_and(|value| values.is_none_or(|values| values.contains(value)))
        };
        let mut required = self.required.iter();
        if !required.all(|(key, values)| has_one_of(key, values.as_ref())) {
            return Err("pod affinity does not match".to_owned());
        }
        let mut spread = self.spread.iter();
        match spread.find(|(key, values)| !has_one_of(key, Some(values))) {
            Some((key, _)) => Err(format!(
                "topology spread over {key} does not allow the node"
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
