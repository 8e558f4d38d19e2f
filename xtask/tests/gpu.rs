//! `cargo xtask gpu` on the simulated GPU, and without a GPU.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::Command;

use serde_json::Value;

#[test]
fn guarantees_hold_on_simulated_gpu() {
    let out = tempfile::tempdir().unwrap();
    // Shares of GPU time take minutes; `cargo xtask bench share` measures them.
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args([
            "gpu",
            "--simulated",
            "--only",
            "entry-points,memory,events,programs",
            "--out",
        ])
        .arg(out.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}\n{stderr}");

    let report = read(out.path(), "gpu.json");
    let rows = rows(&report);
    let checked = rows
        .iter()
        .filter(|row| row["outcome"] == "checked")
        .count();
    assert!(checked >= 40, "only {checked} checks: {report:#}");
    assert!(
        rows.iter()
            .any(|row| row["what"] == "entry points replaced under a limit" && row["value"] != "0"),
        "{report:#}"
    );
    // What this machine lacks is reported with a reason.
    for what in [
        "PyTorch, expandable segments",
        "PyTorch, forked data loaders",
        "compute-sanitizer",
        "MPS",
    ] {
        let row = rows
            .iter()
            .find(|row| row["what"].as_str().unwrap().contains(what));
        let row = row.unwrap_or_else(|| panic!("no row for {what}: {report:#}"));
        assert!(
            row["detail"].is_string() || row["reason"].is_string(),
            "{row}"
        );
    }
    let memory = read(out.path(), "nvml-memory.json");
    let paths = memory.as_array().unwrap();
    assert!(paths.len() >= 16, "{memory:#}");
    for path in paths {
        let bytes = |name: &str| path[name].as_u64().unwrap();
        assert!(
            bytes("processBytes") > 0 && bytes("accountBytes") > 0,
            "{path}"
        );
        assert!(bytes("usedBytes") > bytes("usedBytesBefore"), "{path}");
    }
    assert!(out.path().join("gpu.md").exists() && out.path().join("entry-points.json").exists());
}

fn read(out: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(out.join(name)).unwrap()).unwrap()
}

fn rows(report: &Value) -> Vec<&Value> {
    let parts = report["results"].as_array().unwrap().iter();
    parts
        .flat_map(|part| part["rows"].as_array().unwrap())
        .collect()
}

/// Only that everything is measured: in such short times on a busy machine the shares prove nothing. Launches are counted in
/// advance, by guesses at first, so that an account may stand still for some tenths of a second.
#[test]
fn measures_tenants_with_agent() {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["gpu", "--simulated", "--only", "agent", "--seconds", "1.5"])
        .arg("--out")
        .arg(out.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let is_measured = output.status.success() || stderr.contains("does not hold");
    assert!(is_measured, "{stderr}");

    let report = read(out.path(), "gpu.json");
    let samples = read(out.path(), "nvml-utilization.json");
    let (rows, samples) = (rows(&report), samples.as_array().unwrap());
    for policy in ["balance", "token"] {
        for split in ["30:70", "10:90", "42:58"] {
            let random = "100, 1000, 10000 µs against 200, 5000 µs at random";
            for kernels in ["5 µs", "1000 µs", "20000 µs", random] {
                let case = format!("{policy}, {split}, kernels of {kernels}");
                for what in ["division", "sum"] {
                    let what = format!("{case}, {what}");
                    let row = rows.iter().find(|row| row["what"] == what.as_str());
                    let row = row.unwrap_or_else(|| panic!("no row {what}: {report:#}"));
                    let detail = row["detail"].as_str().unwrap();
                    assert!(!detail.contains("no time"), "{row}");
                }
                let raw = samples.iter().find(|raw| raw["case"] == case.as_str());
                let raw = raw.unwrap_or_else(|| panic!("no samples of {case}"));
                assert!(!raw["usedBytes"].as_array().unwrap().is_empty(), "{raw:#}");
                for tenant in raw["tenants"].as_array().unwrap() {
                    assert!(tenant["accountUs"].as_u64().unwrap() > 0, "{raw:#}");
                    let samples = raw["utilization"].as_array().unwrap();
                    let has_samples = samples.iter().any(|sample| sample["pid"] == tenant["pid"]);
                    assert!(has_samples, "{raw:#}");
                }
            }
        }
    }
}

#[test]
fn reports_missing_gpu_and_writes_no_report() {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["gpu", "--out"])
        .arg(out.path())
        // A driver shows no GPU then.
        .env("CUDA_VISIBLE_DEVICES", "-1")
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.starts_with("no GPU that CUDA can use"), "{stdout}");
    assert!(stdout.contains("--simulated"), "{stdout}");
    assert!(!out.path().join("gpu.json").exists() && !out.path().join("gpu.md").exists());
}

#[test]
fn names_missing_packaged_program() {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["gpu", "--simulated", "--programs"])
        .arg(directory.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{stderr}");
    let suite = directory.path().join("gpu-suite");
    assert!(
        stderr.contains(&format!("{} is missing", suite.display())),
        "{stderr}"
    );
    assert!(stderr.contains("--package"), "{stderr}");
}
