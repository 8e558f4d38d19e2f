//! Finds what is left on the node for claims that are gone, and what is missing for claims that are not.
//!
//! Kubelet unprepares every claim that it knows of, again and again until it succeeds. What remains here is what it
//! does not know of: a preparation that was interrupted, a kubelet whose checkpoint was lost, a claim deleted by force,
//! files of a crashed writer, a record that a bad disk damaged. [`decide`] is pure; the rest looks and acts.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use drava_api::event::EventReason;
use drava_api::names;
use drava_cdi::SpecDir;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::ListParams;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::claim::{ClaimRef, ClaimUid};
use crate::claims::{ClaimService, blocking};
use crate::error::describe;
use crate::files;
use crate::layout::{Layout, SPEC_PREFIX};
use crate::lock::Lock;
use crate::prepare::apply::{Environment, Repairs};
use crate::prepare::effects::Effects;
use crate::prepare::plan::claim_ref;
use crate::prepare::record::{Loaded, Stage, Store};
use crate::report::Subject;

pub mod orphans;

pub use orphans::{Action, Found, Presence, Why, decide};

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(300);

/// Time between two looks while a claim's record is damaged: until it is rebuilt nothing else can be prepared.
const INTERVAL_DAMAGED: Duration = Duration::from_secs(5);

/// How long a prepared claim must be gone from the API server before its devices are taken back without kubelet. A pod
/// whose claim was deleted by force still runs; kubelet unprepares when it has stopped.
pub const GRACE: Duration = Duration::from_secs(600);

/// Age at which a temporary file has no writer any more.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);

/// Looks for orphans and repairs, from when this instance becomes the active one until `stop`.
pub async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    grace: Duration,
    untidy: Arc<Notify>,
    stop: CancellationToken,
) {
    let (specs, records) = (SpecDir::new(layout.cdi_dir(), SPEC_PREFIX), layout.claims());
    let swept = blocking(move || {
        specs.sweep().map_err(|error| describe(&error))?;
        files::sweep(&records, TEMPORARY_AGE).map_err(|error| error.to_string())
    });
    if let Err(error) = swept.await.and_then(|swept| swept) {
        tracing::warn!(
            error,
            "cannot remove the temporary files of writers that died"
        );
    }
    let mut reconciler = Reconciler {
        claims,
        layout,
        grace,
        lost_since: BTreeMap::new(),
    };
    loop {
        let passed = tokio::select! {
            () = stop.cancelled() => return,
            passed = reconciler.pass() => passed,
        };
        let damaged = passed.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot reconcile");
            true
        });
        let wait = if damaged { INTERVAL_DAMAGED } else { INTERVAL };
        tokio::select! {
            () = stop.cancelled() => return,
            () = untidy.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Looks for orphans and repairs them.
pub struct Reconciler<E> {
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    grace: Duration,
    /// When a claim was first seen to be gone.
    lost_since: BTreeMap<ClaimUid, Instant>,
}

impl<E: Effects> Reconciler<E> {
    /// Looks once, and acts. Returns whether records stay damaged.
    ///
    /// # Errors
    /// When the node or the API server cannot be looked at.
    pub async fn pass(&mut self) -> Result<bool, String> {
        let (layout, applier) = (self.layout.clone(), Arc::clone(&self.claims.applier));
        let found =
            blocking(move || look(&layout, applier.store()).map_err(|error| describe(&error)))
                .await??;
        let presence = self.presence(&found).await;
        let actions = decide(&found, &presence, self.grace);
        let mut damaged = found.damaged;
        for (uid, action) in actions {
            let claim = found.recorded.get(&uid).map(|(claim, _)| claim.clone());
            let rebuilt = damaged.contains(&uid);
            match self.act(&uid, claim, action).await {
                Ok(()) if rebuilt => {
                    damaged.remove(&uid);
                }
                Ok(()) => {}
                Err(error) => {
                    tracing::warn!(claim.uid = %uid, %error, "cannot reconcile the claim")
                }
            }
        }
        Ok(!damaged.is_empty())
    }

    /// Asks the API server about the claims that something is recorded for.
    async fn presence(&mut self, found: &Found) -> BTreeMap<ClaimUid, Presence> {
        let mut holders = BTreeMap::new();
        for (uid, (claim, _)) in &found.recorded {
            let api: Api<ResourceClaim> =
                Api::namespaced(self.claims.client.clone(), &claim.namespace);
            match api.get_opt(&claim.name).await {
                Ok(now) => {
                    let holds = now.filter(|now| now.metadata.uid.as_deref() == Some(uid.as_str()));
                    holders.insert(uid.clone(), holds.and_then(|now| self.holder(&now)));
                }
                Err(error) => {
                    tracing::warn!(%claim, error = %describe(&error), "cannot look the claim up")
                }
            }
        }
        if !found.damaged.is_empty() {
            // Only the UID is left of them, by which claims cannot be looked up.
            let api: Api<ResourceClaim> = Api::all(self.claims.client.clone());
            match api.list(&ListParams::default()).await {
                Ok(all) => {
                    let now: BTreeMap<ClaimUid, ClaimRef> = all
                        .items
                        .iter()
                        .filter_map(|claim| {
                            self.holder(claim).map(|claim| (claim.uid.clone(), claim))
                        })
                        .collect();
                    holders.extend(
                        found
                            .damaged
                            .iter()
                            .map(|uid| (uid.clone(), now.get(uid).cloned())),
                    );
                }
                Err(error) => tracing::warn!(error = %describe(&error), "cannot list the claims"),
            }
        }
        self.lost_since
            .retain(|uid, _| holders.get(uid).is_some_and(Option::is_none));
        let now = Instant::now();
        holders
            .into_iter()
            .map(|(uid, holder)| {
                let presence = match holder {
                    Some(claim) => Presence::Holds(claim),
                    None => {
                        Presence::Lost(now - *self.lost_since.entry(uid.clone()).or_insert(now))
                    }
                };
                (uid, presence)
            })
            .collect()
    }

    /// The claim, if it holds devices of this node for somebody.
    fn holder(&self, claim: &ResourceClaim) -> Option<ClaimRef> {
        let status = claim.status.as_ref()?;
        let results = status
            .allocation
            .as_ref()?
            .devices
            .as_ref()?
            .results
            .as_ref()?;
        let here = results
            .iter()
            .any(|result| result.driver == names::DRIVER && result.pool == self.claims.pool);
        let reserved = status
            .reserved_for
            .as_ref()
            .is_some_and(|pods| !pods.is_empty());
        if here && reserved {
            claim_ref(claim)
        } else {
            None
        }
    }

    /// Does it, unless somebody is working on the claim, which is then not left over.
    async fn act(
        &self,
        uid: &ClaimUid,
        claim: Option<ClaimRef>,
        action: Action,
    ) -> Result<(), String> {
        let (applier, wanted) = (Arc::clone(&self.claims.applier), uid.clone());
        let lock = blocking(move || applier.locks().try_claim(&wanted)).await?;
        let Some(lock) = lock.map_err(|error| describe(&error))? else {
            return Ok(());
        };
        match (action, claim) {
            (Action::Remove(why), claim) => self.remove(uid, claim, why, lock).await,
            (Action::Restore, Some(claim)) => self.restore(&claim, lock).await,
            (Action::Restore, None) => Ok(()),
            (Action::Rebuild(claim), _) => self.rebuild(&claim, lock).await,
        }
    }

    /// Removes what is left of a claim. It may have been prepared since it was looked at.
    async fn remove(
        &self,
        uid: &ClaimUid,
        claim: Option<ClaimRef>,
        why: Why,
        lock: Lock,
    ) -> Result<(), String> {
        let (applier, wanted) = (Arc::clone(&self.claims.applier), uid.clone());
        let removed = blocking(move || {
            let loaded = applier.store().load(&wanted);
            let is_left = is_left(why, &loaded.map_err(|error| describe(&error))?);
            if is_left {
                applier.undo(&wanted).map_err(|error| describe(&error))?;
                lock.remove();
            }
            Ok::<_, String>(is_left)
        });
        if removed.await?? {
            let note = format!("removed what was left on the node of claim {uid}: {why}");
            let subject = claim.map_or(Subject::Node, Subject::Claim);
            let reporter = &self.claims.reporter;
            reporter.event(subject, EventReason::OrphanRemoved, note);
        }
        Ok(())
    }

    /// Makes what is missing of a prepared claim. Without GPUs there is nothing to restore from; their own condition says
    /// so.
    async fn restore(&self, claim: &ClaimRef, lock: Lock) -> Result<(), String> {
        let Ok((node, installed)) = self.claims.environment(claim).await else {
            return Ok(());
        };
        let (applier, pool) = (Arc::clone(&self.claims.applier), self.claims.pool.clone());
        let (wanted, delivery) = (claim.uid.clone(), self.claims.delivery);
        let repairs = blocking(move || {
            let loaded = applier.store().load(&wanted);
            let Loaded::Present(record) = loaded.map_err(|error| describe(&error))? else {
                return Ok(Repairs::default());
            };
            let environment = Environment {
                pool: &pool,
                inventory: &node.inventory,
                driver: &node.driver,
                installed: &installed,
                delivery,
            };
            let completed = applier.complete(*record, &environment);
            drop(lock);
            completed
                .map(|(_, repairs)| repairs)
                .map_err(|error| describe(&error))
        });
        self.claims.report_repairs(claim, repairs.await??);
        Ok(())
    }

    /// Writes the record of a claim anew whose record is damaged.
    async fn rebuild(&self, claim: &ClaimRef, lock: Lock) -> Result<(), String> {
        let found = self.claims.fetch(claim).await?;
        let prepared = self.claims.prepare_locked(claim, found, lock).await;
        prepared.map(drop).map_err(|refusal| refusal.text)
    }
}

/// Whether what was found to be left over still is.
fn is_left(why: Why, loaded: &Loaded) -> bool {
    match (why, loaded) {
        (Why::NoRecord, Loaded::Absent) | (Why::Gone, _) => true,
        (Why::Interrupted, Loaded::Present(record)) => record.stage == Stage::Intent,
        (Why::NoRecord | Why::Interrupted, _) => false,
    }
}

/// The node could not be looked at.
#[derive(Debug, thiserror::Error)]
enum LookError {
    #[error(transparent)]
    Store(#[from] crate::prepare::record::StoreError),
    #[error("list the CDI specs")]
    Specs(#[source] drava_cdi::StoreError),
    #[error("list {}", path.display())]
    Directory {
        path: std::path::PathBuf,
        #[source]
        source: io::Error,
    },
}

fn look(layout: &Layout, store: &Store) -> Result<Found, LookError> {
    let mut found = Found::default();
    let listing = store.list()?;
    found.damaged.extend(listing.quarantined);
    for uid in listing.recorded {
        match store.load(&uid)? {
            Loaded::Present(record) => {
                found.recorded.insert(uid, (record.claim, record.stage));
            }
            Loaded::Absent => {}
            Loaded::Corrupt(_) => {
                found.damaged.insert(uid);
            }
        }
    }
    let specs = SpecDir::new(layout.cdi_dir(), SPEC_PREFIX)
        .list()
        .map_err(LookError::Specs)?;
    found
        .traces
        .extend(specs.iter().filter_map(|id| ClaimUid::parse(id).ok()));
    found.traces.extend(directories(&layout.claims())?);
    found.traces.extend(directories(&layout.usages())?);
    Ok(found)
}

/// Directories that are named like claims.
fn directories(path: &Path) -> Result<Vec<ClaimUid>, LookError> {
    let error = |source| LookError::Directory {
        path: path.to_owned(),
        source,
    };
    let mut uids = Vec::new();
    for entry in fs::read_dir(path).map_err(error)? {
        let entry = entry.map_err(error)?;
        let uid = entry
            .file_name()
            .to_str()
            .and_then(|name| ClaimUid::parse(name).ok());
        if entry.file_type().map_err(error)?.is_dir() {
            uids.extend(uid);
        }
    }
    Ok(uids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::Delivery;
    use crate::prepare::record::Record;

    #[test]
    fn what_was_prepared_since_it_was_looked_at_is_not_left_over() {
        let record = |stage| {
            let uid = ClaimUid::parse("00000000-0000-4000-8000-000000000001").unwrap();
            Loaded::Present(Box::new(Record {
                claim: ClaimRef {
                    namespace: "default".to_owned(),
                    name: "claim".to_owned(),
                    uid,
                },
                stage,
                devices: Vec::new(),
                library: String::new(),
                hook: String::new(),
                delivery: Delivery::Preload,
            }))
        };
        let (intent, prepared) = (record(Stage::Intent), record(Stage::Prepared));
        let damaged = Loaded::Corrupt("noise".to_owned());
        let cases = [
            (Why::NoRecord, [true, false, false, false]),
            (Why::Interrupted, [false, true, false, false]),
            (Why::Gone, [true; 4]),
        ];
        for (why, expected) in cases {
            let found = [&Loaded::Absent, &intent, &prepared, &damaged];
            assert_eq!(found.map(|loaded| is_left(why, loaded)), expected, "{why}");
        }
    }
}
