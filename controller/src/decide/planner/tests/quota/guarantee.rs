//! Guarantees: tenants get back what others borrow.

use serde_json::json;

use super::super::cluster::TestCluster;
use crate::fixture::pod;

/// One GPU of 80 GiB. The tenants `a` and `b` are guaranteed 40 GiB each, and `b` runs these pods.
fn lent(pods: &[(&str, &str, i32)]) -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    for tenant in ["a", "b"] {
        let spec = json!({"namespaces": [tenant], "guarantee": {"memory": "40Gi"}});
        cluster.set_quota(tenant, &spec);
    }
    cluster.add_running_of("b", pods);
    cluster
}

#[test]
fn takes_back_guarantee_from_borrower() {
    let mut cluster = lent(&[("b-1", "50Gi", 0), ("b-2", "15Gi", 0), ("b-3", "15Gi", 0)]);
    cluster.add_pod_of("a", "a-1", "15Gi", 0);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["b-2 for a-1"], "one is enough");
    let evicted = "evicted for a pod of another namespace (within the guarantee of its quota; this pod used borrowed GPUs)";
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.messages_of("Pod/b-2"), [evicted]);
    cluster.end("b-2");
    assert_eq!(cluster.settle(), ["a-1 → n1"]);
}

#[test]
fn takes_back_from_higher_priority() {
    let mut cluster = lent(&[("b-1", "40Gi", 9), ("b-2", "40Gi", 9)]);
    cluster.add_pod_of("a", "a-1", "40Gi", 0);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict().len(), 1);
}

#[test]
fn borrower_takes_nothing_back() {
    let mut cluster = lent(&[("b-1", "40Gi", 9), ("b-2", "40Gi", 9)]);
    cluster.add_pod_of("a", "a-1", "40Gi", 0);
    assert!(cluster.settle().is_empty());
    let evicted = cluster.evict();
    let victim = evicted[0].split_once(" for").unwrap().0.to_owned();
    // The workload of the victim creates another pod at once; its higher priority does not help.
    cluster.add_pod_of("b", "b-again", "40Gi", 9);
    assert!(cluster.settle().is_empty());
    cluster.end(&victim);
    assert_eq!(cluster.settle(), ["a-1 → n1"]);
    cluster.bind(("a-1", "n1"));
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "no loop of evictions");
}

#[test]
fn evicts_nothing_beyond_guarantee() {
    let mut cluster = lent(&[("b-1", "40Gi", 0), ("b-2", "40Gi", 0)]);
    cluster.add_pod_of("a", "a-1", "41Gi", 0);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "the pod would borrow");
}

#[test]
fn takes_no_tenant_below_its_guarantee() {
    let mut cluster = lent(&[("b-1", "50Gi", 0), ("b-2", "30Gi", 0)]);
    cluster.add_pod_of("a", "a-1", "40Gi", 0);
    assert!(cluster.settle().is_empty());
    assert!(
        cluster.evictions.is_empty(),
        "30 GiB or 50 GiB less is below 40 GiB, or too little"
    );
    cluster.end("a-1");
    cluster.add_pod_of("a", "a-2", "30Gi", 0);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["b-2 for a-2"], "50 GiB remain");
}

#[test]
fn priority_takes_no_other_tenant_below_its_guarantee() {
    let mut cluster = lent(&[("b-1", "40Gi", 0)]);
    cluster.add_running_of("c", &[("c-1", "40Gi", 0)]);
    cluster.add_pod_of("c", "urgent", "40Gi", 10);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["c-1 for urgent"], "c has no guarantee");
    let mut cluster = lent(&[("b-1", "40Gi", 0)]);
    cluster.add_running_of("b", &[("b-2", "40Gi", 5)]);
    cluster.add_pod_of("b", "urgent", "40Gi", 10);
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.evict(),
        ["b-1 for urgent"],
        "priority decides within a tenant"
    );
}

#[test]
fn respects_preemption_policy_never() {
    let mut cluster = lent(&[("b-1", "40Gi", 0), ("b-2", "40Gi", 0)]);
    cluster.add_pod_of("a", "polite", "40Gi", 0);
    let mut polite = cluster.pods["polite"].clone();
    polite.spec.as_mut().unwrap().preemption_policy = Some("Never".to_owned());
    cluster.add_pod(polite);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
}

#[test]
fn lends_unused_guarantee() {
    let mut cluster = lent(&[]);
    cluster.add_pod_of("b", "b-1", "80Gi", 0);
    assert_eq!(cluster.settle(), ["b-1 → n1"]);
    // A tenant without quota has no guarantee to take back.
    cluster.add_claim(crate::fixture::claim("free", "10Gi"));
    cluster.add_pod(pod("free", &["free"]));
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
}
