//! Coarse fit of a pod on a node: what the controller checks before it chooses, so that kube-scheduler, which has
//! the last word, seldom has to refuse.
//!
//! Covered: cordon, readiness, taints, node selector, required node affinity, allocatable minus the requests of the
//! pods there, pod count. Not covered here: pod affinity, host ports, volumes, topology spread; a wrong guess there
//! costs one round, nothing more.

use std::collections::BTreeMap;

use drava_api::Quantity;
use k8s_openapi::api::core::v1::{
    Container, Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod,
    ResourceRequirements, Taint, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;

use crate::capacity::Amounts;

/// A node, without what no decision needs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeInfo {
    labels: BTreeMap<String, String>,
    taints: Vec<Taint>,
    cordoned: bool,
    ready: bool,
    allocatable: Amounts,
    deleting: bool,
}

/// What a pod needs of a node.
#[derive(Debug, Clone, Default)]
pub struct PodDemand {
    /// Sum of requests by resource, `pods` included.
    pub requests: Amounts,
    tolerations: Vec<Toleration>,
    node_selector: BTreeMap<String, String>,
    required_affinity: Option<NodeSelector>,
    /// Node that the pod names itself.
    pub node_name: Option<String>,
    /// Node that kube-scheduler holds for the pod.
    pub nominated_node: Option<String>,
}

/// Resource that counts pods.
const PODS: &str = "pods";

impl NodeInfo {
    /// Of a Node object.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        let spec = node.spec.clone().unwrap_or_default();
        let status = node.status.as_ref();
        let ready = status
            .and_then(|status| status.conditions.as_deref())
            .unwrap_or_default()
            .iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True");
        Self {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: spec.taints.unwrap_or_default(),
            cordoned: spec.unschedulable.unwrap_or_default(),
            ready,
            allocatable: status
                .and_then(|status| status.allocatable.as_ref())
                .map(parse_amounts)
                .unwrap_or_default(),
            deleting: node.metadata.deletion_timestamp.is_some(),
        }
    }

    /// Whether the pod can run here next to pods that request `used`.
    ///
    /// # Errors
    /// The first obstacle, in a few words.
    pub fn admits(&self, name: &str, pod: &PodDemand, used: &Amounts) -> Result<(), String> {
        if pod
            .node_name
            .as_deref()
            .is_some_and(|wanted| wanted != name)
        {
            return Err("the pod names another node".to_owned());
        }
        if self.deleting {
            return Err("node is being deleted".to_owned());
        }
        let tolerates_cordon = pod.tolerates(&Taint {
            key: "node.kubernetes.io/unschedulable".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        });
        if self.cordoned && !tolerates_cordon {
            return Err("cordoned".to_owned());
        }
        if !self.ready {
            return Err("not ready".to_owned());
        }
        if let Some(taint) = self.taints.iter().find(|taint| {
            matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") && !pod.tolerates(taint)
        }) {
            return Err(format!("node taint {}", taint.key));
        }
        if pod
            .node_selector
            .iter()
            .any(|(key, value)| self.labels.get(key) != Some(value))
        {
            return Err("node selector".to_owned());
        }
        if let Some(affinity) = &pod.required_affinity
            && !self.selected_by(name, affinity)
        {
            return Err("node affinity".to_owned());
        }
        for (resource, asked) in &pod.requests {
            let allocatable = self.allocatable.get(resource);
            if allocatable.is_none() && resource.contains('/') {
                // May be served from a device class (KEP-5004); kube-scheduler knows.
                continue;
            }
            let used = used.get(resource).copied().unwrap_or_default();
            if !asked.is_zero() && used + *asked > allocatable.copied().unwrap_or_default() {
                return Err(format!("insufficient {resource}"));
            }
        }
        Ok(())
    }

    /// Whether a node selector selects this node.
    #[must_use]
    pub fn selected_by(&self, name: &str, selector: &NodeSelector) -> bool {
        selector
            .node_selector_terms
            .iter()
            .any(|term| self.satisfies(name, term))
    }

    fn satisfies(&self, name: &str, term: &NodeSelectorTerm) -> bool {
        let expressions = term.match_expressions.as_deref().unwrap_or_default();
        let fields = term.match_fields.as_deref().unwrap_or_default();
        // A term without requirements matches nothing.
        (!expressions.is_empty() || !fields.is_empty())
            && expressions.iter().all(|requirement| {
                requirement_holds(
                    requirement,
                    self.labels.get(&requirement.key).map(String::as_str),
                )
            })
            && fields.iter().all(|requirement| {
                requirement_holds(
                    requirement,
                    (requirement.key == "metadata.name").then_some(name),
                )
            })
    }
}

fn requirement_holds(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = |value: &str| values.iter().any(|candidate| candidate == value);
    let compare = |holds: fn(i64, i64) -> bool| {
        let limit = values.first().and_then(|limit| limit.parse::<i64>().ok());
        let value = value.and_then(|value| value.parse::<i64>().ok());
        matches!((value, limit), (Some(value), Some(limit)) if holds(value, limit))
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(listed),
        "NotIn" => !value.is_some_and(listed),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compare(|value, limit| value > limit),
        "Lt" => compare(|value, limit| value < limit),
        _ => false,
    }
}

impl PodDemand {
    /// Of a Pod object.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let Some(spec) = &pod.spec else {
            return Self::default();
        };
        let required_affinity = spec
            .affinity
            .as_ref()
            .and_then(|affinity| affinity.node_affinity.as_ref())
            .and_then(|affinity| {
                affinity
                    .required_during_scheduling_ignored_during_execution
                    .clone()
            });
        Self {
            requests: requests(pod),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
            node_selector: spec.node_selector.clone().unwrap_or_default(),
            required_affinity,
            node_name: spec.node_name.clone().filter(|name| !name.is_empty()),
            nominated_node: pod
                .status
                .as_ref()
                .and_then(|status| status.nominated_node_name.clone())
                .filter(|name| !name.is_empty()),
        }
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        self.tolerations.iter().any(|toleration| {
            let key = toleration.key.as_deref().unwrap_or_default();
            let effect = toleration.effect.as_deref().unwrap_or_default();
            let exists = toleration.operator.as_deref() == Some("Exists");
            let value_matches = exists
                || toleration.value.as_deref().unwrap_or_default()
                    == taint.value.as_deref().unwrap_or_default();
            (effect.is_empty() || effect == taint.effect)
                && (key == taint.key || (key.is_empty() && exists))
                && value_matches
        })
    }
}

/// What a pod counts for on its node, computed as kube-scheduler does: the larger of what runs together and what
/// each init container needs on top of the sidecars started before it, plus overhead.
#[must_use]
pub fn requests(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else {
        return Amounts::default();
    };
    let mut running = Amounts::default();
    for container in &spec.containers {
        add(&mut running, &container_requests(container));
    }
    let mut starting = Amounts::default();
    let mut sidecars = Amounts::default();
    for container in spec.init_containers.iter().flatten() {
        let own = container_requests(container);
        let mut during = sidecars.clone();
        add(&mut during, &own);
        raise(&mut starting, &during);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut sidecars, &own);
        }
    }
    add(&mut running, &sidecars);
    raise(&mut running, &starting);
    // Requests of the pod as a whole replace the sum of its containers (KEP-2837).
    for (resource, amount) in of_requirements(spec.resources.as_ref()) {
        running.insert(resource, amount);
    }
    add(
        &mut running,
        &spec
            .overhead
            .as_ref()
            .map(parse_amounts)
            .unwrap_or_default(),
    );
    running.insert(PODS.to_owned(), Quantity::count(1));
    running
}

fn container_requests(container: &Container) -> Amounts {
    of_requirements(container.resources.as_ref())
}

fn of_requirements(resources: Option<&ResourceRequirements>) -> Amounts {
    resources
        .and_then(|resources| resources.requests.as_ref())
        .map(parse_amounts)
        .unwrap_or_default()
}

fn parse_amounts(raw: &BTreeMap<String, RawQuantity>) -> Amounts {
    raw.iter()
        .filter_map(|(name, amount)| Some((name.clone(), Quantity::try_from(amount).ok()?)))
        .collect()
}

/// Adds `amounts` to `sum`.
pub fn add(sum: &mut Amounts, amounts: &Amounts) {
    for (name, amount) in amounts {
        *sum.entry(name.clone()).or_default() += *amount;
    }
}

/// Takes `amounts` from `sum`.
pub fn subtract(sum: &mut Amounts, amounts: &Amounts) {
    for (name, amount) in amounts {
        if let Some(left) = sum.get_mut(name) {
            *left = *left - *amount;
        }
    }
    sum.retain(|_, left| !left.is_zero());
}

fn raise(sum: &mut Amounts, amounts: &Amounts) {
    for (name, amount) in amounts {
        let entry = sum.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}

#[cfg(test)]
mod tests;
