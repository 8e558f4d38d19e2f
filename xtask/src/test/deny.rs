//! Licenses, sources and banned crates, by cargo-deny, which is built into the cache.
//!
//! cargo-deny reads the crates of every target, so they are fetched first. Once per change of the dependencies the check
//! also runs with an empty `CARGO_HOME`, as in a fresh clone: a warm cache hides a crate that is never fetched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use drava_cluster::workspace_root;

use super::libtest::Outcome;
use super::log::{self, Log};
use super::proof::Proof;

const VERSION: &str = "0.20.2";

/// Inputs of the check.
const INPUTS: [&str; 2] = ["Cargo.lock", "deny.toml"];

/// Runs the stage.
pub(crate) fn run(log: &mut Log) -> Result<Outcome> {
    let program = install(log)?;
    let mut outcome = check(&program, None, log)?;
    let proof = Proof::of("deny", workspace_root(), &INPUTS)?;
    if outcome.count.failed == 0 && !proof.exists() {
        let home = tempfile::tempdir().context("create an empty CARGO_HOME")?;
        configure(home.path())?;
        let mut fresh = check(&program, Some(home.path()), log)?;
        for failure in &mut fresh.failures {
            failure.test = format!("with an empty CARGO_HOME: {}", failure.test);
            failure.output.push(
                "this check runs once per change of Cargo.lock or deny.toml; it needs the registry"
                    .to_owned(),
            );
        }
        let passed = fresh.count.failed == 0;
        outcome += fresh;
        if passed {
            proof.record()?;
        }
    }
    Ok(outcome)
}

/// Builds cargo-deny where the cache has none.
fn install(log: &mut Log) -> Result<PathBuf> {
    let root = drava_cluster::cache_dir()?.join(format!("cargo-deny-{VERSION}"));
    let program = root.join("bin/cargo-deny");
    if program.exists() {
        return Ok(program);
    }
    let mut install = log::cargo(&["install", "--quiet", "--locked", "cargo-deny"]);
    // Without optimization it is built in half the time, and checks in a second.
    install
        .args(["--version", VERSION, "--debug", "--root"])
        .arg(&root)
        .env("CARGO_PROFILE_DEV_DEBUG", "false");
    if log.check(install)?.count.failed > 0 {
        bail!("cannot install cargo-deny {VERSION}; `--skip deny` skips this stage");
    }
    Ok(program)
}

/// Fetches the crates of all targets and checks them.
fn check(program: &Path, home: Option<&Path>, log: &mut Log) -> Result<Outcome> {
    let in_home = |mut command: Command| {
        command.envs(home.map(|home| ("CARGO_HOME", home)));
        command
    };
    let fetch = log.check(in_home(log::cargo(&["fetch", "--quiet", "--locked"])))?;
    if fetch.count.failed > 0 {
        return Ok(fetch);
    }
    let mut check = Command::new(program);
    check
        .args([
            "--offline",
            "--locked",
            "check",
            "bans",
            "licenses",
            "sources",
        ])
        .current_dir(workspace_root());
    log.check(in_home(check))
}

/// Copies the user's cargo configuration, which may name a mirror of the registry.
fn configure(home: &Path) -> Result<()> {
    let from = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    for name in ["config.toml", "config"] {
        let Some(file) = from.as_ref().map(|from| from.join(name)) else {
            continue;
        };
        if file.exists() {
            fs::copy(&file, home.join(name)).with_context(|| format!("copy {}", file.display()))?;
        }
    }
    Ok(())
}
