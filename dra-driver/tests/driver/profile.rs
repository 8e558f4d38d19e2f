//! Node profiles that change while the driver runs.

use std::time::Duration;

use drava_dra_driver::driver::Config;
use drava_dra_driver::publish::profile::Intervals;
use drava_dra_driver::report::conditions::Condition;
use drava_fake_kubelet::Plugin;
use serde_json::{Value, json};

use crate::api_server::{CLAIMS, PROFILES, eventually};
use crate::cluster::{Running, TestCluster, kubelet_claim};
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{GPU_UUIDS, NODE, claim};
use crate::node::lacks_device_files;

/// Returns a configuration in which free devices change as soon as they are tainted.
fn config(cluster: &TestCluster) -> Config {
    Config {
        retained_grace: Duration::ZERO,
        ..cluster.config()
    }
}

/// Starts a driver in a cluster with node profiles.
async fn start(cluster: &TestCluster) -> (Running, Plugin) {
    cluster.api.install_profiles();
    let running = cluster.start_with(config(cluster), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    (running, plugin)
}

fn device(cluster: &TestCluster, name: &str) -> Option<Value> {
    let devices = cluster.api.devices();
    devices.into_iter().find(|device| device["name"] == name)
}

fn names(cluster: &TestCluster) -> Vec<String> {
    let devices = cluster.api.devices();
    devices
        .iter()
        .map(|device| device["name"].as_str().unwrap().to_owned())
        .collect()
}

/// Returns the slots of a device and the reason of its taint.
fn slots(cluster: &TestCluster, name: &str) -> (String, Option<String>) {
    let device = device(cluster, name).unwrap();
    let taints = device["taints"].as_array().unwrap();
    let taint = taints
        .iter()
        .find(|taint| taint["key"] == "gpu.drava.dev/unhealthy");
    let reason = taint.map(|taint| taint["value"].as_str().unwrap().to_owned());
    (
        device["capacity"]["slots"]["value"]
            .as_str()
            .unwrap()
            .to_owned(),
        reason,
    )
}

/// Waits until a share device has these slots and this taint.
async fn await_slots(cluster: &TestCluster, name: &str, count: &str, taint: Option<&str>) {
    let wanted = (count.to_owned(), taint.map(str::to_owned));
    eventually(&format!("{wanted:?} on {name}"), || {
        (slots(cluster, name) == wanted).then_some(())
    })
    .await;
}

async fn await_names(cluster: &TestCluster, expected: &[&str]) {
    eventually(&format!("devices {expected:?}"), || {
        (names(cluster) == expected).then_some(())
    })
    .await;
}

/// Waits until the status of a profile has an entry of this node with this state, and returns the entry.
async fn await_state(cluster: &TestCluster, profile: &str, state: &str) -> Value {
    eventually(&format!("{state} in the status of {profile}"), || {
        let status = cluster.api.profile_status(profile);
        let mut nodes = status["nodes"].as_array()?.iter();
        let entry = nodes.find(|entry| entry["name"] == NODE)?.clone();
        (entry["state"] == state).then_some(entry)
    })
    .await
}

fn condition(cluster: &TestCluster, profile: &str, kind: &str) -> Value {
    let status = cluster.api.profile_status(profile);
    let conditions = status["conditions"].as_array().unwrap().clone();
    let mut conditions = conditions.into_iter();
    conditions
        .find(|condition| condition["type"] == kind)
        .unwrap()
}

/// Waits until the driver listed the claims twice: it could change a device after each list.
async fn await_checks_of_claims(cluster: &TestCluster) {
    let lists = cluster.api.lists(CLAIMS);
    eventually("two lists of the claims", || {
        (cluster.api.lists(CLAIMS) >= lists + 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn applies_growth_under_allocation_at_once() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = start(&cluster).await;
    cluster.prepare_shares(&plugin, &[1]).await;
    cluster
        .api
        .put_profile("a", &json!({"splitCount": 20, "defaultCores": 10}));
    for name in ["gpu-0-vgpu", "gpu-1-vgpu"] {
        await_slots(&cluster, name, "20", None).await;
    }
    let cores = &device(&cluster, "gpu-0-vgpu").unwrap()["capacity"]["cores"];
    assert_eq!(cores["requestPolicy"]["default"], "10");
    await_state(&cluster, "a", "Applied").await;
    assert_eq!(condition(&cluster, "a", "Applied")["status"], "True");
    assert_eq!(cluster.api.profile_status("a")["nodeCount"], 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reduction_waits_for_claims_and_is_reported() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = start(&cluster).await;
    cluster.prepare_shares(&plugin, &[1]).await;
    cluster.api.put_profile("a", &json!({"splitCount": 4}));
    // A free GPU changes after its taint.
    await_slots(&cluster, "gpu-1-vgpu", "4", None).await;
    await_slots(&cluster, "gpu-0-vgpu", "10", Some("profile-amounts")).await;
    let entry = await_state(&cluster, "a", "Waiting").await;
    assert_eq!(entry["waiting"][0]["device"], "gpu-0-vgpu", "{entry}");
    let reason = entry["waiting"][0]["reason"].as_str().unwrap();
    assert!(
        reason.contains("slots 10 to 4") && reason.contains("until no claim holds it"),
        "{reason}"
    );
    assert_eq!(
        condition(&cluster, "a", "Applied")["reason"],
        "DevicesWaiting"
    );
    let event = eventually("event", || {
        let mut events = cluster.api.events_with_kind().into_iter();
        events.find(|(reason, ..)| reason == "ProfileWaiting")
    });
    let (_, note, kind) = event.await;
    assert!(
        kind == "GpuNodeProfile" && note.contains("gpu-0-vgpu"),
        "{kind}: {note}"
    );

    // Claims that were allocated before the change are prepared, also by a restarted driver.
    running.stop().await;
    for number in 2..=6 {
        cluster
            .api
            .put_claim(&claim(number, &[Share(0, "1Gi", "0")]));
    }
    let (_running, plugin) = start(&cluster).await;
    await_slots(&cluster, "gpu-0-vgpu", "10", Some("profile-amounts")).await;
    for number in 2..=6 {
        eventually_prepared(&plugin, number).await;
    }
    await_checks_of_claims(&cluster).await;
    assert_eq!(slots(&cluster, "gpu-0-vgpu").0, "10");

    for number in 1..=6 {
        plugin.unprepare_one(&kubelet_claim(number)).await.unwrap();
        cluster.api.delete_claim(&claim(number, &[]));
    }
    await_slots(&cluster, "gpu-0-vgpu", "4", None).await;
    let entry = await_state(&cluster, "a", "Applied").await;
    assert_eq!(entry["waiting"], Value::Null);
}

/// Prepares a claim as kubelet does, which repeats a failed call.
async fn eventually_prepared(plugin: &Plugin, number: u32) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while let Err(error) = plugin.prepare_one(&kubelet_claim(number)).await {
        assert!(tokio::time::Instant::now() < deadline, "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excluded_gpu_leaves_when_no_claim_holds_it() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = start(&cluster).await;
    cluster.api.put_claim(&claim(1, &[Whole(0)]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    cluster
        .api
        .put_profile("a", &json!({"exclude": {"uuids": GPU_UUIDS}}));
    await_names(&cluster, &["gpu-0", "gpu-0-vgpu"]).await;
    eventually("two waiting devices", || {
        let status = cluster.api.profile_status("a");
        let waiting = status["nodes"][0]["waiting"].as_array()?;
        let devices: Vec<_> = waiting.iter().map(|one| &one["device"]).collect();
        (devices == ["gpu-0", "gpu-0-vgpu"]).then_some(())
    })
    .await;
    await_checks_of_claims(&cluster).await;
    assert_eq!(names(&cluster), ["gpu-0", "gpu-0-vgpu"]);

    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    cluster.api.delete_claim(&claim(1, &[]));
    await_names(&cluster, &[]).await;
    await_state(&cluster, "a", "Applied").await;
    // The administrator wants that, so it is no defect of the node.
    assert!(
        cluster
            .api
            .events()
            .iter()
            .all(|(reason, _)| reason != "GpuUnavailable")
    );

    // An excluded GPU does not appear while a driver starts.
    running.stop().await;
    let writes = cluster.api.writes().len();
    let (_running, _plugin) = start(&cluster).await;
    assert_eq!(cluster.api.writes().len(), writes);
    cluster
        .api
        .put_profile("a", &json!({"exclude": {"indices": [1]}}));
    await_names(&cluster, &["gpu-0", "gpu-0-vgpu"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_mode_under_allocation() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = start(&cluster).await;
    cluster.prepare_shares(&plugin, &[1]).await;
    // The shares of a claim stay in mode vgpu.
    cluster.api.put_profile("a", &json!({"mode": "vgpu"}));
    await_names(&cluster, &["gpu-0-vgpu", "gpu-1-vgpu"]).await;
    await_state(&cluster, "a", "Applied").await;
    assert_eq!(
        device(&cluster, "gpu-0-vgpu").unwrap()["attributes"]["mode"]["string"],
        "vgpu"
    );

    cluster.api.put_profile("a", &json!({"mode": "exclusive"}));
    await_names(&cluster, &["gpu-0", "gpu-0-vgpu", "gpu-1"]).await;
    await_slots(&cluster, "gpu-0-vgpu", "10", Some("profile-mode")).await;
    await_state(&cluster, "a", "Waiting").await;
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    cluster.api.delete_claim(&claim(1, &[]));
    await_names(&cluster, &["gpu-0", "gpu-1"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlapping_profiles_are_reported_to_both() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, _plugin) = start(&cluster).await;
    cluster.api.put_profile("b", &json!({"splitCount": 20}));
    await_slots(&cluster, "gpu-0-vgpu", "20", None).await;
    await_state(&cluster, "b", "Applied").await;
    cluster.api.put_profile("a", &json!({"splitCount": 30}));
    await_slots(&cluster, "gpu-0-vgpu", "30", None).await;
    let loser = await_state(&cluster, "b", "Conflict").await;
    assert_eq!(loser["conflicts"], json!(["a"]));
    let winner = await_state(&cluster, "a", "Applied").await;
    assert_eq!(winner["conflicts"], json!(["b"]));
    for profile in ["a", "b"] {
        assert_eq!(condition(&cluster, profile, "Conflict")["status"], "True");
    }
    let event = eventually("event", || {
        let mut events = cluster.api.events().into_iter();
        events.find(|(reason, _)| reason == "ProfileConflict")
    });
    assert!(event.await.1.contains("profile a selects the node too"));

    // Deletion of the first profile resolves the conflict.
    cluster.api.delete_profile("a");
    await_slots(&cluster, "gpu-0-vgpu", "20", None).await;
    await_state(&cluster, "b", "Applied").await;
    assert_eq!(condition(&cluster, "b", "Conflict")["status"], "False");
    cluster.api.delete_profile("b");
    await_slots(&cluster, "gpu-0-vgpu", "10", None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follows_the_labels_of_the_node() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, _plugin) = start(&cluster).await;
    cluster.api.put_profile(
        "a",
        &json!({"nodeSelector": {"pool": "dense"}, "splitCount": 20}),
    );
    cluster.api.label_node(NODE, &json!({"pool": "dense"}));
    await_slots(&cluster, "gpu-0-vgpu", "20", None).await;
    await_state(&cluster, "a", "Applied").await;
    cluster.api.label_node(NODE, &json!({"pool": "other"}));
    await_slots(&cluster, "gpu-0-vgpu", "10", None).await;
    eventually("removal of the entry", || {
        (cluster.api.profile_status("a")["nodes"] == json!([])).then_some(())
    })
    .await;
    assert_eq!(condition(&cluster, "a", "Applied")["reason"], "NoNodes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_without_resource_definition_until_it_is_installed() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let running = cluster.start_with(config(&cluster), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    cluster.prepare_shares(&plugin, &[1]).await;
    let lists = cluster.api.lists(PROFILES);
    eventually("another check", || {
        (cluster.api.lists(PROFILES) > lists).then_some(())
    })
    .await;
    cluster.api.put_profile("a", &json!({"splitCount": 20}));
    await_slots(&cluster, "gpu-0-vgpu", "20", None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ignores_unreadable_profile() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, _plugin) = start(&cluster).await;
    cluster.api.put_profile("a", &json!({"mode": "quantum"}));
    cluster.api.put_profile("b", &json!({"splitCount": 20}));
    await_slots(&cluster, "gpu-0-vgpu", "20", None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removes_entries_of_nodes_without_driver() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let entry = |name: &str| json!({"name": name, "state": "Applied", "observedGeneration": 1});
    cluster.api.put_profile("a", &json!({"splitCount": 20}));
    let status = json!({"nodes": [entry("gone-1"), entry("gone-2")], "conditions": []});
    cluster.api.put_profile_status("a", &status);
    let config = Config {
        profile_intervals: Intervals {
            entries: Duration::from_millis(100),
            ..cluster.config().profile_intervals
        },
        ..config(&cluster)
    };
    let _running = cluster.start_with(config, cluster.source());
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    await_state(&cluster, "a", "Applied").await;
    eventually("one entry", || {
        let status = cluster.api.profile_status("a");
        (status["nodes"].as_array()?.len() == 1).then_some(())
    })
    .await;
    assert_eq!(cluster.api.profile_status("a")["nodeCount"], 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_nothing_until_profiles_are_known() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    cluster.api.set_down(true);
    let running = cluster.start_with(config(&cluster), cluster.source());
    let reason = running
        .await_unmet(Condition::Profiles, "the API server")
        .await;
    assert!(reason.contains("nothing is published"), "{reason}");
    cluster
        .api
        .put_profile("a", &json!({"exclude": {"indices": [0]}}));
    cluster.api.set_down(false);
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    await_names(&cluster, &["gpu-1", "gpu-1-vgpu"]).await;
    let writes = cluster.api.writes();
    let slices = writes
        .iter()
        .filter(|write| write.contains("resourceslices"));
    assert_eq!(slices.count(), 2, "{writes:?}");
}
