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
use crate::pods::claim::{is_allocated, is_reserved};

fn allocated(reserved: bool) -> ResourceClaim {
    let mut claim = claim("a", "1Gi");
    claim.metadata.finalizers = Some(vec![
        "example.com/other".to_owned(),
        names::CLAIM_FINALIZER.to_owned(),
    ]);
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
async fn removes_allocation_and_keeps_finalizer() {
    for faults in [
        vec![],
        vec![Fault::ResponseLost],
        vec![Fault::ChangedBefore],
        vec![Fault::RequestLost, Fault::None, Fault::ChangedBefore],
    ] {
        let (released, server) = release_with(&allocated(false), &faults).await;
        assert!(!is_allocated(&released.unwrap()), "{faults:?}");
        assert_eq!(device_of(&server, "a"), None, "{faults:?}");
        // The next allocation needs no other write, and kube-controller-manager removes it from a deleted claim.
        let server = server.lock().unwrap();
        assert_eq!(
            server.objects["a"]["metadata"]["finalizers"],
            json!(["example.com/other", names::CLAIM_FINALIZER]),
            "{faults:?}"
        );
    }
}

#[tokio::test]
async fn releases_by_one_write() {
    let (_, server) = release_with(&allocated(false), &[]).await;
    assert_eq!(server.lock().unwrap().log, ["PATCH a/status"]);
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

/// Returns a companion that is being deleted, reserved for a running pod, that its share has given back.
fn ending_companion() -> ResourceClaim {
    let mut claim = allocated(true);
    claim.metadata.labels =
        Some([(names::COMPANION_LABEL.to_owned(), "uid-base".to_owned())].into());
    claim.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:00Z")));
    let status = claim.status.as_mut().unwrap();
    status.devices = Some(vec![object(json!({
        "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "ours-a",
        "conditions": [{
            "type": "Granted", "status": "False", "reason": "Released", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }],
    }))]);
    claim
}

#[tokio::test]
async fn releases_companion_of_running_pod_once_given_back() {
    for faults in [
        vec![],
        vec![Fault::ChangedBefore],
        vec![Fault::ResponseLost],
    ] {
        let (released, _) = release_with(&ending_companion(), &faults).await;
        let released = released.unwrap();
        assert!(
            !is_allocated(&released) && !is_reserved(&released),
            "{faults:?}"
        );
    }
}
