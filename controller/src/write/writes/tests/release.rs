//! Releases of allocations under faults.

use std::sync::{Arc, Mutex};

use drava_api::names;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::server::{Fault, Server, device_of, start, write};
use crate::action::Release;
use crate::action::event::ReleaseReason;
use crate::fixture::{claim, object};
use crate::pods::claim::{allocated_for, annotation, is_allocated, is_reserved};

fn allocated(reserved: bool) -> ResourceClaim {
    let mut claim = claim("a", "1Gi");
    claim.metadata.finalizers = Some(vec![
        "example.com/other".to_owned(),
        names::CLAIM_FINALIZER.to_owned(),
    ]);
    claim.metadata.annotations = Some(
        [
            (names::ALLOCATED_FOR_ANNOTATION, "pod-p"),
            (
                names::PLACEMENT_REASON_ANNOTATION,
                "node n1: only feasible node",
            ),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into_iter()
        .collect(),
    );
    let mut status = json!({"allocation": write(&claim).allocation});
    if reserved {
        status["reservedFor"] = json!([{"resource": "pods", "name": "p", "uid": "u"}]);
    }
    claim.status = Some(object(status));
    claim
}

async fn release_with(
    claim: &ResourceClaim,
    faults: &[Fault],
) -> (Option<ResourceClaim>, Arc<Mutex<Server>>) {
    let (writer, server) = start(
        std::slice::from_ref(claim),
        faults,
        &CancellationToken::new(),
    );
    let release = Release {
        claim: Arc::new(claim.clone()),
        reason: ReleaseReason::NoPendingPod,
    };
    let outcome = writer.release(release).await;
    (outcome.claim.map(|claim| *claim), server)
}

#[tokio::test]
async fn removes_allocation_finalizer_and_annotations() {
    for faults in [
        vec![],
        vec![Fault::ResponseLost],
        vec![Fault::ChangedBefore],
        vec![Fault::None, Fault::ChangedBefore],
        vec![Fault::None, Fault::ResponseLost],
    ] {
        let (released, server) = release_with(&allocated(false), &faults).await;
        let released = released.unwrap();
        assert!(!is_allocated(&released), "{faults:?}");
        assert_eq!(allocated_for(&released), None, "{faults:?}");
        assert_eq!(
            annotation(&released, names::PLACEMENT_REASON_ANNOTATION),
            None,
            "{faults:?}"
        );
        let server = server.lock().unwrap();
        assert_eq!(
            server.objects["a"]["metadata"]["finalizers"],
            json!(["example.com/other"]),
            "{faults:?}"
        );
    }
}

#[tokio::test]
async fn keeps_reserved_claim() {
    let (newest, server) = release_with(&allocated(false), &[Fault::ReservedBefore]).await;
    assert!(
        is_reserved(&newest.unwrap()),
        "the outcome has the reservation"
    );
    assert_eq!(device_of(&server, "a").as_deref(), Some("ours-a"));
}

#[tokio::test]
async fn ignores_deleted_claim() {
    let (writer, server) = start(&[], &[], &CancellationToken::new());
    let release = Release {
        claim: Arc::new(allocated(false)),
        reason: ReleaseReason::NoPendingPod,
    };
    assert_eq!(writer.release(release).await.claim, None);
    assert!(server.lock().unwrap().log.is_empty(), "only the dry run");
}

#[tokio::test]
async fn keeps_newer_allocation() {
    let (newest, server) = release_with(&allocated(false), &[Fault::AllocatedBefore]).await;
    assert!(is_allocated(&newest.unwrap()));
    assert_eq!(device_of(&server, "a").as_deref(), Some("theirs"));
}
