//! Two instances of the driver on one node, as during a rolling update.

use std::fs;
use std::path::Path;
use std::time::Duration;

use drava_dra_driver::conditions::Condition;
use drava_dra_driver::driver::Config;
use drava_dra_driver::inventory::Source;

use crate::api_server::eventually;
use crate::fixture::Result::Share;
use crate::fixture::{claim, machine_root};
use crate::harness::{World, free_address, get, kubelet_claim};

/// An instance whose sockets are named after its pod. The fake kubelet registers the first in the alphabet.
fn instance(world: &World, pod_uid: &str) -> Config {
    Config {
        pod_uid: Some(pod_uid.to_owned()),
        ..world.config()
    }
}

/// NVML of a driver root.
fn source_of(root: &Path) -> Source {
    Source {
        rescan: Duration::from_millis(100),
        ..Source::nvml(root.to_owned(), root.to_owned())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_instance_that_cannot_serve_leaves_the_node_to_the_old_one() {
    let world = World::new().await;
    let old = world.start_with(instance(&world, "old"), world.source());
    let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
    old.is_ready().await;

    let root = world.node.root.path().join("driver-root");
    let mut config = instance(&world, "new");
    config.paths.artifacts_dir = world.node.root.path().join("no-image");
    config.listen = free_address();
    let new = world.start_with(config.clone(), source_of(&root));
    let waits = "another instance serves this node and goes on until this one can: artifacts: read";
    let reason = new.complains(Condition::Registered, waits).await;
    let reason = match reason.contains("gpus: not yet") {
        true => new.complains(Condition::Registered, "driver-root").await,
        false => reason,
    };
    assert!(reason.contains("; gpus: "), "{reason}");
    let sockets = || world.kubelet.registry().unwrap().len();
    assert_eq!(sockets(), 1);
    let unready = get(config.listen, "/readyz").await;
    assert!(unready.starts_with("HTTP/1.0 503"), "{unready}");
    assert!(
        unready.contains(&format!("registered: {waits}")),
        "{unready}"
    );
    eventually("an event on the node", || {
        let events = world.api.events();
        events
            .into_iter()
            .find(|(reason, note)| reason == "NotReady" && note.contains(waits))
    })
    .await;
    world.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();

    // Half of what it needs is not enough.
    fs::create_dir(&config.paths.artifacts_dir).unwrap();
    for artifact in ["libvgpu.so", "drava-cdi-hook"] {
        let image = world.node.paths.artifacts_dir.join(artifact);
        fs::copy(image, config.paths.artifacts_dir.join(artifact)).unwrap();
    }
    new.complains(Condition::Registered, "until this one can: gpus: ")
        .await;
    assert_eq!(sockets(), 1);

    std::os::unix::fs::symlink(machine_root(), &root).unwrap();
    eventually("two sockets", || (sockets() == 2).then_some(())).await;
    let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
    assert!(
        plugin.info.endpoint.contains("dra-new"),
        "{:?}",
        plugin.info
    );
    new.is_ready().await;
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_cannot_serve_registers_when_the_other_one_stops() {
    let world = World::new().await;
    let old = world.start_with(instance(&world, "old"), world.source());
    let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
    old.is_ready().await;
    world.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();

    let root = world.node.root.path().join("driver-root");
    let new = world.start_with(instance(&world, "new"), source_of(&root));
    new.complains(Condition::Registered, "another instance serves this node")
        .await;
    old.stop().await;
    let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    world.api.put_claim(&claim(2, &[Share(0, "8Gi", "0")]));
    let error = plugin.prepare_one(&kubelet_claim(2)).await.unwrap_err();
    assert!(error.to_string().contains("driver-root"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_instance_serves_beside_the_first_and_takes_over() {
    let world = World::new().await;
    let first = world.start_with(instance(&world, "pod-1"), world.source());
    let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
    first.is_ready().await;
    world.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();

    let second = world.start_with(instance(&world, "pod-2"), world.source());
    eventually("two sockets", || {
        (world.kubelet.registry().unwrap().len() == 2).then_some(())
    })
    .await;
    first.stop().await;
    let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
    second.is_ready().await;
    world.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
    assert!(plugin.prepare_one(&kubelet_claim(2)).await.is_err());
    world.api.wipe_slices();
    eventually("the second publishes", || {
        (world.api.slices().len() == 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_instance_of_the_same_name_waits() {
    let world = World::new().await;
    let (first, _plugin) = world.ready().await;
    let second = world.start();
    second
        .complains(
            Condition::Registered,
            "another instance of the driver serves",
        )
        .await;
    first.stop().await;
    world.kubelet.register("gpu.drava.dev").await.unwrap();
    second.is_ready().await;
}
