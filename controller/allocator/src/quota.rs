//! Quotas: what a device is charged for, and whether the quotas of a namespace allow a request.
//!
//! A share is charged for its amounts, a whole GPU or a MIG partition for its capacity, each for one device. Admin access is
//! not charged.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::{Add, AddAssign, Sub};

use drava_api::quota::{
    GpuQuotaSpec, QuotaAmounts, QuotaDeviceSelector, QuotaResource, ShareAmounts,
};
use drava_api::{DeviceType, Quantity, names};

use crate::attribute::Attribute;
use crate::claim::Alternative;
use crate::device::Device;
use crate::reason::{Bound, QuotaRejection, Rejection};
use crate::usage::DeviceAccess;

/// Amounts that count against quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Charge {
    /// GPU memory in bytes.
    pub memory: Quantity,
    /// Percent of the GPU time of one GPU.
    pub cores: Quantity,
    /// Number of devices.
    pub devices: Quantity,
}

impl Charge {
    /// Returns the charge for a device that a claim uses this way; `None` for admin access. Amounts of a device that is not
    /// published are those of the allocation.
    #[must_use]
    pub fn of(device: Option<&Device>, access: &DeviceAccess) -> Option<Self> {
        let whole = |name: &str| device.and_then(|device| device.amount(name));
        let amount = |name: &str| match access {
            // A suspended share is going to be resumed.
            DeviceAccess::Share(amounts, _) | DeviceAccess::Suspended(amounts) => {
                amounts.get(name).copied().or_else(|| whole(name))
            }
            DeviceAccess::Exclusive | DeviceAccess::Admin(_) => whole(name),
        };
        match access {
            DeviceAccess::Admin(_) => None,
            DeviceAccess::Exclusive | DeviceAccess::Share(..) | DeviceAccess::Suspended(_) => {
                Some(Self {
                    memory: amount(names::capacity::MEMORY).unwrap_or_default(),
                    cores: amount(names::capacity::CORES).unwrap_or_default(),
                    devices: Quantity::count(1),
                })
            }
        }
    }

    /// Returns the amount of a resource.
    #[must_use]
    pub const fn get(&self, resource: QuotaResource) -> Quantity {
        match resource {
            QuotaResource::Memory => self.memory,
            QuotaResource::Cores => self.cores,
            QuotaResource::Devices => self.devices,
        }
    }

    /// Returns the smaller amount of each resource.
    fn least(self, other: Self) -> Self {
        Self {
            memory: self.memory.min(other.memory),
            cores: self.cores.min(other.cores),
            devices: self.devices.min(other.devices),
        }
    }

    /// Returns the amounts of all resources.
    #[must_use]
    pub fn amounts(&self) -> QuotaAmounts {
        let mut amounts = QuotaAmounts::default();
        for resource in QuotaResource::ALL {
            amounts.set(resource, self.get(resource));
        }
        amounts
    }
}

impl Add for Charge {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            memory: self.memory + other.memory,
            cores: self.cores + other.cores,
            devices: self.devices + other.devices,
        }
    }
}

impl AddAssign for Charge {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Charge {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            memory: self.memory - other.memory,
            cores: self.cores - other.cores,
            devices: self.devices - other.devices,
        }
    }
}

/// Properties of a published device by which quotas select.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceModel {
    product_name: Option<String>,
    kind: Option<DeviceType>,
}

impl From<&Device> for DeviceModel {
    fn from(device: &Device) -> Self {
        Self {
            product_name: product_name(device).map(str::to_owned),
            kind: device.kind,
        }
    }
}

impl DeviceModel {
    /// Returns whether the quota counts such devices.
    #[must_use]
    pub fn is_selected(&self, quota: &GpuQuotaSpec) -> bool {
        quota.selects_device(self.product_name.as_deref(), self.kind)
    }
}

fn product_name(device: &Device) -> Option<&str> {
    match device.published(names::attribute::PRODUCT_NAME) {
        Some(Attribute::String(name)) => Some(name),
        _ => None,
    }
}

/// The least that the claims of a pod are charged on a node, whatever is allocated there. Most nodes have one in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LeastCharges {
    /// By claim.
    claims: Vec<Charge>,
    /// Models of the devices that may serve the claims.
    models: BTreeSet<DeviceModel>,
}

impl LeastCharges {
    /// Creates the charges of a number of claims without requests.
    pub(crate) fn new(claims: usize) -> Self {
        Self {
            claims: vec![Charge::default(); claims],
            models: BTreeSet::new(),
        }
    }

    /// Adds a request for `count` devices of the claim at this position. Each of the devices may serve it, and is used this
    /// way. Returns whether there is one.
    pub(crate) fn add<'a>(
        &mut self,
        claim: usize,
        devices: impl Iterator<Item = (&'a Device, DeviceAccess, usize)>,
    ) -> bool {
        let mut least: Option<Charge> = None;
        for (device, access, count) in devices {
            self.models.insert(DeviceModel::from(device));
            let each = Charge::of(Some(device), &access).unwrap_or_default();
            let all = (0..count).fold(Charge::default(), |sum, _| sum + each);
            least = Some(least.map_or(all, |least| least.least(all)));
        }
        if let (Some(least), Some(sum)) = (least, self.claims.get_mut(claim)) {
            *sum += least;
        }
        least.is_some()
    }

    /// Checks whether the quotas may allow the claims. One that does not count all of the devices may.
    ///
    /// # Errors
    /// With the first quota that does not.
    pub(crate) fn check(&self, budgets: &[Budget<'_>]) -> Result<(), Rejection> {
        let of_pod = self.claims.iter();
        let of_pod = of_pod.fold(Charge::default(), |sum, charge| sum + *charge);
        let counts_all = |budget: &&Budget<'_>| {
            self.models
                .iter()
                .all(|model| model.is_selected(budget.spec))
        };
        for budget in budgets.iter().filter(counts_all) {
            for of_claim in &self.claims {
                budget.check(of_pod, *of_claim).map_err(Rejection::Quota)?;
            }
        }
        Ok(())
    }
}

/// Returns what quotas give a share by default, without those that give nothing.
pub(crate) fn defaults<'a>(
    budgets: &'a [Budget<'_>],
) -> impl Iterator<Item = (Option<&'a QuotaDeviceSelector>, ShareAmounts)> {
    let all = budgets.iter().map(|budget| {
        let default = budget.spec.share_default();
        (budget.spec.device_selector.as_ref(), default)
    });
    all.filter(|(_, default)| *default != ShareAmounts::default())
}

/// A quota of the namespace for which devices are requested, with its usage.
#[derive(Debug, Clone, Copy)]
pub struct Budget<'a> {
    /// Name of the quota.
    pub name: &'a str,
    /// The quota.
    pub spec: &'a GpuQuotaSpec,
    /// What the namespaces of the quota use.
    pub used: Charge,
}

impl Budget<'_> {
    /// Returns the charge for a device that a claim uses this way; `None` if the quota does not count it.
    #[must_use]
    pub fn charge(&self, device: &Device, access: &DeviceAccess) -> Option<Charge> {
        let is_selected = self.spec.selects_device(product_name(device), device.kind);
        is_selected.then(|| Charge::of(Some(device), access))?
    }

    /// Checks the charges of a pod, and of one of its claims, that are not part of the usage.
    ///
    /// # Errors
    /// With the first resource that the quota does not allow.
    pub fn check(&self, pod: Charge, claim: Charge) -> Result<(), Box<QuotaRejection>> {
        for resource in QuotaResource::ALL {
            self.check_claim(resource, claim)?;
            let of_pod = pod.get(resource);
            let used = self.used.get(resource);
            // A request of nothing is admitted also while the usage exceeds a limit that was lowered.
            if let Some(limit) = self.spec.limit(resource)
                && !of_pod.is_zero()
                && used + of_pod > limit
            {
                return Err(self.reject(resource, of_pod, Bound::Limit { used, limit }));
            }
        }
        Ok(())
    }

    /// Checks the charge of one claim for a resource.
    ///
    /// # Errors
    /// When it exceeds the maximum of a claim.
    pub(crate) fn check_claim(
        &self,
        resource: QuotaResource,
        claim: Charge,
    ) -> Result<(), Box<QuotaRejection>> {
        let requested = claim.get(resource);
        match self.spec.claim_maximum(resource) {
            Some(maximum) if requested > maximum => {
                Err(self.reject(resource, requested, Bound::ClaimMaximum(maximum)))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn reject(
        &self,
        resource: QuotaResource,
        requested: Quantity,
        bound: Bound,
    ) -> Box<QuotaRejection> {
        Box::new(QuotaRejection {
            quota: self.name.to_owned(),
            resource,
            requested,
            bound,
        })
    }
}

/// Returns the request with the smallest default amounts of the quotas that count the device, where it names none. Only a
/// share has defaults; they are limited to the capacity of the device.
pub(crate) fn with_defaults<'a>(
    budgets: &[Budget<'_>],
    device: &Device,
    request: &'a Alternative,
) -> Cow<'a, Alternative> {
    use names::capacity::{CORES, MEMORY};
    let mut request = Cow::Borrowed(request);
    if !device.shared {
        return request;
    }
    let (product, kind) = (product_name(device), device.kind);
    let counts = |budget: &&Budget<'_>| budget.spec.selects_device(product, kind);
    let defaults = || {
        budgets
            .iter()
            .filter(counts)
            .map(|budget| budget.spec.share_default())
    };
    let memory = defaults().filter_map(|default| default.memory).min();
    let cores = defaults().filter_map(|default| default.cores).min();
    let cores = cores.map(|cores| Quantity::count(cores.into()));
    for (name, default) in [(MEMORY, memory), (CORES, cores)] {
        let is_named = request.requested(name).is_some()
            || (name == MEMORY && request.memory_percent.is_some());
        if let Some(default) = default
            && let Some(capacity) = device.capacity.get(name)
            && !is_named
        {
            let amount = default.min(capacity.maximum());
            request.to_mut().capacity.insert(name.to_owned(), amount);
        }
    }
    request
}

/// Checks whether the quotas allow a device in addition to those selected for the same pod, each with the position of its
/// claim.
///
/// # Errors
/// With the first quota that does not.
pub(crate) fn check<'a>(
    budgets: &[Budget<'_>],
    (claim, device, access): (usize, &Device, &DeviceAccess),
    selected: &(impl Iterator<Item = (usize, &'a Device, &'a DeviceAccess)> + Clone),
) -> Result<(), Rejection> {
    for budget in budgets {
        let Some(charge) = budget.charge(device, access) else {
            continue;
        };
        let (mut of_pod, mut of_claim) = (charge, charge);
        for (other, device, access) in selected.clone() {
            let charge = budget.charge(device, access).unwrap_or_default();
            of_pod += charge;
            if other == claim {
                of_claim += charge;
            }
        }
        budget.check(of_pod, of_claim).map_err(Rejection::Quota)?;
    }
    Ok(())
}
