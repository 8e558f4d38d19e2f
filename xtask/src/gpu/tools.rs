//! NVIDIA's tools and the Multi-Process Service with a program under a share, where they are installed.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use drava_cluster::process::{self, Limit};

use super::mps::Daemon;
use super::report::Row;
use super::setup::{Setup, Share, is_installed};
use super::verdicts::succeeds;

/// Tools that run a program, with the arguments before it.
const TOOLS: [(&str, &[&str]); 2] = [
    ("compute-sanitizer", &["--error-exitcode", "9"]),
    (
        "nsys",
        &["profile", "--force-overwrite", "true", "--output"],
    ),
];

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

/// Why a tool does not run here.
fn obstacle(setup: &Setup, tool: &str) -> Option<String> {
    if setup.is_simulated() {
        Some("the simulated GPU has no tools".to_owned())
    } else if is_installed(Path::new(tool)) {
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

/// A program under a share is a client of MPS.
fn mps(setup: &Setup, share: &Share) -> Row {
    let title = "a limited program with MPS";
    match Daemon::start(setup) {
        Err(why) => Row::not_run(title, format!("{why:#}")),
        Ok(daemon) => {
            let suite = setup.suite(Some(share), &["latency", "--launches", "1000"]);
            succeeds(title, daemon.client(suite))
        }
    }
}
