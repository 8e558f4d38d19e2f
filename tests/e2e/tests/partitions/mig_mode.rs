//! MIG mode of GPUs, which follows the claims or names the commands of the administrator.

use anyhow::{Result, ensure};
use drava_e2e::manifest::pod_with_request;
use drava_e2e::{TestCluster, wait};
use serde_json::Value;

use crate::filling::Partitioned;
use crate::{GPU, NODE, total_mib};

/// Node with two H100, which switch MIG mode without a reset.
const HOPPER: &str = "node-0";

/// Returns a pod with a device of the class on an H100.
fn on_hopper(name: &str, class: &str, more: &str) -> String {
    let expression = "device.attributes['gpu.drava.dev'].architecture == 'Hopper' && device.attributes['gpu.drava.dev'].index == 0";
    let exactly = format!(
        r#"{{deviceClassName: {class}, {more} selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
    );
    pod_with_request(name, &exactly, "")
}

/// Deletes the profile with the value, and waits until no claim can be allocated to a partition of the H100.
struct DynamicMode<'c>(&'c TestCluster);

impl DynamicMode<'_> {
    fn end(&self) -> Result<()> {
        let delete = ["delete", "gpunodeprofile", "dynamic", "--ignore-not-found"];
        self.0.kubectl(delete)?;
        wait("no partition of the H100 is offered", || {
            let slices = self.0.get(&["resourceslices"])?;
            let slices = slices["items"].as_array().into_iter().flatten();
            let mut devices = slices
                .filter(|slice| slice["spec"]["nodeName"] == HOPPER)
                .filter_map(|slice| slice["spec"]["devices"].as_array())
                .flatten();
            let is_offered = |device: &Value| {
                let taints = device["taints"].as_array().into_iter().flatten();
                let name = device["name"].as_str().unwrap_or_default();
                // The devices that claims may hold are retained for a while.
                let mut reasons = taints.filter(|taint| taint["key"] != "gpu.drava.dev/managed");
                name.contains("-mig-") && reasons.next().is_none()
            };
            Ok((!devices.any(is_offered)).then_some(()))
        })
    }
}

impl Drop for DynamicMode<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("the profile has not ended: {error:#}");
        }
    }
}

/// Returns the start times of the containers of a node's driver.
fn driver_starts(cluster: &TestCluster, node: &str) -> Result<String> {
    // An earlier test may have killed the driver of another node.
    let node = format!("spec.nodeName={node}");
    let path = "jsonpath={.items[*].status.containerStatuses[*].state.running.startedAt}";
    let pods = [
        "get",
        "pods",
        "-n",
        "drava-system",
        "-l",
        "app.kubernetes.io/component=driver",
        "--field-selector",
        &node,
        "-o",
        path,
    ];
    cluster.kubectl(pods)
}

#[test]
fn mig_mode_follows_claims_of_one_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("dynamic")?;
    let starts = driver_starts(&cluster, HOPPER)?;
    let _profile = DynamicMode(&cluster);
    tenant.apply(&format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuNodeProfile, metadata: {{name: dynamic}}, spec: {{nodeSelector: {{kubernetes.io/hostname: {HOPPER}}}, mode: dynamic}}}}"
    ))?;
    wait("the node publishes partitions of the H100", || {
        let slices = cluster.get(&["resourceslices"])?;
        Ok(slices
            .to_string()
            .contains("gpu-0-mig-1g-10gb-6")
            .then_some(()))
    })?;
    let h100 = Partitioned {
        node: HOPPER,
        gpu: 0,
        product: "H100",
        small: "1g.10gb",
        count: 7,
        large: "3g.40gb",
        slices: 4,
    };
    h100.fills_fragments_and_refills(&cluster, "h100")?;
    let node = cluster.node(HOPPER)?;
    let share = on_hopper(
        "share",
        "vgpu.drava.dev",
        "capacity: {requests: {memory: 8Gi}},",
    );
    let partition = on_hopper(
        "partition",
        "mig.drava.dev",
        "capacity: {requests: {memory: 8Gi}},",
    );
    let whole = on_hopper("whole", "gpu.drava.dev", "");

    tenant.apply(&share)?;
    tenant.running("share")?;
    ensure!(
        tenant.total_mib("share")? == "8192",
        "the share has no limit"
    );
    ensure!(node.mig_instances(0)?.is_empty());
    // The GPU is shared: the partition waits.
    tenant.apply(&partition)?;
    tenant.event("partition", "ExclusiveConflict")?;
    tenant.delete_pods(&["share"])?;
    tenant.running("partition")?;
    let list = tenant
        .exec("partition", "app", &["nvidia-smi", "-L"])?
        .success()?;
    ensure!(list.contains("MIG 1g.10gb"), "the pod sees\n{list}");
    ensure!(node.mig_instances(0)?.len() == 1);
    // The GPU is partitioned: the whole GPU waits.
    tenant.apply(&whole)?;
    tenant.event("whole", "ExclusiveConflict")?;
    tenant.delete_pods(&["partition"])?;
    tenant.running("whole")?;
    let list = tenant
        .exec("whole", "app", &["nvidia-smi", "-L"])?
        .success()?;
    ensure!(
        list.contains("H100") && !list.contains("MIG"),
        "the pod sees\n{list}"
    );
    ensure!(total_mib(&tenant, "whole")? > 80_000);
    tenant.delete_pods(&["whole"])?;
    let share = on_hopper(
        "again",
        "vgpu.drava.dev",
        "capacity: {requests: {memory: 8Gi}},",
    );
    tenant.apply(&share)?;
    tenant.running("again")?;
    ensure!(
        tenant.total_mib("again")? == "8192",
        "the share has no limit"
    );
    tenant.delete_pods(&["again"])?;
    node.wait_until_clean()?;
    ensure!(
        driver_starts(&cluster, HOPPER)? == starts,
        "the node driver was restarted"
    );
    Ok(())
}

#[test]
fn mig_mode_that_needs_a_reset_names_commands() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("reset")?;
    let _profile = DynamicMode(&cluster);
    // The A100 is in MIG mode, and switches it at a reset only.
    tenant.apply(&format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuNodeProfile, metadata: {{name: dynamic}}, spec: {{nodeSelector: {{kubernetes.io/hostname: {NODE}}}, devices: [{{index: {GPU}, mode: vgpu}}]}}}}"
    ))?;
    wait("the condition ResetRequired", || {
        let profile = cluster.get(&["gpunodeprofile", "dynamic"])?;
        let mut conditions = profile["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten();
        let condition = conditions.find(|condition| condition["type"] == "ResetRequired");
        let message = condition.filter(|condition| condition["status"] == "True");
        let message = message.and_then(|condition| condition["message"].as_str());
        Ok(message
            .is_some_and(|message| {
                message.contains("node-1, gpu-1: ")
                    && message.contains("`nvidia-smi -mig 0 -i GPU-")
                    && message.contains("`nvidia-smi --gpu-reset -i GPU-")
            })
            .then_some(()))
    })?;
    Ok(())
}
