//! What is true: the observed objects, and what follows from them alone.
//!
//! The world knows nothing of who waits or what was said. What is promised is taken from its cluster, so that no decision
//! takes it again: by [`World::assume`] and [`World::keep`], until the claims show it or [`World::forget`] gives it back. Each
//! of them, and the start of a round of decisions, outdates what was found out before.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::cluster::{Cluster, PoolChange};
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::observed::Observed;
use drava_allocator::placement::Placement;
use drava_allocator::pod::scheduler;
use drava_allocator::pod_request::PodRequest;
use drava_api::listed::{Change, Unreadable};
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::api::storage::v1::StorageClass;

use super::Settings;
use super::demand::Request;
use super::ended_pods::EndedPods;
use super::wake::Wake;
use crate::decide::ledger::{Owner, Purpose, Reservation, ReservedPod};
use crate::pods::live_pods::LivePods;
use crate::pods::pod_group::PodGroups;
use crate::watch::Kind;

/// See the [module](self).
pub(super) struct World {
    pub(super) settings: Settings,
    /// Kinds whose first list is incomplete.
    pub(super) unlisted: BTreeSet<Kind>,
    /// Changes of pods before all PodGroups are known, which say to which gangs they belong.
    pub(super) early_pods: Vec<Change<Pod>>,
    pub(super) cluster: Cluster,
    pub(super) live_pods: LivePods,
    pub(super) pod_groups: PodGroups,
    pub(super) ended_pods: EndedPods,
    /// Claim templates.
    pub(super) templates: BTreeSet<ObjectKey>,
    /// Namespaces in which claims have released devices since the last decisions.
    released_in: BTreeSet<String>,
    /// Counts what may help a pod, or change why it does not fit.
    pub(super) revision: u64,
    /// Objects that this build cannot read, with the cause. One is left out, or stays as it was read last. A claim is no
    /// exception to be skipped: its devices would be allocated twice, so their pools are excluded.
    pub(super) unreadable: BTreeMap<(Kind, ObjectKey), String>,
}

impl World {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            unlisted: Kind::ALL.into_iter().collect(),
            early_pods: Vec::new(),
            cluster: Cluster::default(),
            live_pods: LivePods::default(),
            pod_groups: PodGroups::default(),
            ended_pods: EndedPods::default(),
            templates: BTreeSet::new(),
            released_in: BTreeSet::new(),
            revision: 0,
            unreadable: BTreeMap::new(),
        }
    }

    /// Returns whether the complete lists of all kinds have been observed on which decisions depend.
    pub(super) fn is_synced(&self) -> bool {
        !self.unlisted.iter().any(|kind| kind.is_decisive())
    }

    /// Returns whether the complete lists of all PodGroups have been observed.
    pub(super) fn knows_pod_groups(&self) -> bool {
        !self.unlisted.iter().any(|kind| kind.is_pod_groups())
    }

    /// Starts a round of decisions: what was observed since the last one may have changed anything.
    pub(super) const fn start_round(&mut self) {
        self.revision += 1;
    }

    /// Takes the devices of a placement, and the resources of its node.
    pub(super) fn assume(&mut self, request: &Request, placement: &Placement) {
        let PodRequest { uid, demand, .. } = &request.pod_request;
        self.revision += 1;
        self.cluster.assume(placement);
        self.cluster.assume_pod(uid, &placement.node, demand);
    }

    /// Takes the devices of a placement for a pod that runs.
    pub(super) fn assume_growth(&mut self, placement: &Placement) {
        self.revision += 1;
        self.cluster.assume(placement);
    }

    /// Takes what is reserved for a pod.
    pub(super) fn keep(&mut self, pod: &ReservedPod, purpose: Purpose) {
        self.revision += 1;
        self.take(pod, purpose);
    }

    /// Takes what was reserved and forgotten for a while. Less is free then, so what was rejected stays rejected.
    pub(super) fn keep_again(&mut self, reservation: &Reservation) {
        for pod in &reservation.pods {
            self.take(pod, reservation.purpose);
        }
    }

    fn take(&mut self, pod: &ReservedPod, purpose: Purpose) {
        match purpose.is_charged() {
            true => self.cluster.assume(&pod.placement),
            false => self.cluster.hold(&pod.placement),
        }
        self.cluster
            .assume_pod(&pod.uid, &pod.placement.node, &pod.demand);
    }

    /// Gives back what was taken for a pod.
    pub(super) fn forget(&mut self, uid: &str, placement: &Placement) {
        self.revision += 1;
        for claim in &placement.claims {
            let key = (claim.claim.namespace.clone(), claim.claim.name.clone());
            self.cluster.forget(&key);
        }
        self.cluster.forget_pod(uid);
        // Its claims may be deleted, and their devices not counted any more.
        self.cluster.note_changed(&placement.node);
    }

    /// Returns what is found in the world without these reservations, which outdates nothing.
    pub(super) fn without<T>(
        &mut self,
        reservations: &[(Owner, Reservation)],
        find: impl FnOnce(&Self) -> T,
    ) -> T {
        let revision = self.revision;
        for pod in reservations.iter().flat_map(|(_, each)| &each.pods) {
            self.forget(&pod.uid, &pod.placement);
        }
        let found = find(self);
        for (_, reservation) in reservations {
            self.keep_again(reservation);
        }
        self.revision = revision;
        found
    }

    /// Observes a claim.
    pub(super) fn claim(&mut self, claim: &ResourceClaim) {
        if self.cluster.upsert_claim(claim) {
            self.released_in.extend(claim.metadata.namespace.clone());
        }
    }

    /// Observes the deletion of a claim.
    pub(super) fn claim_removed(&mut self, key: &ObjectKey) {
        if self.cluster.remove_claim(key) {
            self.released_in.insert(key.0.clone());
        }
    }

    /// The write of the assumed allocation of a claim has failed.
    pub(super) fn not_allocated(&mut self, key: &ObjectKey) {
        self.cluster.forget(key);
        self.released_in.insert(key.0.clone());
    }

    /// Returns the namespaces in which claims have released devices since the last call.
    pub(super) fn take_released(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.released_in)
    }

    /// Observes a device class.
    pub(super) fn class(&mut self, change: Change<DeviceClass>) -> Wake {
        match change {
            Change::Applied(class) => Wake::all_if(self.cluster.upsert_class(*class)),
            Change::Deleted(class) => {
                self.cluster.remove_class(&class.name);
                Wake::All
            }
        }
    }

    /// Observes a slice of this driver.
    pub(super) fn slice(&mut self, change: Change<ResourceSlice>) -> Wake {
        let effect = match change {
            Change::Applied(slice) => self.cluster.upsert_slice(&slice),
            Change::Deleted(slice) => self.cluster.remove_slice(&slice.name),
        };
        match effect {
            PoolChange::None => Wake::None,
            PoolChange::Unusable => Wake::Reasons,
            PoolChange::Usable(node) => Wake::Devices { node },
        }
    }

    /// Observes a DeviceTaintRule.
    pub(super) fn taint_rule(&mut self, change: Change<DeviceTaintRule>) -> Wake {
        Wake::all_if(match change {
            Change::Applied(rule) => self.cluster.upsert_taint_rule(&rule),
            Change::Deleted(rule) => self.cluster.remove_taint_rule(&rule.name),
        })
    }

    /// Observes a node.
    pub(super) fn node(&mut self, change: Change<Node>) -> Wake {
        match change {
            Change::Applied(node) => {
                let name = node.metadata.name.clone().unwrap_or_default();
                let is_new = self.cluster.node(&name).is_none();
                match self.cluster.upsert_node(&node) {
                    true => Wake::Node { name, is_new },
                    false => Wake::None,
                }
            }
            Change::Deleted(node) => {
                self.cluster.remove_node(&node.name);
                Wake::NodeDeleted(node.name)
            }
        }
    }

    /// Observes a policy.
    pub(super) fn policy(&mut self, change: &Change<GpuPolicy>) -> Wake {
        match change {
            Change::Applied(policy) => Wake::all_if(self.cluster.upsert_policy(policy)),
            Change::Deleted(policy) => {
                self.cluster.remove_policy(&policy.name);
                Wake::All
            }
        }
    }

    /// Observes a quota.
    pub(super) fn quota(&mut self, change: &Change<GpuQuota>) -> Wake {
        Wake::Namespaces(match change {
            Change::Applied(quota) => self.cluster.upsert_quota(quota),
            Change::Deleted(quota) => self.cluster.remove_quota(&quota.name),
        })
    }

    /// Observes a namespace.
    pub(super) fn namespace(&mut self, change: Change<Namespace>) -> Wake {
        Wake::Namespaces(match change {
            Change::Applied(namespace) => self.cluster.upsert_namespace(&namespace),
            Change::Deleted(namespace) => self.cluster.remove_namespace(&namespace.name),
        })
    }

    /// Observes a claim template.
    pub(super) fn template(&mut self, change: Change<ResourceClaimTemplate>) -> Wake {
        let (namespace, is_changed) = match change {
            Change::Applied(template) => {
                let key = object_key(&template.metadata);
                (key.0.clone(), self.templates.insert(key))
            }
            Change::Deleted(template) => {
                let key = (template.namespace, template.name);
                self.templates.remove(&key);
                (key.0, true)
            }
        };
        match is_changed {
            true => Wake::MissingClaims { namespace },
            false => Wake::None,
        }
    }

    /// Observes an object of volumes: it limits the nodes of pods whose decision is due for another reason, so it wakes no pod.
    pub(super) fn volume<K: OfVolumes>(&mut self, change: Change<K>) {
        match change {
            Change::Applied(object) => object.apply(&mut self.cluster),
            Change::Deleted(object) => {
                let key = (object.namespace, object.name);
                K::remove(&mut self.cluster, &key, &object.uid);
            }
        }
    }

    /// Observes a version of an object that cannot be read.
    pub(super) fn unreadable(&mut self, kind: Kind, object: &Unreadable) {
        let key = object_key(&object.metadata);
        if kind == Kind::Claims && self.cluster.upsert_unreadable_claim(object) {
            self.released_in.insert(key.0.clone());
        }
        self.unreadable.insert((kind, key), object.cause.clone());
    }

    /// Observes that an object can be read by now, or is deleted. The pools of a claim are usable again.
    pub(super) fn readable(&mut self, kind: Kind, key: ObjectKey) -> Wake {
        self.unreadable.remove(&(kind, key));
        Wake::all_if(kind == Kind::Claims)
    }

    /// Returns why a claim cannot be read; `None` for one that can.
    pub(super) fn unreadable_claim(&self, key: &ObjectKey) -> Option<&str> {
        let cause = self.unreadable.get(&(Kind::Claims, key.clone()));
        cause.map(String::as_str)
    }

    /// Returns the number of unreadable objects of each kind that has any.
    pub(super) fn count_unreadable(&self) -> BTreeMap<Kind, usize> {
        let mut counts = BTreeMap::new();
        for (kind, _) in self.unreadable.keys() {
            *counts.entry(*kind).or_default() += 1;
        }
        counts
    }

    /// Returns whether this version of a pod shows that kube-scheduler runs. The versions in the first lists do not.
    pub(super) fn shows_scheduler(
        &self,
        pod: &Pod,
        is_newly_bound: bool,
        is_newly_rejected: bool,
    ) -> bool {
        let mut served = self.settings.schedulers.iter();
        self.is_synced()
            && served.any(|served| served == scheduler(pod))
            && (is_newly_bound && !is_static(pod) || is_newly_rejected)
    }
}

/// Kinds of volumes: nothing waits for one.
pub(super) trait OfVolumes: Observed {}

impl OfVolumes for PersistentVolumeClaim {}
impl OfVolumes for PersistentVolume {}
impl OfVolumes for StorageClass {}

/// Returns whether kubelet has created the pod, without a scheduler.
fn is_static(pod: &Pod) -> bool {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.kind == "Node")
}

/// What was found out in one revision of the world. In every other one it is empty.
#[derive(Debug, Default)]
pub(super) struct Memo<T> {
    revision: u64,
    found: T,
}

impl<T: Default> Memo<T> {
    /// Returns what was found out in this revision.
    pub(super) fn at(&mut self, world: &World) -> &mut T {
        if self.revision != world.revision {
            self.revision = world.revision;
            self.found = T::default();
        }
        &mut self.found
    }
}
