//! What a suspended decision has found on nodes. Its next turns do not search it again, so every decision ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use drava_api::reason::Reason;

use crate::explanation::{Explanation, NodeVerdict};
use crate::fragmentation::LossBasis;
use crate::pool::Pool;
use crate::ranking::Evaluation;
use crate::search::input::PoolView;
use crate::turn::Work;
use crate::usage::Usage;

/// See the [module](self). By the name of the node.
#[derive(Debug, Clone, Default)]
pub struct SearchedNodes {
    /// Verdicts on nodes that were searched in vain, which may have changed since.
    in_vain: BTreeMap<String, Arc<NodeVerdict>>,
    /// Results of searches beyond the first path, each with the state of the node.
    evaluated: BTreeMap<String, (NodeDevices, Option<LossBasis>, Evaluation)>,
}

/// The devices of a node and their usage, by pool.
#[derive(Debug, Clone)]
struct NodeDevices(Vec<(String, Pool, Usage)>);

impl NodeDevices {
    fn of(pools: &[PoolView<'_>]) -> Self {
        let pools = pools.iter();
        let copy =
            |view: &PoolView<'_>| (view.name.to_owned(), view.pool.clone(), view.usage.clone());
        Self(pools.map(copy).collect())
    }

    fn is_of(&self, pools: &[PoolView<'_>]) -> bool {
        let is_same = |((name, pool, usage), view): (&(String, Pool, Usage), &PoolView<'_>)| {
            name == view.name && usage == view.usage && pool.is_same(view.pool)
        };
        self.0.len() == pools.len() && self.0.iter().zip(pools).all(is_same)
    }
}

impl SearchedNodes {
    /// Returns whether verdicts are known that may be older than a change of their nodes.
    #[must_use]
    pub fn has_verdicts(&self) -> bool {
        !self.in_vain.is_empty()
    }

    /// Adds what another turn has found.
    pub fn extend(&mut self, other: Self) {
        self.in_vain.extend(other.in_vain);
        self.evaluated.extend(other.evaluated);
    }

    /// Returns the verdict on a node that was searched in vain.
    pub(crate) fn verdict(&self, node: &str) -> Option<&Arc<NodeVerdict>> {
        self.in_vain.get(node)
    }

    /// Notes the verdict on a node.
    pub(crate) fn note_verdict(&mut self, verdict: Arc<NodeVerdict>) {
        self.in_vain.insert(verdict.node.clone(), verdict);
    }

    /// Returns what was found on a node in this state.
    pub(crate) fn evaluation(
        &self,
        node: &str,
        (pools, loss): (&[PoolView<'_>], Option<LossBasis>),
    ) -> Option<&Evaluation> {
        let (devices, basis, evaluation) = self.evaluated.get(node)?;
        (*basis == loss && devices.is_of(pools)).then_some(evaluation)
    }

    /// Notes what was found on a node in this state.
    pub(crate) fn note_evaluation(
        &mut self,
        node: &str,
        (pools, loss): (&[PoolView<'_>], Option<LossBasis>),
        found: Evaluation,
    ) {
        let entry = (NodeDevices::of(pools), loss, found);
        self.evaluated.insert(node.to_owned(), entry);
    }
}

/// A decision whose turn was too short. It is repeated in another turn, with what it has found so far.
#[derive(Debug, Clone)]
pub struct Suspended {
    /// The work for which the turn was too short.
    pub work: Work,
    /// What it has found, for [`crate::pod_request::PodRequest::searched`].
    pub searched: SearchedNodes,
}

impl From<Work> for Suspended {
    fn from(work: Work) -> Self {
        Self {
            work,
            searched: SearchedNodes::default(),
        }
    }
}

/// Why a decision has no placement.
#[derive(Debug, Clone)]
pub enum Undecided {
    /// It goes on in another turn.
    Suspended(Suspended),
    /// The pod fits on no node.
    Rejected(Explanation),
}

impl Undecided {
    /// Returns why the pod fits on no node, of a decision without turns.
    pub fn of_endless(self) -> Explanation {
        match self {
            Self::Rejected(explanation) => explanation,
            // An endless turn suspends nothing.
            Self::Suspended(_) => {
                Explanation::rejected(Reason::SearchLimit, "the turn was too short")
            }
        }
    }
}

impl From<Explanation> for Undecided {
    fn from(explanation: Explanation) -> Self {
        Self::Rejected(explanation)
    }
}

impl From<Suspended> for Undecided {
    fn from(suspended: Suspended) -> Self {
        Self::Suspended(suspended)
    }
}
