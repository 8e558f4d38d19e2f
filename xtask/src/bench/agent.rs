//! Cost of the node agent on its node.

use anyhow::Result;

use super::Args;
use super::measurements::{measure_agent, named, value};
use super::report::Report;

/// Runs the bench.
pub(crate) fn run(args: &Args, report: &mut Report) -> Result<()> {
    let length = args.seconds(30.0);
    let measurements = measure_agent(&["cost"], length, false)?;
    report.part(
        "Cost",
        format!(
            "CPU time of an agent process over {} s, in percent of one core, and its reading system calls per second: with \
             claims without processes, and with claims with one process each, which keeps its GPU busy with kernels of 20 ms. \
             CPU time is the sum over the threads of the process, including the threads of the simulated NVML.",
            length.as_secs_f64()
        ),
    );
    for row in named(&measurements, "agent") {
        report.row(
            ["gpus", "claims", "busy", "percentOfACore", "readsPerSecond"]
                .map(|name| (name, value(row, name)))
                .into(),
        );
    }
    Ok(())
}
