//! GPU time of two shares.

use std::time::Duration;

use anyhow::Result;
use drava_vgpu_abi::ComputePolicy;
use gpu_tenants::{Tenant, TestBed, library};
use serde_json::json;

use crate::node::{BenchNode, limits};
use crate::{name, report};

/// Time until two shares are in steady state.
pub(crate) const SETTLE: Duration = Duration::from_secs(4);

/// Splits of the GPU between two shares, percent.
const SPLITS: [[u32; 2]; 3] = [[30, 70], [10, 90], [50, 50]];

/// Kernels of one length, of two lengths, short and long, and of several lengths in random order.
const LOADS: [[&str; 2]; 5] = [
    ["kernel ns=1000000 depth=16", "kernel ns=1000000 depth=16"],
    ["kernel ns=5000000 depth=8", "kernel ns=1000000 depth=16"],
    ["kernel ns=20000000 depth=4", "kernel ns=1000000 depth=16"],
    ["kernel ns=300000 depth=32", "kernel ns=10000000 depth=8"],
    [
        "kernel ns=100000,1000000,10000000 depth=16 random=1",
        "kernel ns=200000,5000000 depth=16 random=1",
    ],
];

/// Blocks of kernels: see `block_us` of tenants.
const GRIDS: &str = "block_us=100";

fn are_kernels(loads: [&str; 2]) -> bool {
    loads.iter().all(|load| load.starts_with("kernel"))
}

/// Runs two shares with these loads and returns the percentage of the GPU of each.
fn run_two(
    policy: ComputePolicy,
    shares: [u32; 2],
    loads: [&str; 2],
    length: Duration,
) -> Result<Vec<f64>> {
    let node = if are_kernels(loads) {
        BenchNode::new()?
    } else {
        BenchNode::on(TestBed::with_slow_memory(library::shipped()?)?)?
    };
    for (claim, percent) in (1..).zip(shares) {
        node.prepare(0, claim, &limits(policy, percent, 0)?)?;
    }
    let _agent = node.agent()?;
    let mut tenants = Vec::new();
    for (claim, load) in (1..).zip(loads) {
        let mut tenant = node.tenant(0, claim)?;
        if !load.starts_with("kernel") {
            tenant.ok("memory 4096")?;
        }
        tenant.ok(&format!("start {load} {GRIDS}"))?;
        tenants.push(tenant);
    }
    percents(&node.test_bed, &tenants, length)
}

/// The same with HAMi-core's algorithm, without agent and libvgpu.
fn run_two_by_hami(shares: [u32; 2], loads: [&str; 2], length: Duration) -> Result<Vec<f64>> {
    let test_bed = TestBed::new(library::shipped()?)?;
    let mut tenants = Vec::new();
    for (share, load) in shares.into_iter().zip(loads) {
        let mut tenant = test_bed.tenant(None, "dlsym")?;
        tenant.ok(&format!("hami {share}"))?;
        tenant.ok(&format!("start {load} {GRIDS}"))?;
        tenants.push(tenant);
    }
    percents(&test_bed, &tenants, length)
}

fn percents(test_bed: &TestBed, tenants: &[Tenant], length: Duration) -> Result<Vec<f64>> {
    test_bed.percents(&tenants.iter().collect::<Vec<_>>(), SETTLE, length)
}

/// Returns the larger deviation of two saturating shares from its part of what both got: nothing runs while the GPU switches
/// between contexts.
fn error_points(shares: [u32; 2], got: &[f64]) -> f64 {
    let available: f64 = got.iter().sum::<f64>() / 100.0;
    let off = |(got, share): (&f64, u32)| (got - f64::from(share) * available).abs();
    got.iter().zip(shares).map(off).fold(0.0, f64::max)
}

/// Measures two saturating shares. HAMi-core has one policy and does not meter copies.
fn two(
    policy: ComputePolicy,
    shares: [u32; 2],
    loads: [&str; 2],
    length: Duration,
    has_baseline: bool,
) -> Result<()> {
    let got = run_two(policy, shares, loads, length)?;
    let hami = if has_baseline {
        Some(run_two_by_hami(shares, loads, length)?)
    } else {
        None
    };
    report(&json!({
        "figure": "two", "policy": name(policy), "load": loads.join(" / "), "share": shares, "got": got,
        "error_points": error_points(shares, &got), "sum": got.iter().sum::<f64>(),
        "hami_got": hami, "hami_error_points": hami.as_deref().map(|got| error_points(shares, got)),
    }));
    Ok(())
}

/// Measures kernels.
pub(crate) fn measure_kernels(length: Duration, has_baseline: bool) -> Result<()> {
    for (loads, shares) in LOADS.into_iter().flat_map(|l| SPLITS.map(|s| (l, s))) {
        two(ComputePolicy::Balance, shares, loads, length, has_baseline)?;
    }
    Ok(())
}

/// Measures fills and copies. A fill takes 10 ms of GPU time, a copy 20 ms.
pub(crate) fn measure_copies(length: Duration) -> Result<()> {
    for load in ["fill ns=4096 depth=8", "copy ns=4096 depth=4"] {
        for shares in SPLITS {
            let loads = [load, "kernel ns=1000000 depth=16"];
            two(ComputePolicy::Balance, shares, loads, length, false)?;
        }
    }
    Ok(())
}

/// The first share works for 50 ms of GPU time and pauses for 200 ms, alongside a saturating share. While it works it is due
/// its share, as if it had that part of a GPU alone. The error is what it lacks of that.
pub(crate) fn measure_bursts(length: Duration) -> Result<()> {
    const WORK_S: f64 = 0.05;
    const PAUSE_S: f64 = 0.2;
    let loads = [
        "kernel ns=1000000 depth=16 burst=50 idle=200",
        "kernel ns=1000000 depth=16",
    ];
    let policy = ComputePolicy::Balance;
    for shares in SPLITS {
        let got = run_two(policy, shares, loads, length)?;
        let due = 100.0 * WORK_S / (WORK_S * 100.0 / f64::from(shares[0]) + PAUSE_S);
        let first = got.first().copied().unwrap_or_default();
        report(&json!({
            "figure": "bursts", "policy": name(policy), "share": shares, "due": due, "got": got,
            "error_points": (due - first).max(0.0), "sum": got.iter().sum::<f64>(),
        }));
    }
    Ok(())
}
