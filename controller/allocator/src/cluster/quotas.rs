//! Quotas of the cluster, and what the namespaces use.
//!
//! Every allocated or assumed device is charged to the namespace of its claim, also a device that kube-scheduler
//! allocated. The sums per namespace and device model are kept for changes of quotas and labels, the sums per quota for
//! decisions.

use std::collections::{BTreeMap, BTreeSet};

use drava_api::Quantity;
use drava_api::quota::{GpuQuota, GpuQuotaSpec, QuotaResource, labels_match};
use k8s_openapi::api::core::v1::Namespace;

use super::Cluster;
use crate::node::neighbors::NamespaceLabels;
use crate::object::ObjectKey;
use crate::placement::Placement;
use crate::quota::{Budget, Charge, DeviceModel};
use crate::reason::QuotaRejection;
use crate::usage::DeviceAccess;

/// State of the quotas.
#[derive(Debug, Default)]
pub(super) struct Quotas {
    /// By name.
    quotas: BTreeMap<String, Quota>,
    /// Labels by namespace.
    namespaces: NamespaceLabels,
    /// Charges of each claim.
    charges: BTreeMap<ObjectKey, Vec<DeviceCharge>>,
    /// Charges of claims that are presumed gone and have not changed since. No sum contains them.
    lifted: BTreeMap<ObjectKey, Vec<DeviceCharge>>,
    /// Sums of the charges by namespace and model.
    sums: BTreeMap<String, BTreeMap<Model, Sum>>,
}

/// A sum of charges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Sum {
    used: Charge,
    /// Part of it that suspended shares have.
    suspended: Charge,
}

impl Sum {
    fn of(charged: &DeviceCharge) -> Self {
        let is_suspended = matches!(charged.access, DeviceAccess::Suspended(_));
        Self {
            used: charged.charge,
            suspended: match is_suspended {
                true => charged.charge,
                false => Charge::default(),
            },
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            used: self.used + other.used,
            suspended: self.suspended + other.suspended,
        }
    }

    fn negative(self) -> Self {
        Self {
            used: Charge::default() - self.used,
            suspended: Charge::default() - self.suspended,
        }
    }
}

#[derive(Debug)]
struct Quota {
    spec: GpuQuotaSpec,
    /// Namespaces that the quota covers.
    namespaces: BTreeSet<String>,
    sum: Sum,
}

/// Model of a device; `None` for a device that was never published, which every quota counts.
type Model = Option<DeviceModel>;

/// What a claim is charged for one device.
#[derive(Debug)]
struct DeviceCharge {
    pool: String,
    device: String,
    access: DeviceAccess,
    model: Model,
    charge: Charge,
}

impl Quotas {
    pub(super) const fn namespace_labels(&self) -> &NamespaceLabels {
        &self.namespaces
    }
}

impl Quota {
    fn counts(&self, model: &Model) -> bool {
        let model = model.as_ref();
        model.is_none_or(|model| model.is_selected(&self.spec))
    }

    /// Sums up the usage after a change of the quota.
    fn recount(&mut self, sums: &BTreeMap<String, BTreeMap<Model, Sum>>) {
        let sums = self.namespaces.iter().filter_map(|name| sums.get(name));
        let counted = sums.flatten().filter(|(model, _)| self.counts(model));
        self.sum = counted.fold(Sum::default(), |sum, (_, counted)| sum.plus(*counted));
    }
}

/// A quota with its usage.
#[derive(Debug, Clone)]
pub struct QuotaUse<'a> {
    /// Name of the quota.
    pub name: &'a str,
    /// The quota.
    pub spec: &'a GpuQuotaSpec,
    /// Namespaces that the quota covers.
    pub namespaces: &'a BTreeSet<String>,
    /// What the namespaces use.
    pub used: Charge,
    /// Part of it that suspended shares have: they get it back when they are resumed.
    pub suspended: Charge,
}

impl QuotaUse<'_> {
    /// Returns the used amount beyond the guarantee; `None` without a guarantee.
    #[must_use]
    pub fn borrowed(&self, resource: QuotaResource) -> Option<Quantity> {
        let guarantee = self.spec.guarantee(resource)?;
        Some((self.used.get(resource) - guarantee).max(Quantity::ZERO))
    }

    /// Returns the amount left below the limit; negative when the limit was lowered, `None` without a limit.
    #[must_use]
    pub fn free(&self, resource: QuotaResource) -> Option<Quantity> {
        Some(self.spec.limit(resource)? - self.used.get(resource))
    }

    fn is_borrowing(&self) -> bool {
        let mut resources = QuotaResource::ALL.into_iter();
        resources.any(|resource| {
            self.borrowed(resource)
                .is_some_and(|amount| !amount.is_zero())
        })
    }
}

/// Guaranteed usage of tenants: evictions for a pod of another tenant do not lower their usage below it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Floors(Vec<(String, QuotaResource, Quantity)>);

impl Floors {
    /// Returns whether no tenant has guaranteed usage.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Cluster {
    /// Adds or replaces a quota. Returns the namespaces whose claims it may decide differently.
    pub fn upsert_quota(&mut self, quota: &GpuQuota) -> BTreeSet<String> {
        let name = quota.metadata.name.clone().unwrap_or_default();
        if self
            .quotas
            .quotas
            .get(&name)
            .is_some_and(|known| known.spec == quota.spec)
        {
            return BTreeSet::new();
        }
        let mut affected = self.remove_quota(&name);
        let spec = quota.spec.clone();
        let namespaces = self.quotas.covered(&spec);
        affected.extend(namespaces.iter().cloned());
        let mut quota = Quota {
            spec,
            namespaces,
            sum: Sum::default(),
        };
        quota.recount(&self.quotas.sums);
        self.quotas.quotas.insert(name, quota);
        affected
    }

    /// Removes a quota. Returns the namespaces that it covered.
    pub fn remove_quota(&mut self, name: &str) -> BTreeSet<String> {
        let removed = self.quotas.quotas.remove(name);
        removed.map(|quota| quota.namespaces).unwrap_or_default()
    }

    /// Adds or replaces a namespace. Returns the namespaces whose claims may be decided differently.
    pub fn upsert_namespace(&mut self, namespace: &Namespace) -> BTreeSet<String> {
        let name = namespace.metadata.name.clone().unwrap_or_default();
        let labels = namespace.metadata.labels.clone().unwrap_or_default();
        let before = self.quotas.namespaces.insert(name.clone(), labels.clone());
        if before.as_ref() == Some(&labels) {
            return BTreeSet::new();
        }
        self.policies.namespace_changed();
        let mut affected = self.quotas.cover(&name);
        // A policy may select it now, or no longer.
        if self.selects_namespaces() {
            affected.insert(name);
        }
        affected
    }

    /// Returns whether it is unknown which quotas and policies hold for the namespace: some select by labels, and its labels
    /// are not known.
    #[must_use]
    pub fn has_unknown_limits(&self, namespace: &str) -> bool {
        !self.quotas.namespaces.contains_key(namespace) && self.selects_namespaces()
    }

    /// Returns whether a quota or policy selects namespaces by labels.
    fn selects_namespaces(&self) -> bool {
        let mut quotas = self.quotas.quotas.values();
        let mut policies = self.policies.values();
        quotas.any(|quota| quota.spec.namespace_selector.is_some())
            || policies.any(|policy| policy.namespace_selector.is_some())
    }

    /// Returns the labels of a namespace.
    pub(crate) fn labels_of(&self, namespace: &str) -> Option<&BTreeMap<String, String>> {
        self.quotas.namespaces.get(namespace)
    }

    /// Returns the labels of all namespaces.
    pub(crate) fn namespace_labels(&self) -> impl Iterator<Item = &BTreeMap<String, String>> {
        self.quotas.namespaces.values()
    }

    /// Removes a namespace. Returns the namespaces whose claims may be decided differently.
    pub fn remove_namespace(&mut self, name: &str) -> BTreeSet<String> {
        self.quotas.namespaces.remove(name);
        self.policies.namespace_changed();
        self.quotas.cover(name)
    }

    /// Returns what the claims of each namespace have, including assumed allocations; nothing for namespaces without any.
    pub fn namespace_charges(&self) -> impl Iterator<Item = (&str, Charge)> {
        let sums = self.quotas.sums.iter().map(|(namespace, sums)| {
            let sum = sums
                .values()
                .fold(Charge::default(), |all, sum| all + sum.used);
            (namespace.as_str(), sum)
        });
        sums.filter(|(_, sum)| *sum != Charge::default())
    }

    /// Returns what a claim has, including an assumed allocation.
    #[must_use]
    pub fn charge_of(&self, claim: &ObjectKey) -> Charge {
        let charges = self.quotas.charges.get(claim).into_iter().flatten();
        charges.fold(Charge::default(), |sum, charged| sum + charged.charge)
    }

    /// Returns the quotas with their usage.
    pub fn quotas(&self) -> impl Iterator<Item = QuotaUse<'_>> {
        let quotas = self.quotas.quotas.iter();
        quotas.map(|(name, quota)| QuotaUse {
            name,
            spec: &quota.spec,
            namespaces: &quota.namespaces,
            used: quota.sum.used,
            suspended: quota.sum.suspended,
        })
    }

    /// Returns whether a quota covers both namespaces, so that a release in one can help a pod of the other.
    #[must_use]
    pub fn share_quota(&self, one: &str, other: &str) -> bool {
        let mut quotas = self.quotas.quotas.values();
        quotas.any(|quota| quota.namespaces.contains(one) && quota.namespaces.contains(other))
    }

    /// Returns the quotas that cover a namespace.
    pub(crate) fn budgets(&self, namespace: &str) -> Vec<Budget<'_>> {
        let quotas = self.quotas.quotas.iter();
        let covering = quotas.filter(|(_, quota)| quota.namespaces.contains(namespace));
        let budgets = covering.map(|(name, quota)| Budget {
            name,
            spec: &quota.spec,
            used: quota.sum.used,
        });
        budgets.collect()
    }

    /// Checks that what `grown` claims have and a placed claim adds to them stays within the memory and the cores that quotas
    /// allow one claim. The number of devices is not checked: what is added is a part of a device that one of them has.
    ///
    /// # Errors
    /// With the first quota that does not allow it.
    pub fn check_growth<'a>(
        &self,
        grown: impl Iterator<Item = &'a ObjectKey>,
        placement: &Placement,
    ) -> Result<(), Box<QuotaRejection>> {
        let Some(placed) = placement.claims.first() else {
            return Ok(());
        };
        let charged: Vec<&DeviceCharge> = grown
            .filter_map(|claim| self.quotas.charges.get(claim))
            .flatten()
            .collect();
        for budget in self.budgets(&placed.claim.namespace) {
            let counted = charged.iter().filter(|charged| {
                let model = charged.model.as_ref();
                model.is_none_or(|model| model.is_selected(budget.spec))
            });
            let devices = placed.devices.iter();
            let added = devices.filter_map(|added| budget.charge(&added.device, &added.access));
            let sum = counted.map(|charged| charged.charge).chain(added);
            let sum = sum.fold(Charge::default(), |sum, charge| sum + charge);
            for resource in [QuotaResource::Memory, QuotaResource::Cores] {
                budget.check_claim(resource, sum)?;
            }
        }
        Ok(())
    }

    /// Returns whether the pod's namespace stays within its guarantees with this placement, which is not assumed. False
    /// without a guarantee for its devices.
    #[must_use]
    pub fn is_guaranteed(&self, placement: &Placement) -> bool {
        let Some(first) = placement.claims.first() else {
            return false;
        };
        let devices = || placement.claims.iter().flat_map(|claim| &claim.devices);
        let mut is_covered = false;
        for budget in self.budgets(&first.claim.namespace) {
            let charges =
                devices().filter_map(|placed| budget.charge(&placed.device, &placed.access));
            let Some(charge) = charges.reduce(|sum, charge| sum + charge) else {
                continue;
            };
            for resource in QuotaResource::ALL {
                if let Some(guarantee) = budget.spec.guarantee(resource) {
                    if (budget.used + charge).get(resource) > guarantee {
                        return false;
                    }
                    is_covered = true;
                }
            }
        }
        is_covered
    }

    /// Returns the namespaces that use more than their guarantee, without those that share a quota with `namespace`; none if
    /// `namespace` has no guarantee.
    #[must_use]
    pub fn borrowers(&self, namespace: &str) -> BTreeSet<String> {
        let mut own = self
            .quotas()
            .filter(|quota| quota.namespaces.contains(namespace));
        if !own.any(|quota| quota.spec.guarantee.is_some()) {
            return BTreeSet::new();
        }
        let others = self
            .quotas()
            .filter(|quota| !quota.namespaces.contains(namespace));
        let borrowing = others.filter(QuotaUse::is_borrowing);
        borrowing
            .flat_map(|quota| quota.namespaces.iter().cloned())
            .collect()
    }

    /// Returns the usage that evictions for a pod of `namespace` must leave to other tenants.
    #[must_use]
    pub fn floors(&self, namespace: &str) -> Floors {
        let others = self
            .quotas()
            .filter(|quota| !quota.namespaces.contains(namespace));
        let floors = others.flat_map(|quota| {
            QuotaResource::ALL.into_iter().filter_map(move |resource| {
                let guarantee = quota.spec.guarantee(resource)?;
                let floor = guarantee.min(quota.used.get(resource));
                (!floor.is_zero()).then(|| (quota.name.to_owned(), resource, floor))
            })
        });
        Floors(floors.collect())
    }

    /// Returns whether every tenant still has its guaranteed usage.
    #[must_use]
    pub fn keeps(&self, floors: &Floors) -> bool {
        floors.0.iter().all(|(name, resource, floor)| {
            let quota = self.quotas.quotas.get(name);
            quota.is_none_or(|quota| quota.sum.used.get(*resource) >= *floor)
        })
    }

    /// Lifts the charges of a claim that is presumed gone, until [`Self::charge_again`].
    pub(super) fn lift_charges(&mut self, claim: &ObjectKey) {
        if self.assumed.contains_key(claim) {
            return self.charge(claim);
        }
        let lifted = self.quotas.replace(claim, Vec::new());
        if !lifted.is_empty() {
            self.quotas.lifted.insert(claim.clone(), lifted);
        }
    }

    /// Charges the devices of a claim that is not presumed gone any more.
    pub(super) fn charge_again(&mut self, claim: &ObjectKey) {
        match self.quotas.lifted.remove(claim) {
            Some(lifted) => drop(self.quotas.replace(claim, lifted)),
            None => self.charge(claim),
        }
    }

    /// Charges the devices of a claim after a change.
    pub(super) fn charge(&mut self, claim: &ObjectKey) {
        let lifted = self.quotas.lifted.remove(claim);
        let devices = self.charged_devices_of(claim);
        let before = self.quotas.charges.get(claim).or(lifted.as_ref());
        let charges = devices.filter_map(|allocated| {
            let device = self.published(&allocated.pool, &allocated.device);
            let charge = Charge::of(device, &allocated.access)?;
            // A pod goes on with a device that is not published for a while, so the last known amounts count.
            let known = before.into_iter().flatten().find(|known| {
                device.is_none()
                    && known.pool == allocated.pool
                    && known.device == allocated.device
                    && known.access == allocated.access
            });
            let (model, charge) = match known {
                Some(known) => (known.model.clone(), known.charge),
                None => (device.map(DeviceModel::from), charge),
            };
            Some(DeviceCharge {
                pool: allocated.pool.clone(),
                device: allocated.device.clone(),
                access: allocated.access.clone(),
                model,
                charge,
            })
        });
        let mut charges: Vec<DeviceCharge> = charges.collect();
        charges.shrink_to_fit();
        self.quotas.replace(claim, charges);
    }
}

impl Quotas {
    /// Returns the namespaces that a quota covers.
    fn covered(&self, spec: &GpuQuotaSpec) -> BTreeSet<String> {
        let mut covered: BTreeSet<String> = spec.namespaces.iter().flatten().cloned().collect();
        if let Some(selector) = &spec.namespace_selector {
            let namespaces = self.namespaces.iter();
            let selected = namespaces.filter(|(_, labels)| labels_match(selector, labels));
            covered.extend(selected.map(|(name, _)| name.clone()));
        }
        covered
    }

    /// Updates which quotas cover a namespace after a change of its labels. Returns the namespaces of these quotas.
    fn cover(&mut self, namespace: &str) -> BTreeSet<String> {
        let mut affected = BTreeSet::new();
        let labels = self.namespaces.get(namespace);
        for quota in self.quotas.values_mut() {
            let Some(selector) = &quota.spec.namespace_selector else {
                continue;
            };
            let is_selected = labels.is_some_and(|labels| labels_match(selector, labels));
            if is_selected == quota.namespaces.contains(namespace) {
                continue;
            }
            affected.extend(quota.namespaces.iter().cloned());
            affected.insert(namespace.to_owned());
            if is_selected {
                quota.namespaces.insert(namespace.to_owned());
            } else {
                quota.namespaces.remove(namespace);
            }
            quota.recount(&self.sums);
        }
        affected
    }

    /// Replaces the charges of a claim. Returns those before.
    fn replace(&mut self, claim: &ObjectKey, charges: Vec<DeviceCharge>) -> Vec<DeviceCharge> {
        let before = self.charges.remove(claim).unwrap_or_default();
        for before in &before {
            self.add(&claim.0, &before.model, Sum::of(before).negative());
        }
        for current in &charges {
            self.add(&claim.0, &current.model, Sum::of(current));
        }
        if !charges.is_empty() {
            self.charges.insert(claim.clone(), charges);
        }
        before
    }

    fn add(&mut self, namespace: &str, model: &Model, added: Sum) {
        let sums = self.sums.entry(namespace.to_owned()).or_default();
        let of_model = sums.entry(model.clone()).or_default();
        *of_model = of_model.plus(added);
        sums.retain(|_, sum| !sum.used.devices.is_zero());
        if sums.is_empty() {
            self.sums.remove(namespace);
        }
        for quota in self.quotas.values_mut() {
            if quota.namespaces.contains(namespace) && quota.counts(model) {
                quota.sum = quota.sum.plus(added);
            }
        }
    }
}

#[cfg(test)]
mod tests;
