//! A Python with the clients that users run: nvidia-ml-py, gpustat, nvitop, cuda-bindings.
//!
//! Installed from PyPI into a virtual environment beside the built programs, once per version of
//! `python-clients.txt`. It appears under its final name only when it is complete, so that an
//! interrupted installation is started again. So is one that was moved: its programs name the Python
//! beside which they were installed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use rustix::fs::{FlockOperation, flock};

const REQUIREMENTS: &str = include_str!("../../python-clients.txt");

/// The `bin` directory of the virtual environment.
///
/// # Errors
/// When there is no `python3` with `venv`, or PyPI cannot be reached.
pub fn clients() -> anyhow::Result<PathBuf> {
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
    .context("these tests need python3 with its venv module (Debian: apt install python3-venv)")?;
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
