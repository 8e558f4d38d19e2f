//! Detects a container runtime that ignores CDI devices.
//!
//! containerd with `enable_cdi = false` drops the CDI devices that kubelet passes, without an error: the container
//! starts without its GPU. The CDI hook writes a marker into the usage directory of each share. A prepared claim
//! without a marker that a started container uses was not injected; the pod and the claim get an event.
//!
//! A claim without shares has no usage directory and no marker, so it is not checked.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::event::EventReason;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use tokio_util::sync::CancellationToken;

use crate::claim::{ClaimRef, ClaimUid};
use crate::claims::{ClaimService, FetchError, TaskError, blocking};
use crate::inventory::State;
use crate::layout::Layout;
use crate::pods::{self, PodRef, reserving_pods};
use crate::prepare::Prepared;
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded, RecordError};
use crate::report::{Injection, Subject};

/// Time between two checks.
const INTERVAL: Duration = Duration::from_secs(5);

/// The claims could not be checked.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error(transparent)]
    Records(#[from] RecordError),
    #[error(transparent)]
    Claim(#[from] FetchError),
    #[error("cannot get pod {namespace}/{name}")]
    Pod {
        namespace: String,
        name: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// Reports claims that are used without injection, until `stop`.
pub async fn watch<E: Effects>(
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    stop: CancellationToken,
) {
    let mut reported = BTreeSet::new();
    loop {
        let checked = async {
            tokio::time::sleep(INTERVAL).await;
            check(&claims, &layout, &mut reported).await
        };
        tokio::select! {
            () = stop.cancelled() => return,
            checked = checked => if let Err(error) = checked {
                tracing::warn!(
                    error = describe(&error),
                    "cannot check whether the container runtime applies CDI specs"
                );
            },
        }
    }
}

async fn check<E: Effects>(
    claims: &ClaimService<E>,
    layout: &Layout,
    reported: &mut BTreeSet<ClaimUid>,
) -> Result<(), CheckError> {
    let (applier, layout) = (Arc::clone(&claims.applier), layout.clone());
    let unmarked = blocking(move || {
        let mut unmarked = Vec::new();
        for uid in applier.store().list()?.recorded {
            if let Ok(Loaded::Present(record)) = applier.store().load(&uid)
                && is_unmarked(&record, &layout)
            {
                unmarked.push(*record);
            }
        }
        Ok::<_, RecordError>(unmarked)
    })
    .await??;
    reported.retain(|uid| unmarked.iter().any(|record| record.claim.uid == *uid));
    for record in unmarked {
        if reported.contains(&record.claim.uid) {
            continue;
        }
        let Some(claim) = claims.fetch(&record.claim).await? else {
            continue;
        };
        for pod in reserving_pods(&claim) {
            let pods: Api<Pod> = Api::namespaced(claims.client.clone(), &pod.namespace);
            let found = pods.get_opt(&pod.name).await;
            let found = found.map_err(|source| CheckError::Pod {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                source: Box::new(source),
            })?;
            if found.is_some_and(|found| runs_with(&found, &pod, &record.claim)) {
                report(claims, &claim, &record, pod);
                reported.insert(record.claim.uid.clone());
                break;
            }
        }
    }
    Ok(())
}

/// Returns whether a claim has shares and no share has the hook's marker.
fn is_unmarked(record: &ClaimRecord, layout: &Layout) -> bool {
    let mut shares = record.devices.iter().filter_map(Prepared::share).peekable();
    shares.peek().is_some()
        && shares.all(|share| !layout.marker(&record.claim.uid, &share.id).exists())
}

/// Returns whether `pod` is `wanted` and one of its containers that use the claim was started.
#[must_use]
pub fn runs_with(pod: &Pod, wanted: &PodRef, claim: &ClaimRef) -> bool {
    let Some(status) = &pod.status else {
        return false;
    };
    if pod.metadata.uid.as_deref() != Some(&wanted.uid) {
        return false;
    }
    let users: BTreeSet<String> = pods::users(pod, &claim.name)
        .into_iter()
        .map(|user| user.container)
        .collect();
    let statuses = status
        .container_statuses
        .iter()
        .chain(&status.init_container_statuses)
        .flatten();
    statuses
        .filter(|status| users.contains(&status.name))
        .any(|status| {
            let states = [&status.state, &status.last_state];
            states
                .into_iter()
                .flatten()
                .any(|state| state.running.is_some() || state.terminated.is_some())
        })
}

fn report<E: Effects>(
    claims: &ClaimService<E>,
    found: &ResourceClaim,
    record: &ClaimRecord,
    pod: PodRef,
) {
    let note = format!(
        "claim {}: the container has no GPU: the container runtime ignores CDI devices; set enable_cdi = true in \
         containerd's config (default since containerd 2.0), then restart containerd and the pod",
        record.claim
    );
    for subject in [Subject::Pod(pod), Subject::Claim(record.claim.clone())] {
        claims
            .reporter
            .event(subject, EventReason::CdiIgnored, note.clone());
    }
    let state = claims.gpus.borrow().clone();
    if let State::Known(node) = state {
        claims
            .reporter
            .devices(found, record, &node.inventory, &Injection::Ignored);
    }
}
