//! Order of the steps of prepare and unprepare.
//!
//! All functions block on files and mounts. The caller holds the lock of the claim.

use std::collections::BTreeSet;

use drava_cdi::{Driver, SpecDir};
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::base::CommonEdits;
use super::companion;
use super::effects::{EffectError, Effects, Ensured};
use super::limits::{self, InitialMemory};
use super::overcommit;
use super::plan;
use super::record::{self, ClaimRecord, Loaded, RecordError, RecordStore, Unsupported};
use super::recover::{self, ArtifactVersions};
use super::spec;
use super::{Delivery, Phase, Prepared, Suspension};
use crate::gpus::inventory::NodeInventory;
use crate::node::artifacts::{Artifact, Installed, Stubs};
use crate::node::claim::{ClaimRef, ClaimUid};
use crate::node::layout::{BASE_PREFIX, Layout, SPEC_PREFIX};
use crate::node::lock::Locks;
use crate::node::options;

mod backing;
mod error;
mod mode;
mod mps;
pub mod partitions;
mod repeat;

pub use backing::{MissedReclaims, Unreturned};
pub use error::{ApplyError, Failure};

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
            .and_then(|record| {
                // Without it the record and the page stay: they are what other shares give memory back for.
                self.await_backing(&record)?;
                Ok((record, repairs))
            })
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
        let uid = &wanted.uid;
        let (record, origin, others) = match self.store.load(uid)? {
            Loaded::Unsupported(unsupported) => return Err(unsupported_record(uid, unsupported)),
            Loaded::Present(present) if same_allocation(&present.devices, &devices) => {
                let mut record = *present;
                self.follow_lost_limit(&mut record, &devices, environment.inventory, repairs)?;
                (record, Origin::Found, None)
            }
            Loaded::Present(earlier) => {
                // The claim was deallocated and allocated again without an unprepare call, for example by a forced deletion of
                // its pod.
                self.check_ended(uid, &earlier.devices)?;
                repairs
                    .0
                    .push("removed the state of an earlier allocation".to_owned());
                self.undo(uid)?;
                let (record, others) = self.record_intent(wanted, devices, environment)?;
                (record, Origin::New, others)
            }
            Loaded::Damaged(damage) => {
                repairs.0.push(format!(
                    "rebuilt the damaged claim record ({})",
                    damage.reason
                ));
                let (record, others) = self.rebuild(wanted, devices, environment, repairs)?;
                (record, Origin::Rebuilt, others)
            }
            Loaded::Absent if self.has_files(uid) => {
                repairs.0.push("rebuilt the lost claim record".to_owned());
                let (record, others) = self.rebuild(wanted, devices, environment, repairs)?;
                (record, Origin::Rebuilt, others)
            }
            Loaded::Absent => {
                let (record, others) = self.record_intent(wanted, devices, environment)?;
                (record, Origin::New, others)
            }
        };
        self.try_complete(record, origin, others, environment, repairs)
            .inspect_err(|_| {
                // An instance stays for the next prepare: kubelet repeats a failed one every few seconds.
                if origin == Origin::New && !self.has_instances(uid) {
                    // On an error the next prepare, unprepare or reconciliation undoes the rest.
                    let _ = self.undo(uid);
                }
            })
    }

    /// Unprepares a claim; succeeds for a claim without state. The caller holds the claim's lock.
    ///
    /// # Errors
    /// When state cannot be removed, or another build wrote the record; the record then stays.
    pub fn unprepare(&self, claim: &ClaimRef) -> Result<(), ApplyError> {
        let unprepared = match self.store.load(&claim.uid) {
            // Such a claim may have state that this build does not know, for example a MIG instance.
            Ok(Loaded::Unsupported(unsupported)) => {
                Err(unsupported_record(&claim.uid, unsupported))
            }
            Ok(Loaded::Absent | Loaded::Present(_) | Loaded::Damaged(_)) => {
                self.undo(&claim.uid).map_err(Failure::from)
            }
            Err(error) => Err(error.into()),
        };
        unprepared.map_err(|failure| ApplyError {
            claim: claim.clone(),
            failure: Box::new(failure),
        })
    }

    /// Records the devices of a prepared claim with changed grants. The agent then changes the limits. The caller holds the
    /// claim's lock.
    ///
    /// # Errors
    /// When the GPU lacks what the grants add, another claim uses it, or the record cannot be written; the record then stays.
    pub fn record_grants(
        &self,
        record: &ClaimRecord,
        devices: &[Prepared],
        inventory: &NodeInventory,
    ) -> Result<ClaimRecord, ApplyError> {
        let recorded = || {
            let gpus = devices.iter().map(|device| device.gpu.uuid.as_str());
            let _gpus = self.locks.gpus(gpus)?;
            if companion::is_growth(&record.devices, devices) {
                let others = self.other_claims(&record.claim.uid)?;
                others.check_known(&record::held_gpus(devices))?;
                let others = holdings(&others.records);
                overcommit::check(&record.claim, devices, others, inventory)?;
            }
            let changed = ClaimRecord {
                devices: devices.to_vec(),
                ..record.clone()
            };
            self.effects.save_record(&changed)?;
            Ok(changed)
        };
        recorded().map_err(|failure: Failure| ApplyError {
            claim: record.claim.clone(),
            failure: Box::new(failure),
        })
    }

    /// Records the suspension of the share of a prepared claim. The agent then changes the page. The caller holds the claim's
    /// lock.
    ///
    /// # Errors
    /// When a share that is to be resumed does not fit its GPU beside the other claims, or the record cannot be written; the
    /// record then stays.
    pub fn record_suspension(
        &self,
        record: &ClaimRecord,
        suspension: &Suspension,
        inventory: &NodeInventory,
    ) -> Result<ClaimRecord, ApplyError> {
        let recorded = || {
            let mut changed = record.clone();
            let shares = changed.devices.iter_mut().filter_map(Prepared::share_mut);
            shares.for_each(|share| share.suspension = Some(suspension.clone()));
            let gpus = record.devices.iter();
            let gpus = gpus.map(|device| device.gpu.uuid.as_str());
            let _gpus = self.locks.gpus(gpus)?;
            // From this phase on the share counts again.
            if suspension.phase == Phase::Resuming {
                let others = self.other_claims(&record.claim.uid)?;
                others.check_known(&changed.held_gpus())?;
                let others = holdings(&others.records);
                overcommit::check(&record.claim, &changed.devices, others, inventory)?;
            }
            self.effects.save_record(&changed)?;
            Ok(changed)
        };
        recorded().map_err(|failure: Failure| ApplyError {
            claim: record.claim.clone(),
            failure: Box::new(failure),
        })
    }

    /// Returns whether a prepared claim has a grant of this companion, or may have one: records that cannot be read count.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub fn has_grant_of(&self, companion: &ClaimUid) -> Result<bool, RecordError> {
        for uid in self.store.list()?.recorded {
            let is_granted = match self.store.load(&uid)? {
                Loaded::Absent => false,
                Loaded::Present(record) => {
                    let shares = record.devices.iter().filter_map(Prepared::share);
                    let mut grants = shares.flat_map(|share| &share.grants);
                    grants.any(|grant| grant.claim.uid == *companion)
                }
                Loaded::Unsupported(_) | Loaded::Damaged(_) => true,
            };
            if is_granted {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the state of a claim, the record last.
    ///
    /// # Errors
    /// When state cannot be removed; later steps are skipped.
    pub fn undo(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.effects.remove_spec(uid)?;
        self.effects.remove_cgroup_limits(uid)?;
        self.destroy_instances(uid)?;
        self.effects.remove_usage(uid)?;
        self.effects.remove_pages(uid)?;
        self.release_mps(uid)?;
        self.effects.remove_record(uid)
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
    ) -> Result<(ClaimRecord, Option<OtherClaims>), Failure> {
        let versions = ArtifactVersions::current(environment.delivery, environment.installed);
        self.save_intent(
            claim,
            devices,
            versions,
            environment,
            Origin::New,
            |devices| {
                let others = self.other_claims(&claim.uid)?;
                others.check_known(&record::held_gpus(devices))?;
                overcommit::check(
                    claim,
                    devices,
                    holdings(&others.records),
                    environment.inventory,
                )?;
                Ok(Some(others))
            },
        )
    }

    /// As [`record_intent`](Self::record_intent), for a claim whose record was damaged or lost. Its containers may run with the
    /// artifacts that its CDI spec names.
    fn rebuild(
        &self,
        claim: &ClaimRef,
        devices: Vec<Prepared>,
        environment: &Environment<'_>,
        repairs: &mut Repairs,
    ) -> Result<(ClaimRecord, Option<OtherClaims>), Failure> {
        let (delivery, installed) = (environment.delivery, environment.installed);
        let state_dir = self.layout.state_dir();
        let spec = SpecDir::new(self.layout.cdi_dir(), SPEC_PREFIX).read(claim.uid.as_str());
        let versions = spec.ok().flatten().and_then(|spec| {
            ArtifactVersions::from_spec(&spec, &claim.uid, &devices, state_dir, delivery, installed)
        });
        // The conflict check passed when the claim was prepared. The claim keeps its devices whatever changed since.
        if let Some(versions) = versions {
            return self.save_intent(
                claim,
                devices,
                versions,
                environment,
                Origin::Rebuilt,
                |_| Ok(None),
            );
        }
        repairs.0.push(
            "its CDI spec does not identify libvgpu and delivery; using those of a new claim"
                .to_owned(),
        );
        let versions = ArtifactVersions::current(delivery, installed);
        self.save_intent(
            claim,
            devices,
            versions,
            environment,
            Origin::Rebuilt,
            |devices| {
                // Other unknown claims are skipped: a rebuilt claim is checked against this claim.
                let others = self.other_claims(&claim.uid)?;
                overcommit::check(
                    claim,
                    devices,
                    holdings(&others.records),
                    environment.inventory,
                )?;
                Ok(Some(others))
            },
        )
    }

    /// Writes the record if `check` succeeds, and returns the other claims that `check` has read.
    ///
    /// The locks of the GPUs make both one step: of two concurrent claims, the second sees the record of the first.
    fn save_intent(
        &self,
        claim: &ClaimRef,
        mut devices: Vec<Prepared>,
        versions: ArtifactVersions,
        environment: &Environment<'_>,
        origin: Origin,
        check: impl FnOnce(&[Prepared]) -> Result<Option<OtherClaims>, Failure>,
    ) -> Result<(ClaimRecord, Option<OtherClaims>), Failure> {
        let _gpus = self
            .locks
            .gpus(devices.iter().map(|device| device.gpu.uuid.as_str()))?;
        let others = check(&devices)?;
        self.reserve_slices(&mut devices, origin)?;
        let common = if versions.has_bases {
            let compat = spec::has_compat(&devices, environment.inventory);
            CommonEdits::InBases { compat }
        } else {
            CommonEdits::InClaim
        };
        let record = ClaimRecord {
            claim: claim.clone(),
            devices,
            // The containers of a rebuilt record may have any version.
            can_wait: versions.library == environment.installed.library,
            library: versions.library,
            hook: versions.hook,
            delivery: versions.delivery,
            common,
        };
        self.effects.save_record(&record)?;
        Ok((record, others))
    }

    /// Loads the records of all other claims.
    fn other_claims(&self, claim: &ClaimUid) -> Result<OtherClaims, RecordError> {
        let listing = self.store.list()?;
        let mut others = OtherClaims::default();
        let is_other = |uid: &&ClaimUid| *uid != claim;
        for uid in listing.recorded.iter().filter(is_other) {
            match self.store.load(uid)? {
                Loaded::Present(record) => others.records.push(*record),
                // The claim was unprepared after the listing.
                Loaded::Absent => {}
                Loaded::Unsupported(unsupported) => {
                    others.unsupported.push((uid.clone(), unsupported));
                }
                Loaded::Damaged(damage) => {
                    let gpus = damage.gpus.or_else(|| spec::held_gpus(&self.layout, uid));
                    others.damaged.push((uid.clone(), gpus));
                }
            }
        }
        for uid in listing.limits.iter().filter(is_other) {
            // The record may have been written after the listing.
            if self.store.load(uid)? == Loaded::Absent && self.layout.claim(uid).exists() {
                others
                    .damaged
                    .push((uid.clone(), spec::held_gpus(&self.layout, uid)));
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
        self.try_complete(record, Origin::Found, None, environment, &mut repairs)
            .map(|record| (record, repairs))
            .map_err(|failure| ApplyError {
                claim,
                failure: Box::new(failure),
            })
    }

    /// Creates all missing state. `others` are the other claims, if they were read when the record was written.
    fn try_complete(
        &self,
        mut record: ClaimRecord,
        origin: Origin,
        mut others: Option<OtherClaims>,
        environment: &Environment<'_>,
        repairs: &mut Repairs,
    ) -> Result<ClaimRecord, Failure> {
        let uid = record.claim.uid.clone();
        repeat::refresh_gpus(&mut record.devices, environment.inventory)?;
        self.refresh_artifacts(&mut record, environment);
        spec::check(&record, environment.driver)?;
        self.ensure_mig_mode(&record.devices, environment.inventory)?;
        let instances = self.ensure_instances(&mut record, origin)?;
        // Before the files, because this step fails on missing device files.
        let specs = spec::build(
            &record,
            &self.layout,
            environment.driver,
            environment.inventory,
        )?;
        self.effects.create_device_files(&specs.claim);
        let mut note = |object: &str, outcome: Ensured| match outcome {
            Ensured::Created if origin == Origin::Found => {
                repairs.0.push(format!("recreated the missing {object}"))
            }
            Ensured::Updated => repairs.0.push(format!("replaced the outdated {object}")),
            Ensured::Replaced => repairs.0.push(format!("replaced the damaged {object}")),
            Ensured::Created | Ensured::Present => {}
        };
        note("MIG instance", instances);
        for device in &record.devices {
            let Some(share) = device.share() else {
                continue;
            };
            let has_page = self.has_page(&uid, &share.id);
            if !has_page && others.is_none() {
                others = Some(self.other_claims(&uid)?);
            }
            let may_burst = |others: &OtherClaims| others.may_burst(&device.gpu.uuid);
            let memory = match !has_page && others.as_ref().is_some_and(may_burst) {
                true => InitialMemory::None,
                false => InitialMemory::Held,
            };
            let limits = limits::page(&uid, device, share, environment.inventory, memory);
            note(
                "limits page",
                self.effects.ensure_page(&uid, &share.id, &limits)?,
            );
            note("usage region", self.effects.ensure_usage(&uid, &share.id)?);
        }
        for gpu in record::spatial_gpus(&record.devices) {
            let _gpu = self.locks.gpus([gpu])?;
            note("MPS daemon", self.effects.ensure_mps(gpu)?);
        }
        for (base, spec) in &specs.bases {
            match self.effects.ensure_base(*base, spec)? {
                // It outlives its claims, and follows an upgrade with the next of them.
                Ensured::Updated => {}
                ensured => note("CDI spec that claims share", ensured),
            }
        }
        note("CDI spec", self.effects.ensure_spec(&uid, &specs.claim)?);
        Ok(record)
    }

    /// Replaces versions of artifacts that are missing on the node. Other versions and the delivery stay: running
    /// containers use them. The hook is the installed one: it ends with the start of a container, and the CDI spec, which is
    /// written with this driver's arguments, would call another version with arguments that it may refuse.
    fn refresh_artifacts(&self, record: &mut ClaimRecord, environment: &Environment<'_>) {
        let state_dir = self.layout.state_dir();
        if !Artifact::Library.path(state_dir, &record.library).exists() {
            record.library.clone_from(&environment.installed.library);
        }
        record.hook.clone_from(&environment.installed.hook);
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

    /// Returns the content hashes of the artifacts that records and CDI specs refer to; `None` while a record is damaged, lost
    /// or of another build, or a spec cannot be read. The specs name a hook that no record does, from an upgrade until the
    /// next restore of the claims.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub fn artifacts_in_use(&self) -> Result<Option<BTreeSet<String>>, RecordError> {
        let mut hashes = BTreeSet::new();
        let listing = self.store.list()?;
        let has_record = |uid| listing.recorded.contains(uid);
        if !listing.limits.iter().all(has_record) {
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
                Loaded::Damaged(_) | Loaded::Unsupported(_) => return Ok(None),
            }
        }
        for prefix in [BASE_PREFIX, SPEC_PREFIX] {
            let specs = SpecDir::new(self.layout.cdi_dir(), prefix);
            let Ok(ids) = specs.list() else {
                return Ok(None);
            };
            for id in ids {
                match specs.read(&id) {
                    Ok(Some(spec)) => hashes.extend(recover::named(&spec, self.layout.state_dir())),
                    Ok(None) => {}
                    Err(_) => return Ok(None),
                }
            }
        }
        Ok(Some(hashes))
    }
}

/// Origin of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// An earlier call wrote the record.
    Found,
    /// This call wrote the record; no container of the claim runs.
    New,
    /// This call wrote the record for a claim whose record was damaged or lost. Containers of the claim may run.
    Rebuilt,
}

/// Records of the other claims.
#[derive(Default)]
struct OtherClaims {
    records: Vec<ClaimRecord>,
    /// Claims with damaged or lost records, and their GPUs; `None` if unknown.
    damaged: Vec<(ClaimUid, Option<BTreeSet<String>>)>,
    /// Claims with records of another build.
    unsupported: Vec<(ClaimUid, Unsupported)>,
}

impl OtherClaims {
    /// Checks that the amounts that other claims hold of these GPUs are known.
    fn check_known(&self, gpus: &BTreeSet<String>) -> Result<(), Failure> {
        for (uid, held) in &self.damaged {
            if held.as_ref().is_none_or(|held| !held.is_disjoint(gpus)) {
                return Err(Failure::DamagedRecord(uid.clone()));
            }
        }
        for (uid, unsupported) in &self.unsupported {
            if !unsupported.gpus.is_disjoint(gpus) {
                return Err(unsupported_record(uid, unsupported.clone()));
            }
        }
        Ok(())
    }
}

fn unsupported_record(claim: &ClaimUid, unsupported: Unsupported) -> Failure {
    Failure::UnsupportedRecord {
        claim: claim.clone(),
        reason: unsupported.reason,
    }
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
