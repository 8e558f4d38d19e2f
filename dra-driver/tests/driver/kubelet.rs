//! Sockets, registration and API versions between the driver and kubelet.

use std::fs;

use drava_dra_driver::report::conditions::Condition;

use crate::api_server::eventually;
use crate::cluster::TestCluster;
use crate::node::lacks_device_files;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_for_missing_kubelet_directory() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let registry = cluster.node.paths.kubelet_dir.join("plugins_registry");
    fs::remove_dir(&registry).unwrap();
    let running = cluster.start();
    let reason = running
        .await_unmet(Condition::Registered, "does not exist")
        .await;
    assert!(
        reason.contains(&*registry.to_string_lossy()) && reason.contains("--kubelet-dir"),
        "{reason}"
    );
    fs::create_dir(&registry).unwrap();
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_kubelet_rejection_until_registered() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let running = cluster.start();
    cluster
        .kubelet
        .reject("gpu.drava.dev", "the endpoint is already registered")
        .await
        .unwrap();
    running
        .await_unmet(
            Condition::Registered,
            "kubelet rejected the driver: the endpoint is already registered",
        )
        .await;
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recreates_removed_registration_socket() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, _plugin) = cluster.start_ready().await;
    let [socket] = cluster.kubelet.registry().unwrap().try_into().unwrap();
    fs::remove_file(&socket).unwrap();
    eventually("socket", || socket.exists().then_some(())).await;
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaces_stale_sockets_of_killed_driver() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, _plugin) = cluster.start_ready().await;
    running.kill().await;
    assert_eq!(
        cluster.kubelet.registry().unwrap().len(),
        1,
        "the killed driver left its socket"
    );
    cluster.start_ready().await;
}
