//! Pools of devices, assembled from the ResourceSlices of one node (KEP-4381, KEP-4815).
//!
//! Only the highest generation counts, and only when it is complete. A pool with a malformed slice is excluded as a
//! whole: a missing counter could overcommit a GPU.

use std::collections::BTreeMap;
use std::sync::Arc;

use drava_api::{DeviceType, Quantity};
use k8s_openapi::api::resource::v1 as dra;

use crate::device::{self, Device};
use crate::taint::{Taint, TaintRule};

/// Counters of one set by name.
pub type CounterSet = BTreeMap<String, Quantity>;

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
    counter_sets: BTreeMap<String, CounterSet>,
}

/// The devices of one node.
#[derive(Debug, Clone)]
pub struct Pool {
    /// Name of the node.
    pub node: String,
    /// Devices in published order.
    pub devices: Vec<Arc<Device>>,
    /// Counter sets by name.
    pub counter_sets: BTreeMap<String, CounterSet>,
    /// Taints that DeviceTaintRules add, by device.
    rule_taints: BTreeMap<Arc<str>, Vec<Taint>>,
    /// By position of a device: the partitions of its GPU that cannot exist together with it.
    overlaps: Vec<Vec<usize>>,
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
            && self.counter_sets == other.counter_sets
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
    pub fn parse(slice: &dra::ResourceSlice) -> Self {
        Self {
            name: slice.metadata.name.clone().unwrap_or_default(),
            pool: slice.spec.pool.name.clone(),
            generation: slice.spec.pool.generation,
            slices_in_pool: slice.spec.pool.resource_slice_count,
            content: Content::parse(&slice.spec),
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
    fn parse(spec: &dra::ResourceSliceSpec) -> Result<Self, String> {
        let node = spec
            .node_name
            .clone()
            .filter(|node| !node.is_empty())
            .ok_or("spec.nodeName is not set")?;
        let devices = spec
            .devices
            .iter()
            .flatten()
            .map(|device| {
                Device::parse(device)
                    .map(Arc::new)
                    .map_err(|error| error.to_string())
            })
            .collect::<Result<_, _>>()?;
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
            counter_sets,
        })
    }
}

impl Pool {
    /// Assembles a pool from its slices.
    ///
    /// # Errors
    /// When slices are missing or malformed.
    pub fn assemble<'a>(slices: impl IntoIterator<Item = &'a Slice>) -> Result<Self, PoolProblem> {
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
        let mut pool: Option<Self> = None;
        for slice in slices {
            let malformed = |problem: String| PoolProblem::Malformed {
                slice: slice.name.clone(),
                problem,
            };
            let content = slice
                .content
                .as_ref()
                .map_err(|problem| malformed(problem.clone()))?;
            let pool = pool.get_or_insert_with(|| Self {
                node: content.node.clone(),
                devices: Vec::new(),
                counter_sets: BTreeMap::new(),
                rule_taints: BTreeMap::new(),
                overlaps: Vec::new(),
            });
            pool.add(content).map_err(malformed)?;
        }
        let mut pool = pool.ok_or(PoolProblem::Incomplete {
            found: 0,
            expected,
            generation,
        })?;
        pool.check_counters()
            .map_err(|problem| PoolProblem::Malformed {
                slice: "(pool)".to_owned(),
                problem,
            })?;
        pool.overlaps = pool.find_overlaps();
        Ok(pool)
    }

    /// Returns the partitions of the GPU of the device at `index` that cannot exist together with it; none for a device
    /// that is not a partition.
    #[must_use]
    pub fn overlaps(&self, index: usize) -> &[usize] {
        self.overlaps.get(index).map_or(&[], Vec::as_slice)
    }

    fn find_overlaps(&self) -> Vec<Vec<usize>> {
        let mut by_gpu: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (index, device) in self.devices.iter().enumerate() {
            if device.kind == Some(DeviceType::Mig) {
                by_gpu.entry(&device.gpu).or_default().push(index);
            }
        }
        if by_gpu.is_empty() {
            return Vec::new();
        }
        let overlap = |(one, other): (&Device, &Device)| {
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
        };
        let of_device = |index: usize, device: &Device| {
            let partitions = by_gpu.get(&*device.gpu).map_or(&[][..], Vec::as_slice);
            let others = partitions.iter().copied().filter(|other| {
                let other_device = self.devices.get(*other);
                *other != index && other_device.is_some_and(|other| overlap((device, other)))
            });
            match device.kind {
                Some(DeviceType::Mig) => others.collect(),
                Some(DeviceType::Gpu | DeviceType::Vgpu) | None => Vec::new(),
            }
        };
        let devices = self.devices.iter().enumerate();
        devices
            .map(|(index, device)| of_device(index, device))
            .collect()
    }

    fn add(&mut self, content: &Content) -> Result<(), String> {
        if content.node != self.node {
            return Err(format!(
                "spec.nodeName is {}, in other slices of the pool {}",
                content.node, self.node
            ));
        }
        for device in &content.devices {
            if self.index_of(&device.name).is_some() {
                return Err(format!("duplicate device {}", device.name));
            }
            self.devices.push(Arc::clone(device));
        }
        for (name, counters) in &content.counter_sets {
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

    /// Replaces the taints that rules add to the devices of this pool.
    pub(crate) fn apply_rules<'a>(
        &mut self,
        name: &str,
        rules: &(impl Iterator<Item = &'a TaintRule> + Clone),
    ) {
        self.rule_taints.clear();
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
    }

    /// Returns the taints of a device: those of its slice, then those of rules.
    pub fn taints<'a>(&'a self, device: &'a Device) -> impl Iterator<Item = &'a Taint> {
        let of_rules = self.rule_taints.get(&device.name).into_iter().flatten();
        device.taints.iter().chain(of_rules)
    }

    /// Returns the position of a device by name.
    #[must_use]
    pub fn index_of(&self, device: &str) -> Option<usize> {
        self.devices
            .iter()
            .position(|candidate| *candidate.name == *device)
    }
}

#[cfg(test)]
mod tests;
