//! What the node agent costs its node.

use anyhow::Result;

use super::Args;
use super::figures::{Suite, measure, named, value};
use super::report::Report;

/// Runs the bench.
pub(crate) fn run(_args: &Args, report: &mut Report) -> Result<()> {
    let figures = measure(Suite::Agent, "measurements::", &[])?;
    report.part(
        "Cost",
        "CPU time of an agent process over 30 seconds, in percent of one core, and its system calls that read, per \
         second: with claims that have no processes, and with claims that each have one that keeps its card busy with \
         kernels of 20 ms. Half a minute's CPU time is the sum over its threads, those that talk to the simulated NVML \
         included.",
    );
    for figure in named(&figures, "agent") {
        report.row(
            [
                "cards",
                "claims",
                "busy",
                "percentOfACore",
                "readsPerSecond",
            ]
            .map(|name| (name, value(figure, name)))
            .into(),
        );
    }
    Ok(())
}
