//! Whether a GPU has the guaranteed memory of a claim, where other shares may use it while no claim holds it.
//!
//! The limits page of such a claim begins without memory, and the agent, which alone lends memory and takes it back, raises it to
//! the guarantee. So no memory is promised twice if a process ends between two steps. Prepare waits for that.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

use drava_vgpu_abi::{page, paths};
use prometheus_client::metrics::counter::Counter;

use super::{Applier, Failure, OtherClaims};
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::prepare::effects::Effects;
use crate::prepare::overcommit::Holders;
use crate::prepare::record::ClaimRecord;
use crate::prepare::{Prepared, Share};

/// Longest wait for memory that other shares give back.
pub(super) const RECLAIM_WAIT: Duration = Duration::from_secs(2);

/// Time between two looks at the limits page.
const POLL: Duration = Duration::from_millis(20);

/// Why lent memory is not back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unreturned {
    /// The programs of the share use it, or NVML does not show that it is free.
    InUse,
    /// The node agent has not lowered the limit: it does not run, or cannot read a record.
    NotLowered,
}

impl Unreturned {
    /// All causes.
    pub const ALL: [Self; 2] = [Self::InUse, Self::NotLowered];

    /// Returns the value of the label `cause`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InUse => "in_use",
            Self::NotLowered => "not_lowered",
        }
    }
}

impl fmt::Display for Unreturned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InUse => "its programs use the memory, or NVML does not show that it is free",
            Self::NotLowered => "the node agent has not lowered its limit",
        })
    }
}

/// Numbers of claims for which lent memory was not given back in time; clones share the values.
#[derive(Debug, Clone, Default)]
pub struct MissedReclaims {
    in_use: Counter,
    not_lowered: Counter,
}

impl MissedReclaims {
    /// Returns the number for one cause.
    #[must_use]
    pub const fn of(&self, cause: Unreturned) -> &Counter {
        match cause {
            Unreturned::InUse => &self.in_use,
            Unreturned::NotLowered => &self.not_lowered,
        }
    }
}

impl OtherClaims {
    /// Returns whether their shares may use memory of this GPU beyond their guarantees. What is not known counts.
    ///
    /// They were read after the claim was recorded, or under the locks of its GPUs: a claim that is recorded later gets nothing of its
    /// guarantee.
    pub(super) fn may_burst(&self, gpu: &str) -> bool {
        let mut devices = self.records.iter().flat_map(|record| &record.devices);
        let can_burst = |device: &Prepared| device.share().is_some_and(Share::can_burst);
        let gpus = BTreeSet::from([gpu.to_owned()]);
        devices.any(|device| device.gpu.uuid == gpu && can_burst(device))
            || self.check_known(&gpus).is_err()
    }
}

impl<E: Effects> Applier<E> {
    /// Returns whether a share has a limits page that can be read: another one is replaced.
    pub(super) fn has_page(&self, uid: &ClaimUid, share: &ShareId) -> bool {
        self.limit_bytes(uid, share).is_some()
    }

    /// Waits until the limits pages of a claim have its guaranteed memory.
    ///
    /// # Errors
    /// If they do not within [`RECLAIM_WAIT`].
    pub(super) fn await_backing(&self, record: &ClaimRecord) -> Result<(), Failure> {
        let deadline = Instant::now() + RECLAIM_WAIT;
        loop {
            let mut devices = record.devices.iter();
            let Some(device) = devices.find(|device| !self.is_backed(record, device)) else {
                return Ok(());
            };
            if Instant::now() >= deadline {
                return Err(self.unreturned(record, device));
            }
            std::thread::sleep(POLL);
        }
    }

    fn is_backed(&self, record: &ClaimRecord, device: &Prepared) -> bool {
        device.share().is_none_or(|share| {
            let limit = self.limit_bytes(&record.claim.uid, &share.id);
            limit.is_some_and(|limit| limit >= share.memory_bytes)
        })
    }

    /// Returns the memory limit in the page of a share; `None` without a readable page.
    fn limit_bytes(&self, uid: &ClaimUid, share: &ShareId) -> Option<u64> {
        let dir = self.layout.limits(uid, share);
        let content = fs::read(dir.join(paths::PAGE_FILE)).ok()?;
        let limits = page::decode(&content).ok()?.spec.limits;
        Some(limits.memory_limit_bytes.unwrap_or(u64::MAX))
    }

    /// Returns the error that names the shares that may not have given back memory of the GPU of `device`.
    fn unreturned(&self, record: &ClaimRecord, device: &Prepared) -> Failure {
        let (uid, gpu) = (&record.claim.uid, &device.gpu.uuid);
        let others = self.other_claims(uid).unwrap_or_default();
        // The agent raises no page of a GPU while it does not know what shares have of it.
        if let Err(unknown) = others.check_known(&BTreeSet::from([gpu.clone()])) {
            return unknown;
        }
        let mut holders: BTreeMap<Unreturned, Vec<ClaimRef>> = BTreeMap::new();
        for other in &others.records {
            let devices = other.devices.iter();
            let devices = devices.filter(|device| device.gpu.uuid == *gpu);
            let shares = devices.filter_map(Prepared::share);
            for share in shares.filter(|share| share.can_burst()) {
                let state = self.state_of(&other.claim.uid, share);
                holders.entry(state).or_default().push(other.claim.clone());
            }
        }
        // The agent lowers those first that are to give back, so a share whose limit is low is the reason, if there is one.
        let (cause, holders) = holders
            .pop_first()
            .unwrap_or((Unreturned::NotLowered, Vec::new()));
        Failure::Unreturned {
            device: device.device.clone(),
            holders: Holders(holders),
            cause,
        }
    }

    fn state_of(&self, uid: &ClaimUid, share: &Share) -> Unreturned {
        let limit = self.limit_bytes(uid, &share.id);
        match limit.is_none_or(|limit| limit > share.held().memory_bytes) {
            true => Unreturned::NotLowered,
            false => Unreturned::InUse,
        }
    }
}
