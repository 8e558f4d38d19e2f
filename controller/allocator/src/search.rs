//! The search on one node: devices for all claims of a pod, all or nothing.
//!
//! Depth first with backtracking over claims, requests and devices in the order of the claims; candidates are tried
//! in the order of the placement policy, so the first solution is the preferred one. What was nearest to a solution
//! is kept for the explanation. The search is bounded: a claim cannot make it run for ever.

use std::collections::BTreeSet;
use std::sync::Arc;

use drava_api::config::PlacementPolicy;
use drava_api::{Quantity, names};

use crate::claim::{Alternative, ClaimSpec, ConstraintRule, Count, MAX_RESULTS};
use crate::device::{Attribute, Device};
use crate::pool::Pool;
use crate::reason::Rejection;
use crate::selector::{Selector, Selectors};
use crate::usage::{Grant, Usage};

/// Candidate devices looked at before the search gives up on a node.
const STEP_LIMIT: u32 = 2_000;

/// One pool of the node with what is in use of it.
#[derive(Debug, Clone, Copy)]
pub struct PoolView<'a> {
    /// Name of the pool.
    pub name: &'a str,
    /// Its devices.
    pub pool: &'a Pool,
    /// What is in use.
    pub usage: &'a Usage,
}

/// What a pod asks for.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// Claims to allocate.
    pub claims: &'a [ClaimSpec],
    /// Containers that see several devices.
    pub containers: &'a [ContainerDevices],
    /// Policy between cards; a claim's own goes first.
    pub gpu_policy: PlacementPolicy,
}

/// What one container sees of the claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerDevices {
    /// Name of the container.
    pub name: String,
    /// Positions in [`Ask::claims`] with the main request name that it sees; all requests when `None`.
    pub sees: Vec<(usize, Option<String>)>,
    /// Cards that it has already, from claims allocated before.
    pub cards: BTreeSet<Arc<str>>,
}

/// A device chosen for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Position of the claim in [`Ask::claims`].
    pub claim: usize,
    /// Position of the request in the claim.
    pub request: usize,
    /// Position of the alternative in the request.
    pub alternative: usize,
    /// Name of the pool.
    pub pool: String,
    /// The device.
    pub device: DeviceRef,
    /// How it is taken.
    pub grant: Grant,
    /// Memory of its card in use before, in millionths.
    pub card_fullness: u32,
}

/// Position of a device among the pools of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceRef {
    /// Position of the pool.
    pub pool: usize,
    /// Position in the pool.
    pub index: usize,
}

/// What the search found on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Devices for every request.
    Found(Vec<Chosen>),
    /// None, with the misses of the request that got farthest.
    NotFound(Misses),
    /// Gave up.
    LimitReached,
}

/// Why the candidates of one request were rejected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Misses {
    /// Position of the claim.
    pub claim: usize,
    /// Result name of the request.
    pub request: String,
    /// Devices that the request asks for.
    pub needed: usize,
    /// Devices that were found for it, at most.
    pub found: usize,
    /// Every device that was looked at.
    pub devices: Vec<(DeviceRef, Rejection)>,
}

/// A selector that gave no answer; fails the pod, as in kube-scheduler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{owner}: selector #{index}{device}: {source}")]
pub struct SelectionError {
    /// `class c` or `claim ns/name`.
    pub owner: String,
    /// Position of the selector.
    pub index: usize,
    /// ` on device …`, empty for one that does not compile.
    pub device: String,
    /// What went wrong.
    pub source: crate::selector::SelectorError,
}

/// Searches the pools of one node.
///
/// # Errors
/// When a selector cannot be evaluated.
pub fn search(
    ask: &Ask<'_>,
    pools: &[PoolView<'_>],
    selectors: &Selectors,
) -> Result<Outcome, SelectionError> {
    let mut search = Search::new(ask, pools, selectors)?;
    let found = search.request(0);
    Ok(match found {
        true => Outcome::Found(search.chosen),
        false if search.steps >= STEP_LIMIT => Outcome::LimitReached,
        false => Outcome::NotFound(
            search
                .misses
                .map_or_else(Misses::default, |(_, misses)| misses),
        ),
    })
}

/// One request of one claim.
struct Slot<'a> {
    claim: usize,
    request: usize,
    alternatives: Vec<Prepared<'a>>,
}

/// An alternative with the devices that its selectors select.
struct Prepared<'a> {
    alternative: &'a Alternative,
    candidates: Vec<DeviceRef>,
    unselected: Vec<(DeviceRef, Rejection)>,
}

struct Search<'a> {
    ask: &'a Ask<'a>,
    pools: &'a [PoolView<'a>],
    usage: Vec<Usage>,
    slots: Vec<Slot<'a>>,
    containers: Vec<Vec<Arc<str>>>,
    chosen: Vec<Chosen>,
    /// Depth reached and the misses there.
    misses: Option<(usize, Misses)>,
    steps: u32,
}

impl<'a> Search<'a> {
    fn new(
        ask: &'a Ask<'a>,
        pools: &'a [PoolView<'a>],
        selectors: &Selectors,
    ) -> Result<Self, SelectionError> {
        let mut slots = Vec::new();
        for (claim, spec) in ask.claims.iter().enumerate() {
            for (request, parsed) in spec.requests.iter().enumerate() {
                let alternatives = parsed
                    .alternatives
                    .iter()
                    .map(|alternative| Prepared::new(spec, alternative, pools, selectors))
                    .collect::<Result<_, _>>()?;
                slots.push(Slot {
                    claim,
                    request,
                    alternatives,
                });
            }
        }
        Ok(Self {
            ask,
            pools,
            usage: pools.iter().map(|view| view.usage.clone()).collect(),
            slots,
            containers: ask
                .containers
                .iter()
                .map(|container| container.cards.iter().cloned().collect())
                .collect(),
            chosen: Vec::new(),
            misses: None,
            steps: 0,
        })
    }

    /// Serves the requests from `slot` on.
    fn request(&mut self, slot: usize) -> bool {
        let Some(current) = self.slots.get(slot) else {
            return true;
        };
        (0..current.alternatives.len()).any(|alternative| self.alternative(slot, alternative))
    }

    fn alternative(&mut self, slot: usize, alternative: usize) -> bool {
        let Some(prepared) = self.prepared(slot, alternative) else {
            return false;
        };
        let mut order = self.preferred_order(slot, &prepared.candidates);
        let needed = match prepared.alternative.count {
            Count::Exactly(count) => count,
            Count::All => {
                // Devices that could never serve the request are not meant; those that could, but are in use, are.
                order.retain(|candidate| {
                    !self
                        .check(slot, alternative, *candidate)
                        .is_err_and(|rejection| rejection.is_permanent())
                });
                order.len().max(1)
            }
        };
        let claim = self.slots.get(slot).map_or(0, |slot| slot.claim);
        let held = self
            .chosen
            .iter()
            .filter(|chosen| chosen.claim == claim)
            .count();
        if held + needed > MAX_RESULTS {
            return false;
        }
        // Without this, fewer usable devices than needed would be combined in every way before giving up.
        let usable = order
            .iter()
            .filter(|candidate| self.check(slot, alternative, **candidate).is_ok())
            .count();
        if usable < needed {
            self.note_misses(slot, alternative, &order, needed);
            return false;
        }
        self.pick(slot, alternative, &order, needed)
    }

    /// Takes `needed` more devices out of `order`.
    fn pick(
        &mut self,
        slot: usize,
        alternative: usize,
        order: &[DeviceRef],
        needed: usize,
    ) -> bool {
        if needed == 0 {
            return self.request(slot + 1);
        }
        for (position, candidate) in order.iter().enumerate() {
            let rest = order.get(position + 1..).unwrap_or_default();
            if rest.len() + 1 < needed || self.steps >= STEP_LIMIT {
                break;
            }
            self.steps += 1;
            if let Ok(grant) = self.check(slot, alternative, *candidate) {
                self.take(slot, alternative, *candidate, grant);
                if self.pick(slot, alternative, rest, needed - 1) {
                    return true;
                }
                self.put_back();
            }
        }
        self.note_misses(slot, alternative, order, needed);
        false
    }

    /// Whether the candidate can be taken now.
    fn check(
        &self,
        slot: usize,
        alternative: usize,
        candidate: DeviceRef,
    ) -> Result<Grant, Rejection> {
        let (Some(prepared), Some(place)) =
            (self.prepared(slot, alternative), self.slots.get(slot))
        else {
            return Err(Rejection::Vanished);
        };
        let (Some(view), Some(usage)) = (
            self.pools.get(candidate.pool),
            self.usage.get(candidate.pool),
        ) else {
            return Err(Rejection::Vanished);
        };
        let grant = usage.offer(view.pool, candidate.index, prepared.alternative)?;
        let device = self.device(candidate).ok_or(Rejection::Vanished)?;
        if matches!(grant, Grant::Admin(_))
            && self
                .chosen
                .iter()
                .any(|chosen| chosen.claim == place.claim && chosen.device == candidate)
        {
            return Err(Rejection::Chosen);
        }
        self.check_constraints(place.claim, &prepared.alternative.name, device)?;
        self.check_containers(place, device)?;
        Ok(grant)
    }

    fn check_constraints(
        &self,
        claim: usize,
        request: &str,
        device: &Device,
    ) -> Result<(), Rejection> {
        let constraints = self
            .ask
            .claims
            .get(claim)
            .map_or(&[][..], |spec| &spec.constraints);
        for constraint in constraints
            .iter()
            .filter(|constraint| constraint.covers(request))
        {
            let violated = || Rejection::Constraint {
                attribute: constraint.attribute.clone(),
            };
            let value = device
                .attribute(&constraint.attribute)
                .ok_or_else(violated)?;
            let holds = self
                .chosen
                .iter()
                .filter(|chosen| {
                    chosen.claim == claim && constraint.covers(self.request_name(chosen))
                })
                .filter_map(|chosen| self.device(chosen.device)?.attribute(&constraint.attribute))
                .all(|other| related(constraint.rule, other, value));
            if !holds {
                return Err(violated());
            }
        }
        Ok(())
    }

    /// A container gets several devices only from different cards: CUDA uses one partition a process, and NCCL
    /// refuses duplicates.
    fn check_containers(&self, place: &Slot<'_>, device: &Device) -> Result<(), Rejection> {
        for (container, cards) in self.ask.containers.iter().zip(&self.containers) {
            if self.sees(container, place) && cards.contains(&device.card) {
                return Err(Rejection::SameCard {
                    container: container.name.clone(),
                });
            }
        }
        Ok(())
    }

    fn sees(&self, container: &ContainerDevices, place: &Slot<'_>) -> bool {
        let name = self
            .ask
            .claims
            .get(place.claim)
            .and_then(|spec| spec.requests.get(place.request))
            .map(|request| request.name.as_str());
        container.sees.iter().any(|(claim, request)| {
            *claim == place.claim && (request.is_none() || request.as_deref() == name)
        })
    }

    fn take(&mut self, slot: usize, alternative: usize, candidate: DeviceRef, grant: Grant) {
        let Some(place) = self.slots.get(slot) else {
            return;
        };
        let (claim, request) = (place.claim, place.request);
        let Some(view) = self.pools.get(candidate.pool) else {
            return;
        };
        let card = self
            .device(candidate)
            .map(|device| Arc::clone(&device.card));
        let seeing: Vec<bool> = self
            .ask
            .containers
            .iter()
            .map(|container| self.sees(container, place))
            .collect();
        if let Some(card) = card {
            for (cards, _) in self
                .containers
                .iter_mut()
                .zip(&seeing)
                .filter(|(_, sees)| **sees)
            {
                cards.push(Arc::clone(&card));
            }
        }
        let card_fullness = self.fullness(candidate);
        if let Some(usage) = self.usage.get_mut(candidate.pool) {
            usage.take(view.pool, candidate.index, &grant);
        }
        self.chosen.push(Chosen {
            claim,
            request,
            alternative,
            pool: view.name.to_owned(),
            device: candidate,
            grant,
            card_fullness,
        });
    }

    fn put_back(&mut self) {
        let Some(chosen) = self.chosen.pop() else {
            return;
        };
        if let (Some(view), Some(usage)) = (
            self.pools.get(chosen.device.pool),
            self.usage.get_mut(chosen.device.pool),
        ) {
            usage.put_back(view.pool, chosen.device.index, &chosen.grant);
        }
        let seeing: Vec<bool> = self
            .slots
            .iter()
            .find(|slot| slot.claim == chosen.claim && slot.request == chosen.request)
            .map(|place| {
                self.ask
                    .containers
                    .iter()
                    .map(|container| self.sees(container, place))
                    .collect()
            })
            .unwrap_or_default();
        for (cards, _) in self
            .containers
            .iter_mut()
            .zip(&seeing)
            .filter(|(_, sees)| **sees)
        {
            cards.pop();
        }
    }

    /// Candidates, best first by the policy between cards; published order among equals.
    fn preferred_order(&self, slot: usize, candidates: &[DeviceRef]) -> Vec<DeviceRef> {
        let policy = self
            .slots
            .get(slot)
            .and_then(|slot| self.ask.claims.get(slot.claim)?.placement.gpu)
            .unwrap_or(self.ask.gpu_policy);
        let mut order: Vec<_> = candidates
            .iter()
            .map(|candidate| (self.fullness(*candidate), *candidate))
            .collect();
        order.sort_by_key(|(fullness, candidate)| match policy {
            PlacementPolicy::Binpack => (u32::MAX - fullness, *candidate),
            PlacementPolicy::Spread => (*fullness, *candidate),
        });
        order.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// Share of the card's memory in use, in millionths.
    fn fullness(&self, candidate: DeviceRef) -> u32 {
        let (Some(view), Some(usage), Some(device)) = (
            self.pools.get(candidate.pool),
            self.usage.get(candidate.pool),
            self.device(candidate),
        ) else {
            return 0;
        };
        let memory = usage.card_memory(view.pool, &device.card);
        millionths(memory.used, memory.total)
    }

    /// Keeps the misses of the request that got farthest; of equals the first, which is what policy preferred.
    fn note_misses(&mut self, slot: usize, alternative: usize, order: &[DeviceRef], needed: usize) {
        let depth = self.chosen.len();
        if self
            .misses
            .as_ref()
            .is_some_and(|(reached, _)| *reached >= depth)
        {
            return;
        }
        let Some(prepared) = self.prepared(slot, alternative) else {
            return;
        };
        let rejected: Vec<_> = order
            .iter()
            .filter_map(|candidate| {
                Some((*candidate, self.check(slot, alternative, *candidate).err()?))
            })
            .collect();
        let total = match prepared.alternative.count {
            Count::Exactly(count) => count,
            Count::All => needed,
        };
        let misses = Misses {
            claim: self.slots.get(slot).map_or(0, |slot| slot.claim),
            request: prepared.alternative.name.clone(),
            needed: total,
            found: total.saturating_sub(needed) + (order.len() - rejected.len()),
            devices: rejected
                .into_iter()
                .chain(prepared.unselected.iter().cloned())
                .collect(),
        };
        self.misses = Some((depth, misses));
    }

    fn prepared(&self, slot: usize, alternative: usize) -> Option<&Prepared<'a>> {
        self.slots.get(slot)?.alternatives.get(alternative)
    }

    fn device(&self, candidate: DeviceRef) -> Option<&'a Device> {
        self.pools
            .get(candidate.pool)?
            .pool
            .devices
            .get(candidate.index)
            .map(Arc::as_ref)
    }

    fn request_name(&self, chosen: &Chosen) -> &'a str {
        self.ask
            .claims
            .get(chosen.claim)
            .and_then(|spec| {
                spec.requests
                    .get(chosen.request)?
                    .alternatives
                    .get(chosen.alternative)
            })
            .map_or("", |alternative| alternative.name.as_str())
    }
}

impl<'a> Prepared<'a> {
    fn new(
        spec: &ClaimSpec,
        alternative: &'a Alternative,
        pools: &[PoolView<'_>],
        selectors: &Selectors,
    ) -> Result<Self, SelectionError> {
        let mut prepared = Self {
            alternative,
            candidates: Vec::new(),
            unselected: Vec::new(),
        };
        for (pool, view) in pools.iter().enumerate() {
            for (index, device) in view.pool.devices.iter().enumerate() {
                let candidate = DeviceRef { pool, index };
                match select(spec, alternative, view.name, device, selectors)? {
                    None => prepared.candidates.push(candidate),
                    Some(rejection) => prepared.unselected.push((candidate, rejection)),
                }
            }
        }
        Ok(prepared)
    }
}

/// Why the device is no candidate whatever is in use, if it is none.
fn select(
    spec: &ClaimSpec,
    alternative: &Alternative,
    pool: &str,
    device: &Device,
    selectors: &Selectors,
) -> Result<Option<Rejection>, SelectionError> {
    let all_match =
        |list: &[Arc<Selector>], owner: &dyn Fn() -> String| -> Result<bool, SelectionError> {
            for (index, selector) in list.iter().enumerate() {
                let matched =
                    device
                        .selected_by(selectors, selector)
                        .map_err(|source| SelectionError {
                            owner: owner(),
                            index,
                            device: match source {
                                crate::selector::SelectorError::Compile(_) => String::new(),
                                crate::selector::SelectorError::Runtime(_) => {
                                    format!(" on device {}/{pool}/{}", names::DRIVER, device.name)
                                }
                            },
                            source,
                        })?;
                if !matched {
                    return Ok(false);
                }
            }
            Ok(true)
        };
    if !all_match(&alternative.class_selectors, &|| {
        format!("class {}", alternative.class)
    })? {
        return Ok(Some(Rejection::ClassMismatch));
    }
    if !all_match(&alternative.selectors, &|| format!("claim {}", spec.id))? {
        return Ok(Some(Rejection::SelectorMismatch));
    }
    let taint = device
        .taints
        .iter()
        .find(|taint| !taint.tolerated_by(&alternative.tolerations));
    Ok(taint.cloned().map(Rejection::Tainted))
}

/// Whether two attribute values satisfy a constraint. Lists match when they have a value in common.
fn related(rule: ConstraintRule, a: &Attribute, b: &Attribute) -> bool {
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

/// `used / total` in millionths; an unknown total counts as empty.
#[must_use]
pub fn millionths(used: Quantity, total: Quantity) -> u32 {
    if total <= Quantity::ZERO {
        return 0;
    }
    let ratio = used.nano().max(0).saturating_mul(1_000_000) / total.nano();
    u32::try_from(ratio).unwrap_or(u32::MAX).min(1_000_000)
}
