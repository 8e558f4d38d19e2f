//! The order in which a claim is prepared and unprepared.
//!
//! Everything here blocks (files, mounts) and runs on a thread where that is allowed, under the lock of the claim.

use std::collections::BTreeSet;

use drava_cdi::{Driver, SpecDir};
use drava_vgpu_abi as abi;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::effects::{EffectError, Effects, Ensured};
use super::overcommit::{self, Conflict};
use super::plan::{self, Problem};
use super::record::{ClaimRecord, Loaded, RecordError, RecordStore, Stage};
use super::recover::Used;
use super::spec::{self, SpecError};
use super::{Delivery, Prepared, Share};
use crate::artifacts::{Artifact, Installed, Stubs};
use crate::capacity;
use crate::claim::{ClaimRef, ClaimUid};
use crate::inventory::NodeInventory;
use crate::layout::{Layout, SPEC_PREFIX};
use crate::lock::{LockError, Locks};
use crate::options;

/// A claim could not be prepared or unprepared. The text, with its causes, becomes the pod's event.
#[derive(Debug, thiserror::Error)]
#[error("claim {claim}")]
pub struct ApplyError {
    /// The claim.
    pub claim: ClaimRef,
    /// What went wrong.
    #[source]
    pub failure: Box<Failure>,
}

/// What went wrong with a claim.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The claim itself is wrong.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// It would over-commit a card.
    #[error(transparent)]
    Conflict(#[from] Box<Conflict>),
    /// What another claim holds is not known at present.
    #[error(
        "the record of claim {0} is damaged and is being rebuilt from the API server; until then nobody knows what is \
         free, kubelet will try again"
    )]
    DamagedRecord(ClaimUid),
    /// The containers' view could not be put together.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Something on the node failed.
    #[error(transparent)]
    Effect(#[from] EffectError),
    /// Records could not be read.
    #[error(transparent)]
    Store(#[from] RecordError),
    /// A lock could not be taken.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// What this instance of the driver offers to claims at the moment.
#[derive(Debug)]
pub struct Environment<'a> {
    /// Pool of this node.
    pub pool: &'a str,
    /// Its cards.
    pub inventory: &'a NodeInventory,
    /// The user-space GPU driver.
    pub driver: &'a Driver,
    /// The installed artifacts.
    pub installed: &'a Installed,
    /// How containers of claims that are prepared from now on get libvgpu.
    pub delivery: options::Delivery,
}

/// What was out of order and is repaired, for people.
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
    /// On the node whose directories are `layout`.
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

    /// The records.
    #[must_use]
    pub fn store(&self) -> &RecordStore {
        &self.store
    }

    /// The locks.
    #[must_use]
    pub fn locks(&self) -> &Locks {
        &self.locks
    }

    /// Prepares `wanted`, of which the API server says `found`. The caller holds the claim's lock.
    ///
    /// # Errors
    /// Nothing of a first preparation is left behind, as far as it can be removed; what was prepared before stays.
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
        let record = match self.load(&wanted.uid, repairs)? {
            Some(present) if same_pieces(&present.devices, &devices) => present,
            Some(_) => {
                // Its allocation was taken back and given anew without an unprepare in between.
                repairs
                    .0
                    .push("removed what was prepared for an earlier allocation".to_owned());
                self.undo(&wanted.uid)?;
                self.intend(wanted, devices, environment)?
            }
            None if self.store.is_quarantined(&wanted.uid) => {
                self.rebuild(wanted, devices, environment, repairs)?
            }
            None => self.intend(wanted, devices, environment)?,
        };
        // A claim whose record was damaged may have containers that run: what they use is not taken back.
        let first = record.stage == Stage::Intent && !self.store.is_quarantined(&wanted.uid);
        self.try_complete(record, environment, repairs)
            .inspect_err(|_| {
                if first {
                    // What cannot be undone now is undone by the next prepare, unprepare or reconciliation.
                    let _ = self.undo(&wanted.uid);
                }
            })
    }

    /// Unprepares a claim; succeeds when there is nothing. The caller holds the claim's lock.
    ///
    /// # Errors
    /// When something is there and cannot be removed; the record is then still there too.
    pub fn unprepare(&self, claim: &ClaimRef) -> Result<(), ApplyError> {
        self.undo(&claim.uid).map_err(|error| ApplyError {
            claim: claim.clone(),
            failure: Box::new(error.into()),
        })
    }

    /// Removes all that exists for a claim, the record last.
    ///
    /// # Errors
    /// At the first thing that cannot be removed.
    pub fn undo(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.effects.remove_spec(uid)?;
        self.effects.remove_usage(uid)?;
        self.effects.remove_pages(uid)?;
        self.effects.remove_record(uid)
    }

    /// The claim's record. A damaged one is moved aside: the claim is then planned anew, and what exists is kept.
    fn load(&self, uid: &ClaimUid, repairs: &mut Repairs) -> Result<Option<ClaimRecord>, Failure> {
        match self.store.load(uid)? {
            Loaded::Absent => Ok(None),
            Loaded::Present(record) => Ok(Some(*record)),
            Loaded::Corrupt(reason) => {
                let aside = self.store.quarantine(uid)?;
                tracing::warn!(reason, path = %aside.display(), "moved the damaged claim record aside");
                repairs.0.push(format!(
                    "rebuilt the claim's record, the old one was damaged ({reason})"
                ));
                Ok(None)
            }
        }
    }

    /// Checks that the devices fit beside what is prepared and records that they are taken.
    fn intend(
        &self,
        claim: &ClaimRef,
        devices: Vec<Prepared>,
        environment: &Environment<'_>,
    ) -> Result<ClaimRecord, Failure> {
        let used = Used::now(environment.delivery, environment.installed);
        self.take(claim, devices, used, |devices| {
            let others = self.others(&claim.uid)?;
            if let Some(uid) = others.damaged.into_iter().next() {
                return Err(Failure::DamagedRecord(uid));
            }
            overcommit::check(claim, devices, held(&others.sound), environment.inventory)?;
            Ok(())
        })
    }

    /// As [`intend`](Self::intend) for a claim whose record was damaged. Its containers may run with what its CDI spec
    /// names.
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
        let used = spec.ok().flatten().and_then(|spec| {
            Used::of_spec(&spec, &claim.uid, &devices, state_dir, delivery, installed)
        });
        // It was let in when it was prepared. What it holds is held, whatever has become of the cards since.
        if let Some(used) = used {
            return self.take(claim, devices, used, |_| Ok(()));
        }
        repairs.0.push(
            "its CDI spec does not say with which libvgpu and way of delivery it was prepared, so these are as for a new \
             claim"
                .to_owned(),
        );
        let used = Used::now(delivery, installed);
        self.take(claim, devices, used, |devices| {
            // Those that are damaged too are held against this one when their turn comes.
            let others = self.others(&claim.uid)?;
            overcommit::check(claim, devices, held(&others.sound), environment.inventory)?;
            Ok(())
        })
    }

    /// Records that a claim holds the devices, if `check` lets them pass.
    ///
    /// The locks of the cards make the two one step: of two claims at once, the second sees the first.
    fn take(
        &self,
        claim: &ClaimRef,
        devices: Vec<Prepared>,
        used: Used,
        check: impl FnOnce(&[Prepared]) -> Result<(), Failure>,
    ) -> Result<ClaimRecord, Failure> {
        let _cards = self
            .locks
            .cards(devices.iter().map(|device| device.card.uuid.as_str()))?;
        check(&devices)?;
        let record = ClaimRecord {
            claim: claim.clone(),
            stage: Stage::Intent,
            devices,
            library: used.library,
            hook: used.hook,
            delivery: used.delivery,
        };
        self.effects.save_record(&record)?;
        Ok(record)
    }

    /// All other claims of which something is recorded.
    fn others(&self, claim: &ClaimUid) -> Result<Others, RecordError> {
        let listing = self.store.list()?;
        let mut others = Others::default();
        let is_other = |uid: &&ClaimUid| *uid != claim;
        others
            .damaged
            .extend(listing.quarantined.iter().filter(is_other).cloned());
        for uid in listing.recorded.iter().filter(is_other) {
            match self.store.load(uid)? {
                Loaded::Present(record) => others.sound.push(*record),
                // Unprepared since it was listed.
                Loaded::Absent => {}
                Loaded::Corrupt(_) => others.damaged.push(uid.clone()),
            }
        }
        Ok(others)
    }

    /// Makes everything that the record says exist.
    ///
    /// # Errors
    /// What could not be made.
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
        let known = record.stage == Stage::Prepared;
        self.refresh_artifacts(&mut record, environment);
        // First, because it finds what is missing on the node before anything is changed.
        let spec = spec::build(&record, &self.layout, environment.driver)?;
        let mut note = |what: &str, outcome: Ensured| match outcome {
            Ensured::Made if known => repairs.0.push(format!("made the missing {what} again")),
            Ensured::Replaced => repairs
                .0
                .push(format!("replaced the damaged or outdated {what}")),
            Ensured::Made | Ensured::Present => {}
        };
        for device in &record.devices {
            let Some(share) = device.share() else {
                continue;
            };
            let limits = limits(&uid, device, share, environment);
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

    /// A claim keeps what its containers started with, the way of delivery included, unless a file is not there any
    /// more.
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

    /// Content hashes of artifacts that records refer to.
    ///
    /// # Errors
    /// When the records cannot be read, or one of them does not verify: then nobody knows.
    pub fn artifacts_in_use(&self) -> Result<Option<BTreeSet<String>>, RecordError> {
        let mut hashes = BTreeSet::new();
        let listing = self.store.list()?;
        if !listing.quarantined.is_empty() {
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

/// What is recorded of the claims that a claim meets.
#[derive(Default)]
struct Others {
    sound: Vec<ClaimRecord>,
    /// Claims of which it is not known what they hold.
    damaged: Vec<ClaimUid>,
}

fn held(records: &[ClaimRecord]) -> impl Iterator<Item = (&ClaimRef, &[Prepared])> {
    records
        .iter()
        .map(|record| (&record.claim, record.devices.as_slice()))
}

fn same_pieces(present: &[Prepared], wanted: &[Prepared]) -> bool {
    present.len() == wanted.len() && present.iter().zip(wanted).all(|(a, b)| a.is_same_piece(b))
}

/// What libvgpu enforces for a share.
fn limits(
    claim: &ClaimUid,
    device: &Prepared,
    share: &Share,
    environment: &Environment<'_>,
) -> abi::LimitsSpec {
    use drava_api::config::{ComputePolicy, MemoryPolicy};
    let reserve = environment
        .inventory
        .card(&device.card.uuid)
        .map_or(0, capacity::driver_reserve_bytes);
    let cores = u32::try_from(share.cores).ok().and_then(abi::Cores::new);
    abi::LimitsSpec {
        claim_uid: id_text(claim.as_str()),
        share_id: id_text(share.id.as_str()),
        device_uuid: device_uuid(&device.card.uuid),
        limits: abi::Limits {
            memory_limit_bytes: Some(share.memory_bytes),
            driver_reserve_bytes: reserve,
            driver_excess_bytes: 0,
            cores: cores.unwrap_or(abi::Cores::BEST_EFFORT),
            compute_policy: match share.compute_policy {
                ComputePolicy::Balance => abi::ComputePolicy::Balance,
                ComputePolicy::Fixed => abi::ComputePolicy::Fixed,
                ComputePolicy::None => abi::ComputePolicy::None,
                ComputePolicy::Token => abi::ComputePolicy::Token,
            },
            priority: abi::Priority::new(i32::from(share.priority.get()))
                .unwrap_or(abi::Priority::DEFAULT),
            memory_policy: match share.memory_policy {
                MemoryPolicy::Hard => abi::MemoryPolicy::Hard,
                MemoryPolicy::Spill => abi::MemoryPolicy::Spill,
            },
            broken_region: abi::BrokenRegion::Closed,
            rate_us_per_s: None,
        },
    }
}

fn id_text(text: &str) -> abi::IdText {
    #[expect(
        clippy::expect_used,
        reason = "claim UIDs and share IDs are checked to be short printable ASCII"
    )]
    abi::IdText::new(text).expect("a checked id is an identity")
}

fn device_uuid(text: &str) -> abi::DeviceUuid {
    #[expect(
        clippy::expect_used,
        reason = "the plan of a share checks the UUID of its card"
    )]
    text.parse().expect("a checked card UUID is a device UUID")
}
