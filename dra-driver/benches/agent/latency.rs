//! Latency of requests of higher priority.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use drava_vgpu_abi::ComputePolicy;
use gpu_node::AgentProcess;
use gpu_tenants::Tenant;
use serde_json::json;

use crate::node::{BenchNode, limits};
use crate::two_shares::SETTLE;
use crate::{name, report};

/// Requests per block. Blocks alone and with other load alternate, so that noise of the host affects both.
const BLOCK: usize = 50;

/// Time until started work is in steady state.
const WARM_UP: Duration = Duration::from_millis(500);

/// Requests of one kernel, of ten kernels, and of one long kernel.
const REQUESTS: [Request; 3] = [
    Request {
        kernels: 1,
        ns: 5_000_000,
    },
    Request {
        kernels: 10,
        ns: 500_000,
    },
    Request {
        kernels: 1,
        ns: 50_000_000,
    },
];

/// A repeated request: kernels of this length, each awaited, then a pause of four times their total length.
#[derive(Clone, Copy)]
struct Request {
    kernels: u32,
    ns: u64,
}

impl Request {
    /// Makes one request and returns its duration, ms.
    fn make(self, tenant: &mut Tenant) -> Result<f64> {
        std::thread::sleep(4 * self.kernels * Duration::from_nanos(self.ns));
        let once = format!("once {}", self.ns);
        if self.kernels == 1 {
            let answer = tenant.ok(&once)?;
            let us = answer.first().copied().context("no duration")?;
            return Ok(Duration::from_micros(us).as_secs_f64() * 1e3);
        }
        let start = Instant::now();
        for _ in 0..self.kernels {
            tenant.ok(&once)?;
        }
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    /// Makes a block of requests.
    fn make_block(self, tenant: &mut Tenant) -> Result<Vec<f64>> {
        (0..BLOCK).map(|_| self.make(tenant)).collect()
    }

    /// Returns the number of requests, alone and with other load, that take about that long.
    fn count(self, measured: Duration) -> Result<usize> {
        let request = self.kernels * Duration::from_nanos(self.ns);
        let count = measured.as_nanos() / (2 * request.as_nanos());
        Ok(usize::try_from(count)?.clamp(4 * BLOCK, 20 * BLOCK))
    }
}

/// The share of high priority, a best-effort share on the same GPU, and one on another GPU.
struct Tenants {
    node: BenchNode,
    _agent: AgentProcess,
    urgent: Tenant,
    beside: Tenant,
    elsewhere: Tenant,
    /// Percent of the GPU that the best-effort share gets alone.
    solo: f64,
}

/// Durations of requests, ms, and parts of the GPU while a best-effort share used it, too.
#[derive(Default)]
struct Times {
    alone: Vec<f64>,
    elsewhere: Vec<f64>,
    beside: Vec<f64>,
    urgent_part: f64,
    best_effort_part: f64,
}

/// Measures requests with short best-effort kernels.
pub(crate) fn measure(length: Duration) -> Result<()> {
    for request in REQUESTS {
        for other_ns in [100_000, 1_000_000] {
            latency(ComputePolicy::Balance, request, other_ns, length)?;
        }
    }
    Ok(())
}

/// Measures requests of a high-priority share: alone, with the same load on another GPU, which shows the cost on the host,
/// and with a best-effort share on the same GPU.
fn latency(policy: ComputePolicy, request: Request, other_ns: u64, length: Duration) -> Result<()> {
    let load = format!("start kernel ns={other_ns} depth=8");
    let mut tenants = start(policy, &load, length)?;
    let times = times(&mut tenants, request, &load, request.count(length)?)?;
    let busy = (times.best_effort_part / (1.0 - times.urgent_part)).min(1.0);
    let other_ms = Duration::from_nanos(other_ns).as_secs_f64() * 1e3;
    let least = percentile(behind_one_kernel(&times.alone, other_ms, busy), 99);
    let of = |percent| {
        [&times.alone, &times.elsewhere, &times.beside]
            .map(|times| percentile(times.clone(), percent))
    };
    let [p50, p50_elsewhere, p50_beside] = of(50);
    let [p90, p90_elsewhere, p90_beside] = of(90);
    let [p99, p99_elsewhere, p99_beside] = of(99);
    let more = |than: f64, time: f64| 100.0 * (time / than - 1.0);
    report(&json!({
        "figure": "latency", "policy": name(policy), "kernels": request.kernels,
        "kernel_ms": Duration::from_nanos(request.ns).as_secs_f64() * 1e3,
        "best_effort_kernel_ms": other_ms, "requests": times.alone.len(),
        "p50_ms": p50, "p50_elsewhere_ms": p50_elsewhere, "p50_beside_ms": p50_beside,
        "p90_ms": p90, "p90_elsewhere_ms": p90_elsewhere, "p90_beside_ms": p90_beside,
        "p99_ms": p99, "p99_elsewhere_ms": p99_elsewhere, "p99_beside_ms": p99_beside,
        "p99_more_percent": more(p99, p99_beside),
        "p99_more_than_elsewhere_percent": more(p99_elsewhere, p99_beside),
        "p99_behind_one_kernel_ms": least, "p99_behind_one_kernel_percent": more(p99, least),
        "best_effort_got": 100.0 * times.best_effort_part,
        "best_effort_solo": 10_000.0 * times.best_effort_part / tenants.solo,
    }));
    Ok(())
}

/// Starts the tenants with the agent.
fn start(policy: ComputePolicy, load: &str, length: Duration) -> Result<Tenants> {
    let node = BenchNode::new()?;
    node.prepare(0, 1, &limits(policy, 50, 100)?)?;
    node.prepare(0, 2, &limits(policy, 0, 0)?)?;
    let agent = node.agent()?;
    let mut beside = node.tenant(0, 2)?;
    beside.ok(load)?;
    let got = node
        .test_bed
        .percents(&[&beside], SETTLE, length.min(SETTLE))?;
    beside.ok("stop")?;
    node.prepare(1, 3, &limits(policy, 0, 0)?)?;
    Ok(Tenants {
        _agent: agent,
        urgent: node.tenant(0, 1)?,
        beside,
        elsewhere: node.tenant(1, 3)?,
        solo: got.first().copied().context("no tenant")?,
        node,
    })
}

/// Measures `count` requests or more in each of the three situations, in turn.
fn times(tenants: &mut Tenants, request: Request, load: &str, count: usize) -> Result<Times> {
    let Tenants {
        node,
        urgent,
        beside,
        elsewhere,
        ..
    } = tenants;
    let pids = [urgent.pid(), beside.pid()];
    for _ in 0..20 {
        request.make(urgent)?;
    }
    let mut times = Times::default();
    let mut elapsed = Duration::ZERO;
    while times.alone.len() < count {
        std::thread::sleep(WARM_UP);
        times.alone.extend(request.make_block(urgent)?);
        elsewhere.ok(load)?;
        std::thread::sleep(WARM_UP);
        times.elsewhere.extend(request.make_block(urgent)?);
        elsewhere.ok("stop")?;
        beside.ok(load)?;
        std::thread::sleep(WARM_UP);
        let (before, start) = node.test_bed.used(&pids)?;
        times.beside.extend(request.make_block(urgent)?);
        let (after, end) = node.test_bed.used(&pids)?;
        elapsed += end - start;
        let had: Vec<f64> = after
            .iter()
            .zip(before)
            .map(|(after, before)| after.saturating_sub(before).as_secs_f64())
            .collect();
        let [urgent_had, best_effort_had] = had[..] else {
            anyhow::bail!("two processes have {had:?}");
        };
        times.urgent_part += urgent_had;
        times.best_effort_part += best_effort_had;
        beside.ok("stop")?;
    }
    times.urgent_part /= elapsed.as_secs_f64();
    times.best_effort_part /= elapsed.as_secs_f64();
    Ok(times)
}

fn percentile(mut values: Vec<f64>, percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    let index = (values.len() * percent / 100).min(last);
    values.get(index).copied().unwrap_or_default()
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
