//! `computePolicy: spatial`: shares of the multiprocessors, by the MPS of the simulated machine.

use std::thread;

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_request, pod_with_share};
use drava_e2e::measurement::now_us;
use drava_e2e::training::Training;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

const CLASS: &str = "spatial.example.com";

/// A share of half of the multiprocessors of a GPU.
const HALF: &str =
    "{deviceClassName: spatial.example.com, capacity: {requests: {memory: 20Gi, cores: \"50\"}}}";

/// Multiprocessors of the machine's GPUs.
const ALL: u64 = 132;

fn create_class(tenant: &Namespace<'_>) -> Result<()> {
    tenant.apply(&format!(
        r#"
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {{name: {CLASS}}}
spec:
  selectors:
    - cel: {{expression: 'device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "vgpu"'}}
  config:
    - opaque:
        driver: gpu.drava.dev
        parameters: {{apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, computePolicy: spatial}}
"#
    ))
}

fn probe(tenant: &Namespace<'_>, pod: &str, args: &str) -> Result<Value> {
    let line = format!("cuda-probe {args} -o json");
    let argv: Vec<&str> = line.split(' ').collect();
    tenant.exec(pod, "app", &argv)?.json()
}

/// The process of the only daemon of the node.
fn daemon(cluster: &TestCluster) -> Result<Option<String>> {
    let script = "cat /run/drava/mps/*/daemon.json 2>/dev/null; true";
    let records = cluster.on_node("sh", &["-c", script])?;
    if records.trim().is_empty() {
        return Ok(None);
    }
    let record: Value = serde_json::from_str(records.trim()).context("more than one daemon")?;
    Ok(Some(record["pid"].to_string()))
}

fn enforced(tenant: &Namespace<'_>, pod: &str) -> Result<(String, String)> {
    let name = tenant.claim_of(pod)?;
    let claim = tenant.find("resourceclaim", &name)?;
    let claim = claim.context("the claim is gone")?;
    let conditions = claim["status"]["devices"][0]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|condition| condition["type"] == "Enforced");
    let found = found.context("no condition Enforced")?;
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    Ok((text("reason"), text("message")))
}

fn training<'a>(name: &'a str) -> Training<'a> {
    Training {
        name,
        exactly: HALF,
        config: "",
        fields: "",
        args: "",
    }
}

#[test]
fn spatial_pods_of_a_namespace_run_side_by_side() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("spatial")?;
    create_class(&tenant)?;
    for pod in ["one", "two"] {
        tenant.apply(&pod_with_request(pod, HALF, ""))?;
        tenant.running(pod)?;
    }
    ensure!(
        tenant.devices_of("one")? == tenant.devices_of("two")?,
        "the shares are on two GPUs"
    );
    for pod in ["one", "two"] {
        let info = probe(&tenant, pod, "info")?;
        let device = &info["devices"][0];
        ensure!(device["multiprocessors"] == ALL / 2, "{pod}: {info}");
        ensure!(device["totalBytes"] == 20_u64 << 30, "{pod}: {info}");
        let (reason, message) = enforced(&tenant, pod)?;
        ensure!(reason == "Partly", "{reason}: {message}");
        ensure!(message.contains("50% of the multiprocessors"), "{message}");
        // The limit is that of libvgpu, as for every share.
        let filled = probe(&tenant, pod, "fill")?;
        ensure!(
            filled["allocatedBytes"].as_u64() < Some(20 << 30),
            "{filled}"
        );
        let beyond = tenant.exec(pod, "app", &["cuda-probe", "alloc", "--mib", "20481"])?;
        ensure!(beyond.code != 0, "{beyond:?}");
        // A program that leaves MPS takes turns with the others, and its memory stays limited.
        let left = "CUDA_MPS_PIPE_DIRECTORY=/none cuda-probe alloc --mib";
        let within = tenant.exec(pod, "app", &["sh", "-c", &format!("{left} 1024")])?;
        ensure!(within.code == 0, "{within:?}");
        let beyond = tenant.exec(pod, "app", &["sh", "-c", &format!("{left} 20481")])?;
        ensure!(beyond.code != 0, "{beyond:?}");
    }
    // One block for each of its multiprocessors: shares of the time would get half of it each.
    let launch = |pod: &'static str| {
        let args = format!("launch --ms 5 --blocks {} --seconds 4 --margin 2", ALL / 2);
        let done = probe(&tenant, pod, &args)?;
        done["share"].as_f64().context("share")
    };
    let (one, two) = thread::scope(|scope| {
        let one = scope.spawn(|| launch("one"));
        let two = scope.spawn(|| launch("two"));
        (one.join(), two.join())
    });
    let joined = |_| anyhow::anyhow!("a thread panicked");
    let (one, two) = (one.map_err(joined)??, two.map_err(joined)??);
    ensure!(
        one.min(two) > 0.7,
        "side by side they got {one:.2} and {two:.2}"
    );

    // The other GPU serves the other namespace, and no GPU is left for shares of time.
    let other = cluster.namespace("spatial-other")?;
    other.apply(&pod_with_request("three", HALF, ""))?;
    other.running("three")?;
    ensure!(other.devices_of("three")? != tenant.devices_of("one")?);
    other.apply(&pod_with_share(
        "by-time",
        "vgpu.drava.dev",
        "{memory: 1Gi}",
    ))?;
    let pending = other.event("by-time", "GpuUnschedulable")?;
    ensure!(
        pending.contains("multiprocessors"),
        "the event of the pod by time: {pending}"
    );
    other.delete_pods(&["by-time", "three"])?;
    tenant.delete_pods(&["one", "two"])?;
    wait("the daemons end", || {
        Ok(daemon(&cluster)?.is_none().then_some(()))
    })
}

#[test]
fn spatial_fault_reaches_its_namespace_only_and_heals() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("spatial-fault")?;
    let other = cluster.namespace("spatial-calm")?;
    create_class(&tenant)?;
    tenant.apply(&training("victim").template())?;
    tenant.apply(&training("victim").pod())?;
    tenant.running("victim")?;
    tenant.apply(&pod_with_request("culprit", HALF, ""))?;
    tenant.running("culprit")?;
    other.apply(&training("calm").template())?;
    other.apply(&training("calm").pod())?;
    other.running("calm")?;
    tenant.training_started("victim", 0)?;
    other.training_started("calm", 0)?;
    ensure!(tenant.devices_of("victim")? == tenant.devices_of("culprit")?);
    ensure!(tenant.devices_of("victim")? != other.devices_of("calm")?);

    let before = now_us()?;
    // The program lives on, so that its server takes no other one until it is ended.
    let fault = "cuda-probe fault --hold 600 > /tmp/fault 2>&1 & sleep 1";
    tenant
        .exec("culprit", "app", &["sh", "-c", fault])?
        .success()?;
    for pod in ["victim", "culprit"] {
        let event = tenant.event(&tenant.claim_of(pod)?, "MpsFault")?;
        ensure!(event.contains("fatal fault"), "{event}");
    }
    // Its container ends with an error, and its next program is served.
    let again = tenant.training_started("victim", before)?;
    let millis = again.saturating_sub(before) / 1000;
    println!("healed after {millis} ms");
    let calm = other.kubectl(&[
        "get",
        "pod",
        "calm",
        "-o",
        "jsonpath={.status.containerStatuses[0].restartCount}",
    ])?;
    ensure!(
        calm.trim() == "0",
        "the pod of the other namespace restarted"
    );
    let events = other.events(&other.claim_of("calm")?)?;
    ensure!(
        !events.iter().any(|event| event.starts_with("MpsFault")),
        "{events:?}"
    );
    Ok(())
}

#[test]
fn spatial_daemon_outlives_node_driver_and_is_started_again() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("spatial-daemon")?;
    create_class(&tenant)?;
    tenant.apply(&training("steady").template())?;
    tenant.apply(&training("steady").pod())?;
    tenant.running("steady")?;
    let started = tenant.training_started("steady", 0)?;
    let first = daemon(&cluster)?.context("no daemon")?;
    cluster.kubectl([
        "-n",
        "drava-system",
        "delete",
        "pod",
        "-l",
        "app.kubernetes.io/component=driver",
        "--wait=true",
    ])?;
    cluster.drava_ready()?;
    ensure!(
        daemon(&cluster)?.as_ref() == Some(&first),
        "the daemon was replaced"
    );
    ensure!(
        tenant
            .training_log("steady")
            .after("started", started)
            .next()
            .is_none(),
        "the program was disturbed"
    );
    cluster.on_node("kill", &["-9", &first])?;
    let second = wait("the daemon is started again", || {
        Ok(daemon(&cluster)?.filter(|pid| *pid != first))
    })?;
    let event = tenant.event(&tenant.claim_of("steady")?, "MpsFault")?;
    ensure!(event.contains("started again"), "{event}");
    tenant.training_started("steady", started)?;
    // The daemon writes each command into its log, which is memory of the node.
    let grow = "truncate -s 9M /run/drava/mps/*/log/control.log";
    cluster.on_node("sh", &["-c", grow])?;
    wait("the log is emptied", || {
        let size = cluster.on_node(
            "sh",
            &["-c", "cat /run/drava/mps/*/log/control.log | wc -c"],
        )?;
        Ok((size.trim().parse::<u64>()? < 1 << 20).then_some(()))
    })?;
    let damage =
        format!("kill -9 {second}; umount -l /run/drava/mps/*/shm; rm -rf /run/drava/mps/*");
    cluster.on_node("sh", &["-c", &damage])?;
    let second = wait("the daemon is started without its files", || {
        Ok(daemon(&cluster)?.filter(|pid| *pid != second))
    })?;
    tenant.delete_pods(&["steady"])?;
    wait("the daemon ends", || {
        Ok(daemon(&cluster)?.is_none().then_some(()))
    })?;
    let pids = cluster.on_node(
        "sh",
        &["-c", &format!("test -d /proc/{second} && echo there; true")],
    )?;
    ensure!(pids.trim().is_empty(), "the daemon runs");
    // Nor does a server of a daemon whose files were removed.
    cluster.first_node().wait_until_unused()
}
