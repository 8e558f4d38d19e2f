//! The experiment on the first nodes of openb.

use std::path::{Path, PathBuf};

use anyhow::Result;
use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_packing::experiment::{self, Reading};
use drava_packing::trace::{read_nodes, read_pods};

const BINPACK: Policies = Policies {
    node: NodePlacementPolicy::Binpack,
    gpu: GpuPlacementPolicy::Binpack,
};

const SPREAD: Policies = Policies {
    node: NodePlacementPolicy::Spread,
    gpu: GpuPlacementPolicy::Spread,
};

fn file(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("openb");
    directory.join(format!("openb_{name}.csv"))
}

/// Readings for the first 60 nodes.
fn run(policies: Policies, seed: u64) -> Result<Vec<Reading>> {
    let mut nodes = read_nodes(&file("node_list_gpu_node"))?;
    nodes.truncate(60);
    let pods = read_pods(&file("pod_list_default"))?;
    experiment::run(&nodes, &pods, policies, seed)
}

#[test]
fn traces_have_published_totals() -> Result<()> {
    let nodes = read_nodes(&file("node_list_gpu_node"))?;
    assert_eq!(nodes.len(), 1_213);
    assert_eq!(nodes.iter().map(|node| node.gpus).sum::<u64>(), 6_212);
    let pods = read_pods(&file("pod_list_default"))?;
    assert_eq!(pods.len(), 8_152);
    let requested: u64 = pods.iter().map(|pod| pod.requested_milli()).sum();
    assert_eq!(requested, 6_086_800);
    Ok(())
}

#[test]
fn binpack_allocates_more_than_spread() -> Result<()> {
    let (binpack, spread) = (run(BINPACK, 1)?, run(SPREAD, 1)?);
    let percent = |readings: &[Reading]| {
        readings
            .iter()
            .map(|reading| reading.arrived_percent)
            .collect::<Vec<_>>()
    };
    assert_eq!(percent(&binpack), [100, 130]);
    assert_eq!(percent(&spread), [100, 130]);
    for (binpack, spread) in binpack.iter().zip(&spread) {
        let (binpack, spread) = (binpack.allocated_percent, spread.allocated_percent);
        assert!(binpack <= 100.0 && binpack > spread, "{binpack} {spread}");
    }
    Ok(())
}

#[test]
fn seed_determines_order_of_arrival() -> Result<()> {
    let allocated = |seed| -> Result<Vec<f64>> {
        let readings = run(BINPACK, seed)?;
        Ok(readings
            .iter()
            .map(|reading| reading.allocated_percent)
            .collect())
    };
    assert_eq!(allocated(1)?, allocated(1)?);
    assert_ne!(allocated(1)?, allocated(2)?);
    Ok(())
}
