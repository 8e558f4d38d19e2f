//! Reclaim of lent GPU time.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use drava_vgpu_abi::ComputePolicy;
use drava_vgpu_abi::page::LENT_OFFSET;
use drava_vgpu_abi::snapshot::Snapshot;
use gpu_node::eventually;
use serde_json::json;

use crate::node::{BenchNode, limits};
use crate::report;

const BORROWER: u32 = 1;
const OWNER: u32 = 2;

/// Time in which the owner's deficit is measured.
const WATCHED: Duration = Duration::from_millis(500);

/// The owner of 70% is idle while the borrower uses the whole GPU. Measures the time until the borrower is throttled after
/// the owner resumes (`told_ms`), and what the owner lacks in its first 500 ms (`lacks_ms`): the surplus of the
/// borrower, of what both got. `idle_ms` is the time in which the GPU was idle or switched between contexts, `waited_ms`
/// that in which debt delayed the owner's launches.
pub(crate) fn measure() -> Result<()> {
    let node = BenchNode::new()?;
    node.prepare(0, BORROWER, &limits(ComputePolicy::Balance, 30, 0)?)?;
    node.prepare(0, OWNER, &limits(ComputePolicy::Balance, 70, 0)?)?;
    let _agent = node.agent()?;
    let mut borrower = node.tenant(0, BORROWER)?;
    borrower.ok("start kernel ns=1000000 depth=16")?;
    let mut owner = node.tenant(0, OWNER)?;
    let pids = [owner.pid(), borrower.pid()];
    for _ in 0..20 {
        eventually("the whole GPU for the borrower of an idle owner", || {
            let is_lent = node.node.word(OWNER, LENT_OFFSET).ok()? != 0;
            (borrower_rate(&node).ok()? > 900_000 && is_lent).then_some(())
        })?;
        let waited_before_us = waited_us(&node)?;
        let (before, start) = node.test_bed.used(&pids)?;
        owner.ok("start kernel ns=1000000 depth=16")?;
        // The measured time is a few milliseconds.
        while borrower_rate(&node)? >= 500_000 {
            ensure!(start.elapsed() < WATCHED, "the borrower keeps the GPU");
            std::thread::sleep(Duration::from_micros(200));
        }
        let throttled = start.elapsed();
        std::thread::sleep(WATCHED.saturating_sub(start.elapsed()));
        let (after, end) = node.test_bed.used(&pids)?;
        let length = (end - start).as_secs_f64();
        let had: Vec<f64> = after
            .iter()
            .zip(before)
            .map(|(after, before)| after.saturating_sub(before).as_secs_f64())
            .collect();
        let both: f64 = had.iter().sum();
        // Relative to its share.
        let lacks = (0.7 * both - had.first().context("no owner")?) / 0.7;
        let waited = Duration::from_micros(waited_us(&node)? - waited_before_us);
        report(&json!({
            "figure": "giving back", "told_ms": throttled.as_secs_f64() * 1e3, "lacks_ms": lacks * 1e3,
            "idle_ms": (length - both) * 1e3, "waited_ms": waited.as_secs_f64() * 1e3,
        }));
        owner.ok("stop")?;
    }
    Ok(())
}

fn borrower_rate(node: &BenchNode) -> Result<u32> {
    let limits = node.node.limits(BORROWER)?;
    limits.rate_us_per_s.context("the borrower has no rate")
}

/// Returns how long the owner's launches have waited.
fn waited_us(node: &BenchNode) -> Result<u64> {
    let region = std::fs::read(node.node.region_file(OWNER)?)?;
    let snapshot = Snapshot::decode(&region)?;
    Ok(snapshot.processes().map(|p| p.throttled_us).sum())
}
