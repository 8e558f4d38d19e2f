//! Cost of the agent. With `DRAVA_FIGURES=FILE`, as set by `cargo xtask bench agent`, the tests measure longer and append
//! their results to the file.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use gpu_tenants::{Tenant, TestBed, library};
use serde_json::{Value, json};
use simulator_machine::description::H200X8;

use crate::node::{AgentProcess, GIB, TestNode, eventually};

const CARDS: u32 = 8;

/// Prints a measurement and appends it to the file of `DRAVA_FIGURES`, if set.
pub(crate) fn report(measurement: &Value) {
    use std::io::Write as _;
    println!("{measurement}");
    if let Some(file) = std::env::var_os("DRAVA_FIGURES") {
        let file = fs::File::options().append(true).create(true).open(file);
        writeln!(file.unwrap(), "{measurement}").unwrap();
    }
}

/// Resources that the agent has used so far.
#[derive(Clone, Copy)]
struct UsedResources {
    at: Instant,
    cpu: Duration,
    /// System calls that read.
    reads: u64,
}

impl UsedResources {
    fn by(agent: &AgentProcess) -> Self {
        let proc = PathBuf::from(format!("/proc/{}", agent.pid()));
        let threads = fs::read_dir(proc.join("task")).unwrap();
        let ran = threads.map(|thread| {
            let statistics = fs::read_to_string(thread.unwrap().path().join("schedstat")).unwrap();
            let ran = statistics.split(' ').next().unwrap().parse().unwrap();
            Duration::from_nanos(ran)
        });
        let cpu = ran.sum();
        let io = fs::read_to_string(proc.join("io")).unwrap();
        let reads = io.lines().find_map(|line| line.strip_prefix("syscr: "));
        Self {
            at: Instant::now(),
            cpu,
            reads: reads.unwrap().parse().unwrap(),
        }
    }

    /// Returns the percentage of a core and the reads per second since `earlier`.
    fn since(self, earlier: Self) -> (f64, f64) {
        let wall = (self.at - earlier.at).as_secs_f64();
        let cpu = (self.cpu - earlier.cpu).as_secs_f64();
        let reads = (self.reads - earlier.reads) as f64;
        (100.0 * cpu / wall, reads / wall)
    }
}

/// Returns a node with eight GPUs and `claims` claims on each.
fn node(claims: u32) -> TestNode {
    let node = TestNode::on(TestBed::with_machine(library::shipped().unwrap(), H200X8).unwrap());
    let machine = node.test_bed.machine().status().unwrap();
    let limits = Limits {
        cores: Cores::new(100 / claims).unwrap(),
        compute_policy: ComputePolicy::Balance,
        ..Limits::memory(GIB)
    };
    for (index, card) in (0..).zip(&machine.cards) {
        for number in index * claims..(index + 1) * claims {
            node.prepare_on(&card.uuid.to_string(), number, &limits);
        }
    }
    node
}

/// Returns the percentage of a core and the reads per second of an agent in steady state.
fn cost(node: &TestNode, last: u32) -> (f64, f64) {
    let agent = node.agent_process();
    eventually("a rate for the last claim", || {
        node.page(last).rate_us_per_s
    });
    let (settle, seconds) = std::env::var("DRAVA_FIGURES").map_or((3, 2), |_| (10, 30));
    std::thread::sleep(Duration::from_secs(settle));
    let before = UsedResources::by(&agent);
    std::thread::sleep(Duration::from_secs(seconds));
    UsedResources::by(&agent).since(before)
}

#[test]
fn reads_idle_claims_less_than_once_per_second() {
    let claims = 64;
    let node = node(claims);
    let (percent, reads) = cost(&node, CARDS * claims - 1);
    report(&json!({
        "figure": "agent", "cards": CARDS, "claims": CARDS * claims, "busy": 0,
        "percentOfACore": percent, "readsPerSecond": reads,
    }));
    assert!(
        reads < f64::from(CARDS * claims),
        "{reads} reads per second"
    );
}

#[test]
#[ignore = "starts 64 processes: cargo xtask bench agent"]
fn measures_cost_of_busy_claims() {
    let claims = 8;
    let node = node(claims);
    let tenants: Vec<Tenant> = (0..CARDS * claims)
        .map(|number| {
            let mut tenant = node.tenant_on((number / claims) as usize, number);
            tenant.ok("start kernel ns=20000000 depth=2").unwrap();
            tenant
        })
        .collect();
    let (percent, reads) = cost(&node, CARDS * claims - 1);
    report(&json!({
        "figure": "agent", "cards": CARDS, "claims": CARDS * claims, "busy": tenants.len(),
        "percentOfACore": percent, "readsPerSecond": reads,
    }));
}
