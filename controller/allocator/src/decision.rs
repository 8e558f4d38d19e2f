//! The decision for one pod: the node and the devices, or why there are none.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use drava_api::Quantity;
use drava_api::config::NodePlacementPolicy;
use drava_api::reason::Reason;

use crate::cluster::{Cluster, PoolState};
use crate::explanation::{Explanation, NodeVerdict};
use crate::node::add;
use crate::node::neighbors::Exclusions;
use crate::placement::{ClaimPlacement, DevicePlacement, Placement, Policies};
use crate::pod_request::PodRequest;
use crate::pool::PoolProblem;
use crate::score::{GpuRanking, NodeRanking, NodeRunnerUp, NodeScore, allocated_ppm, node_score};
use crate::search::candidates::SelectionError;
use crate::search::input::{PoolView, SearchInput};
use crate::search::tentative_allocation::SelectedDevice;
use crate::search::{self, Outcome, STEP_LIMIT};

mod closest_rejection;

use closest_rejection::closest_rejection;

/// A pool by name, or why it is excluded.
type NamedView<'a> = (&'a str, Result<PoolView<'a>, &'a PoolProblem>);

/// A node on which the pod fits.
struct FeasibleNode<'a> {
    name: &'a str,
    pools: Vec<PoolView<'a>>,
    selected: Vec<SelectedDevice>,
    allocated_ppm: u32,
    score: NodeScore,
}

impl Cluster {
    /// Decides on the node and the devices of a pod. A pod without claims fits on nodes without GPUs, too.
    ///
    /// # Errors
    /// Why no node is feasible.
    pub fn decide(
        &self,
        pod_request: &PodRequest,
        policies: Policies,
    ) -> Result<Placement, Explanation> {
        let resolved = self.with_policies(pod_request);
        let pod_request = resolved.as_ref().unwrap_or(pod_request);
        let with_views = |node| (node, views(self.pools_of_node(node)));
        if pod_request.claims.is_empty() {
            let nodes = self.node_names();
            self.decide_among(nodes.map(with_views), pod_request, policies)
        } else {
            let nodes = self.nodes_with_pools();
            self.decide_among(nodes.map(with_views), pod_request, policies)
        }
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
        let resolved = self.with_policies(pod_request);
        let pod_request = resolved.as_ref().unwrap_or(pod_request);
        let pools = views(self.pools_of_node(node));
        self.decide_among(std::iter::once((node, pools)), pod_request, policies)
    }

    fn decide_among<'a>(
        &'a self,
        nodes: impl Iterator<Item = (&'a str, Vec<NamedView<'a>>)>,
        pod_request: &PodRequest,
        policies: Policies,
    ) -> Result<Placement, Explanation> {
        let containers = pod_request.containers(|pool, device| self.gpu_of(pool, device));
        let namespace = pod_request.claims.first();
        let budgets = namespace.map(|claim| self.budgets(&claim.id.namespace));
        let input = SearchInput {
            claims: &pod_request.claims,
            containers: &containers,
            gpu_policy: policies.gpu,
            budgets: budgets.as_deref().unwrap_or_default(),
        };
        let node_policy = node_policy(pod_request, policies);
        let exclusions = self.exclusions(&pod_request.uid, &pod_request.demand);
        let mut verdicts = Vec::new();
        let mut best: Option<FeasibleNode<'_>> = None;
        let mut runner_up: Option<FeasibleNode<'_>> = None;
        for (node, views) in nodes {
            if let Err(obstacle) = self.admits(node, pod_request, &exclusions) {
                verdicts.push(verdict(node, Reason::NodeUnfit, obstacle));
                continue;
            }
            match self.evaluate_node(node, views, pod_request, &input, node_policy)? {
                Err(verdict) => verdicts.push(verdict),
                // Nodes are sorted by name: of equal scores the first name is kept.
                Ok(node) if best.as_ref().is_none_or(|best| node.score > best.score) => {
                    runner_up = best.replace(node);
                }
                Ok(node) => {
                    if runner_up
                        .as_ref()
                        .is_none_or(|runner_up| node.score > runner_up.score)
                    {
                        runner_up = Some(node);
                    }
                }
            }
        }
        let Some(best) = best else {
            return Err(Explanation::Nodes(verdicts));
        };
        let ranking = NodeRanking {
            policy: node_policy,
            allocated_ppm: best.allocated_ppm,
            score: best.score,
            runner_up: runner_up.map(|node| NodeRunnerUp {
                node: node.name.to_owned(),
                allocated_ppm: node.allocated_ppm,
                score: node.score,
            }),
        };
        let gpu_rankings = search::rank_gpus(&input, &best.pools, &self.selectors, &best.selected)
            .map_err(|error| selection_failed(&error))?;
        Ok(best.into_placement(pod_request, ranking, gpu_rankings))
    }

    fn evaluate_node<'a>(
        &'a self,
        node: &'a str,
        views: Vec<NamedView<'a>>,
        pod_request: &PodRequest,
        input: &SearchInput<'_>,
        node_policy: NodePlacementPolicy,
    ) -> Result<Result<FeasibleNode<'a>, NodeVerdict>, Explanation> {
        let verdict = |reason, detail| verdict(node, reason, detail);
        let mut pools = Vec::new();
        let mut problem = None;
        for (name, view) in views {
            match view {
                Ok(view) => pools.push(view),
                Err(found) => problem = Some(format!("pool {name}: {found}")),
            }
        }
        // All devices of a node are unknown while one of its pools is.
        if let Some(problem) = &problem
            && pod_request.requests_all()
        {
            return Ok(Err(verdict(Reason::PoolIncomplete, problem.clone())));
        }
        let outcome = search::search(input, &pools, &self.selectors)
            .map_err(|error| selection_failed(&error))?;
        Ok(match (outcome, problem) {
            (Outcome::Found(selected, proximity), _) => {
                let allocated_ppm = node_allocated_ppm(&pools);
                let alternatives = selected
                    .iter()
                    .map(|selected| selected.index.alternative)
                    .sum();
                let nominated = pod_request.demand.nominated_node.as_deref();
                Ok(FeasibleNode {
                    name: node,
                    score: NodeScore {
                        is_not_avoided: !pod_request.avoided_nodes.contains(node),
                        is_nominated: nominated == Some(node),
                        alternatives: Reverse(alternatives),
                        proximity: Reverse(proximity),
                        policy_score: node_score(node_policy, allocated_ppm),
                    },
                    allocated_ppm,
                    pools,
                    selected,
                })
            }
            (_, Some(problem)) => Err(verdict(Reason::PoolIncomplete, problem)),
            (Outcome::LimitReached, None) => Err(verdict(
                Reason::SearchLimit,
                format!("no solution within {STEP_LIMIT} steps"),
            )),
            (Outcome::NotFound(rejections), None) => {
                Err(closest_rejection(node, &pools, &rejections))
            }
        })
    }

    fn admits(
        &self,
        node: &str,
        pod_request: &PodRequest,
        exclusions: &Exclusions,
    ) -> Result<(), String> {
        let info = self.node(node).ok_or("node does not exist")?;
        for (claim, selector) in &pod_request.pinned_by {
            if !info.selected_by(node, selector) {
                return Err(format!("claim {claim} is allocated on another node"));
            }
        }
        let mut requested = self.requested_on(node, &pod_request.uid);
        info.admits(node, &pod_request.demand, &requested)?;
        exclusions.admit(node, info)?;
        self.admits_volumes(node, info, &pod_request.demand)?;
        let mut before = &pod_request.demand;
        for sharer in &pod_request.sharers {
            add(&mut requested, &before.requests);
            info.admits(node, sharer, &requested)?;
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

fn views<'a>(pools: impl Iterator<Item = (&'a str, &'a PoolState)>) -> Vec<NamedView<'a>> {
    pools
        .map(|(name, pool)| {
            let view = pool
                .state
                .as_ref()
                .map(|(pool, usage)| PoolView { name, pool, usage });
            (name, view)
        })
        .collect()
}

fn selection_failed(error: &SelectionError) -> Explanation {
    Explanation::rejected(Reason::SelectorError, error.to_string())
}

/// Policy between nodes: that of the first claim with one, else the controller's.
fn node_policy(pod_request: &PodRequest, policies: Policies) -> NodePlacementPolicy {
    pod_request
        .claims
        .iter()
        .find_map(|claim| claim.placement.node)
        .unwrap_or(policies.node)
}

/// Returns the allocated fraction of the node's GPU memory, ppm.
fn node_allocated_ppm(pools: &[PoolView<'_>]) -> u32 {
    let (mut allocated, mut total) = (Quantity::ZERO, Quantity::ZERO);
    for view in pools {
        let gpus: BTreeSet<_> = view.pool.devices.iter().map(|device| &device.gpu).collect();
        for gpu in gpus {
            let memory = view.usage.gpu_memory(view.pool, gpu);
            allocated += memory.allocated.min(memory.total);
            total += memory.total;
        }
    }
    allocated_ppm(allocated, total)
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
