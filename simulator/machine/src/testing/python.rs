//! A Python environment with nvidia-ml-py, gpustat, nvitop, cuda-bindings and prometheus-client.
//!
//! Installed from PyPI into a virtual environment next to the built programs, once per version of
//! `python-clients.txt`. It gets its final name when complete, so an interrupted installation is
//! repeated. A moved environment is reinstalled, since its programs contain its path.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, anyhow, ensure};
use rustix::fs::{FlockOperation, flock};

const REQUIREMENTS: &str = include_str!("../../python-clients.txt");

/// Returns true where the clients cannot be installed: without Python, its venv module or PyPI.
///
/// Reports the present test as skipped, with the reason, in the form that `cargo xtask test` reads.
#[must_use]
pub fn is_unavailable() -> bool {
    let Err(error) = clients() else {
        return false;
    };
    let test = std::thread::current();
    let reason = format!("{error:#}").replace('\n', " ");
    let line = format!("skipped: {}: {reason}\n", test.name().unwrap_or("a test"));
    // `eprintln!` would be hidden for a test that passes.
    let _ = std::io::stderr().write_all(line.as_bytes());
    true
}

/// Returns the `bin` directory of the virtual environment.
///
/// # Errors
/// If `python3` with `venv` is missing, or PyPI cannot be reached.
pub fn clients() -> anyhow::Result<PathBuf> {
    static CLIENTS: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    CLIENTS
        .get_or_init(|| install().map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(|error| anyhow!(error))
}

fn install() -> anyhow::Result<PathBuf> {
    let directory = super::built()?.join("python-clients");
    fs::create_dir_all(&directory)?;
    let lock = File::create(directory.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let environment = directory.join("venv");
    let installed = environment.join("requirements.txt");
    let wanted = format!("# in {}\n{REQUIREMENTS}", environment.display());
    if fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(environment.join("bin"));
    }
    let _ = fs::remove_dir_all(&environment);
    run(Command::new("python3")
        .args(["-m", "venv"])
        .arg(&environment))
    .context("cannot create a virtual environment; install python3 with venv (Debian: apt install python3-venv)")?;
    let requirements = directory.join("requirements.txt");
    fs::write(&requirements, wanted)?;
    run(Command::new(environment.join("bin/pip"))
        .args([
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--requirement",
        ])
        .arg(&requirements))
    .context("cannot install the Python clients from PyPI")?;
    fs::rename(&requirements, &installed)?;
    Ok(environment.join("bin"))
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = Path::new(command.get_program()).display().to_string();
    let output = command
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{program}: {}\n{message}",
        output.status
    );
    Ok(())
}
