//! The probe on the simulated machine.

use std::io::{BufRead as _, BufReader};
use std::process::{Output, Stdio};

use anyhow::Context as _;
use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

fn probe(machine: &Machine, arguments: &[&str]) -> anyhow::Result<Output> {
    Ok(machine
        .command(env!("CARGO_BIN_EXE_cuda-probe"))
        .args(arguments)
        .output()?)
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn names_devices() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let info = json(&probe(&machine, &["info", "-o", "json"])?);
    assert_eq!(info["driverVersion"], 13000);
    assert_eq!(info["devices"][0]["name"], "Tesla T4");
    assert_eq!(info["devices"][0]["multiprocessors"], 40);
    Ok(())
}

#[test]
fn reports_memory_around_granted_and_denied_allocation() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let granted = json(&probe(&machine, &["alloc", "--mib", "1024", "-o", "json"])?);
    let free = |value: &serde_json::Value| value["freeBytes"].as_u64().unwrap();
    assert_eq!(
        free(&granted["before"]) - free(&granted["after"]),
        1024 * MIB
    );
    assert!(granted["error"].is_null());

    let denied = probe(&machine, &["alloc", "--mib", "20000", "-o", "json"])?;
    assert_eq!(denied.status.code(), Some(2));
    assert_eq!(json(&denied)["error"], "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(machine.gpu(0)?.used_bytes, 0);
    Ok(())
}

#[test]
fn fills_all_free_memory() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let free = machine.gpu(0)?.free_bytes;
    let filled = json(&probe(&machine, &["fill", "-o", "json"])?);
    let context = 104 * MIB;
    let whole_pages = (free - context) / (2 * MIB) * 2 * MIB;
    assert_eq!(filled["allocatedBytes"].as_u64(), Some(whole_pages));
    assert_eq!(filled["error"], "CUDA_ERROR_OUT_OF_MEMORY");
    Ok(())
}

#[test]
fn launches_for_requested_time() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let launched = json(&probe(&machine, &["launch", "--ms", "50", "-o", "json"])?);
    assert_eq!(launched["launches"], 1);
    assert!(
        launched["elapsedMilliseconds"].as_u64() >= Some(50),
        "{launched}"
    );
    Ok(())
}

#[test]
fn reports_missing_driver() -> anyhow::Result<()> {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_cuda-probe"))
        .env("LD_LIBRARY_PATH", "/nonexistent")
        .arg("info")
        .output()?;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot load libcuda.so.1"));
    Ok(())
}

#[test]
fn ends_quietly_on_closed_pipe() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let output = machine
        .command(env!("CARGO_BIN_EXE_cuda-probe"))
        .arg("info")
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()?;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    Ok(())
}

/// Runs the probe until it has printed a line that `is_last` accepts, and returns all lines.
fn lines_until(
    machine: &Machine,
    arguments: &[&str],
    is_last: impl Fn(&serde_json::Value) -> bool,
) -> anyhow::Result<Vec<serde_json::Value>> {
    let mut child = machine
        .command(env!("CARGO_BIN_EXE_cuda-probe"))
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().context("a pipe")?;
    let mut found = Vec::new();
    for line in BufReader::new(output).lines() {
        found.push(serde_json::from_str(&line?)?);
        if found.last().is_some_and(&is_last) {
            break;
        }
    }
    child.kill()?;
    child.wait()?;
    Ok(found)
}

#[test]
fn training_compares_its_bytes() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let arguments = ["train", "--mib", "2", "--unwritten-mib", "100"];
    let lines = lines_until(&machine, &arguments, |line| line["event"] == "checked")?;
    assert_eq!(lines[0]["event"], "started");
    assert_eq!(lines[1]["event"], "total");
    assert_eq!(
        lines[1]["bytes"].as_u64(),
        Some(machine.gpu(0)?.total_bytes - machine.gpu(0)?.reserved_bytes)
    );
    let checked = lines.last().unwrap();
    assert_eq!(checked["bytes"].as_u64(), Some(2 * MIB));
    assert_eq!(checked["wrongBlocks"], 0);
    assert!(checked["kernels"].as_u64().unwrap() > 1);
    Ok(())
}

#[test]
fn churn_counts_denied_allocations() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let arguments = ["churn", "--largest-mib", "4000", "--pause-us", "100"];
    let lines = lines_until(&machine, &arguments, |line| {
        line["denied"].as_u64().is_some_and(|denied| denied > 0)
    })?;
    let last = lines.last().unwrap();
    let number = |name: &str| last[name].as_u64().unwrap();
    assert!(number("allocated") >= number("freed"), "{last}");
    assert!(number("heldBytes") < 16_000 * MIB, "{last}");
    Ok(())
}

#[test]
fn reports_the_error_of_a_kernel() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let output = probe(&machine, &["fault"])?;
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr)?;
    assert!(message.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{message}");
    Ok(())
}
