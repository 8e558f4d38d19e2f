//! Events and conditions for findings of the node agent.

use std::fs::OpenOptions;

use crate::api_server::eventually;
use crate::cluster::TestCluster;
use crate::node::lacks_device_files;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_damaged_region_until_repaired() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1, 2]).await;
    let region_of = |number: u32| {
        let mut file = OpenOptions::new();
        file.write(true)
            .open(cluster.usage_dir(number).join("region"))
            .unwrap()
    };
    let region = region_of(1);
    let size = region.metadata().unwrap().len();
    region.set_len(100).unwrap();

    let reported = |claim: &str| -> Vec<String> {
        let events = cluster.api.events();
        events
            .into_iter()
            .filter(|(reason, note)| reason == "UsageRegionDamaged" && note.contains(claim))
            .map(|(_, note)| note)
            .collect()
    };
    let note = eventually("an event of claim 1", || reported("claim-1").pop()).await;
    assert!(
        note.contains("default/claim-1") && note.contains("100 bytes"),
        "{note}"
    );
    assert!(note.contains("restart the pod"), "{note}");
    let enforced = |claim: &str| cluster.api.condition(claim, "Enforced");
    let damaged = || enforced("claim-1").filter(|condition| condition["status"] == "False");
    assert_eq!(
        eventually("a condition of claim 1", damaged).await["reason"],
        "UsageRegionDamaged"
    );

    region.set_len(size).unwrap();
    let cleared = || enforced("claim-1").filter(|condition| condition["status"] == "True");
    eventually("a cleared condition", cleared).await;
    assert_eq!(enforced("claim-2").unwrap()["status"], "True");

    // Events are published in order: a second event of claim 1 would precede the event of claim 2.
    region_of(2).set_len(100).unwrap();
    eventually("an event of claim 2", || reported("claim-2").pop()).await;
    assert_eq!(reported("claim-1").len(), 1);
}
