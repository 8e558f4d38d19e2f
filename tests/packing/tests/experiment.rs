//! The experiment on the first nodes of openb.

use std::path::{Path, PathBuf};

use anyhow::Result;
use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_packing::experiment::{self, Reading};
use drava_packing::scale;
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
    directory.join(format!("openb_{name}.csv.gz"))
}

const LEAST_FRAGMENTATION: Policies = Policies {
    node: NodePlacementPolicy::LeastFragmentation,
    gpu: GpuPlacementPolicy::LeastFragmentation,
};

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

#[test]
fn least_fragmentation_allocates_more_than_binpack() -> Result<()> {
    let at_end = |policies| -> Result<f64> {
        let mut sum = 0.0;
        for seed in 0..3 {
            let readings = run(policies, seed)?;
            sum += readings
                .last()
                .map_or(0.0, |reading| reading.allocated_percent);
        }
        Ok(sum / 3.0)
    };
    let (least, binpack) = (at_end(LEAST_FRAGMENTATION)?, at_end(BINPACK)?);
    assert!(least > binpack + 0.5, "{least} {binpack}");
    Ok(())
}

#[test]
fn cost_of_decision_is_independent_of_cluster_size() -> Result<()> {
    let checks = |nodes| -> Result<f64> { Ok(scale::run(nodes, 300, BINPACK, 1)?.checks) };
    let (few, many) = (checks(20)?, checks(200)?);
    assert!(many < few + 10.0 && many < 30.0, "{few} {many}");
    Ok(())
}
