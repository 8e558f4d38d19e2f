//! Usage of a pool: what is allocated, and whether a device can serve one more request (KEP-4815, KEP-5075).
//!
//! A shared device consumes its counters once, however many shares it has; its capacities are consumed per share. An
//! exclusively allocated device consumes its counters and cannot be allocated again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_api::config;
use drava_api::listed::Unreadable;
use drava_api::{DeviceType, Quantity, names, suspension};
use k8s_openapi::api::resource::v1 as dra;

use crate::capacity::{Amounts, Capacity, CapacityError};
use crate::claim::{Alternative, ClaimId};
use crate::device::Device;
use crate::division::Division;
use crate::pool::{Pool, PoolProblem};
use crate::reason::{GpuUse, Rejection};

/// A device that is allocated to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// The claim.
    pub claim: Arc<ClaimId>,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Request for which it was allocated.
    pub request: String,
    /// How the claim uses it.
    pub access: DeviceAccess,
}

/// How a claim uses a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceAccess {
    /// Alone.
    Exclusive,
    /// A share, with the amount of every capacity of the device, and what it is a part of.
    Share(Amounts, Division),
    /// A share whose processes are suspended: it keeps its slot, and the GPU stays a shared one, but it uses neither memory nor
    /// GPU time. The amounts are those that it has again when it is resumed.
    Suspended(Amounts),
    /// Admin access; consumes nothing (KEP-5018). The amounts are those in the result for a shareable device.
    Admin(Option<Amounts>),
}

impl AllocatedDevice {
    /// Returns the devices of this driver in the claim's status.
    #[must_use]
    pub fn of_claim(claim: &dra::ResourceClaim) -> Vec<Self> {
        let results = claim
            .status
            .as_ref()
            .and_then(|status| {
                status
                    .allocation
                    .as_ref()?
                    .devices
                    .as_ref()?
                    .results
                    .as_deref()
            })
            .unwrap_or_default();
        let id = Arc::new(ClaimId::of(claim));
        let is_suspended = suspension::is_suspended(claim);
        let division = |request: &str| {
            let allocation = claim.status.as_ref()?.allocation.as_ref()?;
            let configs = allocation.devices.as_ref()?.config.as_deref()?;
            // The node driver refuses a config that cannot be read.
            let settings = config::resolve(configs, request).ok()?;
            Some(Division::of(&settings, &id.namespace))
        };
        let own = results
            .iter()
            .filter(|result| result.driver == names::DRIVER);
        let devices = own.map(|result| {
            let division = division(&result.request).unwrap_or_default();
            let access = DeviceAccess::of_result(result, division);
            Self {
                claim: Arc::clone(&id),
                pool: result.pool.clone(),
                device: result.device.clone(),
                request: result.request.clone(),
                access: if is_suspended {
                    access.suspended()
                } else {
                    access
                },
            }
        });
        let mut devices: Vec<Self> = devices.collect();
        devices.shrink_to_fit();
        devices
    }

    /// Returns the device as it counts while the claim is suspended.
    #[must_use]
    pub fn suspended(self) -> Self {
        Self {
            access: self.access.suspended(),
            ..self
        }
    }

    /// Returns the device as it counts when the claim is resumed.
    #[must_use]
    pub fn resumed(self) -> Self {
        let access = match self.access {
            DeviceAccess::Suspended(amounts) => DeviceAccess::Share(amounts, Division::Time),
            access => access,
        };
        Self { access, ..self }
    }
}

impl AllocatedDevice {
    /// Returns the devices of this driver that a claim has which cannot be read. They count as used alone.
    #[must_use]
    pub fn of_unreadable(claim: &Unreadable) -> Vec<Self> {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let id = Arc::new(ClaimId {
            namespace: text(&claim.metadata.namespace),
            name: text(&claim.metadata.name),
            uid: text(&claim.metadata.uid),
        });
        let own = claim.devices.iter();
        let own = own.filter(|device| device.driver == names::DRIVER);
        own.map(|device| Self {
            claim: Arc::clone(&id),
            pool: device.pool.clone(),
            device: device.device.clone(),
            request: String::new(),
            access: DeviceAccess::Exclusive,
        })
        .collect()
    }
}

impl DeviceAccess {
    /// Returns what a share is a part of.
    fn division(&self) -> Division {
        match self {
            Self::Share(_, division) => division.clone(),
            Self::Exclusive | Self::Suspended(_) | Self::Admin(_) => Division::Time,
        }
    }

    /// Returns the access of a suspended claim: only shares can be suspended.
    fn suspended(self) -> Self {
        match self {
            Self::Share(amounts, _) => Self::Suspended(amounts),
            access => access,
        }
    }

    /// Returns what a share uses now of a capacity of its device: by default all.
    fn used_amount(&self, name: &str, whole: Quantity) -> Quantity {
        match self {
            Self::Suspended(_)
                if matches!(name, names::capacity::MEMORY | names::capacity::CORES) =>
            {
                Quantity::ZERO
            }
            Self::Share(amounts, _) | Self::Suspended(amounts) => {
                amounts.get(name).copied().unwrap_or(whole)
            }
            Self::Exclusive | Self::Admin(_) => whole,
        }
    }

    fn of_result(result: &dra::DeviceRequestAllocationResult, division: Division) -> Self {
        // An amount that does not parse is dropped, and the whole capacity is charged.
        let amounts = result.share_id.as_ref().map(|_| {
            result
                .consumed_capacity
                .iter()
                .flatten()
                .filter_map(|(name, raw)| Some((name.clone(), Quantity::try_from(raw).ok()?)))
                .collect()
        });
        match (result.admin_access.unwrap_or_default(), amounts) {
            (true, amounts) => Self::Admin(amounts),
            (false, Some(amounts)) => Self::Share(amounts, division),
            (false, None) => Self::Exclusive,
        }
    }
}

/// Usage of one device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceUse {
    /// Exclusive allocations; more than one only if another controller allocated the device twice.
    pub exclusive: u32,
    /// Allocated shares.
    pub shares: u32,
    /// What they divide; of shares that another allocator has mixed, the division of the first one.
    pub division: Division,
    /// Sum of the shares, by capacity.
    pub consumed: Amounts,
}

impl DeviceUse {
    const fn is_allocated(&self) -> bool {
        self.exclusive > 0 || self.shares > 0
    }
}

/// Usage of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// By position of the device in the pool.
    pub devices: Vec<DeviceUse>,
    counters: BTreeMap<String, Amounts>,
}

impl Usage {
    /// Returns the usage of a pool without allocations.
    #[must_use]
    pub fn unused(pool: &Pool) -> Self {
        Self {
            devices: vec![DeviceUse::default(); pool.devices.len()],
            counters: BTreeMap::new(),
        }
    }

    /// Returns the usage of a pool with these allocations.
    ///
    /// # Errors
    /// When an allocated device is not published: free capacity is unknown then.
    pub fn of<'a>(
        pool: &Pool,
        allocated_devices: impl IntoIterator<Item = &'a AllocatedDevice>,
    ) -> Result<Self, PoolProblem> {
        let mut usage = Self::unused(pool);
        for allocated in allocated_devices {
            let index = pool.index_of(&allocated.device).ok_or_else(|| {
                PoolProblem::AllocatedDeviceMissing {
                    claim: allocated.claim.to_string(),
                    device: allocated.device.clone(),
                }
            })?;
            usage.allocate(pool, index, &allocated.access);
        }
        Ok(usage)
    }

    /// Returns how `request` would use the device at `index`.
    ///
    /// # Errors
    /// When the device cannot serve the request now.
    pub fn evaluate(
        &self,
        pool: &Pool,
        index: usize,
        request: &Alternative,
    ) -> Result<DeviceAccess, Rejection> {
        let (Some(device), Some(device_use)) = (pool.devices.get(index), self.devices.get(index))
        else {
            return Err(Rejection::Unpublished);
        };
        // Permanent rejections come first.
        let access = requested_access(device, request)?;
        if matches!(access, DeviceAccess::Admin(_)) {
            return Ok(access);
        }
        if device_use.exclusive > 0 || (!device.shared && device_use.is_allocated()) {
            return Err(match device.kind {
                Some(DeviceType::Mig) => Rejection::GpuInUse(GpuUse::Slices),
                Some(DeviceType::Gpu | DeviceType::Vgpu) | None => Rejection::InUse,
            });
        }
        if let DeviceAccess::Share(_, division) = &access
            && device_use.shares > 0
            && *division != device_use.division
        {
            return Err(Rejection::GpuInUse(match device_use.division {
                Division::Time => GpuUse::SharedByTime,
                Division::Multiprocessors(_) => GpuUse::SharedByMultiprocessors,
            }));
        }
        // Counters before capacities: an exclusively allocated GPU does not lack memory.
        if !device_use.is_allocated() {
            self.check_counters(pool, device)?;
        }
        let DeviceAccess::Share(amounts, _) = &access else {
            return Ok(access);
        };
        for (name, amount) in in_report_order(amounts) {
            let total = device.amount(name).unwrap_or_default();
            let used = device_use.consumed.get(name).copied().unwrap_or_default();
            if used + amount > total {
                return Err(Rejection::Capacity {
                    name: name.to_owned(),
                    requested: amount,
                    free: (total - used).max(Quantity::ZERO),
                    total,
                });
            }
        }
        Ok(access)
    }

    /// Returns what a suspended share lacks on its device to be resumed; `None` if nothing.
    #[must_use]
    pub fn shortage(&self, pool: &Pool, index: usize, suspended: &Amounts) -> Option<Rejection> {
        let (device, device_use) = (pool.devices.get(index)?, self.devices.get(index)?);
        let given_back = [names::capacity::MEMORY, names::capacity::CORES].into_iter();
        given_back
            .filter(|name| device.capacity.contains_key(*name))
            .find_map(|name| {
                let total = device.amount(name).unwrap_or_default();
                let requested = suspended.get(name).copied().unwrap_or(total);
                let used = device_use.consumed.get(name).copied().unwrap_or_default();
                (used + requested > total).then(|| Rejection::Capacity {
                    name: name.to_owned(),
                    requested,
                    free: (total - used).max(Quantity::ZERO),
                    total,
                })
            })
    }

    /// Returns whether the counters of the device at `index` are free.
    #[must_use]
    pub fn has_free_counters(&self, pool: &Pool, index: usize) -> bool {
        pool.devices
            .get(index)
            .is_some_and(|device| self.check_counters(pool, device).is_ok())
    }

    /// Returns how much of a counter is allocated.
    pub(crate) fn used_counter(&self, set: &str, counter: &str) -> Quantity {
        let set = self.counters.get(set);
        set.and_then(|set| set.get(counter))
            .copied()
            .unwrap_or_default()
    }

    fn check_counters(&self, pool: &Pool, device: &Device) -> Result<(), Rejection> {
        for consumption in &device.consumes {
            let available = pool.counter_sets().get(&consumption.set);
            let used = self.counters.get(&consumption.set);
            for (counter, amount) in &consumption.counters {
                let used = used.and_then(|used| used.get(counter)).copied();
                let available = available.and_then(|all| all.get(counter)).copied();
                if used.unwrap_or_default() + *amount > available.unwrap_or_default() {
                    let gpu_use = self.gpu_use(pool, &consumption.set);
                    let is_partition = device.kind == Some(DeviceType::Mig);
                    return Err(Rejection::GpuInUse(match gpu_use {
                        GpuUse::Partitioned if is_partition => GpuUse::Slices,
                        other => other,
                    }));
                }
            }
        }
        Ok(())
    }

    /// Returns how the GPU with this counter set is in use.
    fn gpu_use(&self, pool: &Pool, set: &str) -> GpuUse {
        let in_use = pool
            .devices
            .iter()
            .zip(&self.devices)
            .find(|(device, device_use)| {
                device_use.is_allocated()
                    && device
                        .consumes
                        .iter()
                        .any(|consumption| consumption.set == set)
            });
        match in_use.and_then(|(device, _)| device.kind) {
            Some(DeviceType::Gpu) => GpuUse::Exclusive,
            Some(DeviceType::Vgpu) => GpuUse::Shared,
            Some(DeviceType::Mig) => GpuUse::Partitioned,
            None => GpuUse::Unknown,
        }
    }

    /// Charges an allocation.
    pub fn allocate(&mut self, pool: &Pool, index: usize, access: &DeviceAccess) {
        let (Some(device), Some(device_use)) =
            (pool.devices.get(index), self.devices.get_mut(index))
        else {
            return;
        };
        let charge_counters = match access {
            DeviceAccess::Admin(_) => return,
            DeviceAccess::Exclusive => {
                device_use.exclusive += 1;
                true
            }
            DeviceAccess::Share(..) | DeviceAccess::Suspended(_) => {
                let first = !device_use.is_allocated();
                if device_use.shares == 0 {
                    device_use.division = access.division();
                }
                device_use.shares += 1;
                for (name, capacity) in &device.capacity {
                    let amount = access.used_amount(name, capacity.value);
                    device_use.consumed.change(name, |used| used + amount);
                }
                first
            }
        };
        if charge_counters {
            self.charge_counters(device, |used, amount| used + amount);
        }
    }

    /// Reverts [`Self::allocate`].
    pub fn release(&mut self, pool: &Pool, index: usize, access: &DeviceAccess) {
        let (Some(device), Some(device_use)) =
            (pool.devices.get(index), self.devices.get_mut(index))
        else {
            return;
        };
        let free_counters = match access {
            DeviceAccess::Admin(_) => return,
            DeviceAccess::Exclusive => {
                device_use.exclusive = device_use.exclusive.saturating_sub(1);
                true
            }
            DeviceAccess::Share(..) | DeviceAccess::Suspended(_) => {
                device_use.shares = device_use.shares.saturating_sub(1);
                if device_use.shares == 0 {
                    device_use.division = Division::Time;
                }
                for (name, capacity) in &device.capacity {
                    let amount = access.used_amount(name, capacity.value);
                    if let Some(used) = device_use.consumed.get_mut(name) {
                        *used = *used - amount;
                    }
                }
                !device_use.is_allocated()
            }
        };
        if free_counters {
            self.charge_counters(device, |used, amount| used - amount);
        }
    }

    fn charge_counters(
        &mut self,
        device: &Device,
        change: impl Fn(Quantity, Quantity) -> Quantity,
    ) {
        for consumption in &device.consumes {
            let set = self.counters.entry(consumption.set.clone()).or_default();
            for (counter, amount) in &consumption.counters {
                set.change(counter, |used| change(used, *amount));
            }
        }
    }

    /// Returns the GPUs of which more is allocated than they have: a device is allocated exclusively and once more, the
    /// shares of a device exceed a capacity, or the devices of a counter set exceed a counter.
    #[must_use]
    pub fn overcommitted_gpus(&self, pool: &Pool) -> BTreeSet<Arc<str>> {
        let exceeds = |set: &str| {
            let (used, total) = (self.counters.get(set), pool.counter_sets().get(set));
            used.into_iter().flatten().any(|(counter, used)| {
                *used
                    > total
                        .and_then(|total| total.get(counter))
                        .copied()
                        .unwrap_or_default()
            })
        };
        let exceeded: BTreeSet<&str> = self
            .counters
            .keys()
            .map(String::as_str)
            .filter(|set| exceeds(set))
            .collect();
        let devices = pool.devices.iter().zip(&self.devices);
        let overcommitted = devices.filter(|(device, device_use)| {
            let is_above = |(name, used): (&String, &Quantity)| {
                *used > device.amount(name).unwrap_or_default()
            };
            device_use.exclusive > 1
                || (device_use.exclusive > 0 && device_use.shares > 0)
                || device_use.consumed.iter().any(is_above)
                || (device_use.is_allocated()
                    && device
                        .consumes
                        .iter()
                        .any(|consumed| exceeded.contains(consumed.set.as_str())))
        });
        overcommitted
            .map(|(device, _)| Arc::clone(&device.gpu))
            .collect()
    }

    /// Returns the memory of a GPU over all of its devices.
    #[must_use]
    pub fn gpu_memory(&self, pool: &Pool, gpu: &str) -> GpuMemory {
        let mut memory = GpuMemory::default();
        for (device, device_use) in pool.devices.iter().zip(&self.devices) {
            if *device.gpu == *gpu {
                memory.add(device, device_use);
            }
        }
        memory
    }

    /// Returns the most memory that a request without admin access may get from one device; `None` if each device is in use.
    pub(crate) fn most_free_memory(&self, pool: &Pool) -> Option<Quantity> {
        let devices = pool.devices.iter().zip(&self.devices);
        let free = devices.filter_map(|(device, device_use)| {
            let is_free = match device_use.is_allocated() {
                true => device.shared && device_use.exclusive == 0,
                false => self.check_counters(pool, device).is_ok(),
            };
            if !is_free {
                return None;
            }
            let total = device.amount(names::capacity::MEMORY);
            let used = device_use.consumed.get(names::capacity::MEMORY);
            Some(total.unwrap_or_default() - used.copied().unwrap_or_default())
        });
        free.max()
    }

    /// Returns the memory of all GPUs of the pool, as [`Self::gpu_memory`] does for one.
    #[must_use]
    pub fn memory_by_gpu<'a>(&self, pool: &'a Pool) -> BTreeMap<&'a str, GpuMemory> {
        let mut gpus: BTreeMap<&str, GpuMemory> = BTreeMap::new();
        for (device, device_use) in pool.devices.iter().zip(&self.devices) {
            let memory = gpus.entry(&*device.gpu).or_default();
            memory.add(device, device_use);
        }
        gpus
    }
}

/// Memory of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuMemory {
    /// Allocated to claims.
    pub allocated: Quantity,
    /// Published by the largest device of the GPU.
    pub total: Quantity,
}

impl GpuMemory {
    /// Adds a device of the GPU.
    fn add(&mut self, device: &Device, device_use: &DeviceUse) {
        let whole = device.amount(names::capacity::MEMORY).unwrap_or_default();
        self.total = self.total.max(whole);
        if device_use.exclusive > 0 {
            self.allocated += whole;
        }
        let shares = device_use.consumed.get(names::capacity::MEMORY);
        self.allocated += shares.copied().unwrap_or_default();
    }
}

/// Returns how `request` would use a device without allocations.
///
/// # Errors
/// When the device can never serve the request.
pub(crate) fn requested_access(
    device: &Device,
    request: &Alternative,
) -> Result<DeviceAccess, Rejection> {
    let amounts = consumption(device, request)?;
    for (name, amount) in in_report_order(&amounts) {
        let total = device.amount(name).unwrap_or_default();
        if amount > total {
            return Err(Rejection::AboveMaximum {
                name: name.to_owned(),
                requested: amount,
                maximum: total,
            });
        }
    }
    Ok(match (request.admin_access, device.shared) {
        (true, is_shared) => DeviceAccess::Admin(is_shared.then_some(amounts)),
        (false, true) => DeviceAccess::Share(amounts, request.division.clone()),
        (false, false) => DeviceAccess::Exclusive,
    })
}

/// Returns what `request` consumes of a capacity.
pub(crate) fn amount(
    name: &str,
    capacity: &Capacity,
    request: &Alternative,
) -> Result<Quantity, CapacityError> {
    match request.memory_percent {
        Some(percent) if name == names::capacity::MEMORY => capacity.fraction(percent),
        _ => capacity.consumption(request.requested(name)),
    }
}

/// Returns what `request` consumes of each capacity of `device`.
fn consumption(device: &Device, request: &Alternative) -> Result<Amounts, Rejection> {
    // A whole GPU and a partition have their memory; only a share can be a percentage.
    if request.memory_percent.is_some() && !device.shared {
        return Err(Rejection::PercentageOfWhole);
    }
    if let Some(name) = request
        .capacity
        .keys()
        .find(|name| !device.capacity.contains_key(*name))
    {
        return Err(Rejection::CapacityUndefined {
            name: name.clone(),
            published: device.capacity.keys().cloned().collect(),
        });
    }
    device
        .capacity
        .iter()
        .map(|(name, capacity)| match amount(name, capacity, request) {
            Ok(amount) => Ok((name.clone(), amount)),
            Err(CapacityError::AboveMaximum { requested, maximum }) => {
                Err(Rejection::AboveMaximum {
                    name: name.clone(),
                    requested,
                    maximum,
                })
            }
            Err(CapacityError::Negative) => Err(Rejection::AboveMaximum {
                name: name.clone(),
                requested: request.requested(name).unwrap_or_default(),
                maximum: capacity.value,
            }),
        })
        .collect()
}

/// Returns the amounts in the order in which a shortage is reported: memory, cores, slots, others.
fn in_report_order(amounts: &Amounts) -> impl Iterator<Item = (&str, Quantity)> {
    use names::capacity::{CORES, MEMORY, SLOTS};
    let rank = |name: &str| {
        [MEMORY, CORES, SLOTS]
            .iter()
            .position(|known| *known == name)
            .unwrap_or(3)
    };
    let mut ordered: Vec<_> = amounts
        .iter()
        .map(|(name, amount)| (name.as_str(), *amount))
        .collect();
    ordered.sort_by_key(|(name, _)| rank(name));
    ordered.into_iter()
}
