//! Decisions by a ranking of the nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_api::reason::Reason;

use super::{Problem, node_memory, selection_failed, verdict};
use crate::cluster::{Cluster, Departure};
use crate::explanation::{Explanation, NodeVerdict};
use crate::fragmentation::LossBasis;
use crate::placement::Placement;
use crate::quota::LeastCharges;
use crate::ranking::{DeviceScore, Evaluation, Next, NodeSummary, RankedNode, Ranking, Summaries};
use crate::score::{NodeRunnerUp, NodeScore, allocated_ppm};
use crate::search::input::{NodeState, PoolView, SearchInput};
use crate::search::{self, Effort};
use crate::searched::SearchedNodes;
use crate::searched::{Suspended, Undecided};
use crate::turn::Turn;

/// A node on which the pod fits.
struct Feasible {
    name: String,
    devices: DeviceScore,
    score: NodeScore,
}

/// A decision by a ranking.
struct ByRanking<'a> {
    cluster: &'a Cluster,
    ranking: &'a mut Ranking,
    summaries: &'a Summaries,
    problem: &'a Problem<'a>,
    turn: &'a mut Turn,
    /// The input without the limits of quotas.
    beyond_limits: SearchInput<'a>,
    /// Whether another turn goes on with what this one has found.
    is_kept: bool,
    /// Whether the next node is searched fully also without units left to searches.
    needs_full_search: bool,
    /// What this turn has found by searches.
    searched: SearchedNodes,
    /// Nodes on which quotas refuse the devices of the ranking, with the verdicts.
    refused: BTreeMap<String, Arc<NodeVerdict>>,
}

impl Cluster {
    /// Decides like an evaluation of all nodes, by evaluating those that may be better than the best ones that decisions for equal
    /// claims have found. Returns `None` when no ranking can decide: for containers with devices of allocated claims.
    ///
    /// A ranking knows nothing of the usage of quotas. The best nodes that it finds are evaluated with their limits, which may
    /// leave other devices of a node than the best ones; the order of the nodes is that without limits then.
    pub(super) fn decide_by_ranking(
        &self,
        problem: &Problem<'_>,
        turn: &mut Turn,
    ) -> Option<Result<Placement, Undecided>> {
        let input = &problem.input;
        let mut containers = input.containers.iter();
        if containers.any(|container| !container.gpus.is_empty()) {
            return None;
        }
        // Another turn would search again what is found in a simulation, or for a decision of which nothing is kept.
        let is_simulated = *self.presumed_gone() != Departure::default();
        let summarize = |node: &str| self.summary(node);
        let room = problem.ranked_room();
        let node_policy = problem.node_policy;
        let decided =
            (self.rankings).with(input, node_policy, room, summarize, |ranking, summaries| {
                let mut decision = ByRanking {
                    cluster: self,
                    ranking,
                    summaries,
                    problem,
                    turn,
                    beyond_limits: SearchInput {
                        exceeds_limits: true,
                        ..input.clone()
                    },
                    is_kept: !is_simulated && problem.pod_request.searched.is_some(),
                    needs_full_search: !is_simulated,
                    searched: SearchedNodes::default(),
                    refused: BTreeMap::new(),
                };
                match decision.best_two() {
                    Ok(best) if best.is_empty() => decision.verdicts().map(Err),
                    Ok(best) => Some(Ok(best)),
                    Err(undecided) => decision.undecided(undecided).map(Err),
                }
            })?;
        let mut feasible = match decided {
            Ok(feasible) => feasible.into_iter(),
            Err(undecided) => return Some(Err(undecided)),
        };
        let best = feasible.next()?;
        let runner_up = feasible.next().map(|node| NodeRunnerUp {
            node: node.name,
            allocated_ppm: node.devices.allocated_ppm,
            score: node.score,
        });
        let evaluated = match self.evaluate_node(&best.name, problem, Effort::Full, turn) {
            Ok(evaluated) => evaluated.ok(),
            Err(Undecided::Suspended(suspended)) => return Some(Err(suspended.into())),
            Err(Undecided::Rejected(_)) => return None,
        };
        let is_current = evaluated
            .as_ref()
            .is_some_and(|node| node.devices == best.devices);
        debug_assert!(is_current, "the ranking of {} is out of date", best.name);
        // The evaluation of one node knows nothing of preferences.
        let mut evaluated = evaluated?;
        evaluated.score = best.score;
        Some(self.placement(evaluated, runner_up, problem, turn))
    }

    /// Returns what a ranking knows of a node before its devices are evaluated; `None` without node and pools.
    fn summary(&self, node: &str) -> Option<NodeSummary> {
        let is_node = self.node(node).is_some();
        let has_pools = self.has_pools(node);
        if !is_node && !has_pools {
            return None;
        }
        let pools = self.views_on(node);
        let memory = node_memory(&pools);
        let free = pools
            .iter()
            .map(|view| view.usage.most_free_memory(view.pool));
        Some(NodeSummary {
            is_node,
            has_pools,
            allocated_ppm: allocated_ppm(memory.allocated, memory.total),
            free_memory: free.max().flatten(),
        })
    }

    /// Returns the usable pools of a node.
    fn views_on(&self, node: &str) -> Vec<PoolView<'_>> {
        let pools = self.pools_of_node(node).filter_map(|(name, pool)| {
            let (pool, usage) = pool.state.as_ref().ok()?;
            Some(PoolView { name, pool, usage })
        });
        pools.collect()
    }

    /// Returns the pools of a node if all of them are usable.
    pub(crate) fn usable_pools_of(&self, node: &str) -> Option<Vec<PoolView<'_>>> {
        let pools = self.pools_of_node(node).map(|(name, pool)| {
            let (pool, usage) = pool.state.as_ref().ok()?;
            Some(PoolView { name, pool, usage })
        });
        pools.collect()
    }
}

impl ByRanking<'_> {
    /// Returns the outcome of an evaluation that failed; `None` if a selector cannot be evaluated, which all nodes decide on.
    fn undecided(self, undecided: Undecided) -> Option<Undecided> {
        match undecided {
            Undecided::Suspended(suspended) => Some(Undecided::Suspended(Suspended {
                searched: self.searched,
                ..suspended
            })),
            Undecided::Rejected(_) => None,
        }
    }

    /// Evaluates the devices of a node.
    ///
    /// # Errors
    /// When a selector cannot be evaluated, and when the turn is too short.
    fn evaluate(&mut self, node: &Arc<str>) -> Result<(), Undecided> {
        let least = self.least_charges(node)?;
        if let Some(known) = self.known_evaluation(node) {
            self.ranking.set(node, known, least);
            return Ok(());
        }
        if self.is_kept
            && let Some(work) = self.turn.suspends_evaluation()
        {
            return Err(Suspended::from(work).into());
        }
        let is_full = std::mem::take(&mut self.needs_full_search)
            || self.is_kept
            || !self.turn.is_out_of_searches();
        let effort = match is_full {
            true => Effort::Full,
            false => Effort::FirstPath,
        };
        let left = self.turn.left_to_searches();
        let evaluated = self.cluster.evaluate_devices(
            node,
            self.problem,
            &self.beyond_limits,
            effort,
            self.turn,
        )?;
        let evaluation = match evaluated {
            Ok(node) => Ok(node.devices),
            // The verdicts on devices would be most of the memory.
            Err(verdict) => Err(Arc::new(NodeVerdict {
                devices: Vec::new(),
                ..verdict
            })),
        };
        if self.is_kept {
            self.turn.note_progress();
        }
        if self.is_kept
            && self.turn.left_to_searches() != left
            && let Some(pools) = self.cluster.usable_pools_of(node)
        {
            let state = (&pools[..], self.loss_basis(node));
            self.searched
                .note_evaluation(node, state, evaluation.clone());
        }
        let gave_up = |verdict: &Arc<NodeVerdict>| verdict.reason == Reason::SearchLimit;
        if effort == Effort::FirstPath && evaluation.as_ref().is_err_and(gave_up) {
            // Other decisions have more left of their turns.
            self.ranking.evaluate_again(node, self.summaries);
        }
        self.ranking.set(node, evaluation, least);
        Ok(())
    }

    /// Returns what the claims are charged on a node at least, if quotas limit the pod.
    fn least_charges(&mut self, node: &str) -> Result<Option<LeastCharges>, Undecided> {
        let input = &self.problem.input;
        if input.budgets.is_empty() {
            return Ok(None);
        }
        let state = NodeState {
            pools: &self.cluster.views_on(node),
            loss: None,
        };
        search::least_charges(input, state, &self.cluster.selectors, self.turn)
            .map_err(|error| selection_failed(&error))
    }

    /// Returns what an earlier turn has found on a node that is as it was then. A gang plans its first pods again in each turn,
    /// and the nodes that they change would be searched for its other pods again.
    fn known_evaluation(&self, node: &str) -> Option<Evaluation> {
        let searched = self.problem.pod_request.searched.as_ref()?;
        let pools = self.cluster.usable_pools_of(node)?;
        let state = (&pools[..], self.loss_basis(node));
        searched.evaluation(node, state).cloned()
    }

    /// Returns what the loss of placements depends on, if a policy needs it.
    fn loss_basis(&self, node: &str) -> Option<LossBasis> {
        let needs_loss = self.problem.needs_loss();
        needs_loss.then(|| self.cluster.basis_of_loss(node))
    }

    /// Returns why each node is not feasible, if that is needed; `None` as [`Self::undecided`].
    fn verdicts(mut self) -> Option<Undecided> {
        if !self.problem.needs_verdicts {
            return Some(Explanation::of_nodes(Vec::new()).into());
        }
        for node in self.ranking.all_unknown(self.summaries) {
            if let Err(undecided) = self.evaluate(&node) {
                return self.undecided(undecided);
            }
            debug_assert!(
                self.ranking
                    .get(&node)
                    .is_some_and(|ranked| ranked.evaluation.is_err()),
                "the summary of {node} lacks free memory"
            );
        }
        let budgets = self.problem.input.budgets;
        let verdict = |(node, ranked): (&str, &RankedNode)| {
            if let Err(obstacle) = self.cluster.admits(node, self.problem, self.turn) {
                return Some(Arc::new(verdict(node, Reason::NodeUnfit, obstacle)));
            }
            let least = ranked.least.as_ref();
            let allowed = least.map_or(Ok(()), |least| least.check(budgets));
            // While a quota is used up, free devices do not help.
            if let Err(rejection) = allowed {
                let closeness = (rejection.closeness(), rejection.free());
                return Some(Arc::new(NodeVerdict {
                    closeness,
                    ..verdict(node, rejection.reason(), rejection.detail(node))
                }));
            }
            let refused = self.refused.get(node);
            refused.or(ranked.evaluation.as_ref().err()).map(Arc::clone)
        };
        let verdicts = self.ranking.nodes().filter_map(verdict).collect();
        Some(Explanation::of_nodes(verdicts).into())
    }

    /// Returns the two feasible nodes with the best scores, of equal scores the first names.
    ///
    /// # Errors
    /// When a selector cannot be evaluated, and when the turn is too short.
    fn best_two(&mut self) -> Result<Vec<Feasible>, Undecided> {
        let problem = self.problem;
        // The pod ranks these nodes differently.
        let request = problem.pod_request;
        let avoided = request.avoided_nodes.iter();
        let special: BTreeSet<&str> = avoided
            .chain(&request.demand.nominated_node)
            .map(String::as_str)
            .collect();
        for node in &special {
            if let Some(node) = self.ranking.unknown(node, self.summaries) {
                self.evaluate(&node)?;
            }
        }
        let mut nodes: Vec<(Arc<str>, DeviceScore)> = Vec::new();
        let budgets = problem.input.budgets;
        let mut last = None;
        while let Some(next) = self.ranking.next(last.as_ref(), self.summaries, budgets) {
            let (score, node) = match next {
                Next::Ranked(position) => last.insert(position),
                Next::Unknown(node) => {
                    self.evaluate(&node)?;
                    continue;
                }
            };
            let (node, devices) = (Arc::clone(node), score.0);
            if special.contains(&*node) || self.cluster.admits(&node, problem, self.turn).is_err() {
                continue;
            }
            // Preferences compare all nodes on which the pod fits.
            if problem.preferences.is_some() {
                nodes.push((node, devices));
            } else if let Some(devices) = self.within_limits(&node, devices)? {
                nodes.push((node, devices));
                if nodes.len() == 2 {
                    break;
                }
            }
        }
        for node in special {
            let Some(ranked) = self.ranking.get(node) else {
                continue;
            };
            let least = ranked.least.as_ref();
            if let Ok(devices) = ranked.evaluation
                && least.is_none_or(|least| least.check(budgets).is_ok())
                && self.cluster.admits(node, problem, self.turn).is_ok()
                && let Some(devices) = self.within_limits(node, devices)?
            {
                nodes.push((node.into(), devices));
            }
        }
        let mut feasible: Vec<Feasible> = nodes
            .into_iter()
            .map(|(node, devices)| Feasible {
                name: node.to_string(),
                devices,
                score: problem.score(&node, devices),
            })
            .collect();
        let names: Vec<&str> = feasible.iter().map(|node| node.name.as_str()).collect();
        let preferences = self.cluster.by_preferences(problem, &names);
        for (node, preference) in feasible.iter_mut().zip(preferences) {
            node.score.preference = preference;
        }
        feasible.sort_by(|one, other| {
            let by_score = other.score.cmp(&one.score);
            by_score.then_with(|| one.name.cmp(&other.name))
        });
        if problem.preferences.is_none() {
            feasible.truncate(2);
            return Ok(feasible);
        }
        let mut best = Vec::new();
        for mut node in feasible {
            if let Some(devices) = self.within_limits(&node.name, node.devices)? {
                node.devices = devices;
                node.score = NodeScore {
                    preference: node.score.preference,
                    ..problem.score(&node.name, devices)
                };
                best.push(node);
                if best.len() == 2 {
                    break;
                }
            }
        }
        Ok(best)
    }

    /// Returns the score of a node by the devices that the quotas allow there. Notes why there are none.
    fn within_limits(
        &mut self,
        node: &str,
        devices: DeviceScore,
    ) -> Result<Option<DeviceScore>, Undecided> {
        if self.problem.input.budgets.is_empty() {
            return Ok(Some(devices));
        }
        let effort = match self.turn.is_out_of_searches() && !self.refused.is_empty() {
            true => Effort::FirstPath,
            false => Effort::Full,
        };
        let evaluated = self
            .cluster
            .evaluate_node(node, self.problem, effort, self.turn)?;
        Ok(match evaluated {
            Ok(evaluated) => Some(evaluated.devices),
            Err(verdict) => {
                self.refused.insert(node.to_owned(), Arc::new(verdict));
                None
            }
        })
    }
}
