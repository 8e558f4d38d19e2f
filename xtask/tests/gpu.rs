//! `cargo xtask gpu` on the simulated card: the suite that waits for a real one works, and what it checks holds. Where
//! there is no card, it says so.

use std::process::Command;

use serde_json::Value;

#[test]
fn the_gpu_suite_runs_on_the_simulated_card_and_finds_nothing_broken() {
    let out = tempfile::tempdir().unwrap();
    // Shares of time take minutes and belong to `cargo xtask bench share`.
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args([
            "gpu",
            "--simulated",
            "--only",
            "entry-points,memory,programs",
            "--out",
        ])
        .arg(out.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");

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
    assert!(checked >= 11, "only {checked} checks: {report:#}");
    assert!(
        rows.iter()
            .any(|row| row["what"] == "of these replaced under a limit" && row["value"] != "0"),
        "{report:#}"
    );
    assert!(out.path().join("gpu.md").exists() && out.path().join("entry-points.json").exists());
}

#[test]
fn without_a_gpu_the_suite_says_so_and_writes_no_report() {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["gpu", "--out"])
        .arg(out.path())
        // Where there is a driver, it shows no card.
        .env("CUDA_VISIBLE_DEVICES", "-1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(said.starts_with("There is no GPU here"), "{said}");
    assert!(said.contains("--simulated"), "{said}");
    assert!(!out.path().join("gpu.json").exists() && !out.path().join("gpu.md").exists());
}
