//! The parts of libvgpu that need nothing of the system but memory, under Miri, which finds what a test that passes
//! does not tell: accesses out of bounds or not aligned, data races, memory read before it was written.
//!
//! Not a part of the ordinary run: it takes a nightly toolchain and several minutes.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::stage::{Count, Log};

/// The toolchain whose Miri is used, installed when it is not there.
const TOOLCHAIN: &str = "nightly-2026-05-20";

/// What Miri looks at.
const FLAGS: &str = "-Zmiri-strict-provenance -Zmiri-tree-borrows -Zmiri-tree-borrows-no-precise-interior-mut \
    -Zmiri-disable-isolation -Zmiri-ignore-leaks";

/// Cases of each property test, each of which takes a thousand times as long as outside of Miri.
const CASES: &str = "2";

/// Packages and their tests. What is left out explores schedules or long histories, which Miri would only slow down.
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

/// Installs Miri if need be, and runs the tests.
pub(crate) fn run(filter: Option<&str>, log: &mut Log) -> Result<Count> {
    let steps = ProgressBar::new(1 + TESTS.len() as u64);
    steps.set_style(ProgressStyle::with_template(
        "    {bar:20} {pos}/{len} {msg}",
    )?);
    steps.set_message(format!("Miri of {TOOLCHAIN}"));
    install(log)?;
    let mut count = Count::default();
    for tests in TESTS {
        steps.inc(1);
        steps.set_message(format!("cargo miri test {}", tests.join(" ")));
        let mut command = miri(&["test"]);
        command
            .args(tests)
            .args(["--target-dir", "target/miri", "--"])
            .args(filter);
        count += log.tests(command)?;
    }
    steps.finish_and_clear();
    Ok(count)
}

fn install(log: &mut Log) -> Result<()> {
    let has_miri = log.check(miri(&["--version"]))?.failed == 0;
    if !has_miri {
        let mut install = Command::new("rustup");
        install.args(["toolchain", "install", TOOLCHAIN, "--profile", "minimal"]);
        install.args(["--component", "miri,rust-src"]);
        if log.check(install)?.failed > 0 {
            bail!("cannot install Miri of {TOOLCHAIN} with rustup");
        }
    }
    if log.check(miri(&["setup"]))?.failed > 0 {
        bail!("cannot build the standard library for Miri");
    }
    Ok(())
}

/// `cargo miri` of that toolchain, whichever one runs us.
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
