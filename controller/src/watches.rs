//! Watches of the objects that the planner needs, as one stream of changes.
//!
//! Each kind is listed and watched. After a failed watch the new list is compared with the known objects, so that objects
//! deleted in between are reported. Fields that no decision needs are dropped.

use std::collections::BTreeMap;
use std::fmt::Debug;

use drava_api::error::describe;
use drava_api::names;
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use futures::stream::{BoxStream, SelectAll, StreamExt};
use k8s_openapi::api::core::v1::{
    Container, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod,
};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::change::{Change, DeletedObject};
use crate::gang;
use crate::pod_group::{PodGroupApi, PodGroupChange, VOLCANO_ANNOTATION};

mod definitions;
mod pod_groups;
mod served;
mod taint_rules;
mod volumes;

/// Watched kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Unfinished pods.
    Pods,
    /// ResourceClaims.
    Claims,
    /// DeviceClasses.
    Classes,
    /// ResourceSlices of this driver.
    Slices,
    /// Nodes.
    Nodes,
    /// DeviceTaintRules.
    TaintRules,
    /// GpuQuotas.
    Quotas,
    /// GpuPolicies.
    Policies,
    /// Namespaces.
    Namespaces,
    /// PersistentVolumeClaims.
    VolumeClaims,
    /// PersistentVolumes.
    Volumes,
    /// StorageClasses.
    StorageClasses,
    /// PodGroups of Kubernetes.
    PodGroups,
    /// PodGroups of Volcano.
    VolcanoPodGroups,
    /// PodGroups of the coscheduling plugin.
    CoschedulingPodGroups,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 15] = [
        Self::Pods,
        Self::Claims,
        Self::Classes,
        Self::Slices,
        Self::Nodes,
        Self::TaintRules,
        Self::Quotas,
        Self::Policies,
        Self::Namespaces,
        Self::VolumeClaims,
        Self::Volumes,
        Self::StorageClasses,
        Self::PodGroups,
        Self::VolcanoPodGroups,
        Self::CoschedulingPodGroups,
    ];

    /// Returns the name of the resource.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Claims => "resourceclaims",
            Self::Classes => "deviceclasses",
            Self::Slices => "resourceslices",
            Self::Nodes => "nodes",
            Self::TaintRules => "devicetaintrules",
            Self::Quotas => "gpuquotas",
            Self::Policies => "gpupolicies",
            Self::Namespaces => "namespaces",
            Self::VolumeClaims => "persistentvolumeclaims",
            Self::Volumes => "persistentvolumes",
            Self::StorageClasses => "storageclasses",
            Self::PodGroups => "podgroups.scheduling.k8s.io",
            Self::VolcanoPodGroups => "podgroups.scheduling.volcano.sh",
            Self::CoschedulingPodGroups => "podgroups.scheduling.x-k8s.io",
        }
    }
}

/// An observation of the watches.
#[derive(Debug)]
pub enum Observation {
    /// A pod changed.
    Pod(Change<Pod>),
    /// A claim changed.
    Claim(Change<ResourceClaim>),
    /// A class changed.
    Class(Change<DeviceClass>),
    /// A slice changed.
    Slice(Change<ResourceSlice>),
    /// A node changed.
    Node(Change<Node>),
    /// A rule changed.
    TaintRule(Change<DeviceTaintRule>),
    /// A quota changed.
    Quota(Change<GpuQuota>),
    /// A policy changed.
    Policy(Change<GpuPolicy>),
    /// A namespace changed.
    Namespace(Change<Namespace>),
    /// A PersistentVolumeClaim changed.
    VolumeClaim(Change<PersistentVolumeClaim>),
    /// A PersistentVolume changed.
    Volume(Change<PersistentVolume>),
    /// A StorageClass changed.
    StorageClass(Change<StorageClass>),
    /// A PodGroup changed, or whether PodGroups are served.
    PodGroup(PodGroupChange),
    /// The list of a kind is complete.
    Listed(Kind),
    /// A watch failed; it restarts by itself.
    WatchFailed(Kind, String),
}

/// Watches all kinds.
pub fn all(client: &Client) -> SelectAll<BoxStream<'static, Observation>> {
    let pods = watcher::Config::default().fields("status.phase!=Succeeded,status.phase!=Failed");
    let slices = watcher::Config::default().fields(&format!("spec.driver={}", names::DRIVER));
    let plain = watcher::Config::default;
    futures::stream::select_all([
        observe(client, Kind::Pods, pods, trim_pod, Observation::Pod),
        observe(client, Kind::Claims, plain(), trim, Observation::Claim),
        observe(client, Kind::Classes, plain(), trim, Observation::Class),
        observe(client, Kind::Slices, slices, trim, Observation::Slice),
        observe(client, Kind::Nodes, plain(), trim_node, Observation::Node),
        taint_rules::observe_served(client.clone()),
        definitions::observe_served(client.clone(), Kind::Quotas, Observation::Quota),
        definitions::observe_served(client.clone(), Kind::Policies, Observation::Policy),
        observe(
            client,
            Kind::Namespaces,
            plain(),
            trim_namespace,
            Observation::Namespace,
        ),
        observe(
            client,
            Kind::VolumeClaims,
            plain(),
            volumes::trim_claim,
            Observation::VolumeClaim,
        ),
        observe(
            client,
            Kind::Volumes,
            plain(),
            volumes::trim_volume,
            Observation::Volume,
        ),
        observe(
            client,
            Kind::StorageClasses,
            plain(),
            trim,
            Observation::StorageClass,
        ),
        pod_groups::observe_served(client.clone(), PodGroupApi::Kubernetes),
        pod_groups::observe_served(client.clone(), PodGroupApi::Volcano),
        pod_groups::observe_served(client.clone(), PodGroupApi::Coscheduling),
    ])
}

fn observe<K>(
    client: &Client,
    kind: Kind,
    config: watcher::Config,
    trim: fn(&mut K),
    wrap: fn(Change<K>) -> Observation,
) -> BoxStream<'static, Observation>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut tracker = Tracker::default();
    watcher(Api::<K>::all(client.clone()), config)
        .default_backoff()
        .modify(trim)
        .flat_map(move |event| {
            let observations = match event {
                Ok(event) => tracker.observe(event, kind, wrap),
                Err(error) => vec![Observation::WatchFailed(kind, describe(&error))],
            };
            futures::stream::iter(observations)
        })
        .boxed()
}

/// Tracks the existing objects, to report those deleted while no watch runs.
#[derive(Debug, Default)]
struct Tracker {
    known: BTreeMap<(String, String), String>,
    /// Known objects that the current list has not contained so far.
    missing: BTreeMap<(String, String), String>,
}

impl Tracker {
    fn observe<K>(
        &mut self,
        event: watcher::Event<K>,
        kind: Kind,
        wrap: fn(Change<K>) -> Observation,
    ) -> Vec<Observation>
    where
        K: Resource<DynamicType = ()>,
    {
        match event {
            watcher::Event::Init => {
                self.missing.clone_from(&self.known);
                Vec::new()
            }
            watcher::Event::InitApply(object) | watcher::Event::Apply(object) => {
                let key = key_of(&object);
                let uid = object.uid().unwrap_or_default();
                self.missing.remove(&key);
                let before = self.known.insert(key.clone(), uid.clone());
                // Deleted and recreated while no watch ran.
                let replaced = before
                    .filter(|before| *before != uid)
                    .map(|before| wrap(deleted(key, before)));
                replaced
                    .into_iter()
                    .chain([wrap(Change::Applied(Box::new(object)))])
                    .collect()
            }
            watcher::Event::Delete(object) => {
                let key = key_of(&object);
                self.known.remove(&key);
                vec![wrap(deleted(key, object.uid().unwrap_or_default()))]
            }
            watcher::Event::InitDone => {
                let missing = std::mem::take(&mut self.missing);
                let mut observations: Vec<_> = missing
                    .into_iter()
                    .map(|(key, uid)| {
                        self.known.remove(&key);
                        wrap(deleted(key, uid))
                    })
                    .collect();
                observations.push(Observation::Listed(kind));
                observations
            }
        }
    }
}

fn key_of(object: &impl ResourceExt) -> (String, String) {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn deleted<K>((namespace, name): (String, String), uid: String) -> Change<K> {
    Change::Deleted(DeletedObject {
        namespace,
        name,
        uid,
    })
}

fn trim<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

fn trim_namespace(namespace: &mut Namespace) {
    trim(namespace);
    namespace.metadata.annotations = None;
}

fn trim_node(node: &mut Node) {
    trim(node);
    node.metadata.annotations = None;
    if let Some(status) = node.status.as_mut() {
        status.images = None;
        status.volumes_attached = None;
        status.volumes_in_use = None;
    }
}

fn trim_pod(pod: &mut Pod) {
    trim(pod);
    if let Some(annotations) = pod.metadata.annotations.as_mut() {
        annotations.retain(|name, _| {
            gang::ANNOTATIONS.contains(&name.as_str()) || name == VOLCANO_ANNOTATION
        });
    }
    pod.metadata.annotations = pod
        .metadata
        .annotations
        .take()
        .filter(|all| !all.is_empty());
    if let Some(spec) = pod.spec.as_mut() {
        volumes::trim_volumes(spec);
        spec.ephemeral_containers = None;
        let init = spec.init_containers.iter_mut().flatten();
        for container in init.chain(&mut spec.containers) {
            trim_container(container);
        }
    }
    if let Some(status) = pod.status.as_mut() {
        status.container_statuses = None;
        status.init_container_statuses = None;
        status.ephemeral_container_statuses = None;
    }
}

fn trim_container(container: &mut Container) {
    let ports = container.ports.take();
    let ports = ports.map(|mut ports| {
        ports.retain(|port| port.host_port.is_some());
        ports
    });
    *container = Container {
        name: std::mem::take(&mut container.name),
        ports: ports.filter(|ports| !ports.is_empty()),
        resources: container.resources.take(),
        restart_policy: container.restart_policy.take(),
        ..Container::default()
    };
}

#[cfg(test)]
mod tests;
