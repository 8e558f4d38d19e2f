//! Companions: claims that add to the shares of running pods.

use std::time::Duration;

use drava_api::reason::Reason;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::{Value, json};

use super::cluster::{TestCluster, applied};
use crate::action::event::ReleaseReason;
use crate::fixture::{claim, object, slice};
use crate::operate::metrics::CompanionCounts;

const RETRY: Duration = Duration::from_secs(1);

/// Returns a cluster of one node with two GPUs, on the first of which pod `a` has 40 GiB.
fn cluster_with_share() -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    let mut two: ResourceSlice = slice("n1");
    two.metadata.resource_version = Some("2".to_owned());
    let devices = two.spec.devices.as_mut().unwrap();
    let mut second = devices[0].clone();
    second.name = "gpu-1-vgpu".to_owned();
    let uuid = object(json!({"string": "GPU-n1-second"}));
    second
        .attributes
        .get_or_insert_default()
        .insert("uuid".to_owned(), uuid);
    devices.push(second);
    cluster.planner.slice(applied(two));
    cluster.add_running(&[("a", "40Gi", 5)]);
    assert_eq!(device_of(&cluster, "a"), "gpu-0-vgpu");
    cluster
}

fn device_of(cluster: &TestCluster, claim: &str) -> String {
    let allocation = cluster.claims[claim].status.clone().unwrap().allocation;
    let results = allocation.unwrap().devices.unwrap().results.unwrap();
    results[0].device.clone()
}

/// Returns a companion of the claim `a` for the pod `a`, changed at a JSON pointer.
fn companion(memory: &str, pointer: &str, value: Value) -> ResourceClaim {
    let mut companion = claim("more", memory);
    companion.metadata.labels =
        Some([("gpu.drava.dev/companion-of".to_owned(), "uid-a".to_owned())].into());
    companion.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "pod-a", "controller": true,
    }))]);
    if pointer.is_empty() {
        return companion;
    }
    let mut changed = serde_json::to_value(companion).unwrap();
    *changed.pointer_mut(pointer).unwrap() = value;
    object(changed)
}

/// The user deletes the companion, and the node driver reports that this has become of its capacity.
fn delete_companion(cluster: &mut TestCluster, reason: &str) {
    let mut companion = cluster.claims["more"].clone();
    companion.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:30Z")));
    let status = companion.status.as_mut().unwrap();
    let results = status
        .allocation
        .clone()
        .unwrap()
        .devices
        .unwrap()
        .results
        .unwrap();
    status.devices = Some(vec![object(json!({
        "driver": results[0].driver, "pool": results[0].pool, "device": results[0].device,
        "shareID": results[0].share_id,
        "conditions": [{
            "type": "Granted", "status": "False", "reason": reason, "message": "",
            "lastTransitionTime": "2026-01-01T00:00:30Z",
        }],
    }))]);
    cluster.observe(companion);
}

#[test]
fn share_grows_on_its_own_gpu_only() {
    let mut cluster = cluster_with_share();
    // The other GPU has room.
    cluster.add_running(&[("b", "20Gi", 5)]);
    assert_eq!(device_of(&cluster, "b"), "gpu-0-vgpu");
    cluster.add_claim(companion("40Gi", "", json!(null)));
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    let messages = cluster.messages_of("ResourceClaim/more").join("\n");
    assert!(messages.contains("InsufficientMemory"), "{messages}");
    cluster.delete_claim("more");
    cluster.add_claim(companion("20Gi", "", json!(null)));
    assert_eq!(cluster.settle(), ["a → n1"]);
    assert_eq!(device_of(&cluster, "more"), "gpu-0-vgpu");
    let reserved = cluster.claims["more"]
        .status
        .clone()
        .unwrap()
        .reserved_for
        .unwrap();
    let consumer = json!({"resource": "pods", "name": "a", "uid": "pod-a"});
    assert_eq!(serde_json::to_value(reserved).unwrap(), json!([consumer]));
}

#[test]
fn refuses_companion_that_can_never_fit() {
    let mut cluster = cluster_with_share();
    // The GPU has 80 GiB, of which the base has 40: with others that end, 40 GiB fit.
    cluster.add_running(&[("b", "20Gi", 5)]);
    cluster.add_claim(companion("41Gi", "", json!(null)));
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    let never = "InvalidCompanion: claim more can never fit: it adds 41 GiB to the 40 GiB of claim a, and gpu-0-vgpu of pool n1/gpus \
                 has 80 GiB altogether; delete it, and request less";
    assert_eq!(cluster.messages_of("ResourceClaim/more"), [never]);
    cluster.delete_claim("more");
    cluster.add_claim(companion("40Gi", "", json!(null)));
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    let messages = cluster.messages_of("ResourceClaim/more").join("\n");
    let waits = "only gpu-0-vgpu of pool n1/gpus counts, where claim a has its share";
    assert!(messages.contains(waits), "{messages}");
    cluster.end("b");
    cluster.advance(RETRY * 8);
    assert_eq!(cluster.settle(), ["a → n1"]);
}

/// Users do not look for a claim that the pod does not name.
#[test]
fn pod_says_why_its_companions_wait() {
    let mut cluster = cluster_with_share();
    cluster.add_claim(named("more", "41Gi", "2026-01-01T00:00:00Z"));
    cluster.settle();
    let of_pod = |cluster: &TestCluster| {
        let messages = cluster.messages_of("Pod/a");
        messages.last().map(|message| (*message).to_owned())
    };
    let said = of_pod(&cluster).unwrap();
    let first =
        "claim more does not add to the pod's share: InvalidCompanion: claim more can never fit";
    assert!(said.starts_with(first), "{said}");
    for name in ["again", "third"] {
        cluster.add_claim(named(name, "42Gi", "2026-01-01T00:00:05Z"));
    }
    cluster.settle();
    cluster.advance(RETRY * 10);
    cluster.settle();
    let said = of_pod(&cluster).unwrap();
    assert!(said.starts_with("claim again does not"), "{said}");
    assert!(said.ends_with("; 1 more"), "{said}");
    // A tenant names the pod of another one.
    let mut cluster = cluster_with_share();
    let mut forged = companion("41Gi", "", json!(null));
    forged.metadata.namespace = Some("other".to_owned());
    cluster.add_claim(forged);
    cluster.settle();
    assert_eq!(of_pod(&cluster), None);
}

#[test]
fn share_grows_as_soon_as_its_gpu_has_room() {
    let mut cluster = cluster_with_share();
    cluster.add_running(&[("b", "40Gi", 5)]);
    assert_eq!(device_of(&cluster, "b"), "gpu-0-vgpu");
    cluster.add_claim(companion("10Gi", "", json!(null)));
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    cluster.end("b");
    assert!(cluster.planner.next_deadline().unwrap() <= cluster.now + RETRY);
    cluster.advance(RETRY);
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn companion_ends_with_its_pod_in_the_search_for_victims() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("a", "40Gi", 5)]);
    cluster.add_claim(companion("30Gi", "", json!(null)));
    assert_eq!(cluster.settle(), ["a → n1"]);
    // It does not fit beside what the companion has.
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    assert_eq!(cluster.evict(), ["a for urgent"]);
}

#[test]
fn share_does_not_grow_into_what_a_waiting_pod_was_promised() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("a", "40Gi", 5), ("b", "20Gi", 5)]);
    // It waits for the end of b.
    cluster.start_deletion("b");
    cluster.add_pod_of_priority("head", "40Gi", 5);
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    cluster.add_claim(companion("10Gi", "", json!(null)));
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    cluster.end("b");
    assert_eq!(cluster.settle(), ["head → n1"]);
}

#[test]
fn growth_obeys_quota() {
    let mut cluster = cluster_with_share();
    cluster.set_quota(
        "q",
        &json!({"namespaces": ["default"], "limit": {"memory": "44Gi"}}),
    );
    cluster.add_claim(companion("10Gi", "", json!(null)));
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    let messages = cluster.messages_of("ResourceClaim/more").join("\n");
    assert!(
        messages.contains(Reason::QuotaExceeded.as_str()),
        "{messages}"
    );
}

/// Returns a companion as [`companion`] with this name and age.
fn named(name: &str, memory: &str, created: &str) -> ResourceClaim {
    let mut named = companion(memory, "", json!(null));
    named.metadata.name = Some(name.to_owned());
    named.metadata.uid = Some(format!("uid-{name}"));
    named.metadata.creation_timestamp = Some(object(json!(created)));
    named
}

/// Otherwise a share of many small claims would evade the maximum.
#[test]
fn companions_count_with_their_base_against_claim_maximum() {
    let mut cluster = cluster_with_share();
    let max = json!({"memory": "50Gi", "devices": 1});
    cluster.set_quota(
        "q",
        &json!({"namespaces": ["default"], "claim": {"max": max}}),
    );
    cluster.add_claim(companion("8Gi", "", json!(null)));
    assert_eq!(cluster.settle(), ["a → n1"]);
    cluster.add_claim(named("again", "4Gi", "2026-01-01T00:00:00Z"));
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    let messages = cluster.messages_of("ResourceClaim/again").join("\n");
    let expected = "QuotaExceeded: quota q: memory 52 GiB requested by one claim, 50 GiB allowed; what companions add counts";
    assert!(messages.contains(expected), "{messages}");
    cluster.delete_claim("again");
    cluster.add_claim(named("again", "2Gi", "2026-01-01T00:00:00Z"));
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn oldest_companion_is_tried_first() {
    let mut cluster = cluster_with_share();
    cluster.add_claim(named("more", "30Gi", "2026-01-01T00:00:00Z"));
    cluster.add_claim(named("again", "30Gi", "2026-01-01T00:00:05Z"));
    assert_eq!(cluster.settle(), ["a → n1"]);
    assert_eq!(device_of(&cluster, "more"), "gpu-0-vgpu");
}

#[test]
fn refuses_claim_that_is_no_companion_of_running_share() {
    let request = "/spec/devices/requests/0";
    let cases = [
        (
            "/metadata/ownerReferences".to_owned(),
            json!([]),
            "has no pod as its controlling owner",
        ),
        (
            "/metadata/ownerReferences/0/uid".to_owned(),
            json!("pod-b"),
            "does not run in namespace default",
        ),
        (
            "/metadata/ownerReferences/0/name".to_owned(),
            json!("b"),
            "the UID of pod a and the name b",
        ),
        (
            "/metadata/labels".to_owned(),
            json!({"gpu.drava.dev/companion-of": "x"}),
            "no claim with the UID x",
        ),
        (
            format!("{request}/name"),
            json!("other"),
            "request other of claim a has no share of a GPU",
        ),
        (
            format!("{request}/exactly"),
            json!({"deviceClassName": "vgpu.drava.dev", "count": 2}),
            "exactly one device",
        ),
        (
            format!("{request}/exactly/deviceClassName"),
            json!("cheap.example.com"),
            "has the device class cheap.example.com, and that of claim a has vgpu.drava.dev",
        ),
    ];
    for (pointer, value, expected) in cases {
        let mut cluster = cluster_with_share();
        cluster.add_claim(companion("10Gi", &pointer, value));
        assert_eq!(cluster.settle(), [] as [&str; 0], "{pointer}");
        let messages = cluster.messages_of("ResourceClaim/more").join("\n");
        assert!(messages.contains(expected), "{pointer}: {messages}");
        assert!(
            messages.contains(Reason::InvalidCompanion.as_str()),
            "{messages}"
        );
    }
    // A share of two pods.
    let mut cluster = cluster_with_share();
    let mut shared = cluster.claims["a"].clone();
    let other = json!({"resource": "pods", "name": "b", "uid": "pod-b"});
    let status = shared.status.as_mut().unwrap();
    status.reserved_for.as_mut().unwrap().push(object(other));
    cluster.observe(shared);
    cluster.add_claim(companion("10Gi", "", json!(null)));
    assert_eq!(cluster.settle(), [] as [&str; 0]);
    let messages = cluster.messages_of("ResourceClaim/more").join("\n");
    assert!(
        messages.contains("shares of several pods do not grow"),
        "{messages}"
    );
}

#[test]
fn capacity_is_released_after_share_has_given_it_back() {
    let mut cluster = cluster_with_share();
    cluster.add_claim(companion("40Gi", "", json!(null)));
    cluster.settle();
    delete_companion(&mut cluster, "InUse");
    assert!(cluster.actions().1.is_empty());
    delete_companion(&mut cluster, "Released");
    let (_, releases) = cluster.actions();
    assert_eq!(releases.len(), 1);
    assert_eq!(releases[0].reason, ReleaseReason::GivenBack);
    assert!(cluster.actions().1.is_empty(), "the release is in flight");
    cluster.release(&releases[0]);
    cluster.delete_claim("more");
    cluster.add_pod_of_priority("b", "40Gi", 0);
    assert_eq!(cluster.settle(), ["b → n1"]);
    assert_eq!(device_of(&cluster, "b"), "gpu-0-vgpu");
}

#[test]
fn companions_are_counted_by_state() {
    let mut cluster = cluster_with_share();
    cluster.add_claim(named("never", "41Gi", "2026-01-01T00:00:00Z"));
    cluster.add_claim(named("more", "30Gi", "2026-01-01T00:00:01Z"));
    cluster.add_claim(named("waits", "20Gi", "2026-01-01T00:00:02Z"));
    cluster.settle();
    let counts = |waiting, allocated, returning| CompanionCounts {
        waiting,
        refused: 1,
        allocated,
        returning,
    };
    assert_eq!(cluster.planner.metrics().companions, counts(1, 1, 0));
    delete_companion(&mut cluster, "InUse");
    assert_eq!(cluster.planner.metrics().companions, counts(1, 0, 1));
    cluster.delete_claim("more");
    cluster.delete_claim("waits");
    assert_eq!(cluster.planner.metrics().companions, counts(0, 0, 0));
}

#[test]
fn failed_growth_is_tried_again() {
    let mut cluster = cluster_with_share();
    cluster.add_claim(companion("40Gi", "", json!(null)));
    let (jobs, _) = cluster.actions();
    assert_eq!(jobs.len(), 1);
    let failure = crate::action::AllocationFailure {
        message: "no answer".to_owned(),
        is_reportable: false,
    };
    for job in jobs {
        cluster.finish(job, Vec::new(), Some(failure.clone()));
    }
    cluster.advance(RETRY);
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn failed_release_is_repeated() {
    let mut cluster = cluster_with_share();
    cluster.add_claim(companion("40Gi", "", json!(null)));
    cluster.settle();
    delete_companion(&mut cluster, "Released");
    let (_, releases) = cluster.actions();
    cluster.release_finished(&releases[0], None);
    assert!(cluster.actions().1.is_empty(), "at once");
    cluster.advance(RETRY);
    assert_eq!(cluster.actions().1.len(), 1);
    cluster.release_finished(&releases[0], None);
    cluster.advance(RETRY);
    assert!(cluster.actions().1.is_empty(), "after twice the time");
    cluster.advance(RETRY);
    assert_eq!(cluster.actions().1.len(), 1);
}

/// Containers use the claim, whatever its label says.
#[test]
fn claim_that_its_pod_names_is_not_released() {
    let mut cluster = cluster_with_share();
    cluster.add_running(&[("more", "10Gi", 5)]);
    let mut labelled = cluster.claims["more"].clone();
    let label = ("gpu.drava.dev/companion-of".to_owned(), "uid-a".to_owned());
    labelled.metadata.labels = Some([label].into());
    cluster.observe(labelled);
    delete_companion(&mut cluster, "Released");
    assert!(cluster.actions().1.is_empty());
    cluster.delete_pod("more");
    cluster.advance(RETRY);
    assert_eq!(cluster.actions().1.len(), 1);
}

/// Its node has no room for another pod, and others must not be decided again because of it.
#[test]
fn share_grows_on_full_node_without_a_look_at_others() {
    let mut cluster = TestCluster::new(&["n1", "n2", "n3"]);
    cluster.add_running(&[("a", "40Gi", 5)]);
    let node = cluster.claims["a"]
        .status
        .clone()
        .unwrap()
        .allocation
        .unwrap();
    let node = node.devices.unwrap().results.unwrap()[0].pool.clone();
    let node = node.strip_suffix("/gpus").unwrap().to_owned();
    let mut full = crate::fixture::node(&node);
    let allocatable = json!({"cpu": "1", "pods": "1"});
    full.status.as_mut().unwrap().allocatable = object(allocatable);
    cluster.planner.node(applied(full));
    cluster.settle();
    let before = cluster.planner.node_checks();
    cluster.add_claim(companion("10Gi", "", json!(null)));
    assert_eq!(cluster.settle(), [format!("a → {node}")]);
    assert!(cluster.planner.node_checks() - before <= 2);
}
