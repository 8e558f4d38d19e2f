//! Shares of GPU time under the node agent, which is a process of its own: `dra-driver/benches/agent`.

use anyhow::Result;

use super::Args;
use super::measurements::{measure_agent, named, value};
use super::report::Report;

/// A table of the page.
struct Table {
    /// Name of its rows.
    figure: &'static str,
    /// Measurements that report its rows.
    measurements: &'static [&'static str],
    title: &'static str,
    note: &'static str,
    columns: &'static [&'static str],
}

const TABLES: [Table; 4] = [
    Table {
        figure: "two",
        measurements: &["two", "copies"],
        title: "With the node agent",
        note: "Both tenants demand the whole GPU, and the agent sets their rates. The error is the larger deviation from its part of what both got: \
               without limits, both get 91%, because nothing runs while the GPU switches between contexts. \"hami\": HAMi-core's algorithm, which has one policy and meters kernels only, with the same loads and the same times.",
        columns: &[
            "policy",
            "load",
            "share",
            "got",
            "error_points",
            "sum",
            "hami_got",
            "hami_error_points",
        ],
    },
    Table {
        figure: "bursts",
        measurements: &["bursts"],
        title: "Bursts with the node agent",
        note: "One tenant works for 50 ms of GPU time, with kernels of 1 ms, and pauses for 200 ms; the other always demands the whole GPU. \"due\" is what \
               the first tenant would receive if its share were a GPU of its own; the error is the deficit.",
        columns: &["policy", "share", "due", "got", "error_points", "sum"],
    },
    Table {
        figure: "giving back",
        measurements: &["reclaim"],
        title: "Reclaiming lent time",
        note: "A share of 70% is idle, its time is lent to another share, and it resumes. Milliseconds until the borrower is throttled (\"told\"), and the \
               owner's deficit in its first 500 ms (\"lacks\"), relative to its part of what both got. \"idle\" is the time in which the GPU was idle or \
               switched between contexts, \"waited\" how long the owner's launches waited because of debt.",
        columns: &["told_ms", "lacks_ms", "idle_ms", "waited_ms"],
    },
    Table {
        figure: "latency",
        measurements: &["latency"],
        title: "Priority",
        note: "A tenant with 50% and priority 100 makes requests of one kernel, or of several kernels that it awaits one by one, each followed by a pause of four \
               times its length. In turn: 50 requests alone, 50 while a best-effort tenant keeps another GPU busy with short kernels (\"elsewhere\": the \
               host's part of the interference), 50 while such a tenant keeps the same GPU busy (\"beside\"). Milliseconds of a request, and percent of GPU \
               time that the best-effort tenant received, and that it receives alone. \"Behind one kernel\": the duration of the requests alone if each \
               arrived at a random moment and waited for the running kernel, at the same utilization; no scheduler that cannot interrupt kernels is faster.",
        columns: &[
            "policy",
            "kernels",
            "kernel_ms",
            "best_effort_kernel_ms",
            "requests",
            "p50_ms",
            "p50_elsewhere_ms",
            "p50_beside_ms",
            "p90_ms",
            "p90_elsewhere_ms",
            "p90_beside_ms",
            "p99_ms",
            "p99_elsewhere_ms",
            "p99_beside_ms",
            "p99_more_percent",
            "p99_more_than_elsewhere_percent",
            "p99_behind_one_kernel_ms",
            "p99_behind_one_kernel_percent",
            "best_effort_got",
            "best_effort_solo",
        ],
    },
];

/// Runs the bench.
pub(super) fn run(args: &Args, report: &mut Report) -> Result<()> {
    for table in &TABLES {
        let mut measurements = table.measurements.to_vec();
        measurements.retain(|measurement| args.includes(measurement));
        if measurements.is_empty() {
            continue;
        }
        report.part(table.title, table.note);
        let rows = measure_agent(&measurements, args.seconds(10.0), !args.without_baseline)?;
        for row in named(&rows, table.figure) {
            let cells = table.columns.iter().map(|name| (*name, value(row, name)));
            report.row(cells.collect());
        }
    }
    Ok(())
}
