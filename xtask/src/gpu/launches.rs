//! The cost of a launch for the calling thread, and shares of kernels that a program awaits one by one.

use anyhow::Result;
use serde::Deserialize;

use super::Args;
use super::compute::{Tenants, alone};
use super::report::Row;
use super::rows::{Needed, Rows};
use super::setup::{Preload, Setup, json, limits};

/// Processes of each case, in turn. On an H200 the medians of two processes of one case differ by up to a tenth, so that a
/// few prove nothing.
fn rounds(setup: &Setup) -> usize {
    if setup.is_simulated() { 3 } else { 25 }
}

/// Most that a memory limit may add to a launch: to its mean, and to the slowest of a thousand.
const GOAL_MEAN: f64 = 1.03;
const GOAL_P999: f64 = 1.2;

/// Output of `gpu-suite latency`.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Cost {
    mean_ns: f64,
    p50_ns: f64,
    p999_ns: f64,
    first_ns: f64,
    faults: f64,
}

pub(super) fn rows(setup: &Setup, args: &Args, rows: &mut Rows<'_>) -> Result<()> {
    for (operation, title) in [
        ("launch", "a launch"),
        ("allocate-async", "an asynchronous allocation and its free"),
    ] {
        rows.run(title, || cost(setup, args.launches, operation, title))?;
    }
    let tenants = Needed::new(|| Tenants::new(setup, args.seconds));
    for kernel_us in [5, 20, 100, 1000] {
        alone(rows, &tenants, 50, kernel_us, "sync")?;
    }
    Ok(())
}

/// Cost of an operation: unhooked, hooked without limits, without a limit of GPU time, hooked with a limit that never blocks, and with the
/// other library, in turn.
fn cost(setup: &Setup, launches: usize, operation: &str, title: &str) -> Result<Vec<Row>> {
    let memory = setup.gpu()?.total_bytes / 4;
    let mut cases = vec![
        ("unhooked", None),
        ("hooked without limits", Some(setup.unlimited())),
        (MEMORY_ONLY, Some(setup.share(&limits(memory, 0)?)?)),
        (
            "GPU time limited, not blocked",
            Some(setup.share(&limits(memory, 100)?)?),
        ),
    ];
    if setup.has_peer() {
        cases.push((
            "the other library, memory limited only",
            Some(setup.preloaded(Preload::Peer, &limits(memory, 0)?)?),
        ));
    }
    let count = launches.to_string();
    let arguments = ["latency", "--operation", operation, "--launches", &count];
    let mut costs: Vec<Vec<Cost>> = cases.iter().map(|_| Vec::new()).collect();
    let rounds = rounds(setup);
    for round in 0..rounds {
        // Each case runs after each other one.
        for index in (0..cases.len()).map(|index| (index + round) % cases.len()) {
            let (Some((_, share)), Some(costs)) = (cases.get(index), costs.get_mut(index)) else {
                continue;
            };
            costs.push(json(setup.suite(share.as_ref(), &arguments))?);
        }
    }
    let native = costs.first().cloned().unwrap_or_default();
    let names = cases.iter().map(|(name, _)| *name);
    Ok(names
        .zip(&costs)
        .map(|(name, costs)| {
            let title = format!("{title}, {name} (median of {rounds} processes in turn)");
            // Times of the simulated GPU mean nothing.
            let has_goal = name == MEMORY_ONLY && operation == "launch" && !setup.is_simulated();
            row(title, costs, &native, has_goal)
        })
        .collect())
}

const MEMORY_ONLY: &str = "memory limited only";

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = values.collect();
    all.sort_unstable_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}

fn row(title: String, costs: &[Cost], native: &[Cost], has_goal: bool) -> Row {
    let of = |value: fn(&Cost) -> f64| {
        let own = median(costs.iter().map(value));
        (own, own / median(native.iter().map(value)))
    };
    let (p50, _) = of(|cost| cost.p50_ns);
    let (mean, mean_ratio) = of(|cost| cost.mean_ns);
    let (p999, p999_ratio) = of(|cost| cost.p999_ns);
    let (first, faults) = (of(|cost| cost.first_ns).0, of(|cost| cost.faults).0);
    let detail = format!(
        "p50 {p50:.0} ns, mean {mean:.0} ns ({:+.1}%), p99.9 {p999:.0} ns ({p999_ratio:.2} ×); first after a pause {first:.0} ns; {faults:.0} page faults",
        (mean_ratio - 1.0) * 100.0
    );
    match has_goal {
        true => {
            let held = mean_ratio <= GOAL_MEAN && p999_ratio <= GOAL_P999;
            Row::checked(title, held, detail)
        }
        false => Row::measured(title, detail),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::{Cost, row};

    #[test]
    fn bounds_mean_and_slow_launches() {
        let cost = |mean_ns, p999_ns| Cost {
            mean_ns,
            p50_ns: 2700.0,
            p999_ns,
            first_ns: 5000.0,
            faults: 0.0,
        };
        let held = |mean_ns, p999_ns| {
            let row = row(
                "it".to_owned(),
                &[cost(mean_ns, p999_ns)],
                &[cost(3000.0, 12_000.0)],
                true,
            );
            matches!(row.outcome, Outcome::Checked { held, .. } if held)
        };
        assert!(held(3080.0, 14_000.0));
        assert!(!held(3300.0, 14_000.0));
        assert!(!held(3080.0, 36_000.0));
    }
}
