//! Suspensions that end with the eviction of the pod: after their longest time, and when the node has lost the state.

use super::*;

/// The config of the claim limits the time for which it is suspended.
pub(super) fn limit_suspension(cluster: &mut TestCluster, name: &str, seconds: u32) {
    let mut claim = cluster.claims[name].clone();
    let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
    let devices = allocation.devices.as_mut().unwrap();
    let parameters = &mut devices.config.as_mut().unwrap()[0]
        .opaque
        .as_mut()
        .unwrap()
        .parameters;
    parameters.0["suspend"]["maxSuspendSeconds"] = json!(seconds);
    cluster.observe(claim);
}

/// A share that is suspended for 30 s at the time of the answer, for a pod that runs.
fn suspended_for_pod(limit: Option<u32>) -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    if let Some(limit) = limit {
        limit_suspension(&mut cluster, "low", limit);
    }
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+low"]);
    // The time of the condition.
    cluster.advance(Duration::from_secs(30));
    answer(&mut cluster, "low", "True", "Suspended");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    cluster.bind(("urgent", "n1"));
    cluster.settle();
    cluster
}

const EXPIRED: &str = "its share was suspended for pod default/urgent for longer than suspend.maxSuspendSeconds (600 s), and lacks room on \
                       device gpu-0-vgpu of pool n1/gpus: 60 GiB of memory must be free";

#[test]
fn pod_is_evicted_whose_share_is_suspended_for_too_long() {
    let mut cluster = suspended_for_pod(Some(600));
    cluster.advance(Duration::from_secs(10));
    cluster.settle();
    let last = "the share of claim low is suspended; it is resumed when there is room on device gpu-0-vgpu of pool n1/gpus: 60 GiB of \
                memory must be free; its pod is evicted at 2026-01-01T00:10:30Z otherwise";
    assert_eq!(cluster.messages_of("Pod/low").last(), Some(&last));
    cluster.advance(Duration::from_secs(589));
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    cluster.advance(RETRY);
    cluster.settle();
    cluster.settle();
    assert_eq!(cluster.evictions.len(), 1, "once");
    assert_eq!(cluster.evict(), [format!("low because {EXPIRED}")]);
    cluster.advance(RETRY);
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    let evicted = format!("evicted: {EXPIRED}");
    assert!(cluster.messages_of("Pod/low").contains(&evicted.as_str()));
    cluster.end("low");
    cluster.advance(RETRY);
    cluster.settle();
    assert!(cluster.suspensions.is_empty() && cluster.evictions.is_empty());
}

#[test]
fn limit_of_suspension_holds_after_a_change_of_the_leader() {
    let mut cluster = suspended_for_pod(Some(600));
    cluster.change_leader();
    cluster.settle();
    cluster.advance(Duration::from_secs(599));
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    cluster.advance(RETRY);
    cluster.settle();
    assert_eq!(cluster.evict(), [format!("low because {EXPIRED}")]);
}

#[test]
fn eviction_after_a_suspension_is_repeated_when_a_budget_forbids_it() {
    let mut cluster = suspended_for_pod(Some(600));
    cluster.advance(Duration::from_secs(600));
    cluster.settle();
    cluster.refuse_eviction("the disruption budget");
    cluster.settle();
    let blocked = format!("cannot evict this pod: the disruption budget; {EXPIRED}");
    assert_eq!(cluster.messages_of("Pod/low").last(), Some(&&*blocked));
    cluster.advance(Duration::from_secs(60));
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    // It is resumed all the same when there is room.
    cluster.advance(Duration::from_secs(600));
    cluster.settle();
    assert_eq!(cluster.evictions.len(), 1);
    cluster.end("urgent");
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-low"]);
}

#[test]
fn share_without_limit_and_share_that_a_user_suspends_stay() {
    let mut without = suspended_for_pod(None);
    let mut wished = suspended_for_pod(Some(600));
    wish(&mut wished, "low", true);
    for cluster in [&mut without, &mut wished] {
        cluster.advance(Duration::from_secs(86_400));
        cluster.settle();
        assert!(cluster.evictions.is_empty());
    }
}

#[test]
fn pod_whose_state_is_lost_is_evicted_as_far_as_budgets_allow_it() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    suspend(&mut cluster, "a");
    cluster.settle();
    assert!(cluster.evictions.is_empty());
    // Also if there is room, and also after a suspension by a user.
    answer(&mut cluster, "a", "True", "StateLost");
    cluster.settle();
    let [eviction] = &cluster.evictions[..] else {
        panic!("{:?}", cluster.evictions);
    };
    assert_eq!(eviction.victims[0].pod.name.as_deref(), Some("a"));
    assert!(cluster.write_intents().is_empty(), "it is not resumed");
    cluster.refuse_eviction("a budget");
    cluster.settle();
    assert!(cluster.evictions.is_empty(), "it rests");
    // Its container starts anew: nothing more is lost when it may go on.
    assert_eq!(cluster.write_intents(), ["-a"]);
    answer(&mut cluster, "a", "False", "Resumed");
    cluster.advance(Duration::from_secs(301));
    cluster.settle();
    assert!(cluster.evictions.is_empty());
}

#[test]
fn pod_whose_state_is_lost_waits_for_room_or_its_eviction() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_suspendable(&mut cluster, "a", "60Gi", 0);
    suspend(&mut cluster, "a");
    cluster.settle();
    cluster.add_pod_of_priority("other", "60Gi", 0);
    assert_eq!(cluster.settle(), ["other → n1"]);
    cluster.bind(("other", "n1"));
    answer(&mut cluster, "a", "True", "StateLost");
    for _ in 0..2 {
        cluster.settle();
        cluster.refuse_eviction("a budget");
        cluster.settle();
        assert!(cluster.evictions.is_empty() && cluster.write_intents().is_empty());
        cluster.advance(Duration::from_secs(301));
    }
    cluster.end("other");
    cluster.settle();
    let eviction = cluster.evictions.pop();
    assert!(eviction.is_some(), "it is due again");
}
