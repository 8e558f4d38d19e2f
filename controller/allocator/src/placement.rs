//! The decision for one pod: the node, the devices, or why there are none.

use std::sync::Arc;

use drava_api::Quantity;
use drava_api::config::PlacementPolicy;
use k8s_openapi::api::resource::v1::DeviceToleration;

use crate::ask::PodAsk;
use crate::claim::ClaimId;
use crate::cluster::{Cluster, Policies};
use crate::device::Device;
use crate::explanation::{DeviceVerdict, Explanation, NodeVerdict};
use crate::node::add;
use crate::pool::PoolProblem;
use crate::reason::{Reason, Rejection};
use crate::search::{self, Ask, Chosen, ContainerDevices, Misses, Outcome, PoolView, millionths};
use crate::usage::{Grant, Holding};

/// Where a pod goes and what its claims get.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Name of the node.
    pub node: String,
    /// In the order of the pod's claims.
    pub claims: Vec<ClaimPlacement>,
}

/// What one claim gets.
#[derive(Debug, Clone)]
pub struct ClaimPlacement {
    /// The claim.
    pub claim: ClaimId,
    /// Its devices, in the order of its requests.
    pub devices: Vec<DeviceGrant>,
}

/// One device for one request.
#[derive(Debug, Clone)]
pub struct DeviceGrant {
    /// Result name of the request: `main` or `main/sub`.
    pub request: String,
    /// Class that the request named.
    pub class: String,
    /// Name of the pool.
    pub pool: String,
    /// The device.
    pub device: Arc<Device>,
    /// How it is taken.
    pub grant: Grant,
    /// Tolerations of the request.
    pub tolerations: Vec<DeviceToleration>,
    /// Why this one, for people.
    pub why: String,
}

impl ClaimPlacement {
    /// What the claim will hold.
    #[must_use]
    pub fn holdings(&self) -> Vec<Holding> {
        let claim = Arc::new(self.claim.clone());
        self.devices
            .iter()
            .map(|device| Holding {
                claim: Arc::clone(&claim),
                pool: device.pool.clone(),
                device: device.device.name.to_string(),
                request: device.request.clone(),
                grant: device.grant.clone(),
            })
            .collect()
    }
}

/// Cards in use that a detail names.
const CARDS_NAMED: usize = 2;

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
        let mut by_node: std::collections::BTreeMap<&str, Vec<_>> =
            std::collections::BTreeMap::new();
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
        let cards: std::collections::BTreeSet<_> = view
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

fn nearest_miss(node: &str, pools: &[PoolView<'_>], misses: &Misses) -> NodeVerdict {
    // In published order: the order of the policy changes with what is in use, the text should not.
    let mut misses_by_place = misses.devices.clone();
    misses_by_place.sort_by_key(|(place, _)| *place);
    let named: Vec<(&Device, &Rejection)> = misses_by_place
        .iter()
        .filter_map(|(place, rejection)| {
            let device = pools.get(place.pool)?.pool.devices.get(place.index)?;
            Some((device.as_ref(), rejection))
        })
        .collect();
    let place = |device: &Device| format!("{node}/{}", device.display_name());
    let devices = named
        .iter()
        .map(|(device, rejection)| DeviceVerdict {
            device: device.name.to_string(),
            reason: rejection.reason(),
            detail: rejection.detail(&place(device)),
        })
        .collect();
    // Of equally near misses the one with the most free, and of those the first.
    let nearest = named
        .iter()
        .rev()
        .max_by_key(|(_, rejection)| (rejection.nearness(), rejection.free()))
        // Those that were found are too few, and the others are not even of the kind asked for.
        .filter(|(_, rejection)| misses.found == 0 || rejection.is_near());
    let (reason, nearness) = nearest.map_or(
        (Reason::InsufficientDevices, (0, Quantity::ZERO)),
        |(_, rejection)| {
            // Of nodes whose cards are in use the one on which most devices were found.
            let measure = match rejection.reason() {
                Reason::ExclusiveConflict => {
                    Quantity::count(u64::try_from(misses.found).unwrap_or_default())
                }
                _ => rejection.free(),
            };
            (rejection.reason(), (rejection.nearness(), measure))
        },
    );
    NodeVerdict {
        node: node.to_owned(),
        reason,
        detail: detail(node, misses, &named, nearest.copied()),
        nearness,
        devices,
    }
}

/// The particulars of the nearest miss: how many devices were found where it takes several, then what stands in the
/// way of the next; of cards in use all are named, up to a few.
fn detail(
    node: &str,
    misses: &Misses,
    named: &[(&Device, &Rejection)],
    nearest: Option<(&Device, &Rejection)>,
) -> String {
    let several = misses.needed > 1;
    // The node is said once.
    let place = |device: &Device| match several {
        true => device.display_name().to_owned(),
        false => format!("{node}/{}", device.display_name()),
    };
    let obstacle = match nearest {
        None => String::new(),
        Some((_, rejection)) if rejection.reason() == Reason::ExclusiveConflict => {
            let in_use: Vec<_> = named
                .iter()
                .filter(|(_, rejection)| rejection.reason() == Reason::ExclusiveConflict)
                .map(|(device, rejection)| rejection.detail(&place(device)))
                .collect();
            let more = in_use.len().saturating_sub(CARDS_NAMED);
            let quoted = in_use.get(..CARDS_NAMED).unwrap_or(&in_use).join(", ");
            if more == 0 {
                quoted
            } else {
                format!("{quoted} and {more} more")
            }
        }
        Some((device, rejection)) => rejection.detail(&place(device)),
    };
    match (several, obstacle.is_empty()) {
        (false, _) => obstacle,
        (true, true) => format!(
            "{} of {} devices found on {node}",
            misses.found, misses.needed
        ),
        (true, false) => format!(
            "{} of {} devices found on {node}; {obstacle}",
            misses.found, misses.needed
        ),
    }
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
