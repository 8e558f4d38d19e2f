//! What is in use of a pool, and whether one more device can be taken (KEP-4815, KEP-5075).
//!
//! A device that several claims may hold is charged its counters once, however many shares it has; its capacities
//! are charged per share. A device held by one claim alone is charged its counters and cannot be taken again.

use std::collections::BTreeMap;
use std::sync::Arc;

use drava_api::{DeviceType, Quantity, names};
use k8s_openapi::api::resource::v1 as dra;

use crate::capacity::{Amounts, Refusal};
use crate::claim::{Alternative, ClaimId};
use crate::device::Device;
use crate::pool::{CounterSet, Pool, PoolProblem};
use crate::reason::{CardUse, Rejection};

/// A device that an allocated claim holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Who holds it.
    pub claim: Arc<ClaimId>,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Request for which it was allocated.
    pub request: String,
    /// How it is held.
    pub grant: Grant,
}

/// How a device is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    /// By one claim alone.
    Exclusive,
    /// A share; the amounts of every capacity of the device.
    Share(Amounts),
    /// Looked at only; charged nothing (KEP-5018). The amounts are what the result lists on a shareable device.
    Admin(Option<Amounts>),
}

impl Holding {
    /// The devices of this driver that a claim holds by its status.
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
        results
            .iter()
            .filter(|result| result.driver == names::DRIVER)
            .map(|result| Self {
                claim: Arc::clone(&id),
                pool: result.pool.clone(),
                device: result.device.clone(),
                request: result.request.clone(),
                grant: Grant::of_result(result),
            })
            .collect()
    }
}

impl Grant {
    fn of_result(result: &dra::DeviceRequestAllocationResult) -> Self {
        // An amount that does not parse is left out and then charged in full.
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
            (false, Some(amounts)) => Self::Share(amounts),
            (false, None) => Self::Exclusive,
        }
    }
}

/// What is in use of one device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceUse {
    /// Claims that hold it alone; more than one only when somebody else double-booked it.
    pub exclusive: u32,
    /// Shares of it.
    pub shares: u32,
    /// Sum of the shares by capacity.
    pub consumed: Amounts,
}

impl DeviceUse {
    const fn in_use(&self) -> bool {
        self.exclusive > 0 || self.shares > 0
    }
}

/// What is in use of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// By position of the device in the pool.
    pub devices: Vec<DeviceUse>,
    counters: BTreeMap<String, CounterSet>,
}

impl Usage {
    /// Of a pool in which nothing is in use.
    #[must_use]
    pub fn unused(pool: &Pool) -> Self {
        Self {
            devices: vec![DeviceUse::default(); pool.devices.len()],
            counters: BTreeMap::new(),
        }
    }

    /// Of a pool with these holdings.
    ///
    /// # Errors
    /// When a claim holds a device that the pool does not publish: what is free is then unknown.
    pub fn of<'a>(
        pool: &Pool,
        holdings: impl IntoIterator<Item = &'a Holding>,
    ) -> Result<Self, PoolProblem> {
        let mut usage = Self::unused(pool);
        for holding in holdings {
            let index =
                pool.index_of(&holding.device)
                    .ok_or_else(|| PoolProblem::HeldDeviceMissing {
                        claim: holding.claim.to_string(),
                        device: holding.device.clone(),
                    })?;
            usage.take(pool, index, &holding.grant);
        }
        Ok(usage)
    }

    /// What `request` would take of the device at `index`, if it can.
    ///
    /// # Errors
    /// Why the device cannot serve the request now.
    pub fn offer(
        &self,
        pool: &Pool,
        index: usize,
        request: &Alternative,
    ) -> Result<Grant, Rejection> {
        let (Some(device), Some(in_use)) = (pool.devices.get(index), self.devices.get(index))
        else {
            return Err(Rejection::Vanished);
        };
        // What can never be comes before what is not free now.
        let amounts = consumption(device, request)?;
        for (name, amount) in in_telling_order(&amounts) {
            let total = device.amount(name).unwrap_or_default();
            if amount > total {
                return Err(Rejection::AboveMaximum {
                    name: name.to_owned(),
                    asked: amount,
                    maximum: total,
                });
            }
        }
        if !request.admin_access && (in_use.exclusive > 0 || (!device.shared && in_use.in_use())) {
            return Err(Rejection::InUse);
        }
        if request.admin_access {
            return Ok(Grant::Admin(device.shared.then_some(amounts)));
        }
        // The cheap and telling test first: a share of a card that is taken whole lacks no memory.
        if !in_use.in_use() {
            self.check_counters(pool, device)?;
        }
        for (name, amount) in in_telling_order(&amounts) {
            let total = device.amount(name).unwrap_or_default();
            let used = in_use.consumed.get(name).copied().unwrap_or_default();
            if used + amount > total {
                return Err(Rejection::Capacity {
                    name: name.to_owned(),
                    asked: amount,
                    free: (total - used).max(Quantity::ZERO),
                    total,
                });
            }
        }
        Ok(if device.shared {
            Grant::Share(amounts)
        } else {
            Grant::Exclusive
        })
    }

    fn check_counters(&self, pool: &Pool, device: &Device) -> Result<(), Rejection> {
        for consumption in &device.consumes {
            let available = pool.counter_sets.get(&consumption.set);
            let used = self.counters.get(&consumption.set);
            for (counter, amount) in &consumption.counters {
                let of = |set: Option<&CounterSet>| {
                    set.and_then(|set| set.get(counter))
                        .copied()
                        .unwrap_or_default()
                };
                if of(used) + *amount > of(available) {
                    return Err(Rejection::CardInUse(self.card_use(pool, &consumption.set)));
                }
            }
        }
        Ok(())
    }

    /// As what a counter set is in use.
    fn card_use(&self, pool: &Pool, set: &str) -> CardUse {
        let in_use = pool
            .devices
            .iter()
            .zip(&self.devices)
            .find(|(device, in_use)| {
                in_use.in_use()
                    && device
                        .consumes
                        .iter()
                        .any(|consumption| consumption.set == set)
            });
        match in_use.and_then(|(device, _)| device.kind) {
            Some(DeviceType::Gpu) => CardUse::Whole,
            Some(DeviceType::Vgpu) => CardUse::Shared,
            Some(DeviceType::Mig) => CardUse::Partitioned,
            None => CardUse::Otherwise,
        }
    }

    /// Charges a grant.
    pub fn take(&mut self, pool: &Pool, index: usize, grant: &Grant) {
        let (Some(device), Some(in_use)) = (pool.devices.get(index), self.devices.get_mut(index))
        else {
            return;
        };
        let charge_counters = match grant {
            Grant::Admin(_) => return,
            Grant::Exclusive => {
                in_use.exclusive += 1;
                true
            }
            Grant::Share(amounts) => {
                let first = !in_use.in_use();
                in_use.shares += 1;
                for (name, capacity) in &device.capacity {
                    // An allocation that does not say what it takes is charged in full.
                    let amount = amounts.get(name).copied().unwrap_or(capacity.value);
                    *in_use.consumed.entry(name.clone()).or_default() += amount;
                }
                first
            }
        };
        if charge_counters {
            self.charge_counters(device, |used, amount| used + amount);
        }
    }

    /// Takes back what [`Self::take`] charged.
    pub fn put_back(&mut self, pool: &Pool, index: usize, grant: &Grant) {
        let (Some(device), Some(in_use)) = (pool.devices.get(index), self.devices.get_mut(index))
        else {
            return;
        };
        let free_counters = match grant {
            Grant::Admin(_) => return,
            Grant::Exclusive => {
                in_use.exclusive = in_use.exclusive.saturating_sub(1);
                true
            }
            Grant::Share(amounts) => {
                in_use.shares = in_use.shares.saturating_sub(1);
                for (name, capacity) in &device.capacity {
                    let amount = amounts.get(name).copied().unwrap_or(capacity.value);
                    if let Some(used) = in_use.consumed.get_mut(name) {
                        *used = *used - amount;
                    }
                }
                !in_use.in_use()
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
                let used = set.entry(counter.clone()).or_default();
                *used = change(*used, *amount);
            }
        }
    }

    /// Memory in use and in total of the card that `card` names, over all devices of the card.
    #[must_use]
    pub fn card_memory(&self, pool: &Pool, card: &str) -> CardMemory {
        let mut memory = CardMemory::default();
        for (device, in_use) in pool.devices.iter().zip(&self.devices) {
            if *device.card != *card {
                continue;
            }
            let whole = device.amount(names::capacity::MEMORY).unwrap_or_default();
            memory.total = memory.total.max(whole);
            if in_use.exclusive > 0 {
                memory.used += whole;
            }
            memory.used += in_use
                .consumed
                .get(names::capacity::MEMORY)
                .copied()
                .unwrap_or_default();
        }
        memory
    }
}

/// Memory of one card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CardMemory {
    /// In use.
    pub used: Quantity,
    /// Published by the largest device of the card.
    pub total: Quantity,
}

/// What `request` consumes of each capacity of `device`.
fn consumption(device: &Device, request: &Alternative) -> Result<Amounts, Rejection> {
    if let Some(name) = request
        .capacity
        .keys()
        .find(|name| !device.capacity.contains_key(*name))
    {
        return Err(Rejection::CapacityUndefined { name: name.clone() });
    }
    device
        .capacity
        .iter()
        .map(
            |(name, capacity)| match capacity.consumption(request.asked(name)) {
                Ok(amount) => Ok((name.clone(), amount)),
                Err(Refusal::AboveMaximum { asked, maximum }) => Err(Rejection::AboveMaximum {
                    name: name.clone(),
                    asked,
                    maximum,
                }),
                Err(Refusal::Negative) => Err(Rejection::AboveMaximum {
                    name: name.clone(),
                    asked: request.asked(name).unwrap_or_default(),
                    maximum: capacity.value,
                }),
            },
        )
        .collect()
}

/// Memory first, then cores, then slots: what a user thinks of first is what is reported first.
fn in_telling_order(amounts: &Amounts) -> impl Iterator<Item = (&str, Quantity)> {
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
