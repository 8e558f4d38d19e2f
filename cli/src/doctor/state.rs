//! What the checks read of the cluster.

use std::collections::BTreeMap;

use drava_api::names;
use drava_api::node_profile::GpuNodeProfile;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    Event, Node, NodeSelectorRequirement, ObjectReference, Pod, PodSpec, PodTemplateSpec,
};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

use crate::installation;
use crate::kueue::Kueue;

/// Objects of the cluster, read once. A list that cannot be read is `None`.
#[derive(Debug, Default)]
pub(crate) struct ClusterState {
    /// Version of the API server.
    pub(crate) server: Option<Version>,
    /// Time of the API server.
    pub(crate) now: Option<Timestamp>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) pods: Vec<Pod>,
    /// Slices of all drivers.
    pub(crate) slices: Vec<ResourceSlice>,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) profiles: Option<Vec<GpuNodeProfile>>,
    pub(crate) claims: Vec<ResourceClaim>,
    pub(crate) templates: Option<Vec<ResourceClaimTemplate>>,
    /// Why pools are excluded from allocation.
    pub(crate) excluded_pools: Vec<String>,
    /// Objects that cannot be read: kind, and namespace and name with the cause.
    pub(crate) unreadable: Vec<(String, String)>,
    /// DaemonSets and Deployments with the labels of the chart.
    pub(crate) daemon_sets: Vec<DaemonSet>,
    pub(crate) deployments: Vec<Deployment>,
    pub(crate) leases: Option<Vec<Lease>>,
    pub(crate) events: Option<Vec<Event>>,
    /// Policies and bindings with the labels of the chart.
    pub(crate) policies: Option<Vec<ValidatingAdmissionPolicy>>,
    pub(crate) bindings: Option<Vec<ValidatingAdmissionPolicyBinding>>,
    /// Webhooks with the labels of the chart.
    pub(crate) webhooks: Option<Vec<Webhook>>,
    pub(crate) endpoints: Option<Vec<EndpointSlice>>,
    pub(crate) kueue: Kueue,
    /// Permissions that drava needs and that the API server denies.
    pub(crate) denied: Vec<Permission>,
    /// What could not be read, and why.
    pub(crate) unchecked: Vec<String>,
}

/// Major and minor version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) u32, pub(crate) u32);

impl Version {
    /// Parses `v1.37.1` or `1.37+`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim_start_matches('v').split('.');
        let digits = |part: &str| {
            let end = part
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(part.len());
            part.get(..end)?.parse().ok()
        };
        Some(Self(digits(parts.next()?)?, digits(parts.next()?)?))
    }
}

/// A webhook with the service that serves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Webhook {
    /// Kind and name of the configuration.
    pub(crate) configuration: String,
    pub(crate) name: String,
    /// Namespace and name.
    pub(crate) service: (String, String),
    /// End of the validity of the newest certificate that the API server trusts; `None` without a certificate.
    pub(crate) trusted_until: Option<Timestamp>,
}

/// A permission of a service account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Permission {
    /// Namespace and name.
    pub(crate) account: (String, String),
    pub(crate) verb: &'static str,
    pub(crate) group: &'static str,
    /// Resource with its subresource.
    pub(crate) resource: &'static str,
    pub(crate) name: Option<&'static str>,
    /// Empty: in all namespaces.
    pub(crate) namespace: String,
}

/// An object that events are about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum About<'a> {
    /// A node by its name. The kubelet writes the name as its UID.
    Node(&'a str),
    /// An object of a namespace, of this kind.
    Namespaced(&'static str, &'a ObjectMeta),
}

impl About<'_> {
    /// Returns whether a reference is to this object, and not to one of the same name in another namespace or before it.
    fn is(self, reference: &ObjectReference) -> bool {
        let is_kind = |kind: &str| reference.kind.as_deref() == Some(kind);
        match self {
            Self::Node(name) => is_kind("Node") && reference.name.as_deref() == Some(name),
            Self::Namespaced(kind, metadata) => {
                let same_uid = reference.uid.as_ref().zip(metadata.uid.as_ref());
                is_kind(kind)
                    && reference.name == metadata.name
                    && reference.namespace == metadata.namespace
                    && same_uid.is_none_or(|(one, other)| one == other)
            }
        }
    }
}

/// Component in the labels of the chart.
const COMPONENT_LABEL: &str = "app.kubernetes.io/component";

impl ClusterState {
    /// Returns the DaemonSet of the node driver.
    pub(crate) fn driver(&self) -> Option<&DaemonSet> {
        self.daemon_sets
            .iter()
            .find(|set| self.is_component(&set.metadata, "driver"))
    }

    /// Returns whether an object is this component of drava, and not one of a tenant with the same labels.
    fn is_component(&self, metadata: &ObjectMeta, component: &str) -> bool {
        let installed = installation::of_classes(&self.classes);
        let labels = metadata.labels.as_ref();
        labels
            .and_then(|labels| labels.get(COMPONENT_LABEL))
            .map(String::as_str)
            == Some(component)
            && installed.is_none_or(|namespace| metadata.namespace.as_deref() == Some(namespace))
    }

    /// Returns the pod template of the node driver.
    pub(crate) fn driver_template(&self) -> Option<&PodTemplateSpec> {
        Some(&self.driver()?.spec.template)
    }

    /// Returns the Deployment of the controller.
    pub(crate) fn controller(&self) -> Option<&Deployment> {
        self.deployments
            .iter()
            .find(|deployment| self.is_component(&deployment.metadata, "controller"))
    }

    /// Returns the namespace of the installation.
    pub(crate) fn namespace(&self) -> &str {
        self.driver()
            .and_then(|set| set.metadata.namespace.as_deref())
            .unwrap_or_default()
    }

    /// Returns whether the controller allocates.
    pub(crate) fn is_managed(&self) -> bool {
        has_flag(self.driver_template(), "--scheduling=managed")
    }

    /// Returns whether an argument of the controller starts with `flag`.
    pub(crate) fn has_controller_flag(&self, flag: &str) -> bool {
        let template = self
            .controller()
            .map(|deployment| &deployment.spec.template);
        has_flag(template, flag)
    }

    /// Returns the nodes that the DaemonSet of the node driver selects.
    pub(crate) fn gpu_nodes(&self) -> impl Iterator<Item = (&str, &Node)> {
        let spec = self
            .driver_template()
            .and_then(|template| template.spec.as_ref());
        self.nodes.iter().filter_map(move |node| {
            let name = node.metadata.name.as_deref()?;
            let labels = node.metadata.labels.as_ref();
            spec.is_none_or(|spec| selects(spec, labels))
                .then_some((name, node))
        })
    }

    /// Returns the pods of the node driver on a node.
    pub(crate) fn driver_pods(&self, node: &str) -> impl Iterator<Item = &Pod> {
        let selector = self
            .driver()
            .and_then(|set| set.spec.selector.match_labels.as_ref());
        let namespace = self.namespace();
        self.pods.iter().filter(move |pod| {
            let labels = pod.metadata.labels.as_ref();
            pod.metadata.namespace.as_deref() == Some(namespace)
                && drava_allocator::pod::node(pod) == Some(node)
                && selector.is_some_and(|selector| {
                    let mut selector = selector.iter();
                    selector.all(|(key, value)| {
                        labels.and_then(|labels| labels.get(key)) == Some(value)
                    })
                })
        })
    }

    /// Returns the slices of drava.
    pub(crate) fn own_slices(&self) -> impl Iterator<Item = &ResourceSlice> {
        self.slices
            .iter()
            .filter(|slice| slice.spec.driver == names::DRIVER)
    }

    /// Returns the events with this reason about an object.
    fn events(&self, object: About<'_>, reason: &str) -> impl Iterator<Item = &Event> {
        let events = self.events.iter().flatten();
        events.filter(move |event| {
            object.is(&event.involved_object) && event.reason.as_deref() == Some(reason)
        })
    }

    /// Returns the message of the newest event with this reason about an object.
    pub(crate) fn event(&self, object: About<'_>, reason: &str) -> Option<&str> {
        self.timed_event(object, reason).map(|(message, _)| message)
    }

    /// Returns message and time of the newest event with this reason about an object.
    pub(crate) fn timed_event(
        &self,
        object: About<'_>,
        reason: &str,
    ) -> Option<(&str, Option<Timestamp>)> {
        self.events(object, reason)
            .max_by_key(|event| time(event))
            .and_then(|event| Some((event.message.as_deref()?, time(event))))
    }

    /// Returns the messages of the events with this reason about an object since a time in seconds, in their order.
    pub(crate) fn events_since(
        &self,
        object: About<'_>,
        reason: &str,
        since: i64,
    ) -> impl Iterator<Item = &str> {
        let mut events: Vec<&Event> = self
            .events(object, reason)
            .filter(|event| time(event).is_none_or(|time| time.as_second() >= since))
            .collect();
        events.sort_by_key(|event| time(event));
        events
            .into_iter()
            .filter_map(|event| event.message.as_deref())
    }
}

/// Returns when an event was observed last.
fn time(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref();
    let time = series.and_then(|series| series.last_observed_time.as_ref());
    let time = time.or(event.event_time.as_ref()).map(|time| time.0);
    time.or(event.last_timestamp.as_ref().map(|time| time.0))
}

/// Returns whether a pod may run on a node with these labels: by its node selector, and by its required node affinity in the
/// form that the chart writes.
fn selects(spec: &PodSpec, labels: Option<&BTreeMap<String, String>>) -> bool {
    let value = |key: &str| labels.and_then(|labels| labels.get(key));
    let mut selector = spec.node_selector.iter().flatten();
    let affinity = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| {
        affinity
            .required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let is_met = |expression: &NodeSelectorRequirement| {
        let value = value(&expression.key);
        let is_listed = |value: &String| expression.values.iter().flatten().any(|one| one == value);
        match expression.operator.as_str() {
            "In" => value.is_some_and(is_listed),
            "NotIn" => !value.is_some_and(is_listed),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            // Gt and Lt compare numbers; a node is checked rather than ignored.
            _ => true,
        }
    };
    selector.all(|(key, wanted)| value(key) == Some(wanted))
        && required.is_none_or(|required| {
            required
                .node_selector_terms
                .iter()
                .any(|term| term.match_expressions.iter().flatten().all(is_met))
        })
}

fn has_flag(template: Option<&PodTemplateSpec>, flag: &str) -> bool {
    let containers = template
        .and_then(|template| template.spec.as_ref())
        .map(|spec| spec.containers.as_slice())
        .unwrap_or_default();
    containers
        .iter()
        .flat_map(|container| container.args.iter().flatten())
        .any(|argument| argument.starts_with(flag))
}

/// Returns the condition `Ready` of a pod.
pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
