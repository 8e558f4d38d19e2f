//! The tables of functions of CUDA and NVML against the hooks, NVIDIA's public bindings and the simulator.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::path::Path;
use std::process::Command;

mod cuda;
mod nvml;

/// Returns a file of this crate.
fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

/// Returns a source file of a crate on which this workspace depends, below the crate's `src`.
fn source_of_crate(name: &str, file: &str) -> String {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--offline"])
        // Packages for other platforms need not be present.
        .arg(format!(
            "--filter-platform={}-unknown-linux-gnu",
            std::env::consts::ARCH
        ))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut packages = metadata["packages"].as_array().unwrap().iter();
    let package = packages.find(|package| package["name"] == name).unwrap();
    let manifest = Path::new(package["manifest_path"].as_str().unwrap());
    std::fs::read_to_string(manifest.with_file_name("src").join(file)).unwrap()
}
