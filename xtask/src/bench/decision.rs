//! Cost of a decision of the controller in large clusters.

use anyhow::Result;

use super::measurements::value;
use super::packing::{POLICIES, rows};
use super::report::Report;

/// Numbers of nodes: that of openb, and a large cluster with 80,000 GPUs.
const NODES: [&str; 2] = ["1213", "10000"];

/// Runs the bench.
pub(super) fn run(report: &mut Report) -> Result<()> {
    let mut arguments = Vec::new();
    for nodes in NODES {
        arguments.extend(["--scale".into(), nodes.into()]);
    }
    for policy in POLICIES {
        arguments.extend(["--policy".into(), policy.into()]);
    }
    let rows = rows(&arguments)?;
    report.part(
        "Decisions",
        "Half of the GPUs of equal nodes with 8 GPUs (16 devices) each are allocated. Pods of six kinds, from a tenth of a GPU \
         to four GPUs, arrive in random order; after each a random pod ends. The time is that of the decision alone, on one \
         thread. checks are the nodes that a decision checks, on average. residentMib is the memory of the process, with \
         the state of the cluster.",
    );
    for row in &rows {
        let columns = [
            ("nodes", "nodes"),
            ("policy", "policy"),
            ("decisions", "decisions"),
            ("p50Us", "p50_us"),
            ("p99Us", "p99_us"),
            ("maxUs", "max_us"),
            ("checks", "checks"),
            ("residentMib", "resident_mib"),
        ];
        let cells = columns.map(|(column, name)| (column, value(row, name)));
        report.row(cells.into());
    }
    Ok(())
}
