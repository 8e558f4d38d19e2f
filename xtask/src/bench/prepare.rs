//! Latency of prepare, and footprint of the process with node driver, node agent and exporter.

use anyhow::Result;

use super::measurements::{Suite, measure, named, value};
use super::report::Report;

/// Runs the bench.
pub(crate) fn run(report: &mut Report) -> Result<()> {
    let measurements = measure(Suite::Driver, "measurements::", &[])?;
    report.part(
        "Latency",
        "NodePrepareResources of claims with one share, each with a call of its own over kubelet's socket: one claim at a \
         time, and 64 claims at once. The API server is in memory. Files and mounts are real, with one fsync per claim. \
         Meanwhile each NVML call about one of the eight GPUs takes 10 s; the claims are on the others. Fake kubelet, API \
         server and driver share the processors.",
    );
    for row in named(&measurements, "prepare") {
        let columns = ["claims", "hangingGpus", "calls", "p50Ms", "p99Ms", "maxMs"];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
    footprint(report, &measurements);
    Ok(())
}

/// Reports memory, CPU time and size of the metrics.
fn footprint(report: &mut Report, measurements: &[serde_json::Value]) {
    report.part(
        "Footprint",
        "The process with node driver, node agent and exporter without claims and with prepared claims whose containers run \
         no program: resident memory, of which anonymous; CPU time over 60 s in percent of one core, with the threads of the \
         simulated NVML; size of a scrape of /metrics.",
    );
    for row in named(measurements, "footprint") {
        let columns = [
            "gpus",
            "claims",
            "rssMiB",
            "anonymousMiB",
            "percentOfACore",
            "scrapeKiB",
        ];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
}
