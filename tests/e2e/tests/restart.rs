//! Claims and limits survive a crash or restart of each component.

use anyhow::{Context, Result, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};

const MIB: u64 = 1 << 20;

/// Checks that the pod runs in the same container and that its limit holds.
fn still_limited(tenant: &Namespace<'_>, pod: &str, mib: u64) -> Result<()> {
    let info = tenant
        .exec(pod, "app", &["cuda-probe", "info", "-o", "json"])?
        .json()?;
    ensure!(info["devices"][0]["totalBytes"] == mib * MIB, "{info}");
    let denied = tenant.exec(
        pod,
        "app",
        &["cuda-probe", "alloc", "--mib", &(mib + 1).to_string()],
    )?;
    ensure!(denied.code == 2, "{denied:?}");
    let found = tenant.find("pod", pod)?.context("the pod is gone")?;
    ensure!(
        found["status"]["containerStatuses"][0]["restartCount"] == 0,
        "the container was restarted"
    );
    Ok(())
}

#[test]
fn running_pods_survive_driver_restart() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("driver")?;
    tenant.apply(&pod_with_share("before", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    tenant.running("before")?;

    ensure!(
        cluster.kill_processes("drava-dra-driver")? > 0,
        "no driver process on the node"
    );
    still_limited(&tenant, "before", 2048)?;
    // A pod created while the driver is down starts after the driver's restart.
    tenant.apply(&pod_with_share("during", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    tenant.running("during")?;
    still_limited(&tenant, "during", 2048)?;
    still_limited(&tenant, "before", 2048)?;

    // A graceful stop: the DaemonSet replaces the pod.
    cluster.kubectl([
        "-n",
        "drava-system",
        "delete",
        "pod",
        "-l",
        "app.kubernetes.io/component=driver",
        "--timeout=60s",
    ])?;
    cluster.drava_ready()?;
    still_limited(&tenant, "before", 2048)
}

#[test]
fn driver_killed_during_prepare_completes_it() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("prepare")?;
    let node = cluster.first_node();
    let pods = ["first", "second", "third"];
    // The driver gets kubelet's calls when the preparations are blocked.
    ensure!(
        node.signal("drava-dra-driver", "STOP")? > 0,
        "no driver process on the node"
    );
    let blocked = pods.iter().map(|pod| {
        tenant.apply(&pod_with_share(pod, "vgpu.drava.dev", "{memory: 1Gi}"))?;
        let claim = tenant.allocated_claim_of(pod)?;
        let blocked = node.block_preparation(&claim)?;
        Ok((claim.uid, blocked))
    });
    let blocked: Result<Vec<_>> = blocked.collect();
    node.signal("drava-dra-driver", "CONT")?;
    let (uids, blocked): (Vec<String>, Vec<_>) = blocked?.into_iter().unzip();
    let uids: Vec<&str> = uids.iter().map(String::as_str).collect();
    node.kill_driver_amid_claims(&uids, || {
        drop(blocked);
        Ok(())
    })?;
    for pod in pods {
        tenant.running(pod)?;
        still_limited(&tenant, pod, 1024)?;
    }
    tenant.delete_pods(&pods)?;
    node.wait_until_clean()
}

#[test]
fn controller_crash_loses_no_claim() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("controller")?;
    for index in 0..6 {
        tenant.apply(&pod_with_share(
            &format!("pod-{index}"),
            "vgpu.drava.dev",
            "{memory: 10Gi, cores: \"10\"}",
        ))?;
        if index == 2 {
            // Both replicas: the leader and the standby.
            ensure!(
                cluster.kill_processes("drava-controller")? > 0,
                "no controller process on the node"
            );
        }
    }
    for index in 0..6 {
        tenant.running(&format!("pod-{index}"))?;
    }
    cluster.check_allocations()
}

#[test]
fn kubelet_restart_during_start_loses_no_pod() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("kubelet")?;
    tenant.apply(&pod_with_share("before", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    tenant.running("before")?;
    tenant.apply(&pod_with_share("during", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    cluster
        .kubernetes()
        .control_plane()
        .restart(Component::Kubelet)?;
    tenant.running("during")?;
    still_limited(&tenant, "before", 2048)?;
    still_limited(&tenant, "during", 2048)?;
    // kubelet deletes its node's ResourceSlices at its start; the driver publishes them again.
    wait("the ResourceSlices are published again", || {
        let slices = cluster.get(&["resourceslices"])?;
        let names: Vec<&str> = slices["items"]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten())
            .filter_map(|device| device["name"].as_str())
            .collect();
        Ok((["gpu-0", "gpu-0-vgpu", "gpu-1", "gpu-1-vgpu"]
            .iter()
            .all(|name| names.contains(name)))
        .then_some(()))
    })
}

#[test]
fn deleted_pods_leave_no_state_on_node() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("leave")?;
    tenant.apply(&pod_with_share("guest", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("guest")?;
    tenant.delete_pods(&["guest"])?;
    cluster.first_node().wait_until_clean()
}
