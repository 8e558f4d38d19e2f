//! Tests of every hook by name: each counts or meters as its class requires.
//!
//! The program is `hooks.c`. The tests in `tests/limits` show that limits hold; these tests show that no function
//! bypasses them.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

mod counted;
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

use test_process::{Container, TestProcess};

/// A process of the container that calls functions by name.
fn start(container: &Container) -> TestProcess {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(compile);
    TestProcess::spawn(container.command(program))
}

fn compile() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hooks/hooks.c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hooks");
    let status = std::process::Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .args([&program, &source])
        .arg("-ldl")
        .status()
        .unwrap();
    assert!(
        status.success(),
        "cc could not compile {}",
        source.display()
    );
    program
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

/// Names of hooks as exported.
fn hooks() -> Vec<String> {
    let names = read("src/functions.rs");
    let names = names.lines().filter_map(|line| {
        let (_, hook) = line.strip_prefix("    ")?.split_once("Cuda ")?;
        let name = hook
            .split('(')
            .next()
            .filter(|name| name.starts_with("cu"))?;
        Some(name.to_owned())
    });
    names.collect()
}

/// The name without the suffix for per-thread streams, as in the table of classes.
fn base(name: &str) -> &str {
    name.trim_end_matches("_ptsz").trim_end_matches("_ptds")
}
