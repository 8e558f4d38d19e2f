//! Container runtimes that do not apply claims: refused by RuntimeClass, or detected.

use std::fs;
use std::path::PathBuf;

use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::repair::injection;
use drava_dra_driver::report::pods::PodRef;
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use serde_json::{Value, json};

use crate::api_server::eventually;
use crate::cluster::{TestCluster, kubelet_claim, prepare_error};
use crate::fixture::Allocated::Share;
use crate::fixture::{claim, claim_ref, share_id};
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
    run_hook(&cluster, 1);
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

/// Returns the file that the CDI hook empties, of a claim with one share.
fn pending(cluster: &TestCluster, number: u32) -> PathBuf {
    let share = ShareId::parse(&share_id(number, 0)).unwrap();
    cluster
        .node
        .layout()
        .pending(&claim_ref(number).uid, &share)
}

/// Does what the CDI hook does in a container of a claim with one share.
fn run_hook(cluster: &TestCluster, number: u32) {
    fs::write(pending(cluster, number), "").unwrap();
}

/// Returns a running pod whose container uses these claims.
fn running_pod(numbers: &[u32]) -> Value {
    let mut pod = pod(1, &json!({"running": {}}));
    let claims = numbers
        .iter()
        .map(|number| json!({"name": "gpu", "resourceClaimName": format!("claim-{number}")}));
    pod["status"]["resourceClaimStatuses"] = claims.collect();
    pod
}

/// Waits until the condition `Enforced` of a claim has this reason.
async fn await_enforced(cluster: &TestCluster, number: u32, reason: &str) {
    eventually(&format!("reason {reason} of claim {number}"), || {
        let condition = cluster
            .api
            .condition(&format!("claim-{number}"), "Enforced");
        condition.filter(|condition| condition["reason"] == reason)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_no_share_that_is_injected_during_slow_answer() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1, 2]).await;
    // The hook of claim 1 runs between the first check of its file and the answer about its pod.
    let injected = pending(&cluster, 1);
    let change = move || fs::write(injected, "").unwrap();
    cluster.api.on_read_of_pod("pod", change);
    cluster.api.put_pod(&running_pod(&[1, 2]));
    // Claims are checked in order of their UIDs.
    await_enforced(&cluster, 2, "CdiIgnored").await;
    await_enforced(&cluster, 1, "Interposed").await;
    let events = cluster.api.events();
    let is_about_first =
        |(reason, note): &(String, String)| reason == "CdiIgnored" && note.contains("claim-1");
    assert!(!events.iter().any(is_about_first), "{events:?}");
}

/// A container that removes the content of `/run` has been injected, also when it has ended before the driver checks it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_no_share_whose_container_empties_run() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1, 2, 3]).await;
    // Claim 1 has a container; that of claim 2 has removed the file and ended before the driver has seen it.
    run_hook(&cluster, 1);
    fs::remove_file(pending(&cluster, 2)).unwrap();
    cluster.api.put_pod(&running_pod(&[1, 2, 3]));
    // Claims are checked in order of their UIDs.
    await_enforced(&cluster, 3, "CdiIgnored").await;
    fs::remove_file(pending(&cluster, 1)).unwrap();
    let other = claim(4, &[Share(1, "8Gi", "30")]);
    cluster.api.put_claim(&other);
    plugin.prepare_one(&kubelet_claim(4)).await.unwrap();
    cluster.api.put_pod(&running_pod(&[1, 2, 3, 4]));
    await_enforced(&cluster, 4, "CdiIgnored").await;
    for number in [1, 2] {
        let name = format!("claim-{number}");
        let events = cluster.api.events();
        let is_about =
            |(reason, note): &(String, String)| reason == "CdiIgnored" && note.contains(&name);
        assert!(!events.iter().any(is_about), "{events:?}");
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdraws_report_when_share_is_injected() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1, 2]).await;
    cluster.api.put_pod(&running_pod(&[1, 2]));
    for number in [1, 2] {
        await_enforced(&cluster, number, "CdiIgnored").await;
    }
    run_hook(&cluster, 1);
    await_enforced(&cluster, 1, "Interposed").await;
    // Another instance of the driver withdraws the report too.
    running.kill().await;
    run_hook(&cluster, 2);
    let (_running, _plugin) = cluster.start_ready().await;
    await_enforced(&cluster, 2, "Interposed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refuses_runtime_with_its_own_kernel() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    let mut found = claim(1, &[Share(0, "8Gi", "30")]);
    found.status.as_mut().unwrap().reserved_for = Some(vec![ResourceClaimConsumerReference {
        resource: "pods".to_owned(),
        name: "pod".to_owned(),
        uid: "pod-uid".to_owned(),
        ..Default::default()
    }]);
    cluster.api.put_claim(&found);
    let put = |class: &str, handler: Option<&str>| {
        let mut pod = pod(1, &json!({"waiting": {}}));
        pod["spec"]["runtimeClassName"] = json!(class);
        cluster.api.put_pod(&pod);
        if let Some(handler) = handler {
            cluster.api.put_runtime_class(class, handler);
        }
    };
    // The handler decides; without an answer of the API server, the name does.
    for (class, handler, shown) in [
        ("sandboxed", Some("kata-qemu"), "kata-qemu"),
        ("gvisor", None, "gvisor"),
    ] {
        put(class, handler);
        let error = prepare_error(&plugin, 1).await;
        for part in [
            &format!(
                "pod default/pod has the RuntimeClass \"{class}\" with the handler \"{shown}\": a runtime with its own \
                 kernel does not give containers the devices and limits of claims"
            ),
            "use another RuntimeClass, or add it to driver.runtimeClasses",
        ] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
    }
    assert_eq!(cluster.node.claim_state().0, Vec::<String>::new());
    // As OpenShift's performance profiles have it.
    put("performance-cnf", Some("high-performance"));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    // The configuration of the driver lists this class.
    put("kata-with-cdi", Some("kata"));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
}
