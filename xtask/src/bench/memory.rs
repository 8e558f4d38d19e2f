//! The memory side: whether limits hold under a million random operations and deaths, what a refusal costs, and how
//! much of a limit can be reached.

use anyhow::Result;

use super::Args;
use super::figures::{Suite, measure, named, value};
use super::report::Report;

const OPERATIONS: u64 = 1_000_000;

/// Runs the bench.
pub(crate) fn run(args: &Args, report: &mut Report) -> Result<()> {
    if args.includes("stress") {
        let operations = ("DRAVA_STRESS_OPERATIONS", OPERATIONS.to_string());
        let figures = measure(Suite::Limits, "stress::", &[operations])?;
        report.part(
            "Stress",
            "Eight processes of one share allocate in every way there is, fork, make contexts and graphs, and die by \
             SIGKILL after random steps of the accounting. After each round, with nobody at work, no byte of the \
             card's ledger is missing in the account and the account is within the limit; after each fourth, with \
             everything freed, they are equal; at the end all memory is back. The overshoot is the most that living \
             processes held beyond the limit in samples while all were at work. The second row is a run of requests \
             to pools alone, by two threads of each process.",
        );
        for figure in named(&figures, "stress") {
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
                    "samples",
                    "worstOvershootBytes",
                    "seconds",
                ]
                .map(|name| (name, value(figure, name)))
                .into(),
            );
        }
    }
    if !args.includes("figures") {
        return Ok(());
    }
    let figures = measure(Suite::Limits, "measurements::", &[])?;
    report.part(
        "Refusals",
        "Nanoseconds that a refused cuMemAlloc of so many bytes takes, the driver's cuCtxGetDevice included, with so \
         many processes in the share. The slowest ones look for dead processes.",
    );
    for figure in named(&figures, "refusal") {
        report.row(
            ["bytes", "processes", "p50Ns", "meanNs", "p999Ns"]
                .map(|name| (name, value(figure, name)))
                .into(),
        );
    }
    report.part(
        "Reachable",
        "What part of a limit of 8 GiB less one context a process gets when it allocates in such steps, then in the \
         smallest blocks, until it is refused; by the card's ledger.",
    );
    for figure in named(&figures, "reachable") {
        report.row(
            ["stepBytes", "fraction"]
                .map(|name| (name, value(figure, name)))
                .into(),
        );
    }
    report.part(
        "Driver-internal memory",
        "How far a full share of 8 GiB is beyond its limit when each context takes that much more than it was \
         charged ahead.",
    );
    for figure in named(&figures, "driverOvershoot") {
        report.row(
            ["contexts", "estimateErrorBytes", "overshootBytes"]
                .map(|name| (name, value(figure, name)))
                .into(),
        );
    }
    report.part(
        "Driver-internal memory, corrected",
        "The same with the node agent, in a share of 4 GiB. It sees in NVML what the contexts take beyond the estimate \
         before the share is full, so that is no overshoot; then the driver takes more in the full share, by modules \
         that are loaded. From there, how long it takes until the share's requests are refused, and how far it is beyond \
         its limit meanwhile; it is refused everything until so much is freed.",
    );
    let corrected = measure(Suite::Agent, "reserve::what_the_driver", &[])?;
    for figure in named(&corrected, "driverGrowth") {
        report.row(
            [
                "contexts",
                "estimateErrorBytes",
                "grownBytes",
                "overshootBytes",
                "secondsUntilDenied",
            ]
            .map(|name| (name, value(figure, name)))
            .into(),
        );
    }
    Ok(())
}
