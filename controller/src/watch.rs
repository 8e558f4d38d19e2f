//! Watches of the objects that the planner needs, as one stream of changes.
//!
//! Each kind is listed and watched. After a failed watch the new list is compared with the known objects, so that objects
//! deleted in between are reported. Fields that no decision needs are dropped. An object that cannot be read is reported as
//! such and hides no other.

use std::fmt::Debug;

use drava_allocator::object::ObjectKey;
use drava_allocator::observed::Observed as _;
use drava_api::error::describe;
use drava_api::leader::GpuControllerLeader;
use drava_api::listed::{Change, Listed, Tracked, Tracker, Unreadable};
use drava_api::names;
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use drava_connection::Limits;
use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::pods::gang::PodGroupApi;
use crate::pods::pod_group::PodGroupChange;

pub(crate) mod objects;
mod pod_groups;
mod served;

/// Maximum number of observations that are read and not planned with.
const QUEUE_LENGTH: usize = 4096;

/// Watched kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Unfinished pods.
    Pods,
    /// ResourceClaims.
    Claims,
    /// ResourceClaimTemplates, only their names.
    Templates,
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
    /// The GpuControllerLeader.
    Leaders,
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
    pub const ALL: [Self; 17] = [
        Self::Pods,
        Self::Claims,
        Self::Templates,
        Self::Classes,
        Self::Slices,
        Self::Nodes,
        Self::TaintRules,
        Self::Quotas,
        Self::Policies,
        Self::Leaders,
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
            Self::Templates => "resourceclaimtemplates",
            Self::Classes => "deviceclasses",
            Self::Slices => "resourceslices",
            Self::Nodes => "nodes",
            Self::TaintRules => "devicetaintrules",
            Self::Quotas => "gpuquotas",
            Self::Policies => "gpupolicies",
            Self::Leaders => "gpucontrollerleaders",
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

impl Kind {
    /// Returns whether the objects are PodGroups.
    #[must_use]
    pub const fn is_pod_groups(self) -> bool {
        matches!(
            self,
            Self::PodGroups | Self::VolcanoPodGroups | Self::CoschedulingPodGroups
        )
    }

    /// Returns whether decisions wait for the complete list. They do not depend on the GpuControllerLeader, in whose status the
    /// controller only reports.
    #[must_use]
    pub const fn is_decisive(self) -> bool {
        !matches!(self, Self::Leaders)
    }

    /// Returns `apiVersion` and `kind` of the objects. TaintRules are named by their stable version.
    #[must_use]
    pub const fn object_type(self) -> (&'static str, &'static str) {
        match self {
            Self::Pods => ("v1", "Pod"),
            Self::Claims => ("resource.k8s.io/v1", "ResourceClaim"),
            Self::Templates => ("resource.k8s.io/v1", "ResourceClaimTemplate"),
            Self::Classes => ("resource.k8s.io/v1", "DeviceClass"),
            Self::Slices => ("resource.k8s.io/v1", "ResourceSlice"),
            Self::Nodes => ("v1", "Node"),
            Self::TaintRules => ("resource.k8s.io/v1", "DeviceTaintRule"),
            Self::Quotas => (names::API_VERSION, "GpuQuota"),
            Self::Policies => (names::API_VERSION, "GpuPolicy"),
            Self::Leaders => (names::API_VERSION, "GpuControllerLeader"),
            Self::Namespaces => ("v1", "Namespace"),
            Self::VolumeClaims => ("v1", "PersistentVolumeClaim"),
            Self::Volumes => ("v1", "PersistentVolume"),
            Self::StorageClasses => ("storage.k8s.io/v1", "StorageClass"),
            Self::PodGroups => ("scheduling.k8s.io/v1beta1", "PodGroup"),
            Self::VolcanoPodGroups => ("scheduling.volcano.sh/v1beta1", "PodGroup"),
            Self::CoschedulingPodGroups => ("scheduling.x-k8s.io/v1alpha1", "PodGroup"),
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
    /// A claim template changed.
    Template(Change<ResourceClaimTemplate>),
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
    /// The GpuControllerLeader changed.
    Leader(Change<GpuControllerLeader>),
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
    /// An object cannot be read.
    Unreadable(Kind, Box<Unreadable>),
    /// An object that could not be read can be read by now, or is deleted.
    Readable(Kind, ObjectKey),
    /// The list of a kind is complete.
    Listed(Kind),
    /// A watch failed; it restarts by itself.
    WatchFailed(Kind, WatchFailure),
}

impl Observation {
    /// Returns the kind of which the API server has delivered something; `None` for a failure.
    #[must_use]
    pub const fn delivered_kind(&self) -> Option<Kind> {
        Some(match self {
            Self::Pod(_) => Kind::Pods,
            Self::Claim(_) => Kind::Claims,
            Self::Template(_) => Kind::Templates,
            Self::Class(_) => Kind::Classes,
            Self::Slice(_) => Kind::Slices,
            Self::Node(_) => Kind::Nodes,
            Self::TaintRule(_) => Kind::TaintRules,
            Self::Quota(_) => Kind::Quotas,
            Self::Policy(_) => Kind::Policies,
            Self::Leader(_) => Kind::Leaders,
            Self::Namespace(_) => Kind::Namespaces,
            Self::VolumeClaim(_) => Kind::VolumeClaims,
            Self::Volume(_) => Kind::Volumes,
            Self::StorageClass(_) => Kind::StorageClasses,
            Self::PodGroup(PodGroupChange::Group { api, .. } | PodGroupChange::Served(api, _)) => {
                pod_groups::kind(*api)
            }
            Self::Unreadable(kind, _) | Self::Readable(kind, _) | Self::Listed(kind) => *kind,
            Self::WatchFailed(..) => return None,
        })
    }
}

/// Why a watch failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchFailure {
    /// Cause.
    pub error: String,
    /// Whether the API server has answered.
    pub is_answered: bool,
}

impl From<&kube::Error> for WatchFailure {
    fn from(error: &kube::Error) -> Self {
        Self {
            error: describe(error),
            is_answered: matches!(error, kube::Error::Api(_)),
        }
    }
}

impl From<&watcher::Error> for WatchFailure {
    fn from(error: &watcher::Error) -> Self {
        use watcher::Error::{
            InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed,
        };
        let is_answered = match error {
            InitialListFailed(error) | WatchStartFailed(error) | WatchFailed(error) => {
                matches!(error, kube::Error::Api(_))
            }
            WatchError(_) | NoResourceVersion => true,
        };
        Self {
            error: describe(error),
            is_answered,
        }
    }
}

/// The observations of all watches. Tasks read and parse them, so that planning does not wait for it.
#[derive(Debug)]
pub struct Observations {
    received: mpsc::Receiver<Observation>,
    /// Ends with the value.
    _tasks: JoinSet<()>,
}

impl Observations {
    /// Forwards the observations of these watches; those of one stay in order.
    fn of(watches: impl IntoIterator<Item = BoxStream<'static, Observation>>) -> Self {
        let (sender, received) = mpsc::channel(QUEUE_LENGTH);
        let mut tasks = JoinSet::new();
        for mut watch in watches {
            let sender = sender.clone();
            tasks.spawn(async move {
                while let Some(observation) = watch.next().await {
                    if sender.send(observation).await.is_err() {
                        return;
                    }
                }
            });
        }
        Self {
            received,
            _tasks: tasks,
        }
    }

    /// Waits for the next observation.
    pub async fn next(&mut self) -> Option<Observation> {
        self.received.recv().await
    }

    /// Returns the next observation if it was read already.
    pub fn ready(&mut self) -> Option<Observation> {
        self.received.try_recv().ok()
    }
}

/// Watches all kinds.
pub fn all(client: &Client) -> Observations {
    let plain = || Limits::SHORT_WATCHES.watch();
    let pods = plain().fields("status.phase!=Succeeded,status.phase!=Failed");
    let slices = plain().fields(&format!("spec.driver={}", names::DRIVER));
    Observations::of([
        observe(client, Kind::Pods, pods, Pod::trim, Observation::Pod),
        observe(
            client,
            Kind::Claims,
            plain(),
            ResourceClaim::trim,
            Observation::Claim,
        ),
        observe(
            client,
            Kind::Templates,
            plain(),
            trim_template,
            Observation::Template,
        ),
        observe(client, Kind::Classes, plain(), keep, Observation::Class),
        observe(client, Kind::Slices, slices, keep, Observation::Slice),
        observe(client, Kind::Nodes, plain(), Node::trim, Observation::Node),
        served::observe_taint_rules(client.clone()),
        served::observe_definition(client.clone(), Kind::Quotas, Observation::Quota),
        served::observe_definition(client.clone(), Kind::Policies, Observation::Policy),
        served::observe_definition(client.clone(), Kind::Leaders, Observation::Leader),
        observe(
            client,
            Kind::Namespaces,
            plain(),
            Namespace::trim,
            Observation::Namespace,
        ),
        observe(
            client,
            Kind::VolumeClaims,
            plain(),
            PersistentVolumeClaim::trim,
            Observation::VolumeClaim,
        ),
        observe(
            client,
            Kind::Volumes,
            plain(),
            PersistentVolume::trim,
            Observation::Volume,
        ),
        observe(
            client,
            Kind::StorageClasses,
            plain(),
            keep,
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
    watcher(Api::<Listed<K>>::all(client.clone()), config)
        .default_backoff()
        .flat_map(move |event| {
            let (tracked, end) = match event {
                Ok(event) => track(&mut tracker, kind, event),
                Err(error) => {
                    let failed = Observation::WatchFailed(kind, (&error).into());
                    (Vec::new(), Some(failed))
                }
            };
            let observations = tracked.into_iter().map(move |tracked| match tracked {
                Tracked::Changed(Change::Applied(mut object)) => {
                    trim(&mut object);
                    wrap(Change::Applied(object))
                }
                Tracked::Changed(deleted @ Change::Deleted(_)) => wrap(deleted),
                Tracked::Unreadable(object) => Observation::Unreadable(kind, object),
                Tracked::Readable { namespace, name } => {
                    Observation::Readable(kind, (namespace, name))
                }
            });
            stream::iter(observations.chain(end))
        })
        .boxed()
}

/// Returns what an event means, and the observation that follows.
fn track<K: Resource<DynamicType = ()>>(
    tracker: &mut Tracker<K>,
    kind: Kind,
    event: watcher::Event<Listed<K>>,
) -> (Vec<Tracked<K>>, Option<Observation>) {
    match event {
        watcher::Event::Init => {
            tracker.begin_list();
            (Vec::new(), None)
        }
        watcher::Event::InitApply(object) | watcher::Event::Apply(object) => {
            (tracker.applied(object), None)
        }
        watcher::Event::Delete(object) => (tracker.deleted(&object), None),
        watcher::Event::InitDone => (tracker.end_list(), Some(Observation::Listed(kind))),
    }
}

fn trim_template(template: &mut ResourceClaimTemplate) {
    template.metadata.annotations = None;
    template.metadata.labels = None;
    template.spec = None;
}

/// Keeps all fields.
fn keep<K>(_: &mut K) {}

#[cfg(test)]
mod tests {
    use super::*;

    /// A watch that lists these kinds, and then waits for ever.
    fn watch(kinds: &[Kind]) -> BoxStream<'static, Observation> {
        let listed = stream::iter(kinds.to_vec()).map(Observation::Listed);
        listed.chain(stream::pending()).boxed()
    }

    #[tokio::test]
    async fn observations_of_a_watch_stay_in_order() {
        let mut observations =
            Observations::of([watch(&[Kind::Pods, Kind::Claims]), watch(&[Kind::Nodes])]);
        let mut listed = Vec::new();
        for _ in 0..3 {
            listed.extend(
                observations
                    .next()
                    .await
                    .and_then(|next| next.delivered_kind()),
            );
        }
        listed.retain(|kind| *kind != Kind::Nodes);
        assert_eq!(listed, [Kind::Pods, Kind::Claims]);
        assert!(observations.ready().is_none());
    }

    #[tokio::test]
    async fn watches_are_read_ahead_and_end_with_the_value() {
        let (sender, mut has_ended) = mpsc::channel::<()>(1);
        let held = watch(&[Kind::Pods]).map(move |observation| {
            let _ = &sender;
            observation
        });
        let mut observations = Observations::of([held.boxed()]);
        while observations.received.is_empty() {
            tokio::task::yield_now().await;
        }
        assert!(observations.ready().is_some());
        drop(observations);
        assert!(has_ended.recv().await.is_none(), "the watch is dropped");
    }
}
