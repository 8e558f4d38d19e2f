//! State of the cluster: nodes, pools, device classes, quotas and allocations.
//!
//! Objects arrive one by one, in any order; the state depends only on the newest version of each object. An allocation
//! that is written but not yet observed is *assumed*, as in kube-scheduler: it counts until the claim is observed with
//! it, or until it is forgotten because the write failed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_api::listed::Unreadable;
use drava_api::{Quantity, names};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::attribute::Attribute;
use crate::capacity::Amounts;
use crate::claim::{Alternative, ClaimId};
use crate::fragmentation::mix::Mix;
use crate::node::NodeInfo;
use crate::node::neighbors::Neighbor;
use crate::object::{ObjectKey, object_key};
use crate::placement::Placement;
use crate::pool::{Pool, PoolProblem, Shapes, Slice};
use crate::ranking::Rankings;
use crate::reason::Rejection;
use crate::selector::Selectors;
use crate::taint::TaintRule;
use crate::usage::{self, AllocatedDevice, DeviceAccess, Usage};
use neighbors::AntiAffinity;
use policies::Policies;
use quotas::Quotas;
use volumes::Volumes;

mod mix;
pub(crate) mod neighbors;
mod pods;
mod policies;
mod pools;
mod quotas;
mod simulation;
mod taint_rules;
mod volumes;

pub use pods::is_finished;
pub use pools::FreeMemory;
pub use quotas::{Floors, QuotaUse};
pub use simulation::Departure;
pub use volumes::is_zone_label;

/// State of the cluster, see the [module](self).
#[derive(Debug, Default)]
pub struct Cluster {
    /// Compiled selectors.
    pub selectors: Selectors,
    /// Device classes by name.
    pub classes: BTreeMap<String, DeviceClass>,
    nodes: BTreeMap<String, NodeInfo>,
    /// Rules that can affect devices of this driver, by name.
    taint_rules: BTreeMap<String, TaintRule>,
    slices: BTreeMap<String, (u64, Slice)>,
    /// Names of the slices by pool.
    slices_of: BTreeMap<String, BTreeSet<String>>,
    shapes: Shapes,
    pools: BTreeMap<String, PoolState>,
    /// Names of the pools by node.
    pools_on: BTreeMap<String, BTreeSet<String>>,
    claims: BTreeMap<ObjectKey, ClaimState>,
    /// Claims that cannot be read, with the cause. Their devices are known, but not how they use them.
    unreadable_claims: BTreeMap<ObjectKey, String>,
    /// Claims with devices, by pool.
    claims_of: BTreeMap<String, BTreeSet<ObjectKey>>,
    assumed: BTreeMap<ObjectKey, Assumed>,
    pods: BTreeMap<String, PodAssignment>,
    /// Sum of the requests of the pods, by node.
    requested: BTreeMap<String, Amounts>,
    /// Sum of the requests of the pods that are presumed gone, by node.
    gone_requested: BTreeMap<String, Amounts>,
    /// Devices of the claims that a simulation presumes suspended.
    presumed_suspended: BTreeMap<ObjectKey, Vec<AllocatedDevice>>,
    anti_affinity: AntiAffinity,
    /// UIDs of the pods that attract or repel others.
    with_preferences: BTreeSet<String>,
    /// Nodes with a taint that pods without a toleration should avoid.
    softly_tainted: BTreeSet<String>,
    quotas: Quotas,
    volumes: Volumes,
    policies: Policies,
    /// Pools with more allocated than there is, including assumed allocations.
    overcommitted: BTreeSet<String>,
    /// Pools with a problem.
    excluded: BTreeSet<String>,
    /// See [`Self::take_changed_nodes`].
    changed_nodes: BTreeSet<String>,
    /// See [`Self::take_changed_holders`].
    changed_holders: BTreeSet<String>,
    /// What the current simulation presumes gone.
    gone: Departure,
    pub(crate) rankings: Rankings,
    /// What pods request in this cluster.
    mix: Mix,
}

/// Effect of a slice on its pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolChange {
    /// The pool publishes what it did.
    None,
    /// The pool cannot be used, as while slices are missing.
    Unusable,
    /// The pool of this node can be used, and could not, or published something else.
    Usable(String),
}

/// A pool with its usage, or its problem.
#[derive(Debug)]
pub(crate) struct PoolState {
    pub(crate) node: Option<String>,
    pub(crate) state: Result<(Pool, Usage), PoolProblem>,
}

#[derive(Debug)]
struct ClaimState {
    version: u64,
    allocated_devices: Vec<AllocatedDevice>,
}

#[derive(Debug)]
struct Assumed {
    uid: String,
    allocated_devices: Vec<AllocatedDevice>,
    /// Whether the devices count against quotas.
    is_charged: bool,
}

#[derive(Debug, PartialEq)]
struct PodAssignment {
    node: String,
    requests: Amounts,
    neighbor: Neighbor,
    is_bound: bool,
}

impl Cluster {
    /// Adds or replaces a node. Returns whether a field relevant to decisions has changed.
    pub fn upsert_node(&mut self, node: &Node) -> bool {
        let name = node.metadata.name.clone().unwrap_or_default();
        let info = NodeInfo::of(node);
        if self.nodes.get(&name) == Some(&info) {
            return false;
        }
        self.rankings.mark_changed(&name);
        let before = self.nodes.get(&name);
        self.anti_affinity.relabel(&name, before, Some(&info));
        match info.has_soft_taints() {
            true => self.softly_tainted.insert(name.clone()),
            false => self.softly_tainted.remove(&name),
        };
        self.nodes.insert(name, info);
        true
    }

    /// Removes a node.
    pub fn remove_node(&mut self, name: &str) {
        self.rankings.mark_changed(name);
        self.softly_tainted.remove(name);
        let removed = self.nodes.remove(name);
        self.anti_affinity.relabel(name, removed.as_ref(), None);
    }

    /// Returns the names of all nodes.
    pub fn node_names(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Returns a node by name.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&NodeInfo> {
        self.nodes.get(name)
    }

    /// Adds or replaces a class. Returns whether its specification has changed.
    pub fn upsert_class(&mut self, class: DeviceClass) -> bool {
        let Some(name) = class.metadata.name.clone() else {
            return false;
        };
        let spec = class.spec.clone();
        let before = self.classes.insert(name, class);
        before.is_none_or(|before| before.spec != spec)
    }

    /// Removes a class.
    pub fn remove_class(&mut self, name: &str) {
        self.classes.remove(name);
    }

    /// Returns what devices and pools have in common.
    #[cfg(test)]
    pub(crate) const fn shapes(&self) -> &Shapes {
        &self.shapes
    }

    /// Adds or replaces a slice of this driver. Returns what has changed.
    pub fn upsert_slice(&mut self, slice: &ResourceSlice) -> PoolChange {
        let version = version(&slice.metadata);
        let parsed = Slice::parse(slice, &mut self.shapes);
        let name = parsed.name.clone();
        if self
            .slices
            .get(&name)
            .is_some_and(|(known, _)| *known > version)
        {
            return PoolChange::None;
        }
        let pool = parsed.pool.clone();
        let before = self.slices.insert(name.clone(), (version, parsed));
        if let Some((_, before)) = before
            && before.pool != pool
        {
            self.unlink_slice(&name, &before.pool);
        }
        self.slices_of.entry(pool.clone()).or_default().insert(name);
        self.assemble_and_compare(&pool)
    }

    fn unlink_slice(&mut self, name: &str, pool: &str) -> PoolChange {
        if let Some(names) = self.slices_of.get_mut(pool) {
            names.remove(name);
        }
        self.assemble_and_compare(pool)
    }

    /// Removes a slice. Returns what has changed.
    pub fn remove_slice(&mut self, name: &str) -> PoolChange {
        match self.slices.remove(name) {
            Some((_, slice)) => self.unlink_slice(name, &slice.pool),
            None => PoolChange::None,
        }
    }

    /// Adds or replaces a claim; ignores a version older than the known one. Returns whether devices were released.
    pub fn upsert_claim(&mut self, claim: &ResourceClaim) -> bool {
        let status = claim.status.as_ref();
        let is_allocated = status.is_some_and(|status| status.allocation.is_some());
        let devices = AllocatedDevice::of_claim(claim);
        self.upsert_devices(&claim.metadata, devices, is_allocated, None)
    }

    /// Adds or replaces a claim that cannot be read, with the same results. The pools of its devices are excluded.
    pub fn upsert_unreadable_claim(&mut self, claim: &Unreadable) -> bool {
        let devices = AllocatedDevice::of_unreadable(claim);
        let is_allocated = !devices.is_empty();
        let cause = Some(claim.cause.clone());
        self.upsert_devices(&claim.metadata, devices, is_allocated, cause)
    }

    fn upsert_devices(
        &mut self,
        metadata: &ObjectMeta,
        allocated_devices: Vec<AllocatedDevice>,
        is_allocated: bool,
        unreadable: Option<String>,
    ) -> bool {
        let key = object_key(metadata);
        let version = version(metadata);
        if self
            .claims
            .get(&key)
            .is_some_and(|known| known.version > version)
        {
            return false;
        }
        let was_readable = match unreadable {
            Some(cause) => self.unreadable_claims.insert(key.clone(), cause).is_none(),
            None => self.unreadable_claims.remove(&key).is_none(),
        };
        let is_readable = !self.unreadable_claims.contains_key(&key);
        let uid = metadata.uid.as_deref().unwrap_or_default();
        let assumed = self
            .assumed
            .get(&key)
            .filter(|assumed| is_allocated || assumed.uid != uid);
        let (was_assumed, assumed) = match assumed {
            Some(assumed) => (true, assumed.allocated_devices.clone()),
            None => (false, Vec::new()),
        };
        if was_assumed {
            self.assumed.remove(&key);
        }
        let state = ClaimState {
            version,
            allocated_devices,
        };
        let before = self.claims.insert(key.clone(), state);
        let before = before.map(|state| state.allocated_devices);
        let before = before.unwrap_or_default();
        let current = self.claims.get(&key);
        let current = current.map_or(&[][..], |state| &state.allocated_devices);
        let is_released = before.iter().any(|allocated| !current.contains(allocated));
        // Most versions of a claim change nothing that counts: the allocation was assumed, or is known.
        let is_unchanged = was_readable
            && is_readable
            && match was_assumed {
                true => before.is_empty() && uses(&assumed).eq(uses(current)),
                false => before == current,
            };
        if !is_unchanged {
            let all = before.iter().chain(&assumed).chain(current);
            let touched = pools_of(all);
            self.recount(&key, &touched);
        }
        is_released
    }

    /// Removes a claim. Returns whether it had devices.
    pub fn remove_claim(&mut self, key: &ObjectKey) -> bool {
        let mut touched = BTreeSet::new();
        self.unreadable_claims.remove(key);
        if let Some(state) = self.claims.remove(key) {
            touched.extend(pools_of(&state.allocated_devices));
        }
        if let Some(assumed) = self.assumed.remove(key) {
            touched.extend(pools_of(&assumed.allocated_devices));
        }
        self.recount(key, &touched);
        !touched.is_empty()
    }

    /// Assumes the allocations of a placement until its claims are observed with them.
    pub fn assume(&mut self, placement: &Placement) {
        self.assume_devices(placement, true);
    }

    /// Assumes the allocations of a placement without charging them to quotas: the devices are kept for a pod that may have
    /// to wait long for others.
    pub fn hold(&mut self, placement: &Placement) {
        self.assume_devices(placement, false);
    }

    fn assume_devices(&mut self, placement: &Placement, is_charged: bool) {
        for claim in &placement.claims {
            self.take_devices(&claim.claim, claim.allocated_devices(), is_charged);
        }
    }

    /// Keeps devices for a claim like [`Self::hold`], without its placement. `is_charged`: to its quotas, too.
    pub fn hold_devices(
        &mut self,
        claim: &ClaimId,
        devices: Vec<AllocatedDevice>,
        is_charged: bool,
    ) {
        self.take_devices(claim, devices, is_charged);
    }

    fn take_devices(
        &mut self,
        claim: &ClaimId,
        allocated_devices: Vec<AllocatedDevice>,
        is_charged: bool,
    ) {
        let key = (claim.namespace.clone(), claim.name.clone());
        let touched = pools_of(&allocated_devices);
        let assumed = Assumed {
            uid: claim.uid.clone(),
            allocated_devices,
            is_charged,
        };
        self.assumed.insert(key.clone(), assumed);
        self.recount(&key, &touched);
    }

    /// Forgets an assumed allocation whose write has failed.
    pub fn forget(&mut self, key: &ObjectKey) {
        if let Some(assumed) = self.assumed.remove(key) {
            self.recount(key, &pools_of(&assumed.allocated_devices));
        }
    }

    /// Returns the devices of all claims, including assumed allocations.
    pub fn allocated_devices(&self) -> impl Iterator<Item = &AllocatedDevice> {
        let observed = self
            .claims
            .values()
            .flat_map(|state| &state.allocated_devices);
        let assumed = self
            .assumed
            .values()
            .flat_map(|assumed| &assumed.allocated_devices);
        observed.chain(assumed)
    }

    /// Returns what a suspended claim lacks to be resumed, with its pool and device; `None` if nothing.
    #[must_use]
    pub fn lacks_to_resume(&self, claim: &ObjectKey) -> Option<(String, Rejection)> {
        let state = self.claims.get(claim)?;
        state.allocated_devices.iter().find_map(|allocated| {
            let DeviceAccess::Suspended(amounts) = &allocated.access else {
                return None;
            };
            let shortage = |rejection| {
                (
                    format!("device {} of pool {}", allocated.device, allocated.pool),
                    rejection,
                )
            };
            let pool = self.pools.get(&allocated.pool).map(|state| &state.state);
            let Some(Ok((pool, usage))) = pool else {
                return Some(shortage(Rejection::Unpublished));
            };
            let Some(index) = pool.index_of(&allocated.device) else {
                return Some(shortage(Rejection::Unpublished));
            };
            usage.shortage(pool, index, amounts).map(shortage)
        })
    }

    /// Returns the host memory that all suspended shares of the device's node may have together; `None` without a limit.
    #[must_use]
    pub fn suspend_host_memory(&self, pool: &str, device: &str) -> Option<Quantity> {
        let (pool, _) = self.pools.get(pool)?.state.as_ref().ok()?;
        let device = pool.devices.get(pool.index_of(device)?)?;
        match device.published(names::attribute::SUSPEND_HOST_MEMORY_MIB)? {
            Attribute::Int(mib) => Some(Quantity::bytes(u64::try_from(*mib).ok()? << 20)),
            _ => None,
        }
    }

    /// Returns the GPU of a device.
    #[must_use]
    pub fn gpu_of(&self, pool: &str, device: &str) -> Option<Arc<str>> {
        let (pool, _) = self.pools.get(pool)?.state.as_ref().ok()?;
        let device = pool.devices.get(pool.index_of(device)?)?;
        Some(Arc::clone(&device.gpu))
    }

    /// Returns the amount of a capacity that a device publishes.
    #[must_use]
    pub fn capacity_of(&self, pool: &str, device: &str, capacity: &str) -> Option<Quantity> {
        let (pool, _) = self.pools.get(pool)?.state.as_ref().ok()?;
        let device = pool.devices.get(pool.index_of(device)?)?;
        device.amount(capacity)
    }

    /// Returns what a request consumes of a capacity of a device, with the defaults of the device; `None` where it cannot have the
    /// device.
    #[must_use]
    pub fn consumption_of(
        &self,
        pool: &str,
        device: &str,
        capacity: &str,
        request: &Alternative,
    ) -> Option<Quantity> {
        let (pool, _) = self.pools.get(pool)?.state.as_ref().ok()?;
        let device = pool.devices.get(pool.index_of(device)?)?;
        usage::amount(capacity, device.capacity.get(capacity)?, request).ok()
    }

    /// Recomputes the usage of these pools, and of quotas, after a change of the claim's devices.
    fn recount(&mut self, claim: &ObjectKey, pools: &BTreeSet<String>) {
        self.charge(claim);
        self.index_devices(claim, pools);
        for pool in pools {
            self.recount_pool(pool);
        }
    }

    /// Updates in which of the pools a claim has devices.
    fn index_devices(&mut self, claim: &ObjectKey, pools: &BTreeSet<String>) {
        for pool in pools {
            self.mark_holders_changed(pool);
            let has_devices = self
                .devices_of(claim)
                .any(|allocated| allocated.pool == *pool);
            let claims = self.claims_of.entry(pool.clone()).or_default();
            if has_devices {
                claims.insert(claim.clone());
            } else {
                claims.remove(claim);
            }
            if claims.is_empty() {
                self.claims_of.remove(pool);
            }
        }
    }

    /// Counts the usage of a pool after a change of its claims.
    fn recount_pool(&mut self, pool: &str) {
        match self.pools.get(pool).map(|state| &state.state) {
            // The claim may have released the missing device, or be readable now.
            Some(Err(
                PoolProblem::AllocatedDeviceMissing { .. } | PoolProblem::ClaimUnreadable { .. },
            )) => self.assemble(pool),
            Some(Ok((assembled, _))) => {
                let counted = self.usage_of(pool, assembled);
                self.mark_pool_changed(pool);
                if let Some(state) = self.pools.get_mut(pool) {
                    match (counted, &mut state.state) {
                        (Ok(counted), Ok((_, usage))) => *usage = counted,
                        (Err(problem), state) => *state = Err(problem),
                        (Ok(_), Err(_)) => {}
                    }
                }
                self.note_problems(pool);
            }
            Some(Err(_)) | None => {}
        }
    }

    fn usage_of(&self, pool: &str, assembled: &Pool) -> Result<Usage, PoolProblem> {
        let claims = self.claims_of.get(pool).into_iter().flatten();
        let unreadable = claims.clone().find_map(|claim| {
            let (key, cause) = self.unreadable_claims.get_key_value(claim)?;
            Some(PoolProblem::ClaimUnreadable {
                claim: format!("{}/{}", key.0, key.1),
                cause: cause.clone(),
            })
        });
        if let Some(problem) = unreadable {
            return Err(problem);
        }
        let allocated_devices = claims.flat_map(|claim| self.devices_of(claim));
        Usage::of(
            assembled,
            allocated_devices.filter(|allocated| allocated.pool == pool),
        )
    }

    /// Returns the devices of a claim, including assumed allocations.
    fn devices_of(&self, claim: &ObjectKey) -> impl Iterator<Item = &AllocatedDevice> {
        let assumed = self.assumed.get(claim).into_iter();
        let assumed = assumed.flat_map(|assumed| &assumed.allocated_devices);
        self.observed_devices_of(claim).chain(assumed)
    }

    /// Returns the devices of a claim that count against quotas.
    fn charged_devices_of(&self, claim: &ObjectKey) -> impl Iterator<Item = &AllocatedDevice> {
        let assumed = self.assumed.get(claim).filter(|assumed| assumed.is_charged);
        let assumed = assumed.into_iter();
        let assumed = assumed.flat_map(|assumed| &assumed.allocated_devices);
        self.observed_devices_of(claim).chain(assumed)
    }

    fn observed_devices_of(&self, claim: &ObjectKey) -> impl Iterator<Item = &AllocatedDevice> {
        let observed = self.claims.get(claim);
        let observed = observed.filter(|_| !self.gone.claims.contains(claim));
        let observed = observed.map(|state| match self.presumed_suspended.get(claim) {
            Some(suspended) => suspended.as_slice(),
            None => &state.allocated_devices,
        });
        observed.into_iter().flatten()
    }
}

/// Returns the resource version as a number (KEP-5504); 0 if it is not one.
fn version(metadata: &ObjectMeta) -> u64 {
    metadata
        .resource_version
        .as_deref()
        .and_then(|version| version.parse().ok())
        .unwrap_or_default()
}

/// Returns what of the devices counts in usage and quotas.
fn uses(devices: &[AllocatedDevice]) -> impl Iterator<Item = (&str, &str, &DeviceAccess)> {
    devices
        .iter()
        .map(|allocated| (&*allocated.pool, &*allocated.device, &allocated.access))
}

fn pools_of<'a>(
    allocated_devices: impl IntoIterator<Item = &'a AllocatedDevice>,
) -> BTreeSet<String> {
    allocated_devices
        .into_iter()
        .map(|allocated| allocated.pool.clone())
        .collect()
}

#[cfg(test)]
mod tests;
