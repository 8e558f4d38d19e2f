//! Watches of the objects that the console shows, with the user's permissions.
//!
//! A user who may not list a kind in all namespaces sees that of one namespace; the view names the missing objects.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::taint::rule_from_v1beta2;
use drava_api::error::describe;
use drava_api::listed::{Listed, Unreadable};
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
use drava_explanation::snapshot::{Snapshot, trim_node, trim_pod};

/// Time until a kind that cannot be listed or watched is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// A kind of which the snapshot holds the objects.
trait Tracked: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static {
    const KIND: Kind;

    fn apply(self, snapshot: &mut Snapshot);

    fn remove(snapshot: &mut Snapshot, key: &ObjectKey, uid: &str);

    /// Applies a version that cannot be read: the last one that could stays.
    fn unreadable(_object: &Unreadable, _snapshot: &mut Snapshot) {}
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
}

fn cluster_wide<K: Tracked>(client: &Client, live: &Arc<Live>, config: watcher::Config) {
    let follower = Follower::<K>::new(live);
    tokio::spawn(follower.run(Api::all(client.clone()), None, config));
}

fn namespaced<K>((namespace, client, live): (&str, &Client, &Arc<Live>), config: watcher::Config)
where
    K: Tracked + Resource<Scope = k8s_openapi::NamespaceResourceScope>,
{
    let narrow = Api::namespaced(client.clone(), namespace);
    let narrow = Some((namespace.to_owned(), narrow));
    let follower = Follower::<K>::new(live);
    tokio::spawn(follower.run(Api::all(client.clone()), narrow, config));
}

/// Applies the changes of one kind.
struct Follower<K> {
    live: Arc<Live>,
    /// UIDs of the known objects.
    known: BTreeMap<ObjectKey, String>,
    /// Known objects that the current list has not contained so far.
    missing: BTreeMap<ObjectKey, String>,
    kind: std::marker::PhantomData<fn() -> K>,
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

impl<K: Tracked> Follower<K> {
    fn new(live: &Arc<Live>) -> Self {
        live.set_access(K::KIND, Access::Pending);
        Self {
            live: Arc::clone(live),
            known: BTreeMap::new(),
            missing: BTreeMap::new(),
            kind: std::marker::PhantomData,
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
        match event {
            watcher::Event::Init => {
                self.missing.clone_from(&self.known);
                false
            }
            watcher::Event::InitApply(object) => {
                self.insert(object);
                false
            }
            watcher::Event::Apply(object) => {
                self.insert(object);
                true
            }
            watcher::Event::Delete(object) => {
                let key = object_key(object.meta());
                if let Some(uid) = self.known.remove(&key) {
                    self.live.change(|snapshot| K::remove(snapshot, &key, &uid));
                }
                true
            }
            watcher::Event::InitDone => {
                for (key, uid) in std::mem::take(&mut self.missing) {
                    self.known.remove(&key);
                    self.live.change(|snapshot| K::remove(snapshot, &key, &uid));
                }
                true
            }
        }
    }

    fn insert(&mut self, object: Listed<K>) {
        let key = object_key(object.meta());
        let uid = object.meta().uid.clone().unwrap_or_default();
        self.missing.remove(&key);
        let before = self.known.insert(key.clone(), uid.clone());
        self.live.change(|snapshot| {
            // Deleted and created again while no watch ran.
            if let Some(before) = before.filter(|before| *before != uid) {
                K::remove(snapshot, &key, &before);
            }
            match object {
                Listed::Object(object) => object.apply(snapshot),
                Listed::Unreadable(object) => K::unreadable(&object, snapshot),
            }
        });
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

impl Tracked for Pod {
    const KIND: Kind = Kind::Pods;

    fn apply(mut self, snapshot: &mut Snapshot) {
        trim_pod(&mut self);
        snapshot.cluster.upsert_pod(&self);
        upsert(&mut snapshot.pods, self);
    }

    fn remove(snapshot: &mut Snapshot, key: &ObjectKey, uid: &str) {
        snapshot.cluster.remove_pod(uid);
        remove(&mut snapshot.pods, key);
    }
}

impl Tracked for ResourceClaim {
    const KIND: Kind = Kind::Claims;

    fn apply(self, snapshot: &mut Snapshot) {
        snapshot.cluster.upsert_claim(&self);
        upsert(&mut snapshot.claims, self);
    }

    fn remove(snapshot: &mut Snapshot, key: &ObjectKey, _uid: &str) {
        snapshot.cluster.remove_claim(key);
        remove(&mut snapshot.claims, key);
    }

    fn unreadable(object: &Unreadable, snapshot: &mut Snapshot) {
        snapshot.cluster.upsert_unreadable_claim(object);
    }
}

/// Implements [`Tracked`] for kinds that only the cluster of the allocator holds.
macro_rules! tracked {
    ($($type:ty, $kind:ident: $apply:expr, $remove:expr;)*) => {
        $(impl Tracked for $type {
            const KIND: Kind = Kind::$kind;

            fn apply(self, snapshot: &mut Snapshot) {
                let apply: fn(&mut Snapshot, Self) = $apply;
                apply(snapshot, self);
            }

            fn remove(snapshot: &mut Snapshot, key: &ObjectKey, _uid: &str) {
                let remove: fn(&mut Snapshot, &ObjectKey) = $remove;
                remove(snapshot, key);
            }
        })*
    };
}

tracked! {
    Node, Nodes:
        |snapshot, mut node| {
            trim_node(&mut node);
            snapshot.cluster.upsert_node(&node);
        },
        |snapshot, key| snapshot.cluster.remove_node(&key.1);
    ResourceSlice, Slices:
        |snapshot, slice| { snapshot.cluster.upsert_slice(&slice); },
        |snapshot, key| { snapshot.cluster.remove_slice(&key.1); };
    DeviceClass, Classes:
        |snapshot, class| { snapshot.cluster.upsert_class(class); },
        |snapshot, key| snapshot.cluster.remove_class(&key.1);
    DeviceTaintRule, TaintRules:
        |snapshot, rule| { snapshot.cluster.upsert_taint_rule(&rule); },
        |snapshot, key| { snapshot.cluster.remove_taint_rule(&key.1); };
    v1beta2::DeviceTaintRule, OldTaintRules:
        |snapshot, rule| { snapshot.cluster.upsert_taint_rule(&rule_from_v1beta2(rule)); },
        |snapshot, key| { snapshot.cluster.remove_taint_rule(&key.1); };
    GpuQuota, Quotas:
        |snapshot, quota| { snapshot.cluster.upsert_quota(&quota); },
        |snapshot, key| { snapshot.cluster.remove_quota(&key.1); };
    GpuPolicy, Policies:
        |snapshot, policy| { snapshot.cluster.upsert_policy(&policy); },
        |snapshot, key| snapshot.cluster.remove_policy(&key.1);
    Namespace, Namespaces:
        |snapshot, namespace| { snapshot.cluster.upsert_namespace(&namespace); },
        |snapshot, key| { snapshot.cluster.remove_namespace(&key.1); };
    PersistentVolumeClaim, VolumeClaims:
        |snapshot, claim| snapshot.cluster.upsert_volume_claim(&claim),
        |snapshot, key| snapshot.cluster.remove_volume_claim(key);
    PersistentVolume, Volumes:
        |snapshot, volume| snapshot.cluster.upsert_volume(&volume),
        |snapshot, key| snapshot.cluster.remove_volume(&key.1);
    StorageClass, StorageClasses:
        |snapshot, class| snapshot.cluster.upsert_storage_class(&class),
        |snapshot, key| snapshot.cluster.remove_storage_class(&key.1);
}

#[cfg(test)]
mod tests;
