//! Short kernels by events, against the GPU's clock.

use anyhow::Result;
use serde::Deserialize;

use super::report::Row;
use super::setup::{Setup, json, limits};

/// Output of `gpu-suite events`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Times {
    pair_ns: u64,
    kernels: Vec<Kernel>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kernel {
    kernel_us: u64,
    by_events_ns: u64,
}

/// Resolution of events, and of the clock by which kernels end.
const RESOLUTION_NS: u64 = 1_500;

/// Rows without a limit and under one, whose own events must not change what a program measures.
pub(crate) fn rows(setup: &Setup) -> Result<Vec<Row>> {
    let share = setup.share(&limits(setup.card()?.total_bytes / 4, 100)?)?;
    let mut rows = Vec::new();
    for (name, share) in [("unlimited", None), ("limited", Some(&share))] {
        let times: Times = json(setup.suite(share, &["events"]))?;
        rows.push(Row::measured(
            format!("a pair of events without a kernel, {name}"),
            format!("{} ns", times.pair_ns),
        ));
        rows.extend(times.kernels.iter().map(|kernel| row(name, kernel)));
    }
    Ok(rows)
}

fn row(name: &str, kernel: &Kernel) -> Row {
    Row::checked(
        format!("a kernel of {} µs by events, {name}", kernel.kernel_us),
        kernel.by_events_ns + RESOLUTION_NS >= kernel.kernel_us * 1000,
        format!("{} ns", kernel.by_events_ns),
    )
}
