//! Daemons of MPS of the GPUs with spatial shares: the first share starts one, the last one ends it.

use std::collections::{BTreeMap, BTreeSet};

use crate::node::claim::{ClaimRef, ClaimUid};
use crate::prepare::apply::{Applier, Failure};
use crate::prepare::effects::{EffectError, Effects, Ensured};
use crate::prepare::record::{self, ClaimRecord, Loaded, RecordError};

impl<E: Effects> Applier<E> {
    /// Ends the daemons of the GPUs of a claim that no other claim needs. Those of a record that cannot be read end later, by
    /// [`settle_mps`](Self::settle_mps).
    pub(super) fn release_mps(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        let Loaded::Present(record) = self.store.load(uid)? else {
            return Ok(());
        };
        for gpu in record::spatial_gpus(&record.devices) {
            let _gpu = self.locks.gpus([gpu])?;
            let others = self.spatial_claims(Some(uid))?;
            if others.are_all && !others.by_gpu.contains_key(gpu) {
                self.effects.stop_mps(gpu)?;
            }
        }
        Ok(())
    }

    /// Starts the daemon of a GPU whose claims need one, and ends it otherwise. Returns the claims if it was started.
    ///
    /// # Errors
    /// When the records cannot be read, or the daemon cannot be started or stopped.
    pub fn settle_mps(&self, gpu: &str, before: impl FnOnce()) -> Result<Vec<ClaimRef>, Failure> {
        let _gpu = self.locks.gpus([gpu])?;
        before();
        let mut found = self.spatial_claims(None)?;
        let Some(claims) = found.by_gpu.remove(gpu) else {
            if found.are_all {
                self.effects.stop_mps(gpu)?;
            }
            return Ok(Vec::new());
        };
        Ok(match self.effects.ensure_mps(gpu)? {
            Ensured::Present => Vec::new(),
            Ensured::Created | Ensured::Updated | Ensured::Replaced => claims,
        })
    }

    /// Returns the claims that a container must not have beside a claim, by name: all of its namespace beside a spatial one, the
    /// spatial ones beside any other.
    ///
    /// # Errors
    /// When the records cannot be listed or read.
    pub fn incompatible_beside(
        &self,
        record: &ClaimRecord,
    ) -> Result<BTreeSet<String>, RecordError> {
        let is_spatial = !record::spatial_gpus(&record.devices).is_empty();
        let mut names = BTreeSet::new();
        for uid in self.store.list()?.recorded {
            if let Loaded::Present(other) = self.store.load(&uid)?
                && other.claim.namespace == record.claim.namespace
                && uid != record.claim.uid
                && (is_spatial || !record::spatial_gpus(&other.devices).is_empty())
            {
                names.insert(other.claim.name.clone());
            }
        }
        Ok(names)
    }

    /// Returns the claims with spatial shares, apart from one.
    ///
    /// # Errors
    /// When the records cannot be listed or read.
    pub fn spatial_claims(
        &self,
        apart_from: Option<&ClaimUid>,
    ) -> Result<SpatialClaims, RecordError> {
        let mut claims = SpatialClaims {
            by_gpu: BTreeMap::new(),
            are_all: true,
        };
        for uid in self.store.list()?.recorded {
            if Some(&uid) == apart_from {
                continue;
            }
            match self.store.load(&uid)? {
                Loaded::Present(record) => {
                    for gpu in record::spatial_gpus(&record.devices) {
                        let of_gpu = claims.by_gpu.entry(gpu.to_owned()).or_default();
                        of_gpu.push(record.claim.clone());
                    }
                }
                Loaded::Absent => {}
                Loaded::Damaged(_) | Loaded::Unsupported(_) => claims.are_all = false,
            }
        }
        Ok(claims)
    }
}

/// Claims with spatial shares.
#[derive(Debug)]
pub struct SpatialClaims {
    /// By the UUID of their GPU.
    pub by_gpu: BTreeMap<String, Vec<ClaimRef>>,
    /// Whether there are no others: a record that cannot be read may be that of one.
    pub are_all: bool,
}
