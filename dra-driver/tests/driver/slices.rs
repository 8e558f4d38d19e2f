//! Slices of a running driver under changes of other clients and of the hardware.

use std::time::Duration;

use drava_dra_driver::driver::Config;
use drava_dra_driver::gpus::inventory::Source;
use drava_dra_driver::report::conditions::Condition;
use drava_fake_kubelet::{DeviceHealth, HealthStatus};
use futures::StreamExt as _;
use serde_json::{Value, json};
use simulator_machine::client::Connection;
use simulator_machine::description;
use simulator_machine::protocol::{ClientKind, GpuIndex, MigRequest, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::Machine;

use crate::api_server::{CLAIMS, SLICES, eventually};
use crate::cluster::{TestCluster, kubelet_claim, prepare_error};
use crate::fixture::Allocated::Share;
use crate::fixture::claim;
use crate::node::lacks_device_files;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn republishes_deleted_and_edited_slices() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, _plugin) = cluster.start_ready().await;
    let published = cluster.api.slices();
    assert_eq!(published.len(), 2);
    cluster.api.wipe_slices();
    eventually("republished slices", || {
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
    eventually("restored taints", || {
        (taints(&cluster.api.slices()[name]) == before).then_some(())
    })
    .await;
    cluster.api.edit_slice(name, |slice| {
        slice["metadata"]["ownerReferences"] = Value::Null
    });
    eventually("restored owner", || {
        cluster.api.slices()[name]["metadata"]["ownerReferences"]
            .as_array()
            .map(drop)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletes_only_own_slices_of_earlier_layout() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, _plugin) = cluster.start_ready().await;
    let mut published = cluster.api.slices();
    let (_, ours) = published.pop_first().unwrap();
    let mut other = ours.clone();
    other["spec"]["nodeName"] = Value::from("node-b");
    cluster.api.put_slice("theirs", other);
    cluster.api.put_slice("old", ours);
    eventually("deletion of the old slice", || {
        (!cluster.api.slices().contains_key("old")).then_some(())
    })
    .await;
    assert!(cluster.api.slices().contains_key("theirs"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_no_unchanged_slice_after_restart() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, _plugin) = cluster.start_ready().await;
    running.stop().await;
    let writes = cluster.api.writes().len();
    let (_running, _plugin) = cluster.start_ready().await;
    assert_eq!(cluster.api.writes().len(), writes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_whole_gpus_if_counters_are_dropped() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    cluster
        .api
        .drop_fields(&["sharedCounters", "consumesCounters"]);
    let (_running, _plugin) = cluster.start_ready().await;
    let slices = cluster.api.slices();
    let devices = cluster.api.devices();
    let names: Vec<&Value> = devices.iter().map(|device| &device["name"]).collect();
    assert_eq!(names, ["gpu-0", "gpu-1"]);
    // Not even for a moment, in which shares could be allocated besides the whole GPUs.
    let uncounted = cluster.api.devices_ever_stored_without("consumesCounters");
    assert_eq!(Vec::from_iter(uncounted), ["gpu-0", "gpu-1"]);
    let event = eventually("event", || {
        cluster
            .api
            .events()
            .into_iter()
            .find(|(reason, _)| reason == "FieldsDropped")
    });
    assert!(event.await.1.contains("DRAPartitionableDevices"));
    // The driver does not write the slices again.
    let writes = cluster.api.writes().len();
    // The driver lists the slices after each change; a write after the first list would precede the second. The third
    // round accounts for the initial list of a watch.
    for _ in 0..3 {
        let lists = cluster.api.lists(SLICES);
        cluster
            .api
            .edit_slice(slices.keys().next().unwrap(), |_| {});
        eventually("a list of the slices", || {
            (cluster.api.lists(SLICES) > lists).then_some(())
        })
        .await;
    }
    assert_eq!(cluster.api.writes().len(), writes);

    // With the feature gate on, the shares come without a restart: at the next change, or after some minutes.
    cluster.api.drop_fields(&[]);
    cluster
        .api
        .edit_slice(slices.keys().next().unwrap(), |_| {});
    let restored = eventually("shares", || {
        let devices = cluster.api.devices();
        (devices.len() == 4).then_some(devices)
    });
    for device in restored.await {
        assert!(device["consumesCounters"].is_array(), "{device}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_nothing_in_managed_mode_without_taints() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    cluster.api.drop_fields(&["taints"]);
    let running = cluster.start();
    let _plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running
        .await_unmet(
            Condition::Published,
            "feature gate DRADeviceTaints is off; no device is published",
        )
        .await;
    // Not even for a moment, in which kube-scheduler could allocate the devices.
    let untainted = cluster.api.devices_ever_stored_without("taints");
    assert!(untainted.is_empty(), "{untainted:?}");

    cluster.api.drop_fields(&[]);
    let slices = cluster.api.slices();
    cluster
        .api
        .edit_slice(slices.keys().next().unwrap(), |_| {});
    running.await_ready().await;
    assert_eq!(cluster.api.devices().len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taints_lost_gpu_until_it_returns() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    let mut stream = plugin.watch_health().await.unwrap();
    let health =
        |message: &drava_dra_driver::kubelet::proto::health_v1::NodeWatchResourcesResponse,
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

    let mut removed = None;
    cluster
        .gpus
        .change(|inventory| removed = Some(inventory.gpus.remove(1)));
    eventually("taint", || (!unhealthy(&cluster).is_empty()).then_some(())).await;
    // Messages are repeated without a change.
    let next = loop {
        let next = stream.next().await.unwrap().unwrap();
        if health(&next, "gpu-1-vgpu") != HealthStatus::Healthy {
            break next;
        }
    };
    assert_eq!(health(&next, "gpu-1-vgpu"), HealthStatus::Unhealthy);
    assert_eq!(health(&next, "gpu-0-vgpu"), HealthStatus::Healthy);
    cluster.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
    let error = prepare_error(&plugin, 1).await;
    assert!(
        error.contains(
            "device gpu-1-vgpu is not on this node (present: gpu-0, gpu-0-vgpu, 25 partitions"
        ),
        "{error}"
    );

    cluster
        .gpus
        .change(|inventory| inventory.gpus.extend(removed));
    eventually("recovery", || unhealthy(&cluster).is_empty().then_some(())).await;
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_same_health_to_older_kubelets() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    let mut streams = [
        plugin.watch_health().await.unwrap(),
        plugin.watch_health_v1alpha1().await.unwrap(),
    ];
    cluster
        .gpus
        .change(|inventory| drop(inventory.gpus.remove(1)));
    let mut reports = Vec::new();
    for stream in &mut streams {
        let unhealthy = loop {
            let message = stream.next().await.unwrap().unwrap();
            let devices = message.devices.into_iter();
            let unhealthy = devices.filter(|one| one.health() == HealthStatus::Unhealthy);
            let names = unhealthy.map(|one| (one.device.unwrap().device_name, one.message));
            let names: Vec<_> = names.collect();
            if !names.is_empty() {
                break names;
            }
        };
        assert_eq!(unhealthy.len(), 2, "{unhealthy:?}");
        reports.push(unhealthy);
    }
    assert_eq!(reports[0], reports[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_slices_and_reports_unknown_health_without_nvml() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
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
        assert!(device.message.contains("number of GPUs"), "{device:?}");
    }
    assert_eq!(cluster.api.slices(), published);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retains_lost_gpu_across_restart_while_allocated() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, _plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
    running.stop().await;
    cluster
        .gpus
        .change(|inventory| drop(inventory.gpus.remove(1)));

    let config = Config {
        retained_grace: Duration::ZERO,
        ..cluster.config()
    };
    let running = cluster.start_with(config, cluster.source());
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    // The driver could withdraw the GPU after each list of the claims.
    eventually("two lists of the claims", || {
        (cluster.api.lists(CLAIMS) >= 2).then_some(())
    })
    .await;
    let lost = ["gpu-1: lost", "gpu-1-vgpu: lost"];
    assert_eq!(unhealthy(&cluster), lost);
    // Kubelet deletes all slices of its node when it restarts.
    cluster.api.wipe_slices();
    eventually("republished slices", || {
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
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let machine = Machine::start(description::H100X2).unwrap();
    let mut config = Config {
        retained_grace: Duration::ZERO,
        ..cluster.config()
    };
    config.paths.driver_root_mount = machine.root().to_owned();
    let source = Source {
        rescan: Duration::from_millis(100),
        ..Source::nvml(config.paths.driver_root.clone(), machine.root().to_owned())
    };
    let running = cluster.start_with(config, source);
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let devices = cluster.api.devices();

    let lists = cluster.api.lists(CLAIMS);
    set_mig_mode(&machine, true);
    let partitioned = ["gpu-0: mig-mode", "gpu-0-vgpu: mig-mode"];
    eventually("taint", || {
        (unhealthy(&cluster) == partitioned).then_some(())
    })
    .await;
    eventually("two lists of the claims", || {
        (cluster.api.lists(CLAIMS) >= lists + 2).then_some(())
    })
    .await;
    assert_eq!(unhealthy(&cluster), partitioned);
    let partitions = cluster.api.devices().len() - devices.len();
    assert_eq!(partitions, 25, "an H100 has 25 placements");
    cluster.api.put_claim(&claim(2, &[Share(0, "8Gi", "0")]));
    let error = prepare_error(&plugin, 2).await;
    assert!(error.contains("MIG mode is enabled"), "{error}");

    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    cluster.api.delete_claim(&claim(1, &[]));
    cluster.api.delete_claim(&claim(2, &[]));
    let names = || -> Vec<Value> {
        let devices = cluster.api.devices().into_iter();
        devices.map(|device| device["name"].clone()).collect()
    };
    eventually("withdrawal", || {
        let names = names();
        let is_withdrawn =
            !names.contains(&json!("gpu-0")) && !names.contains(&json!("gpu-0-vgpu"));
        (is_withdrawn && names.len() == partitions + 2).then_some(())
    })
    .await;
    set_mig_mode(&machine, false);
    eventually("recovery", || {
        (cluster.api.devices() == devices).then_some(())
    })
    .await;
}

/// Returns the unhealthy devices with the reasons.
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

/// Sets the MIG mode of the first GPU, as `nvidia-smi -mig` does.
fn set_mig_mode(machine: &Machine, enabled: bool) {
    let root = DriverRoot::new(machine.root());
    let (mut connection, _welcome) = Connection::open(&root, ClientKind::Nvml).unwrap();
    let request = Request::Mig {
        gpu: GpuIndex(0),
        request: MigRequest::SetMode { enabled },
    };
    connection.request(&request).unwrap();
}
