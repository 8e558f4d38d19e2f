//! The programs that run in containers, compiled for aarch64: their assembly and their types depend on it. Their unit
//! tests run under QEMU's user mode emulation where it and a cross compiler are installed.
//!
//! A check links nothing, so it needs no cross compiler, except for the node driver, whose cryptography has C and
//! assembly sources. The node driver is checked where `aarch64-linux-gnu-gcc` is installed.

use std::process::{Command, Stdio};

use anyhow::Result;

use super::libtest::{Count, Outcome, Skip};
use super::log::{self, Log, TESTS};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const CROSS_COMPILER: &str = "aarch64-linux-gnu-gcc";

/// Packages without C sources, and the profile in which `libvgpu.so` is shipped.
const CHECKS: [&[&str]; 2] = [
    &["-p", "libvgpu", "--profile", "preload"],
    &["-p", "drava-vgpu-abi", "-p", "drava-cdi-hook"],
];

/// Programs with the name of QEMU's user mode emulation.
const EMULATORS: [&str; 2] = ["qemu-aarch64", "qemu-aarch64-static"];

/// Libraries for emulated programs, where Debian's cross compiler has them.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// Tests without a GPU and without other processes. The emulation lacks `openat2`, with which the hook opens files of a
/// container.
const EMULATED: [&str; 3] = [
    "-p drava-vgpu-abi --lib --test bucket --test ledger --test page",
    "-p libvgpu --test pure",
    "-p drava-cdi-hook --bins -- --skip container::",
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
    let has_compiler = runs(CROSS_COMPILER);
    if has_compiler {
        outcome += check(&["-p", "drava-dra-driver"], log)?;
    }
    outcome += match EMULATORS.into_iter().find(|emulator| runs(emulator)) {
        Some(emulator) if has_compiler => emulate(emulator, log)?,
        emulator => skip(missing(emulator.is_some(), has_compiler)),
    };
    Ok(outcome)
}

/// Runs unit tests under emulation.
fn emulate(emulator: &str, log: &mut Log) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for tests in EMULATED {
        let mut cargo = log::cargo(&["test", "--locked", "--target", TARGET]);
        cargo
            .args(tests.split(' '))
            .env(
                "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
                CROSS_COMPILER,
            )
            .env(
                "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
                format!("{emulator} -L {LIBRARIES}"),
            );
        outcome += log.tests(cargo, TESTS)?;
    }
    Ok(outcome)
}

/// Why no tests run under emulation.
fn missing(has_emulator: bool, has_compiler: bool) -> &'static str {
    match (has_emulator, has_compiler) {
        (false, false) => "no qemu-aarch64 and no aarch64-linux-gnu-gcc",
        (false, true) => "no qemu-aarch64",
        (true, _) => "no aarch64-linux-gnu-gcc",
    }
}

fn skip(reason: &str) -> Outcome {
    Outcome {
        count: Count {
            skipped: 1,
            ..Count::default()
        },
        skips: vec![Skip::new("unit tests on aarch64", reason)],
        ..Outcome::default()
    }
}

fn check(packages: &[&str], log: &mut Log) -> Result<Outcome> {
    let check = ["check", "--locked", "--target", TARGET];
    log.check(log::cargo(&[&check, packages].concat()))
}

fn runs(program: &str) -> bool {
    let mut program = Command::new(program);
    program
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    program.status().is_ok_and(|status| status.success())
}
