//! Spatial shares: two clients of MPS with half of the multiprocessors each, against two tenants that take turns; and the limits
//! and faults of such clients.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use drava_cluster::process::Limit;
use drava_vgpu_abi::Limits;
use serde::Deserialize;

use super::agent::SETTLE;
use super::compute::{Tenants, percent};
use super::memory::{self, Taken};
use super::mps::{Daemon, OwnDaemon};
use super::node::{Node, two};
use super::report::Row;
use super::rows::{Needed, Rows};
use super::setup::{
    Gpu, Running, Setup, Share, go, json, json_within, limits, start_all, together,
};

/// Part of the GPU of each tenant: of its time, or of its multiprocessors.
const PERCENT: u32 = 50;

/// A token of a tenant that decodes: kernels, and the length of each, µs.
const TOKEN: (u64, u64) = (20, 100);

/// Parts of the multiprocessors that a kernel of such a tenant fills: one of these numbers.
const LOADS: [u32; 3] = [8, 4, 2];

/// What both tenants keep of their throughput alone: percentage points, by which spatial shares keep more.
const GOAL_POINTS: f64 = 12.0;

/// Kernels of a tenant that fills the GPU: length, µs, and blocks for each multiprocessor, which fill its threads.
const FULL: (u64, u32) = (1000, 8);

/// Throughput of such a tenant whose neighbor is idle, with lent time against spatial shares.
const GOAL_LENT: f64 = 1.5;

/// Longest time after the end of all clients in which a new one is refused.
const LONGEST_RECOVERY: Duration = Duration::from_secs(5);

/// Title of the row about the daemon of the node driver.
const OWN: &str = "multiprocessors of a client of the node driver's own daemon";

/// Longest run of a client that only shows its GPU. The first one waits for a server.
const LONGEST_CLIENT: Duration = Duration::from_secs(30);

/// Output of `gpu-suite work`.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Done {
    /// GPU time of the kernels by their length on an idle GPU, divided by elapsed time.
    share: f64,
    /// Median time of a token, µs.
    batch_p50_us: f64,
}

/// Output of `gpu-suite fault`.
#[derive(Debug, Deserialize)]
struct Outcome {
    kernels: u64,
    error: Option<String>,
}

pub(super) fn rows(setup: &Setup, seconds: f64, rows: &mut Rows<'_>) -> Result<()> {
    let bench = Needed::new(|| Bench::new(setup, seconds));
    let daemon = Needed::new(|| Daemon::start(setup));
    // Rows that need MPS, whose titles begin with that of their group.
    let mut with_mps = |title: &str, measure: &dyn Fn(&Daemon<'_>) -> Result<Vec<Row>>| {
        rows.run(title, || match daemon.get() {
            Ok(daemon) => measure(daemon),
            Err(why) => {
                let title = title.trim_end_matches(": ");
                Ok(vec![Row::not_run(title, format!("{why:#}"))])
            }
        })
    };
    with_mps("multiprocessors of a client", &|daemon| {
        Ok(vec![part(setup, daemon)?])
    })?;
    with_mps(OWN, &|_| Ok(vec![own(setup)?]))?;
    for load in LOADS {
        let title = format!("kernels for 1/{load} of the multiprocessors");
        with_mps(&title, &|daemon| {
            let decoded = bench.get()?.decode(daemon, load)?;
            Ok(decoded.rows(&title).into())
        })?;
    }
    with_mps(
        "a tenant that fills the GPU beside an idle one",
        &|daemon| {
            let [balance, spatial] = bench.get()?.fill(daemon)?;
            Ok(vec![lent(balance, spatial)])
        },
    )?;
    let memory = Needed::new(|| {
        let gpu = setup.gpu()?;
        let limit = memory::limit_bytes(&gpu);
        let limits = Limits {
            driver_reserve_bytes: memory::context_bytes(setup, &setup.nvml()?)?,
            ..limits(limit, 0)?
        };
        Ok((limit, limits))
    });
    for path in memory::PATHS {
        let title = format!("{path} with MPS: ");
        with_mps(&title, &|daemon| {
            let (limit, limits) = memory.get()?;
            let share = setup.share(limits)?;
            let command = setup.suite(Some(&share), &["memory", "--path", path]);
            let taken: Taken = json(daemon.limited(command, PERCENT))?;
            let title = format!("{title}limit of {} MiB", limit >> 20);
            Ok(vec![memory::exact(title, &taken, *limit)])
        })?;
    }
    with_mps("a fault of a client of MPS", &|daemon| fault(setup, daemon))
}

/// A client sees its part of the multiprocessors.
fn part(setup: &Setup, daemon: &Daemon<'_>) -> Result<Row> {
    let whole = setup.gpu()?.multiprocessors;
    let part = client(setup, daemon)?.multiprocessors;
    Ok(Row::checked(
        "multiprocessors of a client",
        is_client(part, whole),
        format!("{part} of {whole} with {PERCENT}%"),
    ))
}

/// The same with the daemon that the node driver starts, which has a root, cgroups and shared memory of its own.
fn own(setup: &Setup) -> Result<Row> {
    let whole = setup.gpu()?.multiprocessors;
    let daemon = OwnDaemon::start(setup).context("see the reason above")?;
    let client = daemon.limited(&setup.suite(None, &["gpu"]), PERCENT);
    let part: Gpu = json_within(client, Limit::total(LONGEST_CLIENT))?;
    daemon.end()?;
    let part = part.multiprocessors;
    Ok(Row::checked(
        OWN,
        is_client(part, whole),
        format!("{part} of {whole} with {PERCENT}%; the daemon has ended"),
    ))
}

/// Starts a client, and returns the GPU as it sees it.
fn client(setup: &Setup, daemon: &Daemon<'_>) -> Result<Gpu> {
    let client = daemon.limited(setup.suite(None, &["gpu"]), PERCENT);
    json_within(client, Limit::total(LONGEST_CLIENT))
}

/// Whether a program with these multiprocessors is a client. The driver rounds its part up to groups of them, of at most 16.
fn is_client(part: u32, whole: u32) -> bool {
    let least = whole * PERCENT / 100;
    (least..=least + 16).contains(&part) && part < whole
}

struct Bench<'a> {
    setup: &'a Setup,
    tenants: Tenants<'a>,
    multiprocessors: u32,
    seconds: f64,
}

impl<'a> Bench<'a> {
    fn new(setup: &'a Setup, seconds: f64) -> Result<Self> {
        Ok(Self {
            setup,
            tenants: Tenants::new(setup, seconds)?,
            multiprocessors: setup.gpu()?.multiprocessors,
            seconds,
        })
    }

    fn tenant(&self, share: Option<&Share>, kernel_us: u64, way: &str, blocks: u32) -> Command {
        let mut command = self.tenants.work(share, &[kernel_us], way, true);
        command
            .args(["--blocks", &blocks.to_string()])
            .args(["--settle", &(self.seconds * SETTLE).to_string()]);
        command
    }

    /// A tenant that launches the kernels of a token and awaits them.
    fn decoder(&self, share: Option<&Share>, load: u32) -> Command {
        let (kernels, kernel_us) = TOKEN;
        let mut command = self.tenant(share, kernel_us, "sync", self.multiprocessors / load);
        command.args(["--awaited", &kernels.to_string()]);
        command
    }

    /// A tenant whose kernels fill the GPU.
    fn filler(&self, share: &Share) -> Command {
        let (kernel_us, blocks) = FULL;
        self.tenant(
            Some(share),
            kernel_us,
            "queue",
            self.multiprocessors * blocks,
        )
    }

    /// The share of a client of MPS: its memory is limited, and its time is not metered.
    fn spatial_share(&self) -> Result<Share> {
        self.setup.share(&limits(self.tenants.memory_bytes, 0)?)
    }

    fn node(&self) -> Result<Node> {
        Node::start(self.setup, [PERCENT; 2], self.tenants.memory_bytes)
    }

    /// Two tenants that decode: one alone, both with `balance`, and both as clients of MPS.
    fn decode(&self, daemon: &Daemon<'_>, load: u32) -> Result<Decoded> {
        let alone: Vec<Done> = together(vec![self.decoder(None, load)])?;
        let [alone] = <[Done; 1]>::try_from(alone)
            .map_err(|all| anyhow::anyhow!("{} results of a tenant", all.len()))?;
        let mut node = self.node()?;
        let tenants = node.shares.each_ref();
        let tenants = tenants.map(|share| self.decoder(Some(share), load));
        let mut tenants = start_all(tenants.into())?;
        let pids: Vec<u32> = tenants.iter().map(Running::pid).collect();
        node.add_tenants(&pids)?;
        go(&mut tenants)?;
        let balance: Result<Vec<Done>> = tenants.iter_mut().map(Running::json).collect();
        let balance = two(balance?)?;
        for tenant in tenants {
            tenant.end()?;
        }
        node.end()?;
        let shares = [self.spatial_share()?, self.spatial_share()?];
        let spatial = shares.each_ref().map(|share| {
            let decoder = self.decoder(Some(share), load);
            daemon.limited(decoder, PERCENT)
        });
        Ok(Decoded {
            alone,
            balance,
            spatial: two(together(spatial.into())?)?,
        })
    }

    /// The throughput of a tenant that fills the GPU beside an idle one: with lent time, and as a client of MPS.
    fn fill(&self, daemon: &Daemon<'_>) -> Result<[f64; 2]> {
        let mut node = self.node()?;
        let [busy, idle] = node.shares.each_ref();
        let (busy, idle) = (self.filler(busy), self.idle(idle));
        let balance = beside(busy, idle, |pids| node.add_tenants(pids))?;
        node.end()?;
        let [busy, idle] = [self.spatial_share()?, self.spatial_share()?];
        let busy = daemon.limited(self.filler(&busy), PERCENT);
        let idle = daemon.limited(self.idle(&idle), PERCENT);
        Ok([balance, beside(busy, idle, |_| Ok(()))?])
    }

    /// A tenant with a context and no kernels.
    fn idle(&self, share: &Share) -> Command {
        let nothing = ["memory", "--path", "nothing", "--hold"];
        self.setup.suite(Some(share), &nothing)
    }
}

/// Runs a tenant beside an idle one; `add` gets the PIDs of both before.
fn beside(busy: Command, idle: Command, add: impl FnOnce(&[u32]) -> Result<()>) -> Result<f64> {
    let mut idle = Running::start(idle)?;
    let _has_context: Taken = idle.json()?;
    let mut busy = start_all(vec![busy])?;
    let first = busy.first().context("no program")?;
    add(&[first.pid(), idle.pid()])?;
    go(&mut busy)?;
    let mut busy = busy.pop().context("no program")?;
    let done: Done = busy.json()?;
    busy.end()?;
    idle.end()?;
    Ok(done.share)
}

/// Lent time of an idle neighbor is worth more than a fixed part of the multiprocessors.
fn lent(balance: f64, spatial: f64) -> Row {
    Row::checked(
        "a tenant that fills the GPU beside an idle one",
        balance >= GOAL_LENT * spatial,
        format!(
            "{:.2} × ({} with balance, {} with {PERCENT}% of the multiprocessors)",
            balance / spatial,
            percent(balance),
            percent(spatial)
        ),
    )
}

/// What tenants got that decode.
struct Decoded {
    alone: Done,
    balance: [Done; 2],
    spatial: [Done; 2],
}

impl Decoded {
    fn rows(&self, title: &str) -> [Row; 2] {
        // Percent of the throughput alone that each tenant keeps.
        let kept = |done: &[Done; 2]| {
            done.each_ref()
                .map(|done| done.share / self.alone.share * 100.0)
        };
        let (balance, spatial) = (kept(&self.balance), kept(&self.spatial));
        let points = spatial.iter().sum::<f64>() - balance.iter().sum::<f64>();
        let [[b1, b2], [s1, s2]] = [balance, spatial];
        // Of the tenant that waits longer.
        let token = |done: &[Done; 2]| {
            let times = done.iter().map(|done| done.batch_p50_us);
            times.fold(0.0, f64::max)
        };
        let [turns, side_by_side] = [token(&self.balance), token(&self.spatial)];
        [
            Row::checked(
                format!("{title}, throughput of both"),
                points >= GOAL_POINTS,
                format!(
                    "{points:+.0} points: {s1:.0}% + {s2:.0}% of the throughput alone as clients of MPS, {b1:.0}% + {b2:.0}% with balance"
                ),
            ),
            Row::checked(
                format!("{title}, time of a token"),
                side_by_side < turns,
                format!(
                    "p50 {side_by_side:.0} µs as a client of MPS, {turns:.0} µs with balance, {:.0} µs alone",
                    self.alone.batch_p50_us
                ),
            ),
        ]
    }
}

/// A client has a fault: the other one gets an error, a program outside does not, and a new client is served after their end.
fn fault(setup: &Setup, daemon: &Daemon<'_>) -> Result<Vec<Row>> {
    const TITLE: &str = "a fault of a client of MPS";
    let suite = |role: &str| setup.suite(None, &["fault", "--role", role]);
    let inside = daemon.limited(suite("launches"), PERCENT);
    let faulty = daemon.limited(suite("causes"), PERCENT);
    let mut programs = start_all(vec![inside, suite("launches"), faulty])?;
    let [inside, outside, faulty] = programs.as_mut_slice() else {
        anyhow::bail!("{} programs instead of three", programs.len());
    };
    for launches in [&mut *inside, &mut *outside] {
        launches.send("go")?;
        let line = launches.line()?;
        ensure!(line == "running", "expected \"running\", read {line:?}");
    }
    faulty.send("go")?;
    let caused: Outcome = faulty.json()?;
    let reached: Outcome = inside.json()?;
    outside.send("end")?;
    let spared: Outcome = outside.json()?;
    for program in programs {
        program.end()?;
    }
    let ended = Instant::now();
    let whole = setup.gpu()?.multiprocessors;
    let served = loop {
        let gpu = client(setup, daemon);
        if ended.elapsed() >= LONGEST_RECOVERY || gpu.is_ok() {
            break gpu;
        }
        sleep(Duration::from_millis(50));
    };
    let recovery = ended.elapsed();
    let name = |outcome: &Outcome| outcome.error.clone().unwrap_or("no error".to_owned());
    Ok(vec![
        Row::checked(
            format!("{TITLE} reaches the other client"),
            caused.error.is_some() && reached.error.is_some(),
            format!("{}, then {}", name(&caused), name(&reached)),
        ),
        Row::checked(
            format!("{TITLE} does not reach a program outside"),
            spared.error.is_none() && spared.kernels > 1,
            format!("{} after {} kernels", name(&spared), spared.kernels),
        ),
        Row::checked(
            format!("{TITLE}, then a new client"),
            recovery < LONGEST_RECOVERY
                && matches!(&served, Ok(gpu) if is_client(gpu.multiprocessors, whole)),
            match &served {
                Ok(gpu) => format!(
                    "{} of {whole} multiprocessors after {:.2} s",
                    gpu.multiprocessors,
                    recovery.as_secs_f64()
                ),
                Err(error) => format!("{error:#}"),
            },
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::super::report::{Outcome, Row};
    use super::{Decoded, Done, is_client, lent};

    fn held(row: &Row) -> bool {
        matches!(row.outcome, Outcome::Checked { held: true, .. })
    }

    #[test]
    fn demands_throughput_and_shorter_tokens() {
        let done = |share, batch_p50_us| Done {
            share,
            batch_p50_us,
        };
        let rows = |balance: [Done; 2], spatial: [Done; 2]| {
            let alone = done(0.8, 2000.0);
            let decoded = Decoded {
                alone,
                balance,
                spatial,
            };
            decoded.rows("it").each_ref().map(held)
        };
        let turns = [done(0.4, 4000.0); 2];
        assert_eq!(rows(turns, [done(0.72, 2200.0); 2]), [true, true]);
        // Both keep 6 percentage points more: 12 together.
        assert_eq!(rows(turns, [done(0.45, 2200.0); 2]), [true, true]);
        assert_eq!(rows(turns, [done(0.44, 2200.0); 2]), [false, true]);
        let uneven = [done(0.8, 2000.0), done(0.8, 4100.0)];
        assert_eq!(rows(turns, uneven), [true, false]);
    }

    #[test]
    fn demands_gain_of_lent_time() {
        assert!(held(&lent(0.9, 0.5)));
        assert!(!held(&lent(0.7, 0.5)));
    }

    #[test]
    fn recognizes_clients_by_their_multiprocessors() {
        assert!(is_client(66, 132) && is_client(72, 132));
        assert!(!is_client(132, 132) && !is_client(64, 132));
        assert!(is_client(4, 8) && !is_client(8, 8));
    }
}
