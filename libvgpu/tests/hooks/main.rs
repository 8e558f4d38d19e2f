//! Tests of every hook by name: each counts or meters as its class requires.
//!
//! The program is `hooks.c`. The tests in `tests/limits` show that limits hold; these tests show that no function
//! bypasses them.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

mod calls;
mod counted;
mod faults;
#[allow(dead_code, reason = "`tests/limits` uses the rest")]
#[path = "../limits/interposer.rs"]
mod interposer;
mod metered;
#[allow(dead_code, reason = "`tests/limits` uses the rest")]
#[path = "../limits/test_process.rs"]
mod test_process;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use test_process::{Container, GIB, GPUS, TestProcess};

/// A container with a share of 1 GiB and half of the GPU time, so that memory and launches are limited.
fn limited() -> Container {
    let container = Container::new();
    let limits = Limits {
        cores: Cores::new(50).unwrap(),
        compute_policy: ComputePolicy::Fixed,
        can_suspend: true,
        ..Limits::memory(GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    container
}

/// A process of the container that calls functions by name.
fn start(container: &Container) -> TestProcess {
    TestProcess::spawn(container.command(program()))
}

/// As [`start`], without libvgpu.
fn start_unlimited(container: &Container) -> TestProcess {
    TestProcess::spawn(container.machine.command(program()))
}

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(compile)
}

fn compile() -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hooks");
    compile_with("hooks.c", &program, &["-ldl"]);
    program
}

/// Compiles a file of this directory.
fn compile_with(file: &str, program: &Path, arguments: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/hooks")
        .join(file);
    let status = std::process::Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .args([program, &source])
        .args(arguments)
        .status()
        .unwrap();
    assert!(
        status.success(),
        "cc could not compile {}",
        source.display()
    );
}

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

/// The class of each entry point.
fn classes() -> BTreeMap<String, String> {
    let text = read("entry-points.tsv");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| {
        let mut fields = line.split('\t');
        Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
    });
    pairs.collect()
}

/// Names of hooks of a library, `Cuda` or `Nvml`, as exported.
fn hooks_of(library: &str) -> Vec<String> {
    let prefix = library.to_lowercase();
    let names = read("src/driver_api/functions.rs");
    let names = names.lines().filter_map(|line| {
        let (_, hook) = line
            .strip_prefix("    ")?
            .split_once(&format!("{library} "))?;
        let name = hook.split('(').next()?;
        let starts = name.starts_with(prefix.trim_end_matches("da"));
        starts.then(|| name.to_owned())
    });
    names.collect()
}

/// The name without the suffix for per-thread streams, as in the table of classes.
fn base(name: &str) -> &str {
    name.trim_end_matches("_ptsz").trim_end_matches("_ptds")
}
