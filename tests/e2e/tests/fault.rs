//! Faults of the node: a wrong driver root, a runtime without CDI.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{TestCluster, wait};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");

fn set_driver_root(cluster: &TestCluster, root: &str) -> Result<()> {
    let value = format!("driver.driverRoot={root}");
    cluster.helm([
        "-n",
        "drava-system",
        "upgrade",
        "drava",
        CHART,
        "--reuse-values",
        "--set",
        &value,
    ])?;
    Ok(())
}

/// Returns the names of the ready driver pods.
fn ready_drivers(cluster: &TestCluster) -> Result<Vec<String>> {
    let pods = cluster.get(&[
        "pods",
        "-n",
        "drava-system",
        "-l",
        "app.kubernetes.io/component=driver",
    ])?;
    let is_ready = |pod: &serde_json::Value| {
        let conditions = pod["status"]["conditions"].as_array();
        conditions.is_some_and(|all| {
            all.iter()
                .any(|one| one["type"] == "Ready" && one["status"] == "True")
        })
    };
    let pods = pods["items"].as_array().into_iter().flatten();
    let names: Vec<String> = pods
        .filter(|pod| is_ready(pod))
        .filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
        .collect();
    ensure!(!names.is_empty(), "no driver pod is ready");
    Ok(names)
}

#[test]
fn driver_root_without_libraries_is_reported() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("root")?;
    let values = cluster.helm(["-n", "drava-system", "get", "values", "drava", "-o", "json"])?;
    let values: serde_json::Value = serde_json::from_str(&values)?;
    let right = values["driver"]["driverRoot"]
        .as_str()
        .context("read the installed driver root")?
        .to_owned();

    cluster.on_node("mkdir", &["-p", "/opt/empty/usr/lib"])?;
    set_driver_root(&cluster, "/opt/empty")?;
    let message = wait("an event on the node that names the library", || {
        let events = cluster.get(&["events", "-A"])?;
        let messages = events["items"].as_array().into_iter().flatten();
        let mut messages = messages.filter(|event| event["involvedObject"]["kind"] == "Node");
        Ok(messages.find_map(|event| {
            let message = event["message"].as_str()?;
            message
                .contains("libnvidia-ml.so.1")
                .then(|| message.to_owned())
        }))
    });
    // The working driver pod serves the node until it ends.
    let served = tenant
        .apply(&pod_with_share("served", "vgpu.drava.dev", "{memory: 1Gi}"))
        .and_then(|()| tenant.running("served"));
    // Then a pod's event names the same cause, and the pod starts once the root is corrected.
    let event = ready_drivers(&cluster)
        .and_then(|drivers| {
            let delete =
                ["-n", "drava-system", "delete", "pod", "--timeout=60s"].map(str::to_owned);
            cluster.kubectl(delete.into_iter().chain(drivers))
        })
        .and_then(|_| tenant.apply(&pod_with_share("waits", "vgpu.drava.dev", "{memory: 1Gi}")))
        .and_then(|()| tenant.event("waits", "libnvidia-ml.so.1"));

    set_driver_root(&cluster, &right)?;
    cluster.drava_ready()?;
    let message = message?;
    ensure!(
        message.contains("usr/lib"),
        "the event does not name the searched root: {message}"
    );
    served?;
    event?;
    tenant.running("waits")
}

#[test]
fn runtime_without_cdi_starts_no_container() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("cdi")?;
    let node = cluster.kubernetes().control_plane();
    let event = node.set_cdi(false).and_then(|()| {
        tenant.apply(&pod_with_share("blind", "vgpu.drava.dev", "{memory: 1Gi}"))?;
        // The text is that of containerd 2.3.
        tenant.event("blind", "CDI support is explicitly disabled")
    });
    node.set_cdi(true)?;
    event?;
    tenant.running("blind")
}
