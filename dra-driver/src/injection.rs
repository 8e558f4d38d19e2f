//! Notices a container runtime that ignores CDI.
//!
//! containerd with `enable_cdi = false` drops the CDI devices that kubelet names, without an error: the container
//! starts without its GPU, and nobody says why. Our CDI hook leaves a mark in the share's usage directory. A prepared
//! claim without any mark, used by a container that runs, was not injected: its pod and the claim are told so.
//!
//! Whole cards have no usage directory and so no mark; they are not watched.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use drava_api::event::EventReason;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use tokio_util::sync::CancellationToken;

use crate::claim::{ClaimRef, ClaimUid};
use crate::claims::{ClaimService, blocking};
use crate::error::describe;
use crate::inventory::State;
use crate::layout::Layout;
use crate::prepare::Prepared;
use crate::prepare::effects::Effects;
use crate::prepare::record::{Loaded, Record, Stage};
use crate::report::{Injection, PodRef, Subject};

/// Time between two looks at claims that have no mark yet.
const INTERVAL: Duration = Duration::from_secs(5);

/// Looks for claims that are used without having been injected, until `stop`.
pub async fn watch<E: Effects>(
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    stop: CancellationToken,
) {
    let mut told = BTreeSet::new();
    loop {
        let look = async {
            tokio::time::sleep(INTERVAL).await;
            look(&claims, &layout, &mut told).await
        };
        tokio::select! {
            () = stop.cancelled() => return,
            looked = look => if let Err(error) = looked {
                tracing::warn!(error, "cannot see whether the container runtime applies CDI specs");
            },
        }
    }
}

async fn look<E: Effects>(
    claims: &ClaimService<E>,
    layout: &Layout,
    told: &mut BTreeSet<ClaimUid>,
) -> Result<(), String> {
    let (applier, layout) = (Arc::clone(&claims.applier), layout.clone());
    let unmarked = blocking(move || {
        let listing = applier.store().list().map_err(|error| describe(&error))?;
        let mut unmarked = Vec::new();
        for uid in listing.recorded {
            if let Ok(Loaded::Present(record)) = applier.store().load(&uid)
                && is_unmarked(&record, &layout)
            {
                unmarked.push(*record);
            }
        }
        Ok::<_, String>(unmarked)
    })
    .await??;
    told.retain(|uid| unmarked.iter().any(|record| record.claim.uid == *uid));
    for record in unmarked {
        if told.contains(&record.claim.uid) {
            continue;
        }
        let Some(claim) = claims.fetch(&record.claim).await? else {
            continue;
        };
        for pod in reserving_pods(&claim) {
            let pods: Api<Pod> = Api::namespaced(claims.client.clone(), &pod.namespace);
            let found = pods.get_opt(&pod.name).await;
            let found =
                found.map_err(|error| format!("get pod {}: {}", pod.name, describe(&error)))?;
            if found.is_some_and(|found| runs_with(&found, &pod, &record.claim)) {
                tell(claims, &claim, &record, pod);
                told.insert(record.claim.uid.clone());
                break;
            }
        }
    }
    Ok(())
}

/// Whether a claim is prepared with shares, none of which a container runtime has given to a container.
fn is_unmarked(record: &Record, layout: &Layout) -> bool {
    let mut shares = record.devices.iter().filter_map(Prepared::share).peekable();
    record.stage == Stage::Prepared
        && shares.peek().is_some()
        && shares.all(|share| !layout.mark(&record.claim.uid, &share.id).exists())
}

fn reserving_pods(claim: &ResourceClaim) -> Vec<PodRef> {
    let consumers = claim
        .status
        .iter()
        .filter_map(|status| status.reserved_for.as_ref())
        .flatten();
    let namespace = claim.metadata.namespace.clone().unwrap_or_default();
    consumers
        .filter(|consumer| consumer.resource == "pods")
        .map(|consumer| PodRef {
            namespace: namespace.clone(),
            name: consumer.name.clone(),
            uid: consumer.uid.clone(),
        })
        .collect()
}

/// Whether `pod` is `wanted` and one of its containers that uses the claim has been started.
#[must_use]
pub fn runs_with(pod: &Pod, wanted: &PodRef, claim: &ClaimRef) -> bool {
    let (Some(spec), Some(status)) = (&pod.spec, &pod.status) else {
        return false;
    };
    if pod.metadata.uid.as_deref() != Some(&wanted.uid) {
        return false;
    }
    // A pod names its claims; a claim made of a template is named in the status.
    let generated = status.resource_claim_statuses.iter().flatten();
    let generated: Vec<_> = generated
        .filter(|status| status.resource_claim_name.as_deref() == Some(&claim.name))
        .map(|status| status.name.as_str())
        .collect();
    let direct = spec.resource_claims.iter().flatten();
    let direct = direct.filter(|named| named.resource_claim_name.as_deref() == Some(&claim.name));
    let names: BTreeSet<&str> = direct
        .map(|named| named.name.as_str())
        .chain(generated)
        .collect();
    let containers = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    let users: BTreeSet<&str> = containers
        .filter(|container| {
            let claims = container
                .resources
                .iter()
                .filter_map(|resources| resources.claims.as_ref());
            claims
                .flatten()
                .any(|used| names.contains(used.name.as_str()))
        })
        .map(|container| container.name.as_str())
        .collect();
    let statuses = status
        .container_statuses
        .iter()
        .chain(&status.init_container_statuses)
        .flatten();
    statuses
        .filter(|status| users.contains(status.name.as_str()))
        .any(|status| {
            let states = [&status.state, &status.last_state];
            states
                .into_iter()
                .flatten()
                .any(|state| state.running.is_some() || state.terminated.is_some())
        })
}

fn tell<E: Effects>(claims: &ClaimService<E>, found: &ResourceClaim, record: &Record, pod: PodRef) {
    let note = format!(
        "the container runtime ignored the CDI devices of claim {}, so the container has no GPU: CDI is off; set \
         enable_cdi = true in containerd's config (it is on by default since containerd 2.0), restart containerd and \
         the pod",
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
