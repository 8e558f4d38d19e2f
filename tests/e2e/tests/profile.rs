//! Node profiles change what a node offers while pods run.

use anyhow::{Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

/// A profile that is deleted with the value. The node then offers what it offered before.
struct Profile<'c> {
    cluster: &'c TestCluster,
    name: &'static str,
}

impl Profile<'_> {
    /// Creates or changes the profile. `spec` is a YAML flow mapping.
    fn set(&self, tenant: &Namespace<'_>, spec: &str) -> Result<()> {
        tenant.apply(&manifest(self.name, spec))
    }

    /// Waits until the entry of the node has this state and describes the present profile.
    fn await_state(&self, state: &str) -> Result<Value> {
        wait(&format!("profile {} is {state}", self.name), || {
            let profile = self.cluster.get(&["gpunodeprofile", self.name])?;
            let entry = &profile["status"]["nodes"][0];
            let is_current = entry["observedGeneration"] == profile["metadata"]["generation"];
            Ok((is_current && entry["state"] == state).then(|| entry.clone()))
        })
    }

    fn delete(&self) -> Result<()> {
        let delete = ["delete", "gpunodeprofile", self.name, "--ignore-not-found"];
        self.cluster.kubectl(delete)?;
        wait("the node offers its default again", || {
            let shares = shares(self.cluster)?;
            let is_default = |share: &Share| share.slots == "10" && share.taint.is_none();
            Ok((shares.len() == 2 && shares.iter().all(is_default)).then_some(()))
        })
    }
}

impl Drop for Profile<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.delete() {
            eprintln!("cannot delete profile {}: {error:#}", self.name);
        }
    }
}

fn manifest(name: &str, spec: &str) -> String {
    format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuNodeProfile, metadata: {{name: {name}}}, spec: {spec}}}"
    )
}

/// A published device with shares.
#[derive(Debug)]
struct Share {
    device: String,
    slots: String,
    /// Value of the taint `gpu.drava.dev/unhealthy`.
    taint: Option<String>,
}

/// Returns the published devices with shares.
fn shares(cluster: &TestCluster) -> Result<Vec<Share>> {
    let slices = cluster.get(&["resourceslices"])?;
    let slices = slices["items"].as_array().into_iter().flatten();
    let devices = slices.filter_map(|slice| slice["spec"]["devices"].as_array());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let share = |device: &Value| {
        let mut taints = device["taints"].as_array().into_iter().flatten();
        let taint = taints.find(|taint| taint["key"] == "gpu.drava.dev/unhealthy");
        Share {
            device: text(&device["name"]),
            slots: text(&device["capacity"]["slots"]["value"]),
            taint: taint.map(|taint| text(&taint["value"])),
        }
    };
    let shared = devices
        .flatten()
        .filter(|device| device["allowMultipleAllocations"] == true);
    Ok(shared.map(share).collect())
}

fn await_slots(cluster: &TestCluster, device: &str, slots: &str) -> Result<()> {
    wait(&format!("{slots} slots on {device}"), || {
        let shares = shares(cluster)?;
        let mut of_device = shares.iter().filter(|share| share.device == device);
        Ok(of_device
            .any(|share| share.slots == slots && share.taint.is_none())
            .then_some(()))
    })
}

#[test]
fn profile_changes_under_running_pod() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("profile")?;
    tenant.apply(&pod_with_share("runs", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    tenant.running("runs")?;
    let device = tenant.devices_of("runs")?.remove(0);
    let profile = Profile {
        cluster: &cluster,
        name: "e2e",
    };

    // More shares: at once, also on the GPU of the pod.
    profile.set(&tenant, "{splitCount: 20}")?;
    await_slots(&cluster, &device, "20")?;
    profile.await_state("Applied")?;

    // Fewer shares: the GPU of the pod waits, and gets no new allocation.
    profile.set(&tenant, "{splitCount: 1}")?;
    let entry = profile.await_state("Waiting")?;
    wait("only the GPU of the pod waits", || {
        let profile = cluster.get(&["gpunodeprofile", "e2e"])?;
        let waiting = profile["status"]["nodes"][0]["waiting"].clone();
        let devices: Vec<_> = waiting
            .as_array()
            .into_iter()
            .flatten()
            .map(|one| &one["device"])
            .collect();
        Ok((devices == [&device]).then_some(()))
    })?;
    ensure!(
        entry["waiting"][0]["reason"]
            .to_string()
            .contains("slots 20 to 1"),
        "{entry}"
    );
    tenant.apply(&pod_with_share(
        "elsewhere",
        "vgpu.drava.dev",
        "{memory: 2Gi}",
    ))?;
    tenant.running("elsewhere")?;
    ensure!(
        tenant.devices_of("elsewhere")? != [device.clone()],
        "allocated on a tainted device"
    );
    tenant.apply(&pod_with_share(
        "pending",
        "vgpu.drava.dev",
        "{memory: 2Gi}",
    ))?;
    tenant.event("pending", "0/1 nodes")?;
    let described = cluster.kubectl(["describe", "gpunodeprofile", "e2e"])?;
    ensure!(
        described.contains("ProfileWaiting"),
        "no event in\n{described}"
    );

    // The limits of the pod hold all the time.
    ensure!(tenant.total_mib("runs")? == "2048");
    let found = tenant.find("pod", "runs")?.unwrap_or_default();
    let restarts = &found["status"]["containerStatuses"][0]["restartCount"];
    ensure!(*restarts == 0, "the container was restarted");

    // The end of the pod lets the GPU change, and the next pod start.
    tenant.delete_pods(&["runs"])?;
    await_slots(&cluster, &device, "1")?;
    profile.await_state("Applied")?;
    tenant.running("pending")?;
    let columns = cluster.kubectl(["get", "gpunodeprofiles"])?;
    ensure!(
        columns.contains("APPLIED") && columns.contains("True"),
        "{columns}"
    );
    tenant.delete_pods(&["elsewhere", "pending"])?;
    profile.delete()
}

#[test]
fn overlapping_profiles_are_reported() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("profiles")?;
    let [first, second] = ["e2e-a", "e2e-b"].map(|name| Profile {
        cluster: &cluster,
        name,
    });
    second.set(&tenant, "{splitCount: 20}")?;
    second.await_state("Applied")?;
    first.set(&tenant, "{splitCount: 30}")?;
    first.await_state("Applied")?;
    let entry = second.await_state("Conflict")?;
    ensure!(entry["conflicts"][0] == "e2e-a", "{entry}");
    let described = cluster.kubectl(["describe", "gpunodeprofile", "e2e-b"])?;
    ensure!(
        described.contains("ProfileConflict"),
        "no event in\n{described}"
    );
    cluster.kubectl(["delete", "gpunodeprofile", "e2e-a"])?;
    second.await_state("Applied")?;
    second.delete()
}

#[test]
fn invalid_profiles_are_rejected_with_the_fix() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("invalid-profile")?;
    for (spec, expected) in [
        ("{mode: shared}", "Unsupported value"),
        (
            "{memoryScaling: 2}",
            "memoryScaling above 1 requires oversubscription",
        ),
        (
            "{devices: [{index: 0, memoryScaling: 2}]}",
            "memoryScaling above 1 requires oversubscription",
        ),
        ("{memoryScaling: 20}", "should be less than or equal to 10"),
        (
            "{coreScaling: 0.5, defaultCores: 60}",
            "defaultCores exceeds the GPU time",
        ),
        ("{splitCount: 0}", "greater than or equal to 1"),
        (
            "{devices: [{index: 0, uuid: GPU-a}]}",
            "exactly one of uuid, index and productName",
        ),
        (
            "{devices: [{splitCount: 2}]}",
            "exactly one of uuid, index and productName",
        ),
        ("{splitcount: 2}", "unknown field"),
    ] {
        let error = tenant.dry_run(&manifest("invalid", spec));
        let Err(error) = error else {
            anyhow::bail!("accepted {spec}");
        };
        let text = format!("{error:#}");
        ensure!(text.contains(expected), "{spec}: {text}");
    }
    let valid =
        "{memoryScaling: 2, oversubscription: spill, devices: [{index: 0, memoryScaling: 1.25}]}";
    tenant.dry_run(&manifest("valid", valid))?;
    Ok(())
}
