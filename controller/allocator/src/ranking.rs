//! Rankings: the nodes with devices for equal claims, best first, kept from decision to decision.
//!
//! Pods of a workload have equal claims, and a change in the cluster concerns few nodes. So a decision evaluates again the
//! devices of the nodes that have changed since the last decision for such claims. What depends on the pod, such as its CPU
//! requests and affinity, is not part of a ranking.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy, Placement};
use drava_api::policy::Preference;
use drava_api::quota::{QuotaDeviceSelector, ShareAmounts};

use crate::claim::{ClaimSpec, Constraint, Request};
use crate::explanation::NodeVerdict;
use crate::fragmentation::NodeRoom;
use crate::quota::{self, Budget, LeastCharges};
use crate::search::input::{ContainerDevices, SearchInput};
use crate::steps;
use crate::topology::Proximity;

/// Most nodes in all rankings, about 50 MiB. The rankings that were not used for the longest time make room for new ones.
const MAX_NODES: usize = 200_000;

/// Rankings that are kept however many nodes they have, about 16 KiB for each node of the cluster: workloads are not fewer in a
/// large cluster, and each new ranking is the work of all nodes.
const MIN_RANKINGS: usize = 64;

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

/// Nodes with their scores, best first; of equal scores the first name.
type Order = BTreeSet<(Reverse<DeviceScore>, Arc<str>)>;

/// The nodes with devices for equal claims, whatever the quotas allow.
#[derive(Debug)]
pub(crate) struct Ranking {
    shape: Shape,
    nodes: BTreeMap<Arc<str>, RankedNode>,
    /// By what the claims are charged there at least.
    order: BTreeMap<Option<Arc<LeastCharges>>, Order>,
    /// Nodes that have changed since their evaluation; all when `None`.
    changed: Option<BTreeSet<String>>,
}

impl Ranking {
    fn new(shape: Shape) -> Self {
        Self {
            shape,
            nodes: BTreeMap::new(),
            order: BTreeMap::new(),
            changed: None,
        }
    }

    /// Returns the nodes to evaluate, `all` in a new ranking. They count as unchanged from now on.
    pub(crate) fn take_changed(&mut self, all: impl Iterator<Item = String>) -> BTreeSet<String> {
        let changed = self.changed.replace(BTreeSet::new());
        changed.unwrap_or_else(|| all.collect())
    }

    /// Notes that nodes that were taken have not been evaluated.
    pub(crate) fn put_back(&mut self, nodes: BTreeSet<String>) {
        self.changed = Some(nodes);
    }

    /// Sets the result of a node.
    pub(crate) fn set(&mut self, node: &str, evaluation: Evaluation, least: Option<LeastCharges>) {
        self.remove(node);
        let name: Arc<str> = node.into();
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
            order.insert((Reverse(*score), Arc::clone(&name)));
        }
        self.nodes.insert(name, RankedNode { evaluation, least });
    }

    /// Removes a node.
    pub(crate) fn remove(&mut self, node: &str) {
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

    /// Returns what is known of a node.
    pub(crate) fn get(&self, node: &str) -> Option<&RankedNode> {
        self.nodes.get(node)
    }

    /// Returns the nodes with devices for the claims, best first, without those where the quotas do not allow even the least.
    /// A quota may still not allow the devices there.
    pub(crate) fn feasible(
        &self,
        budgets: &[Budget<'_>],
    ) -> impl Iterator<Item = (&str, DeviceScore)> {
        let allowed = self.order.iter().filter(|(least, _)| {
            let least = least.as_ref();
            least.is_none_or(|least| least.check(budgets).is_ok())
        });
        let mut orders: Vec<_> = allowed
            .map(|(_, order)| {
                let mut order = order.iter();
                (order.next(), order)
            })
            .collect();
        std::iter::from_fn(move || {
            let left = orders.iter_mut().filter(|(next, _)| next.is_some());
            let (next, order) = left.min_by_key(|(next, _)| *next)?;
            let (Reverse(score), name) = std::mem::replace(next, order.next())?;
            Some((&**name, *score))
        })
    }

    /// Returns all nodes, by name.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (&str, &RankedNode)> {
        self.nodes.iter().map(|(name, node)| (&**name, node))
    }
}

/// The rankings of a cluster.
#[derive(Debug, Default)]
pub(crate) struct Rankings(Mutex<Vec<Ranking>>);

impl Rankings {
    /// Notes that the devices of a node may have changed.
    pub(crate) fn mark_changed(&mut self, node: &str) {
        for ranking in steps::counted(self.all()) {
            if let Some(changed) = &mut ranking.changed
                && !changed.contains(node)
            {
                changed.insert(node.to_owned());
            }
        }
    }

    /// Notes that the requests of the pods of a node have changed.
    pub(crate) fn mark_requests_changed(&mut self, node: &str) {
        for ranking in steps::counted(self.all()) {
            if ranking.shape.room.is_some()
                && let Some(changed) = &mut ranking.changed
                && !changed.contains(node)
            {
                changed.insert(node.to_owned());
            }
        }
    }

    /// Notes that the mix of requests has changed.
    pub(crate) fn mix_changed(&mut self) {
        self.all().retain(|ranking| ranking.shape.room.is_none());
    }

    fn all(&mut self) -> &mut Vec<Ranking> {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `decide` with the ranking for that input. The ranking is dropped when `decide` returns `None`.
    pub(crate) fn with<T>(
        &self,
        input: &SearchInput<'_>,
        node_policy: NodePlacementPolicy,
        room: Option<NodeRoom>,
        decide: impl FnOnce(&mut Ranking) -> Option<T>,
    ) -> Option<T> {
        let mut rankings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = rankings
            .iter()
            .position(|ranking| ranking.shape.is_of(input, node_policy, room));
        let mut ranking = match known {
            Some(position) => rankings.remove(position),
            None => Ranking::new(Shape::of(input, node_policy, room)),
        };
        let decided = decide(&mut ranking);
        if decided.is_some() {
            rankings.insert(0, ranking);
            let mut nodes = 0;
            let kept = rankings.iter().enumerate().take_while(|(index, ranking)| {
                nodes += ranking.nodes.len();
                *index < MIN_RANKINGS || nodes <= MAX_NODES
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

    #[test]
    fn keeps_rankings_of_many_workloads_in_large_cluster() {
        const NODES: usize = MAX_NODES / MIN_RANKINGS + 1;
        let rankings = Rankings::default();
        let input = SearchInput {
            claims: &[],
            containers: &[],
            gpu_policy: GpuPlacementPolicy::Binpack,
            budgets: &[],
            exceeds_limits: false,
        };
        let verdict = Arc::new(NodeVerdict {
            node: String::new(),
            reason: Reason::NodeUnfit,
            detail: String::new(),
            closeness: (0, drava_api::Quantity::ZERO),
            devices: Vec::new(),
        });
        // Returns the number of evaluated nodes.
        let decide = |workload: u32| {
            let room = NodeRoom {
                cpu: workload.into(),
                memory: 0.0,
            };
            let policy = NodePlacementPolicy::LeastFragmentation;
            let decided = rankings.with(&input, policy, Some(room), |ranking| {
                let changed = ranking.take_changed((0..NODES).map(|node| format!("n{node}")));
                for node in &changed {
                    ranking.set(node, Err(Arc::clone(&verdict)), None);
                }
                Some(changed.len())
            });
            decided.unwrap()
        };
        for workload in 0..64 {
            assert_eq!(decide(workload), NODES);
        }
        for workload in 0..64 {
            assert_eq!(decide(workload), 0);
        }
    }
}
