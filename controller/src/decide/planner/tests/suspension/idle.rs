//! Shares that use no GPU time.

use std::time::Duration;

use drava_api::names;
use k8s_openapi::api::core::v1::Probe;
use serde_json::json;

use super::{add_suspendable, add_with, allow, wish};
use crate::decide::planner::tests::cluster::{TestCluster, applied};
use crate::fixture::{claim, object, pod};
use crate::watch::{Kind, Observation};

const START: &str = "2026-01-01T00:00:00Z";
const HOUR: Duration = Duration::from_secs(3600);

fn policy(cluster: &mut TestCluster, action: &str) {
    policy_after(cluster, "1h", action);
}

fn policy_after(cluster: &mut TestCluster, after: &str, action: &str) {
    let policy = object(json!({
        "metadata": {"name": "idle", "uid": "idle", "resourceVersion": "1"},
        "spec": {"idle": {"after": after, "action": action}},
    }));
    let observation = Observation::Policy(applied(policy));
    cluster.planner.observe(observation, cluster.now);
}

/// The node driver says since when the share is idle, and whether it is suspended: status, reason, and transition.
fn report(cluster: &mut TestCluster, idle: Option<&str>, answer: Option<(&str, &str, &str)>) {
    let mut claim = cluster.claims["nb"].clone();
    let status = claim.status.as_mut().unwrap();
    let devices = status.allocation.clone().unwrap().devices.unwrap();
    let result = &devices.results.unwrap()[0];
    let mut conditions = vec![json!({
        "type": "Idle", "status": if idle.is_some() { "True" } else { "False" }, "reason": "NoGpuTime", "message": "",
        "lastTransitionTime": idle.unwrap_or(START),
    })];
    conditions.extend(answer.map(|(status, reason, time)| {
        json!({"type": "Suspended", "status": status, "reason": reason, "message": "", "lastTransitionTime": time})
    }));
    status.devices = Some(vec![object(json!({
        "driver": result.driver, "pool": result.pool, "device": result.device, "shareID": result.share_id,
        "conditions": conditions,
    }))]);
    cluster.observe(claim);
}

/// The pod is ready since this time, or is not.
fn ready(cluster: &mut TestCluster, name: &str, since: Option<&str>) {
    let mut pod = cluster.pods[name].clone();
    let conditions = &mut pod.status.get_or_insert_default().conditions;
    let conditions = conditions.get_or_insert_default();
    conditions.retain(|condition| condition.type_ != "Ready");
    conditions.push(object(json!({
        "type": "Ready", "status": if since.is_some() { "True" } else { "False" }, "lastTransitionTime": since.unwrap_or(START),
    })));
    cluster.add_pod(pod);
}

/// A notebook that has been idle since the start.
fn idle_notebook(action: &str) -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "nb", "60Gi", 0);
    ready(&mut cluster, "nb", Some(START));
    policy(&mut cluster, action);
    report(&mut cluster, Some(START), None);
    cluster
}

fn suspended_for(cluster: &TestCluster) -> Option<&str> {
    let annotations = cluster.claims["nb"].metadata.annotations.as_ref()?;
    annotations
        .get(names::SUSPENDED_FOR_ANNOTATION)
        .map(String::as_str)
}

#[test]
fn idle_share_gives_its_gpu_until_a_program_calls_cuda() {
    let mut cluster = idle_notebook("suspend");
    cluster.advance(HOUR - Duration::from_secs(1));
    cluster.settle();
    assert!(cluster.suspensions.is_empty(), "not for an hour");
    cluster.advance(Duration::from_secs(1));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
    assert_eq!(suspended_for(&cluster), Some("idle"));
    let said = "the share of claim nb has used no GPU time since 2026-01-01T00:00:00Z, and is being suspended until a program calls CUDA";
    assert!(cluster.messages_of("Pod/nb").contains(&said));
    cluster.advance(HOUR);
    cluster.settle();
    assert!(cluster.suspensions.is_empty(), "its node has not answered");
    let since = "2026-01-01T02:00:00Z";
    report(
        &mut cluster,
        Some(START),
        Some(("True", "Suspended", since)),
    );
    cluster.add_pod_of_priority("other", "60Gi", 0);
    assert_eq!(cluster.settle(), ["other → n1"]);
    cluster.bind(("other", "n1"));
    cluster.end("other");
    cluster.change_leader();
    policy(&mut cluster, "suspend");
    cluster.advance(24 * HOUR);
    cluster.settle();
    assert!(cluster.suspensions.is_empty(), "room alone resumes nothing");
    // The next cell runs.
    report(&mut cluster, Some(START), Some(("True", "Demanded", since)));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-nb"]);
    assert_eq!(suspended_for(&cluster), None);
    // The node driver has not reported yet that it is not idle.
    let resumed = "2026-01-02T02:00:00Z";
    report(
        &mut cluster,
        Some(START),
        Some(("False", "Resumed", resumed)),
    );
    cluster.advance(HOUR - Duration::from_secs(1));
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    cluster.advance(Duration::from_secs(1));
    cluster.settle();
    assert_eq!(
        cluster.write_intents(),
        ["+nb"],
        "an hour after it was resumed"
    );
}

#[test]
fn demanded_share_waits_for_room_without_a_limit() {
    let mut cluster = idle_notebook("suspend");
    super::ended::limit_suspension(&mut cluster, "nb", 600);
    report(&mut cluster, Some(START), None);
    cluster.advance(HOUR);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
    let since = "2026-01-01T01:00:00Z";
    report(
        &mut cluster,
        Some(START),
        Some(("True", "Suspended", since)),
    );
    cluster.add_pod_of_priority("other", "60Gi", 0);
    assert_eq!(cluster.settle(), ["other → n1"]);
    cluster.bind(("other", "n1"));
    report(&mut cluster, Some(START), Some(("True", "Demanded", since)));
    cluster.advance(HOUR);
    cluster.settle();
    assert!(cluster.suspensions.is_empty() && cluster.evictions.is_empty());
    let last = "the share of claim nb is suspended; it is resumed when there is room on device gpu-0-vgpu of pool n1/gpus: 60 GiB of \
                memory must be free";
    assert_eq!(cluster.messages_of("Pod/nb").last(), Some(&last));
    cluster.end("other");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-nb"]);
}

#[test]
fn share_that_uses_its_gpu_before_the_answer_is_not_suspended() {
    let mut cluster = idle_notebook("suspend");
    cluster.advance(HOUR);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
    report(&mut cluster, None, None);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-nb"]);
}

#[test]
fn share_that_cannot_be_suspended_has_an_event() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_with(&mut cluster, "nb", "60Gi", 0, |pod| {
        pod.spec.as_mut().unwrap().containers[0].liveness_probe = Some(Probe::default());
    });
    policy(&mut cluster, "suspend");
    report(&mut cluster, Some(START), None);
    cluster.advance(HOUR);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    let messages = cluster.messages_of("Pod/nb");
    let last = messages.last().unwrap();
    assert!(
        last.contains("and cannot be suspended: its pod has a liveness or startup probe"),
        "{last}"
    );
    let count = messages.len();
    cluster.advance(Duration::from_secs(600));
    cluster.settle();
    assert_eq!(
        cluster.messages_of("Pod/nb").len(),
        count,
        "it is said once"
    );
}

#[test]
fn refusal_of_the_node_is_an_event() {
    let mut cluster = idle_notebook("suspend");
    cluster.advance(HOUR);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
    report(
        &mut cluster,
        Some(START),
        Some(("False", "SuspendRefused", START)),
    );
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-nb"]);
    let last = cluster
        .messages_of("Pod/nb")
        .last()
        .copied()
        .unwrap_or_default();
    assert!(last.contains("is idle, and cannot be suspended"), "{last}");
}

#[test]
fn event_of_idle_share_changes_nothing() {
    let mut cluster = idle_notebook("event");
    cluster.advance(HOUR);
    cluster.settle();
    cluster.advance(HOUR);
    cluster.settle();
    assert!(cluster.suspensions.is_empty() && cluster.evictions.is_empty());
    let said = "the share of claim nb has used no GPU time since 2026-01-01T00:00:00Z";
    assert_eq!(cluster.messages_of("Pod/nb").last(), Some(&said));
}

#[test]
fn pod_of_idle_share_is_evicted_as_far_as_budgets_allow_it() {
    let state = "its share has used no GPU time since 2026-01-01T00:00:00Z";
    let mut cluster = idle_notebook("evict");
    cluster.advance(HOUR);
    cluster.settle();
    cluster.refuse_eviction("the disruption budget");
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    let blocked = format!("cannot evict this pod: the disruption budget; {state}");
    assert_eq!(cluster.messages_of("Pod/nb").last(), Some(&&*blocked));
    cluster.advance(Duration::from_secs(300));
    cluster.settle();
    assert_eq!(cluster.evict(), [format!("nb because {state}")]);
}

#[test]
fn without_a_policy_nothing_happens() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "nb", "60Gi", 0);
    report(&mut cluster, Some(START), None);
    cluster.advance(24 * HOUR);
    cluster.settle();
    assert!(cluster.suspensions.is_empty() && cluster.evictions.is_empty());
    // A policy that is created later acts on it.
    policy(&mut cluster, "suspend");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
}

#[test]
fn wish_of_a_user_precedes_idleness() {
    let mut cluster = idle_notebook("suspend");
    cluster.advance(HOUR);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
    wish(&mut cluster, "nb", true);
    report(
        &mut cluster,
        Some(START),
        Some(("True", "Suspended", START)),
    );
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
    assert_eq!(
        suspended_for(&cluster),
        None,
        "it is suspended for the user"
    );
    cluster.settle();
    assert!(cluster.suspensions.is_empty(), "until the user resumes it");
    wish(&mut cluster, "nb", false);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-nb"]);
}

#[test]
fn each_idle_period_has_one_action() {
    let mut cluster = idle_notebook("event");
    cluster.advance(HOUR);
    cluster.settle();
    let count = cluster.messages_of("Pod/nb").len();
    for _ in 0..24 {
        cluster.advance(HOUR);
        // The claim has changed for another reason.
        report(&mut cluster, Some(START), None);
        cluster.settle();
    }
    assert_eq!(cluster.messages_of("Pod/nb").len(), count);
    report(&mut cluster, None, None);
    report(&mut cluster, Some("2026-01-02T01:00:00Z"), None);
    cluster.settle();
    assert_eq!(cluster.messages_of("Pod/nb").len(), count);
    cluster.advance(HOUR);
    cluster.settle();
    assert_eq!(cluster.messages_of("Pod/nb").len(), count + 1);
}

#[test]
fn pod_of_idle_share_is_evicted_once_and_not_while_it_ends() {
    let mut cluster = idle_notebook("evict");
    for _ in 0..3 {
        cluster.advance(HOUR);
        report(&mut cluster, Some(START), None);
        cluster.settle();
        assert_eq!(cluster.evictions.len(), 1, "no answer of the API server");
    }
    let mut cluster = idle_notebook("evict");
    cluster.start_deletion("nb");
    for _ in 0..3 {
        cluster.advance(HOUR);
        cluster.settle();
        assert!(cluster.evictions.is_empty());
    }
}

#[test]
fn time_of_a_pod_that_is_to_be_evicted_counts_from_when_it_is_ready() {
    let mut cluster = idle_notebook("evict");
    ready(&mut cluster, "nb", None);
    cluster.advance(24 * HOUR);
    cluster.settle();
    assert!(cluster.evictions.is_empty(), "it pulls its image");
    ready(&mut cluster, "nb", Some("2026-01-02T00:00:00Z"));
    cluster.advance(HOUR - Duration::from_secs(1));
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    cluster.advance(Duration::from_secs(300));
    cluster.settle();
    assert_eq!(cluster.evictions.len(), 1);
}

#[test]
fn pod_that_works_with_another_claim_is_not_evicted() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["nb", "busy"] {
        let mut claim = claim(name, "30Gi");
        allow(&mut claim);
        cluster.add_claim(claim);
    }
    let pod = pod("nb", &["nb", "busy"]);
    cluster.add_pod(pod);
    assert_eq!(cluster.settle(), ["nb → n1"]);
    cluster.bind(("nb", "n1"));
    ready(&mut cluster, "nb", Some(START));
    policy(&mut cluster, "evict");
    report(&mut cluster, Some(START), None);
    cluster.advance(24 * HOUR);
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    let said = "the share of claim nb has used no GPU time since 2026-01-01T00:00:00Z, and its pod is not evicted: the pod has other claims";
    assert_eq!(cluster.messages_of("Pod/nb").last(), Some(&said));
}

#[test]
fn member_of_a_gang_is_not_evicted_because_it_is_idle() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["nb", "peer"] {
        cluster.add_member(name, "30Gi", "2");
    }
    let placed = cluster.settle();
    for placed in &placed {
        cluster.bind(placed.split_once(" → ").unwrap());
    }
    assert_eq!(placed.len(), 2);
    ready(&mut cluster, "nb", Some(START));
    policy(&mut cluster, "evict");
    report(&mut cluster, Some(START), None);
    cluster.advance(24 * HOUR);
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    let messages = cluster.messages_of("Pod/nb");
    let last = messages.last().unwrap();
    assert!(
        last.contains("is not evicted: the pod belongs to gang"),
        "{last}"
    );
}

#[test]
fn suspended_share_is_not_idle_for_its_eviction() {
    let mut cluster = idle_notebook("evict");
    cluster.advance(HOUR / 2);
    wish(&mut cluster, "nb", true);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
    for answer in [None, Some(("True", "Suspended", "2026-01-01T00:30:00Z"))] {
        report(&mut cluster, Some(START), answer);
        cluster.advance(24 * HOUR);
        cluster.settle();
        assert!(cluster.evictions.is_empty(), "it waits for its user");
    }
}

#[test]
fn new_leader_gives_the_nodes_time_to_say_who_works_again() {
    for is_used in [true, false] {
        let mut cluster = idle_notebook("evict");
        cluster.advance(24 * HOUR);
        // The claim as the new leader lists it, with the level from before an outage.
        cluster.planner.world.unlisted.insert(Kind::Claims);
        report(&mut cluster, Some("2026-01-01T00:00:01Z"), None);
        cluster.planner.world.unlisted.remove(&Kind::Claims);
        policy(&mut cluster, "evict");
        cluster.advance(Duration::from_secs(59));
        cluster.settle();
        assert!(cluster.evictions.is_empty());
        if is_used {
            report(&mut cluster, None, None);
        }
        cluster.advance(Duration::from_secs(1));
        cluster.settle();
        assert_eq!(cluster.evictions.is_empty(), is_used);
    }
}

#[test]
fn intent_that_could_not_be_written_is_tried_again() {
    let mut cluster = idle_notebook("suspend");
    cluster.advance(HOUR);
    cluster.settle();
    cluster.end_intents(false);
    cluster.settle();
    assert!(cluster.suspensions.is_empty(), "it rests");
    cluster.advance(Duration::from_secs(1));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
}

#[test]
fn idle_share_that_cannot_be_suspended_is_tried_again() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "other", "10Gi", 0);
    add_suspendable(&mut cluster, "nb", "60Gi", 0);
    super::host_memory::limit_host_memory(&mut cluster, "n1", 60 << 10);
    super::suspend(&mut cluster, "other");
    policy(&mut cluster, "suspend");
    report(&mut cluster, Some(START), None);
    cluster.advance(HOUR);
    cluster.settle();
    assert!(cluster.suspensions.is_empty(), "too little host memory");
    cluster.end("other");
    cluster.advance(Duration::from_secs(299));
    cluster.settle();
    assert!(cluster.suspensions.is_empty(), "it is tried now and then");
    cluster.advance(Duration::from_secs(1));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
}

#[test]
fn labels_of_a_namespace_decide_about_shares_that_are_idle_already() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "nb", "60Gi", 0);
    let policy = object(json!({
        "metadata": {"name": "idle", "uid": "idle", "resourceVersion": "1"},
        "spec": {
            "namespaceSelector": {"matchLabels": {"workload": "notebooks"}},
            "idle": {"after": "1h", "action": "suspend"},
        },
    }));
    let observation = Observation::Policy(applied(policy));
    cluster.planner.observe(observation, cluster.now);
    report(&mut cluster, Some(START), None);
    cluster.advance(24 * HOUR);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    label_namespace(&mut cluster, "2");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
}

fn label_namespace(cluster: &mut TestCluster, version: &str) {
    let namespace = object(json!({
        "metadata": {"name": "default", "uid": "ns", "resourceVersion": version, "labels": {"workload": "notebooks"}},
    }));
    let observation = Observation::Namespace(applied(namespace));
    cluster.planner.observe(observation, cluster.now);
}

#[test]
fn change_of_a_namespace_repeats_no_action() {
    let mut cluster = idle_notebook("event");
    cluster.advance(HOUR);
    cluster.settle();
    let count = cluster.messages_of("Pod/nb").len();
    for version in ["2", "3"] {
        label_namespace(&mut cluster, version);
        cluster.advance(HOUR);
        cluster.settle();
    }
    assert_eq!(cluster.messages_of("Pod/nb").len(), count);
}

#[test]
fn refused_idle_share_is_not_suspended_again_at_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "nb", "60Gi", 0);
    policy_after(&mut cluster, "1m", "suspend");
    report(&mut cluster, Some(START), None);
    cluster.advance(Duration::from_secs(60));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
    let at = "2026-01-01T00:01:00Z";
    report(
        &mut cluster,
        Some(START),
        Some(("False", "SuspendFailed", at)),
    );
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-nb"]);
    report(&mut cluster, Some(START), Some(("False", "Resumed", at)));
    cluster.advance(Duration::from_secs(120));
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    let last = cluster.messages_of("Pod/nb").last().copied();
    let why = "and cannot be suspended: its node has not suspended it a short time ago";
    assert!(last.is_some_and(|last| last.ends_with(why)), "{last:?}");
    cluster.advance(Duration::from_secs(300));
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    cluster.advance(Duration::from_secs(300));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+nb"]);
}

#[test]
fn idle_claim_of_the_next_pod_is_looked_at_again() {
    let mut cluster = idle_notebook("evict");
    cluster.advance(HOUR);
    cluster.settle();
    assert_eq!(cluster.evict().len(), 1);
    // The claim outlives its pod, and nothing has used it since.
    cluster.delete_pod("nb");
    cluster.add_pod(pod("next", &["nb"]));
    cluster.bind(("next", "n1"));
    ready(&mut cluster, "next", Some(START));
    cluster.advance(Duration::from_secs(299));
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    cluster.advance(Duration::from_secs(1));
    cluster.settle();
    let state = "its share has used no GPU time since 2026-01-01T00:00:00Z";
    assert_eq!(cluster.evict(), [format!("next because {state}")]);
}

#[test]
fn eviction_of_idle_pod_is_repeated_some_time_after_it_failed() {
    let mut cluster = idle_notebook("evict");
    cluster.advance(HOUR);
    cluster.settle();
    let eviction = cluster.evictions.pop().unwrap();
    // The API server answers late.
    let late = Duration::from_secs(100);
    cluster.advance(late);
    cluster.settle();
    cluster.evictions.push(eviction);
    cluster.refuse_eviction("the disruption budget");
    cluster.advance(Duration::from_secs(299));
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    cluster.advance(Duration::from_secs(1));
    cluster.settle();
    assert_eq!(cluster.evictions.len(), 1);
}
