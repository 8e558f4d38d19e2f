//! `cargo xtask demo`: two pods share one simulated GPU on a real Kubernetes.
//!
//! Builds drava and Kubernetes, starts the cluster, installs drava with its chart, runs `deploy/examples/quickstart` and then
//! `deploy/examples/quickstart-priority`, and prints what users of a cluster see. The cluster stays up.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use drava_cluster::prerequisite::{self, Prerequisite};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Cluster, Kubernetes, Options, Progress, workspace_root};
use serde_json::Value;

use crate::deploy;

/// Command line of `cargo xtask demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Stop the cluster of the demo and remove all its files.
    #[arg(long)]
    down: bool,
    /// Kubernetes minor version: 1.37 or 1.36.
    #[arg(long, default_value_t)]
    kubernetes: Kubernetes,
    /// Description of the simulated machine [default: two H100].
    #[arg(long, value_name = "FILE")]
    machine: Option<std::path::PathBuf>,
    /// Turn the PodGroup API of Kubernetes on (1.37).
    #[arg(long)]
    pod_groups: bool,
}

const CLUSTER: &str = "demo";
const PODS: [&str; 2] = ["inference", "training"];

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.down {
        let state = Options::named(CLUSTER).state;
        let found = drava_cluster::down(&state)?;
        println!("{}", if found { "demo removed" } else { "no demo" });
        return Ok(());
    }
    let started = Instant::now();
    // Before the minutes of building.
    prerequisite::check(&Prerequisite::CLUSTER)?;
    let machine = deploy::machine(args.machine.as_deref());
    let artifacts = deploy::build()?;
    let options = Options {
        kubernetes: args.kubernetes,
        nodes: vec![machine],
        pod_groups: args.pod_groups,
        ..Options::named(CLUSTER)
    };
    let cluster = deploy::start(options, &artifacts)?;
    let step = Progress::step("Run the quickstart pods");
    let manifest = workspace_root().join("deploy/examples/quickstart/quickstart.yaml");
    quiet(cluster.kubectl().arg("apply").arg("-f").arg(manifest))?;
    for pod in PODS {
        step.note(format!("pod {pod} starts"));
        wait_running(&cluster, pod)?;
    }
    step.done();
    let step = Progress::step("Wait for the reason why pod distributed is pending");
    let reason = wait_reason(&cluster, "distributed")?;
    step.done();
    eprintln!("  the demo took {} s", started.elapsed().as_secs());

    show(&cluster, "Pods", &["get", "pods", "-o", "wide"])?;
    for pod in PODS {
        show(
            &cluster,
            &format!("GPU of pod {pod}"),
            &["exec", pod, "--", "nvidia-smi"],
        )?;
    }
    heading("Pod inference has 8 GiB: free memory can be allocated, 1 MiB more is denied");
    limits(&cluster, "inference")?;
    let claim = claim_of(&cluster, "inference")?;
    show(
        &cluster,
        "Claim of pod inference",
        &["describe", "resourceclaim", &claim],
    )?;
    heading("Why pod distributed is pending");
    println!("{reason}");
    priority(&cluster, &artifacts.programs.join("kubectl-drava"))?;
    println!(
        "\nThe cluster is up. Next:

    export KUBECONFIG={}
    {} get pods,resourceclaims
    {} delete pod urgent      # frees the GPUs: distributed starts

`cargo xtask demo --down` stops the cluster and removes all its files.",
        cluster.kubeconfig().display(),
        cluster.kubectl().get_program().to_string_lossy(),
        cluster.kubectl().get_program().to_string_lossy(),
    );
    Ok(())
}

/// Shows how a pod of high priority evicts others, and the explanation of the pod that still waits.
fn priority(cluster: &Cluster, plugin: &Path) -> Result<()> {
    let manifest =
        workspace_root().join("deploy/examples/quickstart-priority/quickstart-priority.yaml");
    quiet(cluster.kubectl().arg("apply").arg("-f").arg(manifest))?;
    wait_running(cluster, "urgent")?;
    show(
        cluster,
        "Pod urgent has a higher priority and needs both GPUs: its events name the evicted pods",
        &[
            "get",
            "events",
            "--field-selector=involvedObject.name=urgent",
            "-o=custom-columns=REASON:.reason,MESSAGE:.message",
        ],
    )?;
    heading("What would have to change for pod distributed");
    println!("$ kubectl drava explain pod distributed");
    let mut explain = Command::new(plugin);
    explain
        .env("KUBECONFIG", cluster.kubeconfig())
        .args(["explain", "pod", "distributed"])
        .stdin(Stdio::null());
    let status = process::status(&mut explain, Limit::REQUEST)?;
    ensure!(status.success(), "kubectl drava explain failed");
    Ok(())
}

fn heading(text: &str) {
    println!("\n── {text} ──");
}

/// Runs kubectl and prints command and output.
fn show(cluster: &Cluster, title: &str, args: &[&str]) -> Result<()> {
    heading(title);
    println!("$ kubectl {}", args.join(" "));
    let mut kubectl = cluster.kubectl();
    let status = process::status(kubectl.args(args).stdin(Stdio::null()), Limit::REQUEST)?;
    ensure!(status.success(), "kubectl {} failed", args.join(" "));
    Ok(())
}

fn quiet(command: &mut Command) -> Result<Vec<u8>> {
    let output = process::output(command.stdin(Stdio::null()), Limit::REQUEST)?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output.stdout)
}

fn limits(cluster: &Cluster, pod: &str) -> Result<()> {
    let probe = |args: &[&str]| {
        println!("$ kubectl exec {pod} -- cuda-probe {}", args.join(" "));
        let mut kubectl = cluster.kubectl();
        kubectl
            .args(["exec", pod, "--", "cuda-probe"])
            .args(args)
            .stdin(Stdio::null());
        process::status(&mut kubectl, Limit::REQUEST)
    };
    let filled =
        quiet(
            cluster
                .kubectl()
                .args(["exec", pod, "--", "cuda-probe", "fill", "-o", "json"]),
        )?;
    let filled: Value = serde_json::from_slice(&filled).context("read cuda-probe's answer")?;
    let mib = filled["allocatedBytes"]
        .as_u64()
        .context("allocatedBytes")?
        >> 20;
    ensure!(
        probe(&["alloc", "--mib", &mib.to_string()])?.success(),
        "an allocation of {mib} MiB of free memory is denied"
    );
    ensure!(
        !probe(&["alloc", "--mib", &(mib + 1).to_string()])?.success(),
        "an allocation beyond the limit succeeds"
    );
    Ok(())
}

fn pod(cluster: &Cluster, name: &str) -> Result<Value> {
    let text = quiet(cluster.kubectl().args(["get", "pod", name, "-o", "json"]))?;
    serde_json::from_slice(&text).context("read a pod")
}

fn claim_of(cluster: &Cluster, name: &str) -> Result<String> {
    let claim = pod(cluster, name)?["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
        .as_str()
        .map(str::to_owned);
    claim.with_context(|| format!("pod {name} has no claim"))
}

fn wait_running(cluster: &Cluster, name: &str) -> Result<()> {
    wait(|| Ok((pod(cluster, name)?["status"]["phase"] == "Running").then_some(())))?
        .with_context(|| format!("pod {name} does not run; see `cargo xtask cluster --name {CLUSTER} kubectl describe pod {name}`"))
}

/// Waits for the controller's event with the reason why the pod is pending.
fn wait_reason(cluster: &Cluster, name: &str) -> Result<String> {
    let reason = wait(|| {
        let text = quiet(
            cluster
                .kubectl()
                .args(["get", "events", "-o", "json", "--field-selector"])
                .arg(format!("involvedObject.name={name}")),
        )?;
        let events: Value = serde_json::from_slice(&text).context("read events")?;
        let mut messages = events["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|event| event["message"].as_str());
        Ok(messages
            .rfind(|message| message.contains("ExclusiveConflict"))
            .map(str::to_owned))
    })?;
    reason.with_context(|| format!("no event explains why pod {name} is pending"))
}

/// Polls for two minutes.
fn wait<T>(mut poll: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        match poll()? {
            Some(value) => return Ok(Some(value)),
            None if Instant::now() > deadline => return Ok(None),
            None => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}
