//! What a running driver publishes, whatever others or the hardware do.

use std::time::Duration;

use drava_dra_driver::driver::Config;
use drava_dra_driver::inventory::Source;
use drava_fake_kubelet::{DeviceHealth, HealthStatus};
use futures::StreamExt as _;
use serde_json::Value;
use simulator_machine::client::Connection;
use simulator_machine::description;
use simulator_machine::protocol::{CardIndex, ClientKind, MigRequest, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::Machine;

use crate::api_server::{CLAIMS, SLICES, eventually};
use crate::cluster::{TestCluster, kubelet_claim, refusal};
use crate::fixture::Result::Share;
use crate::fixture::claim;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn republishes_deleted_and_edited_slices() {
    let cluster = TestCluster::new().await;
    let (_running, _plugin) = cluster.ready().await;
    let published = cluster.api.slices();
    assert_eq!(published.len(), 2);
    cluster.api.wipe_slices();
    eventually("republication", || {
        (cluster.api.slices().len() == 2).then_some(())
    })
    .await;

    let name = published
        .keys()
        .find(|name| name.contains("devices"))
        .unwrap();
    let taints = |slice: &Value| slice["spec"]["devices"][0]["taints"].clone();
    let before = taints(&published[name]);
    cluster.api.edit_slice(name, |slice| {
        slice["spec"]["devices"][0]["taints"] = Value::Null
    });
    eventually("repair", || {
        (taints(&cluster.api.slices()[name]) == before).then_some(())
    })
    .await;
    cluster.api.edit_slice(name, |slice| {
        slice["metadata"]["ownerReferences"] = Value::Null
    });
    eventually("owner", || {
        cluster.api.slices()[name]["metadata"]["ownerReferences"]
            .as_array()
            .map(drop)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletes_only_own_slices_of_earlier_layout() {
    let cluster = TestCluster::new().await;
    let (_running, _plugin) = cluster.ready().await;
    let mut published = cluster.api.slices();
    let (_, of_ours) = published.pop_first().unwrap();
    let mut of_others = of_ours.clone();
    of_others["spec"]["nodeName"] = Value::from("node-b");
    cluster.api.put_slice("theirs", of_others);
    cluster.api.put_slice("old", of_ours);
    eventually("deletion", || {
        (!cluster.api.slices().contains_key("old")).then_some(())
    })
    .await;
    assert!(cluster.api.slices().contains_key("theirs"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_no_unchanged_slice_after_restart() {
    let cluster = TestCluster::new().await;
    let (running, _plugin) = cluster.ready().await;
    running.stop().await;
    let writes = cluster.api.writes().len();
    let (_running, _plugin) = cluster.ready().await;
    assert_eq!(cluster.api.writes().len(), writes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_whole_gpus_if_counters_are_dropped() {
    let cluster = TestCluster::new().await;
    cluster
        .api
        .drop_fields(&["sharedCounters", "consumesCounters"]);
    let (_running, _plugin) = cluster.ready().await;
    let slices = cluster.api.slices();
    let devices = cluster.api.devices();
    let names: Vec<&Value> = devices.iter().map(|device| &device["name"]).collect();
    assert_eq!(names, ["gpu-0", "gpu-1"]);
    let event = eventually("event", || {
        cluster
            .api
            .events()
            .into_iter()
            .find(|(reason, _)| reason == "FieldsDropped")
    });
    assert!(event.await.1.contains("DRAPartitionableDevices"));
    // No fight: it stays as it is.
    let writes = cluster.api.writes().len();
    // The slices are looked at after each change; a write that the first look found necessary precedes the second.
    // One more, because the list with which a watch begins is taken for a look.
    for _ in 0..3 {
        let looks = cluster.api.lists(SLICES);
        cluster
            .api
            .edit_slice(slices.keys().next().unwrap(), |_| {});
        eventually("a look at the slices", || {
            (cluster.api.lists(SLICES) > looks).then_some(())
        })
        .await;
    }
    assert_eq!(cluster.api.writes().len(), writes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taints_lost_gpu_until_it_returns() {
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.ready().await;
    let mut stream = plugin.watch_health().await.unwrap();
    let health = |message: &drava_dra_driver::proto::health_v1::NodeWatchResourcesResponse,
                  name: &str| {
        let device = message
            .devices
            .iter()
            .find(|device| device.device.as_ref().unwrap().device_name == name);
        device.unwrap().health()
    };
    let first = stream.next().await.unwrap().unwrap();
    assert_eq!(first.devices.len(), 4);
    assert_eq!(health(&first, "gpu-1-vgpu"), HealthStatus::Healthy);

    let mut taken = None;
    cluster
        .gpus
        .change(|inventory| taken = Some(inventory.cards.remove(1)));
    eventually("taint", || (!unhealthy(&cluster).is_empty()).then_some(())).await;
    let next = stream.next().await.unwrap().unwrap();
    assert_eq!(health(&next, "gpu-1-vgpu"), HealthStatus::Unhealthy);
    assert_eq!(health(&next, "gpu-0-vgpu"), HealthStatus::Healthy);
    cluster.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
    let error = refusal(&plugin, 1).await;
    assert!(
        error.contains(
            "device gpu-1-vgpu is not on this node any more (present: gpu-0, gpu-0-vgpu)"
        ),
        "{error}"
    );

    cluster
        .gpus
        .change(|inventory| inventory.cards.extend(taken));
    eventually("recovery", || unhealthy(&cluster).is_empty().then_some(())).await;
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_slices_and_reports_unknown_health_without_nvml() {
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.ready().await;
    let published = cluster.api.slices();
    let mut stream = plugin.watch_health().await.unwrap();
    cluster.gpus.fail();
    let message = loop {
        let message = stream.next().await.unwrap().unwrap();
        let is_healthy = |one: &DeviceHealth| one.health() == HealthStatus::Healthy;
        if message.devices.is_empty() || !message.devices.iter().all(is_healthy) {
            break message;
        }
    };
    assert_eq!(message.devices.len(), 4);
    for device in &message.devices {
        assert_eq!(device.health(), HealthStatus::Unknown);
        assert!(device.message.contains("number of cards"), "{device:?}");
    }
    assert_eq!(cluster.api.slices(), published);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retains_lost_gpu_across_restart_while_allocated() {
    let cluster = TestCluster::new().await;
    let (running, _plugin) = cluster.ready().await;
    cluster.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
    running.stop().await;
    cluster
        .gpus
        .change(|inventory| drop(inventory.cards.remove(1)));

    let impatient = Config {
        retained_grace: Duration::ZERO,
        ..cluster.config()
    };
    let running = cluster.start_with(impatient, cluster.source());
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.is_ready().await;
    // It could have been withdrawn each time that the claims were listed.
    eventually("two looks at the claims", || {
        (cluster.api.lists(CLAIMS) >= 2).then_some(())
    })
    .await;
    let lost = ["gpu-1: lost", "gpu-1-vgpu: lost"];
    assert_eq!(unhealthy(&cluster), lost);
    // Kubelet deletes all slices of its node when it restarts.
    cluster.api.wipe_slices();
    eventually("publication anew", || {
        (unhealthy(&cluster) == lost).then_some(())
    })
    .await;

    cluster.api.delete_claim(&claim(1, &[]));
    eventually("withdrawal", || {
        unhealthy(&cluster).is_empty().then_some(())
    })
    .await;
    assert_eq!(cluster.api.slices().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retains_gpu_in_mig_mode_while_allocated() {
    let cluster = TestCluster::new().await;
    let machine = Machine::start(description::H100X2).unwrap();
    let mut impatient = Config {
        retained_grace: Duration::ZERO,
        ..cluster.config()
    };
    impatient.paths.driver_root_mount = machine.root().to_owned();
    let source = Source {
        rescan: Duration::from_millis(100),
        ..Source::nvml(
            impatient.paths.driver_root.clone(),
            machine.root().to_owned(),
        )
    };
    let running = cluster.start_with(impatient, source);
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.is_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let offered = cluster.api.devices();

    let lists = cluster.api.lists(CLAIMS);
    set_mig_mode(&machine, true);
    let partitioned = ["gpu-0: mig-mode", "gpu-0-vgpu: mig-mode"];
    eventually("taint", || {
        (unhealthy(&cluster) == partitioned).then_some(())
    })
    .await;
    eventually("two looks at the claims", || {
        (cluster.api.lists(CLAIMS) >= lists + 2).then_some(())
    })
    .await;
    assert_eq!(unhealthy(&cluster), partitioned);
    assert_eq!(cluster.api.devices().len(), offered.len());
    cluster.api.put_claim(&claim(2, &[Share(0, "8Gi", "0")]));
    let error = refusal(&plugin, 2).await;
    assert!(error.contains("MIG mode is on"), "{error}");

    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    cluster.api.delete_claim(&claim(1, &[]));
    cluster.api.delete_claim(&claim(2, &[]));
    let names = || -> Vec<Value> {
        let devices = cluster.api.devices().into_iter();
        devices.map(|device| device["name"].clone()).collect()
    };
    eventually("withdrawal", || {
        (names() == ["gpu-1", "gpu-1-vgpu"]).then_some(())
    })
    .await;
    set_mig_mode(&machine, false);
    eventually("recovery", || {
        (cluster.api.devices() == offered).then_some(())
    })
    .await;
}

/// The devices that must not be used, with the reason.
fn unhealthy(cluster: &TestCluster) -> Vec<String> {
    let reason = |device: &Value| {
        let taints = device["taints"].as_array()?;
        let taint = taints
            .iter()
            .find(|taint| taint["key"] == "gpu.drava.dev/unhealthy")?;
        let (name, reason) = (device["name"].as_str()?, taint["value"].as_str()?);
        Some(format!("{name}: {reason}"))
    };
    cluster.api.devices().iter().filter_map(reason).collect()
}

/// Switches the first card, as `nvidia-smi -mig` does.
fn set_mig_mode(machine: &Machine, enabled: bool) {
    let root = DriverRoot::new(machine.root());
    let (mut connection, _welcome) = Connection::open(&root, ClientKind::Nvml).unwrap();
    let request = Request::Mig {
        card: CardIndex(0),
        request: MigRequest::SetMode { enabled },
    };
    connection.request(&request).unwrap();
}
