//! NVIDIA's tools and the Multi-Process Service with a program under a share, where they are installed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use drava_cluster::process::{self, Limit};

use super::report::Row;
use super::setup::{Setup, Share};
use super::verdicts::succeeds;

/// Tools that run a program, with the arguments before it.
const TOOLS: [(&str, &[&str]); 2] = [
    ("compute-sanitizer", &["--error-exitcode", "9"]),
    (
        "nsys",
        &["profile", "--force-overwrite", "true", "--output"],
    ),
];

const MPS: &str = "nvidia-cuda-mps-control";

pub(super) fn rows(setup: &Setup, share: &Share) -> Vec<Row> {
    let mut rows: Vec<Row> = TOOLS
        .iter()
        .map(|(tool, arguments)| under_tool(setup, share, tool, arguments))
        .collect();
    rows.push(mps(setup, share));
    rows
}

/// Compiles a program.
///
/// # Errors
/// When this machine has no nvcc, or none that works.
pub(super) fn nvcc(source: &Path, text: &str, options: &[&str], output: &Path) -> Result<()> {
    fs::write(source, text)?;
    let mut nvcc = Command::new("nvcc");
    nvcc.args(options).arg("-o").args([output, source]);
    let ran = process::output(&mut nvcc, Limit::REQUEST)?;
    ensure!(
        ran.status.success(),
        "nvcc cannot compile a program here: {}",
        String::from_utf8_lossy(&ran.stderr).trim()
    );
    Ok(())
}

/// Whether a program is installed.
fn is_installed(program: &str) -> bool {
    let mut which = Command::new("which");
    which.arg(program).stdin(Stdio::null());
    process::output(&mut which, Limit::REQUEST).is_ok_and(|output| output.status.success())
}

/// Why a tool does not run here.
fn obstacle(setup: &Setup, tool: &str) -> Option<String> {
    if setup.is_simulated() {
        Some("the simulated GPU has no tools".to_owned())
    } else if is_installed(tool) {
        None
    } else {
        Some(format!("{tool} is not installed"))
    }
}

fn under_tool(setup: &Setup, share: &Share, tool: &str, arguments: &[&str]) -> Row {
    let title = format!("a limited program under {tool}");
    if let Some(reason) = obstacle(setup, tool) {
        return Row::not_run(title, reason);
    }
    let suite = setup.suite(Some(share), &[]);
    let mut command = setup.program(Some(share), Path::new(tool));
    command.args(arguments);
    if tool == "nsys" {
        command.arg(setup.out.join("nsys"));
    }
    command
        .arg(suite.get_program())
        .args(["latency", "--launches", "1000"]);
    succeeds(&title, command)
}

/// A program under a share is a client of MPS. The daemon has directories of its own and ends with the check.
fn mps(setup: &Setup, share: &Share) -> Row {
    let title = "a limited program with MPS";
    if let Some(reason) = obstacle(setup, MPS) {
        return Row::not_run(title, reason);
    }
    let Ok(directory) = tempfile::tempdir() else {
        return Row::not_run(title, "cannot create a directory");
    };
    let with_mps = |mut command: Command| {
        command
            .env("CUDA_MPS_PIPE_DIRECTORY", directory.path())
            .env("CUDA_MPS_LOG_DIRECTORY", directory.path());
        command
    };
    let mut daemon = with_mps(Command::new(MPS));
    daemon.arg("-d").stdin(Stdio::null());
    let started = process::output(&mut daemon, Limit::REQUEST);
    if !started.is_ok_and(|output| output.status.success()) {
        return Row::not_run(title, "the MPS daemon does not start");
    }
    let suite = setup.suite(Some(share), &["latency", "--launches", "1000"]);
    let row = succeeds(title, with_mps(suite));
    let mut quit = with_mps(Command::new("sh"));
    quit.args(["-c", &format!("echo quit | {MPS}")]);
    let _ = process::output(&mut quit, Limit::REQUEST);
    row
}
