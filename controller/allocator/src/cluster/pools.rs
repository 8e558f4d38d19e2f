//! Pools of the cluster: assembled from their slices, indexed by node.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::{Cluster, PoolChange, PoolState};
use crate::device::Device;
use crate::object::ObjectKey;
use crate::pool::{Pool, PoolProblem};
use crate::steps;
use crate::usage::{AllocatedDevice, DeviceAccess, DeviceUse, Usage};

/// A GPU of which more is allocated than it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overcommit {
    /// Name of the node.
    pub node: String,
    /// Name of the pool.
    pub pool: String,
    /// UUID of the GPU.
    pub gpu: String,
    /// The claims with devices of the GPU.
    pub claims: BTreeSet<ObjectKey>,
}

/// Free GPU memory of a node, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FreeMemory {
    /// All of it.
    pub total: f64,
    /// The part on GPUs with allocations, which no claim for a whole GPU can use.
    pub on_partly_allocated_gpus: f64,
}

impl FreeMemory {
    /// Returns the part on partly allocated GPUs; 0 without free memory.
    #[must_use]
    pub fn fragmentation_ratio(&self) -> f64 {
        if self.total > 0.0 {
            self.on_partly_allocated_gpus / self.total
        } else {
            0.0
        }
    }
}

impl Cluster {
    /// Returns the excluded pools with node and problem.
    pub fn excluded_pools(&self) -> impl Iterator<Item = (&str, Option<&str>, &PoolProblem)> {
        self.excluded.iter().filter_map(|name| {
            let pool = self.pools.get(name)?;
            Some((
                name.as_str(),
                pool.node.as_deref(),
                pool.state.as_ref().err()?,
            ))
        })
    }

    /// Returns the nodes whose devices, or their usage, may have changed since the last call.
    pub fn take_changed_nodes(&mut self) -> BTreeSet<String> {
        let mut nodes = std::mem::take(&mut self.changed_nodes);
        // What an observed claim has of them may have been assumed before.
        let overcommitted = self.overcommitted.iter();
        nodes.extend(overcommitted.filter_map(|pool| self.pools.get(pool)?.node.clone()));
        nodes
    }

    /// Returns the shareable devices of a node with their usage, except those of excluded pools.
    pub fn shared_devices_on(&self, node: &str) -> impl Iterator<Item = (&Device, &DeviceUse)> {
        let pools = self.usable_pools_on(node);
        let devices = pools.flat_map(|(pool, usage)| {
            let devices = pool.devices.iter().zip(&usage.devices);
            devices.map(|(device, device_use)| (device.as_ref(), device_use))
        });
        steps::counted(devices).filter(|(device, _)| device.shared)
    }

    /// Returns how these devices are used by these allocations alone, by node and device.
    #[must_use]
    pub fn use_of(&self, allocated: &[AllocatedDevice]) -> BTreeMap<(&str, &str), DeviceUse> {
        let mut by_pool: BTreeMap<&str, Vec<&AllocatedDevice>> = BTreeMap::new();
        for device in allocated {
            by_pool.entry(&device.pool).or_default().push(device);
        }
        let mut uses = BTreeMap::new();
        for (name, of_pool) in by_pool {
            let pool = self.pools.get(name);
            let Some((pool, _)) = pool.and_then(|pool| pool.state.as_ref().ok()) else {
                continue;
            };
            let Ok(usage) = Usage::of(pool, of_pool.iter().copied()) else {
                continue;
            };
            for device in of_pool {
                let index = pool.index_of(&device.device);
                let found = index
                    .and_then(|index| Some((pool.devices.get(index)?, usage.devices.get(index)?)));
                uses.extend(
                    found.map(|(device, found)| {
                        ((pool.node.as_str(), &*device.name), found.clone())
                    }),
                );
            }
        }
        uses
    }

    /// Returns the free GPU memory of a node; `None` without usable pools.
    #[must_use]
    pub fn free_memory_on(&self, node: &str) -> Option<FreeMemory> {
        let mut found: Option<FreeMemory> = None;
        for (pool, usage) in self.usable_pools_on(node) {
            let sum = found.get_or_insert_default();
            for gpu in usage.memory_by_gpu(pool).into_values() {
                let allocated = gpu.allocated.to_f64_lossy();
                let free = (gpu.total.to_f64_lossy() - allocated).max(0.0);
                sum.total += free;
                if allocated > 0.0 {
                    sum.on_partly_allocated_gpus += free;
                }
            }
        }
        found
    }

    fn usable_pools_on(&self, node: &str) -> impl Iterator<Item = (&Pool, &Usage)> {
        let pools = self.pools_of_node(node);
        pools.filter_map(|(_, pool)| pool.state.as_ref().ok().map(|(pool, usage)| (pool, usage)))
    }

    /// Returns the usable pools with their usage.
    pub fn usable_pools(&self) -> impl Iterator<Item = (&str, &Pool, &Usage)> {
        self.pools.iter().filter_map(|(name, pool)| {
            let (pool, usage) = pool.state.as_ref().ok()?;
            Some((name.as_str(), pool, usage))
        })
    }

    /// Returns the nodes on which an observed claim has devices for its own use.
    pub fn nodes_of(&self, claim: &ObjectKey) -> impl Iterator<Item = &str> {
        self.held_by(claim)
            .filter_map(|allocated| self.pools.get(&allocated.pool)?.node.as_deref())
    }

    /// Returns the devices that an observed claim has for its own use.
    pub(crate) fn held_by(&self, claim: &ObjectKey) -> impl Iterator<Item = &AllocatedDevice> {
        let devices = self.claims.get(claim).into_iter();
        devices
            .flat_map(|claim| &claim.allocated_devices)
            .filter(|allocated| !matches!(allocated.access, DeviceAccess::Admin(_)))
    }

    /// Returns the claims of which [`Self::nodes_of`] has the node, without those that are presumed gone.
    pub fn claims_on<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a ObjectKey> {
        let pools = self.pools_on.get(node).into_iter().flatten();
        let claims = pools.filter_map(|pool| self.claims_of.get(pool)).flatten();
        claims.filter(move |key| self.nodes_of(key).any(|of| of == node))
    }

    /// Returns the first node with pools from there on, by name; a pool without a node is listed under its own name.
    #[must_use]
    pub fn next_node_with_pools(&self, from: Bound<&str>) -> Option<&str> {
        let next = self
            .pools_on
            .range::<str, _>((from, Bound::Unbounded))
            .next();
        next.map(|(node, _)| node.as_str())
    }

    /// Returns a published device, also one of an excluded pool; of several generations the newest.
    pub(super) fn published(&self, pool: &str, device: &str) -> Option<&Device> {
        let names = self.slices_of.get(pool).into_iter().flatten();
        let slices = names.filter_map(|name| Some(&self.slices.get(name)?.1));
        let found = slices.filter_map(|slice| slice.device(device));
        found
            .max_by_key(|(generation, _)| *generation)
            .map(|(_, device)| device)
    }

    /// Assembles a pool after a change of its slices, and charges its claims.
    pub(super) fn assemble(&mut self, pool: &str) {
        self.mark_pool_changed(pool);
        self.assemble_slices(pool);
        self.mark_pool_changed(pool);
    }

    /// Assembles a pool. Returns what has changed.
    pub(super) fn assemble_and_compare(&mut self, name: &str) -> PoolChange {
        let before = self.pools.get(name).and_then(|pool| {
            let (pool, _) = pool.state.as_ref().ok()?;
            Some(pool.clone())
        });
        self.assemble(name);
        match (before, self.pools.get(name).map(|pool| &pool.state)) {
            (Some(before), Some(Ok((after, _)))) if before.is_same(after) => PoolChange::None,
            (_, Some(Ok((after, _)))) => PoolChange::Usable(after.node.clone()),
            (_, Some(Err(_)) | None) => PoolChange::Unusable,
        }
    }

    /// Returns the nodes on which the end of claims may make other devices free than at the last call. A pool without a node is
    /// listed under its own name.
    pub fn take_changed_holders(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.changed_holders)
    }

    /// Notes that [`Self::take_changed_holders`] has to return the node.
    pub fn note_changed_holders(&mut self, node: &str) {
        insert(&mut self.changed_holders, node);
    }

    pub(super) fn mark_holders_changed(&mut self, pool: &str) {
        let node = self.pools.get(pool).and_then(|state| state.node.as_deref());
        insert(&mut self.changed_holders, node.unwrap_or(pool));
    }

    /// Notes that the devices of the pool's node may have changed.
    pub(super) fn mark_pool_changed(&mut self, pool: &str) {
        self.mark_holders_changed(pool);
        let node = self.pools.get(pool).and_then(|state| state.node.as_deref());
        self.rankings.mark_changed(node.unwrap_or(pool));
        if let Some(node) = node {
            insert(&mut self.changed_nodes, node);
        }
    }

    /// Notes that [`Self::take_changed_nodes`] has to return the node.
    pub fn note_changed(&mut self, node: &str) {
        insert(&mut self.changed_nodes, node);
    }

    fn assemble_slices(&mut self, pool: &str) {
        let claims = self.claims_of.get(pool).cloned().unwrap_or_default();
        for claim in claims {
            self.charge(&claim);
        }
        let names = self.slices_of.get(pool).into_iter().flatten();
        let slices: Vec<_> = names
            .filter_map(|name| Some(&self.slices.get(name)?.1))
            .collect();
        if slices.is_empty() {
            self.slices_of.remove(pool);
            self.overcommitted.remove(pool);
            self.excluded.remove(pool);
            if let Some(before) = self.pools.remove(pool) {
                self.unlink_pool(pool, before.node.as_deref());
            }
            return;
        }
        let node = slices
            .iter()
            .find_map(|slice| slice.node())
            .map(str::to_owned);
        let assembled = Pool::assemble(slices, &mut self.shapes);
        let state = assembled.and_then(|mut assembled| {
            assembled.apply_rules(pool, &self.taint_rules.values());
            let usage = self.usage_of(pool, &assembled)?;
            Ok((assembled, usage))
        });
        let linked = node.clone();
        let before = self
            .pools
            .insert(pool.to_owned(), PoolState { node, state });
        self.note_problems(pool);
        if let Some(before) = before
            && before.node != linked
        {
            self.unlink_pool(pool, before.node.as_deref());
        }
        // A pool without a node is listed under its own name, so that its problem is reported.
        let node = linked.unwrap_or_else(|| pool.to_owned());
        self.pools_on
            .entry(node)
            .or_default()
            .insert(pool.to_owned());
    }

    /// Notes whether the pool is excluded, and whether more is allocated than it has.
    pub(super) fn note_problems(&mut self, pool: &str) {
        let state = self.pools.get(pool).map(|pool| pool.state.as_ref());
        if matches!(state, Some(Err(_))) {
            self.excluded.insert(pool.to_owned());
        } else {
            self.excluded.remove(pool);
        }
        let state = state.and_then(Result::ok);
        if state.is_some_and(|(pool, usage)| !usage.overcommitted_gpus(pool).is_empty()) {
            self.overcommitted.insert(pool.to_owned());
        } else {
            self.overcommitted.remove(pool);
        }
    }

    /// Returns the GPUs of which more is allocated by observed claims than they have. Assumed allocations do not count:
    /// those of reservations overlap with what they wait for.
    pub fn overcommits(&self) -> Vec<Overcommit> {
        let mut found = Vec::new();
        for name in &self.overcommitted {
            let Some((pool, _)) = self
                .pools
                .get(name)
                .and_then(|pool| pool.state.as_ref().ok())
            else {
                continue;
            };
            let claims = self.claims_of.get(name).into_iter().flatten();
            let observed = claims.filter_map(|key| Some((key, self.claims.get(key)?)));
            let allocated: Vec<(&ObjectKey, &AllocatedDevice)> = observed
                .flat_map(|(key, claim)| {
                    claim
                        .allocated_devices
                        .iter()
                        .map(move |device| (key, device))
                })
                .filter(|(_, device)| device.pool == *name)
                .filter(|(_, device)| !matches!(device.access, DeviceAccess::Admin(_)))
                .collect();
            let Ok(usage) = Usage::of(pool, allocated.iter().map(|(_, device)| *device)) else {
                continue;
            };
            for gpu in usage.overcommitted_gpus(pool) {
                let uses_gpu = |device: &AllocatedDevice| {
                    self.gpu_of(name, &device.device).as_ref() == Some(&gpu)
                };
                let users = allocated.iter().filter(|(_, device)| uses_gpu(device));
                found.push(Overcommit {
                    node: pool.node.clone(),
                    pool: name.clone(),
                    claims: users.map(|(key, _)| (*key).clone()).collect(),
                    gpu: gpu.to_string(),
                });
            }
        }
        found
    }

    fn unlink_pool(&mut self, pool: &str, node: Option<&str>) {
        let node = node.unwrap_or(pool);
        if let Some(pools) = self.pools_on.get_mut(node) {
            pools.remove(pool);
            if pools.is_empty() {
                self.pools_on.remove(node);
            }
        }
    }

    /// Returns the names of the nodes with pools; a pool without a node is listed under its own name.
    pub(crate) fn nodes_with_pools(&self) -> impl Iterator<Item = &str> {
        self.pools_on.keys().map(String::as_str)
    }

    /// Returns whether [`Self::nodes_with_pools`] has the node.
    pub(crate) fn has_pools(&self, node: &str) -> bool {
        self.pools_on.contains_key(node)
    }

    /// Returns the pools of a node by name.
    pub(crate) fn pools_of_node(&self, node: &str) -> impl Iterator<Item = (&str, &PoolState)> {
        let names = self.pools_on.get(node).into_iter().flatten();
        names.filter_map(|name| Some((name.as_str(), self.pools.get(name)?)))
    }
}

fn insert(names: &mut BTreeSet<String>, name: &str) {
    if !names.contains(name) {
        names.insert(name.to_owned());
    }
}
