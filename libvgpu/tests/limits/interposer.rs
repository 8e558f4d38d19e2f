//! Builds what the tests run: `libvgpu.so` in its own profile, and the subject.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, ensure};

/// `libvgpu.so` as it is shipped, built on the first call.
pub(crate) fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| build_library(&[]).unwrap())
}

/// `libvgpu.so` that dies after the step that `DRAVA_KILL_AFTER` names, built on the first call.
pub(crate) fn library_with_kill_points() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // Elsewhere, or it would replace the other one.
        let directory = concat!(env!("CARGO_TARGET_TMPDIR"), "/kill-points");
        build_library(&["--features", "kill-points", "--target-dir", directory]).unwrap()
    })
}

fn build_library(arguments: &[&str]) -> anyhow::Result<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(workspace)
        .args(["build", "--quiet", "--message-format=json"])
        .args(["-p", "libvgpu", "--profile", "preload"])
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo to build libvgpu")?;
    ensure!(output.status.success(), "cargo could not build libvgpu");
    String::from_utf8(output.stdout)?
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .flat_map(|message| message["filenames"].as_array().cloned().unwrap_or_default())
        .filter_map(|file| file.as_str().map(PathBuf::from))
        .find(|file| file.file_name().is_some_and(|name| name == "libvgpu.so"))
        .context("cargo did not say where it built libvgpu.so")
}

/// The subject, compiled on the first call.
pub(crate) fn subject() -> &'static Path {
    static SUBJECT: OnceLock<PathBuf> = OnceLock::new();
    SUBJECT.get_or_init(|| compile("subject"))
}

/// One of the storm's processes, compiled on the first call.
pub(crate) fn storm() -> &'static Path {
    static STORM: OnceLock<PathBuf> = OnceLock::new();
    STORM.get_or_init(|| compile("storm"))
}

fn compile(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/limits/{name}.c"));
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let status = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .args([&target, &source])
        .args(["-ldl", "-lpthread"])
        .status()
        .unwrap();
    assert!(
        status.success(),
        "cc could not compile {}",
        source.display()
    );
    target
}
