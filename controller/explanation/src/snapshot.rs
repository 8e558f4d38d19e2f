//! Snapshot of the cluster's state.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;

use drava_allocator::claim::{ClaimId, Ownership, classify};
use drava_allocator::cluster::{Cluster, is_finished};
use drava_allocator::division::Division;
use drava_allocator::explanation::Explanation;
use drava_allocator::gang::{self, GangName};
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::observed::Observed;
use drava_allocator::placement::Policies;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::taint::rule_from_v1beta2;
use drava_allocator::usage::{AllocatedDevice, DeviceAccess};
use drava_api::leader::{
    GpuControllerLeader, GpuControllerLeaderStatus, LEADER_NAME, LeaderSettings,
    ReservationPurpose, ReservedClaim, ReservedDevice,
};
use drava_api::listed::{Listed, Unreadable};
use drava_api::names;
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::api::resource::v1beta2;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::advice::{Known, Shares};
use crate::defaults::Overheads;
use crate::owner::name_for;

/// Objects of the cluster on which decisions depend. Also the format of `kubectl drava dump`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Objects {
    nodes: Vec<Node>,
    resource_slices: Vec<ResourceSlice>,
    device_taint_rules: Vec<DeviceTaintRule>,
    device_classes: Vec<DeviceClass>,
    resource_claims: Vec<ResourceClaim>,
    pods: Vec<Pod>,
    #[serde(default)]
    gpu_quotas: Vec<GpuQuota>,
    #[serde(default)]
    gpu_policies: Vec<GpuPolicy>,
    /// Empty unless a quota or policy selects namespaces by label.
    #[serde(default)]
    namespaces: Vec<Namespace>,
    #[serde(default)]
    persistent_volume_claims: Vec<PersistentVolumeClaim>,
    #[serde(default)]
    persistent_volumes: Vec<PersistentVolume>,
    #[serde(default)]
    storage_classes: Vec<StorageClass>,
    resource_claim_templates: Vec<ResourceClaimTemplate>,
    /// Whether the claim templates could be listed.
    #[serde(default)]
    has_templates: bool,
    #[serde(default)]
    runtime_classes: Vec<RuntimeClass>,
    /// What the leader reserves for pods that wait.
    #[serde(default)]
    reservations: Vec<ReservedClaim>,
    /// Number of claims with reserved devices that are not in `reservations`.
    #[serde(default)]
    omitted_reservations: u32,
    /// Settings of the leader.
    #[serde(default)]
    settings: Option<LeaderSettings>,
    /// Claims that this build cannot read. Other kinds without a readable version are left out.
    #[serde(default)]
    unreadable_claims: Vec<Unreadable>,
    /// Pods, policies and quotas that this build cannot read: kind, and namespace and name with the cause.
    #[serde(default)]
    unreadable: Vec<(String, String)>,
    /// What the user may not read, and without which an answer is still useful.
    #[serde(default)]
    left_out: Vec<String>,
}

impl Objects {
    /// Removes what decisions do not depend on, such as environment variables, which may hold secrets.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        self.nodes.iter_mut().for_each(Node::trim);
        self.pods.iter_mut().for_each(Pod::trim);
        self.namespaces.iter_mut().for_each(Namespace::trim);
        let claims = self.persistent_volume_claims.iter_mut();
        claims.for_each(PersistentVolumeClaim::trim);
        let volumes = self.persistent_volumes.iter_mut();
        volumes.for_each(PersistentVolume::trim);
        let claims = self.resource_claims.iter_mut();
        let claims = claims.map(|claim| &mut claim.metadata);
        let templates = self.resource_claim_templates.iter_mut();
        let templates = templates.map(|template| &mut template.metadata);
        claims.chain(templates).for_each(keep_own_annotations);
        self
    }

    /// Returns the snapshot and the claim templates.
    #[must_use]
    pub fn into_snapshot(self) -> (Snapshot, Vec<ResourceClaimTemplate>) {
        let mut snapshot = Snapshot::new(
            &self.nodes,
            &self.resource_slices,
            &self.device_taint_rules,
            &self.device_classes,
            self.resource_claims,
            self.pods,
        );
        let cluster = &mut snapshot.cluster;
        apply(cluster, &self.namespaces);
        apply(cluster, &self.gpu_quotas);
        apply(cluster, &self.persistent_volume_claims);
        apply(cluster, &self.persistent_volumes);
        apply(cluster, &self.storage_classes);
        apply(cluster, &self.gpu_policies);
        let classes = self.runtime_classes.into_iter();
        snapshot.overheads = classes
            .filter_map(|class| class.metadata.name.zip(class.overhead?.pod_fixed))
            .collect();
        for claim in &self.unreadable_claims {
            ResourceClaim::apply_unreadable(claim, &mut snapshot.cluster);
        }
        let is_allocated = |claim: &ResourceClaim| {
            let status = claim.status.as_ref();
            status.is_some_and(|status| status.allocation.is_some())
        };
        let waiting = snapshot.claims.iter().filter(|claim| !is_allocated(claim));
        let waiting: BTreeSet<ObjectKey> =
            waiting.map(|claim| object_key(&claim.metadata)).collect();
        snapshot.reservations = self.reservations;
        snapshot.omitted_reservations = self.omitted_reservations;
        snapshot.settings = self.settings;
        // The leader writes the reservations a moment after the allocation of their claims.
        snapshot.reservations.retain(|reserved| {
            waiting.contains(&(reserved.namespace.clone(), reserved.claim.clone()))
        });
        snapshot.unreadable = self.unreadable;
        let templates = self.resource_claim_templates.iter();
        let templates = templates.map(|template| object_key(&template.metadata));
        snapshot.templates = self.has_templates.then(|| templates.collect());
        let claims = self.unreadable_claims.iter();
        let claims = claims.map(|claim| ("ResourceClaim".to_owned(), claim.to_string()));
        snapshot.unreadable.extend(claims);
        snapshot.left_out = self.left_out;
        (snapshot, self.resource_claim_templates)
    }
}

/// Keeps the annotations of drava.
fn keep_own_annotations(metadata: &mut ObjectMeta) {
    if let Some(annotations) = metadata.annotations.as_mut() {
        annotations.retain(|name, _| name.starts_with("gpu.drava.dev/"));
    }
}

fn apply<K: Observed>(cluster: &mut Cluster, objects: &[K]) {
    for object in objects {
        object.apply(cluster);
    }
}

/// State of the cluster, read once.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// What the allocator knows.
    pub cluster: Cluster,
    /// All claims.
    pub claims: Vec<ResourceClaim>,
    /// All pods.
    pub pods: Vec<Pod>,
    /// Objects that this build cannot read: kind, and namespace and name with the cause.
    pub unreadable: Vec<(String, String)>,
    /// What the leader reserves for pods that wait: not allocated, and not free for others.
    pub reservations: Vec<ReservedClaim>,
    /// Number of claims with reserved devices that the leader does not list.
    pub omitted_reservations: u32,
    /// Settings of the leader, if it has written them.
    pub settings: Option<LeaderSettings>,
    /// The reservations as the cluster holds them, once they were needed.
    held: Option<Vec<HeldDevices>>,
    /// What the user may not read, and what is unknown thus.
    pub left_out: Vec<String>,
    /// Names of the claim templates, if they are known.
    pub(crate) templates: Option<BTreeSet<ObjectKey>>,
    /// What the shares of the published GPUs can be.
    pub(crate) shares: Shares,
    /// Pod overhead of the runtime classes.
    pub(crate) overheads: Overheads,
}

/// The devices of a reservation.
#[derive(Debug)]
struct HeldDevices {
    /// The pod that waits.
    owner: ObjectKey,
    claim: ClaimId,
    devices: Vec<AllocatedDevice>,
    is_charged: bool,
}

/// Devices of a node that are reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    node: String,
    /// The pods that wait, as `namespace/name`.
    owners: BTreeSet<String>,
}

impl Held {
    /// Returns why a pod of a namespace waits; the names of pods of other namespaces are hidden from a reader of one.
    pub(crate) fn explanation(&self, reader: Option<&str>) -> Explanation {
        let owners = self.owners.iter().map(|owner| match reader {
            Some(reader) => name_for(reader, "pod", owner),
            None => format!("pod {owner}"),
        });
        let owners: BTreeSet<String> = owners.collect();
        let owners: Vec<String> = owners.into_iter().collect();
        let message = format!(
            "the pod fits on {}, but its devices are reserved for {}, which waits for others to end",
            self.node,
            owners.join(" and ")
        );
        Explanation::rejected(Reason::Reserved, message)
    }
}

/// Why the objects of a kind are unknown.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The user may not list them.
    #[error(
        "you may not list {0} in all namespaces; `kubectl auth can-i list {0} -A` shows when you may"
    )]
    Forbidden(String),
    /// The API server does not serve them in this version.
    #[error("cannot list {0}; resource.k8s.io/v1 is available since Kubernetes 1.34")]
    NotServed(String),
    /// The request failed.
    #[error("cannot list {plural} in all namespaces")]
    Failed {
        /// Kind.
        plural: String,
        /// Why.
        source: Box<kube::Error>,
    },
}

impl ListError {
    /// Returns whether the user may not list the objects.
    #[must_use]
    pub const fn is_forbidden(&self) -> bool {
        matches!(self, Self::Forbidden(_))
    }
}

impl Snapshot {
    /// Returns the pods of a gang that exist.
    pub(crate) fn members(&self, gang: &GangName) -> impl Iterator<Item = &Pod> {
        let pods = self.pods.iter();
        pods.filter(move |pod| gang::name_of(pod).as_ref() == Some(gang) && !is_finished(pod))
    }

    /// Returns what advice depends on.
    pub(crate) const fn known(&self) -> Known<'_> {
        Known {
            classes: &self.cluster.classes,
            selectors: &self.cluster.selectors,
            shares: self.shares,
        }
    }

    /// Lets the cluster count the reserved devices as taken, except those of one pod.
    pub(crate) fn hold_reservations(&mut self, except: Option<&ObjectKey>) {
        let held = self.held.take().unwrap_or_else(|| self.held_devices());
        for reservation in &held {
            if except != Some(&reservation.owner) {
                let HeldDevices { claim, devices, .. } = reservation;
                self.cluster
                    .hold_devices(claim, devices.clone(), reservation.is_charged);
            }
        }
        self.held = Some(held);
    }

    /// Returns the reservations of claims that exist.
    fn held_devices(&self) -> Vec<HeldDevices> {
        if self.reservations.is_empty() {
            return Vec::new();
        }
        let claims = self.claims.iter();
        let claims: BTreeMap<ObjectKey, &ResourceClaim> = claims
            .map(|claim| (object_key(&claim.metadata), claim))
            .collect();
        let held = self.reservations.iter().filter_map(|reservation| {
            let key = (reservation.namespace.clone(), reservation.claim.clone());
            let claim = ClaimId::of(claims.get(&key)?);
            Some(HeldDevices {
                owner: (reservation.namespace.clone(), reservation.pod.clone()),
                devices: reserved_devices(&Arc::new(claim.clone()), &reservation.devices),
                claim,
                // As the controller does: what was freed for the pod is its own already.
                is_charged: reservation.purpose == ReservationPurpose::Preemption,
            })
        });
        held.collect()
    }

    /// Returns whether a claim requests devices of this driver.
    pub(crate) fn is_own(&self, claim: &ResourceClaim) -> bool {
        let Cluster {
            classes, selectors, ..
        } = &self.cluster;
        let ownership = classify(claim, classes, selectors);
        matches!(ownership, Ownership::Ours(_) | Ownership::Rejected(_))
    }

    /// Returns that free devices may be reserved; `None` if the leader lists all reservations.
    #[must_use]
    pub fn omission(&self) -> Option<String> {
        let omitted = self.omitted_reservations;
        (omitted > 0).then(|| {
            format!(
                "the controller reserves devices for {omitted} more claims than it lists, so devices that seem to be free may be \
                 reserved"
            )
        })
    }

    /// Reverts [`Self::hold_reservations`].
    pub(crate) fn lift_reservations(&mut self) {
        for reservation in &self.reservations {
            let key = (reservation.namespace.clone(), reservation.claim.clone());
            self.cluster.forget(&key);
        }
    }

    /// Returns for whom the devices are reserved on which alone a pod fits; none if it fits on no device or on free ones. No
    /// reservation is held.
    pub(crate) fn waits_for_reserved(
        &mut self,
        pod: &ObjectKey,
        request: &PodRequest,
        policies: Policies,
    ) -> Option<Held> {
        let node = self.cluster.decide(request, policies).ok()?.node;
        self.hold_reservations(Some(pod));
        let beside = self.cluster.decide(request, policies);
        self.lift_reservations();
        beside.is_err().then(|| self.reserved_on(node, pod))
    }

    /// Returns for whom devices of a node are reserved.
    fn reserved_on(&self, node: String, pod: &ObjectKey) -> Held {
        let pool = names::pool(&node);
        let owners = self.reservations.iter().filter(|reservation| {
            let is_own = reservation.namespace == pod.0 && reservation.pod == pod.1;
            let mut devices = reservation.devices.iter();
            !is_own && devices.any(|device| device.pool == pool)
        });
        let owners =
            owners.map(|reservation| format!("{}/{}", reservation.namespace, reservation.pod));
        Held {
            owners: owners.collect(),
            node,
        }
    }

    /// Creates a snapshot of these objects.
    #[must_use]
    pub fn new(
        nodes: &[Node],
        slices: &[ResourceSlice],
        taint_rules: &[DeviceTaintRule],
        classes: &[DeviceClass],
        claims: Vec<ResourceClaim>,
        pods: Vec<Pod>,
    ) -> Self {
        let mut cluster = Cluster::default();
        apply(&mut cluster, nodes);
        apply(&mut cluster, classes);
        apply(&mut cluster, slices);
        apply(&mut cluster, taint_rules);
        apply(&mut cluster, &claims);
        apply(&mut cluster, &pods);
        Self {
            cluster,
            claims,
            pods,
            unreadable: Vec::new(),
            reservations: Vec::new(),
            omitted_reservations: 0,
            settings: None,
            held: None,
            left_out: Vec::new(),
            templates: None,
            shares: slices
                .iter()
                .map(Shares::of)
                .fold(Shares::default(), Shares::or),
            overheads: Overheads::new(),
        }
    }
}

fn reserved_devices(claim: &Arc<ClaimId>, devices: &[ReservedDevice]) -> Vec<AllocatedDevice> {
    let amount = |(name, text): (&String, &String)| Some((name.clone(), text.parse().ok()?));
    let devices = devices.iter().map(|device| AllocatedDevice {
        claim: Arc::clone(claim),
        pool: device.pool.clone(),
        device: device.device.clone(),
        request: device.request.clone(),
        access: match &device.capacity {
            Some(amounts) => DeviceAccess::Share(
                amounts.iter().filter_map(amount).collect(),
                match device.spatial {
                    true => Division::Multiprocessors(claim.namespace.as_str().into()),
                    false => Division::Time,
                },
            ),
            None => DeviceAccess::Exclusive,
        },
    });
    devices.collect()
}

/// Reads the cluster.
///
/// # Errors
/// If a kind cannot be listed.
pub async fn take(client: &Client) -> Result<Snapshot, ListError> {
    Ok(fetch(client).await?.into_snapshot().0)
}

/// Reads the objects of the cluster, without RuntimeClasses.
///
/// # Errors
/// If a kind cannot be listed.
pub async fn fetch(client: &Client) -> Result<Objects, ListError> {
    let ours = ListParams::default().fields(&format!("spec.driver={}", names::DRIVER));
    let all = ListParams::default();
    let mut unreadable = Vec::new();
    let (nodes, slices, rules, classes, claims, pods, quotas, policies) = tokio::try_join!(
        list_readable::<Node>(client, &all),
        list_readable::<ResourceSlice>(client, &ours),
        list_taint_rules(client),
        list_readable::<DeviceClass>(client, &all),
        list_readable::<ResourceClaim>(client, &all),
        list_readable::<Pod>(client, &all),
        Box::pin(list_served::<GpuQuota>(client)),
        Box::pin(list_served::<GpuPolicy>(client)),
    )?;
    let (resource_claims, unreadable_claims) = claims;
    let nodes = noting("Node", nodes, &mut unreadable);
    let slices = noting("ResourceSlice", slices, &mut unreadable);
    let classes = noting("DeviceClass", classes, &mut unreadable);
    let pods = noting("Pod", pods, &mut unreadable);
    let quotas = noting("GpuQuota", quotas, &mut unreadable);
    let policies = noting("GpuPolicy", policies, &mut unreadable);
    let (volume_claims, volumes, storage_classes, templates, reservations) = tokio::try_join!(
        permitted(client),
        permitted(client),
        permitted(client),
        permitted::<ResourceClaimTemplate>(client),
        reservations(client),
    )?;
    let has_templates = templates.is_some();
    let mut left_out = Vec::new();
    let persistent_volume_claims = or_left_out(volume_claims, &mut left_out);
    let persistent_volumes = or_left_out(volumes, &mut left_out);
    let storage_classes = or_left_out(storage_classes, &mut left_out);
    let resource_claim_templates = or_left_out(templates, &mut left_out);
    if reservations.is_none() {
        let plural = GpuControllerLeader::plural(&());
        left_out.push(format!("{plural} (what is reserved for other pods)"));
    }
    let of_quotas = quotas.iter().map(|quota| &quota.spec.namespace_selector);
    let of_policies = policies
        .iter()
        .map(|policy| &policy.spec.namespace_selector);
    let namespaces = if of_quotas.chain(of_policies).any(Option::is_some) {
        list::<Namespace>(client, &all).await?
    } else {
        Vec::new()
    };
    let reserved = reservations.unwrap_or_default();
    Ok(Objects {
        nodes,
        resource_slices: slices,
        device_taint_rules: rules,
        device_classes: classes,
        resource_claims,
        pods,
        gpu_quotas: quotas,
        gpu_policies: policies,
        namespaces,
        persistent_volume_claims,
        persistent_volumes,
        storage_classes,
        reservations: reserved.reservations,
        omitted_reservations: reserved.omitted_reservations,
        settings: reserved.settings,
        has_templates,
        resource_claim_templates,
        runtime_classes: Vec::new(),
        unreadable_claims,
        unreadable,
        left_out,
    })
}

/// Returns the objects of a list, and notes those that this build cannot read.
fn noting<K>(
    kind: &str,
    (objects, unreadable): (Vec<K>, Vec<Unreadable>),
    noted: &mut Vec<(String, String)>,
) -> Vec<K> {
    let unreadable = unreadable.iter();
    noted.extend(unreadable.map(|object| (kind.to_owned(), object.to_string())));
    objects
}

/// Reads the objects of the cluster with what only pods that do not exist so far need: RuntimeClasses. The API server has set
/// the overhead of an existing pod.
///
/// # Errors
/// If a kind cannot be listed.
pub async fn fetch_for_new_pods(client: &Client) -> Result<Objects, ListError> {
    let mut objects = fetch(client).await?;
    objects.runtime_classes = or_left_out(permitted(client).await?, &mut objects.left_out);
    Ok(objects)
}

/// Lists the DeviceTaintRules in the version that is served; none if no version is.
async fn list_taint_rules(client: &Client) -> Result<Vec<DeviceTaintRule>, ListError> {
    let all = ListParams::default();
    match list::<DeviceTaintRule>(client, &all).await {
        Err(error) if is_not_served(&error) => {}
        rules => return rules,
    }
    match list::<v1beta2::DeviceTaintRule>(client, &all).await {
        Err(error) if is_not_served(&error) => Ok(Vec::new()),
        rules => Ok(rules?.into_iter().map(rule_from_v1beta2).collect()),
    }
}

/// Reads what the leader reserves, if the user may; nothing if no controller runs.
async fn reservations(client: &Client) -> Result<Option<GpuControllerLeaderStatus>, ListError> {
    let leaders: Api<GpuControllerLeader> = Api::all(client.clone());
    match leaders.get(LEADER_NAME).await {
        Ok(leader) => Ok(Some(leader.status.unwrap_or_default())),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(None),
        Err(kube::Error::Api(status)) if status.code == 404 => {
            Ok(Some(GpuControllerLeaderStatus::default()))
        }
        Err(error) => Err(ListError::Failed {
            plural: GpuControllerLeader::plural(&()).to_string(),
            source: Box::new(error),
        }),
    }
}

/// Lists the objects of a kind; none if its definition is not installed.
async fn list_served<K>(client: &Client) -> Result<(Vec<K>, Vec<Unreadable>), ListError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    match list_readable::<K>(client, &ListParams::default()).await {
        Err(error) if is_not_served(&error) => Ok((Vec::new(), Vec::new())),
        objects => objects,
    }
}

/// Returns objects without which an answer is still useful, and notes those that the user may not list.
fn or_left_out<K: Resource<DynamicType = ()>>(
    objects: Option<Vec<K>>,
    left_out: &mut Vec<String>,
) -> Vec<K> {
    objects.unwrap_or_else(|| {
        left_out.push(K::plural(&()).to_string());
        Vec::new()
    })
}

/// Lists objects, if the user may.
async fn permitted<K>(client: &Client) -> Result<Option<Vec<K>>, ListError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    match list(client, &ListParams::default()).await {
        Err(error) if error.is_forbidden() => Ok(None),
        objects => objects.map(Some),
    }
}

fn is_not_served(error: &ListError) -> bool {
    matches!(error, ListError::NotServed(_))
}

/// Lists the objects of a kind in all namespaces, without those that this build cannot read.
///
/// # Errors
/// With a hint about the permission or version that is missing.
pub async fn list<K>(client: &Client, params: &ListParams) -> Result<Vec<K>, ListError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    Ok(list_readable(client, params).await?.0)
}

/// Lists the objects of a kind in all namespaces, and those that this build cannot read.
///
/// # Errors
/// With a hint about the permission or version that is missing.
pub async fn list_readable<K>(
    client: &Client,
    params: &ListParams,
) -> Result<(Vec<K>, Vec<Unreadable>), ListError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let listed = Api::<Listed<K>>::all(client.clone()).list(params).await;
    let objects = listed.map_err(|error| {
        let plural = K::plural(&()).to_string();
        match &error {
            kube::Error::Api(status) if status.code == 403 => ListError::Forbidden(plural),
            kube::Error::Api(status) if status.code == 404 => ListError::NotServed(plural),
            _ => ListError::Failed {
                plural,
                source: Box::new(error),
            },
        }
    })?;
    Ok(Listed::split(objects.items))
}
