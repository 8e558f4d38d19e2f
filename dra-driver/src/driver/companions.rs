//! Companion claims of the prepared claims: records what they add, and releases what is given back.
//!
//! The record has the sum, so neither a restart nor an API server that does not answer shrinks a share. The agent writes the
//! limits: it raises them as soon as the record says so, and lowers them when the use allows it. Only then the record drops the
//! grant, and the companion's condition [`Released`](drava_api::condition::ConditionReason::Released) lets the controller release its devices. At no
//! moment two claims may use the same capacity.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::event::EventReason;
use drava_api::listed::Listed;
use drava_api::names;
use drava_connection::Limits;
use futures::StreamExt as _;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::runtime::watcher::{self, watcher};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::agent::node::limits_page::Page;
use crate::agent::node::tracked_share::used_bytes;
use crate::agent::node::usage_region::{ReadBuffer, UsageRegion};
use crate::gpus::inventory::{NodeInventory, State};
use crate::kubelet::claims::{ClaimService, blocking};
use crate::node::claim::{ClaimUid, ShareId};
use crate::node::layout::Layout;
use crate::prepare::apply::{Applier, Failure};
use crate::prepare::companion::{self, Companion, Companions};
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded, RecordError, RecordVersion};
use crate::prepare::{Grant, Prepared, Share};
use crate::report::pods::reserving_pods;
use crate::report::{GrantStatus, Injection, Subject};

/// Time between two reviews while something is left to be done.
const POLL: Duration = Duration::from_millis(500);

/// How long limits and use have been low enough before capacity is given back: an allocation that was admitted before the limit
/// was lowered is charged by then.
const SETTLED: Duration = Duration::from_millis(250);

/// Time between two reviews otherwise: a base can be prepared after its companion was allocated.
const REVIEW: Duration = Duration::from_secs(2);

/// Time after which an interrupted watch is started again.
const RETRY: Duration = Duration::from_secs(2);

/// Follows the companions of this node's claims until `stop`.
pub(super) async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    stop: CancellationToken,
) {
    let api: Api<Listed<ResourceClaim>> = Api::all(claims.client.clone());
    let config = Limits::LONG_WATCHES.watch().labels(names::COMPANION_LABEL);
    let mut events = std::pin::pin!(watcher(api, config));
    let mut task = Task::new(claims, layout);
    let (mut watch_from, mut review_at) = (Instant::now(), Instant::now());
    loop {
        let next = async {
            tokio::time::sleep_until(watch_from).await;
            events.next().await
        };
        let is_changed = tokio::select! {
            () = stop.cancelled() => return,
            event = next => match event {
                Some(Ok(event)) => task.apply(event),
                Some(Err(error)) => {
                    tracing::warn!(error = describe(&error), "cannot watch companion claims");
                    watch_from = Instant::now() + RETRY;
                    false
                }
                None => return,
            },
            () = tokio::time::sleep_until(review_at) => true,
        };
        if is_changed {
            let is_settled = tokio::select! {
                () = stop.cancelled() => return,
                is_settled = task.review() => is_settled,
            };
            review_at = Instant::now() + if is_settled { REVIEW } else { POLL };
        }
    }
}

/// What a review of a base depends on.
type Reviewed = (Option<RecordVersion>, Vec<Companion>);

struct Task<E> {
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    /// Companions of a list that is not complete.
    listed: BTreeMap<ClaimUid, ResourceClaim>,
    /// Whether one list was complete.
    is_listed: bool,
    /// All companions of the cluster with devices of this node.
    found: BTreeMap<ClaimUid, ResourceClaim>,
    /// Prepared claims with grants; `None` until the records were read.
    bases: Option<BTreeSet<ClaimUid>>,
    /// Bases for which nothing was left to be done, with what that was found for.
    settled: BTreeMap<ClaimUid, Reviewed>,
    /// Claims that are prepared by themselves and were reported.
    refused: BTreeSet<ClaimUid>,
    /// Since when limits and use of a share fit what it keeps.
    low_since: BTreeMap<ShareId, Instant>,
}

/// A base as the API server has it.
struct Base {
    claim: ResourceClaim,
    companions: Companions,
}

/// Outcome of the changes of a record.
struct Recorded {
    record: ClaimRecord,
    /// Why companions were not added.
    conflicts: BTreeMap<ClaimUid, String>,
    /// Whether something could not be tried.
    is_incomplete: bool,
    /// Companions of which no record has a grant.
    released: BTreeSet<ClaimUid>,
    low_since: BTreeMap<ShareId, Instant>,
}

impl<E: Effects> Task<E> {
    fn new(claims: Arc<ClaimService<E>>, layout: Layout) -> Self {
        Self {
            claims,
            layout,
            listed: BTreeMap::new(),
            is_listed: false,
            found: BTreeMap::new(),
            bases: None,
            settled: BTreeMap::new(),
            refused: BTreeSet::new(),
            low_since: BTreeMap::new(),
        }
    }

    /// Finds the prepared claims with grants. Damaged records are rebuilt, and get their grants again.
    async fn find_granted(&self) -> Result<BTreeSet<ClaimUid>, String> {
        let applier = Arc::clone(&self.claims.applier);
        let found = blocking(move || {
            let mut granted = applier.store().list()?.recorded;
            granted.retain(|uid| {
                let loaded = applier.store().load(uid);
                matches!(loaded, Ok(Loaded::Present(record)) if has_grants(&record.devices))
            });
            Ok::<_, RecordError>(granted.into_iter().collect())
        });
        let found = found.await.map_err(|error| describe(&error))?;
        found.map_err(|error| describe(&error))
    }

    /// Applies an event of the watch. Returns whether a companion of this node has changed in what it adds.
    fn apply(&mut self, event: watcher::Event<Listed<ResourceClaim>>) -> bool {
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(Listed::Object(claim)) => {
                self.listed.extend(self.own(*claim));
            }
            watcher::Event::InitDone => {
                self.found = std::mem::take(&mut self.listed);
                self.is_listed = true;
                return true;
            }
            watcher::Event::Apply(Listed::Object(claim)) => {
                let Some(uid) = uid(&claim) else {
                    return false;
                };
                let before = self.found.remove(&uid);
                self.found.extend(self.own(*claim));
                let read = |claim: &ResourceClaim| companion::read(claim, &self.claims.pool).ok();
                let after = self.found.get(&uid).and_then(read);
                return before.as_ref().and_then(read) != after;
            }
            watcher::Event::Delete(Listed::Object(claim)) => {
                return uid(&claim).is_some_and(|uid| self.found.remove(&uid).is_some());
            }
            // The grants of an unreadable claim are checked by its name.
            watcher::Event::InitApply(Listed::Unreadable(_))
            | watcher::Event::Apply(Listed::Unreadable(_))
            | watcher::Event::Delete(Listed::Unreadable(_)) => {}
        }
        false
    }

    /// Returns a claim by its UID if it has devices of this node.
    fn own(&self, claim: ResourceClaim) -> Option<(ClaimUid, ResourceClaim)> {
        match companion::read(&claim, &self.claims.pool) {
            Ok(Some(_)) => Some((uid(&claim)?, claim)),
            Ok(None) => None,
            Err(error) => {
                let name = claim.metadata.name.as_deref();
                tracing::warn!(claim.name = name, %error, "ignoring a companion claim");
                None
            }
        }
    }

    /// Compares the companions with the records. Returns whether nothing is left to be done.
    async fn review(&mut self) -> bool {
        if !self.is_listed {
            return false;
        }
        let granted = match self.bases.take() {
            Some(granted) => granted,
            None => match self.find_granted().await {
                Ok(granted) => granted,
                Err(error) => {
                    tracing::warn!(error, "cannot read the records of claims with companions");
                    return false;
                }
            },
        };
        let found = self.found.values();
        let found = found.filter_map(|claim| companion::read(claim, &self.claims.pool).ok()?);
        let found = self.without_prepared(found.collect());
        let named: BTreeSet<ClaimUid> = found.iter().map(|one| one.base.clone()).collect();
        let bases: BTreeSet<ClaimUid> = named.union(&granted).cloned().collect();
        self.bases = Some(granted);
        self.settled.retain(|base, _| bases.contains(base));
        let mut is_settled = true;
        for base in bases {
            let of_base = found.iter().filter(|companion| companion.base == base);
            let of_base: Vec<Companion> = of_base.cloned().collect();
            let store = self.claims.applier.store();
            let reviewed = (store.version(&base), of_base.clone());
            if self.settled.get(&base) == Some(&reviewed) {
                continue;
            }
            self.settled.remove(&base);
            match self.review_base(&base, of_base).await {
                Ok(true) => {
                    // The review itself may have written the record; then it is looked at once more.
                    self.settled.insert(base, reviewed);
                }
                Ok(false) => is_settled = false,
                Err(error) => {
                    is_settled = false;
                    tracing::warn!(claim.uid = %base, error, "cannot follow the companions of a claim");
                }
            }
        }
        is_settled
    }

    /// Leaves out claims that are prepared by themselves, and reports each once: containers use their capacity already. The
    /// record of a base is checked for them once more when a grant is written.
    fn without_prepared(&mut self, found: Vec<Companion>) -> Vec<Companion> {
        let applier = Arc::clone(&self.claims.applier);
        let is_prepared = |uid: &ClaimUid| !matches!(applier.store().load(uid), Ok(Loaded::Absent));
        let (prepared, others): (Vec<_>, Vec<_>) = found
            .into_iter()
            .partition(|companion| is_prepared(&companion.claim.uid));
        for companion in &prepared {
            if self.refused.insert(companion.claim.uid.clone()) {
                let note = format!(
                    "the claim is prepared for a pod, so it does not add to claim {}: remove its label {}",
                    companion.base,
                    names::COMPANION_LABEL
                );
                let subject = Subject::Claim(companion.claim.clone());
                self.claims
                    .reporter
                    .event(subject, EventReason::GrowthRefused, note);
            }
        }
        self.refused
            .retain(|uid| prepared.iter().any(|companion| companion.claim.uid == *uid));
        others
    }

    /// Records the grants of one base, gives back what its use allows, and reports. Returns whether no grant ends, and all is
    /// reported.
    async fn review_base(
        &mut self,
        base: &ClaimUid,
        found: Vec<Companion>,
    ) -> Result<bool, String> {
        // The lock of the claim is not held during requests: kubelet waits for it.
        let Some(record) = self.load(base).await? else {
            // It is prepared on another node, not so far, or no more.
            self.granted(base, false);
            return self.release_without_base(base, found).await;
        };
        let State::Known(node) = self.claims.gpus.borrow().clone() else {
            return Ok(false);
        };
        let fetched = self.claims.fetch(&record.claim).await;
        let fetched = fetched.map_err(|error| describe(&error))?;
        let Some(claim) = fetched.filter(|claim| uid(claim).as_ref() == Some(base)) else {
            // Its pod ends.
            return Ok(true);
        };
        if !self.check_hidden(&record, &found).await? {
            return Ok(false);
        }
        let companions = Companions {
            present: found,
            pods: reserving_pods(&claim)
                .into_iter()
                .map(|pod| pod.uid)
                .collect(),
        };
        let base_claim = Base { claim, companions };
        let (applier, layout) = (Arc::clone(&self.claims.applier), self.layout.clone());
        let (inventory, companions) = (node.inventory.clone(), base_claim.companions.clone());
        let low_since = self.low_since.clone();
        let recorded = blocking(move || {
            change(
                &applier,
                &layout,
                &inventory,
                record,
                &companions,
                low_since,
            )
        });
        let recorded = recorded.await.map_err(|error| describe(&error))?;
        let Some(recorded) = recorded? else {
            return Ok(false);
        };
        self.low_since.clone_from(&recorded.low_since);
        self.granted(base, has_grants(&recorded.record.devices));
        Ok(self.report(&base_claim, &recorded, &node.inventory))
    }

    fn granted(&mut self, base: &ClaimUid, has_grants: bool) {
        let bases = self.bases.get_or_insert_default();
        match has_grants {
            true => bases.insert(base.clone()),
            false => bases.remove(base),
        };
    }

    async fn load(&self, base: &ClaimUid) -> Result<Option<ClaimRecord>, String> {
        let (applier, wanted) = (Arc::clone(&self.claims.applier), base.clone());
        let loaded = blocking(move || applier.store().load(&wanted)).await;
        let loaded = loaded.map_err(|error| describe(&error))?;
        match loaded.map_err(|error| describe(&error))? {
            Loaded::Present(record) => Ok(Some(*record)),
            Loaded::Absent => Ok(None),
            // The reconciliation rebuilds it; then it is another version.
            Loaded::Damaged(_) | Loaded::Unsupported(_) => {
                Err("its record cannot be read".to_owned())
            }
        }
    }

    /// Reports that companions are released that are being deleted, and whose base has no state on the node.
    async fn release_without_base(
        &self,
        base: &ClaimUid,
        found: Vec<Companion>,
    ) -> Result<bool, String> {
        let mut is_settled = true;
        for companion in found.iter().filter(|companion| companion.is_ending) {
            let applier = Arc::clone(&self.claims.applier);
            let (uid, dir) = (companion.claim.uid.clone(), self.layout.claim(base));
            let is_free = blocking(move || Ok(!dir.exists() && !applier.has_grant_of(&uid)?));
            let is_free = is_free.await.map_err(|error| describe(&error))?;
            let is_free = is_free.map_err(|error: RecordError| describe(&error))?;
            if is_free && let Some(claim) = self.found.get(&companion.claim.uid) {
                let (reporter, pool) = (&self.claims.reporter, &self.claims.pool);
                is_settled &= reporter.grant(claim, companion, pool, &GrantStatus::Released);
            }
        }
        Ok(is_settled)
    }

    /// Reports the limits of a base, and what became of its companions. Returns whether nothing is left to be done.
    fn report(&self, base: &Base, recorded: &Recorded, inventory: &NodeInventory) -> bool {
        let (reporter, pool) = (&self.claims.reporter, &self.claims.pool);
        let record = &recorded.record;
        let shares = record.devices.iter().filter_map(Prepared::share);
        let mut grants = shares.flat_map(|share| &share.grants);
        let mut is_settled = !recorded.is_incomplete && !grants.any(|grant| grant.is_ending);
        is_settled &= reporter.devices(&base.claim, record, inventory, &Injection::Unchecked);
        for companion in &base.companions.present {
            let Some(found) = self.found.get(&companion.claim.uid) else {
                continue;
            };
            match self.status_of(companion, recorded) {
                Some(status) => {
                    let is_final = matches!(status, GrantStatus::Granted | GrantStatus::Released);
                    is_settled &= reporter.grant(found, companion, pool, &status) && is_final;
                }
                None => is_settled = false,
            }
        }
        is_settled
    }

    /// Returns what is reported of a companion; `None` while that is not known.
    fn status_of(&self, companion: &Companion, recorded: &Recorded) -> Option<GrantStatus> {
        let (record, uid) = (&recorded.record, &companion.claim.uid);
        let shares = record.devices.iter().filter_map(Prepared::share);
        let grant_in = |share: &Share| {
            let mut grants = share.grants.iter();
            grants.find(|grant| grant.claim.uid == *uid).cloned()
        };
        let granted = shares.filter_map(|share| Some((share, grant_in(share)?)));
        let granted: Vec<(&Share, Grant)> = granted.collect();
        if let Some((share, _)) = granted.iter().find(|(_, grant)| grant.is_ending) {
            let kept_bytes = share.kept().memory_bytes;
            let limit = self.limit_bytes(&record.claim.uid, share)?;
            // Just lowered, or about to be.
            return (limit > kept_bytes).then_some(GrantStatus::InUse { kept_bytes });
        }
        if !granted.is_empty() {
            let is_raised = |(share, _): &(&Share, Grant)| {
                let limit = self.limit_bytes(&record.claim.uid, share);
                limit.is_some_and(|limit| limit >= share.kept().memory_bytes)
            };
            return granted
                .iter()
                .all(is_raised)
                .then_some(GrantStatus::Granted);
        }
        if companion.is_ending {
            return recorded
                .released
                .contains(uid)
                .then_some(GrantStatus::Released);
        }
        if let Some(conflict) = recorded.conflicts.get(uid) {
            return Some(GrantStatus::Refused(conflict.clone()));
        }
        (!recorded.is_incomplete).then(|| {
            GrantStatus::Refused(format!(
                "the claim must be in the namespace of claim {}, reserved for one pod of that claim and for no other, and its \
                 requests must be allocated on the devices of the requests with the same names",
                record.claim
            ))
        })
    }

    /// Returns the memory limit in the page of a share.
    fn limit_bytes(&self, claim: &ClaimUid, share: &Share) -> Option<u64> {
        let page = Page::open(&self.layout.limits(claim, &share.id)).ok()?;
        page.limits().memory_limit_bytes
    }

    /// Checks the companions that have grants and that the watch does not show: each ends, because it has no label, no devices or
    /// is gone. One that has just been written is left to the watch.
    ///
    /// # Errors
    /// When the API server does not answer: nothing ends because of that.
    async fn check_hidden(
        &self,
        record: &ClaimRecord,
        present: &[Companion],
    ) -> Result<bool, String> {
        let shares = record.devices.iter().filter_map(Prepared::share);
        let grants = shares.flat_map(|share| &share.grants);
        let hidden = grants.filter(|grant| !grant.is_ending);
        for Grant { claim, .. } in hidden {
            if present
                .iter()
                .any(|companion| companion.claim.uid == claim.uid)
            {
                continue;
            }
            let fetched = self.claims.fetch(claim).await;
            let fetched = fetched.map_err(|error| describe(&error))?;
            let is_companion = fetched.is_some_and(|found| {
                let read = companion::read(&found, &self.claims.pool).ok().flatten();
                read.is_some_and(|read| {
                    read.claim.uid == claim.uid && read.base == record.claim.uid
                })
            });
            if is_companion {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Writes the changes of a base's record: first what ends and is given back, then each new grant by itself, so that one that does
/// not fit holds up no other. `None` if the claim is busy, or its record is no longer `seen`.
fn change<E: Effects>(
    applier: &Applier<E>,
    layout: &Layout,
    inventory: &NodeInventory,
    seen: ClaimRecord,
    companions: &Companions,
    mut low_since: BTreeMap<ShareId, Instant>,
) -> Result<Option<Recorded>, String> {
    let base = seen.claim.uid.clone();
    let lock = applier.locks().try_claim(&base);
    let Some(_lock) = lock.map_err(|error| describe(&error))? else {
        return Ok(None);
    };
    let loaded = applier.store().load(&base);
    if loaded.map_err(|error| describe(&error))? != Loaded::Present(Box::new(seen.clone())) {
        return Ok(None);
    }
    let mut record = seen;
    let mut devices = companion::retain(&record, companions);
    let has_ending = companions
        .present
        .iter()
        .any(|companion| companion.is_ending);
    for share in devices.iter().filter_map(Prepared::share) {
        // Also without a grant of it: a record that was damaged has lost it.
        if has_ending && is_low(layout, &base, share) {
            low_since
                .entry(share.id.clone())
                .or_insert_with(Instant::now);
        } else {
            low_since.remove(&share.id);
        }
    }
    let is_low = |share: &Share| {
        let since = low_since.get(&share.id);
        since.is_some_and(|since| since.elapsed() >= SETTLED)
    };
    companion::give_back(&mut devices, is_low);
    if devices != record.devices {
        let recorded = applier.record_grants(&record, &devices, inventory);
        record = recorded.map_err(|error| describe(&error))?;
    }
    let are_low = record
        .devices
        .iter()
        .filter_map(Prepared::share)
        .all(is_low);
    let mut released = BTreeSet::new();
    for companion in companions.present.iter().filter(|one| one.is_ending) {
        let uid = &companion.claim.uid;
        if are_low
            && !applier
                .has_grant_of(uid)
                .map_err(|error| describe(&error))?
        {
            released.insert(uid.clone());
        }
    }
    let (mut conflicts, mut is_incomplete) = (BTreeMap::new(), false);
    for companion in &companions.present {
        let grown = companion::grow(&record.claim, &record.devices, companion, &companions.pods);
        let Some(grown) = grown else {
            continue;
        };
        match applier.record_grants(&record, &grown, inventory) {
            Ok(recorded) => record = recorded,
            Err(error) if matches!(*error.failure, Failure::Conflict(_)) => {
                conflicts.insert(companion.claim.uid.clone(), describe(&error));
            }
            Err(error) => {
                is_incomplete = true;
                let (claim, error) = (&companion.claim, describe(&error));
                tracing::warn!(%claim, error, "cannot add a companion claim; trying again");
            }
        }
    }
    Ok(Some(Recorded {
        record,
        conflicts,
        is_incomplete,
        released,
        low_since,
    }))
}

fn uid(claim: &ResourceClaim) -> Option<ClaimUid> {
    ClaimUid::parse(claim.metadata.uid.as_deref()?).ok()
}

fn has_grants(devices: &[Prepared]) -> bool {
    let mut shares = devices.iter().filter_map(Prepared::share);
    shares.any(|share| !share.grants.is_empty())
}

/// Returns whether limits and use of a share fit what it keeps. A region that cannot be read does not.
fn is_low(layout: &Layout, claim: &ClaimUid, share: &Share) -> bool {
    let kept = share.kept().memory_bytes;
    let Ok(page) = Page::open(&layout.limits(claim, &share.id)) else {
        return false;
    };
    let limits = page.limits();
    let is_lowered = limits.memory_limit_bytes.is_some_and(|limit| limit <= kept);
    let region = UsageRegion::open(&layout.usage(claim, &share.id));
    let used = used_bytes(&region, limits, &mut ReadBuffer::default());
    is_lowered && used.is_some_and(|used| used <= kept)
}
