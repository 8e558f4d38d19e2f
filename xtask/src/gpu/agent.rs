//! Two tenants with the node agent: the GPU time of each by its completed kernels, by libvgpu's account, and by NVML.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use drava_nvml::{GpuLibrary as _, GpuUuid, Library, Memory, ProcessUtilization};
use serde::Deserialize;
use serde_json::{Value, json};

use super::compute::{Done, GOAL_SUM, Tenants, kernel, percent};
use super::node::{Node, two};
use super::report::Row;
use super::rows::{Needed, Rows};
use super::setup::{Running, Setup, Share, go, start_all, together};

/// Name of the file with what NVML reported.
const SAMPLES: &str = "nvml-utilization.json";

/// Policy of the shares of `gpu-node`.
const POLICY: &str = "balance";

/// Tolerated error of a share, in percentage points.
const GOAL_POINTS: f64 = 2.0;

const SPLITS: [[u32; 2]; 3] = [[30, 70], [10, 90], [42, 58]];

/// The kernels of two tenants.
#[derive(Clone, Copy)]
struct Kernels {
    name: &'static str,
    /// Their lengths, µs, in random order.
    us: [&'static [u64]; 2],
}

const KERNELS: [Kernels; 4] = [
    Kernels {
        name: "5 µs",
        us: [&[5]; 2],
    },
    Kernels {
        name: "1000 µs",
        us: [&[1000]; 2],
    },
    Kernels {
        name: "20000 µs",
        us: [&[20_000]; 2],
    },
    Kernels {
        name: "100, 1000, 10000 µs against 200, 5000 µs at random",
        us: [&[100, 1000, 10_000], &[200, 5000]],
    },
];

/// Time before a measurement, in which the agent reaches its steady state, as part of the measurement's length.
pub(super) const SETTLE: f64 = 0.4;

/// Time between two readings of NVML, shorter than its sample period.
const READ_EVERY: Duration = Duration::from_millis(100);

pub(super) fn rows(setup: &Setup, seconds: f64, rows: &mut Rows<'_>) -> Result<()> {
    let bench = Needed::new(|| {
        let (nvml, gpu) = setup.nvml()?;
        Ok(Bench {
            setup,
            tenants: Tenants::new(setup, seconds)?,
            seconds,
            nvml,
            gpu,
        })
    });
    rows.run("time slices", || {
        Ok(vec![bench.get()?.slices(1)?, bench.get()?.slices(2)?])
    })?;
    let mut raw = Vec::new();
    for kernels in KERNELS {
        let [left, right] = kernels.us;
        let free = Needed::new(|| {
            let bench = bench.get()?;
            Ok(Free {
                alone: [bench.unlimited(&[left])?, bench.unlimited(&[right])?],
                both: bench.unlimited(&kernels.us)?,
            })
        });
        for split in SPLITS {
            let case = Case { split, kernels };
            rows.run(&case.to_string(), || {
                let free = free.get()?;
                let got = bench.get()?.measure(&case)?;
                raw.push(got.raw(&case));
                Ok(got.rows(&case, free).into())
            })?;
        }
    }
    setup.save(SAMPLES, &Value::Array(raw))
}

/// Two shares and the load of their tenants.
struct Case {
    split: [u32; 2],
    kernels: Kernels,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [left, right] = self.split;
        let kernels = self.kernels.name;
        write!(f, "{POLICY}, {left}:{right}, kernels of {kernels}")
    }
}

struct Bench<'a> {
    setup: &'a Setup,
    tenants: Tenants<'a>,
    seconds: f64,
    nvml: Library,
    gpu: GpuUuid,
}

impl Bench<'_> {
    fn tenant(&self, share: Option<&Share>, kernels_us: &[u64]) -> Command {
        let mut command = self.tenants.work(share, kernels_us, "queue", true);
        command.args(["--settle", &(self.seconds * SETTLE).to_string()]);
        command
    }

    /// Returns the part of the GPU time that these tenants use without limits.
    fn unlimited(&self, tenants: &[&[u64]]) -> Result<f64> {
        let commands = tenants.iter().map(|kernels| self.tenant(None, kernels));
        let done: Vec<Done> = together(commands.collect())?;
        Ok(done.iter().map(|done| done.share).sum())
    }

    /// Returns the time slices of a context beside this number of others without limits.
    fn slices(&self, others: usize) -> Result<Row> {
        let kernel = kernel(self.setup);
        let mut slices = self.setup.suite(None, &["slices", "--kernel", kernel]);
        slices.args(["--seconds", &self.seconds.to_string()]);
        let others_work = std::iter::repeat_with(|| self.tenant(None, &[1000])).take(others);
        let commands = std::iter::once(slices).chain(others_work).collect();
        let mut programs = start_all(commands)?;
        go(&mut programs)?;
        let first = programs.first_mut().context("no program")?;
        let seen: Slices = first.json()?;
        for program in programs {
            program.end()?;
        }
        let Slices {
            own_us, others_us, ..
        } = &seen;
        Ok(Row::measured(
            format!("time slices beside {others} other contexts"),
            format!(
                "{:.0}% of the time; own {own_us}, between them {others_us} ({} of them)",
                seen.own_part * 100.0,
                seen.count
            ),
        ))
    }

    fn measure(&self, case: &Case) -> Result<Got> {
        let mut node = Node::start(self.setup, case.split, self.tenants.memory_bytes)?;
        let tenants = node.shares.iter().zip(case.kernels.us);
        let tenants = tenants.map(|(share, kernels)| self.tenant(Some(share), kernels));
        let mut tenants = start_all(tenants.collect())?;
        let pids: Vec<u32> = tenants.iter().map(Running::pid).collect();
        node.add_tenants(&pids)?;
        go(&mut tenants)?;
        sleep(Duration::from_secs_f64(self.seconds * SETTLE));
        let before = node.accounts()?;
        let (utilization, used_bytes) = self.observe()?;
        let done: Result<Vec<Done>> = tenants.iter_mut().map(Running::json).collect();
        let done = done?;
        let after = node.accounts()?;
        for tenant in tenants {
            tenant.end()?;
        }
        let findings = node.end()?;
        let accounts = before.iter().zip(after);
        let counts = pids.iter().zip(done).zip(accounts);
        let counts = counts.map(|((pid, done), (before, after))| Counts {
            pid: *pid,
            share: done.share,
            account_us: after.saturating_sub(*before),
        });
        Ok(Got {
            tenants: two(counts.collect())?,
            utilization,
            used_bytes,
            findings,
        })
    }

    /// Reads NVML for the time of a measurement: new samples of processes, and the GPU's memory.
    fn observe(&self) -> Result<(Vec<ProcessUtilization>, Vec<Option<u64>>)> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let mut newest_us = u64::try_from(now.as_micros())?;
        let (mut samples, mut used_bytes) = (Vec::new(), Vec::new());
        let end = Instant::now() + Duration::from_secs_f64(self.seconds);
        while Instant::now() < end {
            sleep(READ_EVERY);
            let new = self.nvml.process_utilization(&self.gpu, newest_us)?;
            let times = new.iter().map(|sample| sample.timestamp_us);
            newest_us = times.max().unwrap_or(newest_us);
            samples.extend(new);
            used_bytes.push(match self.nvml.memory(&self.gpu)? {
                Memory::Dedicated { used_bytes, .. } => Some(used_bytes),
                Memory::NotSupported => None,
            });
        }
        Ok((samples, used_bytes))
    }
}

/// Output of `gpu-suite slices`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Slices {
    count: usize,
    own_us: Quantiles,
    others_us: Quantiles,
    own_part: f64,
}

/// Lengths, µs.
#[derive(Debug, Deserialize)]
struct Quantiles {
    p10: f64,
    p50: f64,
    p90: f64,
}

impl std::fmt::Display for Quantiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { p10, p50, p90 } = self;
        write!(f, "{p50:.0} µs ({p10:.0} to {p90:.0})")
    }
}

/// The part of the GPU time that each tenant alone, and both together, use without limits.
struct Free {
    alone: [f64; 2],
    both: f64,
}

/// What one tenant got.
struct Counts {
    pid: u32,
    /// GPU time of its completed kernels as part of the measured time.
    share: f64,
    account_us: u64,
}

/// What two tenants got.
struct Got {
    tenants: [Counts; 2],
    utilization: Vec<ProcessUtilization>,
    used_bytes: Vec<Option<u64>>,
    findings: Vec<String>,
}

impl Got {
    /// No tenant gets less than its share of what both got, unless it cannot use that: launches of short kernels may not
    /// fill a GPU.
    fn rows(&self, case: &Case, free: &Free) -> [Row; 2] {
        let [left, right] = self.tenants.each_ref().map(|tenant| tenant.share);
        let short = |((got, percent), alone): ((f64, u32), f64)| {
            let due = f64::from(percent) / 100.0 * (left + right);
            (due.min(alone) - got) * 100.0
        };
        let shortest = [left, right].into_iter().zip(case.split);
        let shortest = shortest.zip(free.alone).map(short);
        let shortest = shortest.fold(0.0, f64::max);
        let off = |[left, right]: [f64; 2]| {
            let sum = left + right;
            (sum > 0.0).then(|| (left / sum).mul_add(100.0, -f64::from(case.split[0])))
        };
        let by_kernels = off([left, right]);
        let accounts = self
            .tenants
            .each_ref()
            .map(|tenant| tenant.account_us as f64);
        let points = |off: Option<f64>| match off {
            Some(off) => format!("{off:+.1} points"),
            None => "no time of either".to_owned(),
        };
        let samples = self.samples();
        let count: usize = samples.iter().map(|(count, _)| count).sum();
        let detail = format!(
            "{} : {} ({}; {} and {} alone without a limit); by libvgpu's account {}; by {count} samples of NVML {}",
            percent(left),
            percent(right),
            points(by_kernels),
            percent(free.alone[0]),
            percent(free.alone[1]),
            points(off(accounts)),
            points(off(samples.map(|(_, percent)| percent))),
        );
        [
            Row::checked(
                format!("{case}, division"),
                by_kernels.is_some() && shortest <= GOAL_POINTS,
                detail,
            ),
            Row::checked(
                format!("{case}, sum"),
                left + right >= GOAL_SUM * free.both,
                format!(
                    "{} of the {} without limits",
                    percent(left + right),
                    percent(free.both)
                ),
            ),
        ]
    }

    /// Number of NVML's samples of each tenant, and the sum of their percents.
    fn samples(&self) -> [(usize, f64); 2] {
        self.tenants.each_ref().map(|tenant| {
            let own = self.utilization.iter();
            let own = own.filter(|sample| sample.pid == tenant.pid);
            let percents = own.map(|sample| f64::from(sample.sm_percent));
            (percents.clone().count(), percents.sum())
        })
    }

    fn raw(&self, case: &Case) -> Value {
        let samples = self.utilization.iter().map(|sample| {
            json!({
                "pid": sample.pid,
                "timestampUs": sample.timestamp_us,
                "smPercent": sample.sm_percent,
                "memoryPercent": sample.memory_percent,
            })
        });
        let tenants = self.tenants.iter().map(|tenant| {
            json!({
                "pid": tenant.pid,
                "share": tenant.share,
                "accountUs": tenant.account_us,
            })
        });
        json!({
            "case": case.to_string(),
            "tenants": tenants.collect::<Vec<_>>(),
            "utilization": samples.collect::<Vec<_>>(),
            "usedBytes": self.used_bytes,
            "findings": self.findings,
        })
    }
}
