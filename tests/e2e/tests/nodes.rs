//! Two nodes with different GPUs: two H100 on `node-0`, one T4 on `node-1`.

use anyhow::{Context as _, Result, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::pod_with_request;
use drava_e2e::{Namespace, TestCluster, wait};

/// A pod with a share of a GPU of the architecture.
fn pod_on(name: &str, architecture: &str) -> String {
    let expression = format!("device.attributes['gpu.drava.dev'].architecture == '{architecture}'");
    let exactly = format!(
        r#"{{deviceClassName: vgpu.drava.dev, capacity: {{requests: {{memory: 1Gi}}}}, selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
    );
    pod_with_request(name, &exactly, "")
}

fn node_of(tenant: &Namespace<'_>, pod: &str) -> Result<String> {
    tenant.kubectl(&["get", "pod", pod, "-o", "jsonpath={.spec.nodeName}"])
}

#[test]
fn places_pods_on_node_with_selected_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("select")?;
    let wanted = [
        ("Turing", "node-1", "Tesla T4"),
        ("Hopper", "node-0", "H100"),
    ];
    for (architecture, node, _) in wanted {
        tenant.apply(&pod_on(&format!("on-{node}"), architecture))?;
    }
    for (_, node, product) in wanted {
        let pod = &format!("on-{node}");
        tenant.running(pod)?;
        ensure!(node_of(&tenant, pod)? == node, "{pod} is not on {node}");
        let query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"];
        let name = tenant.exec(pod, "app", &query)?.success()?;
        ensure!(name.contains(product), "{pod} has {name}");
        ensure!(tenant.total_mib(pod)? == "1024", "{pod} has no limit");
    }
    Ok(())
}

#[test]
fn keeps_pods_with_anti_affinity_apart() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("apart")?;
    let rule = "affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: kubernetes.io/hostname, \
                labelSelector: {matchLabels: {app: apart}}}]}}";
    let exactly = "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 1Gi}}}";
    // Without the rule the controller packs both on one node.
    for name in ["first", "second"] {
        let kind = format!("kind: Pod\nmetadata: {{name: {name}}}\nspec:\n");
        let with_rule = format!(
            "kind: Pod\nmetadata: {{name: {name}, labels: {{app: apart}}}}\nspec:\n  {rule}\n"
        );
        let plain = pod_with_request(name, exactly, "");
        ensure!(plain.contains(&kind), "{plain}");
        tenant.apply(&plain.replace(&kind, &with_rule))?;
        tenant.running(name)?;
    }
    ensure!(
        node_of(&tenant, "first")? != node_of(&tenant, "second")?,
        "both pods are on one node"
    );
    let events = tenant.events("second")?;
    ensure!(
        !events
            .iter()
            .any(|event| event.contains("FailedScheduling")),
        "kube-scheduler refused a node: {events:?}"
    );
    Ok(())
}

#[test]
fn spreads_over_nodes_and_packs_gpus() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("mixed-policy")?;
    tenant.example("mixed-policy")?;
    let rollout = ["rollout", "status", "deployment/web", "--timeout=120s"];
    tenant.kubectl(&rollout)?;
    let pods = tenant.list("pods")?;
    let name = |pod: &serde_json::Value| pod["metadata"]["name"].as_str().map(str::to_owned);
    let mut on_first = Vec::new();
    for pod in pods.iter().filter_map(name) {
        if node_of(&tenant, &pod)? == "node-0" {
            on_first.push(tenant.devices_of(&pod)?);
        }
    }
    // The third replica takes less of node-0, with two GPUs of 80 GiB, than of node-1, with one of 16 GiB.
    ensure!(on_first.len() == 2, "{on_first:?} on node-0");
    ensure!(on_first[0] == on_first[1], "{on_first:?} are not packed");
    Ok(())
}

#[test]
fn outage_of_one_containerd_leaves_other_node_alone() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("outage")?;
    tenant.apply(&pod_on("before", "Turing"))?;
    tenant.running("before")?;
    let node = cluster.kubernetes().node("node-1")?;
    node.stop(Component::Containerd)?;
    let other = tenant
        .apply(&pod_on("other", "Hopper"))
        .and_then(|()| tenant.running("other"));
    let waits = tenant.apply(&pod_on("waits", "Turing")).and_then(|()| {
        wait("kubelet reports that containerd is down", || {
            let nodes = cluster.get(&["node", "node-1"])?;
            let conditions = nodes["status"]["conditions"].as_array();
            let mut ready = conditions.into_iter().flatten();
            Ok(ready
                .any(|condition| condition["type"] == "Ready" && condition["status"] == "False")
                .then_some(()))
        })
    });
    node.start(Component::Containerd)?;
    other?;
    waits?;
    tenant.running("waits")?;
    ensure!(node_of(&tenant, "waits")? == "node-1", "not on node-1");
    let before = tenant.find("pod", "before")?.context("pod before")?;
    ensure!(
        before["status"]["containerStatuses"][0]["restartCount"] == 0,
        "{before}"
    );
    ensure!(tenant.total_mib("before")? == "1024", "the limit is gone");
    Ok(())
}

#[test]
fn every_node_shows_files_of_its_own_machine() -> Result<()> {
    let cluster = TestCluster::attach()?;
    for (node, address) in [("node-0", "0000:1b:00.0"), ("node-1", "0000:00:1e.0")] {
        let node = cluster.kubernetes().node(node)?;
        let config = node.path("/proc/driver/nvidia/capabilities/mig/config".as_ref())?;
        let text = std::fs::read_to_string(&config)
            .with_context(|| format!("read {}", config.display()))?;
        ensure!(text.starts_with("DeviceFileMinor: 1\n"), "{text}");
        let devices = node.path("/opt/drava-sim/sys/bus/pci/devices".as_ref())?;
        ensure!(devices.join(address).join("vendor").exists(), "{address}");
    }
    Ok(())
}

#[test]
fn starts_pod_group_of_kubernetes_as_a_whole() -> Result<()> {
    let cluster = TestCluster::attach()?;
    if cluster
        .kubernetes()
        .status()?
        .kubernetes
        .starts_with("v1.36")
    {
        // The API is served since 1.37.
        return Ok(());
    }
    let tenant = cluster.namespace("pod-group")?;
    tenant.apply(
        "{apiVersion: scheduling.k8s.io/v1beta1, kind: PodGroup, metadata: {name: train}, spec: {schedulingPolicy: {gang: {minCount: 3}}}}",
    )?;
    let exactly = "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 1Gi}}}";
    let add = |name: &str| {
        let member = pod_with_request(name, exactly, "").replace(
            "terminationGracePeriodSeconds: 1\n",
            "terminationGracePeriodSeconds: 1\n  schedulingGroup: {podGroupName: train}\n",
        );
        tenant.apply(&member)
    };
    add("m-0")?;
    add("m-1")?;
    for member in ["m-0", "m-1"] {
        tenant.event(member, "WaitingForGang: gang train: 2 of 3 members exist")?;
        let claim = tenant.claim_of(member)?;
        let claim = tenant.find("resourceclaim", &claim)?.context("no claim")?;
        ensure!(claim["status"]["allocation"].is_null(), "{claim}");
    }
    add("m-2")?;
    for member in ["m-0", "m-1", "m-2"] {
        tenant.running(member)?;
    }
    Ok(())
}
