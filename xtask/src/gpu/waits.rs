//! Launches of a share without credit: behind a kernel that waits for them, and after a stop of the process.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use drava_cluster::process::{self, Limit};
use serde::Deserialize;

use super::report::Row;
use super::rows::Rows;
use super::setup::{Running, Setup, Share, go, json, limits, start_all};

/// A share of 20% waits five seconds for each second of GPU time, of which it owes at most about one.
const CORES: u32 = 20;

/// Part of the kernel's longest duration before which it must end.
const ENDS_WITHIN: f64 = 0.75;

/// The suite spends 100 ms of GPU time, ten times the credit of the share, for which it waits 425 ms; unthrottled kernels
/// take 100 ms, and some time of the host.
const SPENT_SECONDS: f64 = 0.25;

/// Three kernels of 5 ms after a stop are due after 100 ms; the guarantee is about a second, and a loaded host may take
/// another one.
const AFTER_STOP_SECONDS: f64 = 2.0;

/// Output of `gpu-suite wait`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Waited {
    kernel_seconds: f64,
    spent_seconds: f64,
    seconds: f64,
}

/// Output of `gpu-suite stopped`.
#[derive(Debug, Deserialize)]
struct Continued {
    kernels: u32,
    seconds: f64,
}

pub(super) fn rows(setup: &Setup, stop_seconds: f64, rows: &mut Rows<'_>) -> Result<()> {
    let share = || setup.share(&limits(setup.gpu()?.total_bytes / 4, CORES)?);
    rows.run("a kernel that waits for launches of one process", || {
        let alone = json(wait(setup, &share()?, &["--role", "alone"]))?;
        Ok(vec![behind("of one process", &[alone])])
    })?;
    rows.run("a kernel that waits for launches of two processes", || {
        Ok(vec![behind("of two processes", &pair(setup, &share()?)?)])
    })?;
    rows.run("a stop of", || {
        let continued = stop(setup, &share()?, stop_seconds)?;
        Ok(vec![Row::checked(
            format!("a stop of {stop_seconds} s"),
            continued.seconds < AFTER_STOP_SECONDS,
            format!(
                "{} kernels of 5 ms took {:.2} s after it, at {CORES}%",
                continued.kernels, continued.seconds
            ),
        )])
    })
}

/// The simulated GPU has no kernel that reads memory. There the kernel is one that lasts for all its time.
fn wait(setup: &Setup, share: &Share, args: &[&str]) -> Command {
    let kernel = if setup.is_simulated() {
        "spin"
    } else {
        "await-flag"
    };
    let mut command = setup.suite(Some(share), &["wait", "--kernel", kernel]);
    command.args(args);
    command
}

/// The kernel of one process and the launches of another one.
fn pair(setup: &Setup, share: &Share) -> Result<[Waited; 2]> {
    let mut first = Running::start(wait(setup, share, &["--role", "waits"]))?;
    let flag = first.line()?;
    let launches = wait(setup, share, &["--role", "launches", "--flag", &flag]);
    let mut launches = start_all(vec![launches])?;
    first.send("go")?;
    let line = first.line()?;
    ensure!(line == "launched", "expected \"launched\", read {line:?}");
    go(&mut launches)?;
    let second = launches.pop().context("no program")?.json()?;
    let waited = first.json()?;
    first.send("end")?;
    first.end()?;
    Ok([waited, second])
}

/// Each process returned before the kernel's longest duration, and had to wait for its credit before.
fn behind(processes: &str, waited: &[Waited]) -> Row {
    let is_released = |waited: &Waited| {
        waited.spent_seconds > SPENT_SECONDS && waited.seconds < ENDS_WITHIN * waited.kernel_seconds
    };
    let details = waited.iter().map(|waited| {
        format!(
            "{:.1} s of {:.0} s, after {:.2} s for 100 ms of GPU time",
            waited.seconds, waited.kernel_seconds, waited.spent_seconds
        )
    });
    Row::checked(
        format!("a kernel that waits for launches {processes}, without credit"),
        waited.iter().all(is_released),
        details.collect::<Vec<_>>().join("; "),
    )
}

fn stop(setup: &Setup, share: &Share, seconds: f64) -> Result<Continued> {
    let mut programs = start_all(vec![setup.suite(Some(share), &["stopped"])])?;
    let mut program = programs.pop().context("no program")?;
    signal(&program, "STOP")?;
    // The length of the stop is what is measured.
    sleep(Duration::from_secs_f64(seconds));
    signal(&program, "CONT")?;
    program.send("go")?;
    let continued = program.json()?;
    program.end()?;
    Ok(continued)
}

fn signal(program: &Running, name: &str) -> Result<()> {
    let mut kill = Command::new("sh");
    kill.args(["-c", &format!("kill -{name} {}", program.pid())]);
    let output = process::output(kill.stdin(Stdio::null()), Limit::REQUEST)?;
    ensure!(output.status.success(), "cannot send SIG{name}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::{Waited, behind};

    fn holds(spent_seconds: f64, seconds: f64) -> bool {
        let waited = Waited {
            kernel_seconds: 20.0,
            spent_seconds,
            seconds,
        };
        let row = behind("of one process", &[waited]);
        matches!(row.outcome, Outcome::Checked { held: true, .. })
    }

    #[test]
    fn demands_spent_credit_and_early_end() {
        assert!(holds(0.4, 1.0));
        assert!(!holds(0.1, 1.0), "the share had credit");
        assert!(!holds(0.4, 20.0), "the kernel ended by its own time");
    }
}
