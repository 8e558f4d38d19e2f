//! Quotas: limits, and what waits for them. Namespaces are tenants.

use std::time::Duration;

use drava_api::quota::GpuQuota;
use drava_api::reason::Reason;
use serde_json::{Value, json};

use super::cluster::{TestCluster, applied, member};
use crate::action::AllocationFailure;
use crate::action::status::StatusOutcome;
use crate::fixture::{claim, object, pod};

mod guarantee;

const GIB: f64 = (1_u64 << 30) as f64;

impl TestCluster {
    /// Adds a quota, or changes its spec.
    pub(super) fn set_quota(&mut self, name: &str, spec: &Value) {
        let quota = object(json!({
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota",
            "metadata": {"name": name, "uid": format!("uid-{name}"), "generation": 1},
            "spec": spec,
        }));
        self.observe_quota(quota);
    }

    /// Adds a pod with a claim of the same name; without requests of CPUs.
    fn add_pod_of(&mut self, namespace: &str, name: &str, memory: &str, priority: i32) {
        let mut claim = claim(name, memory);
        claim.metadata.namespace = Some(namespace.to_owned());
        self.add_claim(claim);
        let mut pod = pod(name, &[name]);
        pod.metadata.namespace = Some(namespace.to_owned());
        let spec = pod.spec.as_mut().unwrap();
        spec.priority = Some(priority);
        spec.containers[0].resources = None;
        self.add_pod(pod);
    }

    /// Adds pods that run.
    fn add_running_of(&mut self, namespace: &str, pods: &[(&str, &str, i32)]) {
        for (name, memory, priority) in pods {
            self.add_pod_of(namespace, name, memory, *priority);
            let placed = self.settle();
            assert_eq!(placed.len(), 1, "{name}: {placed:?}");
            self.bind(placed[0].split_once(" → ").unwrap());
        }
    }

    /// Returns the used memory of the only quota, GiB.
    fn used_gib(&self) -> f64 {
        let quotas = self.planner.metrics().quotas;
        quotas[0].used.values().next().unwrap() / GIB
    }

    /// The API server executes the writes of statuses, and the watch delivers the result.
    pub(super) fn write_statuses(&mut self) -> usize {
        let updates = std::mem::take(&mut self.quota_statuses);
        for update in &updates {
            let mut quota = self.quotas[&update.name].clone();
            assert_eq!(
                quota.metadata.resource_version.as_ref(),
                Some(&update.resource_version)
            );
            quota.status = Some(update.status.clone());
            self.observe_quota(quota);
            let outcome = StatusOutcome {
                name: update.name.clone(),
                written: Some(Box::new(self.quotas[&update.name].clone())),
            };
            self.planner.quota_status_written(outcome, self.now);
        }
        updates.len()
    }

    /// Returns the names of the pods that are due after the observed releases and changes.
    fn due_pods(&mut self) -> Vec<String> {
        let released_in = self.planner.world.take_released();
        if !released_in.is_empty() {
            self.planner
                .backlog
                .activate_after_release(&released_in, &self.planner.world);
        }
        let mut due = self.planner.backlog.queue.due(self.now);
        due.sort();
        due
    }
}

fn memory_limit(limit: &str) -> Value {
    json!({"namespaces": ["default"], "limit": {"memory": limit}})
}

#[test]
fn rejects_beyond_limit_with_figures() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota("team-a", &memory_limit("40Gi"));
    cluster.add_pod_with_claim("a", "30Gi");
    assert_eq!(cluster.settle(), ["a → n1"]);
    cluster.add_pod_with_claim("b", "16Gi");
    assert!(cluster.settle().is_empty());
    let message =
        "0/1 nodes: 1 QuotaExceeded (quota team-a: memory 30 GiB of 40 GiB used, 16 GiB requested)";
    assert_eq!(cluster.messages_of("Pod/b"), [message]);
    assert_eq!(cluster.messages_of("ResourceClaim/b"), [message]);
    let metrics = cluster.planner.metrics();
    assert_eq!(metrics.pending[&Some(Reason::QuotaExceeded)], 1);
    assert!((cluster.used_gib() - 30.0).abs() < 1e-9);
    // Exactly the rest fits.
    cluster.add_pod_with_claim("c", "10Gi");
    assert_eq!(cluster.settle(), ["c → n1"]);
}

#[test]
fn parallel_pods_do_not_exceed_limit() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota(
        "team-a",
        &json!({"namespaces": ["default"], "limit": {"devices": 10}}),
    );
    for index in 0..50 {
        cluster.add_pod_of("default", &format!("p{index:02}"), "1Gi", 0);
    }
    let (jobs, _) = cluster.actions();
    assert_eq!(jobs.len(), 10, "allocations in flight count");
    assert!(cluster.actions().0.is_empty());
    for job in jobs {
        cluster.write(job);
    }
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.planner.metrics().pending[&Some(Reason::QuotaExceeded)],
        40
    );
}

#[test]
fn failed_write_gives_quota_back() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota("team-a", &memory_limit("40Gi"));
    cluster.add_pod_with_claim("a", "30Gi");
    let (mut jobs, _) = cluster.actions();
    cluster.add_pod_with_claim("b", "30Gi");
    assert!(cluster.settle().is_empty(), "in flight");
    let failure = AllocationFailure {
        message: "rejected".to_owned(),
        is_reportable: true,
    };
    cluster.finish(jobs.remove(0), Vec::new(), Some(failure));
    assert_eq!(cluster.settle(), ["b → n1"]);
}

#[test]
fn new_leader_counts_the_same() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota("team-a", &memory_limit("40Gi"));
    cluster.add_running(&[("a", "30Gi", 0)]);
    cluster.add_pod_with_claim("b", "16Gi");
    assert!(cluster.settle().is_empty());
    cluster.change_leader();
    assert!(cluster.settle().is_empty());
    assert!((cluster.used_gib() - 30.0).abs() < 1e-9);
    cluster.end("a");
    assert_eq!(cluster.settle(), ["b → n1"]);
}

#[test]
fn shared_claim_counts_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota("team-a", &memory_limit("40Gi"));
    cluster.add_claim(claim("shared", "30Gi"));
    for name in ["p1", "p2"] {
        cluster.add_pod(pod(name, &["shared"]));
    }
    cluster.settle();
    assert!((cluster.used_gib() - 30.0).abs() < 1e-9);
}

#[test]
fn release_wakes_only_pods_of_same_quota() {
    let mut cluster = TestCluster::new(&["n1"]);
    for tenant in ["a", "b"] {
        cluster.set_quota(
            tenant,
            &json!({"namespaces": [tenant], "limit": {"devices": 1}}),
        );
        cluster.add_running_of(tenant, &[(&format!("{tenant}-1"), "1Gi", 0)]);
        cluster.add_pod_of(tenant, &format!("{tenant}-2"), "1Gi", 0);
    }
    cluster.add_pod_of("c", "giant", "100Gi", 0);
    assert!(cluster.settle().is_empty());
    assert!(cluster.due_pods().is_empty());
    cluster.end("a-1");
    assert_eq!(cluster.due_pods(), ["pod-a-2", "pod-giant"], "not b-2");
    assert_eq!(cluster.settle(), ["a-2 → n1"]);
}

#[test]
fn quota_change_wakes_only_its_pods() {
    let mut cluster = TestCluster::new(&["n1"]);
    for tenant in ["a", "b"] {
        cluster.set_quota(
            tenant,
            &json!({"namespaces": [tenant], "limit": {"devices": 0}}),
        );
        cluster.add_pod_of(tenant, tenant, "1Gi", 0);
    }
    assert!(cluster.settle().is_empty());
    let mut same = cluster.quotas["a"].clone();
    same.status = Some(object(json!({"namespaces": 7})));
    cluster.planner.quota(applied(same));
    assert!(cluster.due_pods().is_empty(), "a status is no change");
    cluster.set_quota("a", &json!({"namespaces": ["a"], "limit": {"devices": 1}}));
    assert_eq!(cluster.due_pods(), ["pod-a"]);
    assert_eq!(cluster.settle(), ["a → n1"]);
    let deleted = drava_api::listed::DeletedObject {
        name: "b".to_owned(),
        ..Default::default()
    };
    cluster
        .planner
        .quota(drava_api::listed::Change::<GpuQuota>::Deleted(deleted));
    assert_eq!(cluster.settle(), ["b → n1"]);
}

#[test]
fn label_of_namespace_selects_quota() {
    let mut cluster = TestCluster::new(&["n1"]);
    let namespace = |labels: Value| {
        applied(object(
            json!({"metadata": {"name": "default", "labels": labels}}),
        ))
    };
    cluster.planner.namespace(namespace(json!({"team": "a"})));
    cluster.set_quota(
        "team-a",
        &json!({"namespaceSelector": {"matchLabels": {"team": "a"}}, "limit": {"memory": "10Gi"}}),
    );
    cluster.add_pod_with_claim("p", "16Gi");
    assert!(cluster.settle().is_empty());
    cluster.planner.namespace(namespace(json!({"team": "b"})));
    assert_eq!(cluster.settle(), ["p → n1"]);
}

#[test]
fn lowered_limit_evicts_nothing_and_admits_nothing() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota("team-a", &memory_limit("40Gi"));
    cluster.add_running(&[("a", "30Gi", 0)]);
    cluster.write_statuses();
    cluster.advance(Duration::from_secs(5));
    cluster.set_quota("team-a", &memory_limit("20Gi"));
    cluster.add_pod_of("default", "b", "1Gi", 0);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
    let condition = &cluster.quota_statuses[0].status.conditions[0];
    assert_eq!(
        (
            condition.type_.as_str(),
            condition.status.as_str(),
            condition.message.as_str()
        ),
        (
            "WithinLimit",
            "False",
            "memory 30 GiB of 20 GiB used: running pods keep their devices, and no claim is allocated until the usage is \
             below the limit"
        )
    );
}

#[test]
fn limits_and_defaults_each_claim() {
    let mut cluster = TestCluster::new(&["n1"]);
    let amounts = json!({"default": {"memory": "4Gi"}, "max": {"memory": "16Gi"}});
    cluster.set_quota(
        "team-a",
        &json!({"namespaces": ["default"], "claim": amounts}),
    );
    cluster.add_pod_with_claim("large", "17Gi");
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.messages_of("Pod/large"),
        [
            "0/1 nodes: 1 QuotaExceeded (quota team-a: memory 17 GiB requested by one claim, 16 GiB allowed)"
        ]
    );
    cluster.end("large");
    let mut unsized_claim = claim("unsized", "1Gi");
    unsized_claim.spec = Some(object(json!({"devices": {"requests": [
        {"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev"}},
    ]}})));
    cluster.add_claim(unsized_claim);
    cluster.add_pod(pod("unsized", &["unsized"]));
    assert_eq!(cluster.settle(), ["unsized → n1"]);
    let allocation = cluster.claims["unsized"]
        .status
        .clone()
        .unwrap()
        .allocation
        .unwrap();
    let result = &allocation.devices.unwrap().results.unwrap()[0];
    assert_eq!(
        result.consumed_capacity.as_ref().unwrap()["memory"].0,
        "4Gi"
    );
}

#[test]
fn pod_over_quota_neither_evicts_nor_reserves() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota(
        "team-a",
        &json!({"namespaces": ["a"], "limit": {"memory": "20Gi"}}),
    );
    cluster.add_running_of("b", &[("low", "70Gi", 0)]);
    cluster.add_pod_of("a", "greedy", "30Gi", 10);
    cluster.add_pod_of("b", "small", "10Gi", 0);
    assert_eq!(cluster.settle(), ["small → n1"]);
    assert!(cluster.evictions.is_empty());
    assert!(cluster.planner.commitments.ledger.owners().next().is_none());
}

#[test]
fn preempts_within_limit_of_own_tenant() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota(
        "team-a",
        &json!({"namespaces": ["a"], "limit": {"memory": "40Gi"}}),
    );
    cluster.add_running_of("a", &[("low", "30Gi", 0)]);
    cluster.add_pod_of("a", "urgent", "20Gi", 10);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low for urgent"]);
    cluster.end("low");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
}

#[test]
fn gang_waits_for_quota_as_a_whole() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota("team-a", &memory_limit("40Gi"));
    for name in ["m-1", "m-2"] {
        cluster.add_claim(claim(name, "30Gi"));
        cluster.add_pod(member(pod(name, &[name]), "2"));
    }
    assert!(cluster.settle().is_empty(), "no partial gang");
    let messages = cluster.messages_of("Pod/m-1");
    assert!(
        messages[0].contains("gang g: 1 of 2 members fit"),
        "{messages:?}"
    );
    assert!(
        messages[0].contains("quota team-a: memory 30 GiB of 40 GiB used"),
        "{messages:?}"
    );
    cluster.set_quota("team-a", &memory_limit("60Gi"));
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
}

#[test]
fn writes_status_when_it_changes() {
    let mut cluster = TestCluster::new(&["n1"]);
    let spec = json!({
        "namespaces": ["default"], "limit": {"memory": "40Gi"}, "guarantee": {"memory": "8Gi", "devices": 4},
    });
    cluster.set_quota("team-a", &spec);
    cluster.settle();
    assert_eq!(cluster.write_statuses(), 1);
    cluster.settle();
    assert_eq!(cluster.write_statuses(), 0, "unchanged");
    cluster.add_pod_with_claim("a", "10Gi");
    cluster.settle();
    assert_eq!(cluster.write_statuses(), 0, "within the interval");
    let deadline = cluster.planner.next_deadline().unwrap();
    assert_eq!(deadline - cluster.now, Duration::from_secs(1));
    cluster.now = deadline;
    cluster.settle();
    assert_eq!(cluster.write_statuses(), 1);
    let status = serde_json::to_value(cluster.quotas["team-a"].status.as_ref().unwrap()).unwrap();
    assert_eq!(
        status,
        json!({
            "observedGeneration": 1,
            "namespaces": 1,
            "used": {"memory": "10Gi", "cores": 0, "devices": 1},
            "suspended": {"memory": "0", "cores": 0, "devices": 0},
            "borrowed": {"memory": "2Gi", "devices": 0},
            "free": {"memory": "30Gi"},
            "conditions": [{
                "type": "WithinLimit", "status": "True", "reason": "WithinLimit",
                "message": "the usage is within the limit",
                "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        })
    );
}

#[test]
fn retries_failed_status_write() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.set_quota("team-a", &memory_limit("40Gi"));
    cluster.settle();
    assert_eq!(cluster.quota_statuses.len(), 1);
    cluster.quota_statuses.clear();
    cluster.settle();
    assert!(cluster.quota_statuses.is_empty(), "in flight");
    let outcome = StatusOutcome {
        name: "team-a".to_owned(),
        written: None,
    };
    cluster.planner.quota_status_written(outcome, cluster.now);
    cluster.settle();
    assert!(cluster.quota_statuses.is_empty(), "backoff");
    cluster.now = cluster.planner.next_deadline().unwrap();
    cluster.settle();
    assert_eq!(cluster.write_statuses(), 1);
}

#[test]
fn waiting_head_is_charged_nothing() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.set_quota("team-a", &memory_limit("100Gi"));
    cluster.add_running_of("default", &[("running", "40Gi", 0)]);
    cluster.add_running_of("other", &[("busy", "60Gi", 0)]);
    // It fits into the quota, but waits for the end of another pod.
    cluster.add_pod_of("default", "head", "60Gi", 0);
    assert!(cluster.settle().is_empty());
    assert!(
        (cluster.used_gib() - 40.0).abs() < 1e-9,
        "{}",
        cluster.used_gib()
    );
    cluster.add_pod_of("default", "small", "20Gi", 0);
    assert_eq!(cluster.settle().len(), 1);
    assert!((cluster.used_gib() - 60.0).abs() < 1e-9);
}

#[test]
fn pod_of_unknown_namespace_waits_for_its_quotas() {
    let mut cluster = TestCluster::new(&["n1"]);
    let selector = json!({"matchLabels": {"team": "a"}});
    cluster.set_quota(
        "q",
        &json!({"namespaceSelector": selector, "limit": {"memory": "10Gi"}}),
    );
    cluster.add_pod_of("new", "a", "20Gi", 0);
    assert!(cluster.settle().is_empty(), "it may be one of the tenant's");
    assert!(
        cluster.messages_of("Pod/a")[0].starts_with("NamespaceUnknown"),
        "{:?}",
        cluster.messages_of("Pod/a")
    );
    let namespace = object(json!({"metadata": {"name": "new", "labels": {"team": "b"}}}));
    cluster.planner.namespace(applied(namespace));
    assert_eq!(cluster.settle(), ["a → n1"]);
}
