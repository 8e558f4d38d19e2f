//! Growth of shares: what a companion claim asks for, and where it fits. The controller allocates companions by it, `explain` and
//! `simulate` say it.
//!
//! A companion fits on the GPU of its base only, and goes with one running pod.

use std::collections::BTreeSet;

use drava_allocator::claim::request_class;
use drava_allocator::cluster::{Cluster, is_finished};
use drava_allocator::division::Division;
use drava_allocator::explanation::Explanation;
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::placement::{Placement, Policies};
use drava_allocator::pod;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::reason::bytes;
use drava_allocator::searched::Undecided;
use drava_allocator::turn::Turn;
use drava_allocator::usage::{AllocatedDevice, DeviceAccess};
use drava_api::Quantity;
use drava_api::condition::ConditionType;
use drava_api::names::{self, capacity};
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim, PodSpec, Toleration};
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, DeviceRequest, DeviceRequestAllocationResult, DeviceSelector, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, OwnerReference};

use crate::snapshot::Snapshot;
use crate::terminal::printable;

/// Returns the UID of the claim to whose shares this one adds, as its companion.
#[must_use]
pub fn base_uid(claim: &ResourceClaim) -> Option<&str> {
    let labels = claim.metadata.labels.as_ref()?;
    labels.get(names::COMPANION_LABEL).map(String::as_str)
}

/// Companions of a pod for which the reason is given. A tenant can create thousands of them.
const MAX_COMPANIONS: usize = 8;

/// Returns what keeps the companions of a pod from adding to its shares: a line for each of the first ones that does not.
#[must_use]
pub fn of_pod(snapshot: &mut Snapshot, pod: &Pod, policies: Policies) -> Vec<String> {
    let uid = pod.metadata.uid.as_ref();
    let is_of_pod = |claim: &&ResourceClaim| {
        base_uid(claim).is_some()
            && claim.metadata.namespace == pod.metadata.namespace
            && owner(claim).is_some_and(|owner| Some(&owner.uid) == uid)
    };
    if !snapshot.claims.iter().any(|claim| is_of_pod(&claim)) {
        return Vec::new();
    }
    snapshot.hold_reservations(None);
    let companions = snapshot.claims.iter().filter(is_of_pod);
    let others = companions.clone().count().saturating_sub(MAX_COMPANIONS);
    let lines = companions.take(MAX_COMPANIONS).filter_map(|companion| {
        let state = obstacle(snapshot, companion, policies)?;
        let (namespace, name) = object_key(&companion.metadata);
        Some(format!(
            "claim {namespace}/{name} is to add to the share of the pod, and {state}"
        ))
    });
    let mut lines: Vec<String> = lines.collect();
    if others > 0 {
        lines.push(format!(
            "{others} more claims are to add to shares of the pod; `kubectl drava explain claim` says why one does not"
        ));
    }
    snapshot.lift_reservations();
    lines
}

/// Returns what keeps a companion from adding to its share; `None` if it adds to it.
#[must_use]
pub fn of_claim(
    snapshot: &mut Snapshot,
    companion: &ResourceClaim,
    policies: Policies,
) -> Option<String> {
    snapshot.hold_reservations(None);
    let obstacle = obstacle(snapshot, companion, policies);
    snapshot.lift_reservations();
    obstacle
}

/// Returns as [`of_claim`]; reservations are to be held.
fn obstacle(snapshot: &Snapshot, companion: &ResourceClaim, policies: Policies) -> Option<String> {
    if is_allocated(companion) {
        return not_granted(companion);
    }
    if companion.metadata.deletion_timestamp.is_some() {
        return Some("is being deleted".to_owned());
    }
    Some(match place(snapshot, companion, &[], policies) {
        Ok(_) => "fits: the controller allocates it within seconds, otherwise check the log of drava-controller".to_owned(),
        Err(why) => format!("is not allocated: {}", why.summary()),
    })
}

/// Returns whether a claim is allocated.
#[must_use]
pub fn is_allocated(claim: &ResourceClaim) -> bool {
    let status = claim.status.as_ref();
    status.is_some_and(|status| status.allocation.is_some())
}

/// Returns the condition `Granted` of a companion, which the node driver writes.
#[must_use]
pub fn granted(companion: &ResourceClaim) -> Option<&Condition> {
    let status = companion.status.iter();
    let devices = status.flat_map(|status| status.devices.iter().flatten());
    let devices = devices.filter(|device| device.driver == names::DRIVER);
    let mut conditions = devices.flat_map(|device| device.conditions.iter().flatten());
    conditions.find(|condition| condition.type_ == ConditionType::Granted.as_str())
}

/// Returns why the limits of the share do not include an allocated companion, as the node driver reports it.
fn not_granted(companion: &ResourceClaim) -> Option<String> {
    match granted(companion) {
        Some(granted) if granted.status == "True" => None,
        Some(granted) => Some(format!(
            "the node driver says {}: {}",
            printable(&granted.reason),
            printable(&granted.message)
        )),
        None => Some("is allocated; the node driver has not reported on it".to_owned()),
    }
}

/// Finds the devices of a companion in a snapshot, in which reservations are to be held. `earlier` are companions that the cluster has,
/// and the snapshot does not.
///
/// # Errors
/// Why it does not fit.
pub(crate) fn place(
    snapshot: &Snapshot,
    companion: &ResourceClaim,
    earlier: &[&ResourceClaim],
    policies: Policies,
) -> Result<Placement, Explanation> {
    let cluster = &snapshot.cluster;
    let growth = Growth::of(cluster, companion, |uid| {
        let mut pods = snapshot.pods.iter();
        let pod = pods.find(|pod| pod.metadata.uid.as_deref() == Some(uid))?;
        let is_running = pod::node(pod).is_some()
            && pod.metadata.deletion_timestamp.is_none()
            && !is_finished(pod);
        let namespace = pod.metadata.namespace.as_deref()?;
        let names: BTreeSet<&str> = pod::claims(pod).filter_map(|(_, name)| name).collect();
        let claims = snapshot.claims.iter().filter(|claim| {
            let name = claim.metadata.name.as_deref();
            claim.metadata.namespace.as_deref() == Some(namespace)
                && name.is_some_and(|name| names.contains(name))
        });
        is_running.then(|| RunningPod {
            name: pod.metadata.name.as_deref().unwrap_or_default(),
            namespace,
            claims: claims.collect(),
        })
    })?;
    let base = base_uid(companion);
    let siblings = snapshot.claims.iter().chain(earlier.iter().copied());
    let siblings = siblings.filter(|claim| base_uid(claim) == base);
    let siblings: Vec<ObjectKey> = siblings.map(|claim| object_key(&claim.metadata)).collect();
    growth
        .place(cluster, siblings.iter(), policies, &mut Turn::endless())
        .map_err(Undecided::of_endless)
}

/// Returns the pod that a companion goes with.
#[must_use]
pub fn owner(companion: &ResourceClaim) -> Option<&OwnerReference> {
    let mut owners = companion.metadata.owner_references.iter().flatten();
    owners.find(|owner| owner.kind == "Pod" && owner.controller == Some(true))
}

/// A pod that is bound to a node and not being deleted.
#[derive(Debug, Clone)]
pub struct RunningPod<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// The claims that it names, and that exist.
    pub claims: Vec<&'a ResourceClaim>,
}

/// A companion that has the form of one: what is left is whether its GPU has room.
#[derive(Debug)]
pub struct Growth<'a> {
    /// The pod that it goes with.
    pub owner: &'a OwnerReference,
    base: &'a ResourceClaim,
    companion: &'a ResourceClaim,
    /// Node of its base.
    node: String,
    /// A pod on that node with the companion as its only claim, whose requests are limited to the GPUs of the base.
    request: PodRequest,
}

impl<'a> Growth<'a> {
    /// Returns the growth that a companion asks for. `pod` returns the running pod with a UID.
    ///
    /// # Errors
    /// Why the claim can never add to a share, or what is unknown at present.
    pub fn of(
        cluster: &Cluster,
        companion: &'a ResourceClaim,
        pod: impl FnOnce(&str) -> Option<RunningPod<'a>>,
    ) -> Result<Self, Explanation> {
        let invalid = |why: String| Explanation::rejected(Reason::InvalidCompanion, why);
        let (namespace, name) = object_key(&companion.metadata);
        let base_uid = base_uid(companion).unwrap_or_default();
        let owner = owner(companion).ok_or_else(|| {
            invalid("the claim has no pod as its controlling owner; set the pod that it is for in metadata.ownerReferences".to_owned())
        })?;
        let pod = pod(&owner.uid).filter(|pod| pod.namespace == namespace);
        let pod = pod.ok_or_else(|| {
            invalid(format!(
                "its owner, pod {}, does not run in namespace {namespace}: only the shares of running pods grow",
                owner.name
            ))
        })?;
        let mut claims = pod.claims.iter().copied();
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
        if pod.name != owner.name {
            // The garbage collector and kube-controller-manager look for the pod by its name.
            return Err(invalid(format!(
                "its owner has the UID of pod {} and the name {}",
                pod.name, owner.name
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
            selectors.push(only_gpu(gpu_of(cluster, result)?));
            node = result
                .pool
                .rsplit_once('/')
                .map(|(node, _)| node.to_owned());
        }
        if cluster.has_unknown_limits(&namespace) {
            return Err(Explanation::unknown_namespace(&namespace));
        }
        let node = node.ok_or_else(|| invalid(format!("claim {name} requests nothing")))?;
        let request = PodRequest::new(
            &pod_on(&node, &owner.uid, &companion.metadata),
            &[("companion", &limited)],
            &cluster.classes,
            &cluster.selectors,
        );
        let request = request.map_err(Explanation::from)?;
        if request.claims.is_empty() {
            return Err(invalid(format!(
                "claim {name} requests no device of {}",
                names::DRIVER
            )));
        }
        Ok(Self {
            owner,
            base,
            companion,
            node,
            request,
        })
    }

    /// Returns the key of the base.
    #[must_use]
    pub fn base(&self) -> ObjectKey {
        object_key(&self.base.metadata)
    }

    /// Finds the devices of the companion. `siblings` are the other companions of the base.
    ///
    /// # Errors
    /// Why it does not fit, or [`Undecided::Suspended`] if the turn is too short.
    pub fn place<'k>(
        &self,
        cluster: &Cluster,
        siblings: impl Iterator<Item = &'k ObjectKey>,
        policies: Policies,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        self.check_size(cluster).map_err(Undecided::Rejected)?;
        let placed = cluster.decide_on_in(&self.node, &self.request, policies, turn);
        let placement = placed.map_err(|undecided| match undecided {
            Undecided::Rejected(why) => Undecided::Rejected(self.on_own_gpu(&why)),
            suspended @ Undecided::Suspended(_) => suspended,
        })?;
        check_division(self.companion, &placement).map_err(Undecided::Rejected)?;
        self.check_quotas(cluster, siblings, &placement)
            .map_err(Undecided::Rejected)?;
        Ok(placement)
    }

    /// Refuses amounts that the GPU could not have with the base alone on it.
    fn check_size(&self, cluster: &Cluster) -> Result<(), Explanation> {
        let own = AllocatedDevice::of_claim(self.base);
        let requests = self.request.claims.iter().flat_map(|claim| &claim.requests);
        for request in requests {
            let Some(device) = own
                .iter()
                .find(|device| main(&device.request) == request.name)
            else {
                continue;
            };
            let resumed = device.clone().resumed();
            let DeviceAccess::Share(amounts, _) = &resumed.access else {
                continue;
            };
            let [alternative] = request.alternatives.as_slice() else {
                continue;
            };
            for name in [capacity::MEMORY, capacity::CORES] {
                let (pool, device_name) = (&device.pool, &device.device);
                let published = cluster.capacity_of(pool, device_name, name);
                let added = cluster.consumption_of(pool, device_name, name, alternative);
                let (Some(added), Some(published)) = (added, published) else {
                    continue;
                };
                let has = amounts.get(name).copied().unwrap_or(Quantity::ZERO);
                if has + added > published {
                    return Err(self.never_fits(device, name, [has, added, published]));
                }
            }
        }
        Ok(())
    }

    fn never_fits(
        &self,
        device: &AllocatedDevice,
        name: &str,
        amounts: [Quantity; 3],
    ) -> Explanation {
        let [has, added, published] = amounts.map(|amount| amount_text(name, amount));
        let (_, base) = self.base();
        let (_, companion) = object_key(&self.companion.metadata);
        Explanation::rejected(
            Reason::InvalidCompanion,
            format!(
                "claim {companion} can never fit: it adds {added} to the {has} of claim {base}, and {} of pool {} has {published} \
                 altogether; delete it, and request less",
                device.device, device.pool
            ),
        )
    }

    /// Returns why the devices of the base do not serve the companion: others do not count.
    fn on_own_gpu(&self, why: &Explanation) -> Explanation {
        let [verdict] = why.verdicts() else {
            return why.clone();
        };
        let own = AllocatedDevice::of_claim(self.base);
        let is_own = |name: &str| own.iter().any(|device| device.device == name);
        let mut devices = verdict.devices.iter();
        let found = devices.find(|device| is_own(&device.device));
        let (reason, detail) = found.map_or((verdict.reason, &verdict.detail), |device| {
            (device.reason, &device.detail)
        });
        if matches!(reason, Reason::QuotaExceeded | Reason::NodeUnfit) {
            return Explanation::rejected(reason, detail);
        }
        let gpus = own
            .iter()
            .map(|device| format!("{} of pool {}", device.device, device.pool));
        let (_, base) = self.base();
        let detail = match detail.is_empty() {
            true => String::new(),
            false => format!("{detail}; "),
        };
        Explanation::rejected(
            reason,
            format!(
                "{detail}only {} counts, where claim {base} has its share",
                gpus.collect::<Vec<_>>().join(", ")
            ),
        )
    }

    /// Checks that the base with all its companions, and the placed one, stays within what quotas allow one claim.
    fn check_quotas<'k>(
        &self,
        cluster: &Cluster,
        siblings: impl Iterator<Item = &'k ObjectKey>,
        placement: &Placement,
    ) -> Result<(), Explanation> {
        let base = self.base();
        // Another tenant may write the UID to a claim of its own.
        let grown = siblings.filter(|(namespace, _)| *namespace == base.0);
        let mut grown: Vec<&ObjectKey> = grown.collect();
        grown.push(&base);
        let checked = cluster.check_growth(grown.into_iter(), placement);
        checked.map_err(|rejection| {
            let message = format!("{rejection}; what companions add counts as part of the claim");
            Explanation::rejected(Reason::QuotaExceeded, message)
        })
    }
}

fn amount_text(name: &str, amount: Quantity) -> String {
    match name {
        capacity::MEMORY => bytes(amount),
        _ => format!("{amount}% of GPU time"),
    }
}

fn main(request: &str) -> &str {
    request.split_once('/').map_or(request, |(main, _)| main)
}

/// Returns the UUID of the GPU of an allocated device.
fn gpu_of(
    cluster: &Cluster,
    result: &DeviceRequestAllocationResult,
) -> Result<std::sync::Arc<str>, Explanation> {
    let gpu = cluster.gpu_of(&result.pool, &result.device);
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
