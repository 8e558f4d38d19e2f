//! Objects that cannot be read.

use drava_api::listed::Unreadable;
use serde_json::json;

use super::cluster::TestCluster;
use crate::fixture::object;
use crate::watch::Kind;
use drava_api::listed::{Change, DeletedObject};

fn unreadable(name: &str) -> Unreadable {
    object(json!({
        "metadata": {"name": name, "namespace": "tenant", "uid": format!("uid-{name}"), "resourceVersion": "7"},
        "devices": [{"driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu"}],
        "cause": "status.x: a time out of range",
    }))
}

#[test]
fn takes_the_pools_of_an_unreadable_claim() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.planner.unreadable(Kind::Claims, &unreadable("odd"));
    cluster.add_pod_with_claim("a", "8Gi");
    assert!(cluster.settle().is_empty(), "its devices may be in use");
    let text_of = |object: &str, reason: &str| {
        let mut events = cluster.events.iter();
        let found = events.find(|(regarding, found, _)| regarding == object && *found == reason);
        found.map(|(_, _, text)| text.clone())
    };
    assert_eq!(
        text_of("ResourceClaim/odd", "ObjectUnreadable").as_deref(),
        Some(
            "the controller cannot read the object: status.x: a time out of range; its devices count as taken, and no other \
             device of their pools is allocated; repair or delete it"
        )
    );
    let excluded = text_of("Node/n1", "GpuPoolExcluded").unwrap();
    assert!(
        excluded.contains("claim tenant/odd has devices of the pool and cannot be read"),
        "{excluded}"
    );
    assert_eq!(cluster.planner.metrics().unreadable[&Kind::Claims], 1);

    let key = ("tenant".to_owned(), "odd".to_owned());
    cluster.planner.readable(Kind::Claims, key);
    let deleted = DeletedObject {
        namespace: "tenant".to_owned(),
        name: "odd".to_owned(),
        uid: "uid-odd".to_owned(),
    };
    let now = cluster.now;
    cluster.planner.claim(Change::Deleted(deleted), now);
    assert_eq!(cluster.settle(), ["a → n1"]);
    assert!(cluster.planner.metrics().unreadable.is_empty());
}

#[test]
fn names_unreadable_pod_and_goes_on() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.planner.unreadable(Kind::Pods, &unreadable("odd"));
    cluster.add_pod_with_claim("a", "8Gi");
    assert_eq!(cluster.settle(), ["a → n1"]);
    assert!(
        cluster
            .events
            .iter()
            .any(|(regarding, reason, _)| regarding == "Pod/odd" && *reason == "ObjectUnreadable")
    );
}
