//! Looking ahead: what the requests that are left could still get, so that a hopeless selection is given up at once.
//!
//! A device that cannot serve a request now cannot serve it after more is allocated, so the candidates of the requests only
//! become fewer. A selection is hopeless when a request has too few of them, or when all requests together have:
//! - a device that a claim uses alone serves one request, and a shared one as many as their smallest amounts allow;
//! - devices of a container are on different GPUs, and those under `distinctAttribute` have different values;
//! - devices under `matchAttribute` have one value, so one group of candidates must be large enough, and have the counters.
//!
//! Only selections without a solution are given up, so the first solution is that of a search without looking ahead.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use drava_api::Quantity;

use super::input::{ContainerDevices, DeviceRef, SearchInput};
use super::matching::{Need, can_meet_all};
use super::tentative_allocation::RequestIndex;
use super::{Search, Slot, count};
use crate::attribute::Attribute;
use crate::claim::{Alternative, Constraint, ConstraintRule};

/// Candidates that can be allocated now, by kind of request and by alternative. Empty for kinds that no later request has.
pub(super) type Domains = Vec<Vec<Vec<DeviceRef>>>;

/// A request, or the rest of one, that is to be served.
#[derive(Clone)]
struct Pending<'a> {
    slot: usize,
    options: Vec<Choice<'a>>,
}

/// An alternative of a request with the devices that it could get.
#[derive(Clone)]
struct Choice<'a> {
    index: RequestIndex,
    alternative: &'a Alternative,
    count: usize,
    devices: Vec<DeviceRef>,
}

/// What a request needs at least, of devices that any of its alternatives could get.
struct Wanted<'p, 'a> {
    pending: &'p Pending<'a>,
    count: usize,
    devices: BTreeSet<DeviceRef>,
}

/// Returns for each slot the first one that is equal to it in all that decides on its devices.
pub(super) fn kinds(slots: &[Slot<'_>], input: &SearchInput<'_>) -> Vec<usize> {
    // The GPUs of a container differ; one device alone is always different.
    let has_several = |container: &&ContainerDevices| {
        let used = slots
            .iter()
            .filter(|slot| container.uses(input.claims, slot.claim, slot.request));
        let devices = used.map(|slot| slot.alternatives.iter().map(count).max());
        !container.gpus.is_empty() || devices.flatten().sum::<usize>() > 1
    };
    let containers: Vec<_> = input.containers.iter().filter(has_several).collect();
    let is_equal = |one: &Slot<'_>, other: &Slot<'_>| {
        let claim = input.claims.get(one.claim);
        let constraints = claim.map_or(&[][..], |claim| &claim.constraints);
        let are_alike = |(one, other): (&Alternative, &Alternative)| {
            let mut constraints = constraints.iter();
            one.is_alike(other)
                && constraints.all(|rule| rule.covers(&one.name) == rule.covers(&other.name))
        };
        let one_by_one = one.alternatives.iter().zip(&other.alternatives);
        let mut one_by_one = one_by_one.map(|(one, other)| (one.alternative, other.alternative));
        let mut containers = containers.iter();
        one.claim == other.claim
            && one.alternatives.len() == other.alternatives.len()
            && one_by_one.all(are_alike)
            && containers.all(|container| {
                let uses = |slot: &Slot<'_>| container.uses(input.claims, slot.claim, slot.request);
                uses(one) == uses(other)
            })
    };
    let kind = |(position, slot): (usize, &Slot<'_>)| {
        let mut earlier = slots.iter().take(position);
        earlier
            .position(|other| is_equal(other, slot))
            .unwrap_or(position)
    };
    slots.iter().enumerate().map(kind).collect()
}

impl<'a> Search<'a> {
    /// Returns the candidates at the start; `None` if there is no solution.
    pub(super) fn look_at_start(&mut self) -> Option<Domains> {
        let mut domains = self.narrow(0, None)?;
        let mut pending = self.later(0, &domains);
        self.keep_possible(&mut pending)?;
        self.replace(&mut domains, pending);
        Some(domains)
    }

    /// Returns what of `rest` and of the candidates of later requests can be allocated now; `None` if the selection is
    /// hopeless.
    pub(super) fn look_ahead(
        &mut self,
        index: (usize, usize),
        rest: &[DeviceRef],
        needed: usize,
        domains: &Domains,
    ) -> Option<(Vec<DeviceRef>, Domains)> {
        let (slot, alternative) = index;
        let slots = Rc::clone(&self.slots);
        let candidates = slots.get(slot)?.alternatives.get(alternative)?;
        let index = self.index(slot, alternative)?;
        let mut left = Vec::new();
        if needed > 0 {
            self.spend(rest.len());
            let can_serve = |candidate: &DeviceRef| {
                let check = self
                    .allocation
                    .check(index, candidates.alternative, *candidate);
                check.is_ok()
            };
            left = rest.iter().copied().filter(can_serve).collect();
            if left.len() < needed {
                let devices = self.unselected(index, candidates);
                self.record_rejections(slot, alternative, &devices, needed);
                return None;
            }
        }
        let mut domains = self.narrow(slot + 1, Some(domains))?;
        let mut pending = self.later(slot + 1, &domains);
        if needed > 0 {
            let options = vec![Choice {
                index,
                alternative: candidates.alternative,
                count: needed,
                devices: left.clone(),
            }];
            pending.insert(0, Pending { slot, options });
        }
        self.keep_possible(&mut pending)?;
        if needed > 0 {
            let rest = pending.remove(0);
            left = rest
                .options
                .into_iter()
                .flat_map(|option| option.devices)
                .collect();
        }
        self.replace(&mut domains, pending);
        Some((left, domains))
    }

    /// Sets the candidates of later requests.
    fn replace(&self, domains: &mut Domains, pending: Vec<Pending<'a>>) {
        for request in pending {
            let kind = self.kinds.get(request.slot).copied();
            for option in request.options {
                let of_kind = kind.and_then(|kind| domains.get_mut(kind));
                let domain = of_kind.and_then(|of_kind| of_kind.get_mut(option.index.alternative));
                if let Some(domain) = domain {
                    *domain = option.devices;
                }
            }
        }
    }

    /// Returns which candidates of the requests from a slot on can be allocated now. `None` if a request has too few.
    fn narrow(&mut self, from: usize, before: Option<&Domains>) -> Option<Domains> {
        let slots = Rc::clone(&self.slots);
        let mut domains: Domains = vec![Vec::new(); slots.len()];
        for slot in from..slots.len() {
            let kind = *self.kinds.get(slot)?;
            let of_kind = slots.get(kind)?;
            if domains.get(kind).is_some_and(|known| !known.is_empty()) {
                continue;
            }
            let mut narrowed = Vec::new();
            let mut has_enough = false;
            for (alternative, candidates) in of_kind.alternatives.iter().enumerate() {
                // That of a request without devices: the container of an earlier one has a GPU.
                let index = self.index(slot, alternative)?;
                let devices = match before {
                    Some(before) => before.get(kind)?.get(alternative)?,
                    None => &candidates.selected,
                };
                self.spend(devices.len());
                let can_serve = |candidate: &DeviceRef| {
                    let check = self
                        .allocation
                        .check(index, candidates.alternative, *candidate);
                    check.is_ok()
                };
                let left: Vec<_> = devices.iter().copied().filter(can_serve).collect();
                has_enough |= left.len() >= count(candidates);
                narrowed.push(left);
            }
            if !has_enough {
                let candidates = slots.get(slot)?.alternatives.first()?;
                self.record_rejections(slot, 0, &candidates.selected, count(candidates));
                return None;
            }
            *domains.get_mut(kind)? = narrowed;
        }
        Some(domains)
    }

    /// Returns the requests from a slot on with their candidates.
    fn later(&self, from: usize, domains: &Domains) -> Vec<Pending<'a>> {
        let pending = |slot: usize| {
            let domains = domains.get(*self.kinds.get(slot)?)?;
            let alternatives = self.slots.get(slot)?.alternatives.iter().enumerate();
            let options = alternatives.filter_map(|(alternative, candidates)| {
                Some(Choice {
                    index: self.index(slot, alternative)?,
                    alternative: candidates.alternative,
                    count: count(candidates),
                    devices: domains.get(alternative)?.clone(),
                })
            });
            let options = options.collect();
            Some(Pending { slot, options })
        };
        (from..self.slots.len()).filter_map(pending).collect()
    }

    /// Removes the candidates of groups that are too small for these requests; `None` if they cannot all be served.
    fn keep_possible(&mut self, pending: &mut [Pending<'a>]) -> Option<()> {
        let claims = self.allocation.claims();
        let rules = claims.iter().enumerate().flat_map(|(claim, spec)| {
            let rules = spec.constraints.iter();
            rules.map(move |constraint| (claim, constraint))
        });
        let (matches, distinct): (Vec<_>, Vec<_>) =
            rules.partition(|(_, constraint)| constraint.rule == ConstraintRule::Match);
        if matches.is_empty() {
            return self.fit(pending, &distinct).then_some(());
        }
        for (claim, constraint) in matches {
            let mut possible = Vec::new();
            for value in self.values(pending, claim, constraint) {
                let group = self.restricted(pending, claim, constraint, value);
                if self.fit(&group, &distinct) {
                    possible.push(value);
                }
            }
            if possible.is_empty() {
                return None;
            }
            let is_possible = |device: &DeviceRef| {
                let value = self.allocation.attribute(*device, &constraint.attribute);
                matches!(value, Some(Attribute::List(_))) || possible.contains(&value)
            };
            let options = pending.iter_mut().flat_map(|pending| &mut pending.options);
            for option in options.filter(|option| option.is_under(claim, constraint)) {
                option.devices.retain(is_possible);
            }
        }
        Some(())
    }

    /// Returns the values of an attribute that the candidates under a constraint have; `None` as the only one if no request is
    /// under it.
    fn values(
        &self,
        pending: &[Pending<'a>],
        claim: usize,
        constraint: &Constraint,
    ) -> Vec<Option<&'a Attribute>> {
        let options = pending.iter().flat_map(|pending| &pending.options);
        let covered = options.filter(|option| option.is_under(claim, constraint));
        let mut values: Vec<Option<&Attribute>> = Vec::new();
        let mut is_covered = false;
        for option in covered {
            is_covered = true;
            for device in &option.devices {
                let value = self.allocation.attribute(*device, &constraint.attribute);
                if value.is_some() && !values.contains(&value) {
                    values.push(value);
                }
            }
        }
        // An alternative without the constraint may be selected.
        if !is_covered
            || pending
                .iter()
                .any(|pending| pending.can_avoid(claim, constraint))
        {
            values.push(None);
        }
        values
    }

    /// Returns the requests with the candidates of one value, where the constraint covers them. Lists can have several values
    /// in common.
    fn restricted(
        &self,
        pending: &[Pending<'a>],
        claim: usize,
        constraint: &Constraint,
        value: Option<&Attribute>,
    ) -> Vec<Pending<'a>> {
        let Some(value) = value else {
            return pending.to_vec();
        };
        let is_of_group = |device: &DeviceRef| {
            let of_device = self.allocation.attribute(*device, &constraint.attribute);
            matches!(value, Attribute::List(_))
                || of_device.is_some_and(|of_device| {
                    of_device == value || matches!(of_device, Attribute::List(_))
                })
        };
        let mut pending = pending.to_vec();
        let options = pending.iter_mut().flat_map(|pending| &mut pending.options);
        for option in options.filter(|option| option.is_under(claim, constraint)) {
            option.devices.retain(is_of_group);
        }
        pending
    }

    /// Returns false if these requests need more than their candidates have.
    fn fit(&mut self, pending: &[Pending<'a>], distinct: &[(usize, &Constraint)]) -> bool {
        let mut wanted = Vec::new();
        for pending in pending {
            let options = pending.options.iter();
            let options = options.filter(|option| option.devices.len() >= option.count);
            let Some(count) = options.clone().map(|option| option.count).min() else {
                return false;
            };
            let devices = options.flat_map(|option| option.devices.iter().copied());
            wanted.push(Wanted {
                pending,
                count,
                devices: devices.collect(),
            });
        }
        self.spend(wanted.iter().map(|wanted| wanted.devices.len()).sum());
        let total: usize = wanted.iter().map(|wanted| wanted.count).sum();
        total < 2
            || (self.have_devices(&wanted)
                && self.have_counters(&wanted)
                && self.have_gpus(&wanted)
                && self.have_values(&wanted, distinct))
    }

    /// Returns whether there are enough devices.
    fn have_devices(&self, wanted: &[Wanted<'_, 'a>]) -> bool {
        // Admin access uses up nothing.
        let wanted: Vec<_> = wanted
            .iter()
            .filter(|wanted| {
                let mut options = wanted.pending.options.iter();
                options.all(|option| !option.alternative.admin_access)
            })
            .collect();
        let devices = wanted.iter().flat_map(|wanted| &wanted.devices);
        let positions: BTreeSet<DeviceRef> = devices.copied().collect();
        let capacities = positions.iter().map(|device| {
            let requests = wanted.iter().flat_map(|wanted| &wanted.pending.options);
            let requests = requests
                .filter(|option| option.devices.contains(device))
                .map(|option| (option.index, option.alternative));
            self.allocation.most_claims(*device, requests)
        });
        let capacities: Vec<usize> = capacities.collect();
        let positions: BTreeMap<DeviceRef, usize> = positions.into_iter().zip(0..).collect();
        let needs = wanted.iter().map(|wanted| Need {
            count: wanted.count,
            among: (wanted.devices.iter())
                .filter_map(|device| positions.get(device).copied())
                .collect(),
        });
        can_meet_all(&needs.collect::<Vec<_>>(), &capacities)
    }

    /// Returns whether one GPU has enough counters, if all candidates are of one.
    fn have_counters(&self, wanted: &[Wanted<'_, 'a>]) -> bool {
        let mut set = None;
        let mut sum: BTreeMap<&str, Quantity> = BTreeMap::new();
        let mut sum_of_units = Quantity::ZERO;
        let is_admin = |wanted: &&Wanted<'_, '_>| {
            let mut options = wanted.pending.options.iter();
            options.any(|option| option.alternative.admin_access)
        };
        for wanted in wanted.iter().filter(|wanted| !is_admin(wanted)) {
            let mut least: Option<BTreeMap<&str, Quantity>> = None;
            let mut least_units: Option<Quantity> = None;
            for device in &wanted.devices {
                let Some((of, counters)) = self.allocation.counters(*device) else {
                    return true;
                };
                if *set.get_or_insert(of) != of {
                    return true;
                }
                let is_unit = |name: &str| self.allocation.is_unit(of, name);
                let units = counters.iter().filter(|(name, _)| is_unit(name));
                let units = units.fold(Quantity::ZERO, |sum, (_, amount)| sum + *amount);
                least_units = Some(least_units.map_or(units, |least| least.min(units)));
                least = Some(match least {
                    None => counters
                        .iter()
                        .map(|(name, amount)| (name.as_str(), *amount))
                        .collect(),
                    Some(least) => least
                        .into_iter()
                        .filter_map(|(name, amount)| Some((name, amount.min(*counters.get(name)?))))
                        .collect(),
                });
            }
            for _ in 0..wanted.count {
                sum_of_units += least_units.unwrap_or_default();
                for (name, amount) in least.iter().flatten() {
                    *sum.entry(name).or_default() += *amount;
                }
            }
        }
        let Some(set) = set else {
            return true;
        };
        sum.into_iter()
            .all(|(name, amount)| amount <= self.allocation.free_counter(set, name))
            && sum_of_units <= self.allocation.free_units(set)
    }

    /// Returns whether the containers can have devices of different GPUs.
    fn have_gpus(&self, wanted: &[Wanted<'_, 'a>]) -> bool {
        (0..self.allocation.containers()).all(|container| {
            let of_container = wanted.iter().filter(|wanted| {
                let slot = self.slots.get(wanted.pending.slot);
                slot.is_some_and(|slot| {
                    self.allocation
                        .is_used_by(container, slot.claim, slot.request)
                })
            });
            let gpu = |device: DeviceRef| Some(Arc::clone(&self.allocation.device(device)?.gpu));
            can_differ(of_container, gpu)
        })
    }

    /// Returns whether the devices can have different values of the attributes of constraints.
    fn have_values(&self, wanted: &[Wanted<'_, 'a>], distinct: &[(usize, &Constraint)]) -> bool {
        distinct.iter().all(|(claim, constraint)| {
            let value =
                |device: DeviceRef| self.allocation.attribute(device, &constraint.attribute);
            let under = wanted.iter().filter(|wanted| {
                let mut options = wanted.pending.options.iter();
                options.all(|option| option.is_under(*claim, constraint))
            });
            let under: Vec<_> = under.collect();
            let mut devices = under.iter().flat_map(|wanted| &wanted.devices);
            let has_lists =
                devices.any(|device| matches!(value(*device), Some(Attribute::List(_))));
            has_lists || can_differ(under.into_iter(), value)
        })
    }

    pub(super) fn index(&self, slot: usize, alternative: usize) -> Option<RequestIndex> {
        let slot = self.slots.get(slot)?;
        Some(RequestIndex {
            claim: slot.claim,
            request: slot.request,
            alternative,
        })
    }
}

impl Choice<'_> {
    fn is_under(&self, claim: usize, constraint: &Constraint) -> bool {
        self.index.claim == claim && constraint.covers(&self.alternative.name)
    }
}

impl Pending<'_> {
    /// Returns whether some alternatives are under the constraint, and others are not.
    fn can_avoid(&self, claim: usize, constraint: &Constraint) -> bool {
        let is_under = |option: &Choice<'_>| option.is_under(claim, constraint);
        self.options.iter().any(is_under) && !self.options.iter().all(is_under)
    }
}

/// Returns whether the requests can get devices that all differ in what `key` returns.
fn can_differ<'w, 'a: 'w, K: PartialEq>(
    wanted: impl Iterator<Item = &'w Wanted<'w, 'a>>,
    key: impl Fn(DeviceRef) -> Option<K>,
) -> bool {
    let mut keys: Vec<K> = Vec::new();
    let needs = wanted.map(|wanted| {
        let mut among = Vec::new();
        for key in wanted.devices.iter().filter_map(|device| key(*device)) {
            let known = keys.iter().position(|known| *known == key);
            let position = known.unwrap_or_else(|| {
                keys.push(key);
                keys.len() - 1
            });
            if !among.contains(&position) {
                among.push(position);
            }
        }
        Need {
            count: wanted.count,
            among,
        }
    });
    let needs: Vec<Need> = needs.collect();
    let capacities = vec![1; keys.len()];
    can_meet_all(&needs, &capacities)
}
