//! MIG partitions of the A100 and the A30 of `node-1`, which are in MIG mode, and of an H100 of `node-0`, which switches it.

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_with_request;
use drava_e2e::{Namespace, TestCluster, wait};

mod filling;
mod mig_mode;

const NODE: &str = "node-1";
/// Index and minor number of the A100.
const GPU: usize = 1;
/// Delay of each answer of NVML about the A100 during which the driver is to be killed. Prepare and unprepare of a partition
/// have dozens of them after the record is written and before it is removed, so both take longer than a check of the files.
const DELAY_MILLISECONDS: &str = "200";

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
        Ok(node.mig_instances(GPU)?.is_empty().then_some(()))
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

#[test]
fn leaves_foreign_instance_alone() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("foreign")?;
    let node = cluster.node(NODE)?;
    // The instance is newer than the last scan of the node driver: prepare detects it.
    ensure!(node.signal("drava-dra-driver", "STOP")? > 0, "no driver");
    // As an administrator does with nvidia-smi, on the placement that the controller prefers.
    let create = "create-instance --gpu 1 --profile 19 --start 6";
    node.simulator(&create.split(' ').collect::<Vec<_>>())?;
    let foreign = node.mig_instances(GPU)?;
    let placed = tenant
        .apply(&pod_with_memory("early", "3000Mi"))
        .and_then(|()| device_of(&tenant, "early"));
    node.signal("drava-dra-driver", "CONT")?;
    let tried = placed.and_then(|device| {
        ensure!(device == "gpu-1-mig-1g-5gb-6", "{device}");
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
            Ok((node.mig_instances(GPU)? == foreign).then_some(()))
        })
    });
    let id = foreign[0]["id"].to_string();
    node.simulator(&["destroy-instance", "--gpu", "1", "--instance", &id])?;
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
    // Each step that uses NVML takes seconds, the search for the instances before and after the record included.
    let delay = |milliseconds: &str| {
        let gpu = GPU.to_string();
        let delay = ["--delay-milliseconds", milliseconds];
        node.simulator(&[&["break", "--gpu", &gpu], &delay[..]].concat())
            .map(drop)
    };
    // Killed while it prepares.
    let pods = ["during-0", "during-1", "during-2"];
    delay(DELAY_MILLISECONDS)?;
    let killed = tenant
        .apply(&pod_with_memory(pods[0], "3000Mi"))
        .and_then(|()| tenant.allocated_claim_of(pods[0]))
        .and_then(|claim| node.kill_driver_amid_claims(&[&claim.uid], || delay("0")));
    delay("0")?;
    killed?;
    // The other preparations begin with the restart.
    for pod in &pods[1..] {
        tenant.apply(&pod_with_memory(pod, "3000Mi"))?;
    }
    for pod in pods {
        tenant.running(pod)?;
        sees_only(&tenant, pod, "1g.5gb")?;
    }
    ensure!(node.mig_instances(GPU)?.len() == 4, "an instance leaked");
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
    let claim = tenant.allocated_claim_of("before")?;
    delay(DELAY_MILLISECONDS)?;
    let killed = tenant
        .kubectl(&delete)
        .and_then(|_| node.kill_driver_amid_claims(&[&claim.uid], || delay("0")));
    delay("0")?;
    killed?;
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
