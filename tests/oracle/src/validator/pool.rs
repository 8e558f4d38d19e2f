//! The pools of a node that can be used: complete in their newest generation, and consistent.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as dra;

use crate::case::Case;

/// Pools of one node.
pub(super) struct Pools<'a> {
    usable: BTreeMap<&'a str, Pool<'a>>,
    excluded: usize,
}

struct Pool<'a> {
    devices: Vec<Published<'a>>,
    counter_sets: Vec<&'a dra::CounterSet>,
}

/// A published device.
#[derive(Clone, Copy)]
pub(super) struct Published<'a> {
    pub(super) pool: &'a str,
    pub(super) slice: &'a str,
    pub(super) device: &'a dra::Device,
}

impl<'a> Pools<'a> {
    pub(super) fn of(case: &'a Case, node: &str) -> Self {
        let mut by_pool: BTreeMap<&str, Vec<&dra::ResourceSlice>> = BTreeMap::new();
        for slice in &case.slices {
            if slice.spec.node_name.as_deref() == Some(node) {
                by_pool
                    .entry(&slice.spec.pool.name)
                    .or_default()
                    .push(slice);
            }
        }
        let total = by_pool.len();
        let usable: BTreeMap<&str, Pool<'_>> = by_pool
            .into_iter()
            .filter_map(|(name, slices)| Some((name, Pool::of(name, &slices)?)))
            .collect();
        Self {
            excluded: total - usable.len(),
            usable,
        }
    }

    pub(super) fn has_excluded(&self) -> bool {
        self.excluded > 0
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = &Published<'a>> {
        self.usable.values().flat_map(|pool| &pool.devices)
    }

    pub(super) fn device(&self, pool: &str, device: &str) -> Option<Published<'a>> {
        self.usable
            .get(pool)?
            .devices
            .iter()
            .copied()
            .find(|published| published.device.name == device)
    }

    pub(super) fn counter_sets(&self) -> impl Iterator<Item = (&'a str, &[&'a dra::CounterSet])> {
        self.usable
            .iter()
            .map(|(name, pool)| (*name, pool.counter_sets.as_slice()))
    }
}

impl<'a> Pool<'a> {
    fn of(name: &'a str, slices: &[&'a dra::ResourceSlice]) -> Option<Self> {
        let newest = slices
            .iter()
            .map(|slice| slice.spec.pool.generation)
            .max()?;
        let current: Vec<_> = slices
            .iter()
            .filter(|slice| slice.spec.pool.generation == newest)
            .collect();
        let expected = current.first()?.spec.pool.resource_slice_count;
        if i64::try_from(current.len()) != Ok(expected) {
            return None;
        }
        let mut pool = Self {
            devices: vec![],
            counter_sets: vec![],
        };
        for slice in current {
            pool.counter_sets
                .extend(slice.spec.shared_counters.iter().flatten());
            let slice_name = slice.metadata.name.as_deref()?;
            pool.devices
                .extend(slice.spec.devices.iter().flatten().map(|device| Published {
                    pool: name,
                    slice: slice_name,
                    device,
                }));
        }
        pool.is_consistent().then_some(pool)
    }

    fn is_consistent(&self) -> bool {
        let has_duplicates = self.devices.iter().enumerate().any(|(index, one)| {
            self.devices
                .iter()
                .take(index)
                .any(|other| other.device.name == one.device.name)
        });
        let has_counters = |consumption: &dra::DeviceCounterConsumption| {
            self.counter_sets.iter().any(|set| {
                set.name == consumption.counter_set
                    && consumption
                        .counters
                        .keys()
                        .all(|counter| set.counters.contains_key(counter))
            })
        };
        !has_duplicates
            && self
                .devices
                .iter()
                .flat_map(|published| published.device.consumes_counters.iter().flatten())
                .all(has_counters)
    }
}
