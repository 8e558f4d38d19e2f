//! The parts of libvgpu that use no system calls, under Miri, which finds accesses out of bounds or not aligned, data
//! races, and reads of uninitialized memory in tests that pass.
//!
//! Runs only when named: it needs a nightly toolchain and several minutes.

use std::ffi::OsString;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use drava_cluster::process::Limit;
use indicatif::{ProgressBar, ProgressStyle};

use super::libtest::Outcome;
use super::log::Log;

/// Toolchain of Miri, installed where it is missing.
const TOOLCHAIN: &str = "nightly-2026-05-20";

/// Limit of one test program: some tests print nothing for many minutes.
const LIMIT: Limit = Limit::total(Duration::from_secs(2 * 60 * 60));

/// What Miri checks.
const FLAGS: &str = "-Zmiri-strict-provenance -Zmiri-tree-borrows -Zmiri-tree-borrows-no-precise-interior-mut \
    -Zmiri-disable-isolation -Zmiri-ignore-leaks";

/// Cases of each property test. Miri is a thousand times slower than the machine.
const CASES: &str = "2";

/// Packages and their tests. The excluded tests explore schedules or long histories, which Miri only slows down.
const TESTS: [&[&str]; 2] = [
    &["-p", "libvgpu", "--test", "pure"],
    &[
        "-p",
        "drava-vgpu-abi",
        "--lib",
        "--test",
        "page",
        "--test",
        "snapshot",
        "--test",
        "ledger",
    ],
];

/// Installs Miri where it is missing, and runs the tests.
pub(crate) fn run(filter: Option<&str>, log: &mut Log) -> Result<Outcome> {
    let steps = ProgressBar::new(1 + TESTS.len() as u64);
    steps.set_style(ProgressStyle::with_template(
        "    {bar:20} {pos}/{len} {msg}",
    )?);
    steps.set_message(format!("Miri of {TOOLCHAIN}"));
    install(log)?;
    let mut outcome = Outcome::default();
    for tests in TESTS {
        steps.inc(1);
        steps.set_message(format!("cargo miri test {}", tests.join(" ")));
        let mut command = miri(&["test"]);
        command
            .args(tests)
            .args(["--target-dir", "target/miri", "--"])
            .args(filter);
        outcome += log.tests(command, LIMIT)?;
    }
    steps.finish_and_clear();
    Ok(outcome)
}

fn install(log: &mut Log) -> Result<()> {
    let has_miri = log.check(miri(&["--version"]))?.count.failed == 0;
    if !has_miri {
        let mut install = Command::new("rustup");
        install.args(["toolchain", "install", TOOLCHAIN, "--profile", "minimal"]);
        install.args(["--component", "miri,rust-src"]);
        if log.check(install)?.count.failed > 0 {
            bail!("cannot install Miri of {TOOLCHAIN} with rustup");
        }
    }
    if log.check(miri(&["setup"]))?.count.failed > 0 {
        bail!("cannot build the standard library for Miri");
    }
    Ok(())
}

/// `cargo miri` of [`TOOLCHAIN`], whichever toolchain runs this program.
fn miri(arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command
        .args(["run", TOOLCHAIN, "cargo", "miri"])
        .args(arguments)
        .current_dir(drava_cluster::workspace_root())
        .env("MIRIFLAGS", FLAGS)
        .env("PROPTEST_CASES", CASES)
        .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true");
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTFLAGS", "RUSTUP_TOOLCHAIN"].map(OsString::from) {
        command.env_remove(name);
    }
    command
}
