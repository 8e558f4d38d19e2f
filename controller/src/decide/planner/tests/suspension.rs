//! Suspended shares.

use std::time::Duration;

use drava_api::{Quantity, names};
use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use super::cluster::{TestCluster, member};
use crate::action::SuspensionOutcome;
use crate::fixture::{claim, object, pod};
use crate::watch::Kind;

mod ended;
mod host_memory;
mod idle;
mod running;
mod victims;

const RETRY: Duration = Duration::from_secs(1);

/// Adds a running pod whose claim may be suspended.
fn add_suspendable(cluster: &mut TestCluster, name: &str, memory: &str, priority: i32) {
    add_with(cluster, name, memory, priority, |_| ());
}

fn add_with(
    cluster: &mut TestCluster,
    name: &str,
    memory: &str,
    priority: i32,
    change: impl Fn(&mut Pod),
) {
    let mut claim = claim(name, memory);
    allow(&mut claim);
    cluster.add_claim(claim);
    let mut pod = pod(name, &[name]);
    pod.spec.as_mut().unwrap().priority = Some(priority);
    change(&mut pod);
    cluster.add_pod(pod);
    let placed = cluster.settle();
    assert_eq!(placed.len(), 1, "{placed:?}");
    cluster.bind(placed[0].split_once(" → ").unwrap());
}

/// The config of the claim allows its suspension.
pub(super) fn allow(claim: &mut ResourceClaim) {
    let devices = claim.spec.as_mut().unwrap().devices.as_mut().unwrap();
    devices.config = Some(vec![object(json!({
        "opaque": {"driver": names::DRIVER, "parameters": {
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "suspend": {"allowed": true},
        }},
    }))]);
}

/// The node driver answers.
pub(super) fn answer(cluster: &mut TestCluster, name: &str, status: &str, reason: &str) {
    let mut claim = cluster.claims[name].clone();
    let status_of = claim.status.as_mut().unwrap();
    let devices = status_of.allocation.clone().unwrap().devices.unwrap();
    let result = &devices.results.unwrap()[0];
    status_of.devices = Some(vec![object(json!({
        "driver": result.driver, "pool": result.pool, "device": result.device, "shareID": result.share_id,
        "conditions": [{
            "type": "Suspended", "status": status, "reason": reason, "message": "",
            "lastTransitionTime": "2026-01-01T00:00:30Z",
        }],
    }))]);
    cluster.observe(claim);
}

/// A user wishes the share to be suspended, or no longer.
pub(super) fn wish(cluster: &mut TestCluster, name: &str, is_wished: bool) {
    let mut claim = cluster.claims[name].clone();
    let annotations = claim.metadata.annotations.get_or_insert_default();
    match is_wished {
        true => annotations.insert(
            names::SUSPEND_WISH_ANNOTATION.to_owned(),
            names::SUSPEND.to_owned(),
        ),
        false => annotations.remove(names::SUSPEND_WISH_ANNOTATION),
    };
    cluster.observe(claim);
}

/// Suspends the share by hand.
fn suspend(cluster: &mut TestCluster, name: &str) {
    wish(cluster, name, true);
    cluster.settle();
    assert_eq!(cluster.write_intents(), [format!("+{name}")]);
    answer(cluster, name, "True", "Suspended");
}

/// Writes the intents, and returns the claims that are to be suspended.
fn suspended_pods(cluster: &mut TestCluster) -> Vec<String> {
    let written = cluster.write_intents().into_iter();
    written
        .filter_map(|written| Some(written.strip_prefix('+')?.to_owned()))
        .collect()
}

#[test]
fn pod_that_may_not_preempt_suspends_nothing() {
    for policy in [Some("Never"), None] {
        let mut cluster = TestCluster::new(&["n1"]);
        add_suspendable(&mut cluster, "low", "60Gi", 0);
        cluster.add_claim(claim("urgent", "60Gi"));
        let mut urgent = pod("urgent", &["urgent"]);
        let spec = urgent.spec.as_mut().unwrap();
        spec.priority = Some(10);
        spec.preemption_policy = policy.map(str::to_owned);
        cluster.add_pod(urgent);
        cluster.settle();
        let expected: &[&str] = if policy.is_none() { &["low"] } else { &[] };
        assert_eq!(suspended_pods(&mut cluster), expected);
        assert!(cluster.evictions.is_empty());
    }
}

#[test]
fn shares_are_resumed_by_priority_and_age() {
    let mut cluster = TestCluster::new(&["n1"]);
    for (name, priority, second) in [("late", 5, 9), ("low", 1, 0), ("early", 5, 3)] {
        add_with(&mut cluster, name, "25Gi", priority, |pod| {
            let created = format!("2026-01-01T00:00:0{second}Z");
            pod.metadata.creation_timestamp = Some(object(json!(created)));
        });
    }
    for name in ["late", "low", "early"] {
        suspend(&mut cluster, name);
    }
    cluster.add_pod_of_priority("other", "75Gi", 0);
    assert_eq!(cluster.settle(), ["other → n1"]);
    cluster.bind(("other", "n1"));
    for name in ["late", "low", "early"] {
        wish(&mut cluster, name, false);
    }
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    cluster.end("other");
    // Room for one of them after the other.
    cluster.add_pod_of_priority("first", "50Gi", 9);
    assert_eq!(cluster.settle(), ["first → n1"]);
    cluster.bind(("first", "n1"));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-early"]);
    answer(&mut cluster, "early", "False", "Resumed");
    cluster.end("first");
    cluster.add_pod_of_priority("second", "25Gi", 9);
    assert_eq!(cluster.settle(), ["second → n1"]);
    cluster.bind(("second", "n1"));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-late"]);
    answer(&mut cluster, "late", "False", "Resumed");
    cluster.end("second");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-low"]);
}

#[test]
fn share_that_a_user_suspends_makes_room_and_is_resumed_when_there_is_room() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    cluster.add_pod_of_priority("b", "60Gi", 0);
    assert!(cluster.settle().is_empty());
    wish(&mut cluster, "a", true);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+a"]);
    assert!(
        cluster.settle().is_empty(),
        "the node driver has not answered"
    );
    answer(&mut cluster, "a", "True", "Suspended");
    let placed = cluster.settle();
    assert_eq!(placed, ["b → n1"]);
    cluster.bind(("b", "n1"));
    // It stays suspended while the user wishes it, and while its memory is not free.
    wish(&mut cluster, "a", false);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    // A changed event of the same reason follows after a while.
    cluster.advance(Duration::from_secs(300));
    cluster.settle();
    let messages = cluster.messages_of("Pod/a");
    let last = "the share of claim a is suspended; it is resumed when there is room on device gpu-0-vgpu of pool n1/gpus: 60 GiB of memory must be free";
    assert_eq!(messages.last(), Some(&last), "{messages:?}");
    cluster.end("b");
    assert!(cluster.planner.next_deadline().unwrap() <= cluster.now + RETRY);
    cluster.advance(RETRY);
    // A pod that comes at the same time does not get the memory.
    cluster.add_pod_of_priority("c", "60Gi", 0);
    assert!(
        cluster.settle().is_empty(),
        "the share counts before the write"
    );
    assert_eq!(cluster.write_intents(), ["-a"]);
    answer(&mut cluster, "a", "False", "Resumed");
    assert!(cluster.settle().is_empty());
    assert!(cluster.suspensions.is_empty());
}

#[test]
fn share_counts_from_the_decision_to_resume_it_on() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    suspend(&mut cluster, "a");
    wish(&mut cluster, "a", false);
    cluster.settle();
    let writes = std::mem::take(&mut cluster.suspensions);
    assert_eq!(writes.len(), 1);
    // A newer version with the intent, whose answer is still True.
    answer(&mut cluster, "a", "True", "Suspended");
    cluster.add_pod_of_priority("b", "60Gi", 0);
    assert!(cluster.settle().is_empty());
    let failed = SuspensionOutcome {
        key: ("default".to_owned(), "a".to_owned()),
        claim: Some(Box::new(cluster.claims["a"].clone())),
        is_written: false,
    };
    cluster.planner.suspension_written(failed, cluster.now);
    assert!(cluster.settle().is_empty());
    cluster.advance(RETRY);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-a"]);
}

#[test]
fn share_of_lower_priority_is_suspended_instead_of_evicted() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_running(&[("other", "10Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
    let message =
        "WaitingForSuspension: the pod fits on n1 when the shares of default/low are suspended";
    assert_eq!(cluster.messages_of("Pod/urgent"), [message]);
    assert_eq!(
        cluster.messages_of("Pod/low"),
        ["the share of claim low is being suspended for pod default/urgent (priority 10)"]
    );
    assert_eq!(cluster.write_intents(), ["+low"]);
    assert!(cluster.settle().is_empty());
    assert!(
        cluster.suspensions.is_empty() && cluster.evictions.is_empty(),
        "once"
    );
    answer(&mut cluster, "low", "True", "Suspended");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    cluster.bind(("urgent", "n1"));
    cluster.advance(Duration::from_secs(60));
    assert!(cluster.settle().is_empty());
    assert!(cluster.suspensions.is_empty());
    cluster.end("urgent");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-low"]);
    // Events of one share follow each other after a while.
    cluster.advance(Duration::from_secs(10));
    cluster.settle();
    assert_eq!(
        cluster.messages_of("Pod/low").last(),
        Some(&"the share of claim low is being resumed")
    );
}

#[test]
fn share_is_resumed_at_once_when_its_pod_of_higher_priority_is_gone() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    // It goes before the share is suspended.
    cluster.delete_pod("urgent");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-low"]);
    answer(&mut cluster, "low", "False", "Resumed");
    cluster.add_pod_of_priority("second", "60Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    answer(&mut cluster, "low", "True", "Suspended");
    assert_eq!(cluster.settle(), ["second → n1"]);
    cluster.bind(("second", "n1"));
    cluster.settle();
    assert!(cluster.suspensions.is_empty(), "it has no room");
    cluster.end("second");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-low"]);
}

#[test]
fn waiting_pod_of_equal_priority_does_not_overtake_a_share() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_pod_of_priority("urgent", "70Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    answer(&mut cluster, "low", "True", "Suspended");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    cluster.bind(("urgent", "n1"));
    cluster.add_pod_of_priority("small", "30Gi", 0);
    // It fits nowhere, so it does not hold up the share.
    cluster.add_pod_of_priority("large", "900Gi", 20);
    cluster.settle();
    cluster.end("urgent");
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.write_intents(), ["-low"]);
    answer(&mut cluster, "low", "False", "Resumed");
    assert!(cluster.settle().is_empty());
}

#[test]
fn events_say_what_became_of_a_wish() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    let last = |cluster: &mut TestCluster| {
        cluster.advance(Duration::from_secs(10));
        cluster.settle();
        let messages = cluster.messages_of("Pod/a");
        let last = messages.last().map(|last| (*last).to_owned());
        last.unwrap_or_default()
    };
    for _ in 0..2 {
        suspend(&mut cluster, "a");
        assert_eq!(
            last(&mut cluster),
            "the share of claim a is suspended as its annotation gpu.drava.dev/suspend-requested requests"
        );
        wish(&mut cluster, "a", false);
        cluster.settle();
        assert_eq!(cluster.write_intents(), ["-a"]);
        answer(&mut cluster, "a", "False", "Resumed");
        assert_eq!(last(&mut cluster), "the share of claim a is being resumed");
    }
    wish(&mut cluster, "a", true);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+a"]);
    answer(&mut cluster, "a", "False", "SuspendFailed");
    assert_eq!(
        last(&mut cluster),
        "the share of claim a cannot be suspended: "
    );
}

#[test]
fn refusal_names_what_is_against_it() {
    let limit =
        json!({"suspend": {"allowed": true}, "memory": {"limit": "70Gi", "reclaim": "kill"}});
    let cases = [
        (limit, "its config has a memory.limit"),
        (
            json!({}),
            "neither its config nor its device class says suspend.allowed: true",
        ),
    ];
    for (fields, problem) in cases {
        let mut cluster = TestCluster::new(&["n1"]);
        add_suspendable(&mut cluster, "a", "60Gi", 0);
        let mut claim = serde_json::to_value(&cluster.claims["a"]).unwrap();
        let config = |source, fields: &serde_json::Value| {
            let mut parameters = fields.clone();
            parameters["apiVersion"] = json!("gpu.drava.dev/v1alpha1");
            parameters["kind"] = json!("VgpuConfig");
            json!({"source": source, "opaque": {"driver": names::DRIVER, "parameters": parameters}})
        };
        let class = config("FromClass", &json!({"memory": {"maxLimit": "80Gi"}}));
        claim["status"]["allocation"]["devices"]["config"] =
            json!([class, config("FromClaim", &fields)]);
        cluster.observe(object(claim));
        wish(&mut cluster, "a", true);
        cluster.settle();
        assert!(cluster.write_intents().is_empty());
        let messages = cluster.messages_of("Pod/a").join("\n");
        let expected = format!("the share of claim a cannot be suspended: {problem}");
        assert!(messages.contains(&expected), "{messages}");
    }
}

#[test]
fn pod_is_evicted_that_the_node_driver_does_not_suspend() {
    for reason in ["SuspendRefused", "SuspendFailed"] {
        let mut cluster = TestCluster::new(&["n1"]);
        add_suspendable(&mut cluster, "low", "60Gi", 0);
        cluster.add_pod_of_priority("urgent", "60Gi", 10);
        cluster.settle();
        assert_eq!(cluster.write_intents(), ["+low"]);
        answer(&mut cluster, "low", "False", reason);
        cluster.settle();
        assert_eq!(cluster.write_intents(), ["-low"]);
        cluster.settle();
        assert_eq!(cluster.evict(), ["low for urgent"], "{reason}");
    }
}

#[test]
fn pod_is_evicted_whose_node_driver_does_not_answer() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    cluster.advance(Duration::from_secs(59));
    cluster.settle();
    assert!(cluster.suspensions.is_empty() && cluster.evictions.is_empty());
    cluster.advance(Duration::from_secs(1));
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-low"]);
    cluster.settle();
    assert_eq!(cluster.evict(), ["low for urgent"]);
}

#[test]
fn pod_is_evicted_that_would_not_survive_its_suspension() {
    let container = |pod: &mut Pod, change: &dyn Fn(&mut Container)| {
        change(&mut pod.spec.as_mut().unwrap().containers[0]);
    };
    let limited = |claims: serde_json::Value, memory: &str| {
        object(json!({"claims": claims, "limits": {"memory": memory}}))
    };
    let of_claim = || json!([{"name": "claim-0"}]);
    let changes: [&dyn Fn(&mut Pod); 5] = [
        &|pod| container(pod, &|one| one.liveness_probe = Some(Probe::default())),
        &|pod| container(pod, &|one| one.startup_probe = Some(Probe::default())),
        &|pod| {
            container(pod, &|one| {
                one.resources = Some(limited(of_claim(), "50Gi"))
            })
        },
        // Nothing is left for the program itself.
        &|pod| {
            container(pod, &|one| {
                one.resources = Some(limited(of_claim(), "60Gi"))
            })
        },
        &|pod| pod.spec.as_mut().unwrap().resources = Some(limited(json!([]), "60Gi")),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut cluster = TestCluster::new(&["n1"]);
        add_with(&mut cluster, "low", "60Gi", 0, change);
        cluster.add_pod_of_priority("urgent", "60Gi", 10);
        cluster.settle();
        assert!(cluster.suspensions.is_empty(), "{index}");
        assert_eq!(cluster.evict(), ["low for urgent"], "{index}");
        wish(&mut cluster, "low", true);
        cluster.settle();
        assert!(cluster.suspensions.is_empty(), "{index}");
        let reasons = cluster
            .events
            .iter()
            .filter(|event| event.1 == "SuspensionRefused");
        assert_eq!(reasons.count(), 1, "{index}");
    }
}

#[test]
fn pod_with_enough_host_memory_is_suspended() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_with(&mut cluster, "low", "60Gi", 0, |pod| {
        let resources = json!({"claims": [{"name": "claim-0"}], "limits": {"memory": "61Gi"}});
        pod.spec.as_mut().unwrap().containers[0].resources = Some(object(resources));
    });
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
}

#[test]
fn member_of_gang_and_pod_with_several_claims_are_not_suspended() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_with(&mut cluster, "low", "60Gi", 0, |pod| {
        *pod = member(pod.clone(), "1");
    });
    wish(&mut cluster, "low", true);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    let message = "the share of claim low cannot be suspended: its pod is a member of a gang, whose other members would wait for it";
    assert_eq!(cluster.messages_of("Pod/low"), [message]);

    let mut cluster = TestCluster::new(&["n1"]);
    let mut other = claim("other", "1Gi");
    allow(&mut other);
    cluster.add_claim(other);
    let mut low = claim("low", "60Gi");
    allow(&mut low);
    cluster.add_claim(low);
    cluster.add_pod(pod("low", &["low", "other"]));
    assert_eq!(cluster.settle(), ["low → n1"]);
    cluster.bind(("low", "n1"));
    wish(&mut cluster, "low", true);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    let message = "the share of claim low cannot be suspended: its pod has more than one claim for devices of drava";
    assert_eq!(cluster.messages_of("Pod/low"), [message]);
}

#[test]
fn share_of_tenant_within_its_guarantee_is_not_suspended_for_another() {
    let mut cluster = TestCluster::new(&["n1"]);
    let quota = json!({"namespaces": ["team"], "guarantee": {"memory": "70Gi"}});
    cluster.set_quota("team", &quota);
    let mut low = claim("low", "60Gi");
    allow(&mut low);
    low.metadata.namespace = Some("team".to_owned());
    cluster.add_claim(low);
    let mut pod = pod("low", &["low"]);
    pod.metadata.namespace = Some("team".to_owned());
    cluster.add_pod(pod);
    assert_eq!(cluster.settle(), ["low → n1"]);
    cluster.bind(("low", "n1"));
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert!(cluster.suspensions.is_empty() && cluster.evictions.is_empty());
}

#[test]
fn share_is_not_resumed_before_pods_that_are_due_are_decided() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    suspend(&mut cluster, "a");
    cluster.settle();
    for name in ["large-1", "large-2"] {
        cluster.add_pod_of_priority(name, "200Gi", 10);
    }
    wish(&mut cluster, "a", false);
    // One pod is decided, and the other waits for the next slice.
    cluster.is_slice_over = |_| true;
    cluster.actions();
    assert!(cluster.suspensions.is_empty());
    cluster.is_slice_over = |_| false;
    cluster.advance(RETRY);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-a"]);
}

#[test]
fn unreadable_claim_causes_no_work_without_end() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    suspend(&mut cluster, "a");
    wish(&mut cluster, "a", false);
    let unreadable = json!({
        "metadata": {"name": "a", "namespace": "default", "uid": "uid-a", "resourceVersion": "900"},
        "devices": [{"driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu"}],
        "cause": "status.x: a time out of range",
    });
    cluster
        .planner
        .unreadable(Kind::Claims, &object(unreadable));
    cluster.settle();
    let due = cluster.planner.next_deadline();
    assert!(due.is_none_or(|due| due > cluster.now), "{due:?}");
}

#[test]
fn next_leader_goes_on_with_what_the_claims_say() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    answer(&mut cluster, "low", "True", "Suspended");
    cluster.change_leader();
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    assert!(cluster.suspensions.is_empty());
}

#[test]
fn suspended_share_counts_against_quota() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota(
        "q",
        &json!({"namespaces": ["default"], "limit": {"memory": "70Gi"}}),
    );
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    suspend(&mut cluster, "a");
    cluster.add_pod_of_priority("b", "20Gi", 0);
    assert!(cluster.settle().is_empty());
    let messages = cluster.messages_of("Pod/b").join("\n");
    assert!(messages.contains("QuotaExceeded"), "{messages}");
    // The first is of the time before the suspension.
    for _ in 0..2 {
        assert_eq!(cluster.write_statuses(), 1);
        cluster.advance(RETRY);
        cluster.settle();
    }
    let status = cluster.quotas["q"].status.clone().unwrap();
    let amounts = [status.used, status.suspended].map(|amounts| amounts.memory.unwrap());
    assert_eq!(amounts, [Quantity::bytes(60 << 30); 2]);
}

#[test]
fn share_is_resumed_after_pods_of_higher_priority() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    suspend(&mut cluster, "a");
    cluster.add_running(&[("b", "60Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    wish(&mut cluster, "a", false);
    cluster.settle();
    cluster.evictions.clear();
    cluster.end("b");
    cluster.advance(RETRY);
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    assert!(cluster.suspensions.is_empty());
}

#[test]
fn deletion_of_its_claim_resumes_no_share_over_others() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    suspend(&mut cluster, "a");
    cluster.add_running(&[("b", "60Gi", 0)]);
    let mut deleted = cluster.claims["a"].clone();
    deleted.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:30Z")));
    deleted.metadata.annotations = None;
    cluster.observe(deleted);
    cluster.advance(RETRY);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    cluster.end("b");
    cluster.advance(RETRY);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-a"]);
}

#[test]
fn wish_of_an_owner_holds_up_no_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    wish(&mut cluster, "low", true);
    cluster.settle();
    cluster.advance(Duration::from_secs(60));
    cluster.settle();
    cluster.settle();
    assert_eq!(cluster.evict(), ["low for urgent"]);
}

#[test]
fn one_failure_is_enough_for_evictions() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    for name in ["one", "two"] {
        add_suspendable(&mut cluster, name, "60Gi", 0);
    }
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    let chosen = cluster.write_intents();
    assert_eq!(chosen.len(), 1);
    answer(&mut cluster, &chosen[0][1..], "False", "SuspendFailed");
    cluster.settle();
    cluster.settle();
    assert_eq!(cluster.evict().len(), 1, "no other share is tried");
    let name = &chosen[0][1..];
    let message = format!("the share of claim {name} was not suspended for pod default/urgent: ");
    cluster.advance(Duration::from_secs(300));
    cluster.settle();
    assert!(
        cluster
            .messages_of(&format!("Pod/{name}"))
            .contains(&message.as_str())
    );
}

#[test]
fn intent_that_cannot_be_written_is_not_tried_again() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(reject_intent(&mut cluster), "low");
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    assert_eq!(cluster.evict(), ["low for urgent"]);
}

/// The API server rejects the intent of the only share that is to be suspended.
fn reject_intent(cluster: &mut TestCluster) -> String {
    let [write] = &cluster.suspensions[..] else {
        panic!("{} intents", cluster.suspensions.len())
    };
    let name = write.claim.metadata.name.clone().unwrap();
    cluster.suspensions.clear();
    let rejected = SuspensionOutcome {
        key: ("default".to_owned(), name.clone()),
        claim: None,
        is_written: false,
    };
    cluster.planner.suspension_written(rejected, cluster.now);
    name
}

#[test]
fn share_whose_intent_was_rejected_is_not_tried_for_other_pods() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(reject_intent(&mut cluster), "low");
    cluster.delete_pod("urgent");
    cluster.add_pod_of_priority("second", "60Gi", 10);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    assert_eq!(cluster.evict(), ["low for second"]);
}

#[test]
fn pod_tries_no_other_share_after_a_rejected_intent() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    for name in ["one", "two"] {
        add_suspendable(&mut cluster, name, "60Gi", 0);
    }
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    reject_intent(&mut cluster);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    assert_eq!(cluster.evict().len(), 1);
}

#[test]
fn share_that_was_not_suspended_in_time_is_not_tried_for_other_pods() {
    for (seconds, is_tried) in [(599, false), (600, true)] {
        let mut cluster = TestCluster::new(&["n1"]);
        add_suspendable(&mut cluster, "low", "60Gi", 0);
        cluster.add_pod_of_priority("urgent", "60Gi", 10);
        cluster.settle();
        assert_eq!(cluster.write_intents(), ["+low"]);
        answer(&mut cluster, "low", "False", "SuspendFailed");
        cluster.actions();
        cluster.end("urgent");
        cluster.settle();
        assert_eq!(cluster.write_intents(), ["-low"]);
        cluster.evictions.clear();
        answer(&mut cluster, "low", "False", "Resumed");
        cluster.advance(Duration::from_secs(seconds));
        cluster.add_pod_of_priority("second", "60Gi", 10);
        cluster.settle();
        let tried = suspended_pods(&mut cluster);
        assert_eq!(tried.len(), usize::from(is_tried), "after {seconds} s");
        assert_eq!(cluster.evict().len(), usize::from(!is_tried));
    }
}
