//! Detects a container runtime that ignores CDI devices.
//!
//! containerd with `enable_cdi = false` drops the CDI devices that kubelet passes, without an error: the container
//! starts without its GPU. The CDI hook empties a file in the usage directory of each share, before the container starts. A
//! prepared claim whose file still has its content **after** a container of it was seen started was not injected; the pod and
//! the claim get an event. A file that is emptied later withdraws the condition, also one of an earlier instance of the driver.
//!
//! A container can remove the file, for example by a script that removes the content of `/run`, and only a container to which
//! the runtime has applied the claim can. So a missing file means the same as an empty one.
//!
//! A claim without shares has no usage directory and no such file, so it is not checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use drava_api::condition::ConditionReason;
use drava_api::error::describe;
use drava_api::event::EventReason;
use drava_api::listed::Listed;
use drava_api::names;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::gpus::inventory::State;
use crate::kubelet::claims::{ClaimService, FetchError, TaskError, blocking};
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::node::layout::Layout;
use crate::prepare::Prepared;
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded, RecordChanges, RecordError, RecordStore};
use crate::report::pods::{self, PodRef, reserving_pods};
use crate::report::{Injection, Subject};

/// Time between two checks.
const INTERVAL: Duration = Duration::from_secs(5);

/// Longest time between two checks of the pods of a claim that no container has.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

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
    let mut shared = SharedClaims::default();
    loop {
        let checked = async {
            tokio::time::sleep(INTERVAL).await;
            check(&claims, &layout, &mut shared).await
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

/// Prepared claims with shares.
#[derive(Debug, Default)]
struct SharedClaims {
    changes: RecordChanges,
    known: BTreeMap<ClaimUid, SharedClaim>,
}

#[derive(Debug)]
struct SharedClaim {
    claim: ClaimRef,
    shares: Vec<ShareId>,
    /// Next check of the pods while no share is injected.
    check_at: Instant,
    /// Time between the checks of the pods: an image can take minutes to pull.
    wait: Duration,
    report: Report,
}

/// Whether the condition of a claim reports a missing injection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Report {
    /// Unknown: an earlier instance of the driver may have written it.
    Possible,
    /// This instance has queued the condition.
    Queued,
    /// The condition does not.
    Absent,
}

impl SharedClaim {
    fn new(record: &ClaimRecord, now: Instant) -> Self {
        let shares = record.devices.iter().filter_map(Prepared::share);
        Self {
            claim: record.claim.clone(),
            shares: shares.map(|share| share.id.clone()).collect(),
            check_at: now,
            wait: INTERVAL,
            report: Report::Possible,
        }
    }

    /// Sets the time of the next check of the pods.
    fn postpone(&mut self, now: Instant) {
        self.check_at = now + self.wait;
        self.wait = (self.wait * 2).min(LONGEST_WAIT);
    }
}

/// Claims that need requests to the API server.
#[derive(Debug, Default)]
struct Due {
    /// Claims that are not injected, whose pods are checked.
    missing: Vec<ClaimRef>,
    /// Injected claims whose condition may report a missing injection.
    injected: Vec<ClaimRef>,
}

impl SharedClaims {
    /// Reads the records if they have changed, and the files of the shares.
    fn update(
        &mut self,
        store: &RecordStore,
        is_share_injected: impl Fn(&ClaimUid, &ShareId) -> bool,
        now: Instant,
    ) -> Result<Due, RecordError> {
        if self.changes.is_changed(store, now) {
            let listed = match store.list() {
                Ok(listing) => listing.recorded,
                Err(error) => {
                    self.changes = RecordChanges::default();
                    return Err(error);
                }
            };
            self.known
                .retain(|uid, _| listed.binary_search(uid).is_ok());
            for uid in listed {
                if !self.known.contains_key(&uid)
                    && let Ok(Loaded::Present(record)) = store.load(&uid)
                {
                    self.known.insert(uid, SharedClaim::new(&record, now));
                }
            }
        }
        let mut due = Due::default();
        for known in self.known.values_mut() {
            let mut shares = known.shares.iter();
            if known.shares.is_empty() {
                continue;
            }
            if shares.any(|share| is_share_injected(&known.claim.uid, share)) {
                // The claim can be prepared again.
                (known.check_at, known.wait) = (now, INTERVAL);
                if known.report != Report::Absent {
                    due.injected.push(known.claim.clone());
                }
            } else if known.report != Report::Queued && known.check_at <= now {
                due.missing.push(known.claim.clone());
            }
        }
        Ok(due)
    }
}

async fn check<E: Effects>(
    claims: &ClaimService<E>,
    layout: &Layout,
    shared: &mut SharedClaims,
) -> Result<(), CheckError> {
    let (applier, layout_of_task, mut read) = (
        Arc::clone(&claims.applier),
        layout.clone(),
        std::mem::take(shared),
    );
    let (read, due) = blocking(move || {
        let is_share_injected =
            |uid: &ClaimUid, share: &ShareId| !is_pending(&layout_of_task.pending(uid, share));
        let due = read.update(applier.store(), is_share_injected, Instant::now());
        (read, due)
    })
    .await?;
    *shared = read;
    let Due { missing, injected } = due?;
    for claim in injected {
        if let Some(known) = shared.known.get_mut(&claim.uid) {
            known.report = withdraw(claims, &claim, known.report).await?;
        }
    }
    for claim in missing {
        let found = readable(claims.fetch(&claim).await)?;
        if let Some(known) = shared.known.get_mut(&claim.uid) {
            known.postpone(Instant::now());
        }
        let Some(found) = found else {
            continue;
        };
        for pod in reserving_pods(&found) {
            let pods: Api<Listed<Pod>> = Api::namespaced(claims.client.clone(), &pod.namespace);
            let running = pods.get_opt(&pod.name).await;
            let running = running.map_err(|source| CheckError::Pod {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                source: Box::new(source),
            })?;
            let running = running.and_then(Listed::object);
            if running.is_some_and(|running| runs_with(&running, &pod, &claim)) {
                let applier = Arc::clone(&claims.applier);
                let uid = claim.uid.clone();
                let layout = layout.clone();
                // The container started before the answer, and the hook ran before the container: the file is read again.
                let loaded = blocking(move || {
                    let loaded = applier.store().load(&uid)?;
                    Ok::<_, RecordError>((is_injected(&layout, &loaded), loaded))
                });
                let (is_injected, loaded) = loaded.await??;
                if is_injected {
                    break;
                }
                if let Loaded::Present(record) = loaded {
                    report(claims, &found, &record, pod);
                }
                if let Some(known) = shared.known.get_mut(&claim.uid) {
                    known.report = Report::Queued;
                }
                break;
            }
        }
    }
    Ok(())
}

/// Ignores a claim that this build cannot read: the others are checked.
fn readable(
    found: Result<Option<ResourceClaim>, FetchError>,
) -> Result<Option<ResourceClaim>, FetchError> {
    match found {
        Err(FetchError::Unreadable { .. }) => Ok(None),
        found => found,
    }
}

/// Returns whether the CDI hook has not changed this file yet.
fn is_pending(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && file.len() > 0)
}

/// Returns whether the runtime has applied a share of the record to a container.
fn is_injected(layout: &Layout, loaded: &Loaded) -> bool {
    let Loaded::Present(record) = loaded else {
        return false;
    };
    let mut shares = record.devices.iter().filter_map(Prepared::share);
    shares.any(|share| !is_pending(&layout.pending(&record.claim.uid, &share.id)))
}

/// Withdraws the condition of an injected claim that reports a missing injection. Returns what is known of the condition
/// afterwards.
async fn withdraw<E: Effects>(
    claims: &ClaimService<E>,
    claim: &ClaimRef,
    report: Report,
) -> Result<Report, CheckError> {
    let found = readable(claims.fetch(claim).await)?;
    let uid = Some(claim.uid.as_str());
    let Some(found) = found.filter(|found| found.metadata.uid.as_deref() == uid) else {
        return Ok(Report::Absent);
    };
    if !is_ignored(&found) {
        return Ok(match report {
            // Not written yet.
            Report::Queued => Report::Queued,
            Report::Possible | Report::Absent => Report::Absent,
        });
    }
    let State::Known(node) = claims.gpus.borrow().clone() else {
        return Ok(report);
    };
    let (applier, uid) = (Arc::clone(&claims.applier), claim.uid.clone());
    if let Loaded::Present(record) = blocking(move || applier.store().load(&uid)).await?? {
        claims
            .reporter
            .devices(&found, &record, &node.inventory, &Injection::Expected);
    }
    // The next check sees whether it was written.
    Ok(Report::Possible)
}

/// Returns whether a condition of the claim reports a missing injection.
fn is_ignored(claim: &ResourceClaim) -> bool {
    let devices = claim
        .status
        .iter()
        .flat_map(|status| status.devices.iter().flatten());
    let mut conditions = devices
        .filter(|device| device.driver == names::DRIVER)
        .flat_map(|device| device.conditions.iter().flatten());
    conditions.any(|condition| condition.reason == ConditionReason::CdiIgnored.as_str())
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

#[cfg(test)]
mod tests;
