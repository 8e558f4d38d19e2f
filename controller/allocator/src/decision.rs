//! The decision for one pod: the node, the devices, or why there are none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_api::Quantity;
use drava_api::config::PlacementPolicy;

use crate::ask::PodAsk;
use crate::cluster::Cluster;
use crate::explanation::{Explanation, NodeVerdict};
use crate::node::add;
use crate::placement::{ClaimPlacement, DeviceGrant, Placement, Policies};
use crate::pool::PoolProblem;
use crate::reason::Reason;
use crate::search::question::{Ask, ContainerDevices, PoolView};
use crate::search::trial::{Chosen, millionths};
use crate::search::{self, Outcome};

mod nearest;

use nearest::nearest_miss;

/// A pool by name, or why it is left out.
type NamedView<'a> = (&'a str, Result<PoolView<'a>, &'a PoolProblem>);

/// A node on which the pod fits.
struct Fit<'a> {
    node: &'a str,
    pools: Vec<PoolView<'a>>,
    chosen: Vec<Chosen>,
    fullness: u32,
}

impl Cluster {
    /// Decides where a pod goes.
    ///
    /// # Errors
    /// Why it has no place.
    pub fn decide(&self, ask: &PodAsk, policies: Policies) -> Result<Placement, Explanation> {
        let containers = ask.containers(|pool, device| self.card_of(pool, device));
        let mut verdicts = Vec::new();
        let mut best: Option<Fit<'_>> = None;
        for (node, views) in self.nodes_with_pools() {
            match self.on_node(node, views, ask, &containers, policies)? {
                Err(verdict) => verdicts.push(verdict),
                Ok(fit) => {
                    if best
                        .as_ref()
                        .is_none_or(|best| preferred(&fit, best, ask, policies.node))
                    {
                        best = Some(fit);
                    }
                }
            }
        }
        match best {
            Some(fit) => Ok(fit.into_placement(ask, policies.gpu)),
            None => Err(Explanation::Nodes(verdicts)),
        }
    }

    /// Every node that publishes, in the order of names.
    fn nodes_with_pools(&self) -> impl Iterator<Item = (&str, Vec<NamedView<'_>>)> {
        let mut by_node: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for (name, pool) in self.pools() {
            let view = pool
                .state
                .as_ref()
                .map(|(pool, usage)| PoolView { name, pool, usage });
            // A pool that names no node is listed under its own name, so that somebody sees it.
            by_node
                .entry(pool.node.as_deref().unwrap_or(name))
                .or_default()
                .push((name.as_str(), view));
        }
        by_node.into_iter()
    }

    fn on_node<'a>(
        &'a self,
        node: &'a str,
        views: Vec<NamedView<'a>>,
        ask: &PodAsk,
        containers: &[ContainerDevices],
        policies: Policies,
    ) -> Result<Result<Fit<'a>, NodeVerdict>, Explanation> {
        let verdict = |reason, detail: String| NodeVerdict {
            node: node.to_owned(),
            reason,
            detail,
            nearness: (0, Quantity::ZERO),
            devices: Vec::new(),
        };
        if let Err(obstacle) = self.admits(node, ask) {
            return Ok(Err(verdict(Reason::NodeUnfit, obstacle)));
        }
        let mut pools = Vec::new();
        let mut problem = None;
        for (name, view) in views {
            match view {
                Ok(view) => pools.push(view),
                Err(found) => problem = Some(format!("pool {name}: {found}")),
            }
        }
        let question = Ask {
            claims: &ask.claims,
            containers,
            gpu_policy: policies.gpu,
        };
        let outcome = search::search(&question, &pools, &self.selectors)
            .map_err(|error| Explanation::refused(Reason::SelectorError, error.to_string()))?;
        Ok(match (outcome, problem) {
            (Outcome::Found(chosen), _) => Ok(Fit {
                node,
                fullness: fullness(&pools),
                pools,
                chosen,
            }),
            (_, Some(problem)) => Err(verdict(Reason::PoolIncomplete, problem)),
            (Outcome::LimitReached, None) => Err(verdict(
                Reason::SearchLimit,
                "too many combinations".to_owned(),
            )),
            (Outcome::NotFound(misses), None) => Err(nearest_miss(node, &pools, &misses)),
        })
    }

    fn admits(&self, node: &str, ask: &PodAsk) -> Result<(), String> {
        let info = self.node(node).ok_or("node does not exist")?;
        for (claim, selector) in &ask.pinned {
            if !info.selected_by(node, selector) {
                return Err(format!("claim {claim} is allocated elsewhere"));
            }
        }
        let mut used = self.used_on(node, &ask.uid);
        info.admits(node, &ask.demand, &used)?;
        let mut before = &ask.demand;
        for companion in &ask.companions {
            add(&mut used, &before.requests);
            info.admits(node, companion, &used)?;
            before = companion;
        }
        Ok(())
    }
}

/// Whether `fit` is better than `best`; nodes come in the order of names, so a tie keeps the first.
fn preferred(fit: &Fit<'_>, best: &Fit<'_>, ask: &PodAsk, policy: PlacementPolicy) -> bool {
    let policy = ask
        .claims
        .iter()
        .find_map(|claim| claim.placement.node)
        .unwrap_or(policy);
    let rank = |fit: &Fit<'_>| {
        let by_policy = match policy {
            PlacementPolicy::Binpack => u32::MAX - fit.fullness,
            PlacementPolicy::Spread => fit.fullness,
        };
        let alternatives: usize = fit.chosen.iter().map(|chosen| chosen.alternative).sum();
        let nominated = ask.demand.nominated_node.as_deref() == Some(fit.node);
        (
            ask.avoid.contains(fit.node),
            !nominated,
            alternatives,
            by_policy,
        )
    };
    rank(fit) < rank(best)
}

/// Share of the node's device memory in use, in millionths.
fn fullness(pools: &[PoolView<'_>]) -> u32 {
    let (mut used, mut total) = (Quantity::ZERO, Quantity::ZERO);
    for view in pools {
        let cards: BTreeSet<_> = view
            .pool
            .devices
            .iter()
            .map(|device| &device.card)
            .collect();
        for card in cards {
            let memory = view.usage.card_memory(view.pool, card);
            used += memory.used.min(memory.total);
            total += memory.total;
        }
    }
    millionths(used, total)
}

impl Fit<'_> {
    fn into_placement(self, ask: &PodAsk, gpu_policy: PlacementPolicy) -> Placement {
        let claims = ask
            .claims
            .iter()
            .enumerate()
            .map(|(position, spec)| ClaimPlacement {
                claim: spec.id.clone(),
                devices: self
                    .chosen
                    .iter()
                    .filter(|chosen| chosen.claim == position)
                    .filter_map(|chosen| {
                        let alternative = spec
                            .requests
                            .get(chosen.request)?
                            .alternatives
                            .get(chosen.alternative)?;
                        let device = self
                            .pools
                            .get(chosen.device.pool)?
                            .pool
                            .devices
                            .get(chosen.device.index)?;
                        Some(DeviceGrant {
                            request: alternative.name.clone(),
                            class: alternative.class.clone(),
                            pool: chosen.pool.clone(),
                            device: Arc::clone(device),
                            grant: chosen.grant.clone(),
                            tolerations: alternative.tolerations.clone(),
                            why: why(spec.placement.gpu.unwrap_or(gpu_policy), chosen),
                        })
                    })
                    .collect(),
            })
            .collect();
        Placement {
            node: self.node.to_owned(),
            claims,
        }
    }
}

fn why(policy: PlacementPolicy, chosen: &Chosen) -> String {
    let percent = chosen.card_fullness / 10_000;
    match policy {
        PlacementPolicy::Binpack => {
            format!("binpack: the fullest card with room, {percent}% of its memory was in use")
        }
        PlacementPolicy::Spread => {
            format!("spread: the emptiest card, {percent}% of its memory was in use")
        }
    }
}

#[cfg(test)]
mod tests;
