//! Checks whether a pod fits on a node apart from its devices, so that kube-scheduler can bind it there.
//!
//! Covered: cordon, readiness, taints, node selector, required node affinity, allocatable resources minus what the node's pods
//! hold, pod count, the rules about other pods of [`neighbors`], and where volumes are accessible. If kube-scheduler cannot
//! bind the pod for another reason, the allocation is released and the node is avoided. Of the nodes that are left, the
//! [`preferences`] of the pod decide as they do in kube-scheduler.

use std::collections::BTreeMap;

use drava_api::Quantity;
use k8s_openapi::api::core::v1::{
    Container, Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec,
    PodStatus, PreferredSchedulingTerm, ResourceRequirements, Taint, Toleration, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;

use crate::capacity::Amounts;
use crate::claim::Classes;
use crate::fragmentation::NodeRoom;
use crate::object::{ObjectKey, object_key};
use crate::pod::is_extended;

pub mod neighbors;
pub(crate) mod preferences;

use neighbors::{Neighbor, NeighborRules};

/// A node, reduced to the fields that decisions need.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeInfo {
    labels: BTreeMap<String, String>,
    taints: Vec<Taint>,
    is_cordoned: bool,
    is_ready: bool,
    allocatable: Amounts,
    is_terminating: bool,
}

/// Demand of a pod on its node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodDemand {
    /// Sum of requests by resource, `pods` included.
    pub requests: Amounts,
    tolerations: Vec<Toleration>,
    node_selector: BTreeMap<String, String>,
    required_affinity: Option<NodeSelector>,
    /// Node in `spec.nodeName`.
    pub node_name: Option<String>,
    /// Node that kube-scheduler has nominated.
    pub nominated_node: Option<String>,
    /// What the pod means to others.
    pub neighbor: Neighbor,
    rules: NeighborRules,
    preferred_affinity: Vec<PreferredSchedulingTerm>,
    /// Its PersistentVolumeClaims.
    pub(crate) volume_claims: Vec<ObjectKey>,
}

/// Resource name of the pod count.
const PODS: &str = "pods";

impl NodeInfo {
    /// Reads a Node object.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        let spec = node.spec.clone().unwrap_or_default();
        let status = node.status.as_ref();
        let is_ready = status
            .and_then(|status| status.conditions.as_deref())
            .unwrap_or_default()
            .iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True");
        Self {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: spec.taints.unwrap_or_default(),
            is_cordoned: spec.unschedulable.unwrap_or_default(),
            is_ready,
            allocatable: status
                .and_then(|status| status.allocatable.as_ref())
                .map(parse_allocatable)
                .unwrap_or_default(),
            is_terminating: node.metadata.deletion_timestamp.is_some(),
        }
    }

    /// Returns whether kubelet reports the node as ready.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Returns whether the node is cordoned (`kubectl cordon`).
    #[must_use]
    pub const fn is_cordoned(&self) -> bool {
        self.is_cordoned
    }

    /// Returns a label.
    pub(crate) fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key).map(String::as_str)
    }

    /// Returns the allocatable CPUs and memory.
    pub(crate) fn room(&self) -> NodeRoom {
        NodeRoom::of(&self.allocatable)
    }

    /// Checks whether the pod can run here in addition to pods that request `used`.
    ///
    /// # Errors
    /// The first obstacle, as the detail of an explanation.
    pub fn admits(
        &self,
        name: &str,
        pod: &PodDemand,
        used: &Amounts,
        classes: &impl Classes,
    ) -> Result<(), String> {
        if pod
            .node_name
            .as_deref()
            .is_some_and(|specified| specified != name)
        {
            return Err("the pod specifies another node".to_owned());
        }
        if self.is_terminating {
            return Err("the node is being deleted".to_owned());
        }
        if self.is_cordoned && !pod.tolerates_cordon() {
            return Err("the node is cordoned".to_owned());
        }
        if !self.is_ready {
            return Err("the node is not ready".to_owned());
        }
        self.is_tolerated(pod)?;
        self.is_selected(name, pod)?;
        for (resource, requested) in &pod.requests {
            let allocatable = self.allocatable.get(resource).copied().unwrap_or_default();
            let used = used.get(resource).copied().unwrap_or_default();
            if requested.is_zero() || used + *requested <= allocatable {
                continue;
            }
            // kube-scheduler serves what the node lacks from a device class (KEP-5004), which it checks.
            let is_lacking = allocatable.is_zero() && is_extended(resource);
            if !is_lacking || classes.of_extended_resource(resource).is_none() {
                return Err(format!("insufficient {resource}"));
            }
        }
        Ok(())
    }

    fn is_tolerated(&self, pod: &PodDemand) -> Result<(), String> {
        let excludes = |taint: &&Taint| {
            matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") && !pod.tolerates(taint)
        };
        match self.taints.iter().find(excludes) {
            Some(taint) => Err(format!("untolerated node taint {}", taint.key)),
            None => Ok(()),
        }
    }

    fn is_selected(&self, name: &str, pod: &PodDemand) -> Result<(), String> {
        if pod
            .node_selector
            .iter()
            .any(|(key, value)| self.labels.get(key) != Some(value))
        {
            return Err("node selector does not match".to_owned());
        }
        if let Some(affinity) = &pod.required_affinity
            && !self.selected_by(name, affinity)
        {
            return Err("node affinity does not match".to_owned());
        }
        Ok(())
    }

    /// Returns whether a node selector selects this node.
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
    /// Reads a Pod object.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let Some(spec) = &pod.spec else {
            return Self::default();
        };
        let affinity = spec.affinity.as_ref();
        let affinity = affinity.and_then(|affinity| affinity.node_affinity.clone());
        let affinity = affinity.unwrap_or_default();
        Self {
            requests: requests(pod),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
            node_selector: spec.node_selector.clone().unwrap_or_default(),
            required_affinity: affinity.required_during_scheduling_ignored_during_execution,
            preferred_affinity: affinity
                .preferred_during_scheduling_ignored_during_execution
                .unwrap_or_default(),
            node_name: spec.node_name.clone().filter(|name| !name.is_empty()),
            nominated_node: pod
                .status
                .as_ref()
                .and_then(|status| status.nominated_node_name.clone())
                .filter(|name| !name.is_empty()),
            neighbor: Neighbor::of(pod),
            rules: NeighborRules::of(pod),
            volume_claims: volume_claims(pod),
        }
    }

    fn tolerates_cordon(&self) -> bool {
        self.tolerates(&Taint {
            key: "node.kubernetes.io/unschedulable".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        })
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        self.tolerations.iter().any(|toleration| {
            let key = toleration.key.as_deref().unwrap_or_default();
            let effect = toleration.effect.as_deref().unwrap_or_default();
            let value = toleration.value.as_deref().unwrap_or_default();
            let of_taint = taint.value.as_deref().unwrap_or_default();
            // The comparisons are stored by clusters with the feature gate TaintTolerationComparisonOperators only.
            let value_matches = match toleration.operator.as_deref() {
                None | Some("" | "Equal") => value == of_taint,
                Some("Exists") => true,
                Some("Gt") => decimal(of_taint) > decimal(value) && decimal(value).is_some(),
                Some("Lt") => decimal(of_taint) < decimal(value) && decimal(of_taint).is_some(),
                Some(_) => false,
            };
            (effect.is_empty() || effect == taint.effect)
                && (key.is_empty() || key == taint.key)
                && value_matches
        })
    }
}

/// Returns a number in the only notation that kube-scheduler compares.
fn decimal(text: &str) -> Option<i64> {
    let number = text.parse::<i64>().ok()?;
    (number.to_string() == text).then_some(number)
}

/// Returns the PersistentVolumeClaims of a pod; that of an ephemeral volume is generated.
fn volume_claims(pod: &Pod) -> Vec<ObjectKey> {
    let (namespace, pod_name) = object_key(&pod.metadata);
    let volumes = pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten());
    let name = |volume: &Volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{pod_name}-{}", volume.name)),
        (None, None) => None,
    };
    volumes
        .filter_map(name)
        .map(|name| (namespace.clone(), name))
        .collect()
}

/// Returns the requests of a pod as kube-scheduler computes them: the maximum of the sum of containers and sidecars
/// and of each init container with the sidecars before it, plus overhead.
#[must_use]
pub fn requests(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else {
        return Amounts::default();
    };
    let of_containers = sum_of_containers(spec, spec_requests);
    with_pod_level(
        spec,
        of_containers,
        &of_requirements(spec.resources.as_ref()),
    )
}

/// Returns what a bound pod holds on its node, as kube-scheduler computes it. While kubelet changes a running pod (KEP-1287,
/// KEP-5419), this is the maximum of what the spec requests, what kubelet has allocated, and what the containers have; without
/// the spec when kubelet has refused it as infeasible.
#[must_use]
pub fn held(pod: &Pod) -> Amounts {
    let (Some(spec), Some(status)) = (&pod.spec, &pod.status) else {
        return requests(pod);
    };
    let is_infeasible = is_resize_infeasible(status);
    let wished = |container: &Container| match is_infeasible {
        true => Amounts::default(),
        false => spec_requests(container),
    };
    let of_status = |container: &Container| {
        let all = status.container_statuses.iter().flatten();
        let mut all = all.chain(status.init_container_statuses.iter().flatten());
        all.find(|status| status.name == container.name)
    };
    let allocated = |container: &Container| {
        let amounts = of_status(container).and_then(|status| status.allocated_resources.as_ref());
        amounts.map_or_else(|| wished(container), parse_requests)
    };
    let actual = |container: &Container| {
        let resources = of_status(container).and_then(|status| status.resources.as_ref());
        let amounts = resources.and_then(|resources| resources.requests.as_ref());
        amounts.map_or_else(|| allocated(container), parse_requests)
    };
    let actual_of_pod = status.resources.as_ref();
    let actual_of_pod = actual_of_pod.and_then(|resources| resources.requests.as_ref());
    // The sums of the pod, where kubelet reports them.
    let mut of_containers = match (&status.allocated_resources, actual_of_pod) {
        (Some(allocated), Some(actual)) => {
            let mut amounts = parse_requests(allocated);
            raise(&mut amounts, &parse_requests(actual));
            amounts
        }
        _ => {
            let mut amounts = sum_of_containers(spec, allocated);
            raise(&mut amounts, &sum_of_containers(spec, actual));
            amounts
        }
    };
    if !is_infeasible {
        raise(&mut of_containers, &sum_of_containers(spec, spec_requests));
    }
    let mut of_pod = of_requirements(spec.resources.as_ref());
    if status.resources.is_some() && has_pod_level(&of_pod) {
        if is_infeasible {
            of_pod = Amounts::default();
        }
        raise(&mut of_pod, &of_requirements(status.resources.as_ref()));
        let allocated = status.allocated_resources.as_ref();
        raise(
            &mut of_pod,
            &allocated.map(parse_requests).unwrap_or_default(),
        );
    }
    with_pod_level(spec, of_containers, &of_pod)
}

/// Returns whether kubelet has refused the newest resources of a running pod because its node can never have them.
fn is_resize_infeasible(status: &PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    let pending = conditions.find(|condition| condition.type_ == "PodResizePending");
    pending.is_some_and(|pending| pending.reason.as_deref() == Some("Infeasible"))
}

fn sum_of_containers(spec: &PodSpec, amounts: impl Fn(&Container) -> Amounts) -> Amounts {
    let mut running = Amounts::default();
    for container in &spec.containers {
        add(&mut running, &amounts(container));
    }
    let mut starting = Amounts::default();
    let mut sidecars = Amounts::default();
    for container in spec.init_containers.iter().flatten() {
        let own = amounts(container);
        let mut during = sidecars.clone();
        add(&mut during, &own);
        raise(&mut starting, &during);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut sidecars, &own);
        }
    }
    add(&mut running, &sidecars);
    raise(&mut running, &starting);
    running
}

/// Returns the amounts of a pod by those of its containers. Pod-level requests replace the sum (KEP-2837).
fn with_pod_level(spec: &PodSpec, of_containers: Amounts, of_pod: &Amounts) -> Amounts {
    let mut sum = of_containers;
    for (name, amount) in of_pod.iter().filter(|(name, _)| is_pod_level(name)) {
        sum.change(name, |_| *amount);
    }
    let overhead = spec.overhead.as_ref().map(parse_requests);
    add(&mut sum, &overhead.unwrap_or_default());
    sum.insert(PODS.to_owned(), Quantity::count(1));
    sum
}

fn is_pod_level(resource: &str) -> bool {
    matches!(resource, "cpu" | "memory") || resource.starts_with("hugepages-")
}

fn has_pod_level(amounts: &Amounts) -> bool {
    amounts.keys().any(|name| is_pod_level(name))
}

fn spec_requests(container: &Container) -> Amounts {
    of_requirements(container.resources.as_ref())
}

fn of_requirements(resources: Option<&ResourceRequirements>) -> Amounts {
    resources
        .and_then(|resources| resources.requests.as_ref())
        .map(parse_requests)
        .unwrap_or_default()
}

/// Parses what a pod requests. An amount that cannot be read is more than any node has.
fn parse_requests(raw: &BTreeMap<String, RawQuantity>) -> Amounts {
    let unreadable = Quantity::ZERO.with_nano(i128::MAX >> 24);
    raw.iter()
        .map(|(name, amount)| {
            let amount = Quantity::try_from(amount).unwrap_or(unreadable);
            (name.clone(), amount)
        })
        .collect()
}

/// Parses what a node has. An amount that cannot be read is not there.
fn parse_allocatable(raw: &BTreeMap<String, RawQuantity>) -> Amounts {
    raw.iter()
        .filter_map(|(name, amount)| Some((name.clone(), Quantity::try_from(amount).ok()?)))
        .collect()
}

/// Adds `amounts` to `sum`.
pub fn add(sum: &mut Amounts, amounts: &Amounts) {
    for (name, amount) in amounts {
        sum.change(name, |before| before + *amount);
    }
}

/// Subtracts `amounts` from `sum` and removes zeros.
pub fn subtract(sum: &mut Amounts, amounts: &Amounts) {
    for (name, amount) in amounts {
        if let Some(rest) = sum.get_mut(name) {
            *rest = *rest - *amount;
        }
    }
    sum.retain(|_, rest| !rest.is_zero());
}

fn raise(sum: &mut Amounts, amounts: &Amounts) {
    for (name, amount) in amounts {
        sum.change(name, |before| before.max(*amount));
    }
}

#[cfg(test)]
mod tests;
