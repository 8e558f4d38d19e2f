//! Other owners of the GPUs, which come and go while the driver runs.

use std::time::Duration;

use drava_dra_driver::driver::Config;
use drava_dra_driver::publish::profile::Guard;
use drava_dra_driver::report::conditions::Condition;
use drava_fake_kubelet::Plugin;
use serde_json::json;

use crate::api_server::eventually;
use crate::cluster::{Running, TestCluster};
use crate::fixture::{GPU_UUIDS, NODE};
use crate::node::lacks_device_files;

const ALL: [&str; 4] = ["gpu-0", "gpu-0-vgpu", "gpu-1", "gpu-1-vgpu"];

async fn start(cluster: &TestCluster, guard: Guard) -> (Running, Plugin) {
    let config = Config {
        retained_grace: Duration::ZERO,
        guard,
        ..cluster.config()
    };
    let running = cluster.start_with(config, cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    (running, plugin)
}

/// Waits until drava publishes exactly these devices.
async fn await_devices(cluster: &TestCluster, expected: &[&str]) {
    eventually(&format!("devices {expected:?}"), || {
        let slices = cluster.api.slices();
        let own = slices
            .values()
            .filter(|slice| slice["spec"]["driver"] == "gpu.drava.dev");
        let mut names: Vec<_> = own
            .filter_map(|slice| slice["spec"]["devices"].as_array())
            .flatten()
            .filter_map(|device| device["name"].as_str().map(str::to_owned))
            .collect();
        names.sort_unstable();
        (names == expected).then_some(())
    })
    .await;
}

async fn await_event(cluster: &TestCluster, text: &str) {
    eventually(text, || {
        let events = cluster.api.events();
        let mut notes = events.iter().map(|(_, note)| note);
        notes.any(|note| note.contains(text)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdraws_devices_while_plugin_offers_gpus() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = start(&cluster, Guard::Refuse).await;
    running.await_ready().await;
    await_devices(&cluster, &ALL).await;
    cluster.prepare_shares(&plugin, &[1]).await;

    cluster
        .api
        .set_allocatable(NODE, &json!({"nvidia.com/gpu": "2", "cpu": "8"}));
    running
        .await_unmet(
            Condition::Exclusive,
            "a device plugin offers nvidia.com/gpu",
        )
        .await;
    await_event(&cluster, "a device plugin offers the GPUs of this node").await;
    // The claim keeps its device.
    await_devices(&cluster, &["gpu-0", "gpu-0-vgpu"]).await;

    // kubelet after the end of the plugin.
    cluster
        .api
        .set_allocatable(NODE, &json!({"nvidia.com/gpu": "0", "cpu": "8"}));
    running.await_ready().await;
    await_devices(&cluster, &ALL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_only_gpus_without_other_driver() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "spec": {
            "driver": "gpu.nvidia.com", "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": GPU_UUIDS[0]}}}],
        },
    });
    // Before the driver starts: its GPUs never appear.
    cluster.api.put_slice("other", slice);
    let (running, _plugin) = start(&cluster, Guard::Refuse).await;
    running
        .await_unmet(Condition::Exclusive, "DRA driver gpu.nvidia.com publishes")
        .await;
    await_devices(&cluster, &["gpu-1", "gpu-1-vgpu"]).await;

    cluster.api.delete_slice("other");
    running.await_ready().await;
    await_devices(&cluster, &ALL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ignores_other_owners_on_request() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    cluster
        .api
        .set_allocatable(NODE, &json!({"nvidia.com/gpu": "2"}));
    let (running, _plugin) = start(&cluster, Guard::Ignore).await;
    running.await_ready().await;
    await_devices(&cluster, &ALL).await;
}
