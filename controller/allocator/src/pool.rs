//! Pools of devices, assembled from the ResourceSlices of one node (KEP-4381, KEP-4815).
//!
//! Only the highest generation counts, and only when it is complete. A pool with a malformed slice is excluded as a
//! whole: a missing counter could overcommit a GPU.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use drava_api::{DeviceType, Quantity};
use k8s_openapi::api::resource::v1 as dra;

use crate::device::{self, Device, KnownShape, Shape};
use crate::known::Known;
use crate::taint::{Taint, TaintRule};

/// What the devices and pools of a cluster have in common, each kept once. The nodes of a cluster are of few kinds. What a device
/// publishes, apart from the identity of its GPU, is equal on all nodes of a kind, and so is the layout of their pools.
#[derive(Debug, Default)]
pub(crate) struct Shapes {
    pub(crate) devices: Known<KnownShape>,
    pub(crate) counter_sets: Known<CounterSets>,
    pub(crate) layouts: Known<Layout>,
}

/// Counters of one set by name.
pub type CounterSet = BTreeMap<String, Quantity>;
/// Counter sets by name.
pub type CounterSets = BTreeMap<String, CounterSet>;

/// One ResourceSlice, parsed.
#[derive(Debug, Clone)]
pub struct Slice {
    /// Name of the object; slices of a pool are sorted by name.
    pub name: String,
    /// Name of the pool.
    pub pool: String,
    generation: i64,
    slices_in_pool: i64,
    content: Result<Content, String>,
}

#[derive(Debug, Clone)]
struct Content {
    node: String,
    devices: Vec<Arc<Device>>,
    counter_sets: Arc<CounterSets>,
}

/// What the pools of the nodes of one kind have in common.
#[derive(Debug)]
pub(crate) struct Layout {
    counter_sets: Arc<CounterSets>,
    /// By position of the device.
    shapes: Vec<Arc<KnownShape>>,
    positions: OnceLock<BTreeMap<Arc<str>, usize>>,
    /// By position of a device: the partitions of its GPU that cannot exist together with it.
    overlaps: OnceLock<Vec<Vec<usize>>>,
}

/// The devices of one node.
#[derive(Debug, Clone)]
pub struct Pool {
    /// Name of the node.
    pub node: String,
    /// Devices in published order.
    pub devices: Vec<Arc<Device>>,
    /// What it has in common with others.
    layout: Arc<Layout>,
    /// Taints that DeviceTaintRules add, by device.
    rule_taints: BTreeMap<Arc<str>, Vec<Taint>>,
}

/// Why a pool is excluded from allocation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolProblem {
    /// Slices are missing, as while the node driver replaces them.
    #[error("generation {generation} is incomplete: {found} of {expected} slices")]
    Incomplete {
        /// Slices that exist.
        found: usize,
        /// Slices that the pool announces.
        expected: i64,
        /// Newest generation.
        generation: i64,
    },
    /// A slice is malformed or contradicts another.
    #[error("slice {slice}: {problem}")]
    Malformed {
        /// Name of the slice.
        slice: String,
        /// The problem.
        problem: String,
    },
    /// An allocated device is not published, so free capacity of its GPU is unknown.
    #[error("device {device} is allocated to claim {claim} but not published")]
    AllocatedDeviceMissing {
        /// Namespace and name of the claim.
        claim: String,
        /// Name of the device.
        device: String,
    },
    /// A claim with devices of the pool cannot be read, so it is unknown how it uses them.
    #[error(
        "claim {claim} has devices of the pool and cannot be read ({cause}); repair or delete the claim"
    )]
    ClaimUnreadable {
        /// Namespace and name of the claim.
        claim: String,
        /// Field and cause.
        cause: String,
    },
}

impl Pool {
    /// Returns whether both publish the same devices of the same node, with the same taints of rules.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let devices = self.devices.iter().zip(&other.devices);
        self.node == other.node
            && self.counter_sets() == other.counter_sets()
            && self.rule_taints == other.rule_taints
            && self.devices.len() == other.devices.len()
            && devices
                .into_iter()
                .all(|(one, other)| Arc::ptr_eq(one, other) || one.is_same(other))
    }
}

impl Slice {
    /// Parses a slice; [`Pool::assemble`] returns its problem.
    #[must_use]
    pub(crate) fn parse(slice: &dra::ResourceSlice, shapes: &mut Shapes) -> Self {
        Self {
            name: slice.metadata.name.clone().unwrap_or_default(),
            pool: slice.spec.pool.name.clone(),
            generation: slice.spec.pool.generation,
            slices_in_pool: slice.spec.pool.resource_slice_count,
            content: Content::parse(&slice.spec, shapes),
        }
    }

    /// Returns the node of a slice that could be parsed.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.content
            .as_ref()
            .ok()
            .map(|content| content.node.as_str())
    }
}

impl Slice {
    /// Returns a device of a slice that could be parsed, with the generation of the slice.
    pub(crate) fn device(&self, name: &str) -> Option<(i64, &Device)> {
        let mut devices = self.content.as_ref().ok()?.devices.iter();
        let device = devices.find(|device| *device.name == *name)?;
        Some((self.generation, device))
    }
}

impl Content {
    fn parse(spec: &dra::ResourceSliceSpec, shapes: &mut Shapes) -> Result<Self, String> {
        let node = spec
            .node_name
            .clone()
            .filter(|node| !node.is_empty())
            .ok_or("spec.nodeName is not set")?;
        let mut devices: Vec<Arc<Device>> = Vec::new();
        for device in spec.devices.iter().flatten() {
            let mut device = Device::parse(device).map_err(|error| error.to_string())?;
            device.share(&mut shapes.devices, devices.last().map(Arc::as_ref));
            devices.push(Arc::new(device));
        }
        let mut counter_sets = BTreeMap::new();
        for set in spec.shared_counters.iter().flatten() {
            let counters = device::counters(&set.counters)
                .map_err(|error| format!("counter set {}: {error}", set.name))?;
            if counter_sets.insert(set.name.clone(), counters).is_some() {
                return Err(format!("duplicate counter set {}", set.name));
            }
        }
        Ok(Self {
            node,
            devices,
            counter_sets: shapes.counter_sets.shared(&Arc::new(counter_sets)),
        })
    }
}

impl Pool {
    /// Assembles a pool from its slices.
    ///
    /// # Errors
    /// When slices are missing or malformed.
    pub(crate) fn assemble<'a>(
        slices: impl IntoIterator<Item = &'a Slice>,
        shapes: &mut Shapes,
    ) -> Result<Self, PoolProblem> {
        let mut slices: Vec<_> = slices.into_iter().collect();
        let generation = slices
            .iter()
            .map(|slice| slice.generation)
            .max()
            .unwrap_or_default();
        slices.retain(|slice| slice.generation == generation);
        slices.sort_by(|a, b| a.name.cmp(&b.name));
        let expected = slices.first().map_or(0, |slice| slice.slices_in_pool);
        if i64::try_from(slices.len()) != Ok(expected) {
            return Err(PoolProblem::Incomplete {
                found: slices.len(),
                expected,
                generation,
            });
        }
        let mut parts: Option<Parts> = None;
        for slice in slices {
            let malformed = |problem: String| PoolProblem::Malformed {
                slice: slice.name.clone(),
                problem,
            };
            let content = slice
                .content
                .as_ref()
                .map_err(|problem| malformed(problem.clone()))?;
            let parts = parts.get_or_insert_with(|| Parts::of(&content.node));
            parts.add(content).map_err(malformed)?;
        }
        let parts = parts.ok_or(PoolProblem::Incomplete {
            found: 0,
            expected,
            generation,
        })?;
        parts
            .check_counters()
            .map_err(|problem| PoolProblem::Malformed {
                slice: "(pool)".to_owned(),
                problem,
            })?;
        Ok(parts.into_pool(shapes))
    }

    /// Returns the counter sets by name.
    #[must_use]
    pub fn counter_sets(&self) -> &CounterSets {
        &self.layout.counter_sets
    }

    /// Returns the partitions of the GPU of the device at `index` that cannot exist together with it; none for a device
    /// that is not a partition.
    #[must_use]
    pub fn overlaps(&self, index: usize) -> &[usize] {
        let overlaps = self.layout.overlaps();
        overlaps.get(index).map_or(&[], Vec::as_slice)
    }

    /// Replaces the taints that rules add to the devices of this pool. Returns whether they have changed.
    pub(crate) fn apply_rules<'a>(
        &mut self,
        name: &str,
        rules: &(impl Iterator<Item = &'a TaintRule> + Clone),
    ) -> bool {
        let before = std::mem::take(&mut self.rule_taints);
        for device in &self.devices {
            let taints: Vec<Taint> = rules
                .clone()
                .filter_map(|rule| rule.taint_of(name, &device.name))
                .cloned()
                .collect();
            if !taints.is_empty() {
                self.rule_taints.insert(Arc::clone(&device.name), taints);
            }
        }
        self.rule_taints != before
    }

    /// Returns the taints of a device: those of its slice, then those of rules.
    pub fn taints<'a>(&'a self, device: &'a Device) -> impl Iterator<Item = &'a Taint> {
        let of_rules = self.rule_taints.get(&device.name).into_iter().flatten();
        device.taints.iter().chain(of_rules)
    }

    /// Returns the position of a device by name.
    #[must_use]
    pub fn index_of(&self, device: &str) -> Option<usize> {
        self.layout.positions().get(device).copied()
    }
}

/// A pool that is being assembled.
struct Parts {
    node: String,
    devices: Vec<Arc<Device>>,
    names: BTreeSet<Arc<str>>,
    counter_sets: CounterSets,
}

impl Parts {
    fn of(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            devices: Vec::new(),
            names: BTreeSet::new(),
            counter_sets: CounterSets::new(),
        }
    }

    fn add(&mut self, content: &Content) -> Result<(), String> {
        if content.node != self.node {
            return Err(format!(
                "spec.nodeName is {}, in other slices of the pool {}",
                content.node, self.node
            ));
        }
        for device in &content.devices {
            if !self.names.insert(Arc::clone(&device.name)) {
                return Err(format!("duplicate device {}", device.name));
            }
            self.devices.push(Arc::clone(device));
        }
        for (name, counters) in &*content.counter_sets {
            if self
                .counter_sets
                .insert(name.clone(), counters.clone())
                .is_some()
            {
                return Err(format!("duplicate counter set {name}"));
            }
        }
        Ok(())
    }

    fn check_counters(&self) -> Result<(), String> {
        for device in &self.devices {
            for consumption in &device.consumes {
                let set = self.counter_sets.get(&consumption.set).ok_or_else(|| {
                    format!(
                        "device {} consumes unknown counter set {}",
                        device.name, consumption.set
                    )
                })?;
                if let Some(counter) = consumption
                    .counters
                    .keys()
                    .find(|counter| !set.contains_key(*counter))
                {
                    return Err(format!(
                        "device {} consumes unknown counter {}/{counter}",
                        device.name, consumption.set
                    ));
                }
            }
        }
        Ok(())
    }

    fn into_pool(self, shapes: &mut Shapes) -> Pool {
        let layout = Layout {
            counter_sets: shapes.counter_sets.shared(&Arc::new(self.counter_sets)),
            shapes: self.devices.iter().map(|device| device.shape()).collect(),
            positions: OnceLock::new(),
            overlaps: OnceLock::new(),
        };
        Pool {
            node: self.node,
            devices: self.devices,
            layout: shapes.layouts.shared(&Arc::new(layout)),
            rule_taints: BTreeMap::new(),
        }
    }
}

impl Layout {
    /// Returns where it is: equal layouts have the same shapes, which are kept once.
    fn addresses(&self) -> (usize, impl Iterator<Item = usize>) {
        let shapes = self.shapes.iter();
        let shapes = shapes.map(|shape| Arc::as_ptr(shape).addr());
        (Arc::as_ptr(&self.counter_sets).addr(), shapes)
    }

    fn positions(&self) -> &BTreeMap<Arc<str>, usize> {
        self.positions.get_or_init(|| {
            let shapes = self.shapes.iter().enumerate();
            shapes
                .map(|(index, shape)| (Arc::clone(&shape.published().name), index))
                .collect()
        })
    }

    fn overlaps(&self) -> &[Vec<usize>] {
        self.overlaps.get_or_init(|| self.find_overlaps())
    }

    fn find_overlaps(&self) -> Vec<Vec<usize>> {
        let shapes = self.shapes.iter().map(|shape| shape.published());
        let partitions = shapes.enumerate();
        let partitions: Vec<(usize, &Shape)> = partitions
            .filter(|(_, shape)| shape.kind == Some(DeviceType::Mig))
            .collect();
        let mut overlaps = vec![
            Vec::new();
            if partitions.is_empty() {
                0
            } else {
                self.shapes.len()
            }
        ];
        for (index, partition) in &partitions {
            let others = partitions.iter();
            let others =
                others.filter(|(other, shape)| other != index && self.overlap(partition, shape));
            if let Some(overlaps) = overlaps.get_mut(*index) {
                overlaps.extend(others.map(|(other, _)| *other));
            }
        }
        overlaps
    }

    /// Returns whether two partitions cannot exist together: they need more of a counter of their GPU than there is.
    fn overlap(&self, one: &Shape, other: &Shape) -> bool {
        one.consumes.iter().any(|consumption| {
            let mut same_set = other.consumes.iter();
            let same_set = same_set.find(|other| other.set == consumption.set);
            let set = self.counter_sets.get(&consumption.set);
            consumption.counters.iter().any(|(name, amount)| {
                let total = set.and_then(|set| set.get(name)).copied();
                let other = same_set.and_then(|other| other.counters.get(name));
                other.is_some_and(|other| *amount + *other > total.unwrap_or_default())
            })
        })
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Layout {}

impl PartialOrd for Layout {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Layout {
    fn cmp(&self, other: &Self) -> Ordering {
        let ((sets, shapes), (other_sets, other_shapes)) = (self.addresses(), other.addresses());
        sets.cmp(&other_sets).then_with(|| shapes.cmp(other_shapes))
    }
}

#[cfg(test)]
mod tests;
