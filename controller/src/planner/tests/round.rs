//! Decisions in time slices.

use std::time::Duration;

use super::cluster::{TestCluster, applied};
use crate::fixture::class;

#[test]
fn decides_for_every_pod_in_slices_under_churn() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.is_slice_over = |_| true;
    for name in ["a", "b", "c"] {
        cluster.add_pod_with_claim(name, "100Gi");
    }
    cluster.add_pod_with_claim("d", "8Gi");
    let mut jobs = Vec::new();
    for _ in 0..4 {
        // Activates all pods.
        cluster.planner.class(applied(class()));
        cluster.advance(Duration::from_millis(100));
        assert!(jobs.is_empty());
        jobs = cluster.actions().0;
        let deadline = cluster.planner.next_deadline();
        assert!(deadline.is_some_and(|deadline| deadline <= cluster.now) || !jobs.is_empty());
    }
    assert_eq!(
        jobs.len(),
        1,
        "one decision per slice, and none is repeated before the last"
    );
}
