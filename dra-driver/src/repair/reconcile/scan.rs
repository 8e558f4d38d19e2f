//! State of claims on the node: records, files, mounts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use drava_cdi::SpecDir;
use drava_vgpu_abi::paths;

use super::orphans::NodeState;
use crate::kubelet::claims::TaskError;
use crate::node::claim::ClaimUid;
use crate::node::layout::{BASE_PREFIX, Layout, SPEC_PREFIX};
use crate::prepare::Prepared;
use crate::prepare::base::Base;
use crate::prepare::liveness::Inspector;
use crate::prepare::record::{Loaded, RecordError, RecordStore};
use crate::prepare::spec;

/// The node could not be scanned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScanError {
    /// Records could not be read.
    #[error(transparent)]
    Records(#[from] RecordError),
    /// CDI specs could not be listed.
    #[error("cannot list the CDI specs")]
    Specs(#[source] drava_cdi::StoreError),
    /// A directory could not be listed.
    #[error("cannot list {}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A task panicked.
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// State of claims on the node, with what the records hold.
pub(super) struct Scan {
    pub(super) state: NodeState,
    /// Devices of the valid records.
    pub(super) devices: BTreeMap<ClaimUid, Vec<Prepared>>,
    /// GPUs of the damaged records with a valid header, by UUID.
    pub(super) damaged_gpus: BTreeMap<ClaimUid, BTreeSet<String>>,
}

pub(super) fn scan(
    layout: &Layout,
    store: &RecordStore,
    inspector: &Inspector,
) -> Result<Scan, ScanError> {
    // The records first: a claim that is prepared during the scan seems to have lost its record, and a rebuild changes
    // nothing. In the other order a claim that is unprepared would seem so, and would be prepared again.
    let (mut state, mut devices) = (NodeState::default(), BTreeMap::new());
    let mut damaged_gpus = BTreeMap::new();
    for uid in store.list()?.recorded {
        match store.load(&uid)? {
            Loaded::Present(record) => {
                devices.insert(uid.clone(), record.devices);
                state.recorded.insert(uid, record.claim);
            }
            Loaded::Absent => {}
            Loaded::Unsupported(_) => {
                state.unsupported.insert(uid);
            }
            Loaded::Damaged(damage) => {
                damaged_gpus.extend(damage.gpus.map(|gpus| (uid.clone(), gpus)));
                state.damaged.insert(uid);
            }
        }
    }
    let mounted = inspector.mounted_claims();
    state.mounted = mounted.map_err(|source| ScanError::Directory {
        path: inspector.proc_root.clone(),
        source,
    })?;
    state.residues.clone_from(&state.mounted);
    let specs = SpecDir::new(layout.cdi_dir(), SPEC_PREFIX)
        .list()
        .map_err(ScanError::Specs)?;
    state
        .residues
        .extend(specs.iter().filter_map(|id| ClaimUid::parse(id).ok()));
    state.residues.extend(claim_directories(&layout.claims())?);
    state.residues.extend(claim_directories(&layout.usages())?);
    Ok(Scan {
        state,
        devices,
        damaged_gpus,
    })
}

/// What the node lacks of the state of claims, by claim.
pub(super) type Incomplete = BTreeMap<ClaimUid, BTreeSet<&'static str>>;

/// Compares the records with the files of the claims. Reads no `/proc` and asks no API server, so that it can run often.
///
/// A claim that is prepared or unprepared meanwhile can seem incomplete.
pub(super) fn incomplete(layout: &Layout, store: &RecordStore) -> Result<Incomplete, ScanError> {
    let listing = store.list()?;
    let specs = SpecDir::new(layout.cdi_dir(), SPEC_PREFIX).list();
    let specs = specs.map_err(ScanError::Specs)?;
    let specs = specs.iter().filter_map(|id| ClaimUid::parse(id).ok());
    let specs: BTreeSet<ClaimUid> = specs.collect();
    let bases = SpecDir::new(layout.cdi_dir(), BASE_PREFIX).list();
    let bases = bases.map_err(ScanError::Specs)?;
    let has_base = |base: Base| bases.iter().any(|name| name == base.name());
    let mut incomplete = Incomplete::new();
    for uid in &listing.recorded {
        let mut missing = BTreeSet::new();
        match store.load(uid)? {
            Loaded::Present(record) => {
                if !specs.contains(uid) {
                    missing.insert("the CDI spec");
                }
                if !spec::bases(&record).into_iter().all(has_base) {
                    missing.insert("the CDI spec that claims share");
                }
                for share in record.devices.iter().filter_map(Prepared::share) {
                    let limits = layout.limits(uid, &share.id);
                    if !limits.join(paths::PAGE_FILE).exists() {
                        missing.insert("the limits page");
                    }
                    let usage = layout.usage(uid, &share.id);
                    if !usage.join(paths::REGION_FILE).exists() {
                        missing.insert("the usage region");
                    }
                }
            }
            Loaded::Damaged(_) => drop(missing.insert("a readable claim record")),
            Loaded::Absent | Loaded::Unsupported(_) => {}
        }
        if !missing.is_empty() {
            incomplete.insert(uid.clone(), missing);
        }
    }
    let has_record = |uid: &&ClaimUid| listing.recorded.binary_search(uid).is_ok();
    for uid in listing.limits.iter().chain(&specs) {
        if !has_record(&uid) {
            incomplete.insert(uid.clone(), BTreeSet::from(["the claim record"]));
        }
    }
    Ok(incomplete)
}

/// Returns the UIDs of the subdirectories that are named after claims.
fn claim_directories(path: &Path) -> Result<Vec<ClaimUid>, ScanError> {
    let error = |source| ScanError::Directory {
        path: path.to_owned(),
        source,
    };
    let mut uids = Vec::new();
    for entry in fs::read_dir(path).map_err(error)? {
        let entry = entry.map_err(error)?;
        let uid = entry
            .file_name()
            .to_str()
            .and_then(|name| ClaimUid::parse(name).ok());
        if entry.file_type().map_err(error)?.is_dir() {
            uids.extend(uid);
        }
    }
    Ok(uids)
}
