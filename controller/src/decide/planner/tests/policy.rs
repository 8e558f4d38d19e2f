//! GpuPolicies: precedence, live changes and contradictions.

use drava_api::listed::{Change, DeletedObject};
use drava_api::policy::GpuPolicy;
use serde_json::{Value, json};

use super::cluster::{TestCluster, applied};
use crate::action::status::StatusOutcome;
use crate::fixture::{claim, class, object, pod};

fn policy(name: &str, spec: &Value) -> GpuPolicy {
    object(json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuPolicy",
        "metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "spec": spec,
    }))
}

fn set(cluster: &mut TestCluster, name: &str, spec: &Value) {
    cluster.planner.policy(applied(policy(name, spec)));
}

fn namespace(cluster: &mut TestCluster, team: &str) {
    cluster.planner.namespace(applied(object(json!({
        "metadata": {"name": "default", "uid": "ns", "labels": {"team": team}},
    }))));
}

/// Adds a pod whose claim asks for `policy` between nodes; returns its node.
fn place(cluster: &mut TestCluster, name: &str, policy: Option<&str>) -> String {
    let mut claim = claim(name, "1Gi");
    if let Some(policy) = policy {
        let devices = claim.spec.as_mut().unwrap().devices.as_mut().unwrap();
        devices.config = Some(vec![object(
            json!({"opaque": {"driver": "gpu.drava.dev", "parameters": {
                "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "placement": {"node": policy},
            }}}),
        )]);
    }
    cluster.add_claim(claim);
    cluster.add_pod(pod(name, &[name]));
    let placed = cluster.settle();
    let (_, node) = placed[0].split_once(" → ").unwrap();
    node.to_owned()
}

#[test]
fn policies_precede_each_other_and_change_live() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    namespace(&mut cluster, "a");
    assert_eq!(place(&mut cluster, "first", None), "n1");
    assert_eq!(place(&mut cluster, "flags", None), "n1", "binpack");
    set(&mut cluster, "cluster", &json!({"node": "spread"}));
    assert_eq!(place(&mut cluster, "spread", None), "n2");
    let class = json!({"deviceClasses": ["vgpu.drava.dev"], "node": "binpack"});
    set(&mut cluster, "class", &class);
    assert_eq!(
        place(&mut cluster, "class", None),
        "n1",
        "the class precedes"
    );
    let selector = json!({"matchLabels": {"team": "a"}});
    let team = json!({"namespaceSelector": selector, "node": "spread"});
    set(&mut cluster, "team", &team);
    assert_eq!(
        place(&mut cluster, "team", None),
        "n2",
        "the namespace precedes"
    );
    assert_eq!(
        place(&mut cluster, "claim", Some("binpack")),
        "n1",
        "the claim precedes"
    );
    let denied = json!({"namespaceSelector": selector, "node": "spread", "claimOverride": false});
    set(&mut cluster, "team", &denied);
    assert_eq!(
        place(&mut cluster, "denied", Some("binpack")),
        "n2",
        "no override"
    );
    namespace(&mut cluster, "b");
    assert_eq!(
        place(&mut cluster, "other", Some("binpack")),
        "n1",
        "another namespace"
    );
    let deleted = DeletedObject {
        name: "class".to_owned(),
        ..DeletedObject::default()
    };
    cluster.planner.policy(Change::Deleted(deleted));
    assert_eq!(
        place(&mut cluster, "last", None),
        "n2",
        "only the cluster's is left"
    );
}

#[test]
fn config_of_class_is_between_policies() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    namespace(&mut cluster, "a");
    assert_eq!(place(&mut cluster, "first", None), "n1");
    let mut with_config = class();
    with_config.spec.as_mut().unwrap().config = Some(vec![object(
        json!({"opaque": {"driver": "gpu.drava.dev", "parameters": {
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "placement": {"node": "spread"},
        }}}),
    )]);
    cluster.planner.class(applied(with_config));
    let of_class = json!({"deviceClasses": ["vgpu.drava.dev"], "node": "binpack"});
    set(&mut cluster, "class", &of_class);
    assert_eq!(
        place(&mut cluster, "config", None),
        "n2",
        "the config of the class precedes the policy of the class"
    );
    assert_eq!(
        place(&mut cluster, "claim", Some("binpack")),
        "n1",
        "the claim precedes the config of the class"
    );
    let selector = json!({"matchLabels": {"team": "a"}});
    let team = json!({"namespaceSelector": selector, "node": "binpack"});
    set(&mut cluster, "team", &team);
    assert_eq!(
        place(&mut cluster, "team", None),
        "n1",
        "the policy of the namespace precedes the config of the class"
    );
}

#[test]
fn condition_names_policy_that_applies_instead() {
    let mut cluster = TestCluster::new(&["n1"]);
    set(&mut cluster, "a", &json!({"node": "spread"}));
    set(&mut cluster, "b", &json!({"node": "binpack"}));
    cluster.actions();
    let updates = std::mem::take(&mut cluster.policy_statuses);
    let condition = |index: usize| {
        let condition = &updates[index].status.conditions[0];
        (
            updates[index].name.as_str(),
            condition.status.as_str(),
            condition.reason.as_str(),
        )
    };
    assert_eq!(
        [condition(0), condition(1)],
        [("a", "True", "Applied"), ("b", "False", "Conflict")]
    );
    assert!(
        updates[1].status.conditions[0]
            .message
            .starts_with("GpuPolicy a selects")
    );
    for update in updates {
        let mut written = policy(&update.name, &json!({"node": "spread"}));
        written.status = Some(update.status);
        let outcome = StatusOutcome {
            name: update.name,
            written: Some(Box::new(written)),
        };
        cluster.planner.policy_status_written(outcome, cluster.now);
    }
    cluster.actions();
    assert!(cluster.policy_statuses.is_empty(), "unchanged");
    let deleted = DeletedObject {
        name: "a".to_owned(),
        ..DeletedObject::default()
    };
    cluster.planner.policy(Change::Deleted(deleted));
    cluster.actions();
    assert_eq!(
        cluster.policy_statuses[0].status.conditions[0].status,
        "True"
    );
}

#[test]
fn limits_of_evictions_follow_the_levels() {
    let mut cluster = TestCluster::new(&["n1"]);
    namespace(&mut cluster, "a");
    let classes = ["vgpu.drava.dev"].into();
    let limits = |cluster: &TestCluster| {
        let limits = cluster
            .planner
            .world
            .cluster
            .preemption_limits("default", &classes);
        (limits.delay_seconds, limits.minimum_runtime_seconds)
    };
    assert_eq!(limits(&cluster), (None, None));
    let preemption = json!({"delaySeconds": 1, "minimumRuntimeSeconds": 1});
    set(&mut cluster, "cluster", &json!({"preemption": preemption}));
    assert_eq!(limits(&cluster), (Some(1), Some(1)));
    let preemption = json!({"delaySeconds": 2});
    let class = json!({"deviceClasses": ["vgpu.drava.dev"], "preemption": preemption});
    set(&mut cluster, "class", &class);
    assert_eq!(limits(&cluster), (Some(2), Some(1)));
    let preemption = json!({"minimumRuntimeSeconds": 3});
    let selector = json!({"matchLabels": {"team": "a"}});
    let team = json!({"namespaceSelector": selector, "preemption": preemption});
    set(&mut cluster, "team", &team);
    assert_eq!(limits(&cluster), (Some(2), Some(3)));
    namespace(&mut cluster, "b");
    assert_eq!(limits(&cluster), (Some(2), Some(1)));
}

#[test]
fn labels_of_namespace_wake_pods_for_policies() {
    let mut cluster = TestCluster::new(&["n1"]);
    namespace(&mut cluster, "a");
    let selector = json!({"matchLabels": {"team": "a"}});
    let preemption = json!({"delaySeconds": 3600});
    let team = json!({"namespaceSelector": selector, "preemption": preemption});
    set(&mut cluster, "team", &team);
    cluster.add_running(&[("low", "70Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "20Gi", 10);
    let mut urgent = cluster.pods["urgent"].clone();
    urgent.metadata.creation_timestamp = Some(object(json!("2026-01-01T00:00:00Z")));
    cluster.add_pod(urgent);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evict().is_empty(), "within the delay of the policy");
    namespace(&mut cluster, "b");
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low for urgent"], "no policy any more");
}
