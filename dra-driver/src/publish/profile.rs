//! Node profiles: the settings of this node's GPUs, followed while the driver runs.
//!
//! [`follow`] combines the discovered GPUs with the profiles, the labels of the Node object and the retained devices into
//! one [`State`], which publisher and prepare read. So a change of a profile takes the same path as a change of the
//! hardware. [`status`] reports to the profiles.
//!
//! The Node object and the slices of other drivers also show other owners of the GPUs, see [`crate::gpus::coexistence`].
//!
//! Without the custom resource definition the cluster has no profiles; the driver checks again every
//! [`Intervals::missing`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::listed::{Listed, Unreadable};
use drava_api::names;
use drava_api::node_profile::{GpuIdentity, GpuNodeProfile, NodeSettings};
use drava_connection::Limits;
use drava_nvml::GpuUuid;
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::gpus::capacity::ShareTotals;
use crate::gpus::coexistence::OtherOwners;
use crate::gpus::inventory::State;
use crate::publish::writer::Published;
use crate::report::conditions::{Condition, Conditions};

pub mod status;

/// Time between two attempts to restart an interrupted watch.
const RETRY: Duration = Duration::from_secs(5);

/// Reason of the condition `profiles` while the first requests are repeated.
const NO_ANSWER: &str = "the API server returns neither GpuNodeProfiles nor the Node object so far; nothing is published \
                         before";

/// Times between periodic checks.
#[derive(Debug, Clone, Copy)]
pub struct Intervals {
    /// Between two checks whether the custom resource definition exists.
    pub missing: Duration,
    /// Between two checks of a status entry of another node.
    pub entries: Duration,
}

impl Default for Intervals {
    fn default() -> Self {
        Self {
            missing: Duration::from_secs(60),
            entries: Duration::from_secs(300),
        }
    }
}

/// Objects by name; `None` until they were listed.
pub type Objects<K> = Option<BTreeMap<String, K>>;

/// Watches of the profiles and of the Node object.
#[derive(Debug, Clone)]
pub struct Watches {
    /// All profiles that this build can read.
    pub profiles: watch::Receiver<Objects<GpuNodeProfile>>,
    /// The Node object of this node.
    pub node: watch::Receiver<Objects<NodeObject>>,
    /// Slices of other drivers on this node.
    pub other_slices: watch::Receiver<Objects<ResourceSlice>>,
    guard: Guard,
}

/// What happens while a GPU has another owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    /// The GPU is not published.
    Refuse,
    /// The other owner is ignored, for tests.
    Ignore,
}

impl Watches {
    /// Returns the watches and the task that keeps them until `stop`.
    pub fn start(
        client: Client,
        node: &str,
        conditions: Conditions,
        intervals: Intervals,
        guard: Guard,
        stop: CancellationToken,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (profile_sender, profiles) = watch::channel(None);
        let (node_sender, node_objects) = watch::channel(None);
        let (slice_sender, other_slices) = watch::channel(None);
        let watches = Self {
            profiles,
            node: node_objects,
            other_slices,
            guard,
        };
        let (known, fields) = (watches.clone(), format!("metadata.name={node}"));
        let of_others = format!("spec.nodeName={node},spec.driver!={}", names::DRIVER);
        let task = async move {
            let profiles: Api<Listed<GpuNodeProfile>> = Api::all(client.clone());
            let profiles = watcher(profiles, Limits::LONG_WATCHES.watch());
            let nodes: Api<Listed<NodeObject>> = Api::all(client.clone());
            let nodes = watcher(nodes, Limits::LONG_WATCHES.watch().fields(&fields));
            let slices: Api<Listed<ResourceSlice>> = Api::all(client);
            let slices = watcher(slices, Limits::LONG_WATCHES.watch().fields(&of_others));
            let failed = |error: String| {
                if known.are_known() {
                    tracing::warn!(error, "watch interrupted");
                } else {
                    conditions.set(Condition::Profiles, Err(error));
                }
            };
            let done = || {
                if known.are_known() {
                    conditions.set(Condition::Profiles, Ok(()));
                }
            };
            let profiles = keep(
                "GpuNodeProfiles",
                profiles,
                &profile_sender,
                intervals.missing,
                &failed,
                &done,
            );
            let nodes = keep(
                "the Node object",
                nodes,
                &node_sender,
                RETRY,
                &failed,
                &done,
            );
            let slices = keep(
                "ResourceSlices of other drivers",
                slices,
                &slice_sender,
                RETRY,
                &failed,
                &done,
            );
            // The client repeats requests to an API server that does not answer for minutes before it fails.
            let report_delay = async {
                tokio::time::sleep(RETRY).await;
                if !known.are_known() {
                    failed(NO_ANSWER.to_owned());
                }
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = profiles => {}
                () = nodes => {}
                () = slices => {}
                () = report_delay => {}
            }
        };
        (watches, task)
    }

    fn are_known(&self) -> bool {
        self.profiles.borrow().is_some()
            && self.node.borrow().is_some()
            && self.other_slices.borrow().is_some()
    }

    /// Returns the other owners of the node's GPUs.
    fn other_owners(&self) -> OtherOwners {
        match self.guard {
            Guard::Ignore => OtherOwners::default(),
            Guard::Refuse => {
                let (node, slices) = (self.node.borrow(), self.other_slices.borrow());
                let node = node.iter().flat_map(BTreeMap::values).next();
                OtherOwners::read(node, slices.iter().flat_map(BTreeMap::values))
            }
        }
    }

    /// Returns the settings of the node with these GPUs; `None` until profiles, labels and other owners are known.
    fn settings<'a>(&self, gpus: impl Iterator<Item = GpuIdentity<'a>>) -> Option<NodeSettings> {
        if !self.are_known() {
            return None;
        }
        let (profiles, node) = (self.profiles.borrow(), self.node.borrow());
        let labels = node
            .as_ref()?
            .values()
            .next()
            .map(|node| node.labels().clone());
        let readable = profiles.as_ref()?.values();
        let gpus: Vec<_> = gpus.collect();
        Some(NodeSettings::resolve(
            readable,
            &labels.unwrap_or_default(),
            gpus,
        ))
    }
}

/// Stores the objects of a watch. A missing resource definition counts as no objects.
async fn keep<K>(
    kind: &'static str,
    events: impl Stream<Item = watcher::Result<watcher::Event<Listed<K>>>>,
    objects: &watch::Sender<Objects<K>>,
    missing: Duration,
    failed: impl Fn(String),
    done: impl Fn(),
) where
    K: Resource<DynamicType = ()>,
{
    let mut events = std::pin::pin!(events);
    let mut listed = BTreeMap::new();
    let mut is_missing = false;
    loop {
        match events.next().await {
            Some(Ok(event)) => {
                is_missing = false;
                store(kind, event, &mut listed, objects);
                done();
            }
            Some(Err(error)) if is_undefined(&error) => {
                if !is_missing {
                    tracing::info!(
                        kind,
                        "the cluster has no such resource definition; install the chart with crds.install=true to use it"
                    );
                }
                is_missing = true;
                objects.send_if_modified(|present| {
                    let is_changed = present.as_ref().is_none_or(|present| !present.is_empty());
                    *present = Some(BTreeMap::new());
                    is_changed
                });
                done();
                tokio::time::sleep(missing).await;
            }
            Some(Err(error)) => {
                failed(format!("cannot watch {kind}: {}", describe(&error)));
                tokio::time::sleep(RETRY).await;
            }
            None => return,
        }
    }
}

/// Applies an event. A list replaces the objects when it is complete. An object that this build cannot read, for example because
/// it was written for a newer one, has no effect.
fn store<K: Resource<DynamicType = ()>>(
    kind: &'static str,
    event: watcher::Event<Listed<K>>,
    listed: &mut BTreeMap<String, K>,
    objects: &watch::Sender<Objects<K>>,
) {
    match event {
        watcher::Event::Init => listed.clear(),
        watcher::Event::InitApply(Listed::Object(object)) => {
            listed.insert(object.name_any(), *object);
        }
        watcher::Event::InitApply(Listed::Unreadable(object)) => warn_of(kind, &object),
        watcher::Event::InitDone => {
            objects.send_replace(Some(std::mem::take(listed)));
        }
        watcher::Event::Apply(Listed::Object(object)) => objects.send_modify(|present| {
            let present = present.get_or_insert_default();
            present.insert(object.name_any(), *object);
        }),
        watcher::Event::Apply(Listed::Unreadable(object)) => {
            warn_of(kind, &object);
            let name = object.metadata.name.unwrap_or_default();
            objects.send_modify(|present| drop(present.get_or_insert_default().remove(&name)));
        }
        watcher::Event::Delete(object) => objects.send_modify(|present| {
            let present = present.get_or_insert_default();
            present.remove(&object.name_any());
        }),
    }
}

/// Logs an object that this build cannot read.
fn warn_of(kind: &'static str, object: &Unreadable) {
    tracing::warn!(kind, %object, "ignoring an object that this build cannot read");
}

/// Returns whether the API server does not have the resource.
fn is_undefined(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

/// Combines the discovered GPUs with settings and retained devices until `stop` or the end of discovery.
pub async fn follow(
    mut discovered: watch::Receiver<State>,
    mut watches: Watches,
    mut published: watch::Receiver<Published>,
    state: watch::Sender<State>,
    stop: CancellationToken,
) {
    loop {
        let combined = combine(
            &discovered.borrow_and_update(),
            &watches,
            &published.borrow_and_update(),
        );
        state.send_if_modified(|present| {
            let is_changed = *present != combined;
            if is_changed {
                *present = combined;
            }
            is_changed
        });
        let changed = tokio::select! {
            () = stop.cancelled() => return,
            changed = discovered.changed() => changed,
            changed = watches.profiles.changed() => changed,
            changed = watches.node.changed() => changed,
            changed = watches.other_slices.changed() => changed,
            changed = published.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
    }
}

fn combine(discovered: &State, watches: &Watches, published: &Published) -> State {
    let State::Known(node) = discovered else {
        return discovered.clone();
    };
    let mut node = (**node).clone();
    let gpus = node.inventory.nvml.gpus.iter().map(|gpu| GpuIdentity {
        uuid: gpu.uuid.as_str(),
        index: gpu.index,
        product_name: &gpu.name,
    });
    let settings = watches.settings(gpus);
    node.inventory.settings = settings;
    node.inventory.other_owners = watches.other_owners();
    node.inventory.retained_totals = retained_totals(published);
    State::Known(Arc::new(node))
}

fn retained_totals(published: &Published) -> BTreeMap<GpuUuid, ShareTotals> {
    let retained = published.retained.iter();
    retained
        .filter_map(|(uuid, retained)| Some((uuid.clone(), retained.share_totals()?)))
        .collect()
}
