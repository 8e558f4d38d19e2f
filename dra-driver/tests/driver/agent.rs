//! What the node agent finds reaches people.

use std::fs::OpenOptions;
use std::time::Duration;

use serde_json::Value;

use crate::api_server::eventually;
use crate::fixture::Result::Share;
use crate::fixture::{claim, claim_ref};
use crate::harness::{World, kubelet_claim};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_region_is_told_in_an_event_and_a_condition_until_it_is_sound_again() {
    let world = World::new().await;
    let (_running, plugin) = world.ready().await;
    for number in [1, 2] {
        world
            .api
            .put_claim(&claim(number, &[Share(0, "8Gi", "30")]));
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
    }
    let mounted = world.node.tmpfs.mounted();
    let uid = claim_ref(1).uid;
    let usage = mounted
        .iter()
        .find(|path| path.to_string_lossy().contains(uid.as_str()))
        .unwrap();
    let region = OpenOptions::new()
        .write(true)
        .open(usage.join("region"))
        .unwrap();
    let size = region.metadata().unwrap().len();
    region.set_len(100).unwrap();

    let told = || {
        let events = world.api.events();
        events
            .into_iter()
            .find(|(reason, _)| reason == "UsageRegionDamaged")
            .map(|(_, note)| note)
    };
    let note = eventually("an event", told).await;
    assert!(
        note.contains("default/claim-1") && note.contains("100 bytes"),
        "{note}"
    );
    assert!(note.contains("restart the pod"), "{note}");
    let enforced = |name: &str| -> Option<Value> {
        let claim = world.api.claim(name);
        let conditions = claim["status"]["devices"][0]["conditions"]
            .as_array()?
            .clone();
        conditions
            .into_iter()
            .find(|condition| condition["type"] == "Enforced")
    };
    let damaged = || enforced("claim-1").filter(|condition| condition["status"] == "False");
    assert_eq!(
        eventually("a condition", damaged).await["reason"],
        "UsageRegionDamaged"
    );

    region.set_len(size).unwrap();
    let sound = || enforced("claim-1").filter(|condition| condition["status"] == "True");
    eventually("the end of it", sound).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let events = world.api.events();
    let told = events
        .iter()
        .filter(|(reason, _)| reason == "UsageRegionDamaged");
    assert_eq!(told.count(), 1);
    assert_eq!(enforced("claim-2").unwrap()["status"], "True");
}
