//! The decision for one pod: the node and the devices, or why there are none.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::reason::Reason;
use drava_api::{DeviceType, Quantity};

use crate::cluster::Cluster;
use crate::cluster::neighbors::NeighborLimits;
use crate::explanation::{Explanation, NodeVerdict};
use crate::fragmentation::{NodeLoss, NodeRoom};
use crate::node::add;
use crate::node::preferences::Preferences;
use crate::placement::{ClaimPlacement, DevicePlacement, Placement, Policies};
use crate::pod_request::PodRequest;
use crate::ranking::DeviceScore;
use crate::score::{
    GpuRanking, KindChoice, NodeRanking, NodeRunnerUp, NodeScore, allocated_ppm, node_score,
};
use crate::search::candidates::SelectionError;
use crate::search::input::{NodeState, PoolView, SearchInput};
use crate::search::tentative_allocation::SelectedDevice;
use crate::search::{self, Effort, Outcome};
use crate::searched::SearchedNodes;
use crate::searched::{Suspended, Undecided};
use crate::selector::SelectorError;
use crate::turn::{Turn, Work};
use crate::usage::GpuMemory;

mod by_ranking;
mod closest_rejection;

use closest_rejection::closest_rejection;

/// Detail of a search that has given up. It names no number: those of one decision differ.
const SEARCH_LIMIT: &str = "the devices can be combined in too many ways to try all; request fewer devices, or put equal \
                            requests into one with a count";

/// A node on which the pod fits.
struct FeasibleNode<'a> {
    name: &'a str,
    pools: Vec<PoolView<'a>>,
    selected: Vec<SelectedDevice>,
    devices: DeviceScore,
    score: NodeScore,
}

/// What is to be decided for a pod.
struct Problem<'a> {
    pod_request: &'a PodRequest,
    input: SearchInput<'a>,
    node_policy: NodePlacementPolicy,
    /// What the pod requests on its node.
    room: NodeRoom,
    /// Whether a rejection needs the verdicts on nodes.
    needs_verdicts: bool,
    neighbor_limits: NeighborLimits<'a>,
    /// `None` if the pod prefers no node to another one, and if there is no other one.
    preferences: Option<Preferences>,
}

impl Problem<'_> {
    /// Returns what the pod requests on its node, if the score of a node depends on it.
    fn ranked_room(&self) -> Option<NodeRoom> {
        (self.node_policy == NodePlacementPolicy::LeastFragmentation).then_some(self.room)
    }

    /// Returns whether a policy needs the loss of placements.
    fn needs_loss(&self) -> bool {
        let mut claims = self.input.claims.iter();
        let default = self.input.gpu_policy;
        self.node_policy == NodePlacementPolicy::LeastFragmentation
            || claims.any(|claim| {
                claim.placement.gpu.unwrap_or(default) == GpuPlacementPolicy::LeastFragmentation
            })
    }

    /// Returns the score of a node for the pod.
    fn score(&self, node: &str, devices: DeviceScore) -> NodeScore {
        let nominated = self.pod_request.demand.nominated_node.as_deref();
        NodeScore {
            is_not_avoided: !self.pod_request.avoided_nodes.contains(node),
            is_nominated: nominated == Some(node),
            alternatives: devices.alternatives,
            proximity: devices.proximity,
            // Depends on all feasible nodes, see [`Cluster::by_preferences`].
            preference: 0,
            policy_score: devices.policy_score,
        }
    }

    /// Returns whether the device is a share where a GpuPolicy prefers partitions, or the other way round.
    fn is_second_kind(&self, selected: &SelectedDevice, pools: &[PoolView<'_>]) -> bool {
        let claim = self.input.claims.get(selected.index.claim);
        let prefer = claim.and_then(|claim| claim.prefer);
        let view = pools.get(selected.device.pool);
        let device = view.and_then(|view| view.pool.devices.get(selected.device.index));
        let is_partition = match device.and_then(|device| device.kind) {
            Some(DeviceType::Mig) => true,
            Some(DeviceType::Vgpu) => false,
            Some(DeviceType::Gpu) | None => return false,
        };
        prefer.is_some_and(|prefer| {
            KindChoice {
                prefer,
                is_partition,
            }
            .is_second()
        })
    }
}

impl Cluster {
    /// Decides on the node and the devices of a pod. A pod without claims fits on nodes without GPUs, too.
    ///
    /// # Errors
    /// Why no node is feasible. The verdicts on nodes may lack those on their devices.
    pub fn decide(
        &self,
        pod_request: &PodRequest,
        policies: Policies,
    ) -> Result<Placement, Explanation> {
        self.decide_in(pod_request, policies, &mut Turn::endless())
            .map_err(Undecided::of_endless)
    }

    /// Decides like [`Self::decide`], or goes on with a suspended decision, in a turn.
    ///
    /// # Errors
    /// As [`Self::decide`], and when the turn is too short.
    pub fn decide_in(
        &self,
        pod_request: &PodRequest,
        policies: Policies,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        self.with_problem(pod_request, policies, |problem| {
            self.decide_by_any(problem, turn)
        })
    }

    /// Decides like [`Self::decide_in`], in less time when no node is feasible: returns `None` then.
    ///
    /// # Errors
    /// When the turn is too short.
    pub fn place_in(
        &self,
        pod_request: &PodRequest,
        policies: Policies,
        turn: &mut Turn,
    ) -> Result<Option<Placement>, Suspended> {
        let decided = self.with_problem(pod_request, policies, |problem| {
            problem.needs_verdicts = false;
            self.decide_by_any(problem, turn)
        });
        match decided {
            Ok(placement) => Ok(Some(placement)),
            Err(Undecided::Rejected(_)) => Ok(None),
            Err(Undecided::Suspended(suspended)) => Err(suspended),
        }
    }

    fn decide_by_any(
        &self,
        problem: &mut Problem<'_>,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        self.prefer(problem);
        match self.decide_by_ranking(problem, turn) {
            Some(decided) => decided,
            None => self.decide_among(self.candidates(problem.pod_request), problem, turn),
        }
    }

    /// Adds the preferences, which a decision about one node does not need.
    fn prefer(&self, problem: &mut Problem<'_>) {
        let PodRequest { uid, demand, .. } = problem.pod_request;
        problem.preferences = self.preferences(uid, demand);
    }

    /// Decides like [`Self::decide`], by an evaluation of every node.
    ///
    /// # Errors
    /// Why no node is feasible, with the verdicts on all devices.
    pub fn explain(
        &self,
        pod_request: &PodRequest,
        policies: Policies,
    ) -> Result<Placement, Explanation> {
        self.explain_in(pod_request, policies, &mut Turn::endless())
            .map_err(Undecided::of_endless)
    }

    fn explain_in(
        &self,
        pod_request: &PodRequest,
        policies: Policies,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        self.with_problem(pod_request, policies, |problem| {
            self.prefer(problem);
            let nodes = self.candidates(problem.pod_request);
            self.decide_among(nodes, problem, turn)
        })
    }

    /// Decides on the devices of a pod on one node.
    ///
    /// # Errors
    /// Why the node is not feasible.
    pub fn decide_on(
        &self,
        node: &str,
        pod_request: &PodRequest,
        policies: Policies,
    ) -> Result<Placement, Explanation> {
        self.decide_on_in(node, pod_request, policies, &mut Turn::endless())
            .map_err(Undecided::of_endless)
    }

    /// Decides like [`Self::decide_on`] in a turn.
    ///
    /// # Errors
    /// As [`Self::decide_on`], and when the turn is too short.
    pub fn decide_on_in(
        &self,
        node: &str,
        pod_request: &PodRequest,
        policies: Policies,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        self.with_problem(pod_request, policies, |problem| {
            self.decide_among(std::iter::once(node), problem, turn)
        })
    }

    /// Returns whether the pod still fits with a placement that an earlier turn has found.
    #[must_use]
    pub fn still_fits(
        &self,
        pod_request: &PodRequest,
        placement: &Placement,
        policies: Policies,
        turn: &mut Turn,
    ) -> bool {
        let claims = pod_request.claims.iter().map(|claim| &claim.id);
        // Devices may have been added, all of which the pod would need.
        if pod_request.requests_all()
            || !claims.eq(placement.claims.iter().map(|placed| &placed.claim))
        {
            return false;
        }
        let node = &placement.node;
        self.with_problem(pod_request, policies, |problem| {
            if self.admits(node, problem, turn).is_err() {
                return false;
            }
            if problem.input.claims.is_empty() {
                return true;
            }
            let Some(pools) = self.usable_pools_of(node) else {
                return false;
            };
            let state = NodeState {
                pools: &pools,
                loss: None,
            };
            let (input, claims) = (&problem.input, &placement.claims);
            search::can_have(input, state, &self.selectors, claims, turn) == Ok(true)
        })
    }

    fn with_problem<T>(
        &self,
        pod_request: &PodRequest,
        policies: Policies,
        decide: impl FnOnce(&mut Problem<'_>) -> T,
    ) -> T {
        let resolved = self.with_policies(pod_request);
        let pod_request = resolved.as_ref().unwrap_or(pod_request);
        let containers = pod_request.containers(|pool, device| self.gpu_of(pool, device));
        let namespace = pod_request.claims.first();
        let budgets = namespace.map(|claim| self.budgets(&claim.id.namespace));
        decide(&mut Problem {
            pod_request,
            input: SearchInput {
                claims: &pod_request.claims,
                containers: &containers,
                gpu_policy: policies.gpu,
                budgets: budgets.as_deref().unwrap_or_default(),
                exceeds_limits: false,
            },
            node_policy: node_policy(pod_request, policies),
            room: NodeRoom::of(&pod_request.demand.requests),
            needs_verdicts: true,
            neighbor_limits: self.neighbor_limits(&pod_request.uid, &pod_request.demand),
            preferences: None,
        })
    }

    /// Returns the nodes on which the pod can fit, by name.
    fn candidates<'a>(
        &'a self,
        pod_request: &PodRequest,
    ) -> Box<dyn Iterator<Item = &'a str> + 'a> {
        match pod_request.claims.is_empty() {
            true => Box::new(self.node_names()),
            false => Box::new(self.nodes_with_pools()),
        }
    }

    /// Evaluates these nodes, sorted by name.
    fn decide_among<'a>(
        &'a self,
        nodes: impl Iterator<Item = &'a str>,
        problem: &Problem<'_>,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        let mut verdicts = Vec::new();
        let mut feasible: Vec<FeasibleNode<'_>> = Vec::new();
        let before = problem.pod_request.searched.as_deref();
        let mut is_complete = true;
        for node in nodes {
            if let Err(obstacle) = self.admits(node, problem, turn) {
                verdicts.push(Arc::new(verdict(node, Reason::NodeUnfit, obstacle)));
                continue;
            }
            let known = before.and_then(|before| before.verdict(node));
            // The nodes before have used up the work for combinations of devices.
            let is_over = match before {
                Some(_) => turn.suspends_search(),
                None => turn.is_out_of_searches(),
            };
            let effort = match known.is_some() || is_over {
                true => Effort::FirstPath,
                false => Effort::Full,
            };
            if before.is_some() && effort == Effort::Full {
                turn.note_progress();
            }
            match self.evaluate_node(node, problem, effort, turn)? {
                Ok(node) => feasible.push(node),
                Err(verdict)
                    if effort == Effort::FirstPath && verdict.reason == Reason::SearchLimit =>
                {
                    match known {
                        Some(known) => verdicts.push(Arc::clone(known)),
                        None if before.is_none() => verdicts.push(Arc::new(verdict)),
                        None => is_complete = false,
                    }
                }
                Err(verdict) => verdicts.push(Arc::new(verdict)),
            }
        }
        if feasible.is_empty() && !is_complete {
            return Err(Undecided::Suspended(Suspended {
                work: Work::Searches,
                searched: in_vain(verdicts),
            }));
        }
        let names: Vec<&str> = feasible.iter().map(|node| node.name).collect();
        let preferences = self.by_preferences(problem, &names);
        for (node, preference) in feasible.iter_mut().zip(preferences) {
            node.score.preference = preference;
        }
        // Nodes are sorted by name, and the sort is stable: of equal scores the first name precedes.
        feasible.sort_by_key(|node| Reverse(node.score));
        let mut feasible = feasible.into_iter();
        let Some(best) = feasible.next() else {
            return Err(Explanation::of_nodes(verdicts).into());
        };
        let runner_up = feasible.next().map(|node| NodeRunnerUp {
            node: node.name.to_owned(),
            allocated_ppm: node.devices.allocated_ppm,
            score: node.score,
        });
        self.placement(best, runner_up, problem, turn)
    }

    /// Returns the score of each node by the preferences of the pod and of those around it.
    fn by_preferences(&self, problem: &Problem<'_>, nodes: &[&str]) -> Vec<i64> {
        match &problem.preferences {
            None => vec![0; nodes.len()],
            Some(preferences) => {
                self.scores_by_preferences(&problem.pod_request.demand, preferences, nodes)
            }
        }
    }

    fn placement(
        &self,
        best: FeasibleNode<'_>,
        runner_up: Option<NodeRunnerUp>,
        problem: &Problem<'_>,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        let ranking = NodeRanking {
            policy: problem.node_policy,
            allocated_ppm: best.devices.allocated_ppm,
            score: best.score,
            runner_up,
        };
        let loss = self.loss(best.name, problem, &best.pools, turn)?;
        let state = NodeState {
            pools: &best.pools,
            loss: loss.as_ref(),
        };
        let gpu_rankings =
            search::rank_gpus(&problem.input, state, &self.selectors, &best.selected, turn)
                .map_err(|error| selection_failed(&error))?;
        drop(loss);
        Ok(best.into_placement(problem.pod_request, ranking, gpu_rankings))
    }

    fn loss<'p>(
        &self,
        node: &str,
        problem: &Problem<'_>,
        pools: &'p [PoolView<'p>],
        turn: &mut Turn,
    ) -> Result<Option<NodeLoss<'p>>, Suspended> {
        let needs_loss = problem.needs_loss();
        needs_loss
            .then(|| self.node_loss(node, problem.room, pools, turn))
            .transpose()
    }

    /// Evaluates a node within the limits of quotas.
    fn evaluate_node<'a>(
        &'a self,
        node: &'a str,
        problem: &Problem<'_>,
        effort: Effort,
        turn: &mut Turn,
    ) -> Result<Result<FeasibleNode<'a>, NodeVerdict>, Undecided> {
        self.evaluate_devices(node, problem, &problem.input, effort, turn)
    }

    /// Evaluates the devices of a node.
    fn evaluate_devices<'a>(
        &'a self,
        node: &'a str,
        problem: &Problem<'_>,
        input: &SearchInput<'_>,
        effort: Effort,
        turn: &mut Turn,
    ) -> Result<Result<FeasibleNode<'a>, NodeVerdict>, Undecided> {
        turn.count_node();
        let verdict = |reason, detail| verdict(node, reason, detail);
        let mut pools = Vec::new();
        let mut excluded = None;
        for (name, pool) in self.pools_of_node(node) {
            match &pool.state {
                Ok((pool, usage)) => pools.push(PoolView { name, pool, usage }),
                Err(found) => excluded = Some(format!("pool {name}: {found}")),
            }
        }
        // All devices of a node are unknown while one of its pools is.
        if let Some(excluded) = &excluded
            && problem.pod_request.requests_all()
        {
            return Ok(Err(verdict(Reason::PoolIncomplete, excluded.clone())));
        }
        let loss = self.loss(node, problem, &pools, turn)?;
        let state = NodeState {
            pools: &pools,
            loss: loss.as_ref(),
        };
        let outcome = search::search(input, state, &self.selectors, effort, turn)
            .map_err(|error| selection_failed(&error))?;
        let lost = match (&outcome, &loss) {
            (Outcome::Found(selected, _), Some(loss)) => {
                let devices = selected.iter().filter_map(|selected| {
                    let view = pools.get(selected.device.pool)?;
                    let device = view.pool.devices.get(selected.device.index)?;
                    Some((selected.device.pool, &**device, &selected.access))
                });
                loss.of(devices)
            }
            _ => 0.0,
        };
        drop(loss);
        Ok(match (outcome, excluded) {
            (Outcome::Found(selected, proximity), _) => {
                let memory = node_memory(&pools);
                let allocated_ppm = allocated_ppm(memory.allocated, memory.total);
                let alternatives = selected
                    .iter()
                    .map(|selected| {
                        selected.index.alternative
                            + usize::from(problem.is_second_kind(selected, &pools))
                    })
                    .sum();
                let devices = DeviceScore {
                    alternatives: Reverse(alternatives),
                    proximity: Reverse(proximity),
                    policy_score: node_score(problem.node_policy, allocated_ppm, lost),
                    allocated_ppm,
                };
                Ok(FeasibleNode {
                    name: node,
                    score: problem.score(node, devices),
                    devices,
                    pools,
                    selected,
                })
            }
            (_, Some(excluded)) => Err(verdict(Reason::PoolIncomplete, excluded)),
            (Outcome::LimitReached, None) => {
                Err(verdict(Reason::SearchLimit, SEARCH_LIMIT.to_owned()))
            }
            (Outcome::NotFound(rejections), None) => {
                Err(closest_rejection(node, &pools, &rejections))
            }
        })
    }

    /// Checks whether the pod can run on the node, apart from its devices.
    fn admits(&self, node: &str, problem: &Problem<'_>, turn: &mut Turn) -> Result<(), String> {
        turn.count_node();
        let pod_request = problem.pod_request;
        let info = self.node(node).ok_or("node does not exist")?;
        for (claim, selector) in &pod_request.pinned_by {
            if !info.selected_by(node, selector) {
                return Err(format!("claim {claim} is allocated on another node"));
            }
        }
        let mut requested = self.requested_on(node, &pod_request.uid);
        info.admits(node, &pod_request.demand, &requested, &self.classes)?;
        problem.neighbor_limits.admit(node, info)?;
        self.admits_volumes(node, info, &pod_request.demand)?;
        let mut before = &pod_request.demand;
        for sharer in &pod_request.sharers {
            add(requested.to_mut(), &before.requests);
            info.admits(node, sharer, &requested, &self.classes)?;
            before = sharer;
        }
        Ok(())
    }
}

fn verdict(node: &str, reason: Reason, detail: String) -> NodeVerdict {
    NodeVerdict {
        node: node.to_owned(),
        reason,
        detail,
        closeness: (0, Quantity::ZERO),
        devices: Vec::new(),
    }
}

fn selection_failed(error: &SelectionError) -> Undecided {
    match error.source {
        SelectorError::Suspended => Suspended::from(Work::Selectors).into(),
        SelectorError::Compile(_) | SelectorError::Runtime(_) => {
            Explanation::rejected(Reason::SelectorError, error.to_string()).into()
        }
    }
}

/// Returns the verdicts on nodes whose devices were searched.
fn in_vain(verdicts: Vec<Arc<NodeVerdict>>) -> SearchedNodes {
    let mut searched = SearchedNodes::default();
    for verdict in verdicts {
        if verdict.reason != Reason::NodeUnfit {
            searched.note_verdict(verdict);
        }
    }
    searched
}

/// Policy between nodes: that of the first claim with one, else the controller's.
fn node_policy(pod_request: &PodRequest, policies: Policies) -> NodePlacementPolicy {
    pod_request
        .claims
        .iter()
        .find_map(|claim| claim.placement.node)
        .unwrap_or(policies.node)
}

/// Returns the memory of the node's GPUs.
fn node_memory(pools: &[PoolView<'_>]) -> GpuMemory {
    let mut sum = GpuMemory::default();
    for view in pools {
        let gpus: BTreeSet<_> = view.pool.devices.iter().map(|device| &device.gpu).collect();
        for gpu in gpus {
            let memory = view.usage.gpu_memory(view.pool, gpu);
            sum.allocated += memory.allocated.min(memory.total);
            sum.total += memory.total;
        }
    }
    sum
}

impl FeasibleNode<'_> {
    fn into_placement(
        self,
        pod_request: &PodRequest,
        ranking: NodeRanking,
        gpu_rankings: Vec<GpuRanking>,
    ) -> Placement {
        let mut claims: Vec<ClaimPlacement> = pod_request
            .claims
            .iter()
            .map(|spec| ClaimPlacement {
                claim: spec.id.clone(),
                devices: Vec::new(),
            })
            .collect();
        for (selected, ranking) in self.selected.into_iter().zip(gpu_rankings) {
            let index = selected.index;
            let alternative = pod_request
                .claims
                .get(index.claim)
                .and_then(|spec| spec.requests.get(index.request))
                .and_then(|request| request.alternatives.get(index.alternative));
            let device = self
                .pools
                .get(selected.device.pool)
                .and_then(|view| view.pool.devices.get(selected.device.index));
            if let (Some(claim), Some(alternative), Some(device)) =
                (claims.get_mut(index.claim), alternative, device)
            {
                claim.devices.push(DevicePlacement {
                    request: alternative.name.clone(),
                    class: alternative.class.clone(),
                    pool: selected.pool,
                    device: Arc::clone(device),
                    access: selected.access,
                    tolerations: alternative.tolerations.clone(),
                    ranking,
                });
            }
        }
        Placement {
            node: self.name.to_owned(),
            ranking,
            claims,
        }
    }
}

#[cfg(test)]
mod tests;
