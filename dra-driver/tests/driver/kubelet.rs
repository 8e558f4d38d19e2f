//! How the driver and kubelet find each other: sockets, registration, versions.

use std::fs;

use drava_dra_driver::conditions::Condition;

use crate::api_server::eventually;
use crate::fixture::Result::Share;
use crate::fixture::claim;
use crate::harness::{World, kubelet_claim};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_kubelets_are_served_in_v1beta1() {
    let world = World::new().await;
    let (_running, plugin) = world.ready().await;
    world.api.put_claim(&claim(1, &[Share(0, "8Gi", "30")]));
    let plugin = plugin.in_v1beta1();
    assert_eq!(
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap().len(),
        1
    );
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_kubelet_directory_is_named_and_waited_for() {
    let world = World::new().await;
    let registry = world.node.paths.kubelet_dir.join("plugins_registry");
    fs::remove_dir(&registry).unwrap();
    let running = world.start();
    let reason = running
        .complains(Condition::Registered, "does not exist")
        .await;
    assert!(
        reason.contains(&*registry.to_string_lossy()) && reason.contains("--kubelet-dir"),
        "{reason}"
    );
    fs::create_dir(&registry).unwrap();
    world.kubelet.register("gpu.drava.dev").await.unwrap();
    running.is_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubelets_refusal_is_shown_until_it_accepts() {
    let world = World::new().await;
    let running = world.start();
    world
        .kubelet
        .refuse("gpu.drava.dev", "the endpoint is already registered")
        .await
        .unwrap();
    running
        .complains(
            Condition::Registered,
            "kubelet refuses the driver: the endpoint is already registered",
        )
        .await;
    world.kubelet.register("gpu.drava.dev").await.unwrap();
    running.is_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_that_disappears_is_made_again() {
    let world = World::new().await;
    let (_running, _plugin) = world.ready().await;
    let [socket] = world.kubelet.registry().unwrap().try_into().unwrap();
    fs::remove_file(&socket).unwrap();
    eventually("socket", || socket.exists().then_some(())).await;
    world.kubelet.register("gpu.drava.dev").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_sockets_of_a_killed_driver_are_replaced() {
    let world = World::new().await;
    let (running, _plugin) = world.ready().await;
    running.kill().await;
    assert_eq!(
        world.kubelet.registry().unwrap().len(),
        1,
        "nobody cleaned up"
    );
    world.ready().await;
}
