//! Cost of the start of a limited process: loading the library, finding the limits, taking a slot in the usage region.

use anyhow::Result;

use super::Args;
use super::measurements::{Suite, measure, named, value};
use super::report::Report;

/// Runs the bench.
pub(crate) fn run(_args: &Args, report: &mut Report) -> Result<()> {
    let measurements = measure(Suite::Limits, "measurements::starts_process", &[])?;
    report.part(
        "Start",
        "Lifetime in milliseconds of a process that loads libcuda, initializes it and ends, with and without libvgpu in \
         turn; medians, and the median of the differences of pairs.",
    );
    for row in named(&measurements, "start") {
        report.row(
            ["runs", "limitedMs", "unlimitedMs", "differenceMs"]
                .map(|name| (name, value(row, name)))
                .into(),
        );
    }
    Ok(())
}
