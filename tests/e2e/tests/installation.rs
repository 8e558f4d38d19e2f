//! The kustomization beside the chart, and nodes whose GPUs have another owner.

use anyhow::{Context as _, Result, ensure};
use drava_cluster::workspace_root;
use drava_e2e::doctor::patch;
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{TestCluster, wait};
use serde_json::{Value, json};

#[test]
fn kustomize_applies_the_objects_of_the_chart() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let path = |path: &str| workspace_root().join(path).display().to_string();
    let (chart, kustomization) = (path("deploy/helm/drava"), path("deploy/kustomize"));
    let template = [
        "template",
        "drava",
        &chart,
        "-n",
        "drava-system",
        "--no-hooks",
    ];
    let rendered = cluster.helm(template.iter().chain(&["--kube-version", "1.37.1"]))?;
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("chart.yaml");
    std::fs::write(&file, rendered)?;
    let file = file.display().to_string();
    // The API server accepts both, and they are the same objects.
    let names = |source: [&str; 2]| -> Result<Vec<String>> {
        let apply = [
            "apply",
            "--server-side",
            "--force-conflicts",
            "--dry-run=server",
            "-o",
            "name",
        ];
        let text = cluster.kubectl(apply.iter().chain(&source))?;
        let mut names: Vec<String> = text.lines().map(str::to_owned).collect();
        names.sort_unstable();
        Ok(names)
    };
    let of_chart = names(["-f", &file])?;
    let mut of_kustomize = names(["-k", &kustomization])?;
    of_kustomize.retain(|name| name != "namespace/drava-system");
    ensure!(of_chart == of_kustomize, "{of_chart:#?}\n{of_kustomize:#?}");
    ensure!(of_chart.len() > 20, "{of_chart:?}");
    Ok(())
}

/// Returns the devices that drava publishes.
fn devices(cluster: &TestCluster) -> Result<Vec<String>> {
    let selector = "spec.driver=gpu.drava.dev";
    let slices = cluster.get(&["resourceslices", "--field-selector", selector])?;
    let slices = slices["items"].as_array().into_iter().flatten();
    let devices =
        slices.flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
    let mut names: Vec<String> = devices
        .filter_map(|device| device["name"].as_str().map(str::to_owned))
        .collect();
    names.sort_unstable();
    Ok(names)
}

#[test]
fn gpus_of_a_device_plugin_are_not_published() -> Result<()> {
    let cluster = TestCluster::attach()?;
    cluster.drava_ready()?;
    let tenant = cluster.namespace("guard")?;
    tenant.apply(&pod_with_share("user", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("user")?;
    let all = devices(&cluster)?;
    let held = tenant.devices_of("user")?;
    let gpu = held.first().context("no device")?.trim_end_matches("-vgpu");
    let kept = [gpu.to_owned(), format!("{gpu}-vgpu")];
    let advertise = |amount: &Value| {
        let resources = json!({"nvidia.com/gpu": amount});
        let status = json!({"status": {"capacity": resources, "allocatable": resources}});
        let node = ["node", "node-0", "--subresource=status"];
        patch(&cluster, &node, "merge", &status)
    };
    advertise(&json!("2"))?;
    let withdrawn = (|| {
        // The GPU of a claim stays, with a taint.
        wait("drava withdraws the free GPUs", || {
            let present = devices(&cluster)?;
            Ok((present == kept).then_some(()))
        })?;
        wait("an event on the node names the device plugin", || {
            let events = cluster.get(&["events", "-A"])?;
            let mut messages = events["items"].as_array().into_iter().flatten();
            let is_named = |event: &Value| {
                event["reason"] == "GpuUnavailable"
                    && event["message"]
                        .as_str()
                        .is_some_and(|message| message.contains("a device plugin offers the GPUs"))
            };
            Ok(messages.any(is_named).then_some(()))
        })?;
        ensure!(
            tenant.total_mib("user")? == "1024",
            "the pod lost its limit"
        );
        tenant.apply(&pod_with_share("waits", "vgpu.drava.dev", "{memory: 1Gi}"))?;
        tenant.event("waits", "GpuUnschedulable")
    })();
    advertise(&Value::Null)?;
    withdrawn?;
    // Live, without a restart of the driver.
    wait("drava publishes all GPUs", || {
        Ok((devices(&cluster)? == all).then_some(()))
    })?;
    cluster.drava_ready()?;
    tenant.running("waits")
}
