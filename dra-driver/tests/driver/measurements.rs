//! Latency and footprint of the node driver's process: the shipped program with a fake kubelet, an in-memory API server and
//! the real NVML code on a simulated machine with eight GPUs.
//!
//! With `DRAVA_FIGURES=FILE`, as set by `cargo xtask bench prepare`, the test measures longer and appends its results to
//! the file.

use std::fs;
use std::time::{Duration, Instant};

use drava_fake_kubelet::{FakeKubelet, Plugin};
use serde_json::{Value, json};
use simulator_machine::control;
use simulator_machine::description::H200X8;
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::GpuIndex;
use simulator_machine::testing::Machine;

use crate::api_server::ApiServer;
use crate::cluster::{get, kubelet_claim};
use crate::driver_process::DriverProcess;
use crate::fixture::Allocated::Share;
use crate::fixture::{NODE, claim};
use crate::namespace::in_mount_namespace;
use crate::node::{TestNode, lacks_device_files};

const GPUS: u32 = 8;
const CLAIMS_PER_GPU: u32 = 64;
/// Claims that kubelet prepares at once.
const AT_ONCE: u32 = 64;
/// GPU whose NVML calls hang.
const HANGING: GpuIndex = GpuIndex(7);
const HANG: Duration = Duration::from_secs(10);

fn report(measurement: &Value) {
    use std::io::Write as _;
    println!("{measurement}");
    if let Some(file) = std::env::var_os("DRAVA_FIGURES") {
        let file = fs::File::options().append(true).create(true).open(file);
        writeln!(file.unwrap(), "{measurement}").unwrap();
    }
}

fn is_bench() -> bool {
    std::env::var_os("DRAVA_FIGURES").is_some()
}

/// Number of a claim on a GPU.
fn number(gpu: u32, position: u32) -> u32 {
    gpu * CLAIMS_PER_GPU + position
}

/// Returns the time of this percentile in milliseconds.
fn percentile(times: &mut [Duration], percent: usize) -> f64 {
    times.sort_unstable();
    times[(times.len() - 1) * percent / 100].as_secs_f64() * 1000.0
}

/// Prepares claims at once, each with a call of its own, and returns the times of the calls.
async fn prepare_at_once(plugin: &Plugin, numbers: &[u32]) -> Vec<Duration> {
    let calls = numbers.iter().map(|&number| async move {
        let start = Instant::now();
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
        start.elapsed()
    });
    futures::future::join_all(calls).await
}

async fn unprepare(plugin: &Plugin, numbers: &[u32]) {
    for &number in numbers {
        plugin.unprepare_one(&kubelet_claim(number)).await.unwrap();
    }
}

#[test]
fn prepares_64_claims_at_once_while_nvml_of_a_gpu_hangs() {
    if lacks_device_files() {
        return;
    }
    let test = "measurements::prepares_64_claims_at_once_while_nvml_of_a_gpu_hangs";
    in_mount_namespace(test, || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(measure());
    });
}

async fn measure() {
    let machine = Machine::start(H200X8).unwrap();
    let mut node = TestNode::new();
    node.paths.driver_root_mount = machine.root().to_owned();
    let kubelet = FakeKubelet::start(&node.paths.kubelet_dir).unwrap();
    let api = ApiServer::start(NODE).await;
    api.put_profile("many", &json!({"splitCount": CLAIMS_PER_GPU}));
    let driver = DriverProcess::start(&node, &api, &[]);
    let plugin = kubelet.register("gpu.drava.dev").await.unwrap();
    driver.await_ready().await;
    for gpu in 0..GPUS {
        for position in 0..CLAIMS_PER_GPU {
            let shares = [Share(gpu, "1Gi", "1")];
            api.put_claim(&claim(number(gpu, position), &shares));
        }
    }
    latency(&machine, &plugin).await;
    footprint(&driver, &plugin).await;
}

/// Row 14: latency of prepare, alone and of many claims at once, while the calls of one GPU hang.
async fn latency(machine: &Machine, plugin: &Plugin) {
    let hang = |delay| {
        let faults = Faults {
            delay,
            ..Faults::default()
        };
        let gpu = HANGING;
        machine
            .control(&control::Command::Break { gpu, faults })
            .unwrap();
    };
    hang(HANG);
    let rounds = if is_bench() { 30 } else { 1 };
    let (mut alone, mut at_once) = (Vec::new(), Vec::new());
    // Over the GPUs that answer.
    let all: Vec<u32> = (0..AT_ONCE)
        .map(|index| number(index % HANGING.0, index / HANGING.0))
        .collect();
    for _ in 0..rounds {
        at_once.extend(prepare_at_once(plugin, &all).await);
        unprepare(plugin, &all).await;
        for &number in &all {
            alone.extend(prepare_at_once(plugin, &[number]).await);
        }
        unprepare(plugin, &all).await;
    }
    hang(Duration::ZERO);
    for (claims, times) in [(1, &mut alone), (AT_ONCE, &mut at_once)] {
        report(&json!({
            "figure": "prepare", "claims": claims, "hangingGpus": 1, "calls": times.len(),
            "p50Ms": percentile(times, 50), "p99Ms": percentile(times, 99), "maxMs": percentile(times, 100),
        }));
        let longest = *times.last().unwrap();
        assert!(longest < HANG, "a claim of another GPU took {longest:?}");
    }
}

/// Row 15: memory, CPU time and size of the metrics with all claims.
async fn footprint(driver: &DriverProcess, plugin: &Plugin) {
    report_footprint(driver, 0).await;
    for gpu in 0..GPUS {
        let all: Vec<u32> = (0..CLAIMS_PER_GPU)
            .map(|position| number(gpu, position))
            .collect();
        // Each waits for the lock of the GPU, for a limited time.
        for some in all.chunks(8) {
            prepare_at_once(plugin, some).await;
        }
    }
    report_footprint(driver, GPUS * CLAIMS_PER_GPU).await;
}

async fn report_footprint(driver: &DriverProcess, claims: u32) {
    let (settle, seconds) = if is_bench() { (15, 60) } else { (1, 2) };
    tokio::time::sleep(Duration::from_secs(settle)).await;
    let (start, before) = (Instant::now(), driver.cpu());
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let cpu = (driver.cpu() - before).as_secs_f64() / start.elapsed().as_secs_f64();
    let scrape = get(driver.address, "/metrics").await;
    let has_claims = scrape.contains("drava_share_memory_limit_bytes{");
    assert_eq!(has_claims, claims > 0, "{scrape}");
    report(&json!({
        "figure": "footprint", "gpus": GPUS, "claims": claims,
        "rssMiB": driver.status_kib("VmRSS") as f64 / 1024.0,
        "anonymousMiB": driver.status_kib("RssAnon") as f64 / 1024.0,
        "percentOfACore": 100.0 * cpu, "scrapeKiB": scrape.len() as f64 / 1024.0,
    }));
}
