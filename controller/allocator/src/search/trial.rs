//! A trial allocation: devices taken one by one and put back, and whether one more can be taken.

use std::sync::Arc;

use drava_api::Quantity;
use drava_api::config::PlacementPolicy;

use super::question::{Ask, ContainerDevices, DeviceRef, PoolView};
use crate::attribute::Attribute;
use crate::claim::{Alternative, ConstraintRule};
use crate::device::Device;
use crate::reason::Rejection;
use crate::usage::{Grant, Usage};

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

/// Where in the question a device is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Position of the claim in [`Ask::claims`].
    pub(super) claim: usize,
    /// Position of the request in the claim.
    pub(super) request: usize,
    /// Position of the alternative in the request.
    pub(super) alternative: usize,
}

/// See the [module](self). What is put back leaves no trace.
pub(super) struct Trial<'a> {
    ask: &'a Ask<'a>,
    pools: &'a [PoolView<'a>],
    /// By position of the pool.
    usage: Vec<Usage>,
    /// Cards that each container sees, by its position in the question; one entry for each device.
    cards: Vec<Vec<Arc<str>>>,
    chosen: Vec<Chosen>,
}

impl<'a> Trial<'a> {
    pub(super) fn new(ask: &'a Ask<'a>, pools: &'a [PoolView<'a>]) -> Self {
        Self {
            ask,
            pools,
            usage: pools.iter().map(|view| view.usage.clone()).collect(),
            cards: ask
                .containers
                .iter()
                .map(|container| container.cards.iter().cloned().collect())
                .collect(),
            chosen: Vec::new(),
        }
    }

    /// Devices taken, in the order in which they were.
    pub(super) fn chosen(&self) -> &[Chosen] {
        &self.chosen
    }

    pub(super) fn into_chosen(self) -> Vec<Chosen> {
        self.chosen
    }

    /// Whether the candidate can be taken now, and as what.
    pub(super) fn check(
        &self,
        place: Place,
        alternative: &Alternative,
        candidate: DeviceRef,
    ) -> Result<Grant, Rejection> {
        let (Some(view), Some(usage), Some(device)) = (
            self.pools.get(candidate.pool),
            self.usage.get(candidate.pool),
            self.device(candidate),
        ) else {
            return Err(Rejection::Vanished);
        };
        let grant = usage.offer(view.pool, candidate.index, alternative)?;
        if matches!(grant, Grant::Admin(_))
            && self
                .chosen
                .iter()
                .any(|chosen| chosen.claim == place.claim && chosen.device == candidate)
        {
            return Err(Rejection::Chosen);
        }
        self.check_constraints(place.claim, &alternative.name, device)?;
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
    fn check_containers(&self, place: Place, device: &Device) -> Result<(), Rejection> {
        for (container, cards) in self.ask.containers.iter().zip(&self.cards) {
            if self.sees(container, place.claim, place.request) && cards.contains(&device.card) {
                return Err(Rejection::SameCard {
                    container: container.name.clone(),
                });
            }
        }
        Ok(())
    }

    /// Whether the container sees the devices of the request.
    fn sees(&self, container: &ContainerDevices, claim: usize, request: usize) -> bool {
        let name = self
            .ask
            .claims
            .get(claim)
            .and_then(|spec| spec.requests.get(request))
            .map(|request| request.name.as_str());
        container
            .sees
            .iter()
            .any(|(seen, only)| *seen == claim && (only.is_none() || only.as_deref() == name))
    }

    /// Takes what [`Self::check`] has granted.
    pub(super) fn take(&mut self, place: Place, candidate: DeviceRef, grant: Grant) {
        let Some(view) = self.pools.get(candidate.pool) else {
            return;
        };
        let card_fullness = self.card_fullness(candidate);
        if let Some(device) = self.device(candidate) {
            let card = Arc::clone(&device.card);
            self.for_cards_seen(place.claim, place.request, |cards| {
                cards.push(Arc::clone(&card));
            });
        }
        if let Some(usage) = self.usage.get_mut(candidate.pool) {
            usage.take(view.pool, candidate.index, &grant);
        }
        self.chosen.push(Chosen {
            claim: place.claim,
            request: place.request,
            alternative: place.alternative,
            pool: view.name.to_owned(),
            device: candidate,
            grant,
            card_fullness,
        });
    }

    /// Puts back what was taken last.
    pub(super) fn put_back(&mut self) {
        let Some(chosen) = self.chosen.pop() else {
            return;
        };
        if let (Some(view), Some(usage)) = (
            self.pools.get(chosen.device.pool),
            self.usage.get_mut(chosen.device.pool),
        ) {
            usage.put_back(view.pool, chosen.device.index, &chosen.grant);
        }
        self.for_cards_seen(chosen.claim, chosen.request, |cards| {
            cards.pop();
        });
    }

    /// Changes the list of cards of each container that sees the request's devices.
    fn for_cards_seen(
        &mut self,
        claim: usize,
        request: usize,
        mut change: impl FnMut(&mut Vec<Arc<str>>),
    ) {
        for (position, container) in self.ask.containers.iter().enumerate() {
            if self.sees(container, claim, request)
                && let Some(cards) = self.cards.get_mut(position)
            {
                change(cards);
            }
        }
    }

    /// Candidates, best first by the policy between cards; published order among equals.
    pub(super) fn preferred_order(&self, claim: usize, candidates: &[DeviceRef]) -> Vec<DeviceRef> {
        let policy = self
            .ask
            .claims
            .get(claim)
            .and_then(|spec| spec.placement.gpu)
            .unwrap_or(self.ask.gpu_policy);
        let mut order: Vec<_> = candidates
            .iter()
            .map(|candidate| (self.card_fullness(*candidate), *candidate))
            .collect();
        order.sort_by_key(|(fullness, candidate)| match policy {
            PlacementPolicy::Binpack => (u32::MAX - fullness, *candidate),
            PlacementPolicy::Spread => (*fullness, *candidate),
        });
        order.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// Share of the card's memory in use, in millionths.
    fn card_fullness(&self, candidate: DeviceRef) -> u32 {
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
