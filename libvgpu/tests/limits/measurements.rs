//! Measurements of memory limits, each with a bound that any machine can check.
//!
//! `DRAVA_FIGURES=FILE` also writes them to a file, as `cargo xtask bench memory` and `cargo xtask bench startup` do.

use std::process::Command;
use std::time::Instant;

use drava_vgpu_abi::Limits;
use serde_json::{Value, json};

use crate::interposer;
use crate::test_process::{CONTEXT_BYTES, Container, GIB, GPUS, MIB, TestProcess};

/// Appends a line to the file of measurements, if requested.
pub(crate) fn report(figure: &Value) {
    use std::io::Write;
    println!("{figure}");
    if let Some(file) = std::env::var_os("DRAVA_FIGURES") {
        let mut file = std::fs::File::options()
            .append(true)
            .create(true)
            .open(file)
            .unwrap();
        writeln!(file, "{figure}").unwrap();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Median, mean and 99.9th percentile of the time of denials in nanoseconds, without the overhead of the measurement.
fn denials(process: &mut TestProcess, bytes: u64) -> [f64; 3] {
    let answer = process.ok(&format!("denials {bytes} 50000"));
    let [median, mean, tail, empty] = answer[..] else {
        panic!("{answer:?}")
    };
    [median, mean, tail].map(|figure| (figure - empty) as f64)
}

#[test]
fn denies_at_cost_independent_of_process_count() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.alloc(GIB);
    let mut others = Vec::new();
    let mut medians = Vec::new();
    for processes in [1, 4, 8, 32] {
        while others.len() + 1 < processes {
            others.push(container.process());
        }
        // With memory of its own, and in a block that it would share.
        for bytes in [4 * MIB, 4 << 10] {
            let [median, mean, tail] = denials(&mut process, bytes);
            medians.push(median);
            report(&json!({
                "figure": "refusal", "processes": processes, "bytes": bytes,
                "p50Ns": median, "meanNs": mean, "p999Ns": tail,
            }));
        }
    }
    // A system call per process would make denials tens of times slower.
    let [first, small_first, .., last, small_last] = medians[..] else {
        panic!("{medians:?}")
    };
    assert!(last < 5.0 * first.max(20.0), "{medians:?}");
    assert!(small_last < 5.0 * small_first.max(20.0), "{medians:?}");
}

#[test]
fn allocates_whole_limit_except_context() {
    for step in [2 * MIB, 400 << 10, 3 * MIB, 64 * MIB] {
        let container = Container::new();
        let limits = Limits {
            driver_reserve_bytes: CONTEXT_BYTES,
            ..Limits::memory(8 * GIB)
        };
        container.add_share("share", GPUS[0], &limits);
        let mut process = container.process();
        process.fill(step);
        process.fill(2 * MIB);
        let reached = container.ledger_bytes() - CONTEXT_BYTES;
        let fraction = reached as f64 / (8 * GIB - CONTEXT_BYTES) as f64;
        report(&json!({ "figure": "reachable", "stepBytes": step, "fraction": fraction }));
        assert!(fraction <= 1.0, "{fraction} in steps of {step}");
        assert!(fraction >= 0.999, "{fraction} in steps of {step}");
    }
}

/// The driver allocates more for itself than the estimate charged for the context: the limit still holds for requests, and
/// nothing but that error exceeds it. The agent's tests measure the driver's memory under the product's estimates.
#[test]
fn exceeds_limit_only_by_driver_estimate_error() {
    const ERROR: u64 = 24 * MIB;
    const PROCESSES: u64 = 4;
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: CONTEXT_BYTES - ERROR,
        ..Limits::memory(8 * GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut processes: Vec<TestProcess> = (0..PROCESSES).map(|_| container.process()).collect();
    for step in [16 * MIB, 2 * MIB] {
        processes[0].fill(step);
    }
    let peak = container.machine.gpu(0).unwrap().peak_bytes;
    assert_eq!(peak, 8 * GIB + PROCESSES * ERROR);
}

/// Seconds from the start to the exit of a process that looks up a driver function and initializes the driver.
fn process_seconds(container: &Container, preload: bool) -> f64 {
    let mut command: Command = container.command(interposer::test_process());
    command.arg("dlsym");
    if !preload {
        command.env_remove("LD_PRELOAD");
    }
    let before = Instant::now();
    let mut process = TestProcess::spawn(command);
    process.request("initonly");
    process.end();
    before.elapsed().as_secs_f64()
}

#[test]
fn starts_process_almost_as_fast_as_without_limits() {
    let container = Container::with_memory(GIB);
    // Builds everything before the measurement.
    process_seconds(&container, true);
    let runs = std::env::var("DRAVA_FIGURES").map_or(15, |_| 300);
    let (mut with, mut without, mut differences) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runs {
        let pair = (
            process_seconds(&container, true),
            process_seconds(&container, false),
        );
        with.push(pair.0);
        without.push(pair.1);
        differences.push(pair.0 - pair.1);
    }
    let (with, without) = (median(with), median(without));
    report(&json!({
        "figure": "start", "runs": runs,
        "limitedMs": with * 1e3, "unlimitedMs": without * 1e3,
        "differenceMs": median(differences) * 1e3,
    }));
    // Far below the time of a GPU probe or of waiting for an agent.
    assert!(with < 4.0 * without, "{with} s, without limits {without} s");
}
