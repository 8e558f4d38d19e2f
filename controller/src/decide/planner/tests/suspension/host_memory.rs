//! Host memory of the suspended shares of a node.

use drava_api::names;
use serde_json::json;

use super::super::cluster::{TestCluster, applied};
use super::{RETRY, add_suspendable, answer, suspend, wish};
use crate::fixture::{object, slice};

/// The node publishes how much host memory its suspended shares may have.
pub(super) fn limit_host_memory(cluster: &mut TestCluster, node: &str, mib: i64) {
    let mut slice = slice(node);
    for device in slice.spec.devices.iter_mut().flatten() {
        let attributes = device.attributes.get_or_insert_default();
        let limit = object(json!({"int": mib}));
        attributes.insert(names::attribute::SUSPEND_HOST_MEMORY_MIB.to_owned(), limit);
    }
    slice.metadata.resource_version = Some("1000".to_owned());
    cluster.planner.slice(applied(slice));
}

#[test]
fn shares_beyond_the_host_memory_of_the_node_are_evicted() {
    let mut cluster = TestCluster::new(&["n1"]);
    limit_host_memory(&mut cluster, "n1", 59 << 10);
    add_suspendable(&mut cluster, "low", "60Gi", 0);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    assert_eq!(cluster.evict(), ["low for urgent"]);
    let why = "the suspended shares of node n1 may have 59 GiB of host memory (suspend.hostMemory of its GpuNodeProfile); they have 0 \
               B, and 60 GiB more are necessary";
    let evicted = format!("the share of claim low is not suspended for pod default/urgent: {why}");
    assert_eq!(cluster.messages_of("Pod/low"), [evicted.as_str()]);
}

#[test]
fn host_memory_limits_the_shares_that_are_suspended_together() {
    // Two shares must give way. The node has host memory for one of them, then for both.
    for (mib, is_suspended) in [(39 << 10, false), (40 << 10, true)] {
        let mut cluster = TestCluster::new(&["n1"]);
        limit_host_memory(&mut cluster, "n1", mib);
        for name in ["a", "b", "c"] {
            add_suspendable(&mut cluster, name, "20Gi", 0);
        }
        cluster.add_pod_of_priority("urgent", "50Gi", 10);
        cluster.settle();
        assert_eq!(
            cluster.write_intents().len(),
            if is_suspended { 2 } else { 0 }
        );
        assert_eq!(cluster.evict().len(), if is_suspended { 0 } else { 2 });
    }
}

#[test]
fn wish_waits_for_host_memory_of_the_node() {
    let mut cluster = TestCluster::new(&["n1"]);
    limit_host_memory(&mut cluster, "n1", 30 << 10);
    for name in ["a", "b"] {
        add_suspendable(&mut cluster, name, "20Gi", 0);
    }
    suspend(&mut cluster, "a");
    wish(&mut cluster, "b", true);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    let why = "the share of claim b cannot be suspended: the suspended shares of node n1 may have 30 GiB of host memory \
               (suspend.hostMemory of its GpuNodeProfile); they have 20 GiB, and 20 GiB more are necessary";
    assert_eq!(cluster.messages_of("Pod/b"), [why]);
    let due = cluster.planner.next_deadline().unwrap();
    assert!(due > cluster.now, "it is tried now and then");
    wish(&mut cluster, "a", false);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["-a"]);
    for status in ["True", "False"] {
        answer(&mut cluster, "a", status, "Resuming");
        cluster.advance(RETRY);
        cluster.settle();
        assert!(cluster.suspensions.is_empty(), "its copy is still there");
    }
    answer(&mut cluster, "a", "False", "Resumed");
    cluster.advance(RETRY);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+b"]);
}

#[test]
fn share_that_its_node_refuses_to_suspend_takes_no_host_memory() {
    let mut cluster = TestCluster::new(&["n1"]);
    limit_host_memory(&mut cluster, "n1", 30 << 10);
    for name in ["a", "b"] {
        add_suspendable(&mut cluster, name, "20Gi", 0);
    }
    suspend(&mut cluster, "a");
    // It keeps its wish.
    answer(&mut cluster, "a", "False", "SuspendRefused");
    wish(&mut cluster, "b", true);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+b"]);
}

/// A share waits to be suspended, because another one has all of the node's host memory for that.
fn share_waits_for_host_memory() -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    limit_host_memory(&mut cluster, "n1", 20 << 10);
    for name in ["a", "b"] {
        add_suspendable(&mut cluster, name, "20Gi", 0);
    }
    suspend(&mut cluster, "a");
    wish(&mut cluster, "b", true);
    cluster.advance(RETRY);
    cluster.settle();
    assert!(cluster.suspensions.is_empty());
    cluster
}

#[test]
fn host_memory_is_free_after_the_deletion_of_a_suspended_pod() {
    let mut cluster = share_waits_for_host_memory();
    cluster.delete_pod("a");
    cluster.advance(RETRY);
    cluster.settle();
    assert!(cluster.write_intents().iter().all(|write| write != "+b"));
    cluster.delete_claim("a");
    cluster.advance(RETRY);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+b"]);
}

#[test]
fn host_memory_is_free_after_a_restart_of_the_node() {
    let mut cluster = share_waits_for_host_memory();
    answer(&mut cluster, "a", "True", "StateLost");
    cluster.advance(RETRY);
    cluster.settle();
    assert_eq!(cluster.write_intents(), ["+b"]);
    // Its pod may stay for long.
    assert_eq!(cluster.evictions.len(), 1);
}
