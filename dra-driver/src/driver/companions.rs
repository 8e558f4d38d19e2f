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
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::labelled::{self, Follower, Found};
use crate::agent::FollowedRecords;
use crate::gpus::inventory::{NodeInventory, State};
use crate::kubelet::claims::{ClaimService, FetchError, blocking};
use crate::node::claim::{ClaimRef, ClaimUid};
use crate::node::layout::Layout;
use crate::prepare::companion::{self, Companion, Companions};
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded, RecordError, RecordVersion};
use crate::prepare::{Prepared, Share};
use crate::report::pods::reserving_pods;
use crate::report::{GrantStatus, Injection, Subject};

mod change;

use change::{FitsSince, Memory, Recorded, SETTLED, change};

/// Time from the first to the second review of a base with which something is left to be done. It doubles with each further one.
const POLL: Duration = Duration::from_millis(500);

/// Longest time between two such reviews.
const MAX_POLL: Duration = Duration::from_secs(4);

/// Follows the companions of this node's claims until `stop`.
pub(super) async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    followed: FollowedRecords,
    stop: CancellationToken,
) {
    let task = Task::new(Arc::clone(&claims), layout, followed);
    labelled::follow(&claims, names::COMPANION_LABEL, task, stop).await;
}

/// What a review of a base depends on.
type Reviewed = (Option<RecordVersion>, Vec<Companion>);

struct Task<E> {
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    followed: FollowedRecords,
    /// Claims with companions or grants; `None` until the records were read.
    bases: Option<BTreeMap<ClaimUid, Base>>,
    /// Claims that are prepared by themselves and were reported.
    refused: BTreeSet<ClaimUid>,
    /// Why the last review could not begin.
    failure: Option<String>,
}

/// A companion with devices of this node.
struct Known {
    companion: Companion,
    claim: ResourceClaim,
}

/// Other changes of the claim are none of what it adds.
impl PartialEq for Known {
    fn eq(&self, other: &Self) -> bool {
        self.companion == other.companion
    }
}

/// What is known of a base from one review to the next.
struct Base {
    /// Whether its record may have grants.
    has_grants: bool,
    /// What the last review was for.
    reviewed: Option<Reviewed>,
    /// When the next review for the same is due; `None` if nothing is left to be done.
    due: Option<Instant>,
    /// Time between the last review and that one.
    wait: Duration,
    fits_since: FitsSince,
    /// Why the last review failed.
    failure: Option<String>,
}

impl Base {
    const fn new() -> Self {
        Self {
            has_grants: true,
            reviewed: None,
            due: None,
            wait: POLL,
            fits_since: FitsSince::new(),
            failure: None,
        }
    }

    /// Returns whether a review for `wanted` is due.
    fn is_due(&self, wanted: &Reviewed, now: Instant) -> bool {
        self.reviewed.as_ref() != Some(wanted) || self.due.is_some_and(|due| due <= now)
    }

    /// Sets when the next review is due after one that has ended at `now`.
    fn schedule(&mut self, reviewed: Reviewed, left: Left, now: Instant) {
        self.wait = match left {
            Left::Open if self.reviewed.as_ref() == Some(&reviewed) => {
                (self.wait * 2).min(MAX_POLL)
            }
            Left::Settling => SETTLED,
            Left::Open | Left::Nothing => POLL,
        };
        self.due = (left != Left::Nothing).then(|| now + self.wait);
        self.reviewed = Some(reviewed);
    }
}

/// What a review leaves to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Nothing,
    /// Capacity is given back as soon as its share has settled.
    Settling,
    Open,
}

/// What a review needs to know of the records.
struct Records {
    /// Versions of the records of the bases.
    versions: BTreeMap<ClaimUid, RecordVersion>,
    /// Companions that are prepared by themselves.
    prepared: BTreeSet<ClaimUid>,
    /// Claims with grants, at the first review.
    granted: Vec<ClaimUid>,
}

impl<E: Effects> Follower for Task<E> {
    /// The node driver says of a companion that ends that it has none of its capacity, also if its base was never prepared.
    const SWEEPS: bool = true;

    type Kept = Known;

    /// Keeps a companion with devices of this node. What was read of one that cannot be read now may be outdated: its grants are
    /// checked by its name.
    fn keep(&self, claim: Listed<ResourceClaim>) -> Option<Known> {
        let Listed::Object(claim) = claim else {
            return None;
        };
        match companion::read(&claim, &self.claims.pool) {
            Ok(companion) => Some(Known {
                companion: companion?,
                claim: *claim,
            }),
            Err(error) => {
                let name = claim.metadata.name.as_deref();
                tracing::warn!(claim.name = name, %error, "ignoring a companion claim");
                None
            }
        }
    }

    fn changed(&mut self, _: &ClaimUid) {}

    /// Compares the companions with the records. Returns when the next comparison is due without a change.
    async fn review(&mut self, found: Option<&Found<Known>>) -> Option<Instant> {
        let known = found?;
        let found: Vec<Companion> = known
            .values()
            .map(|known| known.companion.clone())
            .collect();
        let records = match self.read_records(&found).await {
            Ok(records) => records,
            Err(error) => {
                if is_new(&mut self.failure, &error) {
                    tracing::warn!(error, "cannot read the records of claims with companions");
                }
                return None;
            }
        };
        self.failure = None;
        let found = self.without_prepared(found, &records.prepared);
        let mut bases = self.bases.take().unwrap_or_default();
        let named = found.iter().map(|companion| companion.base.clone());
        for uid in named.chain(records.granted) {
            bases.entry(uid).or_insert_with(Base::new);
        }
        bases.retain(|uid, base| {
            base.has_grants || found.iter().any(|companion| companion.base == *uid)
        });
        for (uid, base) in &mut bases {
            let of_base = found.iter().filter(|companion| companion.base == *uid);
            let version = records.versions.get(uid).copied();
            let reviewed: Reviewed = (version, of_base.cloned().collect());
            if !base.is_due(&reviewed, Instant::now()) {
                continue;
            }
            let left = match self.review_base(known, uid, base, reviewed.1.clone()).await {
                Ok(left) => {
                    base.failure = None;
                    left
                }
                Err(error) => {
                    if is_new(&mut base.failure, &error) {
                        tracing::warn!(claim.uid = %uid, error, "cannot follow the companions of a claim; trying again");
                    }
                    Left::Open
                }
            };
            base.schedule(reviewed, left, Instant::now());
        }
        let due = bases.values().filter_map(|base| base.due).min();
        self.bases = Some(bases);
        due
    }
}

impl<E: Effects> Task<E> {
    fn new(claims: Arc<ClaimService<E>>, layout: Layout, followed: FollowedRecords) -> Self {
        Self {
            claims,
            layout,
            followed,
            bases: None,
            refused: BTreeSet::new(),
            failure: None,
        }
    }

    /// Reads what a review needs to know of the records.
    async fn read_records(&self, found: &[Companion]) -> Result<Records, String> {
        let applier = Arc::clone(&self.claims.applier);
        let known = self.bases.as_ref();
        let known: Option<Vec<ClaimUid>> = known.map(|bases| bases.keys().cloned().collect());
        let companions = found.iter().map(|companion| companion.claim.uid.clone());
        let companions: Vec<ClaimUid> = companions.collect();
        let named = found.iter().map(|companion| companion.base.clone());
        let named: Vec<ClaimUid> = named.collect();
        let read = blocking(move || {
            let store = applier.store();
            let mut granted = match &known {
                Some(_) => Vec::new(),
                None => store.list()?.recorded,
            };
            // Damaged records are rebuilt, and get their grants again.
            granted.retain(|uid| {
                let loaded = store.load(uid);
                matches!(loaded, Ok(Loaded::Present(record)) if has_grants(&record.devices))
            });
            let bases = known.into_iter().flatten().chain(named);
            let bases = bases.chain(granted.iter().cloned());
            let versions = bases.filter_map(|uid| Some((uid.clone(), store.version(&uid)?)));
            let prepared = companions.into_iter();
            let prepared = prepared.filter(|uid| !matches!(store.load(uid), Ok(Loaded::Absent)));
            Ok::<_, RecordError>(Records {
                versions: versions.collect(),
                prepared: prepared.collect(),
                granted,
            })
        });
        let read = read.await.map_err(|error| describe(&error))?;
        read.map_err(|error| describe(&error))
    }

    /// Leaves out claims that are prepared by themselves, and reports each once: containers use their capacity already. The
    /// record of a base is checked for them once more when a grant is written.
    fn without_prepared(
        &mut self,
        found: Vec<Companion>,
        prepared: &BTreeSet<ClaimUid>,
    ) -> Vec<Companion> {
        let (prepared, others): (Vec<_>, Vec<_>) = found
            .into_iter()
            .partition(|companion| prepared.contains(&companion.claim.uid));
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

    /// Records the grants of one base, gives back what its use allows, and reports. Returns what is left to be done.
    async fn review_base(
        &self,
        known: &Found<Known>,
        uid: &ClaimUid,
        base: &mut Base,
        found: Vec<Companion>,
    ) -> Result<Left, String> {
        // The lock of the claim is not held during requests: kubelet waits for it.
        let Some(record) = self.load(uid).await? else {
            // It is prepared on another node, not so far, or no more.
            base.has_grants = false;
            return self.release_without_base(known, uid, &found).await;
        };
        let State::Known(node) = self.claims.gpus.borrow().clone() else {
            return Ok(Left::Open);
        };
        let fetched = self.claims.fetch(&record.claim).await;
        let fetched = fetched.map_err(|error| describe(&error))?;
        let Some(claim) =
            fetched.filter(|claim| ClaimUid::of(&claim.metadata).as_ref() == Some(uid))
        else {
            // Its pod ends.
            return Ok(Left::Nothing);
        };
        let unknown = self.find_unknown(&record, &found).await?;
        let pods = reserving_pods(&claim).into_iter().map(|pod| pod.uid);
        let companions = Companions {
            pods: pods.collect(),
            present: found,
            unknown,
        };
        let (applier, layout) = (Arc::clone(&self.claims.applier), self.layout.clone());
        let (inventory, of_base) = (node.inventory.clone(), companions.clone());
        let (before, now, uid) = (base.fits_since.clone(), Instant::now(), uid.clone());
        let followed = self.followed.version_of(&uid);
        let recorded = blocking(move || {
            let memory_of = |share: &Share| Memory::read(&layout, &uid, &share.id);
            let before = (&before, followed);
            change(
                &applier, &inventory, record, &of_base, memory_of, before, now,
            )
        });
        let recorded = recorded.await.map_err(|error| describe(&error))?;
        let Some(recorded) = recorded? else {
            return Ok(Left::Open);
        };
        base.fits_since.clone_from(&recorded.fits_since);
        base.has_grants = has_grants(&recorded.record.devices);
        let is_reported = self.report(known, &claim, &companions, &recorded, &node.inventory);
        if !recorded.failures.is_empty() {
            let failures: Vec<&str> = recorded.failures.values().map(String::as_str).collect();
            return Err(failures.join("; "));
        }
        let is_left = !is_reported || recorded.has_ending() || !companions.unknown.is_empty();
        Ok(match is_left {
            true if recorded.is_settling(now) => Left::Settling,
            true => Left::Open,
            false => Left::Nothing,
        })
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

    /// Reports that companions are released that are being deleted, and whose base has no state on the node, and that others add to
    /// nothing. Returns what is left to be done.
    async fn release_without_base(
        &self,
        known: &Found<Known>,
        base: &ClaimUid,
        found: &[Companion],
    ) -> Result<Left, String> {
        let mut left = Left::Nothing;
        let (ending, others): (Vec<_>, Vec<_>) =
            found.iter().partition(|companion| companion.is_ending);
        for companion in others {
            if !self.report_grant(known, companion, &GrantStatus::NotPrepared) {
                left = Left::Open;
            }
        }
        for companion in ending {
            let applier = Arc::clone(&self.claims.applier);
            let (uid, dir) = (companion.claim.uid.clone(), self.layout.claim(base));
            let is_free = blocking(move || Ok(!dir.exists() && !applier.has_grant_of(&uid)?));
            let is_free = is_free.await.map_err(|error| describe(&error))?;
            let is_free = is_free.map_err(|error: RecordError| describe(&error))?;
            if !(is_free && self.report_grant(known, companion, &GrantStatus::Released)) {
                left = Left::Open;
            }
        }
        Ok(left)
    }

    /// Reports the limits of a base, and what became of its companions. Returns whether all is written and final.
    fn report(
        &self,
        known: &Found<Known>,
        base: &ResourceClaim,
        companions: &Companions,
        recorded: &Recorded,
        inventory: &NodeInventory,
    ) -> bool {
        let (reporter, record) = (&self.claims.reporter, &recorded.record);
        let mut is_final = reporter.devices(base, record, inventory, &Injection::Unchecked);
        for companion in &companions.present {
            let status = recorded.status_of(companion);
            is_final &= status.is_some_and(|status| {
                let is_written = self.report_grant(known, companion, &status);
                is_written && matches!(status, GrantStatus::Granted | GrantStatus::Released)
            });
        }
        is_final
    }

    /// Reports what became of a companion. Returns whether that is written.
    fn report_grant(
        &self,
        known: &Found<Known>,
        companion: &Companion,
        status: &GrantStatus,
    ) -> bool {
        let (reporter, pool) = (&self.claims.reporter, &self.claims.pool);
        let known = known.get(&companion.claim.uid);
        known.is_some_and(|known| reporter.grant(&known.claim, companion, pool, status))
    }

    /// Returns the claims that have grants, that the watch does not show, and that may be companions all the same: one that has
    /// just been written, or cannot be read. Every other one ends: it has no label, no devices or is gone.
    ///
    /// # Errors
    /// When the API server does not answer: nothing ends because of that.
    async fn find_unknown(
        &self,
        record: &ClaimRecord,
        present: &[Companion],
    ) -> Result<BTreeSet<ClaimUid>, String> {
        let mut unknown = BTreeSet::new();
        let shares = record.devices.iter().filter_map(Prepared::share);
        let grants = shares.flat_map(|share| &share.grants);
        for grant in grants.filter(|grant| !grant.is_ending) {
            let is_same = |companion: &Companion| companion.claim.uid == grant.claim.uid;
            if present.iter().any(is_same) {
                continue;
            }
            let is_unknown = match self.claims.fetch(&grant.claim).await {
                Ok(found) => found.is_some_and(|found| {
                    may_be_companion(&found, &grant.claim, &record.claim.uid, &self.claims.pool)
                }),
                Err(FetchError::Unreadable { .. }) => true,
                Err(error) => return Err(describe(&error)),
            };
            if is_unknown {
                unknown.insert(grant.claim.uid.clone());
            }
        }
        Ok(unknown)
    }
}

/// Returns whether a claim may be the companion of `base` that has a grant: it is one, or its devices cannot be read.
fn may_be_companion(found: &ResourceClaim, grant: &ClaimRef, base: &ClaimUid, pool: &str) -> bool {
    ClaimUid::of(&found.metadata).as_ref() == Some(&grant.uid)
        && companion::base(found).as_ref() == Some(base)
        && !matches!(companion::read(found, pool), Ok(None))
}

/// Remembers the failure of a review. Returns whether it is another one than before.
fn is_new(failure: &mut Option<String>, error: &str) -> bool {
    let before = failure.replace(error.to_owned());
    before.as_deref() != Some(error)
}

fn has_grants(devices: &[Prepared]) -> bool {
    let mut shares = devices.iter().filter_map(Prepared::share);
    shares.any(|share| !share.grants.is_empty())
}

#[cfg(test)]
mod tests;
