//! Every name that nvml-wrapper-sys looks up is exported: with a name missing, some clients refuse
//! to start.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use simulator_machine::description::T4;
use simulator_machine::testing::Machine;

/// Where cargo keeps the source of nvml-wrapper-sys.
fn bindings() -> anyhow::Result<PathBuf> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let package = packages
        .iter()
        .find(|package| package["name"] == "nvml-wrapper-sys");
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    let manifest = PathBuf::from(manifest.context("no nvml-wrapper-sys")?);
    Ok(manifest.with_file_name("src").join("bindings.rs"))
}

#[test]
fn every_name_of_the_header_is_exported() -> anyhow::Result<()> {
    let source = std::fs::read_to_string(bindings()?)?;
    let wanted: BTreeSet<&str> = source
        .match_indices("b\"nvml")
        .filter_map(|(at, _)| source[at + 2..].split('\\').next())
        .collect();
    assert!(wanted.len() > 390, "{}", wanted.len());
    let machine = Machine::start(T4)?;
    let library = machine.lib_dir().join("libnvidia-ml.so.1");
    // SAFETY: the library does nothing when loaded.
    let library = unsafe { libloading::Library::new(library) }?;
    for name in wanted {
        // SAFETY: the symbol is looked up and not used.
        let symbol = unsafe { library.get::<*const ()>(name.as_bytes()) };
        assert!(symbol.is_ok(), "{name} is missing");
    }
    Ok(())
}
