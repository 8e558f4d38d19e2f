//! What the node agent finds reaches people.

use std::fs::OpenOptions;

use crate::api_server::eventually;
use crate::cluster::TestCluster;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_damaged_region_until_repaired() {
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.ready().await;
    cluster.prepare_shares(&plugin, &[1, 2]).await;
    let region_of = |number: u32| {
        let mut file = OpenOptions::new();
        file.write(true)
            .open(cluster.usage(number).join("region"))
            .unwrap()
    };
    let region = region_of(1);
    let size = region.metadata().unwrap().len();
    region.set_len(100).unwrap();

    let told = |claim: &str| -> Vec<String> {
        let events = cluster.api.events();
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
    let enforced = |claim: &str| cluster.api.condition(claim, "Enforced");
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
