//! Decisions by a ranking of the nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use drava_api::reason::Reason;

use super::{Problem, verdict};
use crate::cluster::{Cluster, Departure};
use crate::explanation::{Explanation, NodeVerdict};
use crate::placement::Placement;
use crate::ranking::{DeviceScore, Evaluation, Ranking};
use crate::score::{NodeRunnerUp, NodeScore};
use crate::search::Effort;
use crate::turn::{self, is_suspended};

/// A node on which the pod fits.
struct Feasible {
    name: String,
    devices: DeviceScore,
    score: NodeScore,
}

impl Cluster {
    /// Decides like an evaluation of all nodes, by evaluating those that have changed since the last decision for equal
    /// claims. Returns `None` when no ranking can decide: with quotas, and for containers with devices of allocated claims.
    pub(super) fn decide_by_ranking(
        &self,
        problem: &Problem<'_>,
    ) -> Option<Result<Placement, Explanation>> {
        let input = &problem.input;
        let mut containers = input.containers.iter();
        if !input.budgets.is_empty() || containers.any(|container| !container.gpus.is_empty()) {
            return None;
        }
        let room = problem.ranked_room();
        let feasible = self
            .rankings
            .with(input, problem.node_policy, room, |ranking| {
                match self.update(ranking, problem) {
                    Err(suspended) if is_suspended() => return Some(Err(suspended)),
                    updated => updated.ok()?,
                }
                let feasible = self.best_two(ranking, problem);
                Some(match feasible.is_empty() {
                    true => Err(Explanation::of_nodes(self.verdicts(ranking, problem))),
                    false => Ok(feasible.into_iter()),
                })
            })?;
        let mut feasible = match feasible {
            Ok(feasible) => feasible,
            Err(explanation) => return Some(Err(explanation)),
        };
        let best = feasible.next()?;
        let runner_up = feasible.next().map(|node| NodeRunnerUp {
            node: node.name,
            allocated_ppm: node.devices.allocated_ppm,
            score: node.score,
        });
        let evaluated = self.evaluate_node(&best.name, problem, Effort::Full);
        let evaluated = evaluated.ok()?.ok();
        let is_current = evaluated
            .as_ref()
            .is_some_and(|node| node.devices == best.devices);
        debug_assert!(is_current, "the ranking of {} is out of date", best.name);
        // The evaluation of one node knows nothing of preferences.
        let mut evaluated = evaluated?;
        evaluated.score = best.score;
        Some(self.placement(evaluated, runner_up, problem))
    }

    /// Evaluates the nodes that have changed; after a suspension, those that are left.
    ///
    /// # Errors
    /// When a selector cannot be evaluated.
    fn update(&self, ranking: &mut Ranking, problem: &Problem<'_>) -> Result<(), Explanation> {
        let all = self.candidates(problem.pod_request).map(str::to_owned);
        let mut changed = ranking.take_changed(all);
        // Others of the same gang may have used up the turn.
        let mut has_progress = false;
        while let Some(node) = changed.pop_first() {
            if !self.is_candidate(&node, problem.pod_request) {
                ranking.remove(&node);
                continue;
            }
            // What a simulation finds is not kept, so another turn would search the same again.
            let is_simulated = *self.presumed_gone() != Departure::default();
            if !is_simulated && has_progress && !turn::continues_to_search() {
                changed.insert(node);
                ranking.put_back(changed);
                return Err(Explanation::of_nodes(Vec::new()));
            }
            let effort = match is_simulated && turn::has_searched() {
                true => Effort::FirstPath,
                false => Effort::Full,
            };
            has_progress = true;
            let evaluated = match self.evaluate_node(&node, problem, effort) {
                Ok(evaluated) => evaluated,
                Err(failure) => {
                    changed.insert(node);
                    ranking.put_back(changed);
                    return Err(failure);
                }
            };
            let evaluation = match evaluated {
                Ok(node) => Ok(node.devices),
                // The verdicts on devices would be most of the memory.
                Err(verdict) => Err(Arc::new(NodeVerdict {
                    devices: Vec::new(),
                    ..verdict
                })),
            };
            ranking.set(&node, evaluation);
        }
        Ok(())
    }

    /// Returns why each node is not feasible, if that is needed.
    fn verdicts(&self, ranking: &Ranking, problem: &Problem<'_>) -> Vec<Arc<NodeVerdict>> {
        if !problem.needs_verdicts {
            return Vec::new();
        }
        let verdict = |(node, evaluation): (&str, &Evaluation)| {
            if let Err(obstacle) = self.admits(node, problem) {
                return Some(Arc::new(verdict(node, Reason::NodeUnfit, obstacle)));
            }
            evaluation.as_ref().err().map(Arc::clone)
        };
        ranking.nodes().filter_map(verdict).collect()
    }

    /// Returns the two feasible nodes with the best scores; of equal scores the first names.
    fn best_two(&self, ranking: &Ranking, problem: &Problem<'_>) -> Vec<Feasible> {
        // The pod ranks these nodes differently.
        let request = problem.pod_request;
        let avoided = request.avoided_nodes.iter();
        let special: BTreeSet<&str> = avoided
            .chain(&request.demand.nominated_node)
            .map(String::as_str)
            .collect();
        let is_feasible = |node: &str| self.admits(node, problem).is_ok();
        // Preferences compare all nodes on which the pod fits.
        let most = match problem.preferences {
            Some(_) => usize::MAX,
            None => 2,
        };
        let others = ranking
            .feasible()
            .filter(|(node, _)| !special.contains(node) && is_feasible(node))
            .take(most);
        let special = special
            .iter()
            .filter_map(|node| Some((*node, ranking.score(node)?)))
            .filter(|(node, _)| is_feasible(node));
        let mut feasible: Vec<Feasible> = others
            .chain(special)
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
        feasible.truncate(2);
        feasible
    }
}
