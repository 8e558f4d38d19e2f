//! Unmet conditions of readiness and their reports.

use std::fs;
use std::time::Duration;

use drava_dra_driver::driver::Config;
use drava_dra_driver::gpus::inventory::Source;
use drava_dra_driver::report::conditions::Condition;
use serde_json::{Value, json};

use crate::api_server::eventually;
use crate::cluster::{TestCluster, free_address, get, kubelet_claim, prepare_error};
use crate::fixture::Allocated::Share;
use crate::fixture::claim;
use crate::namespace::in_mount_namespace;
use crate::node::lacks_device_files;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_missing_nvidia_libraries_and_recovers() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let root = cluster.node.root.path().join("driver-root");
    fs::create_dir(&root).unwrap();
    let source = Source {
        rescan: Duration::from_millis(100),
        ..Source::nvml(root.clone(), root.clone())
    };
    let running = cluster.start_with(cluster.config(), source);
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    let reason = running
        .await_unmet(Condition::Gpus, "libnvidia-ml.so.1")
        .await;
    assert!(
        reason.contains(&*root.to_string_lossy())
            && reason.contains("usr/lib64")
            && reason.contains("--driver-root"),
        "{reason}"
    );
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    let error = prepare_error(&plugin, 1).await;
    assert!(
        error.contains("default/claim-1") && error.contains("libnvidia-ml.so.1"),
        "{error}"
    );
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    // On a slow machine an earlier event names conditions that were not met at the start.
    eventually("event that names the library", || {
        cluster
            .api
            .events()
            .into_iter()
            .find(|(reason, text)| reason == "NotReady" && text.contains("libnvidia-ml.so.1"))
    })
    .await;
    assert!(cluster.api.slices().is_empty());

    // NVML of the simulated machine, loaded as on a node.
    fs::remove_dir(&root).unwrap();
    std::os::unix::fs::symlink(crate::fixture::machine_root(), &root).unwrap();
    running.await_ready().await;
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    insta::assert_json_snapshot!(published_devices(&cluster));
}

/// Returns the published devices without the fields that change from run to run.
fn published_devices(cluster: &TestCluster) -> Vec<Value> {
    let entry = |device: &Value| {
        json!({
            "name": device["name"],
            "uuid": device["attributes"]["uuid"]["string"],
            "productName": device["attributes"]["productName"]["string"],
            "driverVersion": device["attributes"]["driverVersion"]["version"],
            "memory": device["capacity"]["memory"]["value"],
            "counters": device["consumesCounters"][0]["counters"],
        })
    };
    cluster.api.devices().iter().map(entry).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_missing_node_object_and_unusable_directory() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let running = cluster.start_with(
        Config {
            node: "node-b".to_owned(),
            ..cluster.config()
        },
        cluster.source(),
    );
    let reason = running
        .await_unmet(Condition::Published, "cannot find Node object node-b")
        .await;
    assert!(reason.contains("--node-name"), "{reason}");
    running.stop().await;

    let mut broken = cluster.config();
    broken.paths.state_dir = cluster.node.root.path().join("image/libvgpu.so");
    let running = cluster.start_with(broken, cluster.source());
    let reason = running
        .await_unmet(Condition::Directories, "cannot write to")
        .await;
    assert!(reason.contains("image/libvgpu.so/claims"), "{reason}");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_unmet_conditions_in_readyz_and_events() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let mut config = cluster.config();
    config.paths.artifacts_dir = cluster.node.root.path().join("no-image");
    config.listen = free_address();
    let running = cluster.start_with(config.clone(), cluster.source());
    running
        .await_unmet(Condition::Artifacts, "libvgpu.so")
        .await;
    let get = |path: &'static str| get(config.listen, path);
    assert!(get("/healthz").await.starts_with("HTTP/1.0 200"));
    let unready = get("/readyz").await;
    assert!(unready.starts_with("HTTP/1.0 503"), "{unready}");
    assert!(
        unready.contains("artifacts: cannot read") && unready.contains("--artifacts-dir"),
        "{unready}"
    );
    let reported = |text: &'static str| {
        let events = cluster.api.events();
        events
            .into_iter()
            .find(|(reason, note)| reason == "NotReady" && note.starts_with(text))
            .map(drop)
    };
    eventually("an event about the artifacts", || {
        reported("artifacts: cannot read")
    })
    .await;
    eventually("an event about kubelet", || {
        reported("registered: kubelet has not registered")
    })
    .await;

    fs::create_dir(cluster.node.root.path().join("no-image")).unwrap();
    for artifact in ["libvgpu.so", "drava-cdi-hook"] {
        fs::copy(
            cluster.node.paths.artifacts_dir.join(artifact),
            config.paths.artifacts_dir.join(artifact),
        )
        .unwrap();
    }
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    assert!(get("/readyz").await.ends_with("ready\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_other_gpus_while_one_hangs() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    cluster.gpus.change(|gpus| {
        gpus.gpus.truncate(1);
        gpus.faults = vec![drava_nvml::GpuFault {
            index: 1,
            gpu: None,
            query: "the GPU",
            status: drava_nvml::Status::Timeout,
        }];
    });
    let (_running, _plugin) = cluster.start_ready().await;
    let names = || -> Vec<String> {
        let devices = cluster.api.devices().into_iter();
        let name = |device: serde_json::Value| device["name"].as_str().unwrap().to_owned();
        devices.map(name).collect()
    };
    assert_eq!(names(), ["gpu-0", "gpu-0-vgpu"]);
    eventually("an event on the node", || {
        let events = cluster.api.events();
        let is_hung = |(reason, note): &(String, String)| {
            reason == "GpuUnavailable"
                && note.contains("GPU 1 is not published")
                && note.contains("timed out")
        };
        events.into_iter().find(is_hung)
    })
    .await;
    // It answers again.
    cluster
        .gpus
        .change(|gpus| *gpus = crate::fixture::h100x2().nvml);
    eventually("devices of both GPUs", || {
        (names().len() == 4).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_runtime_that_cannot_be_checked_on_node() {
    let cluster = TestCluster::new().await;
    let config = cluster.config();
    // As on Talos, whose configuration is at another path.
    fs::remove_dir(config.proc_root.join("1/root/etc/containerd")).unwrap();
    let running = cluster.start_with(config, cluster.source());
    let kind = eventually("event of the runtime", || {
        let mut events = cluster.api.events_with_kind().into_iter();
        let event = events.find(|(reason, note, _)| {
            reason == "RuntimeUnchecked" && note.contains("make sure that CDI is on")
        });
        event.map(|(_, _, kind)| kind)
    })
    .await;
    assert_eq!(kind, "Node");
    running.stop().await;
}

#[test]
fn refuses_state_directory_that_node_mounts_noexec() {
    in_mount_namespace(
        "readiness::refuses_state_directory_that_node_mounts_noexec",
        || {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(check_noexec());
        },
    );
}

/// The node mounts the state directory `noexec`, as Container-Optimized OS mounts `/var`. In the container of the driver the
/// mount has other flags.
async fn check_noexec() {
    let cluster = TestCluster::new().await;
    let mut config = cluster.config();
    config.listen = free_address();
    let host = config.proc_root.join("1/root");
    let on_host = host.join(config.paths.state_dir.strip_prefix("/").unwrap());
    fs::create_dir_all(&on_host).unwrap();
    let mount = |arguments: &[&str]| {
        let mut command = std::process::Command::new(arguments[0]);
        let status = command.args(&arguments[1..]).arg(&on_host).status();
        assert!(status.unwrap().success(), "{arguments:?}");
    };
    mount(&["mount", "-t", "tmpfs", "-o", "noexec", "none"]);
    let running = cluster.start_with(config.clone(), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    let reason = running
        .await_unmet(Condition::Artifacts, "is mounted noexec on the node")
        .await;
    assert!(
        reason.starts_with(&*config.paths.state_dir.to_string_lossy())
            && reason.contains("driver.stateDir")
            && reason.contains("/home/kubernetes/bin/drava"),
        "{reason}"
    );
    eventually("event on the node", || {
        let mut events = cluster.api.events_with_kind().into_iter();
        events.find(|(reason, note, kind)| {
            reason == "NotReady" && kind == "Node" && note.contains("is mounted noexec on the node")
        })
    })
    .await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    let error = prepare_error(&plugin, 1).await;
    // Kubelet shows it in the event FailedPrepareDynamicResources of the pod.
    assert!(
        error.contains("default/claim-1")
            && error.contains("is mounted noexec on the node")
            && error.contains("driver.stateDir"),
        "{error}"
    );
    mount(&["mount", "-o", "remount,exec"]);
    running.await_ready().await;
}
