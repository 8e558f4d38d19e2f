//! Allocations are taken back with everything that was written for them, but not from a pod.

use std::sync::{Arc, Mutex};

use drava_api::names;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::server::{Fault, Server, device_of, start, write};
use crate::action::Release;
use crate::claim::{allocated_for, is_allocated, is_reserved};
use crate::fixture::{claim, object};

fn allocated(reserved: bool) -> ResourceClaim {
    let mut claim = claim("a", "1Gi");
    claim.metadata.finalizers = Some(vec![
        "example.com/other".to_owned(),
        names::CLAIM_FINALIZER.to_owned(),
    ]);
    claim.metadata.annotations = Some(
        [(
            names::ALLOCATED_FOR_ANNOTATION.to_owned(),
            "pod-p".to_owned(),
        )]
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
    let wanted = Release {
        claim: Arc::new(claim.clone()),
        why: "test".to_owned(),
    };
    let released = writer.release(&wanted).await;
    (released, server)
}

#[tokio::test]
async fn a_release_takes_allocation_finalizer_and_mark() {
    for faults in [
        vec![],
        vec![Fault::AnswerLost],
        vec![Fault::Overtaken],
        vec![Fault::None, Fault::Overtaken],
        vec![Fault::None, Fault::AnswerLost],
    ] {
        let (released, server) = release_with(&allocated(false), &faults).await;
        let released = released.unwrap();
        assert!(!is_allocated(&released), "{faults:?}");
        assert_eq!(allocated_for(&released), None, "{faults:?}");
        let server = server.lock().unwrap();
        assert_eq!(
            server.objects["a"]["metadata"]["finalizers"],
            json!(["example.com/other"]),
            "{faults:?}"
        );
    }
}

#[tokio::test]
async fn a_reserved_claim_is_not_released() {
    let (newest, server) = release_with(&allocated(false), &[Fault::ReservedBefore]).await;
    assert!(
        is_reserved(&newest.unwrap()),
        "the planner learns of the reservation"
    );
    assert_eq!(device_of(&server, "a").as_deref(), Some("ours-a"));
}

#[tokio::test]
async fn releasing_what_is_gone_is_no_trouble() {
    let (writer, server) = start(&[], &[], &CancellationToken::new());
    let wanted = Release {
        claim: Arc::new(allocated(false)),
        why: "test".to_owned(),
    };
    assert_eq!(writer.release(&wanted).await, None);
    assert_eq!(server.lock().unwrap().log, ["PATCH a/status"]);
}
