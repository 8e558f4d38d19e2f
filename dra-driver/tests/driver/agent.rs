//! What the node agent finds reaches people.

use std::fs::OpenOptions;

use crate::api_server::eventually;
use crate::harness::World;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_region_is_told_in_an_event_and_a_condition_until_it_is_sound_again() {
    let world = World::new().await;
    let (_running, plugin) = world.ready().await;
    world.prepare_shares(&plugin, &[1, 2]).await;
    let region_of = |number: u32| {
        let mut file = OpenOptions::new();
        file.write(true)
            .open(world.usage(number).join("region"))
            .unwrap()
    };
    let region = region_of(1);
    let size = region.metadata().unwrap().len();
    region.set_len(100).unwrap();

    let told = |claim: &str| -> Vec<String> {
        let events = world.api.events();
        events
            .into_iter()
            .filter(|(reason, note)| reason == "UsageRegionDamaged" && note.contains(claim))
            .map(|(_, note)| note)
            .collect()
    };
    let note = eventually("an event", || told("claim-1").pop()).await;
    assert!(
        note.contains("default/claim-1") && note.contains("100 bytes"),
        "{note}"
    );
    assert!(note.contains("restart the pod"), "{note}");
    let enforced = |claim: &str| world.api.condition(claim, "Enforced");
    let damaged = || enforced("claim-1").filter(|condition| condition["status"] == "False");
    assert_eq!(
        eventually("a condition", damaged).await["reason"],
        "UsageRegionDamaged"
    );

    region.set_len(size).unwrap();
    let sound = || enforced("claim-1").filter(|condition| condition["status"] == "True");
    eventually("the end of it", sound).await;
    assert_eq!(enforced("claim-2").unwrap()["status"], "True");

    // Events are told in order: a second one of the first claim would come before this one.
    region_of(2).set_len(100).unwrap();
    eventually("an event of the other claim", || told("claim-2").pop()).await;
    assert_eq!(told("claim-1").len(), 1);
}
