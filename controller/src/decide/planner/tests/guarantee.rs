//! Guarantees of tenants, which evictions keep.

use serde_json::json;

use super::cluster::{TestCluster, member};
use super::hard_pods::{add_hard, add_node, add_pod, add_pod_of, add_running, shares};

#[test]
fn gang_takes_no_tenant_below_its_guarantee_in_later_turns() {
    let mut cluster = TestCluster::new(&[]);
    // With a quota every node is searched for each pod.
    for (name, quota) in [
        (
            "team",
            json!({"namespaces": ["team"], "guarantee": {"devices": 2}}),
        ),
        (
            "others",
            json!({"namespaces": ["default"], "limit": {"devices": 1000}}),
        ),
    ] {
        cluster.set_quota(name, &quota);
    }
    let on = |node: &str, memory: &str| {
        let mut devices = shares("all", 1, memory);
        let expression =
            format!("device.attributes['gpu.drava.dev'].uuid.startsWith('GPU-{node}')");
        devices["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
        json!({"requests": [devices]})
    };
    for (name, node) in [
        ("v1", "one-1"),
        ("v2", "one-2"),
        ("v3", "two-1"),
        ("v4", "two-2"),
    ] {
        add_node(&mut cluster, node, 1);
        add_pod_of(&mut cluster, "team", name, &on(node, "79Gi"));
        assert_eq!(cluster.settle(), [format!("{name} → {node}")]);
        cluster.bind((name, node));
    }
    add_node(&mut cluster, "large", 18);
    add_node(&mut cluster, "small", 16);
    for name in ["m-1", "m-2"] {
        add_pod(&mut cluster, name, &on("one-", "60Gi"));
    }
    // The search for it on the small node gives up, so the rest takes another turn.
    add_hard(&mut cluster, "m-3", 10);
    for name in ["m-1", "m-2", "m-3"] {
        let mut pod = cluster.pods[name].clone();
        pod.spec.as_mut().unwrap().priority = Some(10);
        cluster.add_pod(member(pod, "3"));
    }
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    let mut has_ended = false;
    loop {
        turns += 1;
        assert!(turns < 20, "{:?}", cluster.messages_of("Pod/m-1"));
        assert!(cluster.actions().0.is_empty());
        if !cluster.planner.backlog.queue.is_suspended("pod-m-1") {
            break;
        }
        let room = cluster.planner.backlog.suspended_decisions.room("pod-m-1");
        if room.is_some() && !std::mem::replace(&mut has_ended, true) {
            // Its tenant needs one of the two victims now.
            cluster.end("v3");
        }
    }
    assert!(has_ended, "the search takes turns");
    assert!(cluster.evictions.is_empty(), "{:?}", cluster.evictions);
}

/// The check of each pod is part of the turn's work.
#[test]
fn protecting_guarantees_of_many_pods_is_counted() {
    const PODS: usize = 60;
    let mut cluster = TestCluster::new(&[]);
    let quota = json!({"namespaces": ["team"], "guarantee": {"devices": PODS}});
    cluster.set_quota("team", &quota);
    add_node(&mut cluster, "n", 8);
    for pod in 0..PODS {
        add_running(&mut cluster, "team", &format!("p-{pod:02}"), ("n", pod % 8));
    }
    assert!(cluster.settle().is_empty());
    // A pod that waits for its quota does not look for others to wait for, which would be more work.
    let used_up = json!({"namespaces": ["default"], "limit": {"devices": 0}});
    cluster.set_quota("default", &used_up);
    let before = cluster.planner.work();
    cluster.add_pod_of_priority("urgent", "80Gi", 10);
    assert!(cluster.settle().is_empty());
    let units = cluster.planner.work() - before;
    assert!(units > 20 * PODS as u64, "{units} units for {PODS} pods");
    assert!(cluster.evictions.is_empty(), "each is within the guarantee");
}
