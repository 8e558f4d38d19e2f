//! What a run prints at its end.

use super::libtest::{Count, Outcome};
use super::{Report, Stage};

/// Prints failures, skipped tests and times, and returns the sum of all outcomes.
pub(super) fn print(reports: &[Report]) -> Outcome {
    let mut total = Outcome::default();
    for report in reports {
        total += report.outcome.clone();
    }
    total.skips.sort();
    if !total.skips.is_empty() {
        eprintln!("skipped:");
    }
    for skip in &total.skips {
        eprintln!("    {skip}");
    }
    eprintln!("times:");
    for report in reports {
        eprintln!(
            "    {:12} {:4.0} s, from {:4.0} s",
            report.name, report.seconds, report.started_s
        );
    }
    for failure in &total.failures {
        eprintln!("---- {} ----", failure.test);
        for line in failure.story() {
            eprintln!("    {line}");
        }
    }
    if !total.failures.is_empty() {
        eprintln!("failed:");
    }
    for report in reports {
        for failure in &report.outcome.failures {
            eprintln!("    {} ({}: {})", failure.test, report.name, report.log);
            if let Some(cause) = failure.cause() {
                eprintln!("        {cause}");
            }
        }
    }
    for stage in Stage::ALL {
        let mut parts = reports
            .iter()
            .filter(|report| report.stage == stage)
            .peekable();
        if parts.peek().is_some() {
            let mut count = Count::default();
            parts.for_each(|report| count += report.outcome.count);
            eprintln!("{:10} {count}", stage.name());
        }
    }
    total
}
