//! The cluster as the allocator knows it: nodes, pools, classes, who holds what.
//!
//! Fed object by object, in any order; the state depends only on the newest version of each object. What is written
//! but not yet seen coming back is *assumed*: it counts as held until the object says so itself, or until it is
//! forgotten because the write failed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::capacity::Amounts;
use crate::node::{self, NodeInfo};
use crate::placement::Placement;
use crate::pool::{Pool, PoolProblem, Slice};
use crate::selector::Selectors;
use crate::usage::{Holding, Usage};

/// Namespace and name.
pub type ObjectKey = (String, String);

/// State of the cluster, see the [module](self).
#[derive(Debug, Default)]
pub struct Cluster {
    /// Compiled selectors.
    pub selectors: Selectors,
    /// Device classes by name.
    pub classes: BTreeMap<String, DeviceClass>,
    nodes: BTreeMap<String, NodeInfo>,
    slices: BTreeMap<String, (u64, Slice)>,
    /// Names of the slices of a pool.
    slices_of: BTreeMap<String, BTreeSet<String>>,
    pools: BTreeMap<String, PoolState>,
    claims: BTreeMap<ObjectKey, ClaimState>,
    /// Claims that hold devices of a pool.
    holders: BTreeMap<String, BTreeSet<ObjectKey>>,
    assumed: BTreeMap<ObjectKey, Assumed>,
    pods: BTreeMap<String, PodPlace>,
    used: BTreeMap<String, Amounts>,
}

/// A pool with what is in use of it.
#[derive(Debug)]
pub(crate) struct PoolState {
    pub(crate) node: Option<String>,
    pub(crate) state: Result<(Pool, Usage), PoolProblem>,
}

#[derive(Debug)]
struct ClaimState {
    version: u64,
    holdings: Vec<Holding>,
}

#[derive(Debug)]
struct Assumed {
    uid: String,
    holdings: Vec<Holding>,
}

#[derive(Debug)]
struct PodPlace {
    node: String,
    requests: Amounts,
    bound: bool,
}

impl Cluster {
    /// Adds or replaces a node; whether anything that matters has changed.
    pub fn upsert_node(&mut self, node: &Node) -> bool {
        let name = node.metadata.name.clone().unwrap_or_default();
        let info = NodeInfo::of(node);
        if self.nodes.get(&name) == Some(&info) {
            return false;
        }
        self.nodes.insert(name, info);
        true
    }

    /// Removes a node.
    pub fn remove_node(&mut self, name: &str) {
        self.nodes.remove(name);
    }

    /// A node by name.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&NodeInfo> {
        self.nodes.get(name)
    }

    /// Adds or replaces a class.
    pub fn upsert_class(&mut self, class: DeviceClass) {
        if let Some(name) = class.metadata.name.clone() {
            self.classes.insert(name, class);
        }
    }

    /// Removes a class.
    pub fn remove_class(&mut self, name: &str) {
        self.classes.remove(name);
    }

    /// Adds or replaces a slice of this driver.
    pub fn upsert_slice(&mut self, slice: &ResourceSlice) {
        let version = version(&slice.metadata);
        let parsed = Slice::parse(slice);
        let name = parsed.name.clone();
        if self
            .slices
            .get(&name)
            .is_some_and(|(known, _)| *known > version)
        {
            return;
        }
        let pool = parsed.pool.clone();
        let before = self.slices.insert(name.clone(), (version, parsed));
        if let Some((_, before)) = before
            && before.pool != pool
        {
            self.unlink_slice(&name, &before.pool);
        }
        self.slices_of.entry(pool.clone()).or_default().insert(name);
        self.assemble(&pool);
    }

    fn unlink_slice(&mut self, name: &str, pool: &str) {
        if let Some(names) = self.slices_of.get_mut(pool) {
            names.remove(name);
        }
        self.assemble(pool);
    }

    /// Removes a slice.
    pub fn remove_slice(&mut self, name: &str) {
        if let Some((_, slice)) = self.slices.remove(name) {
            self.unlink_slice(name, &slice.pool);
        }
    }

    /// Adds or replaces a claim; an older version than the known one is ignored. Whether it let go of devices.
    pub fn upsert_claim(&mut self, claim: &ResourceClaim) -> bool {
        let key = object_key(&claim.metadata);
        let version = version(&claim.metadata);
        if self
            .claims
            .get(&key)
            .is_some_and(|known| known.version > version)
        {
            return false;
        }
        let holdings = Holding::of_claim(claim);
        let keeps = holdings.clone();
        let before = self
            .claims
            .insert(key.clone(), ClaimState { version, holdings });
        let frees = before
            .iter()
            .flat_map(|state| &state.holdings)
            .any(|holding| !keeps.contains(holding));
        let mut touched: BTreeSet<String> =
            pools_of(before.iter().flat_map(|state| &state.holdings));
        touched.extend(pools_of(
            self.claims
                .get(&key)
                .iter()
                .flat_map(|state| &state.holdings),
        ));
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let allocated = claim
            .status
            .as_ref()
            .is_some_and(|status| status.allocation.is_some());
        if let Some(assumed) = self.assumed.get(&key)
            && (allocated || assumed.uid != uid)
        {
            touched.extend(pools_of(&assumed.holdings));
            self.assumed.remove(&key);
        }
        self.recount(&key, &touched);
        frees
    }

    /// Removes a claim; whether it held devices.
    pub fn remove_claim(&mut self, key: &ObjectKey) -> bool {
        let mut touched = BTreeSet::new();
        if let Some(state) = self.claims.remove(key) {
            touched.extend(pools_of(&state.holdings));
        }
        if let Some(assumed) = self.assumed.remove(key) {
            touched.extend(pools_of(&assumed.holdings));
        }
        self.recount(key, &touched);
        !touched.is_empty()
    }

    /// Whether the claim is assumed.
    #[must_use]
    pub fn is_assumed(&self, key: &ObjectKey) -> bool {
        self.assumed.contains_key(key)
    }

    /// Counts what a placement takes until its claims say so themselves.
    pub fn assume(&mut self, placement: &Placement) {
        for claim in &placement.claims {
            let key = (claim.claim.namespace.clone(), claim.claim.name.clone());
            let holdings = claim.holdings();
            let touched = pools_of(&holdings);
            let uid = claim.claim.uid.clone();
            self.assumed.insert(key.clone(), Assumed { uid, holdings });
            self.recount(&key, &touched);
        }
    }

    /// Stops counting an assumed claim, whose write has failed.
    pub fn forget(&mut self, key: &ObjectKey) {
        if let Some(assumed) = self.assumed.remove(key) {
            self.recount(key, &pools_of(&assumed.holdings));
        }
    }

    /// Adds or replaces a pod: one that is bound counts on its node until it ends.
    pub fn upsert_pod(&mut self, pod: &Pod) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let node = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.node_name.as_deref())
            .unwrap_or_default();
        if is_finished(pod) {
            self.remove_pod(uid);
        } else if !node.is_empty() {
            self.place_pod(uid, node, node::requests(pod), true);
        }
    }

    /// Counts a pod on the node that was chosen for it, until it is bound.
    pub fn assume_pod(&mut self, uid: &str, node: &str, requests: Amounts) {
        if !self.pods.get(uid).is_some_and(|place| place.bound) {
            self.place_pod(uid, node, requests, false);
        }
    }

    /// Stops counting a pod that was only assumed.
    pub fn forget_pod(&mut self, uid: &str) {
        if self.pods.get(uid).is_some_and(|place| !place.bound) {
            self.remove_pod(uid);
        }
    }

    /// Removes a pod; whether it counted on a node.
    pub fn remove_pod(&mut self, uid: &str) -> bool {
        let Some(place) = self.pods.remove(uid) else {
            return false;
        };
        if let Some(used) = self.used.get_mut(&place.node) {
            node::subtract(used, &place.requests);
        }
        true
    }

    fn place_pod(&mut self, uid: &str, node: &str, requests: Amounts, bound: bool) {
        self.remove_pod(uid);
        node::add(self.used.entry(node.to_owned()).or_default(), &requests);
        let place = PodPlace {
            node: node.to_owned(),
            requests,
            bound,
        };
        self.pods.insert(uid.to_owned(), place);
    }

    /// What the pods of a node request, without the pod `except`.
    pub(crate) fn used_on(&self, node: &str, except: &str) -> Amounts {
        let mut used = self.used.get(node).cloned().unwrap_or_default();
        if let Some(place) = self.pods.get(except)
            && place.node == node
        {
            node::subtract(&mut used, &place.requests);
        }
        used
    }

    /// Pools that are left out, with the problem.
    pub fn problems(&self) -> impl Iterator<Item = (&str, Option<&str>, &PoolProblem)> {
        self.pools.iter().filter_map(|(name, pool)| {
            Some((
                name.as_str(),
                pool.node.as_deref(),
                pool.state.as_ref().err()?,
            ))
        })
    }

    /// Pools by name.
    pub(crate) fn pools(&self) -> &BTreeMap<String, PoolState> {
        &self.pools
    }

    /// Pools that can be used, with node and what is in use.
    pub fn usable_pools(&self) -> impl Iterator<Item = (&str, &Pool, &Usage)> {
        self.pools.iter().filter_map(|(name, pool)| {
            let (pool, usage) = pool.state.as_ref().ok()?;
            Some((name.as_str(), pool, usage))
        })
    }

    /// Everything that claims hold, assumed holdings included.
    pub fn holdings(&self) -> impl Iterator<Item = &Holding> {
        let observed = self.claims.values().flat_map(|state| &state.holdings);
        let assumed = self.assumed.values().flat_map(|assumed| &assumed.holdings);
        observed.chain(assumed)
    }

    /// The card of a device.
    pub(crate) fn card_of(&self, pool: &str, device: &str) -> Option<Arc<str>> {
        let (pool, _) = self.pools.get(pool)?.state.as_ref().ok()?;
        let device = pool.devices.get(pool.index_of(device)?)?;
        Some(Arc::clone(&device.card))
    }

    /// Puts a pool together again after one of its slices changed.
    fn assemble(&mut self, pool: &str) {
        let names = self.slices_of.get(pool).into_iter().flatten();
        let slices: Vec<_> = names
            .filter_map(|name| Some(&self.slices.get(name)?.1))
            .collect();
        if slices.is_empty() {
            self.pools.remove(pool);
            self.slices_of.remove(pool);
            return;
        }
        let node = slices
            .iter()
            .find_map(|slice| slice.node())
            .map(str::to_owned);
        let assembled = Pool::assemble(slices);
        let state = assembled.and_then(|assembled| {
            let usage = self.count(pool, &assembled)?;
            Ok((assembled, usage))
        });
        self.pools
            .insert(pool.to_owned(), PoolState { node, state });
    }

    /// Counts again what is in use of these pools, of which a claim has taken or let go something.
    fn recount(&mut self, claim: &ObjectKey, pools: &BTreeSet<String>) {
        for pool in pools {
            let holds = self.holdings_of(claim).any(|holding| holding.pool == *pool);
            let holders = self.holders.entry(pool.clone()).or_default();
            if holds {
                holders.insert(claim.clone());
            } else {
                holders.remove(claim);
            }
            if holders.is_empty() {
                self.holders.remove(pool);
            }
            match self.pools.get(pool).map(|state| &state.state) {
                // The claim may have let go of the device that was missing.
                Some(Err(PoolProblem::HeldDeviceMissing { .. })) => self.assemble(pool),
                Some(Ok((assembled, _))) => {
                    let counted = self.count(pool, assembled);
                    if let Some(state) = self.pools.get_mut(pool) {
                        match (counted, &mut state.state) {
                            (Ok(counted), Ok((_, usage))) => *usage = counted,
                            (Err(problem), state) => *state = Err(problem),
                            (Ok(_), Err(_)) => {}
                        }
                    }
                }
                Some(Err(_)) | None => {}
            }
        }
    }

    fn count(&self, pool: &str, assembled: &Pool) -> Result<Usage, PoolProblem> {
        let holders = self.holders.get(pool).into_iter().flatten();
        let holdings = holders.flat_map(|claim| self.holdings_of(claim));
        Usage::of(assembled, holdings.filter(|holding| holding.pool == pool))
    }

    /// What a claim holds, assumed holdings included.
    fn holdings_of(&self, claim: &ObjectKey) -> impl Iterator<Item = &Holding> {
        let observed = self
            .claims
            .get(claim)
            .into_iter()
            .flat_map(|state| &state.holdings);
        let assumed = self
            .assumed
            .get(claim)
            .into_iter()
            .flat_map(|assumed| &assumed.holdings);
        observed.chain(assumed)
    }
}

/// Whether all containers of the pod have ended for good.
#[must_use]
pub fn is_finished(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Namespace and name of an object.
#[must_use]
pub fn object_key(metadata: &ObjectMeta) -> ObjectKey {
    (
        metadata.namespace.clone().unwrap_or_default(),
        metadata.name.clone().unwrap_or_default(),
    )
}

/// The resource version as a number. They are ordered numbers (KEP-5504); 0 for one that is not.
fn version(metadata: &ObjectMeta) -> u64 {
    metadata
        .resource_version
        .as_deref()
        .and_then(|version| version.parse().ok())
        .unwrap_or_default()
}

fn pools_of<'a>(holdings: impl IntoIterator<Item = &'a Holding>) -> BTreeSet<String> {
    holdings
        .into_iter()
        .map(|holding| holding.pool.clone())
        .collect()
}

#[cfg(test)]
mod tests;
