//! The controller's planner in clusters of growing size.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, ensure};
use drava_cluster::process::{self, Limit};
use serde_json::{Value, json};

use super::measurements;
use super::report::Report;

/// Limit of one run.
const LIMIT: Limit = Limit::total(Duration::from_secs(60 * 60));

/// Options of the bench.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Options {
    /// scale: numbers of nodes with eight GPUs each.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1000,4000",
        value_name = "COUNT"
    )]
    scale_nodes: Vec<usize>,
}

/// A table: the point of `drava-planning scale` and its columns with their goals at 15,000 nodes.
struct Table {
    point: &'static str,
    title: &'static str,
    note: &'static str,
    columns: &'static [(&'static str, &'static str)],
}

/// Columns of shares with their goals.
const SHARES: [(&str, &str); 10] = [
    ("residentMib", "1024"),
    ("plainFirstMs", "–"),
    ("plainP50Ms", "–"),
    ("plainP99Ms", "1"),
    ("quotaP99Ms", "1"),
    ("requestsFirstMs", "–"),
    ("requestsP99Ms", "1"),
    ("antiAffinityP99Ms", "1"),
    ("longestPassMs", "100"),
    ("longestBatchMs", "100"),
];

const TABLES: [Table; 5] = [
    Table {
        point: "shares",
        title: "Shares",
        note: "16 devices on each node, up to 100,000 claims with shares, policies binpack. The times are those of decisions for pods that come \
               one after the other: plain, with a GpuQuota, with 200 kinds of requests in turn, and beside pods with required \
               anti-affinity. The first decision for a kind of request is apart: plainFirstMs, and requestsFirstMs for the longest of 200. \
               longestPassMs and longestBatchMs are those of the leader while the slices of all nodes change and \
               10,000 pods wait.",
        columns: &SHARES,
    },
    Table {
        point: "least-fragmentation",
        title: "Shares, policy leastFragmentation",
        note: "As before. With this policy the score of a node is known only when its devices are evaluated, so the first \
               decision for a kind of request is the work of all nodes.",
        columns: &SHARES,
    },
    Table {
        point: "partitions",
        title: "Partitions",
        note: "216 devices on each node, claims with MIG partitions.",
        columns: &[
            ("residentMib", "3072"),
            ("plainFirstMs", "–"),
            ("plainP50Ms", "–"),
            ("plainP99Ms", "1"),
        ],
    },
    Table {
        point: "full",
        title: "Evictions",
        note: "Every GPU is allocated to a claim of its own; a pod evicts one or eight others. The first search for a number of GPUs \
               is apart, as after a start of the controller: what victims cost is not known then.",
        columns: &[
            ("residentMib", "–"),
            ("oneGpuFirstMs", "–"),
            ("oneGpuMs", "30"),
            ("oneGpuLongestPassMs", "100"),
            ("eightGpusFirstMs", "–"),
            ("eightGpusMs", "300"),
            ("eightGpusLongestPassMs", "100"),
        ],
    },
    Table {
        point: "explanation",
        title: "Explanation",
        note: "The explanation of a pod that would have to evict others, without the reading of the cluster.",
        columns: &[("explanationMs", "1000")],
    },
];

/// Runs the bench.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    for table in TABLES {
        report.part(
            table.title,
            format!(
                "{} Times are those of the processor, memory is that of the process with the state of the cluster. The first \
                 row has the goals at 15,000 nodes.",
                table.note
            ),
        );
        let mut goals = vec![("nodes", json!("goal")), ("claims", json!("–"))];
        goals.extend(
            table
                .columns
                .iter()
                .map(|(name, goal)| (*name, json!(goal))),
        );
        report.row(goals);
        for nodes in &options.scale_nodes {
            eprintln!("{}, {nodes} nodes", table.point);
            let measured = measure(table.point, *nodes)?;
            let names = ["nodes", "claims"].into_iter();
            let names = names.chain(table.columns.iter().map(|(name, _)| *name));
            report.row(names.map(|name| (name, measured[name].clone())).collect());
        }
    }
    Ok(())
}

fn measure(point: &str, nodes: usize) -> Result<Value> {
    let mut cargo = drava_cluster::cargo_command();
    cargo
        .stdin(Stdio::null())
        .args([
            "run",
            "--locked",
            "--quiet",
            "--release",
            "-p",
            "drava-planning",
            "--",
        ])
        .args(["scale", point, &nodes.to_string()]);
    let output = process::output(&mut cargo, LIMIT)?;
    ensure!(
        output.status.success(),
        "{point} with {nodes} nodes failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let rows = measurements::rows(&String::from_utf8(output.stdout)?)?;
    let row = rows.into_iter().next();
    row.ok_or_else(|| anyhow::anyhow!("{point} with {nodes} nodes printed nothing"))
}
