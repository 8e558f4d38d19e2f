//! Allocations by a real control plane: with the controller, by kube-scheduler alone, and with pods that never fit.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Machine, Options as ClusterOptions, down, up};
use serde_json::Value;

use super::measurements;
use super::report::{Report, Row};

/// Name of the cluster.
const CLUSTER: &str = "throughput";
/// Limit of all measurements.
const LIMIT: Limit = Limit::total(Duration::from_secs(6 * 60 * 60));

/// Options of the bench.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Options {
    /// throughput: number of nodes with eight GPUs; a fifth of them for MIG partitions.
    #[arg(long, default_value_t = 500, value_name = "COUNT")]
    cluster_nodes: usize,
    /// throughput: number of waiting claims that the controller allocates alone.
    #[arg(long, default_value_t = 3000, value_name = "COUNT")]
    claims: usize,
    /// throughput: number of pods that are bound.
    #[arg(long, default_value_t = 2000, value_name = "COUNT")]
    bound_pods: usize,
    /// throughput: number of pods that fit on no node.
    #[arg(long, default_value_t = 3000, value_name = "COUNT")]
    rejected_pods: usize,
    /// throughput: requests per second of kube-scheduler's client. With its default of 50, it binds about 16 pods per second
    /// in both modes.
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    scheduler_qps: u32,
    /// throughput: rounds of each comparison.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    throughput_rounds: usize,
    /// throughput: program of another controller, whose allocations are measured beside.
    #[arg(long, value_name = "FILE")]
    base_controller: Option<PathBuf>,
    /// throughput: what is measured: allocation, rejection, shares, partitions; may be repeated [default: all].
    #[arg(long, value_name = "NAME")]
    measure: Vec<String>,
}

/// A table: title, explanation of its columns, names of the measurements that it has.
struct Table {
    title: &'static str,
    note: &'static str,
    measures: &'static [&'static str],
    columns: &'static [&'static str],
}

const TABLES: [Table; 3] = [
    Table {
        title: "Claims allocated per second",
        note: "The claims wait when a controller starts; kube-scheduler is stopped. seconds is the time from the first \
               allocation to the last, seen by a watch; startSeconds is that from the start of the program to the first. The \
               chart's admission policy adds the finalizer to the claims of the controller and of the bare loop of one write. A \
               bare loop writes the status of as many claims, that of two writes the finalizer before, with 64 requests in \
               flight and without any decision, beside the same watch. Processor times are those from the start of the program \
               until 5 s after the last allocation, with its lists, the catalog of its webhook and its events; creation is that \
               of the claims, without pods. A further writer is another build of the controller, without the policy.",
        measures: &["allocation"],
        columns: &[
            "round",
            "writer",
            "nodes",
            "claims",
            "seconds",
            "perSecond",
            "startSeconds",
            "controllerCpuSeconds",
            "controllerMib",
            "apiServerCpuSeconds",
            "etcdCpuSeconds",
            "cpuMsPerClaim",
            "creationCpuMsPerClaim",
            "events",
        ],
    },
    Table {
        title: "Pods that never fit",
        note: "The pods ask for more memory than a GPU has, or have a selector each that takes 46,656 steps of a macro for each \
               device and matches none. explainedSeconds is the time from the first creation until each pod has its reason \
               in a condition, or 180 s, and explained the number of pods that have one then; creation took createdSeconds. \
               reason… is the time from the first sight of such a pod to its condition, both seen by a watch. Then a pod that \
               fits is created about every 200 ms and deleted after its allocation: placed pods, time from the creation to \
               the allocation, and events per second written by the controller meanwhile. decisions… are the duration of \
               the leader's passes of decisions from the first creation to the end: each stalls its other tasks. They are \
               upper bounds of buckets of `drava_controller_decision_seconds`.",
        measures: &["rejection"],
        columns: &[
            "reason",
            "nodes",
            "pods",
            "createdSeconds",
            "explained",
            "explainedSeconds",
            "reasonP50Ms",
            "reasonP99Ms",
            "reasonMaxMs",
            "firstEventsPerSecond",
            "churnSeconds",
            "placed",
            "eventsPerSecond",
            "p50Ms",
            "p99Ms",
            "maxMs",
            "decisionsP99Ms",
            "decisionsMaxMs",
            "controllerCpuSeconds",
            "controllerMib",
        ],
    },
    Table {
        title: "Pods bound",
        note: "managed: the controller allocates, and kube-scheduler binds; pods have the gate of the admission webhook, of \
               which only the catalog runs. native: the devices have no taint, and kube-scheduler alone allocates and binds. seconds is the \
               time from the first creation to the last binding; creation took createdSeconds. schedulerQps is the limit of \
               requests per second of kube-scheduler's client, whose default is 50. Nodes with `shares` publish 16 devices, \
               and pods ask for 8 GiB of a share; nodes with `partitions` publish 216, and pods ask for a partition with at \
               least 30 GiB.",
        measures: &["shares", "partitions"],
        columns: &[
            "measure",
            "round",
            "mode",
            "schedulerQps",
            "nodes",
            "pods",
            "createdSeconds",
            "seconds",
            "perSecond",
            "schedulerCpuSeconds",
            "controllerCpuSeconds",
            "apiServerCpuSeconds",
            "etcdCpuSeconds",
            "schedulerMib",
            "controllerMib",
        ],
    },
];

/// Runs the bench.
pub(super) fn run(length: Duration, options: &Options, report: &mut Report) -> Result<()> {
    let rows = measure(length, options)?;
    for table in &TABLES {
        let rows: Vec<&Value> = rows
            .iter()
            .filter(|row| {
                let measure = row["measure"].as_str().unwrap_or_default();
                table.measures.contains(&measure)
            })
            .collect();
        if rows.is_empty() {
            continue;
        }
        report.part(table.title, table.note);
        for row in rows {
            let cell = |name: &&'static str| (*name, row[*name].clone());
            report.row(table.columns.iter().map(cell).collect::<Row>());
        }
    }
    Ok(())
}

/// Builds the programs as shipped, and returns their directory.
fn build() -> Result<PathBuf> {
    let mut cargo = drava_cluster::cargo_command();
    cargo
        .stdin(Stdio::null())
        .args(["build", "--locked", "--quiet", "--release"])
        .args(["-p", "drava-controller", "-p", "drava-throughput"]);
    ensure!(
        process::status(&mut cargo, Limit::BUILD)?.success(),
        "cannot build the controller"
    );
    Ok(drava_cluster::target_dir().join("release"))
}

fn measure(length: Duration, options: &Options) -> Result<Vec<Value>> {
    let programs = build()?;
    let mut cluster = ClusterOptions::named(CLUSTER);
    cluster.nodes = vec![Machine::None];
    cluster.scheduler_qps = options.scheduler_qps;
    down(&cluster.state)?;
    let running = up(&cluster)?;
    // The controller leads only where its own objects are served.
    let definitions = drava_cluster::workspace_root().join("deploy/helm/drava/files/crds");
    let mut apply = running.kubectl();
    apply
        .args(["apply", "--server-side", "-f"])
        .arg(&definitions)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    ensure!(
        process::status(&mut apply, Limit::REQUEST)?.success(),
        "cannot apply {}",
        definitions.display()
    );
    let mut bench = Command::new(programs.join("drava-throughput"));
    bench
        .stdin(Stdio::null())
        .arg("--state")
        .arg(&cluster.state)
        .arg("--controller")
        .arg(programs.join("drava-controller"))
        .args(["--nodes", &options.cluster_nodes.to_string()])
        .args(["--claims", &options.claims.to_string()])
        .args(["--pods", &options.bound_pods.to_string()])
        .args(["--rejected", &options.rejected_pods.to_string()])
        .args(["--rounds", &options.throughput_rounds.to_string()])
        .args(["--seconds", &format!("{:.0}", length.as_secs_f64())]);
    if let Some(base) = &options.base_controller {
        bench.arg("--base-controller").arg(base);
    }
    let all = ["allocation", "rejection", "shares", "partitions"].map(str::to_owned);
    let measures = match options.measure.as_slice() {
        [] => &all,
        measures => measures,
    };
    for measure in measures {
        bench.args(["--measure", measure]);
    }
    let output = process::output(&mut bench, LIMIT);
    let removed = down(&cluster.state);
    let output = output?;
    ensure!(
        output.status.success(),
        "the measurements failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    removed?;
    let text = String::from_utf8(output.stdout)?;
    let mut rows = measurements::rows(&text)?;
    for row in &mut rows {
        row["schedulerQps"] = options.scheduler_qps.into();
    }
    Ok(rows)
}
