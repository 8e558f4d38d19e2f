//! What the leader shows of its reservations.

use std::time::Duration;

use drava_api::leader::{
    GpuControllerLeader, LEADER_NAME, MAX_RESERVATIONS, ReservationPurpose, ReservedClaim,
};
use serde_json::json;

use super::cluster::{TestCluster, applied};
use crate::action::status::{StatusOutcome, StatusUpdate};
use crate::fixture::{claim, object, pod};

/// A version of the object that names the leader, without a status.
fn leader(version: &str) -> GpuControllerLeader {
    object(json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuControllerLeader",
        "metadata": {"name": LEADER_NAME, "uid": "u", "resourceVersion": version}, "spec": {"holder": "a"},
    }))
}

/// Returns the writes that are due now.
fn due(cluster: &mut TestCluster) -> Vec<StatusUpdate<GpuControllerLeader>> {
    cluster.settle();
    std::mem::take(&mut cluster.leader_statuses)
}

/// Returns the only write that is due now.
fn only(cluster: &mut TestCluster) -> StatusUpdate<GpuControllerLeader> {
    let mut updates = due(cluster);
    assert_eq!(updates.len(), 1, "{updates:?}");
    updates.remove(0)
}

/// Ends a write; a successful one results in this version.
fn end(
    cluster: &mut TestCluster,
    update: StatusUpdate<GpuControllerLeader>,
    version: Option<&str>,
) {
    let written = version.map(|version| {
        let mut written = leader(version);
        written.status = Some(update.status);
        Box::new(written)
    });
    let outcome = StatusOutcome {
        name: update.name,
        written,
    };
    cluster.planner.leader_status_written(outcome, cluster.now);
}

fn pods(reservations: &[ReservedClaim]) -> Vec<&str> {
    let pods = reservations.iter();
    pods.map(|reserved| reserved.pod.as_str()).collect()
}

#[test]
fn reservations_are_written_when_they_change() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("running", "60Gi", 0)]);
    assert!(due(&mut cluster).is_empty(), "the object is unknown");
    cluster.planner.leader(applied(leader("7")));
    let first = only(&mut cluster);
    assert_eq!((&*first.uid, &*first.resource_version), ("u", "7"));
    assert_eq!(first.status.reservations, [], "those of an earlier leader");
    end(&mut cluster, first, Some("8"));
    cluster.advance(Duration::from_secs(60));
    assert!(due(&mut cluster).is_empty(), "no change");
    cluster.add_pod_of_priority("head", "70Gi", 0);
    let second = only(&mut cluster);
    assert_eq!(second.resource_version, "8");
    assert_eq!(pods(&second.status.reservations), ["head"]);
    assert_eq!(
        second.status.reservations[0].purpose,
        ReservationPurpose::HeadOfQueue
    );
    assert!(due(&mut cluster).is_empty(), "the write is in flight");
    end(&mut cluster, second, Some("9"));
    cluster.advance(Duration::from_secs(1));
    assert!(due(&mut cluster).is_empty(), "no change");
    cluster.end("head");
    let third = only(&mut cluster);
    assert_eq!(third.resource_version, "9");
    assert_eq!(third.status.reservations, []);
}

#[test]
fn reservations_are_written_again_after_error() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("running", "60Gi", 0)]);
    cluster.add_pod_of_priority("head", "70Gi", 0);
    cluster.planner.leader(applied(leader("7")));
    let failed = only(&mut cluster);
    end(&mut cluster, failed.clone(), None);
    assert!(due(&mut cluster).is_empty(), "not at once");
    let again_at = cluster.planner.next_deadline().unwrap();
    assert!(again_at <= cluster.now + Duration::from_secs(5));
    cluster.now = again_at;
    // The watch has delivered the version that the failed write has conflicted with.
    cluster.planner.leader(applied(leader("9")));
    let again = only(&mut cluster);
    assert_eq!(again.resource_version, "9");
    assert_eq!(again.status, failed.status);
}

/// The CRD of an earlier version lacks a field: the API server drops it.
#[test]
fn status_that_is_stored_in_part_is_written_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.planner.leader(applied(leader("7")));
    let first = only(&mut cluster);
    let mut stored = first.clone();
    stored.status.settings = None;
    end(&mut cluster, stored.clone(), Some("8"));
    cluster.advance(Duration::from_secs(60));
    assert!(due(&mut cluster).is_empty(), "nothing else would be stored");
    let mut changed = leader("9");
    stored.status.omitted_reservations = 3;
    changed.status = Some(stored.status);
    cluster.planner.leader(applied(changed));
    let again = only(&mut cluster);
    assert_eq!(again.status, first.status, "another client changed it");
}

#[test]
fn reservations_of_first_in_queue_are_kept() {
    const LAST: usize = 201;
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_running(&[("one", "80Gi", 0), ("other", "80Gi", 0)]);
    let claims: Vec<String> = (0..LAST).map(|number| format!("c-{number:03}")).collect();
    for name in &claims {
        cluster.add_claim(claim(name, "100Mi"));
    }
    let names: Vec<&str> = claims.iter().map(String::as_str).collect();
    let mut many = pod("many", &names);
    many.spec.as_mut().unwrap().priority = Some(5);
    cluster.add_pod(many);
    cluster.add_pod_of_priority("urgent", "80Gi", 10);
    cluster.planner.leader(applied(leader("7")));
    let status = only(&mut cluster).status;
    assert_eq!(status.reservations.len(), MAX_RESERVATIONS);
    assert_eq!(status.omitted_reservations, 2);
    let settings = status.settings.expect("those of the chart");
    assert_eq!(settings.scheduler_names, ["default-scheduler"]);
    assert_eq!(settings.node_policy, "binpack");
    let shown = pods(&status.reservations);
    assert!(shown.contains(&"urgent"), "the first in the queue");
    assert!(
        shown.contains(&"many"),
        "the others as far as there is room"
    );
}
