//! Changes of the NVIDIA driver on a running node: NVML is released on request, files that come and go change the next CDI
//! spec.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, symlink};
use std::path::Path;
use std::time::Duration;

use drava_dra_driver::driver::Config;
use drava_dra_driver::gpus::inventory::Source;
use drava_dra_driver::node::lock::Locks;
use drava_dra_driver::report::conditions::Condition;
use serde_json::json;
use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;

use crate::api_server::eventually;
use crate::cluster::{Running, TestCluster, kubelet_claim, prepare_error};
use crate::fixture::Allocated::Share;
use crate::fixture::{NODE, claim, claim_ref};
use crate::node::{base_of, lacks_device_files};

/// Starts a driver with this driver root.
fn start(cluster: &TestCluster, root: &Path) -> Running {
    let mut config: Config = cluster.config();
    config.paths.driver_root_mount = root.to_owned();
    let source = Source {
        rescan: Duration::from_millis(100),
        ..Source::nvml(config.paths.driver_root.clone(), root.to_owned())
    };
    cluster.start_with(config, source)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_nvml_on_request() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let machine = Machine::start(H100X2).unwrap();
    let running = start(&cluster, machine.root());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "30")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let (slices, state) = (cluster.api.slices(), cluster.node.claim_state());
    let connections = || machine.status().unwrap().connections;
    assert!(connections() > 0);

    cluster
        .api
        .annotate_node(NODE, &json!({"gpu.drava.dev/release-nvml": "true"}));
    let reason = running
        .await_unmet(Condition::Gpus, "NVML is released on request")
        .await;
    assert!(reason.contains("gpu.drava.dev/release-nvml"), "{reason}");
    eventually("no open NVML", || (connections() == 0).then_some(())).await;
    cluster.api.put_claim(&claim(2, &[Share(1, "8Gi", "0")]));
    let error = prepare_error(&plugin, 2).await;
    assert!(error.contains("NVML is released on request"), "{error}");
    // Nothing is taken from the claim, and it can be unprepared without NVML.
    assert_eq!(
        (cluster.api.slices(), cluster.node.claim_state()),
        (slices, state)
    );
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    assert_eq!(connections(), 0);

    cluster.api.annotate_node(NODE, &json!({}));
    running.await_ready().await;
    plugin.prepare_one(&kubelet_claim(2)).await.unwrap();

    // The labels by which the GPU operator stops programs that hold its driver, and starts them again.
    let label = "nvidia.com/gpu.deploy.client";
    let upgrade = json!({label: "paused-for-driver-upgrade"});
    cluster.api.label_node(NODE, &upgrade);
    let text = "nvidia.com/gpu.deploy.client=paused-for-driver-upgrade";
    running.await_unmet(Condition::Gpus, text).await;
    eventually("no open NVML", || (connections() == 0).then_some(())).await;
    cluster.api.label_node(NODE, &json!({label: "true"}));
    running.await_ready().await;
    assert!(connections() > 0);
}

/// Copies a directory tree without its sockets.
fn link_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            link_tree(&entry.path(), &target);
        } else if entry.file_type().unwrap().is_symlink() {
            symlink(fs::read_link(entry.path()).unwrap(), target).unwrap();
        } else if !entry.file_type().unwrap().is_socket() {
            // The same file: links that leave a driver root are not followed.
            fs::hard_link(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn next_spec_follows_files_of_the_driver() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let machine = Machine::start(H100X2).unwrap();
    let copies = tempfile::tempdir_in(machine.root().parent().unwrap()).unwrap();
    let root = copies.path().join("root");
    link_tree(machine.root(), &root);
    let (uvm, tools) = (
        root.join("dev/nvidia-uvm"),
        root.join("dev/nvidia-uvm-tools"),
    );
    let kept = copies.path().join("uvm-tools");
    fs::rename(&tools, &kept).unwrap();
    let mut config: Config = cluster.config();
    config.paths.driver_root_mount.clone_from(&root);
    let source = Source {
        driver_root_mount: root.clone(),
        ..cluster.source()
    };
    let running = cluster.start_with(config, source);
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "30")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let spec = || fs::read_to_string(base_of(&cluster.node, "share-compat")).unwrap();
    assert!(spec().contains("/dev/nvidia-uvm\"") && !spec().contains("nvidia-uvm-tools"));

    // The module is loaded late; persistenced starts.
    fs::rename(&kept, &tools).unwrap();
    let socket = root.join("run/nvidia-persistenced/socket");
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    eventually("the CDI spec has the new files", || {
        let spec = spec();
        (spec.contains("nvidia-uvm-tools") && spec.contains("nvidia-persistenced/socket"))
            .then_some(())
    })
    .await;
    // persistenced stops while the claim is locked, as by a prepare that has read the files before.
    let locks = Locks::new(cluster.node.layout().locks(), Duration::from_secs(60));
    let lock = locks.claim(&claim_ref(1).uid).unwrap();
    drop(listener);
    fs::remove_file(&socket).unwrap();
    let other = claim(2, &[Share(0, "8Gi", "30")]);
    cluster.api.put_claim(&other);
    drop(lock);
    eventually("the CDI spec lacks the socket", || {
        (!spec().contains("nvidia-persistenced/socket")).then_some(())
    })
    .await;
    // Without the module of unified memory no program can use CUDA: prepare fails with the remedy.
    fs::remove_file(&uvm).unwrap();
    let mut error = String::new();
    while error.is_empty() {
        match plugin.prepare_one(&kubelet_claim(2)).await {
            // The driver has not scanned the files since.
            Ok(_) => plugin.unprepare_one(&kubelet_claim(2)).await.unwrap(),
            Err(failed) => error = failed.to_string(),
        }
    }
    assert!(
        error.contains("no device node /dev/nvidia-uvm ")
            && error.contains("nvidia-modprobe -c 0 -u"),
        "{error}"
    );
}
