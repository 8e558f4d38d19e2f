//! The programs that run in containers, compiled for aarch64: their assembly and their types depend on it.
//!
//! A check links nothing, so it needs no cross compiler, except for the node driver, whose cryptography has C and
//! assembly sources. The node driver is checked where `aarch64-linux-gnu-gcc` is installed.

use std::process::{Command, Stdio};

use anyhow::Result;

use super::libtest::{Count, Outcome, Skip};
use super::log::{self, Log};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const CROSS_COMPILER: &str = "aarch64-linux-gnu-gcc";

/// Packages without C sources, and the profile in which `libvgpu.so` is shipped.
const CHECKS: [&[&str]; 2] = [
    &["-p", "libvgpu", "--profile", "preload"],
    &["-p", "drava-vgpu-abi", "-p", "drava-cdi-hook"],
];

/// Installs the target where it is missing, and checks the packages. Without the target nothing is checked.
pub(crate) fn run(log: &mut Log) -> Result<Outcome> {
    let mut install = Command::new("rustup");
    install.args(["target", "add", TARGET]);
    if !log
        .check(install)
        .is_ok_and(|outcome| outcome.count.failed == 0)
    {
        return Ok(Outcome {
            count: Count {
                skipped: 1,
                ..Count::default()
            },
            skips: vec![Skip::new(
                "aarch64",
                "rustup cannot install the target aarch64-unknown-linux-gnu",
            )],
            ..Outcome::default()
        });
    }
    let mut outcome = Outcome::default();
    for packages in CHECKS {
        outcome += check(packages, log)?;
    }
    if has_cross_compiler() {
        outcome += check(&["-p", "drava-dra-driver"], log)?;
    }
    Ok(outcome)
}

fn check(packages: &[&str], log: &mut Log) -> Result<Outcome> {
    let check = ["check", "--locked", "--target", TARGET];
    log.check(log::cargo(&[&check, packages].concat()))
}

fn has_cross_compiler() -> bool {
    let mut compiler = Command::new(CROSS_COMPILER);
    compiler
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    compiler.status().is_ok_and(|status| status.success())
}
