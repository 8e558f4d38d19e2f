//! Checks a placement against the rules of KEP-4381 (selection), KEP-4816 (alternatives), KEP-4815 (counters), KEP-5055
//! (taints), KEP-5075 (capacity) and KEP-5018 (admin access). Independent of the allocator: it reads the API objects of
//! the case, and takes the results of CEL selectors from the Go program.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::placement::Placement;
use drava_allocator::usage::DeviceAccess;
use drava_api::{Quantity, names};
use k8s_openapi::api::resource::v1 as dra;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;

use crate::case::Case;

mod capacity;
mod pool;
pub(crate) mod request;

use pool::{Pools, Published};
use request::Alternative;

/// Most results of one claim (limit of the API).
const MAX_RESULTS: usize = 32;

/// Devices by CEL expression, as `slice/device`.
pub type Selected = BTreeMap<String, BTreeSet<String>>;

/// A device of the placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Position of the claim.
    pub claim: usize,
    /// Result name of the request.
    pub request: String,
    /// Name of the pool.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Consumed amounts of a share.
    pub amounts: Option<BTreeMap<String, Quantity>>,
    /// Admin access.
    pub is_admin: bool,
}

/// Returns the devices of a placement.
#[must_use]
pub fn placed(placement: &Placement) -> Vec<Placed> {
    let mut list = vec![];
    for (claim, devices) in placement.claims.iter().enumerate() {
        for device in &devices.devices {
            let (amounts, is_admin) = match &device.access {
                DeviceAccess::Exclusive => (None, false),
                DeviceAccess::Share(amounts, _) | DeviceAccess::Suspended(amounts) => {
                    (Some(amounts), false)
                }
                DeviceAccess::Admin(amounts) => (amounts.as_ref(), true),
            };
            let amounts = amounts.map(|amounts| {
                let amounts = amounts.iter();
                amounts
                    .map(|(name, amount)| (name.clone(), *amount))
                    .collect()
            });
            list.push(Placed {
                claim,
                request: device.request.clone(),
                pool: device.pool.clone(),
                device: device.device.name.to_string(),
                amounts,
                is_admin,
            });
        }
    }
    list
}

/// Returns the rules that the placement violates on the node.
#[must_use]
pub fn violations(case: &Case, selected: &Selected, node: &str, placed: &[Placed]) -> Vec<String> {
    let mut check = Check {
        case,
        selected,
        pools: Pools::of(case, node),
        placed,
        found: vec![],
    };
    for claim in 0..case.claims.len() {
        check.requests(claim);
        check.constraints(claim);
    }
    check.usage();
    check.counters();
    check.found
}

struct Check<'a> {
    case: &'a Case,
    selected: &'a Selected,
    pools: Pools<'a>,
    placed: &'a [Placed],
    found: Vec<String>,
}

impl<'a> Check<'a> {
    fn violated(&mut self, rule: String) {
        self.found.push(rule);
    }

    fn of_claim(&self, claim: usize) -> Vec<&'a Placed> {
        self.placed
            .iter()
            .filter(|placed| placed.claim == claim)
            .collect()
    }

    /// Each request has the devices of exactly one alternative.
    fn requests(&mut self, claim: usize) {
        let results = self.of_claim(claim);
        if results.len() > MAX_RESULTS {
            self.violated(format!("claim {claim} has {} results", results.len()));
        }
        let mut served = 0;
        for alternatives in request::of_claim(&self.case.claims[claim]) {
            let chosen: Vec<&Alternative<'_>> = alternatives
                .iter()
                .filter(|one| results.iter().any(|placed| placed.request == one.name))
                .collect();
            let [alternative] = chosen[..] else {
                self.violated(format!(
                    "claim {claim}: {} alternatives of one request are allocated",
                    chosen.len()
                ));
                continue;
            };
            let devices: Vec<&Placed> = results
                .iter()
                .copied()
                .filter(|placed| placed.request == alternative.name)
                .collect();
            served += devices.len();
            self.request(alternative, &devices);
        }
        if served != results.len() {
            self.violated(format!("claim {claim}: results of unknown requests"));
        }
    }

    fn request(&mut self, alternative: &Alternative<'_>, devices: &[&Placed]) {
        let name = &alternative.name;
        let distinct: BTreeSet<_> = devices
            .iter()
            .map(|placed| (&placed.pool, &placed.device))
            .collect();
        if distinct.len() != devices.len() {
            self.violated(format!("request {name}: a device is allocated twice"));
        }
        for placed in devices {
            let Some(published) = self.pools.device(&placed.pool, &placed.device) else {
                self.violated(format!(
                    "request {name}: {} is not published",
                    placed.device
                ));
                continue;
            };
            if !self.is_selected(alternative, &published) {
                self.violated(format!("request {name}: {} is not selected", placed.device));
            }
            if !is_tolerated(published.device, alternative.tolerations) {
                self.violated(format!("request {name}: {} is tainted", placed.device));
            }
            if placed.is_admin != alternative.is_admin {
                self.violated(format!("request {name}: wrong admin access"));
            }
            self.amounts(alternative, placed, published.device);
        }
        match alternative.count {
            Some(count) if count != devices.len() => self.violated(format!(
                "request {name}: {} devices instead of {count}",
                devices.len()
            )),
            Some(_) => {}
            None => self.all(alternative, &distinct),
        }
    }

    /// `All` has every device that selectors and published capacity admit.
    fn all(&mut self, alternative: &Alternative<'_>, devices: &BTreeSet<(&String, &String)>) {
        let name = &alternative.name;
        if self.pools.has_excluded() {
            self.violated(format!("request {name}: all devices of an unusable pool"));
        }
        let missing: Vec<String> = self
            .pools
            .devices()
            .filter(|published| {
                self.is_selected(alternative, published)
                    && capacity::amounts(published.device, alternative.capacity).is_some()
                    && !devices.iter().any(|(pool, device)| {
                        *pool == published.pool && **device == published.device.name
                    })
            })
            .map(|published| published.device.name.clone())
            .collect();
        if !missing.is_empty() {
            self.violated(format!("request {name}: all devices without {missing:?}"));
        }
    }

    fn is_selected(&self, alternative: &Alternative<'_>, published: &Published<'_>) -> bool {
        let key = format!("{}/{}", published.slice, published.device.name);
        let class = self
            .case
            .classes
            .iter()
            .find(|class| class.metadata.name.as_deref() == Some(alternative.class));
        let of_class = class
            .and_then(|class| class.spec.as_ref()?.selectors.as_deref())
            .unwrap_or_default();
        class.is_some()
            && of_class
                .iter()
                .chain(alternative.selectors)
                .filter_map(|selector| selector.cel.as_ref())
                .all(|cel| {
                    self.selected
                        .get(&cel.expression)
                        .is_some_and(|devices| devices.contains(&key))
                })
    }

    /// A share consumes what the request policies say, of every capacity.
    fn amounts(&mut self, alternative: &Alternative<'_>, placed: &Placed, device: &dra::Device) {
        let name = &alternative.name;
        let Some(amounts) = capacity::amounts(device, alternative.capacity) else {
            self.violated(format!("request {name}: {} is too small", placed.device));
            return;
        };
        let is_shared = device.allow_multiple_allocations.unwrap_or_default();
        let expected = is_shared.then_some(amounts);
        if placed.amounts != expected {
            self.violated(format!(
                "request {name}: {} consumes {:?} instead of {expected:?}",
                placed.device, placed.amounts
            ));
        }
    }

    fn constraints(&mut self, claim: usize) {
        let constraints = self.case.claims[claim]
            .spec
            .as_ref()
            .and_then(|spec| spec.devices.as_ref()?.constraints.as_deref())
            .unwrap_or_default();
        for constraint in constraints {
            let (attribute, must_match) =
                match (&constraint.match_attribute, &constraint.distinct_attribute) {
                    (Some(attribute), _) => (attribute, true),
                    (None, Some(attribute)) => (attribute, false),
                    (None, None) => continue,
                };
            let in_scope = constraint.requests.as_deref().unwrap_or_default();
            let values: Vec<Option<&dra::DeviceAttribute>> = self
                .of_claim(claim)
                .iter()
                .filter(|placed| {
                    let main = placed.request.split('/').next().unwrap_or_default();
                    in_scope.is_empty()
                        || in_scope
                            .iter()
                            .any(|name| *name == placed.request || name == main)
                })
                .map(|placed| {
                    let published = self.pools.device(&placed.pool, &placed.device)?;
                    attribute_of(published.device, attribute)
                })
                .collect();
            let holds = values.iter().enumerate().all(|(index, value)| {
                value.is_some()
                    && values
                        .iter()
                        .take(index)
                        .all(|other| (other == value) == must_match)
            });
            if !holds {
                self.violated(format!("constraint on {attribute} is violated"));
            }
        }
    }

    /// No device is over-allocated, with the devices of other claims.
    fn usage(&mut self) {
        let held = held(self.case);
        let mut messages = vec![];
        for published in self.pools.devices() {
            let name = &published.device.name;
            let is_this = |pool: &str, device: &str| published.pool == pool && name == device;
            let ours: Vec<&Placed> = self
                .placed
                .iter()
                .filter(|placed| !placed.is_admin && is_this(&placed.pool, &placed.device))
                .collect();
            if ours.is_empty() {
                continue;
            }
            let others: Vec<_> = held
                .iter()
                .filter(|result| is_this(&result.pool, &result.device))
                .collect();
            let is_exclusive = others.iter().any(|result| result.share_id.is_none())
                || ours.iter().any(|placed| placed.amounts.is_none());
            if is_exclusive && ours.len() + others.len() > 1 {
                messages.push(format!("{name} is allocated exclusively and again"));
            }
            for (capacity, published) in published.device.capacity.iter().flatten() {
                let of_others = others.iter().filter_map(|result| {
                    quantity(result.consumed_capacity.as_ref()?.get(capacity)?)
                });
                let of_ours = ours
                    .iter()
                    .filter_map(|placed| placed.amounts.as_ref()?.get(capacity).copied());
                let sum = of_others
                    .chain(of_ours)
                    .fold(0, |sum, one| sum + one.nano());
                if quantity(&published.value).is_none_or(|total| sum > total.nano()) {
                    messages.push(format!("{name}: too much {capacity} is consumed"));
                }
            }
        }
        for claim in 0..self.case.claims.len() {
            let admin: Vec<_> = self
                .of_claim(claim)
                .into_iter()
                .filter(|placed| placed.is_admin)
                .map(|placed| (&placed.pool, &placed.device))
                .collect();
            if admin.iter().collect::<BTreeSet<_>>().len() != admin.len() {
                messages.push("a claim has admin access to one device twice".to_owned());
            }
        }
        self.found.extend(messages);
    }

    /// No counter is exceeded; a device counts once, whatever the number of its shares.
    fn counters(&mut self) {
        let held = held(self.case);
        let mut messages = vec![];
        for (pool, sets) in self.pools.counter_sets() {
            let allocated: BTreeSet<&str> = held
                .iter()
                .filter(|result| result.pool == pool)
                .map(|result| result.device.as_str())
                .chain(
                    self.placed
                        .iter()
                        .filter(|placed| !placed.is_admin && placed.pool == pool)
                        .map(|placed| placed.device.as_str()),
                )
                .collect();
            for set in sets {
                for (counter, available) in &set.counters {
                    let used: i128 = allocated
                        .iter()
                        .filter_map(|device| self.pools.device(pool, device))
                        .flat_map(|published| published.device.consumes_counters.iter().flatten())
                        .filter(|consumption| consumption.counter_set == set.name)
                        .filter_map(|consumption| {
                            quantity(&consumption.counters.get(counter)?.value)
                        })
                        .map(Quantity::nano)
                        .sum();
                    if quantity(&available.value).is_none_or(|total| used > total.nano()) {
                        messages.push(format!(
                            "{pool}: counter {}/{counter} is exceeded",
                            set.name
                        ));
                    }
                }
            }
        }
        self.found.extend(messages);
    }
}

/// Returns the devices of other claims, without admin access.
fn held(case: &Case) -> Vec<&dra::DeviceRequestAllocationResult> {
    case.allocated
        .iter()
        .filter_map(|claim| {
            claim
                .status
                .as_ref()?
                .allocation
                .as_ref()?
                .devices
                .as_ref()?
                .results
                .as_ref()
        })
        .flatten()
        .filter(|result| !result.admin_access.unwrap_or_default())
        .collect()
}

fn attribute_of<'a>(device: &'a dra::Device, qualified: &str) -> Option<&'a dra::DeviceAttribute> {
    let attributes = device.attributes.as_ref()?;
    let unqualified = qualified
        .strip_prefix(names::DRIVER)
        .and_then(|rest| rest.strip_prefix('/'));
    attributes
        .get(qualified)
        .or_else(|| attributes.get(unqualified?))
}

fn is_tolerated(device: &dra::Device, tolerations: &[dra::DeviceToleration]) -> bool {
    let blocks = |taint: &&dra::DeviceTaint| {
        ["NoSchedule", "NoExecute"].contains(&taint.effect.as_str())
            && taint.key != names::MANAGED_TAINT
    };
    device.taints.iter().flatten().filter(blocks).all(|taint| {
        tolerations.iter().any(|toleration| {
            let is_any_value = toleration.operator.as_deref() == Some("Exists");
            let effect = toleration.effect.as_deref().unwrap_or_default();
            let key = toleration.key.as_deref().unwrap_or_default();
            (effect.is_empty() || effect == taint.effect)
                && (key == taint.key || key.is_empty() && is_any_value)
                && (is_any_value
                    || toleration.value.as_deref().unwrap_or_default()
                        == taint.value.as_deref().unwrap_or_default())
        })
    })
}

fn quantity(raw: &RawQuantity) -> Option<Quantity> {
    Quantity::try_from(raw).ok()
}
