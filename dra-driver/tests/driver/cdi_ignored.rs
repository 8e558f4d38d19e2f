//! Detection of a container runtime that ignores CDI.

use std::fs;

use drava_dra_driver::injection;
use drava_dra_driver::pods::PodRef;
use serde_json::{Value, json};

use crate::api_server::eventually;
use crate::cluster::TestCluster;
use crate::fixture::claim_ref;
use crate::node::lacks_device_files;

/// Returns a pod named `pod` whose container uses `claim-<number>` and is in `state`.
fn pod(number: u32, state: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "pod", "namespace": "default", "uid": "pod-uid"},
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "any"}],
            "containers": [
                {"name": "app", "resources": {"claims": [{"name": "gpu"}]}},
                {"name": "sidecar"},
            ],
        },
        "status": {
            "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": format!("claim-{number}")}],
            "containerStatuses": [
                {"name": "app", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state},
                {"name": "sidecar", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                 "state": {"running": {}}},
            ],
        },
    })
}

#[test]
fn considers_only_started_containers_of_claim() {
    let wanted = PodRef {
        namespace: "default".to_owned(),
        name: "pod".to_owned(),
        uid: "pod-uid".to_owned(),
    };
    let runs = |pod: Value, number: u32| {
        injection::runs_with(
            &serde_json::from_value(pod).unwrap(),
            &wanted,
            &claim_ref(number),
        )
    };
    assert!(runs(pod(1, &json!({"running": {}})), 1));
    assert!(runs(pod(1, &json!({"terminated": {"exitCode": 1}})), 1));
    assert!(
        !runs(pod(1, &json!({"waiting": {}})), 1),
        "the sidecar does not use the claim"
    );
    assert!(!runs(pod(1, &json!({"running": {}})), 2));
    let mut other = pod(1, &json!({"running": {}}));
    other["metadata"]["uid"] = json!("another-uid");
    assert!(!runs(other, 1));
    let mut direct = pod(1, &json!({"running": {}}));
    direct["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "claim-7"}]);
    direct["status"]["resourceClaimStatuses"] = json!([]);
    assert!(runs(direct, 7));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_container_runtime_that_ignores_cdi() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1, 2]).await;
    // The hook has marked claim 1 as injected.
    fs::write(cluster.usage_dir(1).join("injected"), "").unwrap();
    let mut both = pod(1, &json!({"running": {}}));
    both["status"]["resourceClaimStatuses"] = json!([{"name": "gpu", "resourceClaimName": "claim-1"}, {"name": "gpu", "resourceClaimName": "claim-2"}]);
    cluster.api.put_pod(&both);
    let reported = || {
        let events = cluster.api.events_with_kind();
        let about = |kind: &str| {
            let about =
                |event: &&(String, String, String)| event.0 == "CdiIgnored" && event.2 == kind;
            events.iter().find(about).map(|event| event.1.clone())
        };
        about("Pod").zip(about("ResourceClaim"))
    };
    let (of_pod, of_claim) = eventually("events on pod and claim", reported).await;
    assert_eq!(of_pod, of_claim);
    assert!(
        of_pod.contains("default/claim-2") && of_pod.contains("enable_cdi = true"),
        "{of_pod}"
    );
    assert!(
        cluster
            .api
            .events()
            .iter()
            .all(|(reason, note)| reason != "CdiIgnored" || !note.contains("claim-1"))
    );
    let enforced = || {
        let condition = cluster.api.condition("claim-2", "Enforced");
        condition.filter(|condition| condition["status"] == "False")
    };
    assert_eq!(
        eventually("condition", enforced).await["reason"],
        "CdiIgnored"
    );
}
