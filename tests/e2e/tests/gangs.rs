//! Gangs: elastic members, `kubectl drava gangs`, and gangs that kube-scheduler binds in part.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod, pod_with_share, pod_without_claim};
use drava_e2e::{Namespace, TestCluster, wait};

const GATE: &str = "gpu.drava.dev/allocation";

/// Makes the pods of a manifest members of a gang.
fn in_gang(manifest: &str, name: &str, gang: &str, min: &str) -> Result<String> {
    let plain = format!("kind: Pod\nmetadata: {{name: {name}}}\n");
    ensure!(manifest.contains(&plain), "{manifest}");
    let annotations =
        format!("annotations: {{gpu.drava.dev/gang: {gang}, gpu.drava.dev/gang-min: \"{min}\"}}");
    Ok(manifest.replace(
        &plain,
        &format!("kind: Pod\nmetadata: {{name: {name}, {annotations}}}\n"),
    ))
}

fn add_member(tenant: &Namespace<'_>, name: &str, memory: &str, min: &str) -> Result<()> {
    let manifest = pod_with_share(name, "vgpu.drava.dev", &format!("{{memory: {memory}}}"));
    tenant.apply(&in_gang(&manifest, name, "train", min)?)
}

/// Returns the line of the gang in `kubectl drava gangs`.
fn gang_line(cluster: &TestCluster, tenant: &Namespace<'_>) -> Result<String> {
    let table = cluster.drava(&["gangs", "-n", tenant.name()])?.success()?;
    let line = table.lines().find(|line| line.contains("train"));
    Ok(line.unwrap_or_default().to_owned())
}

#[test]
fn allocates_elastic_members_when_they_fit() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("elastic")?;
    // Four places of 36 GiB; the gang needs two members and has five.
    for index in 0..5 {
        add_member(&tenant, &format!("m-{index}"), "36Gi", "2")?;
    }
    let running = wait("four members run", || {
        let pods = tenant.list("pods")?;
        let running = pods
            .iter()
            .filter(|pod| pod["status"]["phase"] == "Running");
        let names: Vec<String> = running
            .filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
            .collect();
        Ok((names.len() == 4).then_some(names))
    })?;
    let left = (0..5).map(|index| format!("m-{index}"));
    let left = left
        .filter(|name| !running.contains(name))
        .collect::<Vec<_>>();
    tenant.event(&left[0], "InsufficientMemory")?;
    let line = gang_line(&cluster, &tenant)?;
    ensure!(line.contains("train"), "{line}");
    tenant.delete_pods(&[&running[0]])?;
    tenant.running(&left[0])
}

#[test]
fn removes_gates_of_all_members_together() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("gates")?;
    let launcher = in_gang(&pod_without_claim("launcher"), "launcher", "train", "3")?;
    tenant.apply(&launcher)?;
    add_member(&tenant, "m-0", "8Gi", "3")?;
    for pod in ["launcher", "m-0"] {
        tenant.event(pod, "WaitingForGang: gang train: 2 of 3 members exist")?;
        let found = tenant.find("pod", pod)?.context("no pod")?;
        ensure!(
            found["spec"]["schedulingGates"][0]["name"] == GATE,
            "{found}"
        );
    }
    let line = gang_line(&cluster, &tenant)?;
    ensure!(line.contains('3'), "{line}");
    add_member(&tenant, "m-1", "8Gi", "3")?;
    for pod in ["launcher", "m-0", "m-1"] {
        tenant.running(pod)?;
    }
    Ok(())
}

/// Sets the time after which unreserved allocations are released.
fn release_after(cluster: &TestCluster, time: &str) -> Result<()> {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");
    let set = format!("scheduling.releaseUnreservedAfter={time}");
    let upgrade = ["upgrade", "drava", chart, "-n", "drava-system"];
    let values = [
        "--reuse-values",
        "--force-conflicts",
        "--set",
        &set,
        "--wait",
    ];
    cluster.helm(upgrade.into_iter().chain(values))?;
    cluster.drava_ready()
}

#[test]
fn gives_devices_of_partly_bound_gang_back() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("partly-bound")?;
    // A claim for a driver that does not exist: drava leaves it to kube-scheduler, which cannot bind the third member.
    tenant.apply(
        "
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: e2e-missing}
spec: {selectors: [{cel: {expression: \"device.driver == 'missing.example.com'\"}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: missing-driver}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: e2e-missing}}]}}}
",
    )?;
    release_after(&cluster, "5s")?;
    let outcome = (|| {
        for member in ["m-0", "m-1"] {
            add_member(&tenant, member, "60Gi", "3")?;
        }
        let stuck = pod("stuck", "resourceClaimTemplateName: missing-driver");
        tenant.apply(&in_gang(&stuck, "stuck", "train", "3")?)?;
        for member in ["m-0", "m-1"] {
            tenant.event(member, "gang train: 2 of 3 members were bound")?;
        }
        // Both GPUs are free again.
        tenant.apply(&pod_with_share("next", "vgpu.drava.dev", "{memory: 70Gi}"))?;
        tenant.running("next")
    })();
    release_after(&cluster, "60s")?;
    cluster.kubectl(["delete", "deviceclass", "e2e-missing"])?;
    outcome
}
