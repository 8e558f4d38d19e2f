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
use crate::fixture::Result::Share;
use crate::fixture::claim;
use crate::harness::{World, kubelet_claim, refusal};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_that_kubelet_wipes_or_somebody_edits_are_published_again() {
    let world = World::new().await;
    let (_running, _plugin) = world.ready().await;
    let published = world.api.slices();
    assert_eq!(published.len(), 2);
    world.api.wipe_slices();
    eventually("republication", || {
        (world.api.slices().len() == 2).then_some(())
    })
    .await;

    let name = published
        .keys()
        .find(|name| name.contains("devices"))
        .unwrap();
    let taints = |slice: &Value| slice["spec"]["devices"][0]["taints"].clone();
    let before = taints(&published[name]);
    world.api.edit_slice(name, |slice| {
        slice["spec"]["devices"][0]["taints"] = Value::Null
    });
    eventually("repair", || {
        (taints(&world.api.slices()[name]) == before).then_some(())
    })
    .await;
    world.api.edit_slice(name, |slice| {
        slice["metadata"]["ownerReferences"] = Value::Null
    });
    eventually("owner", || {
        world.api.slices()[name]["metadata"]["ownerReferences"]
            .as_array()
            .map(drop)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_of_an_earlier_layout_are_deleted_and_no_others() {
    let world = World::new().await;
    let (_running, _plugin) = world.ready().await;
    let mut published = world.api.slices();
    let (_, of_ours) = published.pop_first().unwrap();
    let mut of_others = of_ours.clone();
    of_others["spec"]["nodeName"] = Value::from("node-b");
    world.api.put_slice("theirs", of_others);
    world.api.put_slice("old", of_ours);
    eventually("deletion", || {
        (!world.api.slices().contains_key("old")).then_some(())
    })
    .await;
    assert!(world.api.slices().contains_key("theirs"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_driver_writes_no_slice_that_is_right() {
    let world = World::new().await;
    let (running, _plugin) = world.ready().await;
    running.stop().await;
    let writes = world.api.writes().len();
    let (_running, _plugin) = world.ready().await;
    assert_eq!(world.api.writes().len(), writes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_drops_counters_gets_whole_cards_and_an_event_with_the_gate() {
    let world = World::new().await;
    world
        .api
        .drop_fields(&["sharedCounters", "consumesCounters"]);
    let (_running, _plugin) = world.ready().await;
    let slices = world.api.slices();
    let devices = world.api.devices();
    let names: Vec<&Value> = devices.iter().map(|device| &device["name"]).collect();
    assert_eq!(names, ["gpu-0", "gpu-1"]);
    let event = eventually("event", || {
        world
            .api
            .events()
            .into_iter()
            .find(|(reason, _)| reason == "FieldsDropped")
    });
    assert!(event.await.1.contains("DRAPartitionableDevices"));
    // No fight: it stays as it is.
    let writes = world.api.writes().len();
    // The slices are looked at after each change; a write that the first look found necessary precedes the second.
    // One more, because the list with which a watch begins is taken for a look.
    for _ in 0..3 {
        let looks = world.api.lists(SLICES);
        world.api.edit_slice(slices.keys().next().unwrap(), |_| {});
        eventually("a look at the slices", || {
            (world.api.lists(SLICES) > looks).then_some(())
        })
        .await;
    }
    assert_eq!(world.api.writes().len(), writes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_card_that_vanishes_is_tainted_refused_and_unhealthy_and_comes_back() {
    let world = World::new().await;
    let (_running, plugin) = world.ready().await;
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
    world
        .gpus
        .change(|inventory| taken = Some(inventory.cards.remove(1)));
    eventually("taint", || (!unhealthy(&world).is_empty()).then_some(())).await;
    let next = stream.next().await.unwrap().unwrap();
    assert_eq!(health(&next, "gpu-1-vgpu"), HealthStatus::Unhealthy);
    assert_eq!(health(&next, "gpu-0-vgpu"), HealthStatus::Healthy);
    world.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
    let error = refusal(&plugin, 1).await;
    assert!(
        error.contains(
            "device gpu-1-vgpu is not on this node any more (present: gpu-0, gpu-0-vgpu)"
        ),
        "{error}"
    );

    world.gpus.change(|inventory| inventory.cards.extend(taken));
    eventually("recovery", || unhealthy(&world).is_empty().then_some(())).await;
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_library_fails_the_slices_stay_and_the_health_is_unknown() {
    let world = World::new().await;
    let (_running, plugin) = world.ready().await;
    let published = world.api.slices();
    let mut stream = plugin.watch_health().await.unwrap();
    world.gpus.fail();
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
    assert_eq!(world.api.slices(), published);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_card_outlives_the_driver_while_a_claim_holds_it_and_is_withdrawn_then() {
    let world = World::new().await;
    let (running, _plugin) = world.ready().await;
    world.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
    running.stop().await;
    world
        .gpus
        .change(|inventory| drop(inventory.cards.remove(1)));

    let impatient = Config {
        retained_grace: Duration::ZERO,
        ..world.config()
    };
    let running = world.start_with(impatient, world.source());
    world.kubelet.register("gpu.drava.dev").await.unwrap();
    running.is_ready().await;
    // It could have been withdrawn each time that the claims were listed.
    eventually("two looks at the claims", || {
        (world.api.lists(CLAIMS) >= 2).then_some(())
    })
    .await;
    let lost = ["gpu-1: lost", "gpu-1-vgpu: lost"];
    assert_eq!(unhealthy(&world), lost);
    // Kubelet deletes all slices of its node when it restarts.
    world.api.wipe_slices();
    eventually("publication anew", || {
        (unhealthy(&world) == lost).then_some(())
    })
    .await;

    world.api.delete_claim(&claim(1, &[]));
    eventually("withdrawal", || unhealthy(&world).is_empty().then_some(())).await;
    assert_eq!(world.api.slices().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_card_switched_to_mig_stays_published_while_a_claim_holds_it_and_is_withdrawn_then() {
    let world = World::new().await;
    let machine = Machine::start(description::H100X2).unwrap();
    let mut impatient = Config {
        retained_grace: Duration::ZERO,
        ..world.config()
    };
    impatient.paths.driver_root_mount = machine.root().to_owned();
    let source = Source {
        rescan: Duration::from_millis(100),
        ..Source::nvml(
            impatient.paths.driver_root.clone(),
            machine.root().to_owned(),
        )
    };
    let running = world.start_with(impatient, source);
    let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
    running.is_ready().await;
    world.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let offered = world.api.devices();

    let lists = world.api.lists(CLAIMS);
    set_mig_mode(&machine, true);
    let partitioned = ["gpu-0: mig-mode", "gpu-0-vgpu: mig-mode"];
    eventually("taint", || (unhealthy(&world) == partitioned).then_some(())).await;
    eventually("two looks at the claims", || {
        (world.api.lists(CLAIMS) >= lists + 2).then_some(())
    })
    .await;
    assert_eq!(unhealthy(&world), partitioned);
    assert_eq!(world.api.devices().len(), offered.len());
    world.api.put_claim(&claim(2, &[Share(0, "8Gi", "0")]));
    let error = refusal(&plugin, 2).await;
    assert!(error.contains("MIG mode is on"), "{error}");

    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    world.api.delete_claim(&claim(1, &[]));
    world.api.delete_claim(&claim(2, &[]));
    let names = || -> Vec<Value> {
        let devices = world.api.devices().into_iter();
        devices.map(|device| device["name"].clone()).collect()
    };
    eventually("withdrawal", || {
        (names() == ["gpu-1", "gpu-1-vgpu"]).then_some(())
    })
    .await;
    set_mig_mode(&machine, false);
    eventually("recovery", || {
        (world.api.devices() == offered).then_some(())
    })
    .await;
}

/// The devices that must not be used, with the reason.
fn unhealthy(world: &World) -> Vec<String> {
    let reason = |device: &Value| {
        let taints = device["taints"].as_array()?;
        let taint = taints
            .iter()
            .find(|taint| taint["key"] == "gpu.drava.dev/unhealthy")?;
        let (name, reason) = (device["name"].as_str()?, taint["value"].as_str()?);
        Some(format!("{name}: {reason}"))
    };
    world.api.devices().iter().filter_map(reason).collect()
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
