//! Memory limits: whether they hold under random operations and crashes, the cost of a denial, and the reachable part of
//! a limit.

use anyhow::Result;

use super::Args;
use super::measurements::{Suite, measure, named, value};
use super::report::Report;

const OPERATIONS: u64 = 1_000_000;

/// Runs the bench.
pub(crate) fn run(args: &Args, report: &mut Report) -> Result<()> {
    if args.includes("stress") {
        let operations = ("DRAVA_STRESS_OPERATIONS", OPERATIONS.to_string());
        let measurements = measure(Suite::Limits, "stress::", &[operations])?;
        report.part(
            "Stress",
            "Eight processes of one share allocate on every path, fork, create contexts and graphs, and are killed after \
             random steps of the accounting. After each round, with all processes stopped, the share's account includes \
             every byte of the GPU's ledger and is within the limit; after each fourth round, with all memory freed, \
             both are equal; at the end all memory is reclaimed. The overshoot is the maximum that living processes held \
             beyond the limit by the ledger's high-water mark; in exact rounds no process with memory was killed. The \
             row \"pools\" has requests to pools only, by two threads of each process, and \"others\" all other kinds.",
        );
        for row in named(&measurements, "stress") {
            report.row(
                [
                    "kinds",
                    "seed",
                    "operations",
                    "granted",
                    "refused",
                    "deaths",
                    "limitBytes",
                    "highestBytes",
                    "exactRounds",
                    "worstOvershootBytes",
                    "seconds",
                ]
                .map(|name| (name, value(row, name)))
                .into(),
            );
        }
    }
    if !args.includes("measurements") {
        return Ok(());
    }
    let measurements = measure(Suite::Limits, "measurements::", &[])?;
    report.part(
        "Denials",
        "Nanoseconds of a denied cuMemAlloc by size, including the driver's cuCtxGetDevice, and by number of processes in \
         the share. The slowest denials check for dead processes.",
    );
    for row in named(&measurements, "refusal") {
        report.row(
            ["bytes", "processes", "p50Ns", "meanNs", "p999Ns"]
                .map(|name| (name, value(row, name)))
                .into(),
        );
    }
    report.part(
        "Reachable",
        "Fraction of a limit of 8 GiB, less one context, that a process gets when it allocates in steps of this size, then \
         in the smallest blocks, until a request is denied; by the GPU's ledger.",
    );
    for row in named(&measurements, "reachable") {
        report.row(
            ["stepBytes", "fraction"]
                .map(|name| (name, value(row, name)))
                .into(),
        );
    }
    report.part(
        "Driver-internal memory",
        "Overshoot of a full share of 8 GiB with the node agent and the estimate for that GPU, by the ledger's high-water mark: \
         three processes extend heap and stacks and use some kernels before one of them fills the share; then each loads eight \
         modules.",
    );
    let growth = measure(Suite::Agent, "reserve::driver_growth::", &[])?;
    for row in named(&growth, "driverOvershoot") {
        report.row(
            ["machine", "contexts", "estimateBytes", "overshootBytes"]
                .map(|name| (name, value(row, name)))
                .into(),
        );
    }
    report.part(
        "Driver-internal memory, corrected",
        "In a share of 4 GiB whose estimate is too low by that much for each context. The agent reads in NVML what the contexts \
         take beyond the estimate before the share is full, so there is no overshoot. Then modules are loaded in the full \
         share, and the driver takes more memory. The values are the time from there until the share's requests are denied, \
         and the overshoot in that time. Every request is denied until that much memory is freed.",
    );
    let corrected = measure(Suite::Agent, "reserve::denies_memory_until", &[])?;
    for row in named(&corrected, "driverGrowth") {
        report.row(
            [
                "contexts",
                "estimateErrorBytes",
                "grownBytes",
                "overshootBytes",
                "secondsUntilDenied",
            ]
            .map(|name| (name, value(row, name)))
            .into(),
        );
    }
    Ok(())
}
