//! The search on one node: devices for all claims of a pod, all or nothing.
//!
//! Depth first with backtracking over claims, requests and devices in the order of the claims; candidates are tried
//! in the order of the placement policy, so the first solution is the preferred one. What was nearest to a solution
//! is kept for the explanation. The search is bounded: a claim cannot make it run for ever.

use crate::claim::{Count, MAX_RESULTS};
use crate::reason::Rejection;
use crate::selector::Selectors;

pub mod candidates;
pub mod question;
pub mod trial;

use candidates::{Prepared, SelectionError};
use question::{Ask, DeviceRef, PoolView};
use trial::{Chosen, Place, Trial};

/// Candidate devices looked at before the search gives up on a node.
const STEP_LIMIT: u32 = 2_000;

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
        true => Outcome::Found(search.trial.into_chosen()),
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
    /// In the order of preference.
    alternatives: Vec<Prepared<'a>>,
}

struct Search<'a> {
    slots: Vec<Slot<'a>>,
    trial: Trial<'a>,
    /// Number of devices taken when they were noted, and the misses.
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
            slots,
            trial: Trial::new(ask, pools),
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
        let Some((place, prepared)) = self.at(slot, alternative) else {
            return false;
        };
        let mut order = self
            .trial
            .preferred_order(place.claim, &prepared.candidates);
        let needed = match prepared.alternative.count {
            Count::Exactly(count) => count,
            Count::All => {
                // Devices that could never serve the request are not meant; those that could, but are in use, are.
                order.retain(|candidate| {
                    !self
                        .trial
                        .check(place, prepared.alternative, *candidate)
                        .is_err_and(|rejection| rejection.is_permanent())
                });
                order.len().max(1)
            }
        };
        let held = self
            .trial
            .chosen()
            .iter()
            .filter(|chosen| chosen.claim == place.claim)
            .count();
        if held + needed > MAX_RESULTS {
            return false;
        }
        // Without this, fewer usable devices than needed would be combined in every way before giving up.
        let usable = order
            .iter()
            .filter(|candidate| {
                self.trial
                    .check(place, prepared.alternative, **candidate)
                    .is_ok()
            })
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
            let Some((place, prepared)) = self.at(slot, alternative) else {
                return false;
            };
            if let Ok(grant) = self.trial.check(place, prepared.alternative, *candidate) {
                self.trial.take(place, *candidate, grant);
                if self.pick(slot, alternative, rest, needed - 1) {
                    return true;
                }
                self.trial.put_back();
            }
        }
        self.note_misses(slot, alternative, order, needed);
        false
    }

    /// Keeps the misses of the request that got farthest; of equals the first, which is what policy preferred.
    fn note_misses(&mut self, slot: usize, alternative: usize, order: &[DeviceRef], needed: usize) {
        let depth = self.trial.chosen().len();
        if self
            .misses
            .as_ref()
            .is_some_and(|(reached, _)| *reached >= depth)
        {
            return;
        }
        let Some((place, prepared)) = self.at(slot, alternative) else {
            return;
        };
        let rejected: Vec<_> = order
            .iter()
            .filter_map(|candidate| {
                let check = self.trial.check(place, prepared.alternative, *candidate);
                Some((*candidate, check.err()?))
            })
            .collect();
        let total = match prepared.alternative.count {
            Count::Exactly(count) => count,
            Count::All => needed,
        };
        let misses = Misses {
            claim: place.claim,
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

    fn at(&self, slot: usize, alternative: usize) -> Option<(Place, &Prepared<'a>)> {
        let slot = self.slots.get(slot)?;
        let place = Place {
            claim: slot.claim,
            request: slot.request,
            alternative,
        };
        Some((place, slot.alternatives.get(alternative)?))
    }
}
