//! `cargo xtask demo`: two pods share one simulated GPU on a real Kubernetes.
//!
//! Builds what is missing, starts the cluster, installs drava with its own chart, runs `deploy/examples/quickstart` and shows what a
//! user of a real cluster would look at. The cluster stays up.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use drava_cluster::prerequisite::{self, Prerequisite};
use drava_cluster::{Cluster, Kubernetes, Options, Progress, workspace_root};
use serde_json::Value;

use crate::deploy;

/// Command line of `cargo xtask demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Take the demo's cluster down and remove every trace of it.
    #[arg(long)]
    down: bool,
    /// Kubernetes minor version: 1.37 or 1.36.
    #[arg(long, default_value_t)]
    kubernetes: Kubernetes,
    /// Description of the simulated machine; two H100 when left out.
    #[arg(long, value_name = "FILE")]
    machine: Option<std::path::PathBuf>,
}

const CLUSTER: &str = "demo";
const PODS: [&str; 2] = ["inference", "training"];

/// Runs the chore.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.down {
        let state = Options::named(CLUSTER).state;
        let found = drava_cluster::down(&state)?;
        println!(
            "{}",
            if found {
                "the demo is gone"
            } else {
                "there is no demo to take down"
            }
        );
        return Ok(());
    }
    let started = Instant::now();
    // Before the minutes of building.
    prerequisite::check(&Prerequisite::CLUSTER)?;
    let machine = deploy::machine(args.machine.as_deref());
    let cluster = deploy::start(CLUSTER, args.kubernetes, machine, &deploy::build()?)?;
    let step = Progress::step("Run the quickstart pods");
    let manifest = workspace_root().join("deploy/examples/quickstart/quickstart.yaml");
    quiet(cluster.kubectl().arg("apply").arg("-f").arg(manifest))?;
    for pod in PODS {
        step.note(format!("pod {pod} starts"));
        wait_running(&cluster, pod)?;
    }
    step.done();
    let step = Progress::step("Wait until pod distributed says why it waits");
    let reason = wait_reason(&cluster, "distributed")?;
    step.done();
    eprintln!("  all of it took {} s", started.elapsed().as_secs());

    show(&cluster, "Who runs where", &["get", "pods", "-o", "wide"])?;
    for pod in PODS {
        show(
            &cluster,
            &format!("What pod {pod} sees of its card"),
            &["exec", pod, "--", "nvidia-smi"],
        )?;
    }
    heading("Pod inference has 8 GiB: what is free can be had, one MiB more is refused");
    limits(&cluster, "inference")?;
    let claim = claim_of(&cluster, "inference")?;
    show(
        &cluster,
        "Its claim",
        &["describe", "resourceclaim", &claim],
    )?;
    heading("Why pod distributed is pending");
    println!("{reason}");
    println!(
        "\nThe cluster is up. Go on with:

    export KUBECONFIG={}
    {} get pods,resourceclaims
    {} delete pod inference training      # frees the card: distributed starts

`cargo xtask demo --down` removes every trace.",
        cluster.kubeconfig().display(),
        cluster.kubectl().get_program().to_string_lossy(),
        cluster.kubectl().get_program().to_string_lossy(),
    );
    Ok(())
}

fn heading(text: &str) {
    println!("\n── {text} ──");
}

/// Runs kubectl before the user's eyes.
fn show(cluster: &Cluster, title: &str, args: &[&str]) -> Result<()> {
    heading(title);
    println!("$ kubectl {}", args.join(" "));
    let status = cluster.kubectl().args(args).stdin(Stdio::null()).status()?;
    ensure!(status.success(), "kubectl {} failed", args.join(" "));
    Ok(())
}

fn quiet(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stdin(Stdio::null()).output()?;
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
        cluster
            .kubectl()
            .args(["exec", pod, "--", "cuda-probe"])
            .args(args)
            .stdin(Stdio::null())
            .status()
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
        "{mib} MiB that were free are refused"
    );
    ensure!(
        !probe(&["alloc", "--mib", &(mib + 1).to_string()])?.success(),
        "the limit does not hold"
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
        .with_context(|| format!("pod {name} does not run; look at `cargo xtask cluster --name {CLUSTER} kubectl describe pod {name}`"))
}

/// The controller's words on why the pod waits.
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
    reason.with_context(|| format!("nothing explains why pod {name} waits"))
}

/// Asks again until there is an answer, for two minutes.
fn wait<T>(mut ask: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        match ask()? {
            Some(answer) => return Ok(Some(answer)),
            None if Instant::now() > deadline => return Ok(None),
            None => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}
