//! Measurements of `cargo xtask bench share`: GPU time and latency of shares under the agent and libvgpu. `DRAVA_SECONDS`
//! sets the duration.

use std::time::{Duration, Instant};

use drava_vgpu_abi::page::LENT_OFFSET;
use drava_vgpu_abi::snapshot::Snapshot;
use drava_vgpu_abi::{ComputePolicy, Cores, Limits, Priority};
use gpu_tenants::{Tenant, TestBed, library};
use serde_json::json;

use crate::measurements::report;
use crate::node::{GIB, TestNode};

const SETTLE: Duration = Duration::from_secs(4);

/// Returns the limits of a share with 1 GiB.
pub(crate) fn limits(policy: ComputePolicy, percent: u32, priority: i32) -> Limits {
    Limits {
        cores: Cores::new(percent).unwrap(),
        compute_policy: policy,
        priority: Priority::new(priority).unwrap(),
        ..Limits::memory(GIB)
    }
}

fn measure() -> Duration {
    let seconds = std::env::var("DRAVA_SECONDS").map_or(10.0, |seconds| seconds.parse().unwrap());
    Duration::from_secs_f64(seconds)
}

fn name(policy: ComputePolicy) -> &'static str {
    match policy {
        ComputePolicy::None => "none",
        ComputePolicy::Balance => "balance",
        ComputePolicy::Fixed => "fixed",
        ComputePolicy::Token => "token",
    }
}

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
fn run_two(policy: ComputePolicy, shares: [u32; 2], loads: [&str; 2]) -> Vec<f64> {
    let node = if are_kernels(loads) {
        TestNode::new()
    } else {
        TestNode::on(TestBed::with_slow_memory(library::shipped().unwrap()).unwrap())
    };
    for (number, percent) in (1..).zip(shares) {
        node.prepare(number, &limits(policy, percent, 0));
    }
    let _agent = node.agent_process();
    let tenants: Vec<Tenant> = (1..)
        .zip(loads)
        .map(|(number, load)| {
            let mut tenant = node.tenant(number);
            if !load.starts_with("kernel") {
                tenant.ok("memory 4096").unwrap();
            }
            tenant.ok(&format!("start {load} {GRIDS}")).unwrap();
            tenant
        })
        .collect();
    let tenants: Vec<&Tenant> = tenants.iter().collect();
    node.percents(&tenants, SETTLE, measure())
}

/// The same with HAMi-core's algorithm, without agent and libvgpu.
fn run_two_by_hami(shares: [u32; 2], loads: [&str; 2]) -> Vec<f64> {
    let test_bed = TestBed::new(library::shipped().unwrap()).unwrap();
    let tenants = [0, 1].map(|index: usize| {
        let mut tenant = test_bed.tenant(None, "dlsym").unwrap();
        tenant.ok(&format!("hami {}", shares[index])).unwrap();
        let load = loads[index];
        tenant.ok(&format!("start {load} {GRIDS}")).unwrap();
        tenant
    });
    let tenants = tenants.each_ref();
    test_bed.percents(&tenants, SETTLE, measure()).unwrap()
}

/// Measures two saturating shares. The error is the larger deviation from its part of what both got: nothing runs while the
/// GPU switches between contexts. HAMi-core has one policy and does not meter copies.
fn two(policy: ComputePolicy, shares: [u32; 2], loads: [&str; 2]) {
    let got = run_two(policy, shares, loads);
    let error = |got: &Vec<f64>| {
        let available: f64 = got.iter().sum::<f64>() / 100.0;
        let off = |(got, share): (&f64, u32)| (got - f64::from(share) * available).abs();
        got.iter().zip(shares).map(off).fold(0.0, f64::max)
    };
    let has_baseline = std::env::var("DRAVA_BASELINE").is_ok_and(|value| value == "true");
    let has_baseline = has_baseline && policy == ComputePolicy::Balance && are_kernels(loads);
    let hami = has_baseline.then(|| run_two_by_hami(shares, loads));
    report(&json!({
        "figure": "two", "policy": name(policy), "load": loads.join(" / "), "share": shares, "got": got,
        "error_points": error(&got), "sum": got.iter().sum::<f64>(),
        "hami_got": hami, "hami_error_points": hami.as_ref().map(error),
    }));
}

#[test]
#[ignore = "takes minutes: cargo xtask bench share"]
fn measures_two_balance_shares() {
    for (loads, shares) in LOADS.into_iter().flat_map(|l| SPLITS.map(|s| (l, s))) {
        two(ComputePolicy::Balance, shares, loads);
    }
}

#[test]
#[ignore = "takes minutes: cargo xtask bench share"]
fn measures_two_token_shares() {
    for (loads, shares) in LOADS.into_iter().flat_map(|l| SPLITS.map(|s| (l, s))) {
        two(ComputePolicy::Token, shares, loads);
    }
}

/// A fill takes 10 ms of GPU time, a copy 20 ms.
#[test]
#[ignore = "takes minutes: cargo xtask bench share"]
fn measures_two_shares_with_fills_and_copies() {
    for load in ["fill ns=4096 depth=8", "copy ns=4096 depth=4"] {
        for shares in SPLITS {
            let loads = [load, "kernel ns=1000000 depth=16"];
            two(ComputePolicy::Balance, shares, loads);
        }
    }
}

/// The first share works for 50 ms of GPU time and pauses for 200 ms, alongside a saturating share. While it works it is due
/// its share, as if it had that part of a GPU alone. The error is what it lacks of that.
#[test]
#[ignore = "takes minutes: cargo xtask bench share"]
fn measures_bursts() {
    const WORK_S: f64 = 0.05;
    const PAUSE_S: f64 = 0.2;
    for policy in [ComputePolicy::Balance, ComputePolicy::Token] {
        for shares in SPLITS {
            let loads = [
                "kernel ns=1000000 depth=16 burst=50 idle=200",
                "kernel ns=1000000 depth=16",
            ];
            let got = run_two(policy, shares, loads);
            let due = 100.0 * WORK_S / (WORK_S * 100.0 / f64::from(shares[0]) + PAUSE_S);
            report(&json!({
                "figure": "bursts", "policy": name(policy), "share": shares, "due": due, "got": got,
                "error_points": (due - got[0]).max(0.0), "sum": got.iter().sum::<f64>(),
            }));
        }
    }
}

/// The owner of 70% is idle while the borrower uses the whole GPU. Measures the time until the borrower is throttled after
/// the owner resumes (`told_ms`), and what the owner lacks in its first 500 ms (`lacks_ms`): the surplus of the
/// borrower, of what both got. `idle_ms` is the time in which the GPU was idle or switched between contexts, `waited_ms`
/// that in which debt delayed the owner's launches.
#[test]
#[ignore = "takes minutes: cargo xtask bench share"]
fn measures_reclaim_of_lent_time() {
    const WATCHED: Duration = Duration::from_millis(500);
    let node = TestNode::new();
    node.prepare(1, &limits(ComputePolicy::Balance, 30, 0));
    node.prepare(2, &limits(ComputePolicy::Balance, 70, 0));
    let _agent = node.agent_process();
    let mut borrower = node.tenant(1);
    borrower.ok("start kernel ns=1000000 depth=16").unwrap();
    let mut owner = node.tenant(2);
    let pids = [owner.pid(), borrower.pid()];
    let waited_us = || {
        let region = std::fs::read(node.region(2)).unwrap();
        let snapshot = Snapshot::decode(&region).unwrap();
        snapshot.processes().map(|p| p.throttled_us).sum::<u64>()
    };
    for _ in 0..20 {
        crate::node::eventually("the whole GPU for the borrower of an idle owner", || {
            let rate = node.page(1).rate_us_per_s?;
            (rate > 900_000 && node.word(2, LENT_OFFSET) != 0).then_some(())
        });
        let waited_before_us = waited_us();
        let (before, start) = node.test_bed.used(&pids).unwrap();
        owner.ok("start kernel ns=1000000 depth=16").unwrap();
        // The measured time is a few milliseconds.
        while node.page(1).rate_us_per_s.unwrap() >= 500_000 {
            assert!(start.elapsed() < WATCHED, "the borrower keeps the GPU");
            std::thread::sleep(Duration::from_micros(200));
        }
        let throttled = start.elapsed();
        std::thread::sleep(WATCHED.saturating_sub(start.elapsed()));
        let (after, end) = node.test_bed.used(&pids).unwrap();
        let length = (end - start).as_secs_f64();
        let had = [0, 1].map(|index: usize| (after[index] - before[index]).as_secs_f64());
        let both = had[0] + had[1];
        // Relative to its share.
        let lacks = (0.7 * both - had[0]) / 0.7;
        let idle = length - both;
        let waited = (waited_us() - waited_before_us) as f64 / 1e3;
        report(&json!({
            "figure": "giving back", "told_ms": throttled.as_secs_f64() * 1e3, "lacks_ms": lacks * 1e3,
            "idle_ms": idle * 1e3, "waited_ms": waited,
        }));
        owner.ok("stop").unwrap();
    }
}

/// Requests per block. Blocks alone and with other load alternate, so that noise of the host affects both.
const BLOCK: usize = 50;

/// Time until started work is in steady state.
const WARM_UP: Duration = Duration::from_millis(500);

/// A repeated request: kernels of this length, each awaited, then a pause of four times their total length.
#[derive(Clone, Copy)]
struct Request {
    kernels: u32,
    ns: u64,
}

impl Request {
    /// Makes one request and returns its duration, ms.
    fn make(self, tenant: &mut Tenant) -> f64 {
        std::thread::sleep(4 * self.kernels * Duration::from_nanos(self.ns));
        if self.kernels == 1 {
            return tenant.ok(&format!("once {}", self.ns)).unwrap()[0] as f64 / 1e3;
        }
        let start = Instant::now();
        for _ in 0..self.kernels {
            tenant.ok(&format!("once {}", self.ns)).unwrap();
        }
        start.elapsed().as_secs_f64() * 1e3
    }

    /// Returns the number of requests, alone and with other load.
    fn count(self) -> usize {
        let length = self.kernels * Duration::from_nanos(self.ns);
        let count = measure().as_nanos() / (2 * length.as_nanos());
        usize::try_from(count).unwrap().clamp(4 * BLOCK, 20 * BLOCK)
    }
}

fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() * percent / 100).min(values.len() - 1)]
}

/// Returns the durations of requests that wait for one running kernel. The GPU is busy with such kernels for the fraction
/// `busy` of the time. No scheduler without preemption of kernels does better.
fn behind_one_kernel(alone: &[f64], kernel_ms: f64, busy: f64) -> Vec<f64> {
    const PHASES: u32 = 100;
    let wait = |phase: u32| {
        let moment = (f64::from(phase) + 0.5) / f64::from(PHASES);
        kernel_ms * (1.0 - moment / busy).max(0.0)
    };
    let waits = (0..PHASES).map(wait);
    waits
        .flat_map(|wait| alone.iter().map(move |ms| ms + wait))
        .collect()
}

/// Measures requests of a high-priority share: alone, with the same load on another GPU, which shows the cost on the host,
/// and with a best-effort share on the same GPU.
fn latency(policy: ComputePolicy, request: Request, other_ns: u64) {
    let node = TestNode::new();
    node.prepare(1, &limits(policy, 50, 100));
    node.prepare(2, &limits(policy, 0, 0));
    let _agent = node.agent_process();
    let load = format!("start kernel ns={other_ns} depth=8");
    let mut other = node.tenant(2);
    other.ok(&load).unwrap();
    let solo = node.percents(&[&other], SETTLE, measure().min(SETTLE))[0];
    other.ok("stop").unwrap();
    let second = node.test_bed.machine().status().unwrap().cards[1]
        .uuid
        .to_string();
    node.prepare_on(&second, 3, &limits(policy, 0, 0));
    let mut elsewhere = node.tenant_on(1, 3);
    let mut urgent = node.tenant(1);
    let pids = [urgent.pid(), other.pid()];
    for _ in 0..20 {
        request.make(&mut urgent);
    }
    let [mut alone, mut host, mut shared] = [const { Vec::new() }; 3];
    let (mut had, mut elapsed) = ([Duration::ZERO; 2], Duration::ZERO);
    while alone.len() < request.count() {
        std::thread::sleep(WARM_UP);
        alone.extend((0..BLOCK).map(|_| request.make(&mut urgent)));
        elsewhere.ok(&load).unwrap();
        std::thread::sleep(WARM_UP);
        host.extend((0..BLOCK).map(|_| request.make(&mut urgent)));
        elsewhere.ok("stop").unwrap();
        other.ok(&load).unwrap();
        std::thread::sleep(WARM_UP);
        let (before, start) = node.test_bed.used(&pids).unwrap();
        shared.extend((0..BLOCK).map(|_| request.make(&mut urgent)));
        let (after, end): (_, Instant) = node.test_bed.used(&pids).unwrap();
        elapsed += end - start;
        for (had, (after, before)) in had.iter_mut().zip(after.iter().zip(before)) {
            *had += *after - before;
        }
        other.ok("stop").unwrap();
    }
    let [urgent_had, other_had] = had.map(|had| had.as_secs_f64() / elapsed.as_secs_f64());
    let busy = (other_had / (1.0 - urgent_had)).min(1.0);
    let mut least = behind_one_kernel(&alone, other_ns as f64 / 1e6, busy);
    let figures = [50, 90, 99].map(|percent| {
        (
            percentile(&mut alone, percent),
            percentile(&mut host, percent),
            percentile(&mut shared, percent),
        )
    });
    let [
        (p50, p50_host, p50_shared),
        (p90, p90_host, p90_shared),
        (p99, p99_host, p99_shared),
    ] = figures;
    let p99_least = percentile(&mut least, 99);
    report(&json!({
        "figure": "latency", "policy": name(policy), "kernels": request.kernels, "kernel_ms": request.ns as f64 / 1e6,
        "best_effort_kernel_ms": other_ns as f64 / 1e6, "requests": alone.len(),
        "p50_ms": p50, "p50_elsewhere_ms": p50_host, "p50_beside_ms": p50_shared,
        "p90_ms": p90, "p90_elsewhere_ms": p90_host, "p90_beside_ms": p90_shared,
        "p99_ms": p99, "p99_elsewhere_ms": p99_host, "p99_beside_ms": p99_shared,
        "p99_more_percent": 100.0 * (p99_shared / p99 - 1.0),
        "p99_more_than_elsewhere_percent": 100.0 * (p99_shared / p99_host - 1.0),
        "p99_behind_one_kernel_ms": p99_least, "p99_behind_one_kernel_percent": 100.0 * (p99_least / p99 - 1.0),
        "best_effort_got": 100.0 * other_had, "best_effort_solo": 10_000.0 * other_had / solo,
    }));
}

/// Measures requests for each policy with short best-effort kernels.
fn measure_latency(kernels: u32, ns: u64) {
    for policy in [ComputePolicy::Balance, ComputePolicy::Token] {
        for other_ns in [100_000, 1_000_000] {
            latency(policy, Request { kernels, ns }, other_ns);
        }
    }
}

#[test]
#[ignore = "takes minutes: cargo xtask bench share"]
fn measures_latency_of_urgent_requests() {
    measure_latency(1, 5_000_000);
}

#[test]
#[ignore = "takes minutes: cargo xtask bench share"]
fn measures_latency_of_multi_kernel_requests() {
    measure_latency(10, 500_000);
}

#[test]
#[ignore = "takes minutes: cargo xtask bench share"]
fn measures_latency_of_long_requests() {
    measure_latency(1, 50_000_000);
}
