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
use crate::agent::node::usage_region::{ReadBuffer, UsageRegion};
use crate::gpus::inventory::State;
use crate::kubelet::claims::{ClaimService, blocking};
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::node::layout::Layout;
use crate::prepare::companion::{self, Companion, Companions};
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded};
use crate::prepare::{Grant, Prepared, Share};
use crate::report::pods::reserving_pods;
use crate::report::{GrantStatus, Injection, Subject};

/// Time between two checks whether a share has given back what it should, and between two attempts after a failure.
const POLL: Duration = Duration::from_millis(500);

/// How long limits and use have been low enough before capacity is given back: an allocation that was admitted before the limit
/// was lowered is charged by then.
const SETTLED: Duration = Duration::from_millis(250);

/// Time between two comparisons of all companions with the records: a base can be prepared after its companion was allocated.
const REVIEW: Duration = Duration::from_secs(2);

/// Follows the companions of this node's claims until `stop`.
pub(super) async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    stop: CancellationToken,
) {
    let api: Api<Listed<ResourceClaim>> = Api::all(claims.client.clone());
    let config = Limits::LONG_WATCHES.watch().labels(names::COMPANION_LABEL);
    let mut events = std::pin::pin!(watcher(api, config));
    let mut task = Task {
        claims,
        layout,
        listed: BTreeMap::new(),
        is_listed: false,
        found: BTreeMap::new(),
        bases: BTreeSet::new(),
        refused: BTreeSet::new(),
        low_since: BTreeMap::new(),
    };
    task.find_granted().await;
    let mut is_settled = true;
    loop {
        let wait = if is_settled { REVIEW } else { POLL };
        tokio::select! {
            () = stop.cancelled() => return,
            event = events.next() => match event {
                Some(Ok(event)) => task.apply(event),
                Some(Err(error)) => {
                    tracing::warn!(error = describe(&error), "cannot watch companion claims");
                    tokio::time::sleep(POLL).await;
                    continue;
                }
                None => return,
            },
            () = tokio::time::sleep(wait), if !task.is_idle() => {}
        }
        if task.is_listed {
            is_settled = task.review().await;
        }
    }
}

struct Task<E> {
    claims: Arc<ClaimService<E>>,
    layout: Layout,
    /// Companions of a list that is not complete.
    listed: BTreeMap<ClaimUid, ResourceClaim>,
    /// Whether one list was complete.
    is_listed: bool,
    /// All companions of the cluster with devices of this node.
    found: BTreeMap<ClaimUid, ResourceClaim>,
    /// Prepared claims with grants.
    bases: BTreeSet<ClaimUid>,
    /// Claims that are prepared by themselves and were reported.
    refused: BTreeSet<ClaimUid>,
    /// Since when limits and use of a share fit what it keeps.
    low_since: BTreeMap<ShareId, Instant>,
}

impl<E: Effects> Task<E> {
    /// Finds the prepared claims with grants. Damaged records are rebuilt, and get their grants again.
    async fn find_granted(&mut self) {
        let applier = Arc::clone(&self.claims.applier);
        let found = blocking(move || {
            let listing = applier.store().list().ok()?;
            let granted = listing.recorded.into_iter().filter(|uid| {
                let loaded = applier.store().load(uid);
                matches!(loaded, Ok(Loaded::Present(record)) if has_grants(&record.devices))
            });
            Some(granted.collect())
        });
        self.bases = found.await.ok().flatten().unwrap_or_default();
    }

    /// Whether there is nothing to follow.
    fn is_idle(&self) -> bool {
        self.found.is_empty() && self.bases.is_empty()
    }

    fn apply(&mut self, event: watcher::Event<Listed<ResourceClaim>>) {
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(Listed::Object(claim)) => {
                self.listed.extend(self.own(*claim));
            }
            watcher::Event::InitDone => {
                self.found = std::mem::take(&mut self.listed);
                self.is_listed = true;
            }
            watcher::Event::Apply(Listed::Object(claim)) => {
                if let Some(uid) = uid(&claim) {
                    self.found.remove(&uid);
                }
                self.found.extend(self.own(*claim));
            }
            watcher::Event::Delete(Listed::Object(claim)) => {
                if let Some(uid) = uid(&claim) {
                    self.found.remove(&uid);
                }
            }
            // The grants of an unreadable claim are checked by its name.
            watcher::Event::InitApply(Listed::Unreadable(_))
            | watcher::Event::Apply(Listed::Unreadable(_))
            | watcher::Event::Delete(Listed::Unreadable(_)) => {}
        }
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
        let found = self.found.values();
        let found = found.filter_map(|claim| companion::read(claim, &self.claims.pool).ok()?);
        let found = self.without_prepared(found.collect());
        let named: BTreeSet<ClaimUid> = found.iter().map(|one| one.base.clone()).collect();
        let mut is_settled = true;
        for base in named.union(&self.bases.clone()) {
            let of_base = found.iter().filter(|companion| companion.base == *base);
            match self.review_base(base, of_base.cloned().collect()).await {
                Ok(settled) => is_settled &= settled,
                Err(error) => {
                    is_settled = false;
                    tracing::warn!(claim.uid = %base, error, "cannot follow the companions of a claim");
                }
            }
        }
        is_settled
    }

    /// Leaves out claims that are prepared by themselves, and reports each once: containers use their capacity already.
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

    /// Records the grants of one base, and gives back what its use allows. Returns whether no grant ends.
    async fn review_base(
        &mut self,
        base: &ClaimUid,
        found: Vec<Companion>,
    ) -> Result<bool, String> {
        let (applier, wanted) = (Arc::clone(&self.claims.applier), base.clone());
        let loaded = blocking(move || {
            let Some(lock) = applier
                .locks()
                .try_claim(&wanted)
                .map_err(|error| describe(&error))?
            else {
                return Ok(None);
            };
            let loaded = applier.store().load(&wanted);
            Ok::<_, String>(Some((lock, loaded.map_err(|error| describe(&error))?)))
        });
        let Some((lock, loaded)) = loaded.await.map_err(|error| describe(&error))?? else {
            return Ok(false);
        };
        let Loaded::Present(record) = loaded else {
            // It is prepared on another node, or not so far.
            self.bases.remove(base);
            return Ok(true);
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
        let companions = Companions {
            present: self.with_hidden(&record, found).await?,
            pods: reserving_pods(&claim)
                .into_iter()
                .map(|pod| pod.uid)
                .collect(),
        };
        let (applier, layout) = (Arc::clone(&self.claims.applier), self.layout.clone());
        let inventory = node.inventory.clone();
        let (before, present) = ((*record).clone(), companions.clone());
        let (mut low_since, now) = (std::mem::take(&mut self.low_since), Instant::now());
        let recorded = blocking(move || {
            let mut devices = companion::follow(&before, &present);
            for share in devices.iter().filter_map(Prepared::share) {
                if share.kept() != share.held() && is_low(&layout, &before.claim.uid, share) {
                    low_since.entry(share.id.clone()).or_insert(now);
                } else {
                    low_since.remove(&share.id);
                }
            }
            companion::give_back(&mut devices, |share| {
                let since = low_since.get(&share.id);
                since.is_some_and(|since| *since + SETTLED <= now)
            });
            let recorded = match devices == before.devices {
                true => Ok(before),
                false => applier.record_grants(&before, devices, &inventory),
            };
            drop(lock);
            (recorded, low_since)
        });
        let (recorded, low_since) = recorded.await.map_err(|error| describe(&error))?;
        self.low_since = low_since;
        let record_after = match &recorded {
            Ok(record) => record,
            Err(_) => &record,
        };
        if has_grants(&record_after.devices) {
            self.bases.insert(base.clone());
        } else {
            self.bases.remove(base);
        }
        let reporter = &self.claims.reporter;
        reporter.devices(&claim, record_after, &node.inventory, &Injection::Unchecked);
        let refusal = recorded.as_ref().err().map(|error| describe(error));
        for companion in &companions.present {
            if let Some(found) = self.found.get(&companion.claim.uid) {
                let status = self.status_of(companion, record_after, refusal.as_deref());
                reporter.grant(found, companion, &self.claims.pool, &status);
            }
        }
        let ends = |share: &Share| share.kept() != share.held();
        let mut shares = record_after.devices.iter().filter_map(Prepared::share);
        Ok(recorded.is_ok() && !shares.any(ends))
    }

    /// Returns what is reported of a companion.
    fn status_of(
        &self,
        companion: &Companion,
        base: &ClaimRecord,
        refusal: Option<&str>,
    ) -> GrantStatus {
        let shares = base.devices.iter().filter_map(Prepared::share);
        let is_of = |grant: &&Grant| grant.claim.uid == companion.claim.uid;
        let granted = shares
            .filter_map(|share| Some((share, share.grants.iter().find(is_of)?)))
            .next();
        match granted {
            Some((_, grant)) if !grant.is_ending => GrantStatus::Granted,
            Some((share, _)) => {
                let used = used_bytes(&self.layout, &base.claim.uid, share);
                GrantStatus::InUse {
                    used_bytes: used.unwrap_or_default(),
                    kept_bytes: share.kept().memory_bytes,
                }
            }
            None if companion.is_ending => GrantStatus::Released,
            None => GrantStatus::Refused(refusal.map_or_else(
                || {
                    format!(
                        "the claim must be in the namespace of claim {}, reserved for one pod of that claim and for no other, and \
                         its requests must be allocated on the devices of the requests with the same names",
                        base.claim
                    )
                },
                str::to_owned,
            )),
        }
    }

    /// Adds the companions that have grants and that the watch does not show: one without its label is given back. One that is
    /// gone, or has no devices, is not added.
    async fn with_hidden(
        &self,
        record: &ClaimRecord,
        mut present: Vec<Companion>,
    ) -> Result<Vec<Companion>, String> {
        let shares = record.devices.iter().filter_map(Prepared::share);
        let granted: BTreeMap<&ClaimUid, &ClaimRef> = shares
            .flat_map(|share| &share.grants)
            .map(|grant| (&grant.claim.uid, &grant.claim))
            .collect();
        for (uid, claim) in granted {
            if present.iter().any(|companion| companion.claim.uid == *uid) {
                continue;
            }
            let fetched = self.claims.fetch(claim).await;
            let fetched = fetched.map_err(|error| describe(&error))?;
            let is_held = fetched.is_some_and(|found| {
                let status = found.status.as_ref();
                self::uid(&found).as_ref() == Some(uid)
                    && status.is_some_and(|status| status.allocation.is_some())
            });
            if is_held {
                present.push(Companion {
                    claim: claim.clone(),
                    base: record.claim.uid.clone(),
                    is_ending: true,
                    pods: BTreeSet::new(),
                    additions: Vec::new(),
                });
            }
        }
        Ok(present)
    }
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
    let page = Page::open(&layout.limits(claim, &share.id));
    let is_lowered = page.is_ok_and(|page| {
        let limit = page.limits().memory_limit_bytes;
        limit.is_some_and(|limit| limit <= kept)
    });
    is_lowered && used_bytes(layout, claim, share).is_some_and(|used| used <= kept)
}

/// Returns the memory that a share uses, by its region.
fn used_bytes(layout: &Layout, claim: &ClaimUid, share: &Share) -> Option<u64> {
    let region = UsageRegion::open(&layout.usage(claim, &share.id));
    let header = region.header(&mut ReadBuffer::default()).ok()?;
    Some(header.share.total_bytes)
}
