//! Watches of the objects that the console shows, with the user's permissions.
//!
//! A user who may not list a kind in all namespaces sees that of one namespace; the view names the missing objects.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::observed::Observed;
use drava_api::error::describe;
use drava_api::leader::{GpuControllerLeader, LEADER_NAME};
use drava_api::listed::{Change, Listed, Tracked, Tracker, Unreadable};
use drava_api::names;
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::api::resource::v1beta2;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::live::{Access, Kind, Live};
use crate::measured::Meter;
use drava_explanation::snapshot::Snapshot;

/// Time until a kind that cannot be listed or watched is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// Time between two readings of what claims use.
const MEASURE: Duration = Duration::from_secs(15);
/// Time for each node driver, if this makes the time between two readings longer: 20 requests a second.
const MEASURE_EACH: Duration = Duration::from_millis(50);
/// Time between two looks at whether a page is open.
const OPENED: Duration = Duration::from_secs(1);

/// A kind that the console shows or needs for explanations.
trait Shown: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static {
    const KIND: Kind;

    /// Adds the object to the snapshot, or replaces its last version.
    fn upsert_into(self, snapshot: &mut Snapshot);

    /// Removes the object with this key and UID.
    fn remove_from(snapshot: &mut Snapshot, key: &ObjectKey, uid: &str);

    /// Applies a version that this build cannot read.
    fn mark_unreadable(_object: &Unreadable, _snapshot: &mut Snapshot) {}
}

/// Starts the watches; they end with the runtime.
pub(super) fn start(client: &Client, namespace: &str, live: &Arc<Live>) {
    let all = watcher::Config::default;
    let pods = all().fields("status.phase!=Succeeded,status.phase!=Failed");
    let slices = all().fields(&format!("spec.driver={}", names::DRIVER));
    let spawn_namespaced = (namespace, client, live);
    namespaced::<Pod>(spawn_namespaced, pods);
    namespaced::<ResourceClaim>(spawn_namespaced, all());
    namespaced::<PersistentVolumeClaim>(spawn_namespaced, all());
    cluster_wide::<Node>(client, live, all());
    cluster_wide::<ResourceSlice>(client, live, slices);
    cluster_wide::<DeviceClass>(client, live, all());
    cluster_wide::<DeviceTaintRule>(client, live, all());
    cluster_wide::<v1beta2::DeviceTaintRule>(client, live, all());
    cluster_wide::<GpuQuota>(client, live, all());
    cluster_wide::<GpuPolicy>(client, live, all());
    cluster_wide::<Namespace>(client, live, all());
    cluster_wide::<PersistentVolume>(client, live, all());
    cluster_wide::<StorageClass>(client, live, all());
    let leader = all().fields(&format!("metadata.name={LEADER_NAME}"));
    cluster_wide::<GpuControllerLeader>(client, live, leader);
    tokio::spawn(measure(Meter::new(client.clone()), Arc::clone(live)));
}

/// Measures what claims use while a page is open.
async fn measure(mut meter: Meter, live: Arc<Live>) {
    loop {
        while !live.is_followed() {
            tokio::time::sleep(OPENED).await;
        }
        let (measured, gap, drivers) = meter.read().await;
        live.set_measured(measured, gap);
        let all = MEASURE_EACH.saturating_mul(u32::try_from(drivers).unwrap_or(u32::MAX));
        tokio::time::sleep(MEASURE.max(all)).await;
    }
}

fn cluster_wide<K: Shown>(client: &Client, live: &Arc<Live>, config: watcher::Config) {
    let follower = Follower::<K>::new(live);
    tokio::spawn(follower.run(Api::all(client.clone()), None, config));
}

fn namespaced<K>((namespace, client, live): (&str, &Client, &Arc<Live>), config: watcher::Config)
where
    K: Shown + Resource<Scope = k8s_openapi::NamespaceResourceScope>,
{
    let narrow = Api::namespaced(client.clone(), namespace);
    let narrow = Some((namespace.to_owned(), narrow));
    let follower = Follower::<K>::new(live);
    tokio::spawn(follower.run(Api::all(client.clone()), narrow, config));
}

/// Applies the changes of one kind.
struct Follower<K> {
    live: Arc<Live>,
    tracker: Tracker<K>,
}

/// Why a watch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The user may not list the kind.
    ListDenied,
    /// The user may not watch the kind.
    WatchDenied,
    /// No object of the kind can exist.
    NotServed,
}

impl<K: Shown> Follower<K> {
    fn new(live: &Arc<Live>) -> Self {
        live.set_access(K::KIND, Access::Pending);
        Self {
            live: Arc::clone(live),
            tracker: Tracker::default(),
        }
    }

    async fn run(
        mut self,
        all: Api<Listed<K>>,
        narrow: Option<(String, Api<Listed<K>>)>,
        config: watcher::Config,
    ) {
        loop {
            let mut end = self.follow(&all, &config, Access::Complete).await;
            if let (End::ListDenied, Some((namespace, narrow))) = (end, &narrow) {
                let access = Access::Namespace(namespace.clone());
                end = self.follow(narrow, &config, access).await;
            }
            match end {
                // The listed objects are shown until they are listed again.
                End::WatchDenied => self.live.set_access(K::KIND, Access::Polled),
                End::ListDenied => self.live.set_access(K::KIND, Access::Denied),
                End::NotServed => self.live.set_access(K::KIND, Access::Complete),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Follows the objects until a permission is missing; `access` is the state when all are listed.
    async fn follow(
        &mut self,
        api: &Api<Listed<K>>,
        config: &watcher::Config,
        access: Access,
    ) -> End {
        let stream = watcher(api.clone(), config.clone()).default_backoff();
        let mut stream = std::pin::pin!(stream);
        // The stream of a watch has no end.
        while let Some(event) = stream.next().await {
            match event {
                Ok(event) => {
                    if self.apply(event) {
                        self.live.set_access(K::KIND, access.clone());
                    }
                }
                Err(error) => match end_of(&error) {
                    Some(end) => return end,
                    None => {
                        let failing = Access::Failing(describe(&error));
                        self.live.set_access(K::KIND, failing);
                    }
                },
            }
        }
        End::WatchDenied
    }

    /// Applies an event; returns whether the objects are complete after it.
    fn apply(&mut self, event: watcher::Event<Listed<K>>) -> bool {
        let (tracked, is_complete) = match event {
            watcher::Event::Init => {
                self.tracker.begin_list();
                return false;
            }
            watcher::Event::InitApply(object) => (self.tracker.applied(object), false),
            watcher::Event::Apply(object) => (self.tracker.applied(object), true),
            watcher::Event::Delete(object) => (self.tracker.deleted(&object), true),
            watcher::Event::InitDone => (self.tracker.end_list(), true),
        };
        // One change, so that no half of it is shown.
        if !tracked.is_empty() {
            self.live.change(|snapshot| {
                for tracked in tracked {
                    change(snapshot, tracked);
                }
            });
        }
        is_complete
    }
}

fn change<K: Shown>(snapshot: &mut Snapshot, tracked: Tracked<K>) {
    match tracked {
        Tracked::Changed(Change::Applied(object)) => object.upsert_into(snapshot),
        Tracked::Changed(Change::Deleted(deleted)) => {
            let key = (deleted.namespace, deleted.name);
            K::remove_from(snapshot, &key, &deleted.uid);
        }
        Tracked::Unreadable(object) => K::mark_unreadable(&object, snapshot),
        // The next version follows.
        Tracked::Readable { .. } => {}
    }
}

/// Returns why a watch ends with an error; `None` if it is tried again.
fn end_of(error: &watcher::Error) -> Option<End> {
    let code = |error: &kube::Error| match error {
        kube::Error::Api(status) => status.code,
        _ => 0,
    };
    match error {
        watcher::Error::InitialListFailed(error) => match code(error) {
            403 => Some(End::ListDenied),
            404 => Some(End::NotServed),
            _ => None,
        },
        watcher::Error::WatchStartFailed(error) if code(error) == 403 => Some(End::WatchDenied),
        _ => None,
    }
}

/// Inserts an object in the order of the keys, or replaces it.
fn upsert<K: Resource>(objects: &mut Vec<K>, object: K) {
    let key = object_key(object.meta());
    match objects.binary_search_by_key(&key, |known| object_key(known.meta())) {
        Ok(position) => {
            if let Some(known) = objects.get_mut(position) {
                *known = object;
            }
        }
        Err(position) => objects.insert(position, object),
    }
}

fn remove<K: Resource>(objects: &mut Vec<K>, key: &ObjectKey) {
    if let Ok(position) = objects.binary_search_by_key(key, |known| object_key(known.meta())) {
        objects.remove(position);
    }
}

/// Implements [`Shown`] for kinds that the cluster of the allocator holds, and the snapshot too where a list is named.
macro_rules! shown {
    ($($type:ty: $kind:ident $(and $objects:ident)?;)*) => {
        $(impl Shown for $type {
            const KIND: Kind = Kind::$kind;

            fn upsert_into(mut self, snapshot: &mut Snapshot) {
                self.trim();
                self.apply(&mut snapshot.cluster);
                $(upsert(&mut snapshot.$objects, self);)?
            }

            fn remove_from(snapshot: &mut Snapshot, key: &ObjectKey, uid: &str) {
                <Self as Observed>::remove(&mut snapshot.cluster, key, uid);
                $(remove(&mut snapshot.$objects, key);)?
            }

            fn mark_unreadable(object: &Unreadable, snapshot: &mut Snapshot) {
                <Self as Observed>::apply_unreadable(object, &mut snapshot.cluster);
            }
        })*
    };
}

shown! {
    Pod: Pods and pods;
    ResourceClaim: Claims and claims;
    Node: Nodes;
    ResourceSlice: Slices;
    DeviceClass: Classes;
    DeviceTaintRule: TaintRules;
    v1beta2::DeviceTaintRule: OldTaintRules;
    GpuQuota: Quotas;
    GpuPolicy: Policies;
    Namespace: Namespaces;
    PersistentVolumeClaim: VolumeClaims;
    PersistentVolume: Volumes;
    StorageClass: StorageClasses;
}

/// What the leader reserves for pods that wait, and its settings.
impl Shown for GpuControllerLeader {
    const KIND: Kind = Kind::Leaders;

    fn upsert_into(self, snapshot: &mut Snapshot) {
        let status = self.status.unwrap_or_default();
        snapshot.reservations = status.reservations;
        snapshot.omitted_reservations = status.omitted_reservations;
        snapshot.settings = status.settings;
    }

    fn remove_from(snapshot: &mut Snapshot, _key: &ObjectKey, _uid: &str) {
        snapshot.reservations.clear();
        snapshot.omitted_reservations = 0;
        snapshot.settings = None;
    }
}

#[cfg(test)]
mod tests;
