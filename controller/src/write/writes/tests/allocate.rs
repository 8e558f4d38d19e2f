//! Writes of allocations under faults.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_api::names;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::server::{Fault, Server, device_of, job, start, start_in, term_until};
use crate::action::{AllocationJob, AllocationOutcome};
use crate::fixture::claim;
use crate::pods::claim::is_allocated;

async fn allocate_with(faults: &[Fault]) -> (AllocationOutcome, Arc<Mutex<Server>>) {
    let claims = [claim("a", "1Gi")];
    let (writer, server) = start(&claims, faults, &CancellationToken::new());
    let outcome = writer.allocate(job(&claims)).await;
    (outcome, server)
}

#[tokio::test]
async fn writes_missing_finalizer_before_status() {
    let (outcome, server) = allocate_with(&[]).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(server.lock().unwrap().log, ["PATCH a", "PATCH a/status"]);
    assert_eq!(device_of(&server, "a").as_deref(), Some("ours-a"));
    // The newest version, so that the planner does not wait for the watch.
    assert_eq!(
        outcome.claims[0].metadata.resource_version.as_deref(),
        Some("102")
    );
}

/// No scheduler reserves a companion.
#[tokio::test]
async fn reserves_companion_with_its_allocation() {
    for faults in [vec![], vec![Fault::None, Fault::ResponseLost]] {
        let mut companion = claim("a", "1Gi");
        let label = (names::COMPANION_LABEL.to_owned(), "uid-base".to_owned());
        companion.metadata.labels = Some([label].into());
        let claims = [companion];
        let (writer, _) = start(&claims, &faults, &CancellationToken::new());
        let mut job = job(&claims);
        let consumer = json!({"resource": "pods", "name": "p", "uid": "pod-owner"});
        job.pods[0].writes[0].consumer = Some(crate::fixture::object(consumer.clone()));
        let outcome = writer.allocate(job).await;
        assert_eq!(outcome.failure, None, "{faults:?}");
        let status = outcome.claims[0].status.clone().unwrap();
        let reserved = serde_json::to_value(status.reserved_for.unwrap()).unwrap();
        assert_eq!(reserved, json!([consumer]));
    }
}

#[tokio::test]
async fn writes_claim_with_finalizer_once() {
    let mut claim = claim("a", "1Gi");
    claim.metadata.finalizers = Some(vec![names::CLAIM_FINALIZER.to_owned()]);
    let claims = [claim];
    let (writer, server) = start(&claims, &[], &CancellationToken::new());
    let outcome = writer.allocate(job(&claims)).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(server.lock().unwrap().log, ["PATCH a/status"]);
    // The answer has no more than the metadata.
    let mut written = serde_json::to_value(&outcome.claims[0]).unwrap();
    let stored = server.lock().unwrap().objects["a"].clone();
    for part in ["metadata", "spec", "status"] {
        assert_eq!(written[part].take(), stored[part], "{part}");
    }
}

#[tokio::test]
async fn reads_claim_back_after_lost_requests() {
    use Fault::{ChangedBefore, RequestLost, ResponseLost};
    for faults in [
        vec![RequestLost],
        vec![ResponseLost],
        vec![Fault::None, RequestLost],
        vec![Fault::None, ResponseLost],
        vec![
            ResponseLost,
            RequestLost,
            RequestLost,
            Fault::None,
            ResponseLost,
            RequestLost,
        ],
        vec![ChangedBefore],
        vec![Fault::None, ChangedBefore, Fault::None, ChangedBefore],
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
async fn never_overwrites_other_writers() {
    let (outcome, server) = allocate_with(&[Fault::None, Fault::AllocatedBefore]).await;
    let failure = outcome.failure.unwrap();
    assert_eq!(
        failure.message,
        "claim default/a: another controller has allocated the claim"
    );
    assert!(!failure.is_reportable);
    assert_eq!(device_of(&server, "a").as_deref(), Some("theirs"));
    assert!(
        is_allocated(&outcome.claims[0]),
        "the outcome has the foreign allocation"
    );

    let (outcome, server) = allocate_with(&[Fault::None, Fault::ReplacedBefore]).await;
    assert_eq!(
        outcome.failure.unwrap().message,
        "claim default/a: the claim was deleted"
    );
    assert_eq!(device_of(&server, "a"), None);

    let (outcome, server) = allocate_with(&[Fault::None, Fault::DeletedBefore]).await;
    assert_eq!(
        outcome.failure.unwrap().message,
        "claim default/a: the claim was deleted"
    );
    assert_eq!(device_of(&server, "a"), None, "its finalizer keeps it");

    let (outcome, _) = allocate_with(&[Fault::ChangedBefore; 40]).await;
    assert_eq!(
        outcome.failure.unwrap().message,
        "claim default/a: giving up after repeated update conflicts"
    );
}

#[tokio::test]
async fn names_missing_permission() {
    let message = "ResourceClaim.resource.k8s.io \"a\" is invalid: status.allocation: Forbidden: changing \
                   status.allocation or status.reservedFor requires resource=\"resourceclaims/binding\"";
    let (outcome, _) = allocate_with(&[Fault::None, Fault::Status(422, message)]).await;
    let failure = outcome.failure.unwrap();
    assert!(failure.is_reportable);
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
    assert!(failure.is_reportable);
    assert_eq!(
        failure.message,
        "claim default/a: the API server rejects the allocation: status.allocation: Invalid value"
    );
}

#[tokio::test]
async fn allocates_all_claims_of_pod_or_none() {
    let claims = [claim("a", "1Gi"), claim("b", "1Gi")];
    let (writer, server) = start(&claims, &[], &CancellationToken::new());
    let outcome = writer.allocate(job(&claims)).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(outcome.claims.len(), 2);
    assert_eq!(device_of(&server, "b").as_deref(), Some("ours-b"));

    // The second claim fails at each step, also with faults during the roll-back.
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
            Fault::ResponseLost,
        ],
        vec![
            Fault::None,
            Fault::None,
            Fault::Status(403, "no"),
            Fault::RequestLost,
            Fault::RequestLost,
            Fault::None,
            Fault::ChangedBefore,
        ],
    ] {
        let (writer, server) = start(&claims, &faults, &CancellationToken::new());
        let outcome = writer.allocate(job(&claims)).await;
        assert!(outcome.failure.is_some(), "{faults:?}");
        assert_eq!(device_of(&server, "a"), None, "{faults:?}");
        assert!(
            outcome
                .claims
                .iter()
                .any(|claim| claim.metadata.name.as_deref() == Some("a") && !is_allocated(claim))
        );
    }
}

#[tokio::test]
async fn stops_reading_back_on_shutdown() {
    let claims = [claim("a", "1Gi")];
    let stop = CancellationToken::new();
    let (writer, server) = start(&claims, &[Fault::RequestLost; 100_000], &stop);
    tokio::spawn(async move {
        while server.lock().unwrap().log.len() < 10 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        stop.cancel();
    });
    let outcome = writer.allocate(job(&claims)).await;
    assert_eq!(
        outcome.failure.unwrap().message,
        "claim default/a: cannot write the allocation: this replica stops or has lost the lease"
    );
}

#[tokio::test]
async fn sends_nothing_after_end_of_term() {
    let claims = [claim("a", "1Gi")];
    let stop = CancellationToken::new();
    let (writer, server) = start_in(term_until(Duration::ZERO), &claims, &[], &stop);
    let outcome = writer.allocate(job(&claims)).await;
    let failure = outcome.failure.unwrap();
    assert!(
        failure.message.ends_with("or has lost the lease"),
        "{}",
        failure.message
    );
    assert!(!failure.is_reportable);
    assert!(server.lock().unwrap().log.is_empty());
}

#[tokio::test]
async fn writes_only_after_accepted_dry_run() {
    let claims = [claim("a", "1Gi"), claim("b", "1Gi")];
    let (writer, server) = start(&claims, &[], &CancellationToken::new());
    let denial = "admission policy 'drava-controller-lease' denied request";
    server.lock().unwrap().dry_run_faults = [Fault::Status(422, denial); 3].into();
    let outcome = writer.allocate(job(&claims)).await;
    assert_eq!(outcome.failure, None);
    assert!(server.lock().unwrap().dry_run_faults.is_empty());

    // The second dry run would fail.
    server.lock().unwrap().dry_run_faults = [Fault::Status(403, "no")].into();
    let again = [claim("a", "1Gi")];
    writer.allocate(job(&again)).await;
    assert_eq!(
        server.lock().unwrap().dry_run_faults.len(),
        1,
        "once per term"
    );
}

#[tokio::test]
async fn term_starts_when_a_dry_run_is_accepted() {
    let denial = "admission policy 'drava-controller-lease' denied request";
    let (writer, server) = start(&[claim("a", "1Gi")], &[], &CancellationToken::new());
    server.lock().unwrap().dry_run_faults = [
        Fault::Status(422, denial),
        Fault::Status(409, "the object has been modified"),
        Fault::Status(422, denial),
    ]
    .into();
    let attempts = Cell::new(0);
    writer
        .wait_until_holder(|| attempts.set(attempts.get() + 1))
        .await;
    assert_eq!(attempts.get(), 4);
    assert!(server.lock().unwrap().log.is_empty(), "nothing is written");
}

#[tokio::test]
async fn writes_although_dry_runs_are_rejected() {
    let claims = [claim("a", "1Gi")];
    for rejection in [
        Fault::Status(400, "admission webhook \"x\" does not support dry run"),
        Fault::Status(422, "claims need the label x"),
    ] {
        let (writer, server) = start(&claims, &[], &CancellationToken::new());
        server.lock().unwrap().dry_run_faults = [rejection; 9].into();
        let outcome = writer.allocate(job(&claims)).await;
        assert_eq!(outcome.failure, None, "{rejection:?}");
    }
}

#[tokio::test]
async fn rejected_dry_run_of_one_claim_proves_nothing() {
    let denial = "admission policy 'drava-controller-lease' denied request";
    let claims = [claim("a", "1Gi"), claim("b", "1Gi")];
    let (writer, server) = start(&claims, &[], &CancellationToken::new());
    let other = Fault::Status(422, "claims need the label x");
    server.lock().unwrap().dry_run_faults = [other, Fault::Status(422, denial), other].into();
    let attempts = Cell::new(0);
    writer
        .wait_until_holder(|| attempts.set(attempts.get() + 1))
        .await;
    assert_eq!(attempts.get(), 2, "until b is admitted");
}

#[tokio::test]
async fn leads_although_every_claim_is_rejected() {
    let (writer, server) = start(&[claim("a", "1Gi")], &[], &CancellationToken::new());
    let rejection = Fault::Status(422, "claims need the label x");
    server.lock().unwrap().dry_run_faults = [rejection; 1000].into();
    writer.wait_until_holder(|| {}).await;
    assert!(!server.lock().unwrap().dry_run_faults.is_empty());
}

#[tokio::test]
async fn gives_up_on_claim_that_it_cannot_read_back() {
    let claims = [claim("a", "1Gi")];
    let conflict = [Fault::ChangedBefore];
    let (writer, server) = start(&claims, &conflict, &CancellationToken::new());
    server.lock().unwrap().objects.get_mut("a").unwrap()["status"]["devices"] = json!([{
        "driver": "d", "pool": "p", "device": "d",
        "conditions": [{"type": "t", "status": "True", "reason": "r", "message": "",
                        "lastTransitionTime": "9999-12-31T23:59:59Z"}],
    }]);
    let failure = writer.allocate(job(&claims)).await.failure.unwrap();
    assert!(
        failure
            .message
            .contains("cannot read the claim: status.devices[0].conditions[0]"),
        "{}",
        failure.message
    );
}

#[tokio::test]
async fn term_starts_at_once_without_claims_or_permission() {
    let (writer, _) = start(&[], &[], &CancellationToken::new());
    writer.wait_until_holder(|| {}).await;
    let (writer, server) = start(&[claim("a", "1Gi")], &[], &CancellationToken::new());
    server.lock().unwrap().dry_run_faults = [Fault::Status(403, "no")].into();
    writer.wait_until_holder(|| {}).await;
    let ended = CancellationToken::new();
    ended.cancel();
    let (writer, _) = start(&[claim("a", "1Gi")], &[], &ended);
    writer.wait_until_holder(|| panic!("no attempt")).await;
}

#[tokio::test]
async fn reports_no_event_if_policy_rejects_write() {
    let denial = Fault::Status(
        422,
        "admission policy 'drava-controller-lease' denied request",
    );
    let (outcome, server) = allocate_with(&[Fault::None, denial]).await;
    let failure = outcome.failure.unwrap();
    assert!(failure.message.ends_with("another replica holds the lease"));
    assert!(!failure.is_reportable);
    assert_eq!(device_of(&server, "a"), None);
}

#[tokio::test]
async fn abandoned_write_is_not_executed_late() {
    for faults in [
        vec![
            Fault::None,
            Fault::Late,
            Fault::None,
            Fault::None,
            Fault::Status(422, "no"),
        ],
        vec![
            Fault::None,
            Fault::Late,
            Fault::RequestLost,
            Fault::Late,
            Fault::None,
            Fault::None,
            Fault::Status(422, "no"),
        ],
    ] {
        let (outcome, server) = allocate_with(&faults).await;
        assert!(outcome.failure.is_some(), "{faults:?}");
        server.lock().unwrap().execute_late();
        assert_eq!(device_of(&server, "a"), None, "{faults:?}");
    }
}

#[tokio::test]
async fn writes_no_allocation_again_after_its_release() {
    let (outcome, server) = allocate_with(&[Fault::None, Fault::ReleasedAfter]).await;
    let failure = outcome.failure.unwrap();
    assert!(
        failure.message.ends_with("allocating it again"),
        "{}",
        failure.message
    );
    assert!(!failure.is_reportable);
    assert_eq!(outcome.claims.len(), 1, "the newest version is known");
    assert_eq!(device_of(&server, "a"), None);
}

#[tokio::test]
async fn explains_missing_permission_to_read_back() {
    let (outcome, _) = allocate_with(&[
        Fault::ChangedBefore,
        Fault::Status(403, "cannot get claims"),
    ])
    .await;
    let failure = outcome.failure.unwrap();
    assert!(failure.is_reportable);
    assert!(
        failure
            .message
            .ends_with("lacks a permission: cannot get claims")
    );
}

#[tokio::test]
async fn roll_back_returns_no_deleted_claim() {
    let claims = [claim("a", "1Gi"), claim("b", "1Gi")];
    let faults = [
        Fault::None,
        Fault::None,
        Fault::Status(403, "no"),
        Fault::Status(404, "not found"),
    ];
    let (writer, _) = start(&claims, &faults, &CancellationToken::new());
    let outcome = writer.allocate(job(&claims)).await;
    assert!(outcome.failure.is_some());
    assert!(outcome.claims.is_empty(), "{:?}", outcome.claims);
}

#[tokio::test(start_paused = true)]
async fn writes_large_gang_in_a_tenth_of_the_time() {
    let names: Vec<String> = (0..250).map(|index| format!("m{index}")).collect();
    let claims: Vec<_> = names.iter().map(|name| claim(name, "1Gi")).collect();
    let gang = || AllocationJob {
        pods: claims
            .iter()
            .flat_map(|claim| job(std::slice::from_ref(claim)).pods)
            .collect(),
    };
    let latency = Duration::from_millis(5);
    let (writer, server) = start(&claims, &[], &CancellationToken::new());
    server.lock().unwrap().latency = latency;
    let begin = tokio::time::Instant::now();
    let outcome = writer.allocate(gang()).await;
    // Each claim takes two requests.
    assert!(
        begin.elapsed() < latency * 500 / 10,
        "{:?}",
        begin.elapsed()
    );
    assert_eq!((outcome.failure, outcome.claims.len()), (None, 250));

    // One write in the middle fails: all that were written are released.
    let faults = [&[Fault::None; 100][..], &[Fault::Status(403, "no")]].concat();
    let (writer, server) = start(&claims, &faults, &CancellationToken::new());
    server.lock().unwrap().latency = latency;
    let outcome = writer.allocate(gang()).await;
    assert!(outcome.failure.is_some());
    assert!(names.iter().all(|name| device_of(&server, name).is_none()));
    let writes = server
        .lock()
        .unwrap()
        .log
        .iter()
        .filter(|line| line.ends_with("/status"))
        .count();
    assert!(writes < 200, "no write starts after the failure: {writes}");
    assert!(outcome.claims.iter().all(|claim| !is_allocated(claim)));
}
