//! `libvgpu.so`, built in the profile in which it is shipped.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context as _, anyhow, ensure};

/// Returns `libvgpu.so` as shipped, built on the first call.
///
/// # Errors
/// Cargo cannot build it.
pub fn shipped() -> anyhow::Result<&'static Path> {
    static LIBRARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| build(&[]).map_err(|error| format!("{error:#}")))
        .as_deref()
        .map_err(|error| anyhow!("{error}"))
}

/// As [`shipped`], with more arguments for cargo, and built on each call.
///
/// # Errors
/// Cargo cannot build it.
pub fn build(arguments: &[&str]) -> anyhow::Result<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(workspace)
        .args(["build", "--quiet", "--message-format=json"])
        .args(["-p", "libvgpu", "--profile", "preload"])
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo to build libvgpu")?;
    ensure!(output.status.success(), "cannot build libvgpu");
    String::from_utf8(output.stdout)?
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .flat_map(|message| message["filenames"].as_array().cloned().unwrap_or_default())
        .filter_map(|file| file.as_str().map(PathBuf::from))
        .find(|file| file.file_name().is_some_and(|name| name == "libvgpu.so"))
        .context("cargo reported no path of libvgpu.so")
}
