//! Captures beside calls that the driver allows during a capture, and a library beside a kernel that waits.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::Deserialize;

use super::report::Row;
use super::rows::Rows;
use super::setup::{Setup, json, limits};

const MIB: i64 = 1 << 20;

/// Output of `gpu-suite captures` about one call.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Captured {
    call: String,
    is_own_thread: bool,
    captures: usize,
    calls: usize,
    failures: BTreeMap<String, usize>,
}

/// Output of `gpu-suite library`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Used {
    is_second_gpu: bool,
    returned: Vec<Returned>,
    waited: Option<String>,
    array_bytes: i64,
    taken_bytes: i64,
}

#[derive(Debug, Deserialize)]
struct Returned {
    call: String,
    milliseconds: f64,
}

pub(super) fn rows(setup: &Setup, rows: &mut Rows<'_>) -> Result<()> {
    let limits = limits(setup.gpu()?.total_bytes / 4, 0)?;
    rows.compare("captures beside", |preload| {
        let share = setup.preloaded(preload, &limits)?;
        let captures = if setup.is_simulated() { "4" } else { "25" };
        let arguments = ["captures", "--captures", captures];
        let native: Vec<Captured> = json(setup.suite(None, &arguments))?;
        let limited: Vec<Captured> = json(setup.suite(Some(&share), &arguments))?;
        Ok(native
            .iter()
            .zip(&limited)
            .map(|(native, limited)| captured(native, limited))
            .collect())
    })?;
    rows.compare("a library beside a kernel that waits", |preload| {
        let share = setup.preloaded(preload, &limits)?;
        Ok(used(&json(setup.suite(Some(&share), &library(setup)))?))
    })
}

/// The simulated GPU has no kernel that reads memory. There the kernel is one that lasts for all its time.
fn library(setup: &Setup) -> Vec<&'static str> {
    match setup.is_simulated() {
        true => vec!["library", "--kernel", "spin", "--seconds", "3"],
        false => vec!["library", "--seconds", "4"],
    }
}

/// A call that fails without a share, too, proves nothing.
fn captured(native: &Captured, limited: &Captured) -> Row {
    let thread = match limited.is_own_thread {
        true => "of its own thread",
        false => "of another thread",
    };
    let title = format!("captures beside {} {thread}", limited.call);
    let list = |failures: &BTreeMap<String, usize>| {
        let failures = failures
            .iter()
            .map(|(error, count)| format!("{count} × {error}"));
        failures.collect::<Vec<_>>().join(", ")
    };
    if !native.failures.is_empty() {
        let failures = list(&native.failures);
        return Row::not_run(title, format!("the driver does not allow it: {failures}"));
    }
    let detail = match limited.failures.is_empty() {
        true => format!("{} captures with {} calls", limited.captures, limited.calls),
        false => list(&limited.failures),
    };
    Row::checked(title, limited.failures.is_empty(), detail)
}

fn used(used: &Used) -> Vec<Row> {
    let other = match used.is_second_gpu {
        true => "on another GPU",
        false => "of another context",
    };
    let returned = used.returned.iter();
    let times = returned.map(|done| format!("{} {:.1} ms", done.call, done.milliseconds));
    let mut detail = times.collect::<Vec<_>>().join(", ");
    if let Some(call) = &used.waited {
        detail += &format!("; {call} waited");
    }
    vec![
        Row::checked(
            format!("a library beside a kernel that waits {other}"),
            used.waited.is_none() && !used.returned.is_empty(),
            detail,
        ),
        Row::measured(
            format!("a library beside a kernel that waits {other}: memory of the kernel's GPU"),
            format!(
                "{} MiB, for arrays of {} MiB in two libraries of which one context used one",
                used.taken_bytes / MIB,
                used.array_bytes / MIB
            ),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::report::{Outcome, Row};
    use super::{Captured, MIB, Returned, Used, captured, used};

    fn outcome(row: &Row) -> Option<bool> {
        match row.outcome {
            Outcome::Checked { held, .. } => Some(held),
            Outcome::Measured { .. } | Outcome::NotRun { .. } => None,
        }
    }

    #[test]
    fn demands_of_captures_what_the_driver_allows() {
        let seen = |failures: &[&str]| Captured {
            call: "launch".to_owned(),
            is_own_thread: false,
            captures: 1,
            calls: 3,
            failures: failures
                .iter()
                .map(|name| ((*name).to_owned(), 1))
                .collect(),
        };
        assert_eq!(outcome(&captured(&seen(&[]), &seen(&[]))), Some(true));
        assert_eq!(outcome(&captured(&seen(&[]), &seen(&["900"]))), Some(false));
        assert_eq!(outcome(&captured(&seen(&["900"]), &seen(&[]))), None);
    }

    #[test]
    fn demands_that_no_use_of_a_library_waits() {
        let holds = |waited: Option<&str>, returned: &[&str]| {
            let returned = returned.iter().map(|call| Returned {
                call: (*call).to_owned(),
                milliseconds: 0.1,
            });
            let seen = Used {
                is_second_gpu: false,
                returned: returned.collect(),
                waited: waited.map(str::to_owned),
                array_bytes: 64 * MIB,
                taken_bytes: 66 * MIB,
            };
            used(&seen).first().and_then(outcome)
        };
        assert_eq!(holds(None, &["cuLibraryLoadData"]), Some(true));
        assert_eq!(
            holds(Some("cuLaunchKernel"), &["cuLibraryLoadData"]),
            Some(false)
        );
        assert_eq!(holds(None, &[]), Some(false));
    }
}
