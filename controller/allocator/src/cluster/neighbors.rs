//! The pods around a pending one: which nodes they exclude, and which it prefers because of them.
//!
//! Pods of a workload have equal rules, so the anti-affinity of others is kept by term, each with the domains that its pods
//! occupy: a decision looks at the terms about the pod's namespace, not at the pods. The rules of the pod itself are about any
//! pods, and need a walk over those of the cluster.

use std::collections::BTreeMap;

use super::{Cluster, PodAssignment};
use crate::node::neighbors::{AVOIDED, Exclusions, Neighbor, PodTerm, Surroundings};
use crate::node::preferences::Preferences;
use crate::node::{NodeInfo, PodDemand};
use crate::steps;

/// Required anti-affinity of the pods of the cluster, which pods that come later must respect.
#[derive(Debug, Default)]
pub(super) struct AntiAffinity {
    /// The terms that name the namespaces to which they apply, by namespace.
    by_namespace: BTreeMap<String, Vec<Avoiding>>,
    /// The terms with a selector of namespaces.
    of_selectors: Vec<Avoiding>,
}

/// A term with the pods that have it.
#[derive(Debug)]
struct Avoiding {
    term: PodTerm,
    /// Number of its pods by node.
    nodes: BTreeMap<String, usize>,
    /// Number of its pods by domain.
    domains: BTreeMap<String, usize>,
}

impl AntiAffinity {
    /// Returns the lists of terms in which a term is.
    fn lists(&mut self, term: &PodTerm) -> Vec<&mut Vec<Avoiding>> {
        let Some(namespaces) = term.namespaces() else {
            return vec![&mut self.of_selectors];
        };
        for namespace in namespaces {
            self.by_namespace.entry(namespace.clone()).or_default();
        }
        let lists = self.by_namespace.iter_mut();
        let of_term = lists.filter(|(namespace, _)| namespaces.contains(*namespace));
        of_term.map(|(_, list)| list).collect()
    }

    /// Adds a pod on a node.
    pub(super) fn add(&mut self, pod: &Neighbor, node: &str, info: Option<&NodeInfo>) {
        for term in pod.avoids() {
            for list in self.lists(term) {
                let known = list.iter().position(|known| known.term == *term);
                let index = known.unwrap_or(list.len());
                if known.is_none() {
                    list.push(Avoiding {
                        term: term.clone(),
                        nodes: BTreeMap::new(),
                        domains: BTreeMap::new(),
                    });
                }
                if let Some(avoiding) = list.get_mut(index) {
                    *avoiding.nodes.entry(node.to_owned()).or_default() += 1;
                    let domain = avoiding.domain(info).map(str::to_owned);
                    avoiding.count_in(domain, |pods| pods + 1);
                }
            }
        }
    }

    /// Removes a pod from a node.
    pub(super) fn remove(&mut self, pod: &Neighbor, node: &str, info: Option<&NodeInfo>) {
        for term in pod.avoids() {
            for list in self.lists(term) {
                let Some(avoiding) = list.iter_mut().find(|known| known.term == *term) else {
                    continue;
                };
                if let Some(pods) = avoiding.nodes.get_mut(node) {
                    *pods = pods.saturating_sub(1);
                    if *pods == 0 {
                        avoiding.nodes.remove(node);
                    }
                }
                let domain = avoiding.domain(info).map(str::to_owned);
                avoiding.count_in(domain, |pods| pods.saturating_sub(1));
                list.retain(|avoiding| !avoiding.nodes.is_empty());
            }
        }
        self.by_namespace.retain(|_, list| !list.is_empty());
    }

    /// A node is in other domains than before.
    pub(super) fn relabel(
        &mut self,
        node: &str,
        before: Option<&NodeInfo>,
        after: Option<&NodeInfo>,
    ) {
        let lists = self.by_namespace.values_mut();
        let lists = lists.chain(std::iter::once(&mut self.of_selectors));
        for avoiding in lists.flatten() {
            let Some(moved) = avoiding.nodes.get(node).copied() else {
                continue;
            };
            let domain = avoiding.domain(before).map(str::to_owned);
            avoiding.count_in(domain, |pods| pods.saturating_sub(moved));
            let domain = avoiding.domain(after).map(str::to_owned);
            avoiding.count_in(domain, |pods| pods + moved);
        }
    }

    /// Returns the terms about a pod.
    fn about<'a>(
        &'a self,
        pod: &'a Neighbor,
        cluster: &'a Cluster,
    ) -> impl Iterator<Item = &'a Avoiding> {
        let named = self.by_namespace.get(pod.namespace()).into_iter().flatten();
        let namespaces = cluster.quotas.namespace_labels();
        let all = steps::counted(named.chain(&self.of_selectors));
        all.filter(move |avoiding| avoiding.term.matches(pod, namespaces))
    }
}

impl Avoiding {
    fn domain<'n>(&self, node: Option<&'n NodeInfo>) -> Option<&'n str> {
        node?.label(self.term.topology_key())
    }

    fn count_in(&mut self, domain: Option<String>, change: impl Fn(usize) -> usize) {
        let Some(domain) = domain else { return };
        let pods = self.domains.entry(domain.clone()).or_default();
        *pods = change(*pods);
        if *pods == 0 {
            self.domains.remove(&domain);
        }
    }
}

/// Nodes that the pods of the cluster exclude for a pod.
#[derive(Debug, Default)]
pub(crate) struct NeighborLimits<'a> {
    own: Exclusions,
    /// The terms of others about the pod, each with the number of pods by domain that do not count: those that are presumed
    /// gone, and the pod itself.
    of_others: Vec<(&'a Avoiding, BTreeMap<&'a str, usize>)>,
}

impl NeighborLimits<'_> {
    /// Checks whether the pods of the cluster allow the pod on a node.
    ///
    /// # Errors
    /// The first obstacle.
    pub(crate) fn admit(&self, name: &str, node: &NodeInfo) -> Result<(), String> {
        self.own.admit(name, node)?;
        let mut of_others = self.of_others.iter();
        let is_avoided = of_others.any(|(avoiding, gone)| {
            let domain = avoiding.domain(Some(node));
            domain.is_some_and(|domain| {
                let gone = gone.get(domain).copied().unwrap_or_default();
                avoiding
                    .domains
                    .get(domain)
                    .is_some_and(|pods| *pods > gone)
            })
        });
        match is_avoided {
            true => Err(AVOIDED.to_owned()),
            false => Ok(()),
        }
    }
}

impl Cluster {
    /// Returns which nodes the other pods exclude for a pod.
    pub(crate) fn neighbor_limits<'a>(
        &'a self,
        uid: &'a str,
        demand: &'a PodDemand,
    ) -> NeighborLimits<'a> {
        let own = match demand.has_neighbor_rules() {
            true => demand.exclusions(&Surroundings {
                nodes: &self.nodes,
                pods: self.others(uid, self.pods.iter()),
                namespaces: self.quotas.namespace_labels(),
            }),
            false => Exclusions::default(),
        };
        let avoiding = self.anti_affinity.about(&demand.neighbor, self);
        let of_others = avoiding.map(|avoiding| (avoiding, self.not_counted(uid, avoiding)));
        NeighborLimits {
            own,
            of_others: of_others.collect(),
        }
    }

    /// Returns the number of pods with a term, by domain, that do not count for the pod `uid`.
    fn not_counted<'a>(&'a self, uid: &'a str, of: &Avoiding) -> BTreeMap<&'a str, usize> {
        let mut domains = BTreeMap::new();
        let gone = self.gone.pods.iter().map(String::as_str);
        let gone = gone.filter(|gone| *gone != uid).chain([uid]);
        for pod in gone.filter_map(|uid| self.pods.get(uid)) {
            if pod.neighbor.avoids().any(|term| *term == of.term)
                && let Some(domain) = of.domain(self.nodes.get(&pod.node))
            {
                *domains.entry(domain).or_default() += 1;
            }
        }
        domains
    }

    /// Returns these pods with their nodes, without `uid` and those that are presumed gone.
    fn others<'a>(
        &'a self,
        uid: &'a str,
        pods: impl Iterator<Item = (&'a String, &'a PodAssignment)> + Clone,
    ) -> impl Iterator<Item = (&'a str, &'a Neighbor)> + Clone {
        let pods = pods.inspect(|_| steps::count(1));
        pods.filter(move |(other, _)| *other != uid && !self.gone.pods.contains(*other))
            .map(|(_, pod)| (pod.node.as_str(), &pod.neighbor))
    }

    /// Returns what the other pods mean to the preferences of a pod; `None` if it prefers no node to another one.
    pub(crate) fn preferences(&self, uid: &str, demand: &PodDemand) -> Option<Preferences> {
        let by_neighbors = match (
            demand.has_neighbor_preferences(),
            self.with_preferences.is_empty(),
        ) {
            (true, _) => self.preferences_by(demand, uid, self.pods.iter()),
            (false, false) => {
                let with_preferences = self.with_preferences.iter();
                let pods = with_preferences.filter_map(|uid| self.pods.get_key_value(uid));
                self.preferences_by(demand, uid, pods)
            }
            (false, true) => Preferences::default(),
        };
        let has_others = demand.has_node_preferences() || !self.softly_tainted.is_empty();
        (has_others || !by_neighbors.is_empty()).then_some(by_neighbors)
    }

    fn preferences_by<'a>(
        &'a self,
        demand: &PodDemand,
        uid: &'a str,
        pods: impl Iterator<Item = (&'a String, &'a PodAssignment)> + Clone,
    ) -> Preferences {
        demand.preferences(&Surroundings {
            nodes: &self.nodes,
            pods: self.others(uid, pods),
            namespaces: self.quotas.namespace_labels(),
        })
    }

    /// Returns the scores of nodes by the preferences of a pod.
    pub(crate) fn scores_by_preferences(
        &self,
        demand: &PodDemand,
        preferences: &Preferences,
        nodes: &[&str],
    ) -> Vec<i64> {
        let unknown = NodeInfo::default();
        let nodes = nodes.iter();
        let nodes = nodes.map(|name| (*name, self.nodes.get(*name).unwrap_or(&unknown)));
        demand.node_scores(preferences, &nodes.collect::<Vec<_>>())
    }
}
