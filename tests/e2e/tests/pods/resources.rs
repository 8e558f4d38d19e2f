//! CPU and memory of pods with a share: in-place resize, static CPU manager.

use anyhow::{Context as _, Result, ensure};
use drava_cluster::Component;
use drava_e2e::{TestCluster, TestNode, wait};
use serde_json::json;

use super::{
    HELD_MIB, SHARE_MIB, SLEEP, container, free_mib, hold, is_limited, restarts, run, status,
};

#[test]
fn resize_of_cpu_and_memory_keeps_share() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("resize")?;
    let amounts = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu, "memory": "64Mi"}, "limits": {"cpu": cpu, "memory": memory}});
    let mut resources = amounts("100m", "512Mi");
    resources["claims"] = json!([{"name": "gpu"}]);
    let fields = format!("resources: {resources}");
    run(
        &tenant,
        "app",
        &format!("containers: [{}]", container("app", &hold(), &fields)),
    )?;
    let held = || {
        wait("the memory of the program is charged", || {
            let free = free_mib(&tenant, "app", "app")?;
            Ok((free <= SHARE_MIB - HELD_MIB).then_some(free))
        })
    };
    let before = held()?;
    let resized = json!({"name": "app", "resources": amounts("200m", "768Mi")});
    let patch = json!({"spec": {"containers": [resized]}}).to_string();
    tenant.kubectl(&["patch", "pod", "app", "--subresource=resize", "-p", &patch])?;
    wait("the container has its new resources", || {
        let limits = status(&tenant, "app", "app")?["resources"]["limits"].clone();
        Ok((limits["cpu"] == "200m" && limits["memory"] == "768Mi").then_some(()))
    })?;
    ensure!(
        held()? == before,
        "the resize changed the memory of the program"
    );
    is_limited(&tenant, "app", "app")?;
    ensure!(
        restarts(&tenant, "app", "app")? == 0,
        "the container was restarted"
    );
    Ok(())
}

/// Kubelet's configuration, and a copy of it.
const CONFIG: &str = "/cluster/config/kubelet.json";
const SAVED: &str = "/cluster/config/kubelet.json.saved";

/// Restarts kubelet with a change of its files: kubelet rejects the state of another policy.
fn restart_kubelet(cluster: &TestCluster, node: &TestNode, change: &str) -> Result<()> {
    let kubelet = cluster.kubernetes().control_plane();
    kubelet.stop(Component::Kubelet)?;
    let script = format!("{change}; rm -f /var/lib/kubelet/cpu_manager_state");
    let changed = node.run("sh", &["-euc", &script]);
    kubelet.start(Component::Kubelet)?;
    changed.map(drop)
}

#[test]
fn limits_pod_with_a_cpu_of_its_own() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("static-cpu")?;
    let node = cluster.first_node();
    let config: serde_json::Value = serde_json::from_str(&node.run("cat", &[CONFIG])?)?;
    let mut with_policy = config.clone();
    with_policy["cpuManagerPolicy"] = "static".into();
    // Kubelet keeps whole CPUs for it.
    with_policy["kubeReserved"] = json!({"cpu": "100m"});
    let change = format!("cp {CONFIG} {SAVED}; cat > {CONFIG} <<'EOF'\n{with_policy}\nEOF\n:");
    let tested = restart_kubelet(&cluster, &node, &change).and_then(|()| {
        let fields =
            "resources: {claims: [{name: gpu}], requests: {cpu: 1, memory: 256Mi}, limits: {cpu: 1, memory: 256Mi}}";
        run(&tenant, "app", &format!("containers: [{}]", container("app", SLEEP, fields)))?;
        let allowed = tenant.exec("app", "app", &["grep", "Cpus_allowed_list", "/proc/1/status"])?;
        let allowed = allowed.success()?;
        let cpus = allowed.split_whitespace().nth(1).context("Cpus_allowed_list")?;
        ensure!(cpus.parse::<u32>().is_ok(), "the pod has the CPUs {cpus}");
        is_limited(&tenant, "app", "app")?;
        tenant.delete_pods(&["app"])
    });
    restart_kubelet(&cluster, &node, &format!("mv {SAVED} {CONFIG}"))?;
    cluster.drava_ready()?;
    tested
}
