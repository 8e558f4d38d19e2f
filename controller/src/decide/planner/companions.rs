//! Companion claims, which add capacity to the shares of a running pod: their allocation on the devices of their base, and its
//! release when the node driver has given the capacity back.
//!
//! No pod waits for a companion, so it is not in the queue. It is tried when it changes, and again ever more rarely, after the pods
//! that are due, and takes only what no pod was promised: it preempts no pod, and devices that are reserved for waiting pods are not
//! free.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::claim::request_class;
use drava_allocator::division::Division;
use drava_allocator::explanation::Explanation;
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::placement::Placement;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::searched::Undecided;
use drava_allocator::turn::Turn;
use drava_allocator::usage::DeviceAccess;
use drava_api::Quantity;
use drava_api::names::{self, capacity};
use drava_api::placement_record::PlacementRecord;
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, PodResourceClaim, PodSpec, Toleration};
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, DeviceRequest, DeviceRequestAllocationResult, DeviceSelector, ResourceClaim,
    ResourceClaimConsumerReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::time::Instant;

use super::{DecisionTime, MAX_IN_FLIGHT, Planner};
use crate::action::event::{PendingEvent, ReleaseReason};
use crate::action::{Action, AllocationJob, ClaimWrite, PodAllocation, Release};
use crate::decide::allocation;
use crate::pods::claim;

use waiting::Waiting;

mod waiting;

/// Time until the first repetition of a release.
const RETRY: Duration = Duration::from_secs(1);

/// Longest time until a release is repeated.
const MAX_RETRY: Duration = Duration::from_secs(60);

/// Companions that need something, and those that pods use.
#[derive(Debug, Default)]
pub(super) struct Companions {
    /// Those that are allocated, with the UIDs of the pods that use them.
    users: BTreeMap<ObjectKey, Vec<String>>,
    /// The same by pod.
    of_pods: BTreeMap<String, BTreeSet<ObjectKey>>,
    /// All, by the UID of their base.
    of_bases: BTreeMap<String, BTreeSet<ObjectKey>>,
    /// The UID of the base of each.
    bases: BTreeMap<ObjectKey, String>,
    /// Those without an allocation.
    waiting: Waiting,
    /// Those whose capacity is given back.
    given_back: BTreeMap<ObjectKey, GivenBack>,
}

/// A companion whose capacity is given back.
#[derive(Debug)]
struct GivenBack {
    /// Time of the next release; `None` while one is in flight.
    due: Option<Instant>,
    /// Time until the release is repeated.
    retry: Duration,
}

impl Companions {
    /// Observes a version of a claim.
    pub(super) fn observe(&mut self, claim: &ResourceClaim, now: Instant) {
        let key = object_key(&claim.metadata);
        self.forget_users(&key);
        self.forget_base(&key);
        if let Some(base) = claim::base(claim) {
            let of_base = self.of_bases.entry(base.to_owned()).or_default();
            of_base.insert(key.clone());
            self.bases.insert(key.clone(), base.to_owned());
        }
        if claim::is_allocated(claim) {
            let users: Vec<String> = claim::consumers(claim).map(str::to_owned).collect();
            for uid in &users {
                let of_pod = self.of_pods.entry(uid.clone()).or_default();
                of_pod.insert(key.clone());
            }
            self.users.insert(key.clone(), users);
        }
        if claim::is_given_back(claim) {
            self.waiting.remove(&key);
            self.given_back.entry(key).or_insert(GivenBack {
                due: Some(now),
                retry: RETRY,
            });
            return;
        }
        self.forget_needs(&key);
        let is_waiting = claim::base(claim).is_some()
            && !claim::is_allocated(claim)
            && claim.metadata.deletion_timestamp.is_none();
        if is_waiting {
            let created = claim.metadata.creation_timestamp.as_ref();
            let created = created.map(|created| created.0);
            self.waiting.insert(key, created, now);
        }
    }

    /// Removes a deleted claim.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.forget_needs(key);
        self.forget_users(key);
        self.forget_base(key);
    }

    fn forget_needs(&mut self, key: &ObjectKey) {
        self.waiting.remove(key);
        self.given_back.remove(key);
    }

    fn forget_base(&mut self, key: &ObjectKey) {
        if let Some(base) = self.bases.remove(key)
            && let Entry::Occupied(mut of_base) = self.of_bases.entry(base)
        {
            of_base.get_mut().remove(key);
            if of_base.get().is_empty() {
                of_base.remove();
            }
        }
    }

    /// Returns the companions of the claim with this UID.
    fn of_base(&self, uid: &str) -> impl Iterator<Item = &ObjectKey> {
        self.of_bases.get(uid).into_iter().flatten()
    }

    fn forget_users(&mut self, key: &ObjectKey) {
        for uid in self.users.remove(key).unwrap_or_default() {
            if let Entry::Occupied(mut of_pod) = self.of_pods.entry(uid) {
                of_pod.get_mut().remove(key);
                if of_pod.get().is_empty() {
                    of_pod.remove();
                }
            }
        }
    }

    /// Returns the companions that a pod uses, which end with it. Its spec names none of them.
    pub(super) fn of_pod(&self, uid: &str) -> impl Iterator<Item = &ObjectKey> {
        self.of_pods.get(uid).into_iter().flatten()
    }

    /// A release of the claim has ended, or cannot start. It is repeated, after twice the time each, unless the claim is observed
    /// without its allocation.
    pub(super) fn repeat_release(&mut self, key: &ObjectKey, now: Instant) {
        if let Some(release) = self.given_back.get_mut(key) {
            release.due = Some(now + release.retry);
            release.retry = (release.retry * 2).min(MAX_RETRY);
        }
    }

    /// Returns when something is to be done.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let releases = self.given_back.values().filter_map(|release| release.due);
        releases.chain(self.waiting.next_due()).min()
    }

    /// Returns the companions to release now.
    fn start_releases(&mut self, now: Instant) -> Vec<ObjectKey> {
        let due = self.given_back.iter_mut();
        let due = due.filter_map(|(key, release)| {
            release.due.take_if(|due| *due <= now)?;
            Some(key.clone())
        });
        due.collect()
    }
}

/// A companion that can be allocated.
struct Growth {
    /// Key of its base.
    base: ObjectKey,
    node: String,
    request: PodRequest,
    pod: ObjectReference,
    consumer: ResourceClaimConsumerReference,
}

impl Planner {
    /// Releases the companions whose capacity is given back. A claim that its pod names is none: its containers use it.
    pub(super) fn release_companions(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for key in self.backlog.companions.start_releases(now) {
            let claim = self.commitments.ledger.claim(&key).filter(|claim| {
                let mut users =
                    claim::consumers(claim).filter_map(|uid| self.world.live_pods.get(uid));
                !users.any(|pod| pod.claims.contains(&key))
            });
            match claim {
                Some(claim) => actions.push(Action::Release(Release {
                    claim: claim.clone(),
                    reason: ReleaseReason::GivenBack,
                })),
                None => self.backlog.companions.repeat_release(&key, now),
            }
        }
    }

    /// Allocates the companions that fit: at least one is tried, and others while the time slice lasts.
    pub(super) fn decide_companions(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        while self.commitments.in_flight.len() < MAX_IN_FLIGHT
            && let Some(key) = self.backlog.companions.waiting.start_next(time.instant)
        {
            self.decide_companion(key, time, actions);
            if (time.is_slice_over)(time.instant) {
                return;
            }
        }
    }

    fn decide_companion(&mut self, key: ObjectKey, time: &DecisionTime, actions: &mut Vec<Action>) {
        let Some(claim) = self.commitments.ledger.claim(&key).cloned() else {
            return;
        };
        if self.commitments.ledger.is_in_flight(&key) {
            return;
        }
        let placed = self.growth(&claim).map_err(Undecided::Rejected);
        let placed = placed.and_then(|growth| {
            let mut turn = Turn::limited();
            let policies = self.world.settings.policies;
            let cluster = &self.world.cluster;
            let placed = cluster.decide_on_in(&growth.node, &growth.request, policies, &mut turn);
            self.backlog.decisions.add(&turn);
            let placement = placed?;
            check_division(&claim, &placement).map_err(Undecided::Rejected)?;
            self.check_quotas(&claim, &growth, &placement)
                .map_err(Undecided::Rejected)?;
            Ok((growth, placement))
        });
        let (growth, placement) = match placed {
            Ok(placed) => placed,
            // What was evaluated so far is known at the next attempt.
            Err(Undecided::Suspended(_)) => {
                return self.backlog.companions.waiting.go_on(&key, time.instant);
            }
            Err(Undecided::Rejected(why)) => {
                let event = PendingEvent::unschedulable(claim::reference(&claim), &why);
                let event = self.reporter.deduplicator.filter(event, time.instant);
                actions.extend(event.map(Action::PublishEvent));
                return;
            }
        };
        let Some(placed) = placement.claims.first() else {
            return;
        };
        let event = PendingEvent::allocated(growth.pod.clone(), &placement, &[(&key.1, placed)]);
        let mut allocation = allocation::build(
            &claim,
            placed,
            &placement.node,
            &self.world.cluster.classes,
            time.time.clone(),
            &mut self.share_ids,
        );
        let record = PlacementRecord {
            pod_uid: growth.consumer.uid.clone(),
            reason: placement.reason(placed),
        };
        record.add_to(&mut allocation);
        // Jobs have the UIDs of pods that wait; this one does not.
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let write = ClaimWrite {
            claim,
            allocation,
            consumer: Some(growth.consumer),
        };
        self.world.assume_growth(&placement);
        self.commitments.ledger.writing_started([key].into_iter());
        self.reporter.deduplicator.forget(&uid);
        self.commitments.in_flight.insert(uid.clone(), vec![event]);
        actions.push(Action::Allocate(AllocationJob {
            pods: vec![PodAllocation {
                uid,
                pod: growth.pod,
                node: placement.node,
                writes: vec![write],
            }],
        }));
    }

    /// Returns the request of a companion: a pod on the node of its base, with the companion as its only claim, whose requests
    /// are limited to the GPUs of the base.
    fn growth(&self, companion: &ResourceClaim) -> Result<Growth, Explanation> {
        let invalid = |why: String| Explanation::rejected(Reason::InvalidCompanion, why);
        let (namespace, name) = object_key(&companion.metadata);
        let base_uid = claim::base(companion).unwrap_or_default();
        let mut owners = companion.metadata.owner_references.iter().flatten();
        let owner = owners.find(|owner| owner.kind == "Pod" && owner.controller == Some(true));
        let owner = owner.ok_or_else(|| {
            invalid("the claim has no pod as its controlling owner; set the pod that it is for in metadata.ownerReferences".to_owned())
        })?;
        let pod = self.world.live_pods.get(&owner.uid);
        let pod = pod.filter(|pod| {
            pod.is_bound
                && pod.grace_period_end.is_none()
                && pod.reference.namespace.as_ref() == Some(&namespace)
        });
        let pod = pod.ok_or_else(|| {
            invalid(format!(
                "its owner, pod {}, does not run in namespace {namespace}: only the shares of running pods grow",
                owner.name
            ))
        })?;
        let mut claims = pod
            .claims
            .iter()
            .filter_map(|key| self.commitments.ledger.claim(key));
        let base = claims.find(|claim| claim.metadata.uid.as_deref() == Some(base_uid));
        let base = base.ok_or_else(|| {
            invalid(format!(
                "pod {} has no claim with the UID {base_uid}, which label {} names",
                owner.name,
                names::COMPANION_LABEL
            ))
        })?;
        let base_name = base.metadata.name.as_deref().unwrap_or_default();
        let consumers = base
            .status
            .iter()
            .flat_map(|status| status.reserved_for.iter().flatten());
        if consumers.map(|consumer| &consumer.uid).ne([&owner.uid]) {
            return Err(invalid(format!(
                "claim {base_name} is not reserved for pod {} alone: shares of several pods do not grow",
                owner.name
            )));
        }
        if pod.reference.name.as_ref() != Some(&owner.name) {
            // The garbage collector and kube-controller-manager look for the pod by its name.
            let name = pod.reference.name.as_deref().unwrap_or_default();
            return Err(invalid(format!(
                "its owner has the UID of pod {name} and the name {}",
                owner.name
            )));
        }
        let mut limited = companion.clone();
        let mut node = None;
        for request in requests_mut(&mut limited) {
            let result = share_of(base, &request.name).ok_or_else(|| {
                invalid(format!(
                    "request {} of claim {base_name} has no share of a GPU: only shares grow, and each request of the companion \
                     has the name of a request of that claim",
                    request.name
                ))
            })?;
            let exactly = request.exactly.as_mut().filter(|exactly| {
                exactly.count.unwrap_or(1) == 1
                    && exactly.allocation_mode.as_deref().unwrap_or("ExactCount") == "ExactCount"
                    && exactly.admin_access != Some(true)
            });
            let exactly = exactly.ok_or_else(|| {
                invalid(format!(
                    "request {} must ask for exactly one device, without alternatives",
                    request.name
                ))
            })?;
            let class = request_class(base, &result.request).unwrap_or_default();
            if exactly.device_class_name != class {
                return Err(invalid(format!(
                    "request {} has the device class {}, and that of claim {base_name} has {class}: a share grows by its own class, \
                     whose rules and quotas it obeys",
                    request.name, exactly.device_class_name
                )));
            }
            let selectors = exactly.selectors.get_or_insert_default();
            selectors.push(only_gpu(self.gpu_of(result)?));
            node = result
                .pool
                .rsplit_once('/')
                .map(|(node, _)| node.to_owned());
        }
        if self.world.cluster.has_unknown_limits(&namespace) {
            return Err(super::demand::unknown_namespace(&namespace));
        }
        let node = node.ok_or_else(|| invalid(format!("claim {name} requests nothing")))?;
        let request = PodRequest::new(
            &pod_on(&node, &owner.uid, &companion.metadata),
            &[("companion", &limited)],
            &self.world.cluster.classes,
            &self.world.cluster.selectors,
        );
        let request = request.map_err(Explanation::from)?;
        if request.claims.is_empty() {
            return Err(invalid(format!(
                "claim {name} requests no device of {}",
                names::DRIVER
            )));
        }
        Ok(Growth {
            base: object_key(&base.metadata),
            node,
            request,
            pod: pod.reference.clone(),
            consumer: ResourceClaimConsumerReference {
                api_group: None,
                resource: "pods".to_owned(),
                name: owner.name.clone(),
                uid: owner.uid.clone(),
            },
        })
    }

    /// Checks that a base with all its companions, and the placed one, stays within what quotas allow one claim.
    fn check_quotas(
        &self,
        companion: &ResourceClaim,
        growth: &Growth,
        placement: &Placement,
    ) -> Result<(), Explanation> {
        let base = claim::base(companion).unwrap_or_default();
        let others = self.backlog.companions.of_base(base);
        // Another tenant may write the UID to a claim of its own.
        let grown = others.filter(|(namespace, _)| *namespace == growth.base.0);
        let grown = grown.chain(std::iter::once(&growth.base));
        let checked = self.world.cluster.check_growth(grown, placement);
        checked.map_err(|rejection| {
            let message = format!("{rejection}; what companions add counts as part of the claim");
            Explanation::rejected(Reason::QuotaExceeded, message)
        })
    }

    /// Returns the UUID of the GPU of an allocated device.
    fn gpu_of(
        &self,
        result: &DeviceRequestAllocationResult,
    ) -> Result<std::sync::Arc<str>, Explanation> {
        let gpu = self.world.cluster.gpu_of(&result.pool, &result.device);
        gpu.ok_or_else(|| {
            Explanation::rejected(
                Reason::PoolIncomplete,
                format!(
                    "device {} of pool {} is not published at present",
                    result.device, result.pool
                ),
            )
        })
    }
}

/// Refuses multiprocessors, asked for or by default: programs read their part when they start.
fn check_division(companion: &ResourceClaim, placement: &Placement) -> Result<(), Explanation> {
    let claims = placement.claims.iter();
    let mut devices = claims.flat_map(|claim| claim.allocated_devices());
    let adds = devices.any(|device| match &device.access {
        DeviceAccess::Share(amounts, Division::Multiprocessors(_)) => {
            let cores = amounts.get(capacity::CORES);
            cores.is_some_and(|cores| *cores > Quantity::ZERO)
        }
        _ => false,
    });
    if !adds {
        return Ok(());
    }
    let name = companion.metadata.name.as_deref().unwrap_or_default();
    Err(Explanation::rejected(
        Reason::InvalidCompanion,
        format!(
            "claim {name} adds cores to a share with computePolicy: spatial, whose programs read their part of the multiprocessors when \
             they start; only its memory grows: request cores: \"0\""
        ),
    ))
}

fn requests_mut(claim: &mut ResourceClaim) -> impl Iterator<Item = &mut DeviceRequest> {
    let spec = claim.spec.iter_mut();
    let devices = spec.flat_map(|spec| &mut spec.devices);
    devices.flat_map(|devices| devices.requests.iter_mut().flatten())
}

/// Returns the share that a request of a claim has.
fn share_of<'a>(
    claim: &'a ResourceClaim,
    request: &str,
) -> Option<&'a DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref()?.allocation.as_ref()?;
    let mut results = allocation.devices.as_ref()?.results.iter().flatten();
    results.find(|result| {
        let main = result.request.split('/').next();
        result.driver == names::DRIVER && result.share_id.is_some() && main == Some(request)
    })
}

/// Returns a selector of the shares of one GPU.
fn only_gpu(uuid: impl AsRef<str>) -> DeviceSelector {
    let (driver, uuid) = (names::DRIVER, uuid.as_ref());
    let attributes = format!("device.attributes['{driver}']");
    DeviceSelector {
        cel: Some(CELDeviceSelector {
            expression: format!("{attributes}.type == 'vgpu' && {attributes}.uuid == '{uuid}'"),
        }),
    }
}

/// Returns the pod `owner` on its node with the companion as its only claim. It counts as what it is already: a pod that runs there.
fn pod_on(node: &str, owner: &str, metadata: &ObjectMeta) -> Pod {
    Pod {
        metadata: ObjectMeta {
            name: metadata.name.clone(),
            namespace: metadata.namespace.clone(),
            uid: Some(owner.to_owned()),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            node_name: Some(node.to_owned()),
            resource_claims: Some(vec![PodResourceClaim {
                name: "companion".to_owned(),
                resource_claim_name: metadata.name.clone(),
                ..PodResourceClaim::default()
            }]),
            tolerations: Some(vec![Toleration {
                operator: Some("Exists".to_owned()),
                ..Toleration::default()
            }]),
            ..PodSpec::default()
        }),
        status: None,
    }
}
