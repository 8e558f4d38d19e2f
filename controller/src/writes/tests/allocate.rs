//! Allocations are written whole, never over somebody else's, and never twice.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::server::{Fault, Server, device_of, job, start};
use crate::action::JobOutcome;
use crate::claim::{allocated_for, is_allocated};
use crate::fixture::claim;

async fn allocate_with(faults: &[Fault]) -> (JobOutcome, Arc<Mutex<Server>>) {
    let claims = [claim("a", "1Gi")];
    let (writer, server) = start(&claims, faults, &CancellationToken::new());
    let outcome = writer.allocate(job(&claims)).await;
    (outcome, server)
}

#[tokio::test]
async fn finalizer_then_status() {
    let (outcome, server) = allocate_with(&[]).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(server.lock().unwrap().log, ["PATCH a", "PATCH a/status"]);
    assert_eq!(device_of(&server, "a").as_deref(), Some("ours-a"));
    assert_eq!(allocated_for(&outcome.claims[0]), Some("pod-p"));
    // The outcome is the newest version, so that the planner need not wait for the watch.
    assert_eq!(
        outcome.claims[0].metadata.resource_version.as_deref(),
        Some("102")
    );
}

#[tokio::test]
async fn whatever_is_lost_is_found_out_by_reading() {
    use Fault::{AnswerLost, Lost, Overtaken};
    for faults in [
        vec![Lost],
        vec![AnswerLost],
        vec![Fault::None, Lost],
        vec![Fault::None, AnswerLost],
        vec![AnswerLost, Lost, Lost, Fault::None, AnswerLost, Lost],
        vec![Overtaken],
        vec![Fault::None, Overtaken, Fault::None, Overtaken],
        vec![Fault::None, Fault::Status(500, "busy")],
        vec![
            Fault::None,
            Fault::Status(504, "timeout"),
            Fault::Status(500, "busy"),
        ],
    ] {
        let (outcome, server) = allocate_with(&faults).await;
        assert_eq!(outcome.failure, None, "{faults:?}");
        assert_eq!(
            device_of(&server, "a").as_deref(),
            Some("ours-a"),
            "{faults:?}"
        );
        assert_eq!(
            outcome.claims[0].metadata.resource_version.as_deref(),
            server.lock().unwrap().objects["a"]["metadata"]["resourceVersion"].as_str(),
            "{faults:?}"
        );
    }
}

#[tokio::test]
async fn others_are_never_overwritten() {
    let (outcome, server) = allocate_with(&[Fault::None, Fault::AllocatedBefore]).await;
    let failure = outcome.failure.unwrap();
    assert_eq!(
        failure.message,
        "claim default/a was allocated by somebody else"
    );
    assert!(!failure.tell);
    assert_eq!(device_of(&server, "a").as_deref(), Some("theirs"));
    assert!(
        is_allocated(&outcome.claims[0]),
        "the planner learns of it at once"
    );

    let (outcome, server) = allocate_with(&[Fault::None, Fault::ReplacedBefore]).await;
    assert_eq!(outcome.failure.unwrap().message, "claim default/a is gone");
    assert_eq!(device_of(&server, "a"), None);

    let (outcome, _) = allocate_with(&[Fault::Overtaken; 40]).await;
    assert_eq!(
        outcome.failure.unwrap().message,
        "claim default/a keeps being changed by others"
    );
}

#[tokio::test]
async fn a_missing_permission_is_named() {
    let refusal = "ResourceClaim.resource.k8s.io \"a\" is invalid: status.allocation: Forbidden: changing \
                   status.allocation or status.reservedFor requires resource=\"resourceclaims/binding\"";
    let (outcome, _) = allocate_with(&[Fault::None, Fault::Status(422, refusal)]).await;
    let failure = outcome.failure.unwrap();
    assert!(failure.tell);
    assert!(
        failure.message.starts_with(
            "claim default/a: the ClusterRole of drava-controller lacks a permission: update and patch on \
             resourceclaims/binding of resource.k8s.io, cluster-wide"
        ),
        "{}",
        failure.message
    );
    let (outcome, _) = allocate_with(&[Fault::Status(
        403,
        "cannot patch resource \"resourceclaims\"",
    )])
    .await;
    assert!(
        outcome
            .failure
            .unwrap()
            .message
            .ends_with("lacks a permission: cannot patch resource \"resourceclaims\"")
    );
    let (outcome, _) = allocate_with(&[
        Fault::None,
        Fault::Status(422, "status.allocation: Invalid value"),
    ])
    .await;
    let failure = outcome.failure.unwrap();
    assert!(failure.tell);
    assert_eq!(
        failure.message,
        "claim default/a: the API server refuses the allocation: status.allocation: Invalid value"
    );
}

#[tokio::test]
async fn all_claims_of_a_pod_or_none() {
    let claims = [claim("a", "1Gi"), claim("b", "1Gi")];
    let (writer, server) = start(&claims, &[], &CancellationToken::new());
    let outcome = writer.allocate(job(&claims)).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(outcome.claims.len(), 2);
    assert_eq!(device_of(&server, "b").as_deref(), Some("ours-b"));

    // The second fails at each of its steps, and the roll-back meets trouble of its own.
    for faults in [
        vec![Fault::None, Fault::None, Fault::Status(403, "no")],
        vec![
            Fault::None,
            Fault::None,
            Fault::None,
            Fault::Status(422, "no"),
        ],
        vec![
            Fault::None,
            Fault::None,
            Fault::Status(403, "no"),
            Fault::AnswerLost,
        ],
        vec![
            Fault::None,
            Fault::None,
            Fault::Status(403, "no"),
            Fault::Lost,
            Fault::Lost,
            Fault::None,
            Fault::Overtaken,
        ],
    ] {
        let (writer, server) = start(&claims, &faults, &CancellationToken::new());
        let outcome = writer.allocate(job(&claims)).await;
        assert!(outcome.failure.is_some(), "{faults:?}");
        assert_eq!(device_of(&server, "a"), None, "{faults:?}");
        let server = server.lock().unwrap();
        assert_eq!(
            server.objects["a"]["metadata"]["finalizers"],
            json!([]),
            "{faults:?}"
        );
        assert!(
            outcome
                .claims
                .iter()
                .any(|claim| claim.metadata.name.as_deref() == Some("a") && !is_allocated(claim))
        );
    }
}

#[tokio::test]
async fn a_stop_ends_the_reading() {
    let claims = [claim("a", "1Gi")];
    let stop = CancellationToken::new();
    let (writer, server) = start(&claims, &[Fault::Lost; 100_000], &stop);
    tokio::spawn(async move {
        while server.lock().unwrap().log.len() < 10 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        stop.cancel();
    });
    let outcome = writer.allocate(job(&claims)).await;
    assert_eq!(
        outcome.failure.unwrap().message,
        "claim default/a was not written: this replica stops"
    );
}
