//! What a limited process's start costs: loading the library, finding the limits, taking a slot in the usage region.

use anyhow::Result;

use super::Args;
use super::figures::{Suite, measure, named, value};
use super::report::Report;

/// Runs the bench.
pub(crate) fn run(_args: &Args, report: &mut Report) -> Result<()> {
    let figures = measure(Suite::Limits, "figures::a_process_starts", &[])?;
    report.part(
        "Start",
        "Milliseconds in the life of a process that loads libcuda, initialises it and ends, with and without libvgpu \
         in turn; medians, and the median of the differences of pairs.",
    );
    for figure in named(&figures, "start") {
        report.row(
            ["runs", "limitedMs", "unlimitedMs", "differenceMs"]
                .map(|name| (name, value(figure, name)))
                .into(),
        );
    }
    Ok(())
}
