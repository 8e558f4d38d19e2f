//! Short kernels by events, against the GPU's clock.

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::report::Row;
use super::rows::Rows;
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

/// Resolution of events, half a microsecond, and of the clock by which kernels end, one.
const RESOLUTION_NS: u64 = 1_500;

/// Pairs of events by which libvgpu's own, one on each side of a launch, may lengthen the time between those of a program.
const OWN_PAIRS: u64 = 2;

/// Rows without a limit and under one, whose own events must change little of what a program measures.
pub(super) fn rows(setup: &Setup, rows: &mut Rows<'_>) -> Result<()> {
    rows.run_any(&["a pair of events", "a kernel of"], || measure(setup))
}

fn measure(setup: &Setup) -> Result<Vec<Row>> {
    let share = setup.share(&limits(setup.gpu()?.total_bytes / 4, 100)?)?;
    let free: Times = json(setup.suite(None, &["events"]))?;
    let limited: Times = json(setup.suite(Some(&share), &["events"]))?;
    let mut rows = Vec::new();
    for (name, times) in [("unlimited", &free), ("limited", &limited)] {
        rows.push(Row::measured(
            format!("a pair of events without a kernel, {name}"),
            format!("{} ns", times.pair_ns),
        ));
        let empty = times.kernels.iter().find(|kernel| kernel.kernel_us == 0);
        let empty = empty.context("no kernel of 0 µs")?;
        let kernels = times.kernels.iter().filter(|kernel| kernel.kernel_us > 0);
        rows.extend(kernels.map(|kernel| by_clock(name, kernel, empty)));
    }
    let kernels = free.kernels.iter().zip(&limited.kernels);
    rows.extend(kernels.map(|(free_kernel, kernel)| by_limit(free_kernel, kernel, free.pair_ns)));
    Ok(rows)
}

/// A kernel is longer than an empty one by its duration by the GPU's clock.
fn by_clock(name: &str, kernel: &Kernel, empty: &Kernel) -> Row {
    let longer_ns = kernel.by_events_ns.saturating_sub(empty.by_events_ns);
    Row::checked(
        format!("a kernel of {} µs by events, {name}", kernel.kernel_us),
        longer_ns.abs_diff(kernel.kernel_us * 1000) <= RESOLUTION_NS,
        format!(
            "{} ns, {longer_ns} ns more than an empty kernel",
            kernel.by_events_ns
        ),
    )
}

/// A limited kernel is as long as an unlimited one, but for libvgpu's events.
fn by_limit(free: &Kernel, limited: &Kernel, pair_ns: u64) -> Row {
    let (free_ns, limited_ns) = (free.by_events_ns, limited.by_events_ns);
    let longest_ns = free_ns + OWN_PAIRS * pair_ns + RESOLUTION_NS;
    Row::checked(
        format!(
            "a kernel of {} µs by events, limited against unlimited",
            free.kernel_us
        ),
        limited_ns + RESOLUTION_NS >= free_ns && limited_ns <= longest_ns,
        format!("{limited_ns} ns against {free_ns} ns, at most {longest_ns} ns"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::report::{Outcome, Row};
    use super::{Kernel, by_clock, by_limit};

    const fn kernel(kernel_us: u64, by_events_ns: u64) -> Kernel {
        Kernel {
            kernel_us,
            by_events_ns,
        }
    }

    fn holds(row: &Row) -> bool {
        matches!(row.outcome, Outcome::Checked { held: true, .. })
    }

    /// The values of an H200.
    #[test]
    fn bounds_kernels_in_both_directions() {
        let empty = kernel(0, 2_680);
        assert!(holds(&by_clock("limited", &kernel(20, 22_719), &empty)));
        assert!(!holds(&by_clock("limited", &kernel(20, 18_000), &empty)));
        assert!(!holds(&by_clock("limited", &kernel(20, 27_000), &empty)));
        let free = kernel(1, 3_680);
        assert!(holds(&by_limit(&free, &kernel(1, 6_271), 1_279)));
        assert!(!holds(&by_limit(&free, &kernel(1, 9_000), 1_279)));
        assert!(!holds(&by_limit(&free, &kernel(1, 1_000), 1_279)));
    }
}
