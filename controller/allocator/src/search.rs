//! The search on one node: devices for all claims of a pod, all or nothing.
//!
//! Depth-first search with backtracking over claims, requests and devices, in the order of the claims. Candidates are
//! tried in the order of their score, so the first solution is the preferred one. The rejections of the request that
//! got farthest are returned for the explanation. The number of steps is limited, so no claim can block the caller.

use drava_api::DeviceType;
use drava_api::config::GpuPlacementPolicy;

use crate::claim::{Count, MAX_RESULTS};
use crate::reason::Rejection;
use crate::score::{GpuRanking, GpuRunnerUp, KindChoice};
use crate::selector::Selectors;
use crate::topology::Proximity;

pub mod candidates;
pub mod input;
mod kind;
pub mod tentative_allocation;

use candidates::{Candidates, SelectionError};
use input::{DeviceRef, NodeState, SearchInput};
use tentative_allocation::{RequestIndex, SelectedDevice, TentativeAllocation};

/// Candidates tried before the search gives up on a node.
pub const STEP_LIMIT: u32 = 2_000;

/// Result of the search on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Devices for every request, and what their GPUs have in common.
    Found(Vec<SelectedDevice>, Proximity),
    /// No solution, with the rejections of the request that got farthest.
    NotFound(Rejections),
    /// [`STEP_LIMIT`] was reached.
    LimitReached,
}

/// Why the candidates of one request were rejected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rejections {
    /// Position of the claim.
    pub claim: usize,
    /// Result name of the request.
    pub request: String,
    /// Devices that the request needs.
    pub needed: usize,
    /// Devices that were found for it, at most.
    pub found: usize,
    /// Every rejected device.
    pub devices: Vec<(DeviceRef, Rejection)>,
}

/// Searches the pools of one node.
///
/// # Errors
/// When a selector cannot be evaluated.
pub fn search(
    input: &SearchInput<'_>,
    node: NodeState<'_>,
    selectors: &Selectors,
) -> Result<Outcome, SelectionError> {
    let mut search = Search::new(input, node, selectors)?;
    let found = search.request(0);
    Ok(match found {
        true => {
            let proximity = search.allocation.proximity();
            Outcome::Found(search.allocation.into_selected(), proximity)
        }
        false if search.steps >= STEP_LIMIT => Outcome::LimitReached,
        false => Outcome::NotFound(
            search
                .rejections
                .map_or_else(Rejections::default, |(_, rejections)| rejections),
        ),
    })
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
) -> Result<Vec<GpuRanking>, SelectionError> {
    let mut search = Search::new(input, node, selectors)?;
    let mut rankings = Vec::new();
    for selected in solution {
        let runner_up = search.runner_up(selected);
        rankings.push(GpuRanking {
            policy: search.allocation.gpu_policy(selected.index.claim),
            allocated_ppm: search
                .allocation
                .gpu_allocated_ppm(selected.index.claim, selected.device),
            tuning: search.allocation.tuning(selected.index.claim),
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
    slots: Vec<Slot<'a>>,
    allocation: TentativeAllocation<'a>,
    /// Rejections of the request that got farthest, with the number of devices selected before it.
    rejections: Option<(usize, Rejections)>,
    steps: u32,
}

impl<'a> Search<'a> {
    fn new(
        input: &'a SearchInput<'a>,
        node: NodeState<'a>,
        selectors: &Selectors,
    ) -> Result<Self, SelectionError> {
        let mut slots = Vec::new();
        for (claim, spec) in input.claims.iter().enumerate() {
            for (request, parsed) in spec.requests.iter().enumerate() {
                let alternatives = parsed
                    .alternatives
                    .iter()
                    .map(|alternative| Candidates::new(spec, alternative, node.pools, selectors))
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
            allocation: TentativeAllocation::new(input, node),
            rejections: None,
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
        let Some((index, candidates)) = self.at(slot, alternative) else {
            return false;
        };
        let mut order = self.order(slot, index, candidates);
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
                order.retain(can_serve);
                let tainted = candidates.tainted().filter(can_serve).count();
                (order.len() + tainted).max(1)
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
        // Prevents trying every combination when fewer devices are feasible than needed.
        let feasible = order
            .iter()
            .filter(|candidate| {
                self.allocation
                    .check(index, candidates.alternative, **candidate)
                    .is_ok()
            })
            .count();
        if feasible < needed {
            self.record_rejections(slot, alternative, &order, needed);
            return false;
        }
        self.select(slot, alternative, &order, needed)
    }

    /// Returns the candidates of a request in the order in which they are tried.
    fn order(
        &self,
        slot: usize,
        index: RequestIndex,
        candidates: &Candidates<'_>,
    ) -> Vec<DeviceRef> {
        let allocation = &self.allocation;
        let mut order = allocation.order_by_score(index, candidates);
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
            let Some((index, candidates)) = self.at(slot, alternative) else {
                return false;
            };
            if let Ok(access) = self
                .allocation
                .check(index, candidates.alternative, *candidate)
            {
                self.allocation.allocate(index, *candidate, access);
                if self.select(slot, alternative, rest, needed - 1) {
                    return true;
                }
                self.allocation.release();
            }
        }
        self.record_rejections(slot, alternative, order, needed);
        false
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
        let Some((index, candidates)) = self.at(slot, alternative) else {
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
        let (_, candidates) = self.at(slot, index.alternative)?;
        let gpu = &self.allocation.device(selected.device)?.gpu;
        self.order(slot, index, candidates)
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
                allocated_ppm: self.allocation.gpu_allocated_ppm(index.claim, candidate),
            })
    }

    /// Returns the choice between share and partition, if a GpuPolicy has a preference and devices of both kinds match.
    fn kind(&self, selected: &SelectedDevice) -> Option<KindChoice> {
        let index = selected.index;
        let prefer = self.allocation.tuning(index.claim).prefer?;
        let of_request =
            |slot: &Slot<'_>| (slot.claim, slot.request) == (index.claim, index.request);
        let slot = self.slots.iter().position(of_request)?;
        let (_, candidates) = self.at(slot, index.alternative)?;
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

    fn at(&self, slot: usize, alternative: usize) -> Option<(RequestIndex, &Candidates<'a>)> {
        let slot = self.slots.get(slot)?;
        let index = RequestIndex {
            claim: slot.claim,
            request: slot.request,
            alternative,
        };
        Some((index, slot.alternatives.get(alternative)?))
    }
}
