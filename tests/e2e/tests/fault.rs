//! Faults of the node: a wrong driver root, a machine without its daemon, a runtime that ignores CDI.

use anyhow::{Context, Result, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{World, wait};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");

fn set_driver_root(world: &World, root: &str) -> Result<()> {
    let value = format!("driver.driverRoot={root}");
    world.helm([
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

/// Names of the driver's pods that are ready.
fn ready_drivers(world: &World) -> Result<Vec<String>> {
    let pods = world.get(&[
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
    ensure!(!names.is_empty(), "no instance of the driver is ready");
    Ok(names)
}

#[test]
fn a_driver_root_without_libraries_says_where_it_looked() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("root")?;
    let values = world.helm(["-n", "drava-system", "get", "values", "drava", "-o", "json"])?;
    let values: serde_json::Value = serde_json::from_str(&values)?;
    let right = values["driver"]["driverRoot"]
        .as_str()
        .context("the installed driver root")?
        .to_owned();

    world.on_node("mkdir", &["-p", "/opt/empty/usr/lib"])?;
    set_driver_root(&world, "/opt/empty")?;
    let said = wait("an event on the node names the library", || {
        let events = world.get(&["events", "-A"])?;
        let messages = events["items"].as_array().into_iter().flatten();
        let mut messages = messages.filter(|event| event["involvedObject"]["kind"] == "Node");
        Ok(messages.find_map(|event| {
            let message = event["message"].as_str()?;
            message
                .contains("libnvidia-ml.so.1")
                .then(|| message.to_owned())
        }))
    });
    // The instance that works keeps the node for as long as it lives.
    let served = tenant
        .apply(&pod_with_share("served", "vgpu.drava.dev", "{memory: 1Gi}"))
        .and_then(|()| tenant.running("served"));
    // Then a pod reads the same as the node, and starts when the mistake is put right.
    let told = ready_drivers(&world)
        .and_then(|drivers| {
            let delete =
                ["-n", "drava-system", "delete", "pod", "--timeout=60s"].map(str::to_owned);
            world.kubectl(delete.into_iter().chain(drivers))
        })
        .and_then(|_| tenant.apply(&pod_with_share("waits", "vgpu.drava.dev", "{memory: 1Gi}")))
        .and_then(|()| tenant.event("waits", "libnvidia-ml.so.1"));

    set_driver_root(&world, &right)?;
    world.drava_ready()?;
    let said = said?;
    ensure!(
        said.contains("usr/lib"),
        "the event does not say where it looked: {said}"
    );
    served?;
    told?;
    tenant.running("waits")
}

#[test]
fn a_runtime_without_cdi_starts_nothing_and_says_so() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("cdi")?;
    let config = world.cluster().state().join("config/containerd.toml");
    let on =
        std::fs::read_to_string(&config).with_context(|| format!("read {}", config.display()))?;
    let off = on.replace("enable_cdi = true", "enable_cdi = false");
    ensure!(on != off, "{on}");

    std::fs::write(&config, off)?;
    let told = world
        .cluster()
        .restart(Component::Containerd)
        .and_then(|()| {
            tenant.apply(&pod_with_share("blind", "vgpu.drava.dev", "{memory: 1Gi}"))?;
            // The words are those of containerd 2.3.
            tenant.event("blind", "CDI support is explicitly disabled")
        });
    std::fs::write(&config, on)?;
    world.cluster().restart(Component::Containerd)?;
    told?;
    tenant.running("blind")
}
