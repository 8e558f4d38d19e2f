//! Two instances of the driver on one node, as during a rolling update.

use std::fs;
use std::path::Path;
use std::time::Duration;

use drava_dra_driver::driver::Config;
use drava_dra_driver::gpus::inventory::Source;
use drava_dra_driver::node::lock::Locks;
use drava_dra_driver::report::conditions::Condition;

use crate::api_server::eventually;
use crate::cluster::{TestCluster, free_address, get, kubelet_claim, prepare_error};
use crate::fixture::Allocated::Share;
use crate::fixture::{GPU_UUIDS, claim, machine_root};
use crate::node::{lacks_device_files, record_of};
use crate::record::rewritten;

/// Returns the config of an instance whose sockets are named after its pod. The fake kubelet registers the first
/// socket in alphabetical order.
fn instance(cluster: &TestCluster, pod_uid: &str) -> Config {
    Config {
        pod_uid: Some(pod_uid.to_owned()),
        ..cluster.config()
    }
}

/// Returns NVML of a driver root.
fn source_of(root: &Path) -> Source {
    Source {
        rescan: Duration::from_millis(100),
        ..Source::nvml(root.to_owned(), root.to_owned())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaves_node_to_old_instance_until_ready() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let old = cluster.start_with(instance(&cluster, "old"), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    old.await_ready().await;

    let root = cluster.node.root.path().join("driver-root");
    let mut config = instance(&cluster, "new");
    config.paths.artifacts_dir = cluster.node.root.path().join("no-image");
    config.listen = free_address();
    let new = cluster.start_with(config.clone(), source_of(&root));
    let reason_text =
        "another instance serves this node until this instance can: artifacts: cannot read";
    let reason = new.await_unmet(Condition::Registered, reason_text).await;
    let reason = match reason.contains("gpus: not yet") {
        true => new.await_unmet(Condition::Registered, "driver-root").await,
        false => reason,
    };
    assert!(reason.contains("; gpus: "), "{reason}");
    let sockets = || cluster.kubelet.registry().unwrap().len();
    assert_eq!(sockets(), 1);
    let unready = get(config.listen, "/readyz").await;
    assert!(unready.starts_with("HTTP/1.0 503"), "{unready}");
    assert!(
        unready.contains(&format!("registered: {reason_text}")),
        "{unready}"
    );
    eventually("an event on the node", || {
        let events = cluster.api.events();
        events
            .into_iter()
            .find(|(reason, note)| reason == "NotReady" && note.contains(reason_text))
    })
    .await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();

    // The artifacts alone are not enough.
    fs::create_dir(&config.paths.artifacts_dir).unwrap();
    for artifact in ["libvgpu.so", "drava-cdi-hook"] {
        let image = cluster.node.paths.artifacts_dir.join(artifact);
        fs::copy(image, config.paths.artifacts_dir.join(artifact)).unwrap();
    }
    new.await_unmet(Condition::Registered, "until this instance can: gpus: ")
        .await;
    assert_eq!(sockets(), 1);

    std::os::unix::fs::symlink(machine_root(), &root).unwrap();
    eventually("two sockets", || (sockets() == 2).then_some(())).await;
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    assert!(
        plugin.info.endpoint.contains("dra-new"),
        "{:?}",
        plugin.info
    );
    new.await_ready().await;
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registers_unready_instance_when_other_one_stops() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let old = cluster.start_with(instance(&cluster, "old"), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    old.await_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();

    let root = cluster.node.root.path().join("driver-root");
    let new = cluster.start_with(instance(&cluster, "new"), source_of(&root));
    new.await_unmet(Condition::Registered, "another instance serves this node")
        .await;
    old.stop().await;
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    cluster.api.put_claim(&claim(2, &[Share(0, "8Gi", "0")]));
    let error = plugin.prepare_one(&kubelet_claim(2)).await.unwrap_err();
    assert!(error.to_string().contains("driver-root"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaves_node_to_registered_standby() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    // An instance in standby that is registered, after the active one has ended.
    let registry = cluster.node.paths.kubelet_dir.join("plugins_registry");
    let standby = registry.join("gpu.drava.dev-standby-reg.sock@localhost");
    let listener = std::os::unix::net::UnixListener::bind(standby).unwrap();

    let root = cluster.node.root.path().join("driver-root");
    let new = cluster.start_with(instance(&cluster, "new"), source_of(&root));
    new.await_unmet(Condition::Registered, "another instance serves this node")
        .await;
    new.await_unmet(Condition::Registered, "driver-root").await;
    assert_eq!(cluster.kubelet.registry().unwrap().len(), 1);
    let locks = Locks::new(cluster.node.layout().locks(), Duration::ZERO);
    assert!(locks.try_active().unwrap().is_some(), "the lock is free");

    // Without the other instance it serves the node in any case.
    drop(listener);
    eventually("the socket of the instance", || {
        (cluster.kubelet.registry().unwrap().len() == 2).then_some(())
    })
    .await;
    assert!(locks.try_active().unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_alongside_first_instance_and_takes_over() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let first = cluster.start_with(instance(&cluster, "pod-1"), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    first.await_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();

    let second = cluster.start_with(instance(&cluster, "pod-2"), cluster.source());
    eventually("two sockets", || {
        (cluster.kubelet.registry().unwrap().len() == 2).then_some(())
    })
    .await;
    first.stop().await;
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    second.await_ready().await;
    cluster.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
    assert!(plugin.prepare_one(&kubelet_claim(2)).await.is_err());
    cluster.api.wipe_slices();
    eventually("slices of the second instance", || {
        (cluster.api.slices().len() == 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaves_records_of_newer_instance_alone() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let old = cluster.start_with(instance(&cluster, "old"), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    old.await_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();

    // A newer instance prepares the claim in its format; then the claim is deleted by force.
    let path = record_of(&cluster.node, 1);
    let valid = fs::read_to_string(&path).unwrap();
    let newer = rewritten(&valid, 2, |_| "newer format".to_owned());
    let written = path.with_extension("new");
    fs::write(&written, &newer).unwrap();
    fs::rename(written, &path).unwrap();
    cluster.api.delete_claim(&claim(1, &[]));
    let state = cluster.node.claim_state();
    let reason = old
        .await_unmet(Condition::Records, "format version 2")
        .await;
    assert!(
        reason.contains(&format!("GPUs {}", GPU_UUIDS[0])) && reason.contains("downgrade"),
        "{reason}"
    );
    eventually("an event on the node", || {
        let events = cluster.api.events();
        events
            .into_iter()
            .find(|(reason, note)| reason == "NotReady" && note.contains("format version 2"))
    })
    .await;

    // A downgraded instance does not replace the one that serves the node.
    let downgraded = cluster.start_with(instance(&cluster, "downgraded"), cluster.source());
    downgraded
        .await_unmet(Condition::Registered, "until this instance can: records: ")
        .await;
    assert_eq!(cluster.kubelet.registry().unwrap().len(), 1);
    downgraded.stop().await;

    // Neither an instance that starts (and reconciles without grace period) nor kubelet's calls change anything.
    old.stop().await;
    let orphan = cluster.spec_file(9);
    fs::copy(cluster.spec_file(1), &orphan).unwrap();
    let alone = cluster.start_with(instance(&cluster, "alone"), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    alone
        .await_unmet(Condition::Records, "format version 2")
        .await;
    eventually("a reconciliation", || (!orphan.exists()).then_some(())).await;
    cluster.api.put_claim(&claim(2, &[Share(0, "8Gi", "0")]));
    cluster.api.put_claim(&claim(3, &[Share(1, "8Gi", "0")]));
    let error = prepare_error(&plugin, 2).await;
    assert!(error.contains("format version 2"), "{error}");
    plugin.prepare_one(&kubelet_claim(3)).await.unwrap();
    plugin.unprepare_one(&kubelet_claim(3)).await.unwrap();
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap_err();
    assert_eq!(cluster.node.claim_state(), state);
    assert_eq!(fs::read_to_string(&path).unwrap(), newer);

    // The newer instance is back and unprepares the claim.
    fs::remove_file(&path).unwrap();
    alone.await_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removes_only_sockets_of_killed_instances() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let old = cluster.start_with(instance(&cluster, "old"), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    old.await_ready().await;
    let kubelet = &cluster.node.paths.kubelet_dir;
    let socket = |name: &str| {
        let path = kubelet.join(name);
        // Dropping the listener leaves the file, as a killed process does.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        path
    };
    let stale = [
        socket("plugins_registry/gpu.drava.dev-killed-reg.sock@localhost"),
        socket("plugins/gpu.drava.dev/dra-killed.sock"),
    ];
    let foreign = socket("plugins_registry/gpu.other.dev-killed-reg.sock");
    let file = kubelet.join("plugins/gpu.drava.dev/dra-file.sock");
    fs::write(&file, "no socket").unwrap();

    let new = cluster.start_with(instance(&cluster, "new"), cluster.source());
    eventually("no stale sockets", || {
        stale.iter().all(|path| !path.exists()).then_some(())
    })
    .await;
    assert!(foreign.exists() && file.exists());
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    new.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_for_other_instance_with_same_socket() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (first, _plugin) = cluster.start_ready().await;
    let second = cluster.start();
    second
        .await_unmet(
            Condition::Registered,
            "another instance of the driver serves",
        )
        .await;
    first.stop().await;
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    second.await_ready().await;
}
