//! The chart `gpu-simulator`: a node without GPUs and without a simulated machine of the tests gets GPUs for drava, and keeps
//! nothing of them. The commands are those of docs/demo.md.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use drava_cluster::{target_dir, workspace_root};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{TestCluster, wait};

const SIMULATOR: &str = "gpu-simulator";
/// Driver root of the chart's default values.
const ROOT: &str = "/var/lib/gpu-simulator/root";
const IMAGES: [&str; 2] = ["--set", "image.registry=localhost,image.tag=dev"];

/// Installs a chart of `deploy/helm` with the images of this build.
fn install(cluster: &TestCluster, chart: &str, namespace: &str, more: &[&str]) -> Result<()> {
    let directory = workspace_root().join("deploy/helm").join(chart);
    let directory = directory.display().to_string();
    let install = ["install", chart, &directory, "--create-namespace"];
    let namespace = ["-n", namespace, "--wait", "--timeout", "3m"];
    let arguments = install.into_iter().chain(namespace).chain(IMAGES);
    cluster.helm(arguments.chain(more.iter().copied()))?;
    Ok(())
}

/// Returns the UUIDs of the GPUs that drava publishes.
fn published(cluster: &TestCluster) -> Result<BTreeSet<String>> {
    let slices = cluster.get(&["resourceslices"])?;
    let slices = slices["items"].as_array().context("slices")?;
    let devices = slices
        .iter()
        .filter_map(|slice| slice["spec"]["devices"].as_array())
        .flatten();
    Ok(devices
        .filter_map(|device| device["attributes"]["uuid"]["string"].as_str())
        .filter(|uuid| uuid.starts_with("GPU-"))
        .map(str::to_owned)
        .collect())
}

#[test]
fn node_gets_gpus_of_the_chart_and_keeps_nothing() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let image = target_dir().join("images/gpu-simulator.tar");
    cluster.kubernetes().load_image(&image)?;
    install(&cluster, SIMULATOR, SIMULATOR, &[])?;
    let values = workspace_root().join("deploy/helm/gpu-simulator/drava.yaml");
    let values = values.display().to_string();
    install(&cluster, "drava", "drava-system", &["-f", &values])?;

    let uuids = wait("two GPUs are published", || {
        let uuids = published(&cluster)?;
        Ok((uuids.len() == 2).then_some(uuids))
    })?;
    let file = workspace_root().join("simulator/machine/machines/h100x2.yaml");
    let file = std::fs::read_to_string(file)?;
    ensure!(
        uuids.iter().all(|uuid| !file.contains(uuid.as_str())),
        "each node would have {uuids:?}"
    );

    let tenant = cluster.namespace("gpu-simulator")?;
    tenant.apply(&pod_with_share("a", "vgpu.drava.dev", "{memory: 8Gi}"))?;
    tenant.running("a")?;
    ensure!(tenant.total_mib("a")? == "8192", "no share");
    let denied = tenant.exec("a", "app", &["cuda-probe", "alloc", "--mib", "8192"])?;
    ensure!(denied.code == 2, "{denied:?}");
    let free_mib = tenant.fill("a", 0)?;
    ensure!((7000..8192).contains(&free_mib), "{free_mib} MiB");

    let daemon = ["-n", SIMULATOR, "exec", "daemonset/gpu-simulator", "--"];
    let status = ["simulator-machine", "ctl", "--root=/driver-root", "status"];
    let status = cluster.kubectl(daemon.into_iter().chain(status))?;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    let known = status["gpus"].as_array().context("gpus")?;
    let known = known.iter().filter_map(|gpu| gpu["uuid"].as_str());
    ensure!(
        known.map(str::to_owned).collect::<BTreeSet<_>>() == uuids,
        "{status}"
    );

    tenant.delete_pods(&["a"])?;
    cluster.helm(["uninstall", SIMULATOR, "-n", SIMULATOR, "--wait"])?;
    wait("the driver root is empty", || {
        let left = cluster.on_node("ls", &["-A", ROOT])?;
        Ok(left.trim().is_empty().then_some(()))
    })
}
