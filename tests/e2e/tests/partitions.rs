//! MIG partitions of the A100 and the A30 of `node-1`, which are in MIG mode, and of an H100 of `node-0`, which switches it.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_with_request;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

const NODE: &str = "node-1";
/// Index and minor number of the A100.
const CARD: usize = 1;

/// A pod with a partition of the A100 of the smallest profile that holds the memory.
fn pod_with_memory(name: &str, memory: &str) -> String {
    let expression = "device.attributes['gpu.drava.dev'].productName.contains('A100')";
    let exactly = format!(
        r#"{{deviceClassName: mig.drava.dev, capacity: {{requests: {{memory: {memory}}}}}, selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
    );
    pod_with_request(name, &exactly, "")
}

/// A pod with a partition of the profile.
fn pod_with_profile(name: &str, profile: &str) -> String {
    let expression = format!("device.attributes['gpu.drava.dev'].profile == '{profile}'");
    let exactly = format!(
        r#"{{deviceClassName: mig.drava.dev, selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
    );
    pod_with_request(name, &exactly, "")
}

/// Returns the device of the pod.
fn device_of(tenant: &Namespace<'_>, pod: &str) -> Result<String> {
    let devices = tenant.devices_of(pod)?;
    ensure!(devices.len() == 1, "{pod} has {devices:?}");
    Ok(devices.concat())
}

/// Checks that the pod has a partition of the profile and sees nothing else of the node's GPUs. Returns the UUID of the
/// partition.
fn sees_only(tenant: &Namespace<'_>, pod: &str, profile: &str) -> Result<String> {
    let list = tenant.exec(pod, "app", &["nvidia-smi", "-L"])?.success()?;
    let lines: Vec<&str> = list.lines().map(str::trim).collect();
    let [gpu, partition] = lines[..] else {
        anyhow::bail!("{pod} sees\n{list}")
    };
    ensure!(gpu.contains("A100"), "{pod} sees\n{list}");
    ensure!(
        partition.starts_with(&format!("MIG {profile} ")),
        "{pod} sees\n{list}"
    );
    let (_, uuid) = partition.split_once("UUID: ").context("no UUID")?;
    Ok(uuid.trim_end_matches(')').to_owned())
}

/// Returns the memory in MiB that a program in the container sees.
fn total_mib(tenant: &Namespace<'_>, pod: &str) -> Result<u64> {
    let probe = ["cuda-probe", "info", "-o", "json"];
    let info = tenant.exec(pod, "app", &probe)?.json()?;
    let devices = info["devices"].as_array().context("devices")?;
    ensure!(devices.len() == 1, "{info}");
    Ok(info["devices"][0]["totalBytes"].as_u64().context("total")? >> 20)
}

/// Waits until no MIG instance and no state of a claim is on the node.
fn wait_until_clean(cluster: &TestCluster) -> Result<()> {
    let node = cluster.node(NODE)?;
    wait("the GPU has no instance", || {
        Ok(node.mig_instances(CARD)?.is_empty().then_some(()))
    })?;
    node.wait_until_clean()
}

#[test]
fn gives_smallest_partition_that_holds_memory() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("by-memory")?;
    tenant.example("mig-by-memory")?;
    let mut partitions = Vec::new();
    for pod in ["first", "second"] {
        tenant.running(pod)?;
        let device = device_of(&tenant, pod)?;
        ensure!(device.starts_with("gpu-1-mig-1g-5gb-"), "{device}");
        partitions.push(sees_only(&tenant, pod, "1g.5gb")?);
        ensure!(total_mib(&tenant, pod)? == 4864, "{pod}: another size");
        let table = tenant.exec(pod, "app", &["nvidia-smi"])?.success()?;
        ensure!(table.contains("4864MiB"), "{pod} sees\n{table}");
    }
    ensure!(
        partitions[0] != partitions[1],
        "both pods have {partitions:?}"
    );
    // Each uses all of its partition at the same time, without libvgpu.
    for pod in ["first", "second"] {
        ensure!(tenant.fill(pod, 0)? > 4000, "{pod} cannot use its memory");
        let preload = tenant.exec(pod, "app", &["cat", "/etc/ld.so.preload"])?;
        ensure!(preload.code != 0, "libvgpu is loaded: {}", preload.stdout);
    }
    let claim = tenant.claim_of("first")?;
    wait("the claim's status names the partition", || {
        let found = tenant.find("resourceclaim", &claim)?.context("no claim")?;
        Ok(
            (found["status"]["devices"][0]["data"]["migUuid"] == partitions[0].as_str())
                .then_some(()),
        )
    })?;
    tenant.delete_pods(&["first", "second"])?;
    wait_until_clean(&cluster)
}

#[test]
fn gives_partition_of_selected_profile() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("by-profile")?;
    tenant.example("mig-by-profile")?;
    tenant.running("partitioned")?;
    sees_only(&tenant, "partitioned", "3g.20gb")?;
    ensure!(total_mib(&tenant, "partitioned")? == 19968, "another size");
    // An amount that no partition has.
    tenant.apply(&pod_with_memory("giant", "50Gi"))?;
    let why = tenant.event("giant", "InsufficientMemory")?;
    ensure!(
        why.contains("exceeds the largest GPU, 39.2 GiB on node-1/gpu-1-mig-7g-40gb-0"),
        "{why}"
    );
    tenant.delete_pods(&["partitioned"])?;
    wait_until_clean(&cluster)
}

/// A full GPU queues the next pod. Free slices that do not adjoin hold no larger partition; once they adjoin, they do.
#[test]
fn fills_and_refills_fragmented_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("fragments")?;
    let names: Vec<String> = (0..7).map(|index| format!("pod-{index}")).collect();
    let manifests: Vec<String> = names
        .iter()
        .map(|name| pod_with_memory(name, "3000Mi"))
        .collect();
    tenant.apply(&manifests.join("\n---\n"))?;
    // Pods by the first slice of their partitions.
    let mut pods = BTreeMap::new();
    for name in &names {
        tenant.running(name)?;
        let device = device_of(&tenant, name)?;
        let start = device.strip_prefix("gpu-1-mig-1g-5gb-").context("start")?;
        pods.insert(start.parse::<u32>()?, name.clone());
    }
    ensure!(pods.len() == 7, "{pods:?}");
    ensure!(cluster.node(NODE)?.mig_instances(CARD)?.len() == 7);

    tenant.apply(&pod_with_memory("next", "3000Mi"))?;
    let why = tenant.event("next", "ExclusiveConflict")?;
    ensure!(
        why.contains("0/2 nodes")
            && why.contains("node-1/gpu-1 has no free slices for the partition"),
        "{why}"
    );
    let mut end = |start: u32| -> Result<()> {
        let pod = pods.remove(&start).context("no pod")?;
        tenant.delete_pods(&[&pod])
    };
    end(4)?;
    tenant.running("next")?;
    ensure!(device_of(&tenant, "next")? == "gpu-1-mig-1g-5gb-4");

    // Slices 1, 3 and 5.
    for start in [1, 3, 5] {
        end(start)?;
    }
    tenant.apply(&pod_with_profile("half", "3g.20gb"))?;
    tenant.event("half", "has no free slices for the partition")?;
    // Slices 4 to 7.
    tenant.delete_pods(&["next"])?;
    end(6)?;
    tenant.running("half")?;
    ensure!(device_of(&tenant, "half")? == "gpu-1-mig-3g-20gb-4");
    sees_only(&tenant, "half", "3g.20gb")?;
    // Slices 1 and 3 are free still.
    for name in ["refill-0", "refill-1"] {
        tenant.apply(&pod_with_memory(name, "3000Mi"))?;
    }
    for name in ["refill-0", "refill-1"] {
        tenant.running(name)?;
    }
    cluster.check_allocations()?;
    tenant.kubectl(&[
        "delete",
        "pods",
        "--all",
        "--grace-period=1",
        "--timeout=90s",
    ])?;
    wait_until_clean(&cluster)
}

/// A GPU with partitions, and two of its profiles.
struct Partitioned {
    node: &'static str,
    /// Index and minor number.
    card: usize,
    /// Part of the product name.
    product: &'static str,
    small: &'static str,
    /// Number of small partitions on the GPU.
    count: usize,
    large: &'static str,
    /// Slices of the large profile.
    slices: usize,
}

impl Partitioned {
    /// A pod with a partition of the profile.
    fn pod(&self, name: &str, profile: &str) -> String {
        let gpu = "device.attributes['gpu.drava.dev']";
        let expression = format!(
            "{gpu}.profile == '{profile}' && {gpu}.productName.contains('{}') && {gpu}.index == {}",
            self.product, self.card
        );
        let exactly = format!(
            r#"{{deviceClassName: mig.drava.dev, selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
        );
        pod_with_request(name, &exactly, "")
    }

    fn device(&self, profile: &str, start: usize) -> String {
        let profile = profile.replace('.', "-");
        format!("gpu-{}-mig-{profile}-{start}", self.card)
    }

    /// Fills the GPU, frees slices that do not adjoin, then slices that do, and fills it again.
    fn fills_fragments_and_refills(&self, cluster: &TestCluster, name: &str) -> Result<()> {
        let tenant = cluster.namespace(name)?;
        let node = cluster.node(self.node)?;
        let names: Vec<String> = (0..self.count)
            .map(|index| format!("pod-{index}"))
            .collect();
        let pods: Vec<String> = names
            .iter()
            .map(|name| self.pod(name, self.small))
            .collect();
        tenant.apply(&pods.join("\n---\n"))?;
        let mut by_start = BTreeMap::new();
        for name in &names {
            tenant.running(name)?;
            let device = device_of(&tenant, name)?;
            let start = (0..self.count).find(|&start| device == self.device(self.small, start));
            by_start.insert(start.with_context(|| device.clone())?, name.clone());
        }
        ensure!(by_start.len() == self.count, "{by_start:?}");
        ensure!(node.mig_instances(self.card)?.len() == self.count);
        let list = tenant
            .exec("pod-0", "app", &["nvidia-smi", "-L"])?
            .success()?;
        ensure!(
            list.lines().count() == 2 && list.contains(&format!("MIG {} ", self.small)),
            "pod-0 sees\n{list}"
        );

        let mut end = |start: usize| -> Result<()> {
            let pod = by_start.remove(&start).context("no pod")?;
            tenant.delete_pods(&[&pod])
        };
        for start in (1..self.count).step_by(2) {
            end(start)?;
        }
        tenant.apply(&self.pod("large", self.large))?;
        tenant.event("large", "has no free slices for the partition")?;
        for start in (0..self.slices).step_by(2) {
            end(start)?;
        }
        tenant.running("large")?;
        ensure!(device_of(&tenant, "large")? == self.device(self.large, 0));
        tenant.apply(&self.pod("refill", self.small))?;
        tenant.running("refill")?;
        cluster.check_allocations()?;
        tenant.kubectl(&[
            "delete",
            "pods",
            "--all",
            "--grace-period=1",
            "--timeout=90s",
        ])?;
        wait("the GPU has no instance", || {
            Ok(node.mig_instances(self.card)?.is_empty().then_some(()))
        })?;
        node.wait_until_clean()
    }
}

#[test]
fn fills_and_refills_a30() -> Result<()> {
    let a30 = Partitioned {
        node: NODE,
        card: 2,
        product: "A30",
        small: "1g.6gb",
        count: 4,
        large: "2g.12gb",
        slices: 2,
    };
    a30.fills_fragments_and_refills(&TestCluster::attach()?, "a30")
}

#[test]
fn leaves_foreign_instance_alone() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("foreign")?;
    let node = cluster.node(NODE)?;
    // As an administrator does with nvidia-smi, on the placement that the controller prefers.
    let create = "create-instance --card 1 --profile 19 --start 6";
    node.simulator(&create.split(' ').collect::<Vec<_>>())?;
    let foreign = node.mig_instances(CARD)?;
    let tried = (|| {
        // The instance is newer than the last scan of the node driver: prepare detects it.
        tenant.apply(&pod_with_memory("early", "3000Mi"))?;
        tenant.event("early", "which drava did not create")?;
        // A scan taints the devices that the instance excludes.
        node.signal("drava-dra-driver", "KILL")?;
        tenant.apply(&pod_with_profile("whole", "7g.40gb"))?;
        tenant.event("whole", "foreign-mig-instance")?;
        tenant.apply(&pod_with_memory("other", "3000Mi"))?;
        tenant.running("other")?;
        ensure!(device_of(&tenant, "other")? != "gpu-1-mig-1g-5gb-6");
        tenant.delete_pods(&["other"])?;
        cluster.wait_for_faults(&["ForeignInstance", "PrepareFailed"])?;
        wait("only the foreign instance exists", || {
            Ok((node.mig_instances(CARD)? == foreign).then_some(()))
        })
    })();
    let id = foreign[0]["id"].to_string();
    node.simulator(&["destroy-instance", "--card", "1", "--instance", &id])?;
    tried?;
    // Kubelet repeats prepare.
    tenant.running("early")?;
    tenant.delete_pods(&["early", "whole"])?;
    wait_until_clean(&cluster)?;
    node.signal("drava-dra-driver", "KILL")?;
    wait("the devices have no taint of the instance", || {
        let slices = cluster.get(&["resourceslices"])?;
        Ok((!slices.to_string().contains("foreign-mig-instance")).then_some(()))
    })?;
    cluster.wait_for_faults(&[])?;
    Ok(())
}

#[test]
fn partitions_survive_driver_crashes() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("crash")?;
    let node = cluster.node(NODE)?;
    tenant.apply(&pod_with_memory("before", "3000Mi"))?;
    tenant.running("before")?;
    let partition = sees_only(&tenant, "before", "1g.5gb")?;
    // Killed while it prepares.
    let pods = ["during-0", "during-1", "during-2"];
    let mut killed = 0;
    for pod in pods {
        tenant.apply(&pod_with_memory(pod, "3000Mi"))?;
        killed += node.signal("drava-dra-driver", "KILL")?;
    }
    ensure!(killed > 0, "no driver process on the node");
    for pod in pods {
        tenant.running(pod)?;
        sees_only(&tenant, pod, "1g.5gb")?;
    }
    ensure!(node.mig_instances(CARD)?.len() == 4, "an instance leaked");
    ensure!(sees_only(&tenant, "before", "1g.5gb")? == partition);
    tenant.fill("before", 0)?;
    let before = tenant.find("pod", "before")?.context("pod before")?;
    ensure!(
        before["status"]["containerStatuses"][0]["restartCount"] == 0,
        "{before}"
    );
    // Killed while it unprepares.
    let delete = [
        "delete",
        "pods",
        "--all",
        "--grace-period=1",
        "--wait=false",
    ];
    tenant.kubectl(&delete)?;
    node.signal("drava-dra-driver", "KILL")?;
    wait_until_clean(&cluster)
}

#[test]
fn fraction_takes_partition_of_partitioned_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("fraction")?;
    let fraction = |name: &str, product: &str| {
        let expression =
            format!("device.attributes['gpu.drava.dev'].productName.contains('{product}')");
        let exactly = format!(
            r#"{{deviceClassName: fraction.drava.dev, capacity: {{requests: {{memory: 3000Mi}}}}, selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
        );
        pod_with_request(name, &exactly, "")
    };
    // A GPU in MIG mode, and one with shares.
    tenant.apply(&fraction("partition", "A100"))?;
    tenant.apply(&fraction("share", "T4"))?;
    tenant.running("partition")?;
    sees_only(&tenant, "partition", "1g.5gb")?;
    tenant.running("share")?;
    ensure!(device_of(&tenant, "share")? == "gpu-0-vgpu");
    ensure!(
        total_mib(&tenant, "share")? == 3000,
        "the share has no limit"
    );
    tenant.delete_pods(&["partition", "share"])?;
    wait_until_clean(&cluster)
}

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
        card: 0,
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
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuNodeProfile, metadata: {{name: dynamic}}, spec: {{nodeSelector: {{kubernetes.io/hostname: {NODE}}}, devices: [{{index: {CARD}, mode: vgpu}}]}}}}"
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
