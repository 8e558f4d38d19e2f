//! Order of the steps of prepare and unprepare.
//!
//! All functions block on files and mounts. The caller holds the lock of the claim.

use std::collections::BTreeSet;

use drava_cdi::{Driver, SpecDir};
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::effects::{EffectError, Effects, Ensured};
use super::limits;
use super::overcommit::{self, Conflict};
use super::plan::{self, PlanError};
use super::record::{ClaimRecord, Loaded, RecordError, RecordStore, Stage};
use super::recover::ArtifactVersions;
use super::spec::{self, SpecError};
use super::{Delivery, Prepared};
use crate::artifacts::{Artifact, Installed, Stubs};
use crate::claim::{ClaimRef, ClaimUid};
use crate::inventory::NodeInventory;
use crate::layout::{Layout, SPEC_PREFIX};
use crate::lock::{LockError, Locks};
use crate::options;

/// A claim was not prepared or unprepared.
#[derive(Debug, thiserror::Error)]
#[error("claim {claim}")]
pub struct ApplyError {
    /// The claim.
    pub claim: ClaimRef,
    /// Cause.
    #[source]
    pub failure: Box<Failure>,
}

/// Cause of an [`ApplyError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The claim or its allocation is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The claim would overcommit a GPU.
    #[error(transparent)]
    Conflict(#[from] Box<Conflict>),
    /// The devices of another claim are unknown.
    #[error(
        "the record of claim {0} is damaged or lost and is being rebuilt from the API server; free capacity is unknown until \
         then, kubelet retries"
    )]
    DamagedRecord(ClaimUid),
    /// The CDI spec could not be built.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The node could not be changed.
    #[error(transparent)]
    Effect(#[from] EffectError),
    /// Claim records could not be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A lock was not acquired.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// Inputs of prepare from the node.
#[derive(Debug)]
pub struct Environment<'a> {
    /// Pool of this node.
    pub pool: &'a str,
    /// GPUs of this node.
    pub inventory: &'a NodeInventory,
    /// User-space files of the NVIDIA driver.
    pub driver: &'a Driver,
    /// The installed artifacts.
    pub installed: &'a Installed,
    /// Delivery of libvgpu for claims that are prepared from now on.
    pub delivery: options::Delivery,
}

/// Descriptions of repaired state.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Repairs(pub Vec<String>);

/// Prepares claims on one node.
#[derive(Debug)]
pub struct Applier<E> {
    layout: Layout,
    store: RecordStore,
    locks: Locks,
    effects: E,
}

impl<E: Effects> Applier<E> {
    /// Returns an applier for the node with this layout.
    #[must_use]
    pub fn new(layout: Layout, locks: Locks, effects: E) -> Self {
        let store = RecordStore::new(layout.claims());
        Self {
            layout,
            store,
            locks,
            effects,
        }
    }

    /// Returns the claim records.
    #[must_use]
    pub fn store(&self) -> &RecordStore {
        &self.store
    }

    /// Returns the locks.
    #[must_use]
    pub fn locks(&self) -> &Locks {
        &self.locks
    }

    /// Prepares `wanted`; `found` is the claim as the API server has it. The caller holds the claim's lock.
    ///
    /// # Errors
    /// When the claim was not prepared. A failed first preparation is undone; earlier state stays.
    pub fn prepare(
        &self,
        wanted: &ClaimRef,
        found: Option<&ResourceClaim>,
        environment: &Environment<'_>,
    ) -> Result<(ClaimRecord, Repairs), ApplyError> {
        let mut repairs = Repairs::default();
        self.try_prepare(wanted, found, environment, &mut repairs)
            .map(|record| (record, repairs))
            .map_err(|failure| ApplyError {
                claim: wanted.clone(),
                failure: Box::new(failure),
            })
    }

    fn try_prepare(
        &self,
        wanted: &ClaimRef,
        found: Option<&ResourceClaim>,
        environment: &Environment<'_>,
        repairs: &mut Repairs,
    ) -> Result<ClaimRecord, Failure> {
        let devices = plan::plan(wanted, found, environment.pool, environment.inventory)?;
        // Containers may run with state whose record is damaged or lost, so that state is not undone.
        let mut is_first = false;
        let record = match self.load(&wanted.uid, repairs)? {
            Some(present) if same_allocation(&present.devices, &devices) => present,
            Some(_) => {
                // The claim was deallocated and allocated again without an unprepare call.
                repairs
                    .0
                    .push("removed the state of an earlier allocation".to_owned());
                self.undo(&wanted.uid)?;
                is_first = true;
                self.record_intent(wanted, devices, environment)?
            }
            None if self.store.is_quarantined(&wanted.uid) => {
                self.rebuild(wanted, devices, environment, repairs)?
            }
            None if self.has_files(&wanted.uid) => {
                repairs.0.push("rebuilt the lost claim record".to_owned());
                self.rebuild(wanted, devices, environment, repairs)?
            }
            None => {
                is_first = true;
                self.record_intent(wanted, devices, environment)?
            }
        };
        self.try_complete(record, environment, repairs)
            .inspect_err(|_| {
                if is_first {
                    // On an error the next prepare, unprepare or reconciliation undoes the rest.
                    let _ = self.undo(&wanted.uid);
                }
            })
    }

    /// Unprepares a claim; succeeds for a claim without state. The caller holds the claim's lock.
    ///
    /// # Errors
    /// When state cannot be removed; the record then stays.
    pub fn unprepare(&self, claim: &ClaimRef) -> Result<(), ApplyError> {
        self.undo(&claim.uid).map_err(|error| ApplyError {
            claim: claim.clone(),
            failure: Box::new(error.into()),
        })
    }

    /// Removes the state of a claim, the record last.
    ///
    /// # Errors
    /// When state cannot be removed; later steps are skipped.
    pub fn undo(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.effects.remove_spec(uid)?;
        self.effects.remove_usage(uid)?;
        self.effects.remove_pages(uid)?;
        self.effects.remove_record(uid)
    }

    /// Loads the claim's record. A damaged record is quarantined; the claim is then planned again and keeps its state.
    fn load(&self, uid: &ClaimUid, repairs: &mut Repairs) -> Result<Option<ClaimRecord>, Failure> {
        match self.store.load(uid)? {
            Loaded::Absent => Ok(None),
            Loaded::Present(record) => Ok(Some(*record)),
            Loaded::Corrupt(reason) => {
                let quarantined = self.store.quarantine(uid)?;
                tracing::warn!(reason, path = %quarantined.display(), "quarantined the damaged claim record");
                repairs
                    .0
                    .push(format!("rebuilt the damaged claim record ({reason})"));
                Ok(None)
            }
        }
    }

    /// Returns whether files of a claim exist. They are removed before the record, so without a record they mean that the
    /// record is lost.
    fn has_files(&self, uid: &ClaimUid) -> bool {
        let spec = SpecDir::new(self.layout.cdi_dir(), SPEC_PREFIX).path(uid.as_str());
        self.layout.claim(uid).exists() || spec.is_ok_and(|spec| spec.exists())
    }

    /// Checks the devices for conflicts and writes the record.
    fn record_intent(
        &self,
        claim: &ClaimRef,
        devices: Vec<Prepared>,
        environment: &Environment<'_>,
    ) -> Result<ClaimRecord, Failure> {
        let versions = ArtifactVersions::current(environment.delivery, environment.installed);
        self.save_intent(claim, devices, versions, |devices| {
            let others = self.other_claims(&claim.uid)?;
            if let Some(uid) = others.damaged.into_iter().next() {
                return Err(Failure::DamagedRecord(uid));
            }
            overcommit::check(
                claim,
                devices,
                holdings(&others.records),
                environment.inventory,
            )?;
            Ok(())
        })
    }

    /// As [`record_intent`](Self::record_intent), for a claim whose record was damaged or lost. Its containers may run with the
    /// artifacts that its CDI spec names.
    fn rebuild(
        &self,
        claim: &ClaimRef,
        devices: Vec<Prepared>,
        environment: &Environment<'_>,
        repairs: &mut Repairs,
    ) -> Result<ClaimRecord, Failure> {
        let (delivery, installed) = (environment.delivery, environment.installed);
        let state_dir = self.layout.state_dir();
        let spec = SpecDir::new(self.layout.cdi_dir(), SPEC_PREFIX).read(claim.uid.as_str());
        let versions = spec.ok().flatten().and_then(|spec| {
            ArtifactVersions::from_spec(&spec, &claim.uid, &devices, state_dir, delivery, installed)
        });
        // The conflict check passed when the claim was prepared. The claim keeps its devices whatever changed since.
        if let Some(versions) = versions {
            return self.save_intent(claim, devices, versions, |_| Ok(()));
        }
        repairs.0.push(
            "its CDI spec does not identify libvgpu and delivery; using those of a new claim"
                .to_owned(),
        );
        let versions = ArtifactVersions::current(delivery, installed);
        self.save_intent(claim, devices, versions, |devices| {
            // Other damaged records are skipped: their claims are checked against this claim when they are rebuilt.
            let others = self.other_claims(&claim.uid)?;
            overcommit::check(
                claim,
                devices,
                holdings(&others.records),
                environment.inventory,
            )?;
            Ok(())
        })
    }

    /// Writes the record with stage [`Stage::Intent`] if `check` succeeds.
    ///
    /// The locks of the GPUs make both one step: of two concurrent claims, the second sees the record of the first.
    fn save_intent(
        &self,
        claim: &ClaimRef,
        devices: Vec<Prepared>,
        versions: ArtifactVersions,
        check: impl FnOnce(&[Prepared]) -> Result<(), Failure>,
    ) -> Result<ClaimRecord, Failure> {
        let _gpus = self
            .locks
            .cards(devices.iter().map(|device| device.card.uuid.as_str()))?;
        check(&devices)?;
        let record = ClaimRecord {
            claim: claim.clone(),
            stage: Stage::Intent,
            devices,
            library: versions.library,
            hook: versions.hook,
            delivery: versions.delivery,
        };
        self.effects.save_record(&record)?;
        Ok(record)
    }

    /// Loads the records of all other claims.
    fn other_claims(&self, claim: &ClaimUid) -> Result<OtherClaims, RecordError> {
        let listing = self.store.list()?;
        let mut others = OtherClaims::default();
        let is_other = |uid: &&ClaimUid| *uid != claim;
        others
            .damaged
            .extend(listing.quarantined.iter().filter(is_other).cloned());
        for uid in listing.recorded.iter().filter(is_other) {
            match self.store.load(uid)? {
                Loaded::Present(record) => others.records.push(*record),
                // The claim was unprepared after the listing.
                Loaded::Absent => {}
                Loaded::Corrupt(_) => others.damaged.push(uid.clone()),
            }
        }
        for uid in listing.limits.iter().filter(is_other) {
            // The record may have been written after the listing.
            let is_lost = !self.store.is_quarantined(uid)
                && self.store.load(uid)? == Loaded::Absent
                && self.layout.claim(uid).exists();
            if is_lost {
                others.damaged.push(uid.clone());
            }
        }
        Ok(others)
    }

    /// Creates all missing state of a record.
    ///
    /// # Errors
    /// When state cannot be created.
    pub fn complete(
        &self,
        record: ClaimRecord,
        environment: &Environment<'_>,
    ) -> Result<(ClaimRecord, Repairs), ApplyError> {
        let (claim, mut repairs) = (record.claim.clone(), Repairs::default());
        self.try_complete(record, environment, &mut repairs)
            .map(|record| (record, repairs))
            .map_err(|failure| ApplyError {
                claim,
                failure: Box::new(failure),
            })
    }

    fn try_complete(
        &self,
        mut record: ClaimRecord,
        environment: &Environment<'_>,
        repairs: &mut Repairs,
    ) -> Result<ClaimRecord, Failure> {
        let uid = record.claim.uid.clone();
        let was_prepared = record.stage == Stage::Prepared;
        self.refresh_artifacts(&mut record, environment);
        // First, because this step fails on missing device files before the node is changed.
        let spec = spec::build(&record, &self.layout, environment.driver)?;
        let mut note = |object: &str, outcome: Ensured| match outcome {
            Ensured::Created if was_prepared => {
                repairs.0.push(format!("recreated the missing {object}"))
            }
            Ensured::Replaced => repairs
                .0
                .push(format!("replaced the damaged or outdated {object}")),
            Ensured::Created | Ensured::Present => {}
        };
        for device in &record.devices {
            let Some(share) = device.share() else {
                continue;
            };
            let limits = limits::page(&uid, device, share, environment.inventory);
            note(
                "limits page",
                self.effects.ensure_page(&uid, &share.id, &limits)?,
            );
            note("usage region", self.effects.ensure_usage(&uid, &share.id)?);
        }
        note("CDI spec", self.effects.ensure_spec(&uid, &spec)?);
        if record.stage == Stage::Intent {
            record.stage = Stage::Prepared;
            self.effects.save_record(&record)?;
        }
        self.store.clear_quarantine(&uid)?;
        Ok(record)
    }

    /// Replaces versions of artifacts that are missing on the node. Other versions and the delivery stay: running
    /// containers use them.
    fn refresh_artifacts(&self, record: &mut ClaimRecord, environment: &Environment<'_>) {
        let state_dir = self.layout.state_dir();
        if !Artifact::Library.path(state_dir, &record.library).exists() {
            record.library.clone_from(&environment.installed.library);
        }
        if !Artifact::Hook.path(state_dir, &record.hook).exists() {
            record.hook.clone_from(&environment.installed.hook);
        }
        if let Delivery::Shim(Stubs { cuda, nvml }) = &mut record.delivery {
            let installed = &environment.installed.stubs;
            if !Artifact::CudaStub.path(state_dir, cuda).exists() {
                cuda.clone_from(&installed.cuda);
            }
            if !Artifact::NvmlStub.path(state_dir, nvml).exists() {
                nvml.clone_from(&installed.nvml);
            }
        }
    }

    /// Returns the content hashes of the artifacts that records refer to; `None` while a record is damaged or lost.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub fn artifacts_in_use(&self) -> Result<Option<BTreeSet<String>>, RecordError> {
        let mut hashes = BTreeSet::new();
        let listing = self.store.list()?;
        let has_record = |uid| listing.recorded.contains(uid);
        if !listing.quarantined.is_empty() || !listing.limits.iter().all(has_record) {
            return Ok(None);
        }
        for uid in &listing.recorded {
            match self.store.load(uid)? {
                Loaded::Present(record) => {
                    hashes.extend([record.library, record.hook]);
                    if let Delivery::Shim(Stubs { cuda, nvml }) = record.delivery {
                        hashes.extend([cuda, nvml]);
                    }
                }
                Loaded::Absent => {}
                Loaded::Corrupt(_) => return Ok(None),
            }
        }
        Ok(Some(hashes))
    }
}

/// Records of the other claims.
#[derive(Default)]
struct OtherClaims {
    records: Vec<ClaimRecord>,
    /// Claims whose records are damaged.
    damaged: Vec<ClaimUid>,
}

fn holdings(records: &[ClaimRecord]) -> impl Iterator<Item = (&ClaimRef, &[Prepared])> {
    records
        .iter()
        .map(|record| (&record.claim, record.devices.as_slice()))
}

fn same_allocation(present: &[Prepared], wanted: &[Prepared]) -> bool {
    present.len() == wanted.len()
        && present
            .iter()
            .zip(wanted)
            .all(|(a, b)| a.is_same_allocation(b))
}
