//! Placement of MIG partitions under churn.

use anyhow::{Context, Result};
use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_packing::mig::allocator::{MigNode, device};
use drava_packing::mig::{A100, Churn, Gpu, MIXES, Selection};

const BINPACK: Policies = Policies {
    node: NodePlacementPolicy::Binpack,
    gpu: GpuPlacementPolicy::Binpack,
};

#[test]
fn a100_has_its_layouts() {
    assert_eq!(Gpu::new().layouts().len(), 723);
}

/// `Selection::Count` stands for the allocator, whose decisions are too slow for all layouts in each usual run.
#[test]
fn allocator_rules_out_fewest_placements() -> Result<()> {
    let gpu = Gpu::new();
    let churn = Churn::new(&gpu, MIXES[1].1, 1.0)?;
    for layout in gpu.layouts().iter().step_by(7) {
        let mut node = MigNode::new(1, BINPACK)?;
        node.occupy(*layout)?;
        for profile in 0..6 {
            let selected = node.place("request", profile)?;
            let selected = selected.as_ref().map(device).transpose()?;
            let index = selected.map(|name| {
                let index = name.rsplit('-').next().and_then(|index| index.parse().ok());
                index.with_context(|| name.clone())
            });
            assert_eq!(
                index.transpose()?,
                churn.select(Selection::Count, *layout, profile),
                "layout {layout:b}, profile {profile}"
            );
        }
    }
    Ok(())
}

#[test]
fn accepts_as_many_requests_for_whole_gpus_as_it_loses() -> Result<()> {
    // One server without a queue, at a load of 1 (Erlang).
    let gpu = Gpu::new();
    let mut mix = [0.0; A100.len()];
    mix[5] = 1.0;
    for selection in Selection::ALL {
        let accepted = Churn::new(&gpu, mix, 1.0)?.accepted(selection)?;
        assert!((accepted - 0.5).abs() < 1e-6, "{selection:?}: {accepted}");
    }
    Ok(())
}

#[test]
fn optimum_accepts_most_requests() -> Result<()> {
    let gpu = Gpu::new();
    let churn = Churn::new(&gpu, MIXES[1].1, 1.0)?;
    let optimum = churn.accepted(Selection::Optimum)?;
    let count = churn.accepted(Selection::Count)?;
    let first_fit = churn.accepted(Selection::FirstFit)?;
    assert!(first_fit < count, "{first_fit} {count}");
    assert!(count <= optimum + 1e-6, "{count} {optimum}");
    assert!(0.5 < first_fit && optimum < 1.0, "{first_fit} {optimum}");
    Ok(())
}
