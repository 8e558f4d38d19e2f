//! Prints the packing quality of placement policies on traces, the cost of their decisions, and how recommended amounts fit, one
//! JSON object per line.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Parser;
use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_packing::recommendation::{self, Curve};
use drava_packing::trace::{read_nodes, read_pods};
use drava_packing::{experiment, mig, scale};
use serde_json::{Value, json};

/// Measures the packing quality of placement policies.
#[derive(Parser)]
struct Args {
    /// Nodes, a CSV file in the format of openb, plain or compressed by gzip.
    #[arg(long, value_name = "FILE", required_unless_present_any = ["scale", "mig", "recommendation"])]
    nodes: Option<PathBuf>,
    /// Pods, a CSV file in the format of openb, plain or compressed by gzip; may be repeated.
    #[arg(long, value_name = "FILE", required_unless_present_any = ["scale", "mig"])]
    pods: Vec<PathBuf>,
    /// Number of equal nodes with 8 GPUs each, for the cost of decisions; may be repeated.
    #[arg(long, value_name = "COUNT")]
    scale: Vec<u64>,
    /// Number of decisions whose cost is measured.
    #[arg(long, default_value_t = 10_000)]
    decisions: usize,
    /// Print the accepted part of requests for MIG partitions that arrive and end.
    #[arg(long)]
    mig: bool,
    /// Print how recommendations for workloads with the requests of the pods fit their later use.
    #[arg(long)]
    recommendation: bool,
    /// Policy between nodes and between GPUs, such as binpack; may be repeated.
    #[arg(long, value_name = "NAME", required_unless_present_any = ["mig", "recommendation"])]
    policy: Vec<String>,
    /// Number of seeds: orders of arrival.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.mig {
        for row in mig::acceptances()? {
            print(json!({}), serde_json::to_value(row)?);
        }
    }
    if args.recommendation {
        for file in &args.pods {
            let pods = read_pods(file)?;
            for curve in Curve::ALL {
                for seed in 0..args.seeds {
                    let fit = recommendation::fit(&pods, curve, seed)?;
                    let row = json!({"trace": trace(file), "curve": curve, "seed": seed});
                    print(row, serde_json::to_value(fit)?);
                }
            }
        }
    }
    for nodes in &args.scale {
        for policy in &args.policy {
            for seed in 0..args.seeds {
                let cost = scale::run(*nodes, args.decisions, policies(policy)?, seed)?;
                print(
                    json!({"policy": policy, "seed": seed}),
                    serde_json::to_value(cost)?,
                );
            }
        }
    }
    let Some(nodes) = &args.nodes else {
        return Ok(());
    };
    let nodes = read_nodes(nodes)?;
    for file in &args.pods {
        let pods = read_pods(file)?;
        let trace = trace(file);
        for policy in &args.policy {
            for seed in 0..args.seeds {
                let readings = experiment::run(&nodes, &pods, policies(policy)?, seed)?;
                for reading in readings {
                    let row = json!({"trace": trace, "policy": policy, "seed": seed});
                    print(row, serde_json::to_value(reading)?);
                }
            }
        }
    }
    Ok(())
}

/// Returns the name of a trace.
fn trace(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.split('.').next().unwrap_or_default();
    let trace = stem.strip_prefix("openb_pod_list_").unwrap_or(stem);
    trace.to_owned()
}

/// Prints both objects as one row.
fn print(mut row: Value, more: Value) {
    if let (Some(row), Value::Object(more)) = (row.as_object_mut(), more) {
        row.extend(more);
    }
    println!("{row}");
}

fn policies(name: &str) -> Result<Policies> {
    let parse = |error: String| anyhow::anyhow!(error);
    Ok(Policies {
        node: name
            .parse::<NodePlacementPolicy>()
            .map_err(parse)
            .context("--policy")?,
        gpu: name
            .parse::<GpuPlacementPolicy>()
            .map_err(parse)
            .context("--policy")?,
    })
}
