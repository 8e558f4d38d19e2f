//! Nothing is lost when a part of the system dies, at whatever moment.

use anyhow::{Context, Result, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, World, wait};

const MIB: u64 = 1 << 20;

/// The pod still runs, is the same container, and its limit holds.
fn still_limited(tenant: &Namespace<'_>, pod: &str, mib: u64) -> Result<()> {
    let info = tenant
        .exec(pod, "app", &["cuda-probe", "info", "-o", "json"])?
        .json()?;
    ensure!(info["devices"][0]["totalBytes"] == mib * MIB, "{info}");
    let refused = tenant.exec(
        pod,
        "app",
        &["cuda-probe", "alloc", "--mib", &(mib + 1).to_string()],
    )?;
    ensure!(refused.code == 2, "{refused:?}");
    let found = tenant.find("pod", pod)?.context("the pod is gone")?;
    ensure!(
        found["status"]["containerStatuses"][0]["restartCount"] == 0,
        "the container was restarted"
    );
    Ok(())
}

#[test]
fn running_pods_survive_a_restart_of_the_driver() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("driver")?;
    tenant.apply(&pod_with_share("before", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    tenant.running("before")?;

    ensure!(
        world.kill_processes("drava-dra-driver")? > 0,
        "no driver process on the node"
    );
    still_limited(&tenant, "before", 2048)?;
    // A pod created while the driver is down starts when it is back.
    tenant.apply(&pod_with_share("during", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    tenant.running("during")?;
    still_limited(&tenant, "during", 2048)?;
    still_limited(&tenant, "before", 2048)?;

    // A clean stop: the DaemonSet's pod is replaced.
    world.kubectl([
        "-n",
        "drava-system",
        "delete",
        "pod",
        "-l",
        "app.kubernetes.io/component=driver",
        "--timeout=60s",
    ])?;
    world.drava_ready()?;
    still_limited(&tenant, "before", 2048)
}

#[test]
fn a_driver_killed_during_prepare_finishes_the_work() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("prepare")?;
    let pods: Vec<String> = (0..6).map(|index| format!("pod-{index}")).collect();
    for (index, pod) in pods.iter().enumerate() {
        tenant.apply(&pod_with_share(pod, "vgpu.drava.dev", "{memory: 1Gi}"))?;
        if index % 2 == 1 {
            world.kill_processes("drava-dra-driver")?;
        }
    }
    for pod in &pods {
        tenant.running(pod)?;
        still_limited(&tenant, pod, 1024)?;
    }
    tenant.delete_pods(&pods.iter().map(String::as_str).collect::<Vec<_>>())?;
    nothing_left(&world)
}

#[test]
fn a_killed_controller_loses_no_claim() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("controller")?;
    for index in 0..6 {
        tenant.apply(&pod_with_share(
            &format!("pod-{index}"),
            "vgpu.drava.dev",
            "{memory: 10Gi, cores: \"10\"}",
        ))?;
        if index == 2 {
            // Both replicas: the one that leads and the one that waits.
            ensure!(
                world.kill_processes("drava-controller")? > 0,
                "no controller process on the node"
            );
        }
    }
    for index in 0..6 {
        tenant.running(&format!("pod-{index}"))?;
    }
    // No card holds more than it has.
    for card in ["gpu-0-vgpu", "gpu-1-vgpu"] {
        let mut memory = 0;
        for claim in tenant.list("resourceclaim")? {
            for result in claim["status"]["allocation"]["devices"]["results"]
                .as_array()
                .into_iter()
                .flatten()
            {
                if result["device"] == card {
                    let text = result["consumedCapacity"]["memory"]
                        .as_str()
                        .context("consumed memory")?;
                    memory += text
                        .strip_suffix("Gi")
                        .context("memory in Gi")?
                        .parse::<u64>()?;
                }
            }
        }
        ensure!(memory <= 79, "{card} is over-committed with {memory} GiB");
    }
    Ok(())
}

#[test]
fn a_restart_of_kubelet_in_mid_flight_loses_nothing() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("kubelet")?;
    tenant.apply(&pod_with_share("before", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    tenant.running("before")?;
    tenant.apply(&pod_with_share("during", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    world.cluster().restart(Component::Kubelet)?;
    tenant.running("during")?;
    still_limited(&tenant, "before", 2048)?;
    still_limited(&tenant, "during", 2048)?;
    // kubelet wipes its node's slices when it starts; the driver publishes them again.
    wait("the slices are back", || {
        let slices = world.get(&["resourceslices"])?;
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
fn pods_that_leave_take_everything_with_them() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("leave")?;
    tenant.apply(&pod_with_share("guest", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("guest")?;
    tenant.delete_pods(&["guest"])?;
    nothing_left(&world)
}

/// No CDI spec, record, limits page or mount of a claim is on the node.
fn nothing_left(world: &World) -> Result<()> {
    let search = "find /var/run/cdi -name 'gpu.drava.dev-claim-*'; find /var/lib/drava/claims -mindepth 1; \
                  grep /run/drava/usage/ /proc/mounts; true";
    wait("the node holds nothing of a claim", || {
        let found = world.on_node("sh", &["-c", search])?;
        Ok(found.trim().is_empty().then_some(()))
    })
}
