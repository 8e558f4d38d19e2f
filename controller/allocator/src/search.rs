//! The search on one node: devices for all claims of a pod, all or nothing.
//!
//! Depth-first search with backtracking over claims, requests and devices, in the order of the claims. Candidates are
//! tried in the order of their score, so the first solution is the preferred one. The rejections of the request that
//! got farthest are returned for the explanation.
//!
//! The first path, without backtracking, nearly always ends in the solution, or with the reason why there is none. Otherwise
//! the search [looks ahead](look_ahead) after each selection, and remembers what has failed: selections that differ in the
//! order of equal requests only are one. Its work is limited, so no claim can block the caller.

use std::collections::BTreeSet;
use std::rc::Rc;

use drava_api::DeviceType;
use drava_api::config::GpuPlacementPolicy;

use crate::claim::{Count, MAX_RESULTS};
use crate::placement::ClaimPlacement;
use crate::quota::{self, LeastCharges};
use crate::reason::Rejection;
use crate::score::{GpuRanking, GpuRunnerUp, KindChoice};
use crate::selector::Selectors;
use crate::topology::Proximity;
use crate::turn::Turn;
use crate::usage::requested_access;

pub mod candidates;
pub mod input;
mod kind;
mod look_ahead;
mod matching;
pub mod tentative_allocation;

use candidates::{Candidates, SelectionError};
use input::{DeviceRef, NodeState, SearchInput};
use look_ahead::{Domains, kinds};
use tentative_allocation::{RequestIndex, SelectedDevice, TentativeAllocation};

/// Checks of devices before the search gives up on a node, about 50 ms.
const CHECK_LIMIT: usize = 30_000;

/// Units of a turn for a check.
const UNITS_PER_CHECK: u64 = 2;

/// Result of the search on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Devices for every request, and what their GPUs have in common.
    Found(Vec<SelectedDevice>, Proximity),
    /// No solution, with the rejections of the request that got farthest.
    NotFound(Rejections),
    /// The search has given up.
    LimitReached,
}

/// Why the candidates of one request were rejected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rejections {
    /// Position of the claim.
    pub claim: usize,
    /// Result name of the request.
    pub request: String,
    /// Its device class.
    pub class: String,
    /// Devices that the request needs.
    pub needed: usize,
    /// Devices that were found for it, at most.
    pub found: usize,
    /// Every rejected device.
    pub devices: Vec<(DeviceRef, Rejection)>,
}

/// How far a search may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Until there is a result, or the limit is reached.
    Full,
    /// Along the first path.
    FirstPath,
}

/// Searches the pools of one node.
///
/// # Errors
/// When a selector cannot be evaluated.
pub fn search(
    input: &SearchInput<'_>,
    node: NodeState<'_>,
    selectors: &Selectors,
    effort: Effort,
    turn: &mut Turn,
) -> Result<Outcome, SelectionError> {
    let mut search = Search::new(input, node, selectors, turn)?;
    let mut found = search.request(0, None);
    turn.count(units(search.checks));
    if !found && !search.is_conclusive && effort == Effort::Full {
        search.restart();
        found = match search.look_at_start() {
            Some(domains) => search.request(0, Some(&domains)),
            None => false,
        };
        search.is_conclusive = !search.is_over;
        turn.count(units(search.checks));
        turn.charge_search(units(search.checks));
    }
    Ok(match found {
        true => {
            let proximity = search.allocation.proximity();
            Outcome::Found(search.allocation.into_selected(), proximity)
        }
        false if !search.is_conclusive => Outcome::LimitReached,
        false => Outcome::NotFound(
            search
                .rejections
                .map_or_else(Rejections::default, |(_, rejections)| rejections),
        ),
    })
}

fn units(checks: usize) -> u64 {
    UNITS_PER_CHECK.saturating_mul(u64::try_from(checks).unwrap_or(u64::MAX))
}

/// Returns the least that the claims are charged on the node; `None` if no device may serve one of their requests.
///
/// # Errors
/// When a selector cannot be evaluated.
pub(crate) fn least_charges(
    input: &SearchInput<'_>,
    node: NodeState<'_>,
    selectors: &Selectors,
    turn: &mut Turn,
) -> Result<Option<LeastCharges>, SelectionError> {
    let search = Search::new(input, node, selectors, turn)?;
    let mut least = LeastCharges::new(input.claims.len());
    for slot in &*search.slots {
        let alternatives = slot.alternatives.iter();
        let devices = alternatives.flat_map(|candidates| {
            let selected = candidates.selected.iter();
            selected.filter_map(|device| {
                let device = search.allocation.device(*device)?;
                let request = quota::with_defaults(input.budgets, device, candidates.alternative);
                let access = requested_access(device, &request).ok()?;
                Some((device, access, count(candidates)))
            })
        });
        if !least.add(slot.claim, devices) {
            return Ok(None);
        }
    }
    Ok(Some(least))
}

/// Returns why each device of a solution was selected: its score and that of the best other GPU, in the state in which
/// the search selected it.
///
/// # Errors
/// When a selector cannot be evaluated.
pub fn rank_gpus(
    input: &SearchInput<'_>,
    node: NodeState<'_>,
    selectors: &Selectors,
    solution: &[SelectedDevice],
    turn: &mut Turn,
) -> Result<Vec<GpuRanking>, SelectionError> {
    let mut search = Search::new(input, node, selectors, turn)?;
    let mut rankings = Vec::new();
    for selected in solution {
        let runner_up = search.runner_up(selected);
        rankings.push(GpuRanking {
            policy: search.allocation.gpu_policy(selected.index.claim),
            allocated_ppm: search.allocation.gpu_allocated_ppm(selected.device),
            kind: search.kind(selected),
            runner_up,
            partition: {
                let open = search.allocation.open_partitions(selected.device.pool);
                search.allocation.partition_score(selected.device, &open)
            },
            proximity: Proximity::default(),
        });
        search
            .allocation
            .allocate(selected.index, selected.device, selected.access.clone());
    }
    let proximity = search.allocation.proximity();
    for ranking in &mut rankings {
        ranking.proximity = proximity;
    }
    Ok(rankings)
}

/// Returns whether the claims can have exactly these devices.
///
/// # Errors
/// When a selector cannot be evaluated.
pub(crate) fn can_have(
    input: &SearchInput<'_>,
    node: NodeState<'_>,
    selectors: &Selectors,
    placed: &[ClaimPlacement],
    turn: &mut Turn,
) -> Result<bool, SelectionError> {
    let mut search = Search::new(input, node, selectors, turn)?;
    let slots = Rc::clone(&search.slots);
    for (claim, placed) in placed.iter().enumerate() {
        for placed in &placed.devices {
            let found = slots.iter().enumerate().find_map(|(slot, of)| {
                let mut names = of.alternatives.iter().map(|each| &each.alternative.name);
                let alternative = names.position(|name| *name == placed.request)?;
                (of.claim == claim).then_some((slot, alternative))
            });
            let Some((index, candidates)) =
                found.and_then(|(slot, alternative)| search.at(&slots, slot, alternative))
            else {
                return Ok(false);
            };
            let mut devices = candidates.selected.iter();
            let device = devices.find(|candidate| {
                let pool = node.pools.get(candidate.pool).map(|view| view.name);
                let device = search.allocation.device(**candidate);
                pool == Some(placed.pool.as_str())
                    && device.is_some_and(|device| device.name == placed.device.name)
            });
            let Some(device) = device else {
                return Ok(false);
            };
            let check = search
                .allocation
                .check(index, candidates.alternative, *device);
            search.spend(1);
            match check {
                Ok(access) if access == placed.access => {
                    search.allocation.allocate(index, *device, access);
                }
                Ok(_) | Err(_) => return Ok(false),
            }
        }
    }
    turn.count(units(search.checks));
    Ok(true)
}

/// Returns the number of devices that an alternative needs, 1 for all.
const fn count(candidates: &Candidates<'_>) -> usize {
    match candidates.alternative.count {
        Count::Exactly(count) => count,
        Count::All => 1,
    }
}

/// One request of one claim.
struct Slot<'a> {
    claim: usize,
    request: usize,
    /// In the order of preference.
    alternatives: Vec<Candidates<'a>>,
}

struct Search<'a> {
    slots: Rc<[Slot<'a>]>,
    /// For each slot the first one that is equal to it.
    kinds: Vec<usize>,
    allocation: TentativeAllocation<'a>,
    /// Rejections of the request that got farthest, with the number of devices selected before it.
    rejections: Option<(usize, Rejections)>,
    /// Selections from which the later requests cannot be served.
    failed: BTreeSet<Selection>,
    /// Checks of devices.
    checks: usize,
    /// Whether the first path has ended, or the limit is reached.
    is_over: bool,
    /// Whether the search has shown that there is no solution.
    is_conclusive: bool,
}

/// The devices of the requests before a slot, by kind of the request and alternative.
type Selection = (usize, Vec<(usize, usize, DeviceRef)>);

impl<'a> Search<'a> {
    fn new(
        input: &'a SearchInput<'a>,
        node: NodeState<'a>,
        selectors: &Selectors,
        turn: &mut Turn,
    ) -> Result<Self, SelectionError> {
        let mut slots = Vec::new();
        for (claim, spec) in input.claims.iter().enumerate() {
            for (request, parsed) in spec.requests.iter().enumerate() {
                let alternatives = parsed
                    .alternatives
                    .iter()
                    .map(|alternative| {
                        Candidates::new(spec, alternative, node.pools, selectors, turn)
                    })
                    .collect::<Result<_, _>>()?;
                slots.push(Slot {
                    claim,
                    request,
                    alternatives,
                });
            }
        }
        Ok(Self {
            kinds: kinds(&slots, input),
            slots: slots.into(),
            allocation: TentativeAllocation::new(input, node),
            rejections: None,
            failed: BTreeSet::new(),
            checks: 0,
            is_over: false,
            is_conclusive: false,
        })
    }

    /// Prepares the search after its first path.
    fn restart(&mut self) {
        self.checks = 0;
        self.is_over = false;
    }

    /// Counts checks of devices.
    fn spend(&mut self, checks: usize) {
        self.checks = self.checks.saturating_add(checks);
    }

    /// Notes that a request cannot be served after what is selected. The first path ends there.
    fn dead_end(&mut self, is_first_path: bool) {
        if is_first_path && !self.is_over {
            self.is_over = true;
            self.is_conclusive = self.allocation.selected().is_empty();
        }
    }

    /// Serves the requests from `slot` on, along the first path without `domains`.
    fn request(&mut self, slot: usize, domains: Option<&Domains>) -> bool {
        let Some(alternatives) = self.slots.get(slot).map(|slot| slot.alternatives.len()) else {
            return true;
        };
        let selection = domains.map(|_| self.selection(slot));
        if selection
            .as_ref()
            .is_some_and(|selection| self.failed.contains(selection))
        {
            return false;
        }
        let found = (0..alternatives)
            .any(|alternative| !self.is_over && self.alternative(slot, alternative, domains));
        if !found {
            self.dead_end(domains.is_none());
            if !self.is_over {
                self.failed.extend(selection);
            }
        }
        found
    }

    /// Returns the devices that are selected for the requests before a slot. The order of equal requests does not matter.
    fn selection(&self, slot: usize) -> Selection {
        let selected = self.allocation.selected().iter().map(|selected| {
            let index = selected.index;
            let mut slots = self.slots.iter();
            let slot =
                slots.position(|slot| (slot.claim, slot.request) == (index.claim, index.request));
            let kind = slot.and_then(|slot| self.kinds.get(slot).copied());
            (kind.unwrap_or_default(), index.alternative, selected.device)
        });
        let mut selected: Vec<_> = selected.collect();
        selected.sort_unstable();
        (slot, selected)
    }

    fn alternative(&mut self, slot: usize, alternative: usize, domains: Option<&Domains>) -> bool {
        let slots = Rc::clone(&self.slots);
        let Some((index, candidates)) = self.at(&slots, slot, alternative) else {
            return false;
        };
        let needed = match candidates.alternative.count {
            Count::Exactly(count) => count,
            Count::All => {
                // `All` means every device that could serve the request if it were free and untainted.
                let can_serve = |candidate: &DeviceRef| {
                    !self
                        .allocation
                        .check(index, candidates.alternative, *candidate)
                        .is_err_and(|rejection| rejection.is_permanent())
                };
                let untainted = candidates.selected.iter().copied().filter(can_serve);
                let tainted = candidates.tainted().filter(can_serve).count();
                let all = (untainted.count() + tainted).max(1);
                self.spend(candidates.selected.len());
                all
            }
        };
        let selected = self
            .allocation
            .selected()
            .iter()
            .filter(|selected| selected.index.claim == index.claim)
            .count();
        if selected + needed > MAX_RESULTS {
            return false;
        }
        let domain =
            domains.and_then(|domains| domains.get(*self.kinds.get(slot)?)?.get(alternative));
        let order = self.order(slot, index, candidates, domain);
        // Prevents trying every combination when fewer devices are feasible than needed.
        let feasible = match domain {
            Some(domain) => domain.len(),
            None => {
                let is_feasible = |candidate: &&DeviceRef| {
                    let check = self
                        .allocation
                        .check(index, candidates.alternative, **candidate);
                    check.is_ok()
                };
                order.iter().filter(is_feasible).count()
            }
        };
        self.spend(order.len());
        if feasible < needed {
            let devices = match domain {
                Some(_) => candidates.selected.clone(),
                None => self.retained(index, candidates, order),
            };
            self.record_rejections(slot, alternative, &devices, needed);
            return false;
        }
        self.select((slot, alternative), &order, needed, domains)
    }

    /// Returns the devices of which the rejections count: those of `All` that could serve it.
    fn retained(
        &self,
        index: RequestIndex,
        candidates: &Candidates<'_>,
        mut order: Vec<DeviceRef>,
    ) -> Vec<DeviceRef> {
        if candidates.alternative.count == Count::All {
            order.retain(|candidate| {
                let check = self
                    .allocation
                    .check(index, candidates.alternative, *candidate);
                !check.is_err_and(|rejection| rejection.is_permanent())
            });
        }
        order
    }

    /// Returns the candidates of a request in the order in which they are tried; those of `domain`, if it is known which of them
    /// can be allocated now.
    fn order(
        &self,
        slot: usize,
        index: RequestIndex,
        candidates: &Candidates<'_>,
        domain: Option<&Vec<DeviceRef>>,
    ) -> Vec<DeviceRef> {
        let allocation = &self.allocation;
        let devices = domain.unwrap_or(&candidates.selected);
        let mut order = allocation.order_by_score(index, candidates.alternative, devices);
        let policy = allocation.gpu_policy(index.claim);
        if matches!(
            policy,
            GpuPlacementPolicy::Topology | GpuPlacementPolicy::Numa
        ) {
            let is_feasible = |candidate: &DeviceRef| {
                let check = allocation.check(index, candidates.alternative, *candidate);
                check.is_ok()
            };
            let feasible: Vec<_> = order.iter().copied().filter(is_feasible).collect();
            let later = self.slots.get(slot + 1..).unwrap_or_default();
            let later = later.iter().filter_map(|slot| slot.alternatives.first());
            let needed = std::iter::once(candidates).chain(later).map(count).sum();
            allocation.order_by_topology(policy, &mut order, &feasible, needed);
        }
        order
    }

    /// Selects `needed` more devices out of `order`.
    fn select(
        &mut self,
        at: (usize, usize),
        order: &[DeviceRef],
        needed: usize,
        domains: Option<&Domains>,
    ) -> bool {
        let (slot, alternative) = at;
        if needed == 0 {
            return self.request(slot + 1, domains);
        }
        let slots = Rc::clone(&self.slots);
        let Some((index, candidates)) = self.at(&slots, slot, alternative) else {
            return false;
        };
        for (position, candidate) in order.iter().enumerate() {
            let rest = order.get(position + 1..).unwrap_or_default();
            if domains.is_some() && self.checks >= CHECK_LIMIT {
                self.is_over = true;
            }
            if rest.len() + 1 < needed || self.is_over {
                break;
            }
            self.spend(1);
            let check = self
                .allocation
                .check(index, candidates.alternative, *candidate);
            let Ok(access) = check else {
                continue;
            };
            self.allocation.allocate(index, *candidate, access);
            let found = match domains {
                None => self.select(at, rest, needed - 1, None),
                Some(domains) => match self.look_ahead(at, rest, needed - 1, domains) {
                    Some((rest, domains)) => self.select(at, &rest, needed - 1, Some(&domains)),
                    None => false,
                },
            };
            if found {
                return true;
            }
            self.allocation.release();
        }
        match domains {
            None => self.record_rejections(slot, alternative, order, needed),
            Some(_) => {
                let devices = self.unselected(index, candidates);
                self.record_rejections(slot, alternative, &devices, needed);
            }
        }
        self.dead_end(domains.is_none());
        false
    }

    /// Returns the devices that are not selected for the request.
    fn unselected(&self, index: RequestIndex, candidates: &Candidates<'_>) -> Vec<DeviceRef> {
        let is_selected = |candidate: &DeviceRef| {
            let mut selected = self.allocation.selected().iter();
            selected.any(|selected| selected.index == index && selected.device == *candidate)
        };
        let devices = candidates.selected.iter().copied();
        devices.filter(|device| !is_selected(device)).collect()
    }

    /// Records the rejections of the request that got farthest; of equals the first, which has the best score.
    fn record_rejections(
        &mut self,
        slot: usize,
        alternative: usize,
        order: &[DeviceRef],
        needed: usize,
    ) {
        let depth = self.allocation.selected().len();
        if self
            .rejections
            .as_ref()
            .is_some_and(|(reached, _)| *reached >= depth)
        {
            return;
        }
        let slots = Rc::clone(&self.slots);
        let Some((index, candidates)) = self.at(&slots, slot, alternative) else {
            return;
        };
        let rejected: Vec<_> = order
            .iter()
            .filter_map(|candidate| {
                let check = self
                    .allocation
                    .check(index, candidates.alternative, *candidate);
                Some((*candidate, check.err()?))
            })
            .collect();
        let total = match candidates.alternative.count {
            Count::Exactly(count) => count,
            Count::All => needed,
        };
        let rejections = Rejections {
            claim: index.claim,
            request: candidates.alternative.name.clone(),
            class: candidates.alternative.class.clone(),
            needed: total,
            found: total.saturating_sub(needed) + (order.len() - rejected.len()),
            devices: rejected
                .into_iter()
                .chain(candidates.rejected.iter().cloned())
                .collect(),
        };
        self.rejections = Some((depth, rejections));
    }

    /// Returns the feasible GPU with the best score, other than the GPU of `selected`.
    fn runner_up(&self, selected: &SelectedDevice) -> Option<GpuRunnerUp> {
        let index = selected.index;
        let slot = self
            .slots
            .iter()
            .position(|slot| (slot.claim, slot.request) == (index.claim, index.request))?;
        let (_, candidates) = self.at(&self.slots, slot, index.alternative)?;
        let gpu = &self.allocation.device(selected.device)?.gpu;
        self.order(slot, index, candidates, None)
            .into_iter()
            .filter_map(|candidate| Some((candidate, self.allocation.device(candidate)?)))
            .find(|(candidate, device)| {
                device.gpu != *gpu
                    && self
                        .allocation
                        .check(index, candidates.alternative, *candidate)
                        .is_ok()
            })
            .map(|(candidate, device)| GpuRunnerUp {
                gpu: device.display_name().to_owned(),
                allocated_ppm: self.allocation.gpu_allocated_ppm(candidate),
            })
    }

    /// Returns the choice between share and partition, if a GpuPolicy has a preference and devices of both kinds match.
    fn kind(&self, selected: &SelectedDevice) -> Option<KindChoice> {
        let index = selected.index;
        let prefer = self.allocation.preference(index.claim)?;
        let of_request =
            |slot: &Slot<'_>| (slot.claim, slot.request) == (index.claim, index.request);
        let slot = self.slots.iter().position(of_request)?;
        let (_, candidates) = self.at(&self.slots, slot, index.alternative)?;
        let has = |kind| {
            let mut selected = candidates.selected.iter();
            selected.any(|candidate| {
                let device = self.allocation.device(*candidate);
                device.is_some_and(|device| device.kind == Some(kind))
            })
        };
        let is_partition = self.allocation.device(selected.device)?.kind == Some(DeviceType::Mig);
        (has(DeviceType::Mig) && has(DeviceType::Vgpu)).then_some(KindChoice {
            prefer,
            is_partition,
        })
    }

    fn at<'s>(
        &self,
        slots: &'s [Slot<'a>],
        slot: usize,
        alternative: usize,
    ) -> Option<(RequestIndex, &'s Candidates<'a>)> {
        let index = self.index(slot, alternative)?;
        Some((index, slots.get(slot)?.alternatives.get(alternative)?))
    }
}
