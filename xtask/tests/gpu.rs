//! `cargo xtask gpu` on the simulated GPU, and without a GPU.

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

    let report: Value =
        serde_json::from_slice(&std::fs::read(out.path().join("gpu.json")).unwrap()).unwrap();
    let rows: Vec<&Value> = report["results"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|part| part["rows"].as_array().unwrap())
        .collect();
    let checked = rows
        .iter()
        .filter(|row| row["outcome"] == "checked")
        .count();
    assert!(checked >= 24, "only {checked} checks: {report:#}");
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
    assert!(out.path().join("gpu.md").exists() && out.path().join("entry-points.json").exists());
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
