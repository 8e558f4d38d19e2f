//! Packing quality and speed of the placement policies, on traces of real clusters; placement of MIG partitions under churn.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, ensure};
use drava_cluster::Profile;
use drava_cluster::process::{self, Limit};
use serde_json::{Value, json};

use super::measurements::{self, value};
use super::report::{Report, median_and_spread};

/// Traces in `tests/packing/openb`.
const TRACES: [&str; 5] = [
    "default",
    "cpu250",
    "gpushare100",
    "gpuspec33",
    "multigpu50",
];

/// Policies for nodes and for GPUs.
pub(super) const POLICIES: [&str; 3] = ["binpack", "spread", "leastFragmentation"];

/// Limit of all runs.
const LIMIT: Limit = Limit::total(Duration::from_secs(6 * 60 * 60));

/// Options of the bench.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Options {
    /// packing: nodes, a CSV file in the format of openb [default: the GPU nodes of openb].
    #[arg(long, value_name = "FILE")]
    nodes: Option<PathBuf>,
    /// packing: pods, a CSV file in the format of openb; may be repeated [default: five variants of openb].
    #[arg(long, value_name = "FILE")]
    pods: Vec<PathBuf>,
    /// packing: policy for nodes and for GPUs; may be repeated [default: all].
    #[arg(long, value_name = "NAME")]
    policy: Vec<String>,
    /// packing: number of orders of arrival.
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    seeds: u64,
}

/// Runs the bench.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    report_packing(options, report)?;
    report_partitions(report)
}

/// Adds the accepted requests for MIG partitions.
fn report_partitions(report: &mut Report) -> Result<()> {
    let rows = rows(&["--mig".into()])?;
    report.part(
        "MIG churn",
        "Requests for partitions arrive at an A100 40GB in MIG mode and end; a request that fits nowhere is dropped, and no \
         partition moves. Computed from the stationary distribution of the 723 layouts, for Poisson arrivals and exponential \
         lifetimes. loadPercent is the requested part of the memory slices. firstFit selects the first memory slice, \
         published the order of the ResourceSlice, count is the controller, expectedLoss weights the partitions that still \
         fit with the mix of requests, and optimum solves the decision process. gainPercent is relative to firstFit.",
    );
    for row in &rows {
        let is_base = |other: &&Value| {
            let same = |name: &str| value(row, name) == value(other, name);
            same("mix") && same("load_percent") && value(other, "selection") == "firstFit"
        };
        let accepted = |row: &Value| value(row, "accepted_percent").as_f64().unwrap_or_default();
        let base = rows.iter().find(is_base).map_or(0.0, accepted);
        report.row(vec![
            ("mix", value(row, "mix")),
            ("loadPercent", value(row, "load_percent")),
            ("selection", value(row, "selection")),
            ("acceptedPercent", value(row, "accepted_percent")),
            ("gainPercent", json!((accepted(row) / base - 1.0) * 100.0)),
        ]);
    }
    Ok(())
}

fn report_packing(options: &Options, report: &mut Report) -> Result<()> {
    let rows = measure(options)?;
    report.part(
        "Packing",
        "Pods of a trace arrive in random order until they have requested 130% of all GPUs; a pod that fits on no node is \
         dropped, and no pod ends, moves or is tried again (the experiment of Weng et al., USENIX ATC 2023). \
         allocatedPercent is the allocated part of all GPUs, the median of the orders of arrival with the distance between \
         the quartiles. The policy applies to nodes and to GPUs. The allocator of the controller decides, on one thread; \
         meanUs is the mean time per pod with the objects built, and p99Us is that of decisions alone, those for pods that \
         are dropped included.",
    );
    let key = |row: &Value| {
        ["trace", "policy", "arrived_percent"].map(|name| value(row, name).to_string())
    };
    let mut keys: Vec<_> = rows.iter().map(key).collect();
    keys.dedup();
    keys.sort();
    keys.dedup();
    for wanted in keys {
        let runs: Vec<&Value> = rows.iter().filter(|row| key(row) == wanted).collect();
        let median = |name: &str| {
            let values = runs.iter().filter_map(|row| value(row, name).as_f64());
            median_and_spread(values.collect())
        };
        let Some(first) = runs.first() else {
            continue;
        };
        let (allocated, spread) = median("allocated_percent");
        let (seconds, _) = median("seconds");
        let (decisions, _) = median("decisions");
        report.row(vec![
            ("trace", value(first, "trace")),
            ("policy", value(first, "policy")),
            ("arrivedPercent", value(first, "arrived_percent")),
            ("seeds", json!(runs.len())),
            ("allocatedPercent", json!(allocated)),
            ("spread", json!(spread)),
            ("dropped", json!(median("dropped").0)),
            ("meanUs", json!(seconds * 1e6 / decisions)),
            ("p99Us", json!(median("p99_us").0)),
        ]);
    }
    Ok(())
}

fn measure(options: &Options) -> Result<Vec<Value>> {
    let workspace = drava_cluster::workspace_root();
    let data = workspace.join("tests/packing/openb");
    let nodes = options.nodes.clone();
    let nodes = nodes.unwrap_or_else(|| data.join("openb_node_list_gpu_node.csv.gz"));
    let pods = match options.pods.as_slice() {
        [] => TRACES
            .map(|trace| data.join(format!("openb_pod_list_{trace}.csv.gz")))
            .to_vec(),
        pods => pods.to_vec(),
    };
    let policies = match options.policy.as_slice() {
        [] => POLICIES.map(str::to_owned).to_vec(),
        policies => policies.to_vec(),
    };
    let mut arguments = vec!["--nodes".into(), nodes.into_os_string()];
    arguments.extend(["--seeds".into(), options.seeds.to_string().into()]);
    for file in pods {
        arguments.extend(["--pods".into(), file.into_os_string()]);
    }
    for policy in policies {
        arguments.extend(["--policy".into(), policy.into()]);
    }
    rows(&arguments)
}

/// Returns the rows that the release build of the experiments prints.
pub(super) fn rows(arguments: &[OsString]) -> Result<Vec<Value>> {
    rows_of(Profile::Release, arguments)
}

/// Returns the rows that a build of the experiments prints.
pub(super) fn rows_of(profile: Profile, arguments: &[OsString]) -> Result<Vec<Value>> {
    let mut cargo = drava_cluster::cargo_command();
    cargo
        .stdin(Stdio::null())
        .args(["run", "--locked", "--quiet", "--profile", profile.name()])
        .args(["-p", "drava-packing", "--"])
        .args(arguments);
    let output = process::output(&mut cargo, LIMIT)?;
    ensure!(
        output.status.success(),
        "the runs failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout)?;
    measurements::rows(&text)
}
