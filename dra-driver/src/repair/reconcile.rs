//! Reconciles the state of claims on the node with the API server.
//!
//! Kubelet repeats unprepare for every claim that it knows until the call succeeds. This module handles the claims that
//! kubelet does not know: interrupted preparations, a lost kubelet checkpoint, force-deleted claims, temporary files of
//! a crashed driver, damaged and lost records. [`decide`] is pure; the rest scans the node and applies the actions.
//!
//! Invariant: the state of a claim is not removed while a container or GPU process of the claim runs, see [`crate::prepare::liveness`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::event::EventReason;
use drava_api::listed::Listed;
use drava_cdi::SpecDir;
use drava_nvml::GpuUuid;
use futures::StreamExt as _;
use futures::stream;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio::time::error::Elapsed;
use tokio_util::sync::CancellationToken;

use crate::gpus::inventory::State;
use crate::kubelet::claims::{
    API_TIMEOUT, ClaimService, EnvironmentError, FetchError, PrepareError, TaskError, blocking,
    cached_list, has_devices_of,
};
use crate::node::claim::{ClaimRef, ClaimUid};
use crate::node::files;
use crate::node::layout::{BASE_PREFIX, Layout, SPEC_PREFIX};
use crate::node::lock::{Lock, LockError};
use crate::prepare::Access;
use crate::prepare::apply::{ApplyError, Environment, Repairs};
use crate::prepare::effects::{EffectError, Effects};
use crate::prepare::liveness::{Evidence, Held, Inspector, Liveness};
use crate::prepare::plan::claim_ref;
use crate::prepare::record::{Loaded, RecordError, held_gpus, instance_keys};
use crate::report::{Injection, Subject};

mod gpu_liveness;
pub mod orphans;
mod scan;

use gpu_liveness::GpuInspections;
pub use scan::ScanError;
use scan::{Incomplete, Scan, scan};

pub use orphans::{Action, NodeState, Presence, RemovalReason, decide};

/// Time between two reconciliations.
const INTERVAL: Duration = Duration::from_secs(300);

/// Time between two reconciliations while a record is damaged or lost, which blocks every new prepare, or the state of a
/// claim is kept without the API server, so that its GPU is released soon after the last process, or an action failed or
/// was skipped.
const INTERVAL_UNSETTLED: Duration = Duration::from_secs(5);

/// Time between two comparisons of the records with the files of the claims. State that is missing in two of them is restored
/// at once: kubelet does not prepare a running claim again, and its containers cannot restart without the state.
const INTERVAL_FILES: Duration = Duration::from_secs(10);

/// How long a prepared claim is missing before its state is removed without an unprepare call, unless its containers run.
/// Kubelet unprepares a force-deleted claim when the pod has stopped.
pub const GRACE: Duration = Duration::from_secs(600);

/// Maximum number of claims that are read at a time.
const READS: usize = 16;

/// Age from which a temporary file is removed: no write takes that long.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);

/// An action on a claim failed.
#[derive(Debug, thiserror::Error)]
enum ActionError {
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Effect(#[from] EffectError),
    #[error(transparent)]
    Apply(#[from] ApplyError),
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// Reconciles periodically and on `request`, until `stop`. Only the active instance calls this.
pub async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    inspector: Inspector,
    grace: Duration,
    request: Arc<Notify>,
    stop: CancellationToken,
) {
    let (cdi_dir, records) = (layout.cdi_dir().to_owned(), layout.claims());
    let swept = blocking(move || {
        for prefix in [SPEC_PREFIX, BASE_PREFIX] {
            let swept = SpecDir::new(&cdi_dir, prefix).sweep();
            swept.map_err(|error| describe(&error))?;
        }
        files::sweep(&records, TEMPORARY_AGE).map_err(|error| error.to_string())
    });
    let swept = swept.await.map_err(|error| describe(&error));
    if let Err(error) = swept.and_then(|swept| swept) {
        tracing::warn!(error, "cannot remove temporary files of a crashed driver");
    }
    let mut reconciler = Reconciler {
        claims,
        layout,
        inspector,
        inspections: GpuInspections::default(),
        grace,
        missing_since: BTreeMap::new(),
        kept: BTreeMap::new(),
        unrestored: BTreeMap::new(),
    };
    loop {
        let reconciled = tokio::select! {
            () = stop.cancelled() => return,
            reconciled = reconciler.reconcile() => reconciled,
        };
        let is_settled = reconciled.unwrap_or_else(|error| {
            tracing::warn!(error = describe(&error), "cannot reconcile");
            false
        });
        let wait = if is_settled {
            INTERVAL
        } else {
            INTERVAL_UNSETTLED
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = request.notified() => {}
            () = reconciler.lost_state() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Finds and repairs orphaned and incomplete claim state.
pub struct Reconciler<E> {
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    inspector: Inspector,
    inspections: GpuInspections,
    grace: Duration,
    /// Time at which a claim was first seen missing.
    missing_since: BTreeMap<ClaimUid, Instant>,
    /// Claims whose state is kept although the API server has no such claim, with the reason.
    kept: BTreeMap<ClaimUid, String>,
    /// Claims whose missing state could not be restored, with the report.
    unrestored: BTreeMap<ClaimUid, String>,
}

impl<E: Effects> Reconciler<E> {
    /// Scans the node once and applies the actions. Returns whether all of them were applied, and no damaged record and no
    /// state without a claim remain.
    ///
    /// # Errors
    /// When the node cannot be scanned.
    pub async fn reconcile(&mut self) -> Result<bool, ScanError> {
        let (layout, applier) = (self.layout.clone(), Arc::clone(&self.claims.applier));
        let inspector = self.inspector.clone();
        let scan = blocking(move || scan(&layout, applier.store(), &inspector)).await??;
        let incomplete = self.incomplete().await?;
        self.unrestored
            .retain(|uid, _| incomplete.contains_key(uid));
        let presence = self.presence(&scan.state).await;
        let liveness = self.liveness(&scan, &presence).await;
        let state = scan.state;
        let actions = decide(&state, &presence, &liveness, self.grace);
        let mut damaged = state.damaged.clone();
        damaged.extend(state.unrecorded().cloned());
        self.kept
            .retain(|uid, _| matches!(actions.get(uid), Some(Action::Keep(_))));
        let mut is_applied = true;
        for (uid, action) in actions {
            let claim = state.recorded.get(&uid).cloned();
            if let Action::Keep(reason) = action {
                self.keep(uid, claim, reason);
                continue;
            }
            let missing = incomplete.get(&uid);
            let named = claim.clone().or_else(|| action.claim().cloned());
            match self.apply(&uid, claim, action, missing.is_some()).await {
                Ok(true) => {
                    damaged.remove(&uid);
                }
                Ok(false) => is_applied = false,
                Err(error) => {
                    is_applied = false;
                    let error = describe(&error);
                    tracing::warn!(claim.uid = %uid, error, "cannot reconcile the claim");
                    if let Some((claim, missing)) = named.zip(missing) {
                        self.report_unrestored(claim, missing, &error);
                    }
                }
            }
        }
        Ok(is_applied && damaged.is_empty() && self.kept.is_empty())
    }

    /// Returns when the same claim lacks state in two checks: a prepare or unprepare between both ends meanwhile.
    async fn lost_state(&self) {
        let mut before = Incomplete::new();
        loop {
            tokio::time::sleep(INTERVAL_FILES).await;
            let present = self.incomplete().await.unwrap_or_else(|error| {
                tracing::warn!(
                    error = describe(&error),
                    "cannot check the files of the claims"
                );
                Incomplete::new()
            });
            if present.keys().any(|uid| before.contains_key(uid)) {
                return;
            }
            before = present;
        }
    }

    async fn incomplete(&self) -> Result<Incomplete, ScanError> {
        let (layout, applier) = (self.layout.clone(), Arc::clone(&self.claims.applier));
        blocking(move || scan::incomplete(&layout, applier.store())).await?
    }

    /// Reports once that missing state of a claim cannot be restored.
    fn report_unrestored(
        &mut self,
        claim: ClaimRef,
        missing: &BTreeSet<&'static str>,
        error: &str,
    ) {
        let missing: Vec<&str> = missing.iter().copied().collect();
        let verb = if missing.len() == 1 { "is" } else { "are" };
        let cause = error
            .strip_prefix(&format!("claim {claim}: "))
            .unwrap_or(error);
        let note = format!(
            "claim {claim}: {} {verb} missing on the node, and cannot be recreated: {cause}; containers of the claim cannot \
             restart until then",
            missing.join(" and ")
        );
        if self
            .unrestored
            .insert(claim.uid.clone(), note.clone())
            .as_ref()
            != Some(&note)
        {
            let reporter = &self.claims.reporter;
            reporter.event(Subject::Claim(claim), EventReason::ClaimStateMissing, note);
        }
    }

    /// Reports once that the state of a claim is kept.
    fn keep(&mut self, uid: ClaimUid, claim: Option<ClaimRef>, reason: String) {
        if !self.kept.contains_key(&uid) {
            let claim =
                claim.map_or_else(|| format!("claim {uid}"), |claim| format!("claim {claim}"));
            let note = format!(
                "{claim} is not in the API server, but {reason}; its limits and its GPU stay reserved until the process \
                 ends: delete the pod that uses it"
            );
            let reporter = &self.claims.reporter;
            reporter.event(Subject::Node, EventReason::ClaimMissing, note);
        }
        self.kept.insert(uid, reason);
    }

    /// Returns the liveness of the claims that the API server lacks.
    async fn liveness(
        &mut self,
        scan: &Scan,
        presence: &BTreeMap<ClaimUid, Presence>,
    ) -> BTreeMap<ClaimUid, Liveness> {
        let named = |uid: &ClaimUid| -> Option<BTreeSet<GpuUuid>> {
            let recorded = scan.devices.get(uid).map(|devices| held_gpus(devices));
            let gpus = recorded.or_else(|| scan.damaged_gpus.get(uid).cloned())?;
            Some(gpus.into_iter().map(GpuUuid::new).collect())
        };
        // The processes of a whole GPU belong to its claim.
        let whole: BTreeSet<&str> = scan
            .devices
            .values()
            .flatten()
            .filter(|device| device.access == Access::Whole)
            .map(|device| device.gpu.uuid.as_str())
            .collect();
        let unnamed: BTreeSet<GpuUuid> = match &*self.claims.gpus.borrow() {
            State::Known(node) => node.inventory.nvml.gpus.iter(),
            State::Pending | State::Unknown(_) => [].iter(),
        }
        .map(|gpu| gpu.uuid.clone())
        .filter(|uuid| !whole.contains(uuid.as_str()))
        .collect();
        let missing = presence
            .iter()
            .filter(|(_, presence)| matches!(presence, Presence::Missing(_)))
            .map(|(uid, _)| {
                let devices = scan.devices.get(uid).map_or(&[][..], Vec::as_slice);
                Held {
                    uid: uid.clone(),
                    gpus: named(uid).unwrap_or_else(|| unnamed.clone()),
                    instances: instance_keys(devices).collect(),
                }
            });
        let is_mounted = |held: &Held| scan.state.mounted.contains(&held.uid);
        let (mounted, listed): (Vec<Held>, Vec<Held>) = missing.partition(is_mounted);
        let mut liveness = self.inspections.liveness(&self.inspector, listed).await;
        let running = |held: Held| (held.uid, Liveness::Running(Evidence::Mount));
        liveness.extend(mounted.into_iter().map(running));
        liveness
    }

    /// Reads the claims that have state on the node from the API server: by name where the record has it.
    async fn presence(&mut self, state: &NodeState) -> BTreeMap<ClaimUid, Presence> {
        let mut holders: BTreeMap<ClaimUid, Option<ClaimRef>> = BTreeMap::new();
        let recorded = state.recorded.values().cloned();
        let reads = recorded.map(|claim| read(self.claims.client.clone(), claim));
        let mut reads = stream::iter(reads.collect::<Vec<_>>()).buffer_unordered(READS);
        while let Some((claim, found)) = reads.next().await {
            match found {
                Ok(Ok(found)) => {
                    let found = found.and_then(|found| self.holder(&found));
                    let holder = found.filter(|found| found.uid == claim.uid);
                    holders.insert(claim.uid, holder);
                }
                Ok(Err(error)) => {
                    tracing::warn!(%claim, error = describe(&error), "cannot get the claim");
                }
                Err(_) => {
                    tracing::warn!(%claim, "cannot get the claim: the API server does not answer; no more claims are read");
                    break;
                }
            }
        }
        drop(reads);
        let mut unnamed = state.damaged.clone();
        unnamed.extend(state.unrecorded().cloned());
        // A damaged or lost record yields only the UID, and the API server has no lookup by UID.
        if !unnamed.is_empty() {
            let api: Api<Listed<ResourceClaim>> = Api::all(self.claims.client.clone());
            match tokio::time::timeout(API_TIMEOUT, api.list(&cached_list())).await {
                Ok(Ok(all)) => {
                    let held = all.items.iter().filter_map(|claim| self.holder(claim));
                    let mut held: BTreeMap<ClaimUid, ClaimRef> =
                        held.map(|claim| (claim.uid.clone(), claim)).collect();
                    holders.extend(unnamed.into_iter().map(|uid| {
                        let holder = held.remove(&uid);
                        (uid, holder)
                    }));
                }
                Ok(Err(error)) => {
                    tracing::warn!(error = describe(&error), "cannot list the claims");
                }
                Err(_) => tracing::warn!("cannot list the claims: the API server does not answer"),
            }
        }
        self.missing_since
            .retain(|uid, _| holders.get(uid).is_some_and(Option::is_none));
        let now = Instant::now();
        holders
            .into_iter()
            .map(|(uid, holder)| {
                let presence = match holder {
                    Some(claim) => Presence::Allocated(claim),
                    // Kubelet has unprepared it.
                    None if self.claims.held.is_released(&uid) => Presence::Missing(self.grace),
                    None => {
                        let since = *self.missing_since.entry(uid.clone()).or_insert(now);
                        Presence::Missing(now - since)
                    }
                };
                (uid, presence)
            })
            .collect()
    }

    /// Returns the claim if devices of this node are allocated to it and it is reserved. A claim that this build cannot read
    /// counts as reserved.
    fn holder(&self, claim: &Listed<ResourceClaim>) -> Option<ClaimRef> {
        if !has_devices_of(&self.claims.pool, claim) {
            return None;
        }
        match claim {
            Listed::Unreadable(claim) => claim_ref(&claim.metadata),
            Listed::Object(claim) => {
                let mut pods = claim
                    .status
                    .iter()
                    .flat_map(|status| status.reserved_for.iter().flatten());
                pods.next().and_then(|_| claim_ref(&claim.metadata))
            }
        }
    }

    /// Applies an action. Returns false for a claim whose lock is held: it is being prepared or unprepared, perhaps with the
    /// state of the node before a change.
    async fn apply(
        &self,
        uid: &ClaimUid,
        claim: Option<ClaimRef>,
        action: Action,
        is_incomplete: bool,
    ) -> Result<bool, ActionError> {
        let (applier, wanted) = (Arc::clone(&self.claims.applier), uid.clone());
        let Some(lock) = blocking(move || applier.locks().try_claim(&wanted)).await?? else {
            return Ok(false);
        };
        match (action, claim) {
            (Action::Remove(reason), claim) => self.remove(uid, claim, reason, lock).await?,
            (Action::Restore, Some(claim)) => self.restore(&claim, is_incomplete, lock).await?,
            (Action::Restore, None) | (Action::Keep(_), _) => {}
            (Action::Rebuild(claim), _) => self.rebuild(&claim, lock).await?,
        }
        Ok(true)
    }

    /// Removes the state of a claim, unless the claim was prepared since the scan.
    async fn remove(
        &self,
        uid: &ClaimUid,
        claim: Option<ClaimRef>,
        reason: RemovalReason,
        lock: Lock,
    ) -> Result<(), ActionError> {
        let (applier, wanted) = (Arc::clone(&self.claims.applier), uid.clone());
        let removed = blocking(move || {
            let applies = still_applies(reason, &applier.store().load(&wanted)?);
            if applies {
                applier.undo(&wanted)?;
                lock.remove();
            }
            Ok::<_, ActionError>(applies)
        });
        let removed = removed.await?;
        if let Err(ActionError::Effect(EffectError::InstanceHeld { .. })) = removed {
            self.claims.held.release(uid);
        }
        if removed? {
            self.claims.held.forget(uid);
            let note = format!("removed orphaned node state of claim {uid}: {reason}");
            let subject = claim.map_or(Subject::Node, Subject::Claim);
            let reporter = &self.claims.reporter;
            reporter.event(subject, EventReason::OrphanRemoved, note);
        }
        Ok(())
    }

    /// Recreates the missing state of a prepared claim. Returns early without GPUs or artifacts if nothing is missing; their
    /// own conditions report that.
    async fn restore(
        &self,
        claim: &ClaimRef,
        is_incomplete: bool,
        lock: Lock,
    ) -> Result<(), ActionError> {
        // Kubelet unprepares the claim, and repeats that or has let its pod end.
        if self.claims.held.is_ending(&claim.uid) {
            return Ok(());
        }
        let (node, installed) = match self.claims.environment(claim).await {
            Ok(environment) => environment,
            Err(error) if is_incomplete => return Err(error.into()),
            Err(_) => return Ok(()),
        };
        let (applier, pool) = (Arc::clone(&self.claims.applier), self.claims.pool.clone());
        let (wanted, delivery) = (claim.uid.clone(), self.claims.delivery);
        let repairs = blocking(move || {
            let Loaded::Present(record) = applier.store().load(&wanted)? else {
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
            Ok::<_, ActionError>(completed.map(|(_, repairs)| repairs)?)
        });
        self.claims.report_repairs(claim, repairs.await??);
        Ok(())
    }

    /// Prepares a claim again whose record is damaged or lost.
    async fn rebuild(&self, claim: &ClaimRef, lock: Lock) -> Result<(), ActionError> {
        let found = self.claims.fetch(claim).await?;
        let object = found.clone();
        let record = self.claims.prepare_locked(claim, found, lock).await?;
        // What was found of its containers stays.
        self.claims
            .report(object.as_ref(), &record, &Injection::Unchecked);
        Ok(())
    }
}

/// Answer of the API server to the read of a claim.
type Answer = Result<kube::Result<Option<Listed<ResourceClaim>>>, Elapsed>;

/// Reads a claim from the API server.
async fn read(client: Client, claim: ClaimRef) -> (ClaimRef, Answer) {
    let api: Api<Listed<ResourceClaim>> = Api::namespaced(client, &claim.namespace);
    let found = tokio::time::timeout(API_TIMEOUT, api.get_opt(&claim.name)).await;
    (claim, found)
}

/// Returns whether the reason for a removal still holds.
fn still_applies(reason: RemovalReason, loaded: &Loaded) -> bool {
    match (reason, loaded) {
        (RemovalReason::NoRecord, Loaded::Absent)
        | (RemovalReason::Missing, Loaded::Absent | Loaded::Present(_) | Loaded::Damaged(_)) => {
            true
        }
        (RemovalReason::NoRecord, Loaded::Present(_) | Loaded::Damaged(_))
        | (_, Loaded::Unsupported(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::Delivery;
    use crate::prepare::base::CommonEdits;
    use crate::prepare::record::{ClaimRecord, Damage, Unsupported};

    #[test]
    fn keeps_claim_prepared_since_the_scan() {
        let uid = ClaimUid::parse("00000000-0000-4000-8000-000000000001").unwrap();
        let present = Loaded::Present(Box::new(ClaimRecord {
            claim: ClaimRef {
                namespace: "default".to_owned(),
                name: "claim".to_owned(),
                uid,
            },
            devices: Vec::new(),
            library: String::new(),
            hook: String::new(),
            delivery: Delivery::Preload,
            common: CommonEdits::InClaim,
            can_wait: false,
        }));
        let damaged = Loaded::Damaged(Damage {
            gpus: None,
            reason: "noise".to_owned(),
        });
        let unsupported = Loaded::Unsupported(Unsupported {
            gpus: BTreeSet::new(),
            reason: "format version 2".to_owned(),
        });
        let cases = [
            (RemovalReason::NoRecord, [true, false, false, false]),
            (RemovalReason::Missing, [true, true, true, false]),
        ];
        for (reason, expected) in cases {
            let loaded = [&Loaded::Absent, &present, &damaged, &unsupported];
            let applies = loaded.map(|loaded| still_applies(reason, loaded));
            assert_eq!(applies, expected, "{reason}");
        }
    }
}
