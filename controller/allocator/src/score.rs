//! Scores of the placement policies: how feasible nodes and GPUs are ranked, and the reason for the choice in words.
//!
//! The score of a node or GPU depends on the allocated fraction of its GPU memory. Amounts are those before the pod's own claims. Among MIG partitions the profile and the placement count too: a request gets the smallest profile,
//! and of its placements the one that leaves most other partitions possible.

use std::cmp::Reverse;
use std::fmt;

use drava_api::Quantity;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::policy::Preference;

use crate::reason::bytes;
use crate::topology::Proximity;

/// Highest score.
pub const MAX_SCORE: u32 = 1_000_000;

/// Returns the score of a node under `policy`; the highest score is preferred. `allocated` is the allocated fraction, ppm.
/// `loss` is the loss of GPUs with the policy `leastFragmentation`.
#[must_use]
pub fn node_score(policy: NodePlacementPolicy, allocated: u32, loss: f64) -> u32 {
    match policy {
        NodePlacementPolicy::Binpack => allocated,
        NodePlacementPolicy::Spread => MAX_SCORE.saturating_sub(allocated),
        NodePlacementPolicy::LeastFragmentation => loss_score(loss),
    }
}

/// Returns the score of a GPU under `policy`; the highest score is preferred. `allocated` is the allocated fraction, ppm.
/// `topology` and `numa` prefer the fullest of the GPUs of a group. `loss` is the loss of GPUs with the policy
/// `leastFragmentation`.
#[must_use]
pub fn gpu_score(policy: GpuPlacementPolicy, allocated: u32, loss: f64) -> u32 {
    match policy {
        GpuPlacementPolicy::Binpack | GpuPlacementPolicy::Topology | GpuPlacementPolicy::Numa => {
            allocated
        }
        GpuPlacementPolicy::Spread => MAX_SCORE.saturating_sub(allocated),
        GpuPlacementPolicy::LeastFragmentation => loss_score(loss),
    }
}

/// Returns a score that is higher with a lower loss.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value is within the range of u32"
)]
fn loss_score(loss: f64) -> u32 {
    const MAX_LOSS: f64 = 1_000.0;
    ((MAX_LOSS - loss.clamp(-MAX_LOSS, MAX_LOSS)) * 1_000_000.0).round() as u32
}

/// Returns `allocated / total` in parts per million; 0 for an unknown total.
#[must_use]
pub fn allocated_ppm(allocated: Quantity, total: Quantity) -> u32 {
    if total <= Quantity::ZERO {
        return 0;
    }
    let ratio = allocated.nano().max(0).saturating_mul(1_000_000) / total.nano();
    u32::try_from(ratio).unwrap_or(u32::MAX).min(1_000_000)
}

/// Score of a feasible node. The first criterion that differs decides; the highest value is preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeScore {
    /// False for a node on which the pod could not be bound a short while ago.
    pub is_not_avoided: bool,
    /// kube-scheduler has nominated the node for the pod.
    pub is_nominated: bool,
    /// Sum of the positions of the selected alternatives; 0 when every request gets its first.
    pub alternatives: Reverse<usize>,
    /// What the GPUs have in common; the default without the policy `topology`.
    pub proximity: Reverse<Proximity>,
    /// Score by the preferences of the pod and of those around it, with the weights of kube-scheduler; 0 without any.
    pub preference: i64,
    /// Score under the policy between nodes.
    pub policy_score: u32,
}

/// Why a node was selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRanking {
    /// Policy between nodes.
    pub policy: NodePlacementPolicy,
    /// Allocated fraction of the node's GPU memory, ppm.
    pub allocated_ppm: u32,
    /// Score of the node.
    pub score: NodeScore,
    /// The feasible node with the next-best score.
    pub runner_up: Option<NodeRunnerUp>,
}

/// The best of the feasible nodes that were not selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRunnerUp {
    /// Name of the node.
    pub node: String,
    /// Allocated fraction of the node's GPU memory, ppm.
    pub allocated_ppm: u32,
    /// Score of the node.
    pub score: NodeScore,
}

/// Why a GPU was selected among those of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuRanking {
    /// Policy between GPUs.
    pub policy: GpuPlacementPolicy,
    /// Allocated fraction of the GPU's memory, ppm.
    pub allocated_ppm: u32,
    /// Why a share or a partition was selected, where both can serve the request and a GpuPolicy has a preference.
    pub kind: Option<KindChoice>,
    /// Of the other GPUs that can serve the request: the one with the best score.
    pub runner_up: Option<GpuRunnerUp>,
    /// Score of the partition; `None` for another device.
    pub partition: Option<PartitionScore>,
    /// What the GPUs of the pod have in common; the default without the policy `topology`.
    pub proximity: Proximity,
}

/// Score of a MIG partition among those that can serve a request. The first criterion that differs decides; the lowest
/// value is preferred. Other devices have the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct PartitionScore {
    /// Memory of the profile: a request gets the smallest that holds it.
    pub memory: Quantity,
    /// Number of other partitions of the GPU that can be allocated now and could not be after the allocation. Weights from the
    /// mix of requests gain at most 0.7 points of the accepted requests (`docs/results/raw/packing.md`).
    pub closed: usize,
}

/// The choice between a share and a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindChoice {
    /// Preference of the GpuPolicy.
    pub prefer: Preference,
    /// Whether a partition was selected.
    pub is_partition: bool,
}

impl KindChoice {
    /// Returns whether the device is of the other kind than the preferred one.
    #[must_use]
    pub const fn is_second(self) -> bool {
        match self.prefer {
            Preference::Vgpu => self.is_partition,
            Preference::Mig => !self.is_partition,
            Preference::Fit => false,
        }
    }
}

impl fmt::Display for KindChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, other) = match self.is_partition {
            true => ("partition", "share"),
            false => ("share", "partition"),
        };
        write!(f, "; a {kind}, prefer {}", self.prefer.as_str())?;
        match self.is_second() {
            true => write!(f, ", but no {other} can serve the request"),
            false => Ok(()),
        }
    }
}

/// The best of the GPUs that were not selected and can serve the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuRunnerUp {
    /// Display name of the GPU.
    pub gpu: String,
    /// Allocated fraction of the GPU's memory, ppm.
    pub allocated_ppm: u32,
}

impl fmt::Display for NodeRanking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(other) = &self.runner_up else {
            return f.write_str("only feasible node");
        };
        let (ours, theirs) = (self.score, other.score);
        if ours.is_not_avoided != theirs.is_not_avoided {
            write!(f, "the pod could not be bound on {}", other.node)
        } else if ours.is_nominated != theirs.is_nominated {
            f.write_str("nominated by kube-scheduler")
        } else if ours.alternatives != theirs.alternatives {
            write!(f, "serves a more preferred alternative than {}", other.node)
        } else if ours.proximity != theirs.proximity {
            let (Reverse(ours), Reverse(theirs)) = (ours.proximity, theirs.proximity);
            write!(f, "topology: {ours}, on {} {theirs}", other.node)
        } else if ours.preference != theirs.preference {
            write!(
                f,
                "preferred by affinity, spread and taints: score {}, {} {}",
                ours.preference, other.node, theirs.preference
            )
        } else {
            let order = (ours.policy_score == theirs.policy_score).then_some("name");
            compare(
                f,
                self.policy.as_str(),
                " of GPU memory allocated",
                self.allocated_ppm,
                (&other.node, other.allocated_ppm),
                order,
            )
        }
    }
}

impl fmt::Display for GpuRanking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_gpu(f)?;
        if let Some(kind) = self.kind {
            kind.fmt(f)?;
        }
        match self.partition {
            Some(PartitionScore { memory, closed }) => {
                let memory = bytes(memory);
                write!(
                    f,
                    "; smallest partition with the requested capacity, {memory}; rules out {closed} others"
                )
            }
            None => Ok(()),
        }
    }
}

impl GpuRanking {
    fn fmt_gpu(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(other) = &self.runner_up else {
            return f.write_str("only feasible GPU");
        };
        let policy = self.policy.as_str();
        let amount = " of memory allocated";
        let (ours, theirs) = match self.policy {
            GpuPlacementPolicy::Binpack => (self.allocated_ppm, other.allocated_ppm),
            GpuPlacementPolicy::Spread => (other.allocated_ppm, self.allocated_ppm),
            GpuPlacementPolicy::Topology | GpuPlacementPolicy::Numa => {
                return write!(f, "{policy}: {}", self.proximity);
            }
            GpuPlacementPolicy::LeastFragmentation => {
                let other = (&*other.gpu, other.allocated_ppm);
                return compare(f, policy, amount, self.allocated_ppm, other, None);
            }
        };
        let order = (ours == theirs).then_some("index");
        compare(
            f,
            policy,
            amount,
            self.allocated_ppm,
            (&other.gpu, other.allocated_ppm),
            order,
        )?;
        if theirs > ours {
            // The search has backtracked.
            write!(f, ", which cannot serve all requests of the pod")?;
        }
        Ok(())
    }
}

/// `binpack: 40% of memory allocated, gpu-1 10%`.
fn compare(
    f: &mut fmt::Formatter<'_>,
    policy: &str,
    amount: &str,
    allocated_ppm: u32,
    (other, other_ppm): (&str, u32),
    tie_broken_by: Option<&str>,
) -> fmt::Result {
    write!(
        f,
        "{policy}: {}%{amount}, {other} {}%",
        allocated_ppm / 10_000,
        other_ppm / 10_000
    )?;
    match tie_broken_by {
        Some(order) => write!(f, ", first by {order}"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCORE: NodeScore = NodeScore {
        is_not_avoided: true,
        is_nominated: false,
        alternatives: Reverse(0),
        proximity: Reverse(Proximity::Same),
        preference: 0,
        policy_score: 100_000,
    };

    fn ranking(score: NodeScore, runner_up: NodeScore) -> String {
        NodeRanking {
            policy: NodePlacementPolicy::Binpack,
            allocated_ppm: 100_000,
            score,
            runner_up: Some(NodeRunnerUp {
                node: "n2".to_owned(),
                allocated_ppm: 50_000,
                score: runner_up,
            }),
        }
        .to_string()
    }

    #[test]
    fn prefers_full_with_binpack_and_empty_with_spread() {
        use GpuPlacementPolicy as Gpu;
        use NodePlacementPolicy as Node;
        let node = |policy, allocated| node_score(policy, allocated, 0.0);
        let gpu = |policy, allocated| gpu_score(policy, allocated, 0.0);
        assert!(node(Node::Binpack, 2) > node(Node::Binpack, 1));
        assert!(node(Node::Spread, 1) > node(Node::Spread, 2));
        for policy in [Gpu::Binpack, Gpu::Topology, Gpu::Numa] {
            assert!(gpu(policy, 2) > gpu(policy, 1));
        }
        assert!(gpu(Gpu::Spread, 1) > gpu(Gpu::Spread, 2));
        let loss = |loss| node_score(Node::LeastFragmentation, 0, loss);
        assert!(loss(-0.5) > loss(0.0) && loss(0.0) > loss(0.001));
    }

    #[test]
    fn names_deciding_criterion_of_node() {
        let lower = NodeScore {
            policy_score: 50_000,
            ..SCORE
        };
        for (ours, theirs, text) in [
            (SCORE, lower, "binpack: 10% of GPU memory allocated, n2 5%"),
            (
                SCORE,
                SCORE,
                "binpack: 10% of GPU memory allocated, n2 5%, first by name",
            ),
            (
                lower,
                NodeScore {
                    alternatives: Reverse(1),
                    ..SCORE
                },
                "serves a more preferred alternative than n2",
            ),
            (
                NodeScore {
                    proximity: Reverse(Proximity::NumaNode),
                    ..lower
                },
                NodeScore {
                    proximity: Reverse(Proximity::Node),
                    ..SCORE
                },
                "topology: the GPUs share a NUMA node, on n2 the GPUs share the node only",
            ),
            (
                NodeScore {
                    preference: 700,
                    ..lower
                },
                NodeScore {
                    preference: 500,
                    ..SCORE
                },
                "preferred by affinity, spread and taints: score 700, n2 500",
            ),
            (
                NodeScore {
                    is_nominated: true,
                    ..lower
                },
                SCORE,
                "nominated by kube-scheduler",
            ),
            (
                lower,
                NodeScore {
                    is_not_avoided: false,
                    is_nominated: true,
                    ..SCORE
                },
                "the pod could not be bound on n2",
            ),
        ] {
            assert!(ours >= theirs, "{ours:?} {theirs:?}");
            assert_eq!(ranking(ours, theirs), text);
        }
    }

    #[test]
    fn names_runner_up_among_gpus() {
        let ranking = |policy, ours, runner_up: Option<u32>| {
            GpuRanking {
                policy,
                allocated_ppm: ours,
                kind: None,
                runner_up: runner_up.map(|allocated_ppm| GpuRunnerUp {
                    gpu: "gpu-1".to_owned(),
                    allocated_ppm,
                }),
                partition: None,
                proximity: Proximity::PcieRoot,
            }
            .to_string()
        };
        use GpuPlacementPolicy::{Binpack, Spread, Topology};
        assert_eq!(ranking(Binpack, 0, None), "only feasible GPU");
        assert_eq!(
            ranking(Spread, 100_000, Some(400_000)),
            "spread: 10% of memory allocated, gpu-1 40%"
        );
        assert_eq!(
            ranking(Binpack, 0, Some(0)),
            "binpack: 0% of memory allocated, gpu-1 0%, first by index"
        );
        assert_eq!(
            ranking(Binpack, 100_000, Some(400_000)),
            "binpack: 10% of memory allocated, gpu-1 40%, which cannot serve all requests of the pod"
        );
        assert_eq!(
            ranking(Topology, 100_000, Some(400_000)),
            "topology: the GPUs share a PCIe root"
        );
    }
}
