//! Changes of the record of one base, and what becomes of its companions by it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_api::error::describe;
use drava_api::names;
use tokio::time::Instant;

use crate::agent::node::tracked_share::used_bytes;
use crate::agent::node::usage_region::{ReadBuffer, UsageRegion};
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::{ClaimUid, ShareId};
use crate::node::layout::Layout;
use crate::node::limits_page::Page;
use crate::prepare::apply::{Applier, Failure};
use crate::prepare::companion::{self, Companion, Companions};
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded, RecordVersion};
use crate::prepare::{Grant, Prepared, Share};
use crate::report::GrantStatus;

/// How long limits and use fit before capacity is given back: an allocation that was admitted before the limit was lowered is
/// charged by then.
pub(super) const SETTLED: Duration = Duration::from_millis(250);

/// Memory of a share at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    /// Limit in its page.
    pub(super) limit_bytes: u64,
    /// What its programs use, as the agent counts it; `None` without a readable region.
    pub(super) used_bytes: Option<u64>,
}

impl Memory {
    /// Reads page and region of a share. `None` without a readable page.
    pub(super) fn read(layout: &Layout, claim: &ClaimUid, share: &ShareId) -> Option<Self> {
        let page = Page::open(&layout.limits(claim, share)).ok()?;
        let region = UsageRegion::open(&layout.usage(claim, share));
        let limits = page.limits();
        Some(Self {
            limit_bytes: limits.memory_limit_bytes?,
            used_bytes: used_bytes(&region, limits, &mut ReadBuffer::default()),
        })
    }

    /// Returns whether limit and use fit this amount.
    fn fits(self, bytes: u64) -> bool {
        self.limit_bytes <= bytes && self.used_bytes.is_some_and(|used| used <= bytes)
    }
}

/// Since when the memory of a share fits an amount, in bytes.
pub(super) type FitsSince = BTreeMap<(ShareId, u64), Instant>;

/// Outcome of the changes of a record.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) record: ClaimRecord,
    /// Memory of its shares before the changes.
    memory: BTreeMap<ShareId, Memory>,
    pub(super) fits_since: FitsSince,
    /// Whether the agent wrote the limits by this record.
    is_followed: bool,
    /// Why companions were not added.
    conflicts: BTreeMap<ClaimUid, String>,
    /// Why companions could not be added so far.
    pub(super) failures: BTreeMap<ClaimUid, String>,
    /// Companions of which no record has a grant.
    released: BTreeSet<ClaimUid>,
}

/// Writes the changes of a base's record: first what ends and is given back, then each new grant by itself, so that one that does
/// not fit holds up no other. `None` if the claim is busy, or its record is no longer `seen`. `followed` is the version by which the
/// agent writes the limits: as long as it has not read that a grant ends, it may raise a limit that fits.
///
/// # Errors
/// When records cannot be read, or what ends cannot be written.
pub(super) fn change<E: Effects>(
    applier: &Applier<E>,
    inventory: &NodeInventory,
    seen: ClaimRecord,
    companions: &Companions,
    memory_of: impl Fn(&Share) -> Option<Memory>,
    (before, followed): (&FitsSince, Option<RecordVersion>),
    now: Instant,
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
    let is_followed = devices == record.devices
        && followed.is_some_and(|version| applier.store().version(&base) == Some(version));
    let (mut memory, mut fits_since) = (BTreeMap::new(), FitsSince::new());
    for share in devices.iter().filter_map(Prepared::share) {
        let Some(found) = memory_of(share) else {
            continue;
        };
        for amounts in [share.held(), share.kept()] {
            if is_followed && found.fits(amounts.memory_bytes) {
                let key = (share.id.clone(), amounts.memory_bytes);
                let since = before.get(&key).copied().unwrap_or(now);
                fits_since.insert(key, since);
            }
        }
        memory.insert(share.id.clone(), found);
    }
    let has_settled = |share: &Share, bytes: u64| {
        let since = fits_since.get(&(share.id.clone(), bytes));
        since.is_some_and(|since| now.duration_since(*since) >= SETTLED)
    };
    companion::give_back(&mut devices, |share| {
        has_settled(share, share.kept().memory_bytes)
    });
    if devices != record.devices {
        let recorded = applier.record_grants(&record, &devices, inventory);
        record = recorded.map_err(|error| describe(&error))?;
    }
    let mut released = BTreeSet::new();
    for ending in companions.present.iter().filter(|one| one.is_ending) {
        // A share with more memory than its record says is one whose record has lost a grant, maybe this one. Of a share that bursts,
        // the agent takes back what it has beyond its record.
        let is_recorded =
            |share: &Share| share.can_burst() || has_settled(share, share.held().memory_bytes);
        let has_grant = || applier.has_grant_of(&ending.claim.uid);
        if shares_of(&record, ending).all(is_recorded)
            && !has_grant().map_err(|error| describe(&error))?
        {
            released.insert(ending.claim.uid.clone());
        }
    }
    let (mut conflicts, mut failures) = (BTreeMap::new(), BTreeMap::new());
    for companion in &companions.present {
        let grown = companion::grow(&record.claim, &record.devices, companion, &companions.pods);
        let Some(grown) = grown else {
            continue;
        };
        match applier.record_grants(&record, &grown, inventory) {
            Ok(recorded) => record = recorded,
            Err(error) => {
                let reasons = match matches!(*error.failure, Failure::Conflict(_)) {
                    true => &mut conflicts,
                    false => &mut failures,
                };
                reasons.insert(companion.claim.uid.clone(), describe(&error));
            }
        }
    }
    Ok(Some(Recorded {
        record,
        memory,
        fits_since,
        is_followed,
        conflicts,
        failures,
        released,
    }))
}

/// Returns the shares of a base to which a companion may add.
fn shares_of<'a>(
    record: &'a ClaimRecord,
    companion: &'a Companion,
) -> impl Iterator<Item = &'a Share> {
    let devices = record.devices.iter();
    let devices = devices.filter(|device| companion.addition_to(device).is_some());
    devices.filter_map(Prepared::share)
}

impl Recorded {
    /// Returns whether grants end that are not given back.
    pub(super) fn has_ending(&self) -> bool {
        let shares = self.record.devices.iter().filter_map(Prepared::share);
        let mut grants = shares.flat_map(|share| &share.grants);
        grants.any(|grant| grant.is_ending)
    }

    /// Returns whether the memory of a share fits, and will have done so for [`SETTLED`], or may do so when the agent follows the record.
    pub(super) fn is_settling(&self, now: Instant) -> bool {
        let mut since = self.fits_since.values();
        !self.is_followed || since.any(|since| now.duration_since(*since) < SETTLED)
    }

    /// Returns what is reported of a companion; `None` while that is not known.
    pub(super) fn status_of(&self, companion: &Companion) -> Option<GrantStatus> {
        let uid = &companion.claim.uid;
        let shares = self.record.devices.iter().filter_map(Prepared::share);
        let granted = shares.filter_map(|share| {
            let mut grants = share.grants.iter();
            Some((share, grants.find(|grant| grant.claim.uid == *uid)?))
        });
        let granted: Vec<(&Share, &Grant)> = granted.collect();
        if granted.iter().any(|(_, grant)| grant.is_ending) {
            let kept = granted.iter().map(|(share, _)| (*share, share.kept()));
            return self.in_use(kept.map(|(share, kept)| (share, kept.memory_bytes)));
        }
        if !granted.is_empty() {
            let is_raised = |(share, _): &(&Share, &Grant)| {
                let memory = self.memory.get(&share.id);
                memory.is_some_and(|memory| memory.limit_bytes >= share.kept().memory_bytes)
            };
            let are_raised = granted.iter().all(is_raised);
            return are_raised.then_some(GrantStatus::Granted);
        }
        if companion.is_ending {
            if self.released.contains(uid) {
                return Some(GrantStatus::Released);
            }
            let held = shares_of(&self.record, companion).map(|share| (share, share.held()));
            return self.in_use(held.map(|(share, held)| (share, held.memory_bytes)));
        }
        if let Some(conflict) = self.conflicts.get(uid) {
            return Some(GrantStatus::Refused(conflict.clone()));
        }
        if companion.claim.namespace != self.record.claim.namespace {
            // The UID of a claim of another tenant does not give its name away.
            return Some(GrantStatus::Refused(format!(
                "the claim that label {} names is not in its namespace",
                names::COMPANION_LABEL
            )));
        }
        (!self.failures.contains_key(uid)).then(|| {
            GrantStatus::Refused(format!(
                "the claim must be reserved for one pod of claim {} and for no other, and its \
                 requests must be allocated on the devices of the requests with the same names",
                self.record.claim
            ))
        })
    }

    /// Returns that a companion is in use if the memory of one of these shares does not fit what it is to have, in bytes.
    fn in_use<'a>(&self, shares: impl Iterator<Item = (&'a Share, u64)>) -> Option<GrantStatus> {
        let mut unfit = shares.filter(|(share, bytes)| {
            let memory = self.memory.get(&share.id);
            !memory.is_some_and(|memory| memory.fits(*bytes))
        });
        let (_, kept_bytes) = unfit.next()?;
        Some(GrantStatus::InUse { kept_bytes })
    }
}

#[cfg(test)]
pub(super) mod tests;
