//! Prints the packing quality of placement policies on traces, one JSON object per line.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_packing::experiment;
use drava_packing::trace::{read_nodes, read_pods};
use serde_json::json;

/// Measures the packing quality of placement policies.
#[derive(Parser)]
struct Args {
    /// Nodes, a CSV file in the format of openb.
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,
    /// Pods, a CSV file in the format of openb; may be repeated.
    #[arg(long, value_name = "FILE", required = true)]
    pods: Vec<PathBuf>,
    /// Policy between nodes and between GPUs, such as binpack; may be repeated.
    #[arg(long, value_name = "NAME", required = true)]
    policy: Vec<String>,
    /// Number of seeds: orders of arrival.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let nodes = read_nodes(&args.nodes)?;
    for file in &args.pods {
        let pods = read_pods(file)?;
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let trace = stem.strip_prefix("openb_pod_list_").unwrap_or(&stem);
        for policy in &args.policy {
            for seed in 0..args.seeds {
                let readings = experiment::run(&nodes, &pods, policies(policy)?, seed)?;
                for reading in readings {
                    let mut row = json!({"trace": trace, "policy": policy, "seed": seed});
                    if let (Some(row), serde_json::Value::Object(reading)) =
                        (row.as_object_mut(), serde_json::to_value(reading)?)
                    {
                        row.extend(reading);
                    }
                    println!("{row}");
                }
            }
        }
    }
    Ok(())
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
