//! Pools of the cluster: assembled from their slices, indexed by node.

use super::{Cluster, ObjectKey, PoolState};
use crate::device::Device;
use crate::pool::{Pool, PoolProblem};
use crate::usage::{DeviceAccess, DeviceUse, Usage};

impl Cluster {
    /// Returns the excluded pools with node and problem.
    pub fn excluded_pools(&self) -> impl Iterator<Item = (&str, Option<&str>, &PoolProblem)> {
        self.pools.iter().filter_map(|(name, pool)| {
            Some((
                name.as_str(),
                pool.node.as_deref(),
                pool.state.as_ref().err()?,
            ))
        })
    }

    /// Returns the shareable devices with their nodes and their usage, except those of excluded pools.
    pub fn shared_devices(&self) -> impl Iterator<Item = (&str, &Device, &DeviceUse)> {
        let pools = self
            .pools
            .values()
            .filter_map(|pool| pool.state.as_ref().ok());
        let devices = pools.flat_map(|(pool, usage)| {
            let devices = pool.devices.iter().zip(&usage.devices);
            devices.map(|(device, device_use)| (pool.node.as_str(), device.as_ref(), device_use))
        });
        devices.filter(|(_, device, _)| device.shared)
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
        let devices = self.claims.get(claim).into_iter();
        devices
            .flat_map(|claim| &claim.allocated_devices)
            .filter(|allocated| !matches!(allocated.access, DeviceAccess::Admin(_)))
            .filter_map(|allocated| self.pools.get(&allocated.pool)?.node.as_deref())
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
            if let Some(before) = self.pools.remove(pool) {
                self.unlink_pool(pool, before.node.as_deref());
            }
            return;
        }
        let node = slices
            .iter()
            .find_map(|slice| slice.node())
            .map(str::to_owned);
        let assembled = Pool::assemble(slices);
        let state = assembled.and_then(|mut assembled| {
            assembled.apply_rules(pool, &self.taint_rules.values());
            let usage = self.usage_of(pool, &assembled)?;
            Ok((assembled, usage))
        });
        let linked = node.clone();
        let before = self
            .pools
            .insert(pool.to_owned(), PoolState { node, state });
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

    /// Returns the pools of a node by name.
    pub(crate) fn pools_of_node(&self, node: &str) -> impl Iterator<Item = (&str, &PoolState)> {
        let names = self.pools_on.get(node).into_iter().flatten();
        names.filter_map(|name| Some((name.as_str(), self.pools.get(name)?)))
    }
}
