//! Decisions by a ranking of the nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_api::reason::Reason;

use super::{Problem, selection_failed, verdict};
use crate::cluster::{Cluster, Departure};
use crate::explanation::{Explanation, NodeVerdict};
use crate::fragmentation::LossBasis;
use crate::placement::Placement;
use crate::quota::LeastCharges;
use crate::ranking::{DeviceScore, Evaluation, RankedNode, Ranking};
use crate::score::{NodeRunnerUp, NodeScore};
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

/// The evaluation of the nodes of a ranking that have changed.
struct Update<'a> {
    /// The input without the limits of quotas.
    beyond_limits: SearchInput<'a>,
    /// Whether another turn goes on with what this one has found.
    is_kept: bool,
    /// Whether the next node is searched fully also without units left to searches.
    needs_full_search: bool,
    /// What this turn has found by searches.
    searched: SearchedNodes,
    /// Nodes whose search was cut short. Other decisions have more left of their turns.
    unknown: BTreeSet<String>,
}

/// Nodes on which quotas refuse the devices of a ranking, with the verdicts.
type Refused = BTreeMap<String, Arc<NodeVerdict>>;

impl Cluster {
    /// Decides like an evaluation of all nodes, by evaluating those that have changed since the last decision for equal
    /// claims. Returns `None` when no ranking can decide: for containers with devices of allocated claims.
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
        let room = problem.ranked_room();
        let feasible = self
            .rankings
            .with(input, problem.node_policy, room, |ranking| {
                match self.update(ranking, problem, turn) {
                    Ok(()) => {}
                    Err(Undecided::Suspended(suspended)) => return Some(Err(suspended.into())),
                    Err(Undecided::Rejected(_)) => return None,
                }
                let (feasible, refused) = match self.best_two(ranking, problem, turn) {
                    Ok(best) => best,
                    Err(Undecided::Suspended(suspended)) => return Some(Err(suspended.into())),
                    Err(Undecided::Rejected(_)) => return None,
                };
                Some(match feasible.is_empty() {
                    true => {
                        let verdicts = self.verdicts(ranking, &refused, problem, turn);
                        Err(Explanation::of_nodes(verdicts).into())
                    }
                    false => Ok(feasible.into_iter()),
                })
            })?;
        let mut feasible = match feasible {
            Ok(feasible) => feasible,
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

    /// Evaluates the nodes that have changed; after a suspension, those that are left.
    ///
    /// # Errors
    /// When a selector cannot be evaluated, and when the turn is too short.
    fn update(
        &self,
        ranking: &mut Ranking,
        problem: &Problem<'_>,
        turn: &mut Turn,
    ) -> Result<(), Undecided> {
        let all = self.candidates(problem.pod_request).map(str::to_owned);
        let mut changed = ranking.take_changed(all);
        // Another turn would search again what is found in a simulation, or for a decision of which nothing is kept.
        let is_simulated = *self.presumed_gone() != Departure::default();
        let mut update = Update {
            beyond_limits: SearchInput {
                exceeds_limits: true,
                ..problem.input.clone()
            },
            is_kept: !is_simulated && problem.pod_request.searched.is_some(),
            needs_full_search: !is_simulated,
            searched: SearchedNodes::default(),
            unknown: BTreeSet::new(),
        };
        let mut updated = Ok(());
        while let Some(node) = changed.pop_first() {
            updated = self.update_node(&node, ranking, &mut update, problem, turn);
            if updated.is_err() {
                changed.insert(node);
                break;
            }
        }
        let Update {
            searched,
            mut unknown,
            ..
        } = update;
        changed.append(&mut unknown);
        ranking.put_back(changed);
        if let Err(Undecided::Suspended(suspended)) = &mut updated {
            suspended.searched = searched;
        }
        updated
    }

    /// Evaluates a node that has changed.
    ///
    /// # Errors
    /// As [`Self::update`].
    fn update_node(
        &self,
        node: &str,
        ranking: &mut Ranking,
        update: &mut Update<'_>,
        problem: &Problem<'_>,
        turn: &mut Turn,
    ) -> Result<(), Undecided> {
        if !self.is_candidate(node, problem.pod_request) {
            ranking.remove(node);
            return Ok(());
        }
        let least = self.least_charges(node, problem, turn)?;
        if let Some(known) = self.known_evaluation(node, problem) {
            ranking.set(node, known, least);
            return Ok(());
        }
        if update.is_kept
            && let Some(work) = turn.suspends_evaluation()
        {
            return Err(Suspended::from(work).into());
        }
        let is_full = std::mem::take(&mut update.needs_full_search)
            || update.is_kept
            || !turn.is_out_of_searches();
        let effort = match is_full {
            true => Effort::Full,
            false => Effort::FirstPath,
        };
        let left = turn.left_to_searches();
        let evaluated =
            self.evaluate_devices(node, problem, &update.beyond_limits, effort, turn)?;
        let evaluation = match evaluated {
            Ok(node) => Ok(node.devices),
            // The verdicts on devices would be most of the memory.
            Err(verdict) => Err(Arc::new(NodeVerdict {
                devices: Vec::new(),
                ..verdict
            })),
        };
        if update.is_kept {
            turn.note_progress();
        }
        if update.is_kept
            && turn.left_to_searches() != left
            && let Some(pools) = self.usable_pools_of(node)
        {
            let basis = self.loss_basis(node, problem);
            let state = (&pools[..], basis);
            update
                .searched
                .note_evaluation(node, state, evaluation.clone());
        }
        let gave_up = |verdict: &Arc<NodeVerdict>| verdict.reason == Reason::SearchLimit;
        if effort == Effort::FirstPath && evaluation.as_ref().is_err_and(gave_up) {
            update.unknown.insert(node.to_owned());
        }
        ranking.set(node, evaluation, least);
        Ok(())
    }

    /// Returns what the claims are charged on a node at least, if quotas limit the pod.
    fn least_charges(
        &self,
        node: &str,
        problem: &Problem<'_>,
        turn: &mut Turn,
    ) -> Result<Option<LeastCharges>, Undecided> {
        if problem.input.budgets.is_empty() {
            return Ok(None);
        }
        let pools = self.pools_of_node(node).filter_map(|(name, pool)| {
            let (pool, usage) = pool.state.as_ref().ok()?;
            Some(PoolView { name, pool, usage })
        });
        let pools: Vec<PoolView<'_>> = pools.collect();
        let state = NodeState {
            pools: &pools,
            loss: None,
        };
        search::least_charges(&problem.input, state, &self.selectors, turn)
            .map_err(|error| selection_failed(&error))
    }

    /// Returns what an earlier turn has found on a node that is as it was then. A gang plans its first pods again in each turn,
    /// and the nodes that they change would be searched for its other pods again.
    fn known_evaluation(&self, node: &str, problem: &Problem<'_>) -> Option<Evaluation> {
        let searched = problem.pod_request.searched.as_ref()?;
        let pools = self.usable_pools_of(node)?;
        let basis = self.loss_basis(node, problem);
        searched.evaluation(node, (&pools, basis)).cloned()
    }

    /// Returns what the loss of placements depends on, if a policy needs it.
    fn loss_basis(&self, node: &str, problem: &Problem<'_>) -> Option<LossBasis> {
        let needs_loss = problem.needs_loss();
        needs_loss.then(|| self.basis_of_loss(node))
    }

    /// Returns the pools of a node if all of them are usable.
    pub(super) fn usable_pools_of(&self, node: &str) -> Option<Vec<PoolView<'_>>> {
        let pools = self.pools_of_node(node).map(|(name, pool)| {
            let (pool, usage) = pool.state.as_ref().ok()?;
            Some(PoolView { name, pool, usage })
        });
        pools.collect()
    }

    /// Returns why each node is not feasible, if that is needed.
    fn verdicts(
        &self,
        ranking: &Ranking,
        refused: &Refused,
        problem: &Problem<'_>,
        turn: &mut Turn,
    ) -> Vec<Arc<NodeVerdict>> {
        if !problem.needs_verdicts {
            return Vec::new();
        }
        let verdict = |(node, ranked): (&str, &RankedNode)| {
            if let Err(obstacle) = self.admits(node, problem, turn) {
                return Some(Arc::new(verdict(node, Reason::NodeUnfit, obstacle)));
            }
            let least = ranked.least.as_ref();
            let allowed = least.map_or(Ok(()), |least| least.check(problem.input.budgets));
            // While a quota is used up, free devices do not help.
            if let Err(rejection) = allowed {
                let closeness = (rejection.closeness(), rejection.free());
                return Some(Arc::new(NodeVerdict {
                    closeness,
                    ..verdict(node, rejection.reason(), rejection.detail(node))
                }));
            }
            let refused = refused.get(node);
            refused.or(ranked.evaluation.as_ref().err()).map(Arc::clone)
        };
        ranking.nodes().filter_map(verdict).collect()
    }

    /// Returns the two feasible nodes with the best scores, of equal scores the first names, and why quotas refused others.
    fn best_two(
        &self,
        ranking: &Ranking,
        problem: &Problem<'_>,
        turn: &mut Turn,
    ) -> Result<(Vec<Feasible>, Refused), Undecided> {
        // The pod ranks these nodes differently.
        let request = problem.pod_request;
        let avoided = request.avoided_nodes.iter();
        let special: BTreeSet<&str> = avoided
            .chain(&request.demand.nominated_node)
            .map(String::as_str)
            .collect();
        let mut refused = Refused::new();
        let mut nodes: Vec<(&str, DeviceScore)> = Vec::new();
        let budgets = problem.input.budgets;
        let others = ranking.feasible(budgets);
        for (node, devices) in others.filter(|(node, _)| !special.contains(node)) {
            if self.admits(node, problem, turn).is_err() {
                continue;
            }
            // Preferences compare all nodes on which the pod fits.
            if problem.preferences.is_some() {
                nodes.push((node, devices));
            } else if let Some(devices) =
                self.within_limits((node, devices), problem, &mut refused, turn)?
            {
                nodes.push((node, devices));
                if nodes.len() == 2 {
                    break;
                }
            }
        }
        for node in &special {
            let Some(ranked) = ranking.get(node) else {
                continue;
            };
            let least = ranked.least.as_ref();
            if let Ok(devices) = ranked.evaluation
                && least.is_none_or(|least| least.check(budgets).is_ok())
                && self.admits(node, problem, turn).is_ok()
                && let Some(devices) =
                    self.within_limits((node, devices), problem, &mut refused, turn)?
            {
                nodes.push((node, devices));
            }
        }
        let mut feasible: Vec<Feasible> = nodes
            .into_iter()
            .map(|(node, devices)| Feasible {
                name: node.to_owned(),
                devices,
                score: problem.score(node, devices),
            })
            .collect();
        let names: Vec<&str> = feasible.iter().map(|node| node.name.as_str()).collect();
        let preferences = self.by_preferences(problem, &names);
        for (node, preference) in feasible.iter_mut().zip(preferences) {
            node.score.preference = preference;
        }
        feasible.sort_by(|one, other| {
            let by_score = other.score.cmp(&one.score);
            by_score.then_with(|| one.name.cmp(&other.name))
        });
        if problem.preferences.is_none() {
            feasible.truncate(2);
            return Ok((feasible, refused));
        }
        let mut best = Vec::new();
        for mut node in feasible {
            let before = (node.name.as_str(), node.devices);
            if let Some(devices) = self.within_limits(before, problem, &mut refused, turn)? {
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
        Ok((best, refused))
    }

    /// Returns the score of a node by the devices that the quotas allow there. Notes why there are none.
    fn within_limits(
        &self,
        (node, devices): (&str, DeviceScore),
        problem: &Problem<'_>,
        refused: &mut Refused,
        turn: &mut Turn,
    ) -> Result<Option<DeviceScore>, Undecided> {
        if problem.input.budgets.is_empty() {
            return Ok(Some(devices));
        }
        let effort = match turn.is_out_of_searches() && !refused.is_empty() {
            true => Effort::FirstPath,
            false => Effort::Full,
        };
        Ok(match self.evaluate_node(node, problem, effort, turn)? {
            Ok(evaluated) => Some(evaluated.devices),
            Err(verdict) => {
                refused.insert(node.to_owned(), Arc::new(verdict));
                None
            }
        })
    }
}
