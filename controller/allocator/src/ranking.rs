//! Rankings: the nodes with devices for equal claims, best first, kept from decision to decision.
//!
//! Pods of a workload have equal claims, and a change in the cluster concerns few nodes. So what is found on a node holds until
//! the node changes. What depends on the pod, such as its CPU requests and affinity, is not part of a ranking.
//!
//! A decision evaluates the devices of a node only when the node may be better than the best ones that are known: the score of a
//! node by its devices is at most that of its [`NodeSummary`], which is equal for all claims, and a node without the memory for
//! one of the requests is not feasible.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Mutex, PoisonError};

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy, Placement};
use drava_api::policy::Preference;
use drava_api::quota::{QuotaDeviceSelector, ShareAmounts};
use drava_api::{Quantity, names};

use crate::claim::{Alternative, ClaimSpec, Constraint, Request};
use crate::explanation::NodeVerdict;
use crate::fragmentation::NodeRoom;
use crate::quota::{self, Budget, LeastCharges};
use crate::score::node_score;
use crate::search::input::{ContainerDevices, SearchInput};
use crate::steps;
use crate::topology::Proximity;

/// Most nodes in all rankings, about 50 MiB. The rankings that were not used for the longest time make room for new ones.
const MAX_NODES: usize = 200_000;

/// Rankings that are kept however many nodes they have, at most about 16 KiB for each node of the cluster: workloads are not
/// fewer in a large cluster.
const MIN_RANKINGS: usize = 64;

/// Most rankings: a change of a node is noted in each.
const MAX_RANKINGS: usize = 512;

/// Score of a node by its devices. The first criterion that differs decides; the highest value is preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceScore {
    /// See [`crate::score::NodeScore::alternatives`].
    pub(crate) alternatives: Reverse<usize>,
    /// See [`crate::score::NodeScore::proximity`].
    pub(crate) proximity: Reverse<Proximity>,
    /// See [`crate::score::NodeScore::policy_score`].
    pub(crate) policy_score: u32,
    /// See [`crate::score::NodeRanking::allocated_ppm`].
    pub(crate) allocated_ppm: u32,
}

/// What is known of a node before its devices are evaluated for a claim.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct NodeSummary {
    /// Whether there is a node of that name.
    pub(crate) is_node: bool,
    /// Whether there are pools for it.
    pub(crate) has_pools: bool,
    /// See [`crate::score::NodeRanking::allocated_ppm`].
    pub(crate) allocated_ppm: u32,
    /// Most memory that a request may get from one device; `None` if each device is in use.
    pub(crate) free_memory: Option<Quantity>,
}

/// The nodes of a cluster by the allocated fraction of their memory, ppm.
#[derive(Debug, Default)]
pub(crate) struct Summaries {
    by_allocated: BTreeMap<u32, BTreeMap<Arc<str>, NodeSummary>>,
    allocated: BTreeMap<Arc<str>, u32>,
}

impl Summaries {
    fn get(&self, node: &str) -> Option<(&Arc<str>, &NodeSummary)> {
        let allocated = self.allocated.get(node)?;
        self.by_allocated.get(allocated)?.get_key_value(node)
    }

    fn set(&mut self, node: &Arc<str>, summary: Option<NodeSummary>) {
        if let Some(before) = self.allocated.remove(node)
            && let Some(nodes) = self.by_allocated.get_mut(&before)
        {
            nodes.remove(node);
            if nodes.is_empty() {
                self.by_allocated.remove(&before);
            }
        }
        if let Some(summary) = summary {
            let allocated = summary.allocated_ppm;
            self.allocated.insert(Arc::clone(node), allocated);
            let nodes = self.by_allocated.entry(allocated).or_default();
            nodes.insert(Arc::clone(node), summary);
        }
    }

    /// Returns the nodes from a position on in the order of their highest possible scores: by the allocated fraction, the most
    /// preferred first, then by name.
    fn walk_from(
        &self,
        policy: NodePlacementPolicy,
        position: Option<(u32, &Arc<str>)>,
    ) -> impl Iterator<Item = (&Arc<str>, &NodeSummary)> {
        let (rest, of_position) = match position {
            None => ((Unbounded, Unbounded), None),
            Some((allocated, name)) => {
                let same = self.by_allocated.get(&allocated);
                let same =
                    same.map(|nodes| nodes.range::<Arc<str>, _>((Excluded(name), Unbounded)));
                let rest = match policy {
                    NodePlacementPolicy::Spread => (Excluded(allocated), Unbounded),
                    NodePlacementPolicy::Binpack | NodePlacementPolicy::LeastFragmentation => {
                        (Unbounded, Excluded(allocated))
                    }
                };
                (rest, same)
            }
        };
        let rest = self.by_allocated.range(rest);
        let (forwards, backwards) = match policy {
            NodePlacementPolicy::Spread => (Some(rest), None),
            NodePlacementPolicy::Binpack | NodePlacementPolicy::LeastFragmentation => {
                (None, Some(rest.rev()))
            }
        };
        let rest = forwards.into_iter().flatten();
        let rest = rest.chain(backwards.into_iter().flatten());
        let rest = rest.flat_map(|(_, nodes)| nodes);
        of_position.into_iter().flatten().chain(rest)
    }

    fn all(&self) -> impl Iterator<Item = (&Arc<str>, &NodeSummary)> {
        self.by_allocated.values().flatten()
    }
}

/// Score of a node; why it has no devices for the claims.
pub(crate) type Evaluation = Result<DeviceScore, Arc<NodeVerdict>>;

/// What decides on the devices of a pod, besides the state of the nodes.
#[derive(Debug, Clone, PartialEq)]
struct Shape {
    claims: Vec<ClaimShape>,
    containers: Vec<ContainerDevices>,
    gpu_policy: GpuPlacementPolicy,
    node_policy: NodePlacementPolicy,
    /// What the pods request on their node, if the score of a node depends on it.
    room: Option<NodeRoom>,
    /// Whether quotas limit the pods. Their usage is not part of a ranking, see [`Ranking::feasible`].
    is_limited: bool,
    /// What the quotas give a share by default.
    defaults: Vec<(Option<QuotaDeviceSelector>, ShareAmounts)>,
}

/// A claim without its name.
#[derive(Debug, Clone, PartialEq)]
struct ClaimShape {
    requests: Vec<Request>,
    constraints: Vec<Constraint>,
    placement: Placement,
    prefer: Option<Preference>,
}

impl Shape {
    fn of(
        input: &SearchInput<'_>,
        node_policy: NodePlacementPolicy,
        room: Option<NodeRoom>,
    ) -> Self {
        let claims = input.claims.iter().map(|claim| ClaimShape {
            requests: claim.requests.clone(),
            constraints: claim.constraints.clone(),
            placement: claim.placement,
            prefer: claim.prefer,
        });
        Self {
            claims: claims.collect(),
            containers: input.containers.to_vec(),
            gpu_policy: input.gpu_policy,
            node_policy,
            room,
            is_limited: !input.budgets.is_empty(),
            defaults: quota::defaults(input.budgets)
                .map(|(selector, default)| (selector.cloned(), default))
                .collect(),
        }
    }

    /// Returns the memory that a free device must have for one of the requests; `None` if none needs a free device.
    fn needed_memory(&self) -> Option<Quantity> {
        let of_alternative = |alternative: &Alternative| match alternative.admin_access {
            true => None,
            false => {
                let memory = alternative.capacity.get(names::capacity::MEMORY);
                Some(memory.copied().unwrap_or_default())
            }
        };
        let requests = self.claims.iter().flat_map(|claim| &claim.requests);
        // An alternative without such a need makes none of the request: `None` is the least.
        let of_requests = requests.map(|request| {
            let alternatives = request.alternatives.iter();
            alternatives.map(of_alternative).min().flatten()
        });
        of_requests.max().flatten()
    }

    fn is_of(
        &self,
        input: &SearchInput<'_>,
        node_policy: NodePlacementPolicy,
        room: Option<NodeRoom>,
    ) -> bool {
        let is_equal = |(shape, claim): (&ClaimShape, &ClaimSpec)| {
            shape.requests == claim.requests
                && shape.constraints == claim.constraints
                && shape.placement == claim.placement
                && shape.prefer == claim.prefer
        };
        self.gpu_policy == input.gpu_policy
            && self.node_policy == node_policy
            && self.room == room
            && self.is_limited != input.budgets.is_empty()
            && quota::defaults(input.budgets)
                .eq((self.defaults.iter()).map(|(selector, default)| (selector.as_ref(), *default)))
            && self.containers == input.containers
            && self.claims.len() == input.claims.len()
            && self.claims.iter().zip(input.claims).all(is_equal)
    }
}

/// What a ranking knows of a node.
#[derive(Debug)]
pub(crate) struct RankedNode {
    pub(crate) evaluation: Evaluation,
    /// What the claims are charged there at least; `None` without quotas, and where no device may serve them.
    pub(crate) least: Option<Arc<LeastCharges>>,
}

/// A node with its score, or the highest that it may have: the best first, of equal scores the first name.
pub(crate) type Position = (Reverse<DeviceScore>, Arc<str>);

/// Nodes in the order of their scores.
type Order = BTreeSet<Position>;

/// The next of the nodes of a ranking.
#[derive(Debug)]
pub(crate) enum Next {
    /// The node is the next one, whatever is found on nodes that were not evaluated.
    Ranked(Position),
    /// The node may be the next one: its devices have to be evaluated.
    Unknown(Arc<str>),
}

/// The nodes with devices for equal claims, whatever the quotas allow.
#[derive(Debug)]
pub(crate) struct Ranking {
    shape: Shape,
    /// Memory that a device must have for one of the requests; `None` if none needs a free device.
    needed_memory: Option<Quantity>,
    /// The nodes that were evaluated and have not changed since.
    nodes: BTreeMap<Arc<str>, RankedNode>,
    /// By what the claims are charged there at least.
    order: BTreeMap<Option<Arc<LeastCharges>>, Order>,
    /// Where the walk over the summaries has come to. The nodes before were evaluated, cannot be feasible or are in `pending`.
    walked: Option<Position>,
    /// Nodes before that position that have changed and may be feasible now, with the highest scores that they may have.
    pending: Order,
    /// Nodes that have changed since the last decision, with the highest scores that they might have had before.
    changed: BTreeMap<Arc<str>, Option<DeviceScore>>,
}

impl Ranking {
    fn new(shape: Shape) -> Self {
        Self {
            needed_memory: shape.needed_memory(),
            shape,
            nodes: BTreeMap::new(),
            order: BTreeMap::new(),
            walked: None,
            pending: BTreeSet::new(),
            changed: BTreeMap::new(),
        }
    }

    /// Returns whether the pods may be on the node, whatever its devices.
    fn is_candidate(&self, summary: &NodeSummary) -> bool {
        match self.shape.claims.is_empty() {
            true => summary.is_node,
            false => summary.has_pools,
        }
    }

    /// Returns the highest score that the node may have; `None` if it cannot be feasible.
    fn bound(&self, summary: &NodeSummary) -> Option<DeviceScore> {
        let has_memory = (self.needed_memory)
            .is_none_or(|needed| summary.free_memory.is_some_and(|free| free >= needed));
        let is_possible = has_memory && self.is_candidate(summary);
        is_possible.then(|| self.highest_score(summary.allocated_ppm))
    }

    fn highest_score(&self, allocated_ppm: u32) -> DeviceScore {
        DeviceScore {
            alternatives: Reverse(0),
            proximity: Reverse(Proximity::Same),
            policy_score: node_score(self.shape.node_policy, allocated_ppm, f64::NEG_INFINITY),
            allocated_ppm,
        }
    }

    /// Notes that a node has changed, of which this was known before.
    fn mark_changed(&mut self, node: &Arc<str>, before: Option<&NodeSummary>) {
        if !self.changed.contains_key(node) {
            let bound = before.and_then(|summary| self.bound(summary));
            self.changed.insert(Arc::clone(node), bound);
        }
    }

    /// Forgets what was found on nodes that have changed.
    fn forget_changed(&mut self, summaries: &Summaries) {
        for (node, before) in std::mem::take(&mut self.changed) {
            self.remove(&node);
            if let Some(before) = before {
                self.pending.remove(&(Reverse(before), Arc::clone(&node)));
            }
            let summary = summaries.get(&node);
            if let Some(bound) = summary.and_then(|(_, summary)| self.bound(summary)) {
                let position = (Reverse(bound), node);
                if self
                    .walked
                    .as_ref()
                    .is_some_and(|walked| position <= *walked)
                {
                    self.pending.insert(position);
                }
            }
        }
    }

    /// Notes that another decision has to evaluate the node again.
    pub(crate) fn evaluate_again(&mut self, node: &str, summaries: &Summaries) {
        if let Some((node, summary)) = summaries.get(node) {
            self.mark_changed(node, Some(summary));
        }
    }

    /// Sets the result of a node.
    pub(crate) fn set(
        &mut self,
        node: &Arc<str>,
        evaluation: Evaluation,
        least: Option<LeastCharges>,
    ) {
        self.remove(node);
        let least = least.map(|least| {
            let known = self.order.keys().flatten();
            let known = known
                .filter(|known| ***known == least)
                .map(Arc::clone)
                .next();
            known.unwrap_or_else(|| Arc::new(least))
        });
        if let Ok(score) = &evaluation {
            let order = self.order.entry(least.clone()).or_default();
            order.insert((Reverse(*score), Arc::clone(node)));
        }
        let ranked = RankedNode { evaluation, least };
        self.nodes.insert(Arc::clone(node), ranked);
    }

    fn remove(&mut self, node: &str) {
        if let Some((name, before)) = self.nodes.remove_entry(node)
            && let Ok(score) = before.evaluation
            && let Some(order) = self.order.get_mut(&before.least)
        {
            order.remove(&(Reverse(score), name));
            if order.is_empty() {
                self.order.remove(&before.least);
            }
        }
    }

    /// Returns what was found on a node.
    pub(crate) fn get(&self, node: &str) -> Option<&RankedNode> {
        self.nodes.get(node)
    }

    /// Returns the name of a node on which nothing was found yet, and which may be feasible.
    pub(crate) fn unknown(&self, node: &str, summaries: &Summaries) -> Option<Arc<str>> {
        let (name, summary) = summaries.get(node)?;
        let is_unknown = !self.nodes.contains_key(node) && self.bound(summary).is_some();
        is_unknown.then(|| Arc::clone(name))
    }

    /// Returns all nodes on which nothing was found yet.
    pub(crate) fn all_unknown(&self, summaries: &Summaries) -> Vec<Arc<str>> {
        let candidates = summaries
            .all()
            .filter(|(_, summary)| self.is_candidate(summary));
        let unknown = candidates.filter(|(node, _)| !self.nodes.contains_key(*node));
        unknown.map(|(node, _)| Arc::clone(node)).collect()
    }

    /// Returns the node after `last` among those with devices for the claims, the best one without `last`. Leaves those out where
    /// the quotas do not allow even the least; they may still not allow the devices of others.
    pub(crate) fn next(
        &mut self,
        last: Option<&Position>,
        summaries: &Summaries,
        budgets: &[Budget<'_>],
    ) -> Option<Next> {
        let unknown = self.next_unknown(summaries);
        let from = (last.map_or(Unbounded, Excluded), Unbounded);
        let allowed = self.order.iter().filter(|(least, _)| {
            let least = least.as_ref();
            least.is_none_or(|least| least.check(budgets).is_ok())
        });
        let ranked = allowed.filter_map(|(_, order)| order.range::<Position, _>(from).next());
        let ranked = ranked.min();
        Some(match (ranked, unknown) {
            (ranked, Some(unknown)) if ranked.is_none_or(|ranked| unknown <= *ranked) => {
                Next::Unknown(unknown.1)
            }
            (ranked, _) => Next::Ranked(ranked?.clone()),
        })
    }

    /// Returns the node with the highest score that a node without an evaluation may have.
    fn next_unknown(&mut self, summaries: &Summaries) -> Option<Position> {
        while let Some((_, node)) = self.pending.first()
            && self.nodes.contains_key(node)
        {
            self.pending.pop_first();
        }
        let walked = self.walked.as_ref();
        let walked = walked.map(|(Reverse(score), node)| (score.allocated_ppm, node));
        let mut skipped = None;
        let mut found = None;
        for (node, summary) in summaries.walk_from(self.shape.node_policy, walked) {
            steps::count(1);
            if let Some(bound) = self.bound(summary)
                && !self.nodes.contains_key(node)
            {
                found = Some((Reverse(bound), Arc::clone(node)));
                break;
            }
            skipped = Some((node, summary.allocated_ppm));
        }
        if let Some((node, allocated)) = skipped {
            self.walked = Some((Reverse(self.highest_score(allocated)), Arc::clone(node)));
        }
        self.pending.first().cloned().into_iter().chain(found).min()
    }

    /// Returns all evaluated nodes, by name.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (&str, &RankedNode)> {
        self.nodes.iter().map(|(name, node)| (&**name, node))
    }

    /// Returns the number of nodes of which something is kept.
    fn len(&self) -> usize {
        self.nodes.len() + self.pending.len() + self.changed.len()
    }
}

/// The rankings of a cluster.
#[derive(Debug, Default)]
pub(crate) struct Rankings(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    summaries: Summaries,
    /// Nodes whose summaries are out of date.
    changed: BTreeSet<Arc<str>>,
    rankings: Vec<Ranking>,
}

impl Known {
    /// Notes in rankings that a node has changed.
    fn mark_changed(&mut self, node: &Arc<str>, concerns: impl Fn(&Shape) -> bool) {
        let summary = self.summaries.get(node).map(|(_, summary)| summary);
        for ranking in steps::counted(&mut self.rankings) {
            if concerns(&ranking.shape) {
                ranking.mark_changed(node, summary);
            }
        }
    }

    fn name(&self, node: &str) -> Arc<str> {
        let known = self.summaries.get(node).map(|(name, _)| name);
        let known = known.or_else(|| self.changed.get(node));
        known.map_or_else(|| node.into(), Arc::clone)
    }
}

impl Rankings {
    /// Notes that the devices of a node may have changed.
    pub(crate) fn mark_changed(&mut self, node: &str) {
        let known = self.all();
        let node = known.name(node);
        known.mark_changed(&node, |_| true);
        known.changed.insert(node);
    }

    /// Notes that the requests of the pods of a node have changed.
    pub(crate) fn mark_requests_changed(&mut self, node: &str) {
        let known = self.all();
        let node = known.name(node);
        known.mark_changed(&node, |shape| shape.room.is_some());
    }

    /// Notes that the mix of requests has changed.
    pub(crate) fn mix_changed(&mut self) {
        let rankings = &mut self.all().rankings;
        rankings.retain(|ranking| ranking.shape.room.is_none());
    }

    fn all(&mut self) -> &mut Known {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `decide` with the ranking for that input. The ranking is dropped when `decide` returns `None`. `summarize` returns
    /// what is known of a node; `None` if there is no such node.
    pub(crate) fn with<T>(
        &self,
        input: &SearchInput<'_>,
        node_policy: NodePlacementPolicy,
        room: Option<NodeRoom>,
        summarize: impl Fn(&str) -> Option<NodeSummary>,
        decide: impl FnOnce(&mut Ranking, &Summaries) -> Option<T>,
    ) -> Option<T> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Known {
            summaries,
            changed,
            rankings,
        } = &mut *known;
        for node in std::mem::take(changed) {
            summaries.set(&node, summarize(&node));
        }
        let position = rankings
            .iter()
            .position(|ranking| ranking.shape.is_of(input, node_policy, room));
        let mut ranking = match position {
            Some(position) => rankings.remove(position),
            None => Ranking::new(Shape::of(input, node_policy, room)),
        };
        ranking.forget_changed(summaries);
        let decided = decide(&mut ranking, summaries);
        if decided.is_some() {
            rankings.insert(0, ranking);
            let mut nodes = 0;
            let kept = rankings.iter().enumerate().take_while(|(index, ranking)| {
                nodes += ranking.len();
                *index < MIN_RANKINGS || (*index < MAX_RANKINGS && nodes <= MAX_NODES)
            });
            let kept = kept.count();
            rankings.truncate(kept);
        }
        decided
    }
}

#[cfg(test)]
mod tests {
    use drava_api::reason::Reason;

    use super::*;

    const SUMMARY: NodeSummary = NodeSummary {
        is_node: true,
        has_pools: true,
        allocated_ppm: 0,
        free_memory: Some(Quantity::ZERO),
    };

    /// Nodes whose devices are evaluated at a decision for pods of a workload.
    fn evaluated(
        rankings: &Rankings,
        workload: u32,
        summarize: impl Fn(&str) -> Option<NodeSummary>,
        evaluation: impl Fn(&str) -> Evaluation,
    ) -> Vec<String> {
        let input = SearchInput {
            claims: &[],
            containers: &[],
            gpu_policy: GpuPlacementPolicy::Binpack,
            budgets: &[],
            exceeds_limits: false,
        };
        let room = NodeRoom {
            cpu: workload.into(),
            memory: 0.0,
        };
        let policy = NodePlacementPolicy::Binpack;
        let decide = |ranking: &mut Ranking, summaries: &Summaries| {
            let mut evaluated = Vec::new();
            while let Some(Next::Unknown(node)) = ranking.next(None, summaries, &[]) {
                ranking.set(&node, evaluation(&node), None);
                evaluated.push(node.to_string());
            }
            Some(evaluated)
        };
        (rankings.with(&input, policy, Some(room), summarize, decide)).unwrap()
    }

    fn unfit() -> Evaluation {
        Err(Arc::new(NodeVerdict {
            node: String::new(),
            reason: Reason::NodeUnfit,
            detail: String::new(),
            closeness: (0, Quantity::ZERO),
            devices: Vec::new(),
        }))
    }

    #[test]
    fn keeps_rankings_of_many_workloads_in_large_cluster() {
        const NODES: usize = MAX_NODES / MIN_RANKINGS + 1;
        let mut rankings = Rankings::default();
        for node in 0..NODES {
            rankings.mark_changed(&format!("n{node}"));
        }
        let decide =
            |workload| evaluated(&rankings, workload, |_| Some(SUMMARY), |_| unfit()).len();
        for workload in 0..64 {
            assert_eq!(decide(workload), NODES);
        }
        for workload in 0..64 {
            assert_eq!(decide(workload), 0);
        }
    }

    #[test]
    fn keeps_rankings_of_more_workloads_whose_best_nodes_fit() {
        const NODES: u32 = 4000;
        let mut rankings = Rankings::default();
        for node in 0..NODES {
            rankings.mark_changed(&format!("n{node}"));
        }
        let summarize = |node: &str| {
            let number = node.trim_start_matches('n').parse().unwrap();
            Some(NodeSummary {
                allocated_ppm: number,
                ..SUMMARY
            })
        };
        let fits = |node: &str| {
            Ok(DeviceScore {
                alternatives: Reverse(0),
                proximity: Reverse(Proximity::Same),
                policy_score: summarize(node).unwrap().allocated_ppm,
                allocated_ppm: summarize(node).unwrap().allocated_ppm,
            })
        };
        let decide = |workload| evaluated(&rankings, workload, summarize, fits);
        for workload in 0..256 {
            assert_eq!(decide(workload), ["n3999"]);
        }
        for workload in 0..256 {
            assert!(decide(workload).is_empty());
        }
        // A change of the best node, and of one behind those that were evaluated.
        rankings.mark_changed("n3999");
        rankings.mark_changed("n7");
        let decide = |workload| evaluated(&rankings, workload, summarize, fits);
        for workload in 0..256 {
            assert_eq!(decide(workload), ["n3999"]);
        }
    }

    #[test]
    fn keeps_one_bound_of_node_that_changes_often() {
        let mut rankings = Rankings::default();
        for node in ["n0", "n1", "n2"] {
            rankings.mark_changed(node);
        }
        let summarize = |of_n1: u32| {
            move |node: &str| {
                let allocated_ppm = match node {
                    "n0" => 100,
                    "n1" => of_n1,
                    _ => 500,
                };
                Some(NodeSummary {
                    allocated_ppm,
                    ..SUMMARY
                })
            }
        };
        let fits = |allocated_ppm: u32| {
            Ok(DeviceScore {
                alternatives: Reverse(0),
                proximity: Reverse(Proximity::Same),
                policy_score: allocated_ppm,
                allocated_ppm,
            })
        };
        let only_first = |node: &str| if node == "n0" { fits(100) } else { unfit() };
        let found = evaluated(&rankings, 0, summarize(300), only_first);
        assert_eq!(found, ["n2", "n1", "n0"]);
        // The fullest node fits now, so the next one is not evaluated any more.
        rankings.mark_changed("n2");
        for of_n1 in 301..310 {
            rankings.mark_changed("n1");
            evaluated(&rankings, 0, summarize(of_n1), |_| fits(500));
        }
        assert_eq!(rankings.all().rankings[0].pending.len(), 1);
    }
}
