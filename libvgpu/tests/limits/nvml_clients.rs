//! Tools that read the GPU through NVML: nvitop, gpustat and a table like nvidia-smi's, unmodified.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use drava_vgpu_abi::{Cores, Limits};
use serde_json::{Value, json};
use simulator_machine::testing::python;

use crate::test_process::{Container, GIB, GPUS};

/// A program that runs until the test ends.
struct Background(Child);

impl Background {
    fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // The process may have exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program in the container and returns its output.
fn output(container: &Container, program: impl AsRef<OsStr>, arguments: &[&str]) -> String {
    let output = container.command(program).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

fn gpustat(container: &Container) -> Vec<Value> {
    let program = python::clients().unwrap().join("gpustat");
    let shown: Value = serde_json::from_str(&output(container, program, &["--json"])).unwrap();
    shown["gpus"].as_array().unwrap().clone()
}

fn nvitop(container: &Container) -> String {
    let program = python::clients().unwrap().join("nvitop");
    output(container, program, &["--once", "--ascii"])
}

fn table(container: &Container, arguments: &[&str]) -> String {
    let program = container.machine.program("gpu-view").unwrap();
    output(container, program.get_program(), arguments)
}

/// Lines of a table that contain all of the words.
fn lines_with<'a>(table: &'a str, words: &[&str]) -> Vec<&'a str> {
    let has_all = |line: &&str| words.iter().all(|word| line.contains(word));
    table.lines().filter(has_all).collect()
}

#[test]
fn shows_one_share_of_one_gpu() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::with_memory(8 * GIB);
    let mut process = container.process();
    process.alloc(3 * GIB);
    let mut unlimited = container.unlimited_process();
    unlimited.alloc(20 * GIB);
    let (pid, foreign) = (process.pid().to_string(), unlimited.pid().to_string());

    let gpus = gpustat(&container);
    assert_eq!(gpus[0]["memory.total"], 8192);
    assert_eq!(gpus[0]["memory.used"], 3072);
    assert_eq!(gpus[0]["utilization.gpu"], 0);
    assert_eq!(gpus[0]["uuid"], GPUS[0]);
    let processes = &gpus[0]["processes"];
    assert_eq!(processes.as_array().unwrap().len(), 1, "{processes}");
    assert_eq!(processes[0]["pid"], json!(process.pid()));
    assert_eq!(processes[0]["gpu_memory_usage"], 3072);

    let shown = nvitop(&container);
    assert_eq!(
        lines_with(&shown, &["3072MiB / 8192MiB"]).len(),
        1,
        "{shown}"
    );
    assert_eq!(lines_with(&shown, &[&pid, "3072MiB"]).len(), 1, "{shown}");
    assert!(lines_with(&shown, &[&foreign]).is_empty(), "{shown}");

    let shown = table(&container, &[]);
    assert_eq!(
        lines_with(&shown, &["3072MiB /   8192MiB", " 0% "]).len(),
        1,
        "{shown}"
    );
    assert_eq!(lines_with(&shown, &[&pid, "3072MiB"]).len(), 1, "{shown}");
    assert!(lines_with(&shown, &[&foreign]).is_empty(), "{shown}");
    let query = [
        "--query-gpu=index,memory.total,memory.used,memory.free",
        "--format=csv,noheader,nounits",
    ];
    assert_eq!(
        table(&container, &query).lines().next(),
        Some("0, 8192, 3072, 5120")
    );
}

#[test]
fn shows_two_shares_of_two_gpus() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::new();
    container.add_share("first", GPUS[0], &Limits::memory(4 * GIB));
    container.add_share("second", GPUS[1], &Limits::memory(6 * GIB));
    let mut both = container.process();
    both.alloc(GIB);
    both.init(1);
    both.alloc(2 * GIB);
    let mut one = container.start("dlsym");
    one.init(1);
    one.alloc(3 * GIB);
    let mut unlimited = container.unlimited_process();
    unlimited.alloc(20 * GIB);

    let gpus = gpustat(&container);
    let figures: Vec<(&Value, &Value)> = gpus
        .iter()
        .map(|gpu| (&gpu["memory.total"], &gpu["memory.used"]))
        .collect();
    assert_eq!(
        figures,
        [(&json!(4096), &json!(1024)), (&json!(6144), &json!(5120))]
    );
    let pids = |gpu: &Value| {
        let processes = gpu["processes"].as_array().unwrap().iter();
        let mut pids: Vec<i64> = processes.map(|one| one["pid"].as_i64().unwrap()).collect();
        pids.sort_unstable();
        pids
    };
    let mut second = vec![i64::from(both.pid()), i64::from(one.pid())];
    second.sort_unstable();
    assert_eq!(pids(&gpus[0]), [i64::from(both.pid())]);
    assert_eq!(pids(&gpus[1]), second);

    let shown = nvitop(&container);
    assert_eq!(
        lines_with(&shown, &["1024MiB / 4096MiB"]).len(),
        1,
        "{shown}"
    );
    assert_eq!(
        lines_with(&shown, &["5120MiB / 6144MiB"]).len(),
        1,
        "{shown}"
    );
    let shown = table(&container, &[]);
    let foreign = unlimited.pid().to_string();
    assert_eq!(
        lines_with(&shown, &[&both.pid().to_string()]).len(),
        2,
        "{shown}"
    );
    assert_eq!(
        lines_with(&shown, &[&one.pid().to_string(), "3072MiB"]).len(),
        1,
        "{shown}"
    );
    assert!(lines_with(&shown, &[&foreign]).is_empty(), "{shown}");
}

/// A share of 50%, alone on its GPU: using more than half of the GPU is reported as 100%.
#[test]
fn shows_own_utilization_and_hides_other_shares() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::new();
    let limits = Limits {
        cores: Cores::new(50).unwrap(),
        driver_reserve_bytes: GIB / 2,
        ..Limits::memory(4 * GIB)
    };
    container.add_share("first", GPUS[0], &limits);
    container.add_share("second", GPUS[1], &limits);
    let probe = container.machine.program("cuda-probe").unwrap();
    let launch = ["launch", "--ms", "100", "--seconds", "600"];
    let mut own = container.command(probe.get_program());
    let own = Background::start(own.args(launch));
    let mut unlimited = container.machine.program("cuda-probe").unwrap();
    let _other_work = Background::start(unlimited.args(launch).args(["--device", "1"]));
    container
        .machine
        .wait_for_gpu(1, |gpu| gpu.gpu_percent > 0)
        .unwrap();
    let query = [
        "--query-gpu=utilization.gpu",
        "--format=csv,noheader,nounits",
    ];
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let shown = table(&container, &query);
        let (first, second) = shown.trim().split_once('\n').unwrap();
        assert_eq!(second, "0", "the other share's work is hidden");
        if first == "100" {
            break;
        }
        assert!(Instant::now() < deadline, "{shown}");
    }
    let gpus = gpustat(&container);
    assert!(gpus[0]["utilization.gpu"].as_u64().unwrap() > 0, "{gpus:?}");
    assert_eq!(gpus[1]["utilization.gpu"], 0);
    assert_eq!(gpus[0]["processes"][0]["pid"], json!(own.0.id()));
    assert_eq!(gpus[1]["processes"], json!([]));
    let shown = nvitop(&container);
    let pid = own.0.id().to_string();
    assert_eq!(lines_with(&shown, &[&pid]).len(), 1, "{shown}");
}

/// On the host libvgpu is not loaded. Loaded by mistake, it finds no share and changes nothing.
#[test]
fn shows_everything_on_the_host() {
    if python::is_unavailable() {
        return;
    }
    let container = Container::new();
    let mut process = container.process();
    process.alloc(3 * GIB);
    let used = (container.ledger_bytes() >> 20).to_string();
    let gpus = gpustat(&container);
    assert_eq!(gpus[0]["memory.total"], 81559);
    assert_eq!(gpus[0]["processes"][0]["pid"], json!(process.pid()));
    let shown = nvitop(&container);
    assert_eq!(
        lines_with(&shown, &[&format!("{used}MiB / 79.65GiB")]).len(),
        1,
        "{shown}"
    );
    let without_date = |table: String| table.split_once('\n').unwrap().1.to_owned();
    let direct = container
        .machine
        .program("gpu-view")
        .unwrap()
        .output()
        .unwrap();
    let direct = String::from_utf8(direct.stdout).unwrap();
    assert_eq!(without_date(table(&container, &[])), without_date(direct));
    let foreign = process.pid().to_string();
    assert_eq!(lines_with(&table(&container, &[]), &[&foreign]).len(), 1);
}
