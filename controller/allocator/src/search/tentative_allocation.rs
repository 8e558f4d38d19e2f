//! A tentative allocation: devices are allocated one by one and released again while the search backtracks.

use std::cmp::Reverse;
use std::sync::Arc;

use drava_api::config::GpuPlacementPolicy;
use drava_api::policy::Preference;
use drava_api::{DeviceType, Quantity, names};

use super::input::{ContainerDevices, DeviceRef, NodeState, PoolView, SearchInput};
use super::kind;
use crate::attribute::Attribute;
use crate::capacity::Amounts;
use crate::claim::{Alternative, ClaimSpec, ConstraintRule};
use crate::device::Device;
use crate::fragmentation::NodeLoss;
use crate::pool::CounterSet;
use crate::quota;
use crate::reason::Rejection;
use crate::score::{PartitionScore, allocated_ppm, gpu_score};
use crate::topology::{self, Location, Proximity};
use crate::usage::{DeviceAccess, GpuMemory, Usage, requested_access};

/// A device selected for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectedDevice {
    /// The request.
    pub index: RequestIndex,
    /// Name of the pool.
    pub pool: String,
    /// The device.
    pub device: DeviceRef,
    /// How the claim uses the device.
    pub access: DeviceAccess,
}

/// Position of a request in the search input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestIndex {
    /// Position of the claim in [`SearchInput::claims`].
    pub claim: usize,
    /// Position of the request in the claim.
    pub request: usize,
    /// Position of the alternative in the request.
    pub alternative: usize,
}

/// A GPU and its place.
struct Gpu<'a> {
    /// Position of its pool.
    pool: usize,
    /// Its key in the pool.
    gpu: &'a str,
    location: Location<'a>,
}

impl Gpu<'_> {
    fn is_of(&self, candidate: DeviceRef, device: &Device) -> bool {
        (self.pool, self.gpu) == (candidate.pool, &device.gpu)
    }
}

/// See the [module](self). A release restores the exact state before the allocation.
pub(super) struct TentativeAllocation<'a> {
    input: &'a SearchInput<'a>,
    pools: &'a [PoolView<'a>],
    loss: Option<&'a NodeLoss<'a>>,
    /// By position of the pool.
    usage: Vec<Usage>,
    /// GPUs of each container, by its position in the input; one entry per device.
    gpus: Vec<Vec<Arc<str>>>,
    selected: Vec<SelectedDevice>,
}

impl<'a> TentativeAllocation<'a> {
    pub(super) fn new(input: &'a SearchInput<'a>, node: NodeState<'a>) -> Self {
        let NodeState { pools, loss } = node;
        Self {
            input,
            pools,
            loss,
            usage: pools.iter().map(|view| view.usage.clone()).collect(),
            gpus: input
                .containers
                .iter()
                .map(|container| container.gpus.iter().cloned().collect())
                .collect(),
            selected: Vec::new(),
        }
    }

    /// Devices in the order of their allocation.
    pub(super) fn selected(&self) -> &[SelectedDevice] {
        &self.selected
    }

    pub(super) fn into_selected(self) -> Vec<SelectedDevice> {
        self.selected
    }

    /// Checks whether the candidate can be allocated now.
    pub(super) fn check(
        &self,
        index: RequestIndex,
        alternative: &Alternative,
        candidate: DeviceRef,
    ) -> Result<DeviceAccess, Rejection> {
        let (Some(view), Some(usage), Some(device)) = (
            self.pools.get(candidate.pool),
            self.usage.get(candidate.pool),
            self.device(candidate),
        ) else {
            return Err(Rejection::Unpublished);
        };
        let alternative = &*quota::with_defaults(self.input.budgets, device, alternative);
        self.check_quotas(index, alternative, device)?;
        let access = usage.evaluate(view.pool, candidate.index, alternative)?;
        if matches!(access, DeviceAccess::Admin(_))
            && self
                .selected
                .iter()
                .any(|selected| selected.index.claim == index.claim && selected.device == candidate)
        {
            return Err(Rejection::AlreadySelected);
        }
        self.check_constraints(index.claim, &alternative.name, device)?;
        self.check_containers(index, device)?;
        Ok(access)
    }

    /// Quotas precede usage: while a quota is used up, free devices do not help.
    fn check_quotas(
        &self,
        index: RequestIndex,
        alternative: &Alternative,
        device: &Device,
    ) -> Result<(), Rejection> {
        let budgets = self.input.budgets;
        if budgets.is_empty() || self.input.exceeds_limits {
            return Ok(());
        }
        let access = requested_access(device, alternative)?;
        let selected = self.selected.iter().filter_map(|selected| {
            let device = self.device(selected.device)?;
            Some((selected.index.claim, device, &selected.access))
        });
        quota::check(budgets, (index.claim, device, &access), &selected)
    }

    fn check_constraints(
        &self,
        claim: usize,
        request: &str,
        device: &Device,
    ) -> Result<(), Rejection> {
        let constraints = self
            .input
            .claims
            .get(claim)
            .map_or(&[][..], |spec| &spec.constraints);
        for constraint in constraints
            .iter()
            .filter(|constraint| constraint.covers(request))
        {
            let violated = |is_missing| Rejection::Constraint {
                rule: constraint.rule,
                attribute: constraint.attribute.clone(),
                is_missing,
            };
            let value = device.attribute(&constraint.attribute);
            let value = value.ok_or_else(|| violated(true))?;
            let holds = self
                .selected
                .iter()
                .filter(|selected| {
                    selected.index.claim == claim && constraint.covers(self.request_name(selected))
                })
                .filter_map(|selected| {
                    self.device(selected.device)?
                        .attribute(&constraint.attribute)
                })
                .all(|other| satisfies(constraint.rule, other, value));
            if !holds {
                return Err(violated(false));
            }
        }
        Ok(())
    }

    /// Several devices of a container must be on different GPUs: CUDA uses one partition per process, and NCCL rejects
    /// duplicate GPUs.
    fn check_containers(&self, index: RequestIndex, device: &Device) -> Result<(), Rejection> {
        for (container, gpus) in self.input.containers.iter().zip(&self.gpus) {
            if self.uses(container, index) && gpus.contains(&device.gpu) {
                return Err(Rejection::SameGpu {
                    container: container.name.clone(),
                });
            }
        }
        Ok(())
    }

    /// Returns whether the container uses the devices of the request.
    fn uses(&self, container: &ContainerDevices, index: RequestIndex) -> bool {
        container.uses(self.input.claims, index.claim, index.request)
    }

    /// Allocates a device as [`Self::check`] has returned it.
    pub(super) fn allocate(
        &mut self,
        index: RequestIndex,
        candidate: DeviceRef,
        access: DeviceAccess,
    ) {
        let Some(view) = self.pools.get(candidate.pool) else {
            return;
        };
        if let Some(device) = self.device(candidate) {
            let gpu = Arc::clone(&device.gpu);
            self.update_container_gpus(index, |gpus| gpus.push(Arc::clone(&gpu)));
        }
        if let Some(usage) = self.usage.get_mut(candidate.pool) {
            usage.allocate(view.pool, candidate.index, &access);
        }
        self.selected.push(SelectedDevice {
            index,
            pool: view.name.to_owned(),
            device: candidate,
            access,
        });
    }

    /// Releases the device that was allocated last.
    pub(super) fn release(&mut self) {
        let Some(selected) = self.selected.pop() else {
            return;
        };
        if let (Some(view), Some(usage)) = (
            self.pools.get(selected.device.pool),
            self.usage.get_mut(selected.device.pool),
        ) {
            usage.release(view.pool, selected.device.index, &selected.access);
        }
        self.update_container_gpus(selected.index, |gpus| {
            gpus.pop();
        });
    }

    /// Updates the GPUs of each container that uses the request's devices.
    fn update_container_gpus(
        &mut self,
        index: RequestIndex,
        mut update: impl FnMut(&mut Vec<Arc<str>>),
    ) {
        for (position, container) in self.input.containers.iter().enumerate() {
            if self.uses(container, index)
                && let Some(gpus) = self.gpus.get_mut(position)
            {
                update(gpus);
            }
        }
    }

    /// Policy between GPUs for a claim.
    pub(super) fn gpu_policy(&self, claim: usize) -> GpuPlacementPolicy {
        self.input
            .claims
            .get(claim)
            .and_then(|spec| spec.placement.gpu)
            .unwrap_or(self.input.gpu_policy)
    }

    /// Preference of GpuPolicies for a claim.
    pub(super) fn preference(&self, claim: usize) -> Option<Preference> {
        self.input.claims.get(claim)?.prefer
    }

    /// Returns the candidates, best first: by the preference for shares or partitions, the smallest partitions, by the score of
    /// their GPU and by placement; among equals in the published order.
    pub(super) fn order_by_score(
        &self,
        index: RequestIndex,
        request: &Alternative,
        candidates: &[DeviceRef],
    ) -> Vec<DeviceRef> {
        let policy = self.gpu_policy(index.claim);
        let prefer = self.preference(index.claim);
        let open: Vec<_> = (0..self.pools.len())
            .map(|pool| self.open_partitions(pool))
            .collect();
        let loss = (policy == GpuPlacementPolicy::LeastFragmentation)
            .then_some(self.loss)
            .flatten();
        let loss = loss.map(|loss| (loss, loss.idle(self.selected_devices())));
        let loss_of = |candidate: DeviceRef| {
            let (loss, idle) = loss.as_ref()?;
            let device = self.device(candidate)?;
            let access = self.check(index, request, candidate).ok()?;
            Some(loss.of_device(idle, candidate.pool, device, &access))
        };
        let memory: Vec<_> = (self.pools.iter().zip(&self.usage))
            .map(|(view, usage)| usage.memory_by_gpu(view.pool))
            .collect();
        let mut order: Vec<_> = candidates
            .iter()
            .map(|candidate| {
                let loss = loss_of(*candidate).unwrap_or_default();
                let gpu = self.device(*candidate).map(|device| &*device.gpu);
                let of_pool = memory.get(candidate.pool);
                let gpu_memory = of_pool.zip(gpu).and_then(|(gpus, gpu)| gpus.get(gpu));
                let gpu_memory = gpu_memory.copied().unwrap_or_default();
                let allocated = allocated_ppm(gpu_memory.allocated, gpu_memory.total);
                let score = gpu_score(policy, allocated, loss);
                let open = open.get(candidate.pool).map_or(&[][..], Vec::as_slice);
                let PartitionScore { memory, closed } =
                    self.partition_score(*candidate, open).unwrap_or_default();
                let device = self.device(*candidate);
                let kind = device.map(|device| kind::order(prefer, request, device, gpu_memory));
                let kind = kind.unwrap_or_default();
                (kind, memory, Reverse(score), closed, *candidate)
            })
            .collect();
        order.sort_unstable();
        order.into_iter().map(|(.., candidate)| candidate).collect()
    }

    /// Returns the selected devices, each with the position of its pool.
    fn selected_devices(&self) -> impl Iterator<Item = (usize, &'a Device, &DeviceAccess)> {
        self.selected.iter().filter_map(|selected| {
            let device = self.device(selected.device)?;
            Some((selected.device.pool, device, &selected.access))
        })
    }

    /// Moves the candidates on GPUs that are close together to the front. `feasible` are those that can be allocated now,
    /// `needed` the devices that the pod still needs.
    pub(super) fn order_by_topology(
        &self,
        policy: GpuPlacementPolicy,
        order: &mut [DeviceRef],
        feasible: &[DeviceRef],
        needed: usize,
    ) {
        let held: Vec<_> = self.gpus(self.selected.iter().map(|selected| selected.device));
        let free = self.gpus(feasible.iter().copied());
        let locations = |gpus: &[Gpu<'a>]| gpus.iter().map(|gpu| gpu.location).collect::<Vec<_>>();
        let (held, open) = (locations(&held), locations(&free));
        let ranks = match policy {
            GpuPlacementPolicy::Numa => topology::numa_ranks(&held, &open, needed),
            _ => topology::ranks(&held, &open, needed),
        };
        let rank = |candidate: &DeviceRef| {
            let device = self.device(*candidate)?;
            let gpu = free.iter().position(|gpu| gpu.is_of(*candidate, device))?;
            ranks.get(gpu).copied()
        };
        // The sort is stable: the score decides among equals.
        order.sort_by_cached_key(|candidate| rank(candidate).unwrap_or(usize::MAX));
    }

    /// Returns what the selected GPUs have in common, as far as the policy of their claims asks for it.
    pub(super) fn proximity(&self) -> Proximity {
        let with = |policy: GpuPlacementPolicy, proximity: fn(&[Location<'_>]) -> Proximity| {
            let wanted = self.selected.iter();
            let wanted = wanted.filter(|selected| self.gpu_policy(selected.index.claim) == policy);
            let gpus = self.gpus(wanted.map(|selected| selected.device));
            proximity(&gpus.iter().map(|gpu| gpu.location).collect::<Vec<_>>())
        };
        let of_topology = with(GpuPlacementPolicy::Topology, topology::proximity);
        of_topology.max(with(GpuPlacementPolicy::Numa, topology::numa_proximity))
    }

    /// Returns the different GPUs of devices.
    fn gpus(&self, devices: impl Iterator<Item = DeviceRef>) -> Vec<Gpu<'a>> {
        let mut gpus: Vec<Gpu<'a>> = Vec::new();
        for (candidate, device) in devices.filter_map(|found| Some((found, self.device(found)?))) {
            if !gpus.iter().any(|gpu| gpu.is_of(candidate, device)) {
                gpus.push(Gpu {
                    pool: candidate.pool,
                    gpu: &device.gpu,
                    location: Location::of(device),
                });
            }
        }
        gpus
    }

    /// Returns for each device of a pool whether it is a partition that can be allocated now.
    pub(super) fn open_partitions(&self, pool: usize) -> Vec<bool> {
        let (Some(view), Some(usage)) = (self.pools.get(pool), self.usage.get(pool)) else {
            return Vec::new();
        };
        let devices = view.pool.devices.iter();
        let is_open = |(index, device): (usize, &Arc<Device>)| {
            device.kind == Some(DeviceType::Mig) && usage.has_free_counters(view.pool, index)
        };
        devices.enumerate().map(is_open).collect()
    }

    /// Returns the score of a partition; `None` for another device. `open` are the [`Self::open_partitions`] of its pool.
    pub(super) fn partition_score(
        &self,
        candidate: DeviceRef,
        open: &[bool],
    ) -> Option<PartitionScore> {
        let pool = self.pools.get(candidate.pool)?.pool;
        let device = self.device(candidate)?;
        match device.kind {
            Some(DeviceType::Mig) => {}
            Some(DeviceType::Gpu | DeviceType::Vgpu) | None => return None,
        }
        let overlaps = pool.overlaps(candidate.index).iter();
        Some(PartitionScore {
            memory: device.amount(names::capacity::MEMORY).unwrap_or_default(),
            closed: overlaps
                .filter(|other| open.get(**other) == Some(&true))
                .count(),
        })
    }

    /// Returns the allocated fraction of the memory of the candidate's GPU, ppm.
    pub(super) fn gpu_allocated_ppm(&self, candidate: DeviceRef) -> u32 {
        let memory = self.gpu_memory(candidate);
        allocated_ppm(memory.allocated, memory.total)
    }

    /// Returns the memory of the candidate's GPU.
    fn gpu_memory(&self, candidate: DeviceRef) -> GpuMemory {
        match (
            self.pools.get(candidate.pool),
            self.usage.get(candidate.pool),
            self.device(candidate),
        ) {
            (Some(view), Some(usage), Some(device)) => usage.gpu_memory(view.pool, &device.gpu),
            _ => GpuMemory::default(),
        }
    }

    pub(super) fn device(&self, candidate: DeviceRef) -> Option<&'a Device> {
        self.pools
            .get(candidate.pool)?
            .pool
            .devices
            .get(candidate.index)
            .map(Arc::as_ref)
    }

    pub(super) const fn claims(&self) -> &'a [ClaimSpec] {
        self.input.claims
    }

    /// Returns the number of containers.
    pub(super) const fn containers(&self) -> usize {
        self.input.containers.len()
    }

    /// Returns whether the container at this position uses the devices of a request.
    pub(super) fn is_used_by(&self, container: usize, claim: usize, request: usize) -> bool {
        let container = self.input.containers.get(container);
        container.is_some_and(|container| container.uses(self.input.claims, claim, request))
    }

    /// Returns an attribute of a device.
    pub(super) fn attribute(&self, device: DeviceRef, attribute: &str) -> Option<&'a Attribute> {
        self.device(device)?.attribute(attribute)
    }

    /// Returns how many of the requests a device can serve at the same time, at most.
    pub(super) fn most_claims<'r>(
        &self,
        device: DeviceRef,
        requests: impl Iterator<Item = (RequestIndex, &'r Alternative)>,
    ) -> usize {
        let (Some(published), Some(usage)) = (self.device(device), self.usage.get(device.pool))
        else {
            return 0;
        };
        if !published.shared {
            return 1;
        }
        // By capacity, the smallest amount of the requests.
        let mut least: Option<Amounts> = None;
        for (index, alternative) in requests {
            let Ok(DeviceAccess::Share(amounts, _)) = self.check(index, alternative, device) else {
                continue;
            };
            least = Some(match least {
                None => amounts,
                Some(least) => {
                    let both = least.iter().filter_map(|(name, amount)| {
                        let other = amounts.get(name)?;
                        Some((name.clone(), (*amount).min(*other)))
                    });
                    both.collect()
                }
            });
        }
        let used = usage.devices.get(device.index);
        let least = least.unwrap_or_default();
        let most = least
            .iter()
            .filter(|(_, amount)| !amount.is_zero())
            .map(|(name, amount)| {
                let used = used.and_then(|used| used.consumed.get(name)).copied();
                let free = published.amount(name).unwrap_or_default() - used.unwrap_or_default();
                let times = free.nano().checked_div(amount.nano()).unwrap_or_default();
                usize::try_from(times).unwrap_or_default()
            });
        most.min().unwrap_or(usize::MAX)
    }

    /// Returns the counters that an unshared device consumes, with their pool and set, if they are of one set.
    pub(super) fn counters(&self, device: DeviceRef) -> Option<((usize, &'a str), &'a CounterSet)> {
        let published = self.device(device)?;
        match &published.consumes[..] {
            [of] if !published.shared => Some(((device.pool, of.set.as_str()), &of.counters)),
            _ => None,
        }
    }

    fn counter_set(&self, (pool, set): (usize, &str)) -> Option<&'a CounterSet> {
        self.pools.get(pool)?.pool.counter_sets().get(set)
    }

    /// Returns whether the GPU has one of the counter, like a slice of its memory.
    pub(super) fn is_unit(&self, set: (usize, &str), counter: &str) -> bool {
        let total = self.counter_set(set).and_then(|set| set.get(counter));
        total.is_some_and(|total| *total == Quantity::count(1))
    }

    /// Returns how much of a counter is free.
    pub(super) fn free_counter(&self, set: (usize, &str), counter: &str) -> Quantity {
        let total = self.counter_set(set).and_then(|set| set.get(counter));
        let usage = self.usage.get(set.0);
        let used = usage.map(|usage| usage.used_counter(set.1, counter));
        total.copied().unwrap_or_default() - used.unwrap_or_default()
    }

    /// Returns how many of the counters of which there is one are free.
    pub(super) fn free_units(&self, set: (usize, &str)) -> Quantity {
        let counters = self.counter_set(set).into_iter().flatten();
        let units = counters.filter(|(_, total)| **total == Quantity::count(1));
        units.fold(Quantity::ZERO, |sum, (name, _)| {
            sum + self.free_counter(set, name)
        })
    }

    fn request_name(&self, selected: &SelectedDevice) -> &'a str {
        self.input
            .claims
            .get(selected.index.claim)
            .and_then(|spec| {
                spec.requests
                    .get(selected.index.request)?
                    .alternatives
                    .get(selected.index.alternative)
            })
            .map_or("", |alternative| alternative.name.as_str())
    }
}

/// Returns whether two attribute values satisfy a constraint. Lists match when they have a value in common.
fn satisfies(rule: ConstraintRule, a: &Attribute, b: &Attribute) -> bool {
    let values = |attribute: &Attribute| match attribute {
        Attribute::List(values) => values.clone(),
        scalar => vec![scalar.clone()],
    };
    let (a, b) = (values(a), values(b));
    let common = a.iter().any(|value| b.contains(value));
    match rule {
        ConstraintRule::Match => common,
        ConstraintRule::Distinct => !common,
    }
}
