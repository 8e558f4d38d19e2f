//! Exported symbols: some clients need every name that nvml-wrapper-sys looks up.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use simulator_machine::description::T4;
use simulator_machine::testing::Machine;

/// Source directory of nvml-wrapper-sys.
fn bindings() -> anyhow::Result<PathBuf> {
    let output = Command::new(env!("CARGO"))
        // Crates of other platforms may never have been fetched.
        .args([
            "metadata",
            "--format-version=1",
            "--offline",
            "--filter-platform",
        ])
        .arg(format!("{}-unknown-linux-gnu", std::env::consts::ARCH))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"]
        .as_array()
        .context("missing packages")?;
    let package = packages
        .iter()
        .find(|package| package["name"] == "nvml-wrapper-sys");
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    let manifest = PathBuf::from(manifest.context("missing nvml-wrapper-sys")?);
    Ok(manifest.with_file_name("src").join("bindings.rs"))
}

#[test]
fn exports_every_name_of_the_header() -> anyhow::Result<()> {
    let source = std::fs::read_to_string(bindings()?)?;
    let wanted: BTreeSet<&str> = source
        .match_indices("b\"nvml")
        .filter_map(|(at, _)| source[at + 2..].split('\\').next())
        .collect();
    assert!(wanted.len() > 390, "{}", wanted.len());
    let machine = Machine::start(T4)?;
    let library = machine.lib_dir().join("libnvidia-ml.so.1");
    // SAFETY: loading has no effect.
    let library = unsafe { libloading::Library::new(library) }?;
    for name in wanted {
        // SAFETY: the symbol is looked up and not used.
        let symbol = unsafe { library.get::<*const ()>(name.as_bytes()) };
        assert!(symbol.is_ok(), "{name} is missing");
    }
    Ok(())
}
