//! Measures allocations by a real control plane, and prints one JSON object per line.
//!
//! API server, etcd and kube-scheduler are those of a running test cluster; the controller is the program as shipped.
//! Nodes are objects without a kubelet, so pods are bound and never run. kube-controller-manager is stopped: without
//! heartbeats it would mark the nodes as unreachable.

mod allocation;
mod binding;
mod control_plane;
mod decisions;
mod measured;
mod rejection;
mod watched;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;

use control_plane::ControlPlane;
use drava_planning::objects::Shape;

/// Measures allocations by a real control plane.
#[derive(Parser)]
struct Args {
    /// State directory of the running cluster.
    #[arg(long)]
    state: PathBuf,
    /// Program of the controller.
    #[arg(long)]
    controller: PathBuf,
    /// Another program of the controller, whose allocations are measured beside.
    #[arg(long)]
    base_controller: Option<PathBuf>,
    /// Number of nodes with eight GPUs. A fifth of them publishes MIG partitions in the measurement of these.
    #[arg(long)]
    nodes: usize,
    /// Number of waiting claims that the controller allocates.
    #[arg(long)]
    claims: usize,
    /// Number of pods that are bound.
    #[arg(long)]
    pods: usize,
    /// Number of pods that fit on no node.
    #[arg(long)]
    rejected: usize,
    /// Seconds of churn with pods that fit.
    #[arg(long)]
    seconds: u64,
    /// Rounds of each comparison.
    #[arg(long)]
    rounds: usize,
    /// What is measured; may be repeated.
    #[arg(long, value_enum)]
    measure: Vec<Measure>,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Measure {
    /// Claims per second, against bare loops of writes and another controller.
    Allocation,
    /// Events and latency with pods that fit on no node.
    Rejection,
    /// Pods bound to nodes with shareable GPUs, with the controller and with kube-scheduler alone.
    Shares,
    /// Pods bound to nodes with MIG partitions, with the controller and with kube-scheduler alone.
    Partitions,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let mut plane = ControlPlane::prepare(&args.state, &args.controller).await?;
    for measure in &args.measure {
        match measure {
            Measure::Allocation => {
                plane.use_nodes(args.nodes, Shape::Shares).await?;
                let base = args.base_controller.as_deref();
                allocation::measure(&plane, base, args.claims, args.rounds).await?;
            }
            Measure::Rejection => {
                plane.use_nodes(args.nodes, Shape::Shares).await?;
                rejection::measure(&plane, args.rejected, args.seconds).await?;
            }
            Measure::Shares => {
                plane.use_nodes(args.nodes, Shape::Shares).await?;
                binding::measure(&plane, args.pods, args.rounds).await?;
            }
            Measure::Partitions => {
                plane
                    .use_nodes(args.nodes.div_ceil(5), Shape::Partitions)
                    .await?;
                binding::measure(&plane, args.pods, args.rounds).await?;
            }
        }
    }
    Ok(())
}
