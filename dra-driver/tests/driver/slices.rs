//! What a running driver publishes, whatever others or the hardware do.

use std::time::Duration;

use drava_dra_driver::driver::Config;
use drava_fake_kubelet::HealthStatus;
use futures::StreamExt as _;
use serde_json::Value;

use crate::api_server::{CLAIMS, SLICES, eventually};
use crate::fixture::Result::Share;
use crate::fixture::claim;
use crate::harness::{World, kubelet_claim};

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
    let names: Vec<Value> = slices
        .values()
        .flat_map(|slice| slice["spec"]["devices"].as_array().unwrap().clone())
        .map(|d| d["name"].clone())
        .collect();
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
    let unhealthy = |slices: &std::collections::BTreeMap<String, Value>| {
        slices
            .values()
            .any(|slice| slice.to_string().contains("gpu.drava.dev/unhealthy"))
    };
    eventually("taint", || unhealthy(&world.api.slices()).then_some(())).await;
    let next = stream.next().await.unwrap().unwrap();
    assert_eq!(health(&next, "gpu-1-vgpu"), HealthStatus::Unhealthy);
    assert_eq!(health(&next, "gpu-0-vgpu"), HealthStatus::Healthy);
    world.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
    let error = plugin
        .prepare_one(&kubelet_claim(1))
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(
            "device gpu-1-vgpu is not on this node any more (present: gpu-0, gpu-0-vgpu)"
        ),
        "{error}"
    );

    world.gpus.change(|inventory| inventory.cards.extend(taken));
    eventually("recovery", || {
        (!unhealthy(&world.api.slices())).then_some(())
    })
    .await;
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
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
        gone_grace: Duration::ZERO,
        ..world.config()
    };
    let running = world.start_with(impatient, world.source());
    world.kubelet.register("gpu.drava.dev").await.unwrap();
    running.is_ready().await;
    let tainted = || {
        let slices = world.api.slices();
        let devices = slices.values().flat_map(|slice| {
            slice["spec"]["devices"]
                .as_array()
                .cloned()
                .unwrap_or_default()
        });
        let is_unhealthy = |device: &Value| {
            device["taints"]
                .to_string()
                .contains("gpu.drava.dev/unhealthy")
        };
        devices
            .filter(is_unhealthy)
            .map(|device| device["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    // It could have been withdrawn each time that the claims were listed.
    eventually("two looks at the claims", || {
        (world.api.lists(CLAIMS) >= 2).then_some(())
    })
    .await;
    assert_eq!(tainted(), ["gpu-1", "gpu-1-vgpu"]);
    // Kubelet deletes all slices of its node when it restarts.
    world.api.wipe_slices();
    eventually("publication anew", || (tainted().len() == 2).then_some(())).await;

    world.api.delete_claim(&claim(1, &[]));
    eventually("withdrawal", || tainted().is_empty().then_some(())).await;
    assert_eq!(world.api.slices().len(), 2);
}
