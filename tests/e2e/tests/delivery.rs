//! The chart's `driver.delivery`: stubs in place of NVIDIA's libraries, or a preloaded libvgpu.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");
const MIB: u64 = 1 << 20;

/// Upgrades the release and waits until only drivers with that option serve the node.
fn set_delivery(cluster: &TestCluster, delivery: &str) -> Result<()> {
    let value = format!("driver.delivery={delivery}");
    let upgrade = ["-n", "drava-system", "upgrade", "drava", CHART];
    cluster.helm(
        upgrade
            .into_iter()
            .chain(["--reuse-values", "--set", &value]),
    )?;
    cluster.drava_ready()?;
    let argument = format!("--delivery={delivery}");
    wait(&format!("all drivers run with {argument}"), || {
        let of_driver = ["-l", "app.kubernetes.io/component=driver"];
        let pods = [&["pods", "-n", "drava-system"][..], &of_driver].concat();
        let pods = cluster.get(&pods)?;
        let pods = pods["items"].as_array().context("pods")?.clone();
        let has_it = |pod: &serde_json::Value| {
            let arguments = pod["spec"]["containers"][0]["args"].as_array();
            arguments.is_some_and(|all| all.iter().any(|one| *one == *argument))
        };
        Ok((!pods.is_empty() && pods.iter().all(has_it)).then_some(()))
    })
}

/// Returns the memory of each device of a pod in bytes, as seen by a program with an empty environment.
fn totals(tenant: &Namespace<'_>, pod: &str) -> Result<Vec<u64>> {
    let probe = ["env", "-i", "/usr/bin/cuda-probe", "info", "-o", "json"];
    let info = tenant.exec(pod, "app", &probe)?.json()?;
    let devices = info["devices"].as_array().context("devices")?;
    let total = |device: &serde_json::Value| device["totalBytes"].as_u64().context("totalBytes");
    devices.iter().map(total).collect()
}

/// Checks that the pod has exactly that much memory of its device, with and without environment and preload.
fn is_limited(tenant: &Namespace<'_>, pod: &str, device: usize, mib: u64) -> Result<()> {
    ensure!(totals(tenant, pod)?.get(device) == Some(&(mib * MIB)));
    let allocate = |mib: u64| {
        let (device, mib) = (device.to_string(), mib.to_string());
        let probe = ["cuda-probe", "alloc", "--device", &device, "--mib", &mib];
        tenant.exec(pod, "app", &[&["env", "-i"][..], &probe].concat())
    };
    let denied = allocate(mib)?;
    ensure!(denied.code == 2, "{pod}, {mib} MiB: {denied:?}");
    // All memory except that of a context.
    let free_mib = tenant.fill(pod, device)?;
    ensure!(free_mib * 100 >= (mib - 1024) * 99, "{pod}: {free_mib} MiB");
    Ok(())
}

#[test]
fn stubs_limit_shares_without_preload() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("shim")?;
    tenant.apply(&pod_with_share("before", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    tenant.running("before")?;

    let with_stubs = set_delivery(&cluster, "shim").and_then(|()| check(&tenant));
    set_delivery(&cluster, "preload")?;
    with_stubs
}

fn check(tenant: &Namespace<'_>) -> Result<()> {
    tenant.share_one_gpu(&[("left", "30Gi"), ("right", "40Gi")])?;
    for (pod, mib) in [("left", 30 << 10), ("right", 40 << 10)] {
        let preload = tenant.exec(pod, "app", &["cat", "/etc/ld.so.preload"])?;
        ensure!(preload.code != 0, "preloaded: {}", preload.stdout);
        is_limited(tenant, pod, 0, mib)?;
        let table = tenant.exec(pod, "app", &["nvidia-smi"])?.success()?;
        ensure!(table.contains(&format!(" {mib}MiB |")), "{table}");
    }

    // Claims prepared before the change stay unchanged.
    let preload = tenant.exec("before", "app", &["cat", "/etc/ld.so.preload"])?;
    ensure!(preload.success()?.contains("libvgpu.so"));
    is_limited(tenant, "before", 0, 2048)?;

    // A container that also has a whole GPU has one file at each path; the share's limit holds with either file.
    tenant.apply(MIXED)?;
    tenant.running("mixed")?;
    let totals = totals(tenant, "mixed")?;
    let share = totals.iter().position(|bytes| *bytes == 4096 * MIB);
    let share = share.with_context(|| format!("no device with a share's memory: {totals:?}"))?;
    let whole = totals.iter().filter(|bytes| **bytes > 80_000 * MIB);
    ensure!(totals.len() == 2 && whole.count() == 1, "{totals:?}");
    is_limited(tenant, "mixed", share, 4096)
}

const MIXED: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: mixed-share}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 4Gi}}}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: mixed-whole}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.drava.dev}}]}}}
---
apiVersion: v1
kind: Pod
metadata: {name: mixed}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims:
  - {name: share, resourceClaimTemplateName: mixed-share}
  - {name: whole, resourceClaimTemplateName: mixed-whole}
  containers:
  - name: app
    image: localhost/drava-demo:dev
    imagePullPolicy: IfNotPresent
    command: [sleep, infinity]
    resources: {claims: [{name: share}, {name: whole}]}
";
