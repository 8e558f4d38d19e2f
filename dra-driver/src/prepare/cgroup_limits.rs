//! Memory limits that the NVIDIA driver holds for the containers of shares.
//!
//! The CDI hook of a container asks for its limit before the container starts, see [`CgroupLimits::limit`]. The amount is that of the
//! limits page of the share at that time, and follows the page, see [`CgroupLimits::follow`]: growth and burst change only
//! the page. Each container of a share has the limit of the whole share; libvgpu keeps their sum.
//!
//! A file names the limited cgroups of a claim. It is written before the first limit, so a crash leaves no limit without it, and no
//! other limit is ever changed. Limits end with their cgroup, also by themselves.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use drava_api::error::describe;
use drava_nvml::{GpuError, GpuLibrary, GpuUuid, Status};
use drava_vgpu_abi::paths;
use serde::{Deserialize, Serialize};

use super::record::{Loaded, RecordError, RecordStore};
use crate::gpus::cgroups::{CgroupError, Cgroups};
use crate::gpus::inventory::OpenLibrary;
use crate::node::claim::{ClaimUid, ShareId};
use crate::node::files;
use crate::node::layout::Layout;
use crate::node::limits_page::Page;
use calls::Calls;

mod calls;

/// Comparisons with the limits pages between two comparisons with NVML.
pub(crate) const READ_EVERY: u32 = 50;

/// Longest wait for other calls of NVML.
const TURN: Duration = Duration::from_secs(5);

/// Difference of a limit that rounding by the NVIDIA driver explains.
const ROUNDING: u64 = 2 << 20;

/// Request of the CDI hook.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct LimitRequest {
    /// UID of the claim.
    pub claim: String,
    /// ID of the share.
    pub share: String,
    /// Cgroup of the container in the hierarchy of the node.
    pub cgroup: String,
}

/// The memory of a cgroup could not be limited.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The claim has no share whose memory the NVIDIA driver limits.
    #[error("claim {claim} has no share {share} with a memory limit by the NVIDIA driver")]
    NoShare {
        /// UID of the claim.
        claim: String,
        /// ID of the share.
        share: String,
    },
    /// No thread could be started for a call of NVML.
    #[error("cannot start a thread for NVML")]
    Thread(#[source] io::Error),
    /// A record could not be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The cgroup cannot have a limit.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The limits page of the share cannot be read.
    #[error("cannot read the limits page {}", path.display())]
    Page {
        /// The page.
        path: PathBuf,
        /// Error of the operating system, or what is wrong with the content.
        #[source]
        source: io::Error,
    },
    /// The file of the limited cgroups cannot be read or written.
    #[error("cannot {operation} {}", path.display())]
    File {
        /// Operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// NVML could not be opened.
    #[error("cannot open NVML to limit memory: {0}")]
    Library(String),
    /// NVML refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// NVML hangs.
    #[error("the NVIDIA driver does not answer")]
    NoAnswer,
    /// Another program has changed a limit.
    #[error(
        "the memory limit of the cgroup {} on GPU {gpu} was changed from {expected:?} to {found:?} bytes by another program than drava, \
         which sets it again; only root of the node can do that",
        directory.display()
    )]
    Changed {
        /// UUID of the GPU.
        gpu: String,
        /// The cgroup.
        directory: PathBuf,
        /// What drava has set.
        expected: Option<u64>,
        /// What NVML says.
        found: Option<u64>,
    },
}

/// A cgroup with the limit of a share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct LimitedCgroup {
    share: ShareId,
    #[serde(flatten)]
    place: Place,
}

/// What has one limit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Place {
    /// UUID of the GPU.
    gpu: String,
    /// The cgroup.
    directory: PathBuf,
}

/// The limits of the node.
pub struct CgroupLimits {
    layout: Layout,
    cgroups: Cgroups,
    calls: Calls,
    /// Never held while NVML is called, which can hang.
    known: Mutex<Known>,
    /// Calls of [`follow`](Self::follow).
    follows: AtomicU32,
}

/// What this process knows of the limits, so that following them costs little while nothing changes.
#[derive(Default)]
struct Known {
    /// Content of the files; `None` before they were read.
    claims: Option<BTreeMap<ClaimUid, Vec<LimitedCgroup>>>,
    /// Limits that this process has set.
    set: BTreeMap<Place, Option<u64>>,
    /// Limits pages of the shares.
    pages: BTreeMap<(ClaimUid, ShareId), Page>,
}

impl Known {
    /// Returns the shares whose limits a place has, of all claims.
    fn shares_of(&self, place: &Place) -> Vec<(ClaimUid, ShareId)> {
        let claims = self.claims.iter().flatten();
        let shares = claims.flat_map(|(uid, limited)| {
            let here = limited.iter().filter(|limited| limited.place == *place);
            here.map(|limited| (uid.clone(), limited.share.clone()))
        });
        shares.collect()
    }
}

impl CgroupLimits {
    /// Returns the limits of a node.
    #[must_use]
    pub fn new(layout: Layout, cgroups: Cgroups, open: OpenLibrary) -> Self {
        Self {
            layout,
            cgroups,
            calls: Calls::new(open),
            known: Mutex::default(),
            follows: AtomicU32::new(0),
        }
    }

    /// Locks what is known, and reads the files once.
    fn known(&self) -> MutexGuard<'_, Known> {
        // The state is valid after a panic: every change is one operation.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.claims.get_or_insert_with(|| {
            let claims = self.limited_claims().into_iter();
            let claims = claims.map(|uid| {
                let limited = self.read(&uid).unwrap_or_else(|error| {
                    let error = describe(&error);
                    tracing::warn!(claim.uid = %uid, error, "the memory limits of a claim are unknown; they end with their cgroups");
                    Vec::new()
                });
                (uid, limited)
            });
            claims.collect()
        });
        known
    }

    /// Limits the memory of a container that starts.
    ///
    /// # Errors
    /// When there is no such share, or its limit cannot be set.
    pub fn limit(&self, request: &LimitRequest) -> Result<(), LimitError> {
        let no_share = || LimitError::NoShare {
            claim: request.claim.clone(),
            share: request.share.clone(),
        };
        let uid = ClaimUid::parse(&request.claim).map_err(|_| no_share())?;
        let store = RecordStore::new(self.layout.claims());
        let Loaded::Present(record) = store.load(&uid)? else {
            return Err(no_share());
        };
        let limited = record.devices.iter().find_map(|device| {
            let share = device.share()?;
            let is_meant = share.id.as_str() == request.share && share.limited_by_driver;
            is_meant.then(|| (share.id.clone(), device.gpu.uuid.clone()))
        });
        let (share, gpu) = limited.ok_or_else(no_share)?;
        let directory = self.cgroups.directory(&request.cgroup)?;
        // Of the backends of the NVIDIA driver only one needs the controller.
        let enabled = match self.cgroups.enable_ancestors(&directory) {
            Err(error @ CgroupError::NoUnified { .. }) => return Err(error.into()),
            enabled => enabled,
        };
        let place = Place { gpu, directory };
        let cgroup = LimitedCgroup {
            share,
            place: place.clone(),
        };
        let mut known = self.known();
        // A page that cannot be read leaves no trace.
        self.page_limit(&uid, &cgroup.share, &mut known.pages)?;
        let claims = known.claims.get_or_insert_default();
        let mut present = claims.get(&uid).cloned().unwrap_or_default();
        if !present.contains(&cgroup) {
            present.push(cgroup);
            self.write(&uid, &present)?;
            claims.insert(uid, present);
        }
        // A cgroup of this name may have been limited before.
        known.set.remove(&place);
        drop(known);
        match (self.settle(&place, TURN), enabled) {
            (Err(LimitError::Gpu(error)), Err(missing)) if error.status == Status::NotSupported => {
                Err(missing.into())
            }
            (set, _) => set,
        }
    }

    /// Gives a place the limit of its shares, or none without shares, unless it has it.
    fn settle(&self, place: &Place, wait: Duration) -> Result<(), LimitError> {
        let right = self.calls.take(wait).ok_or(LimitError::NoAnswer)?;
        let mut known = self.known();
        let bytes = match known.shares_of(place).is_empty() {
            true => None,
            false => self.limit_of(&mut known, place)?,
        };
        if known.set.get(place) == Some(&bytes) {
            return Ok(());
        }
        // Unknown until NVML has answered.
        known.set.remove(place);
        drop(known);
        let to = place.clone();
        let set = move |library: &dyn GpuLibrary| {
            library.set_memory_limit(&GpuUuid::new(&to.gpu), &to.directory, bytes)
        };
        let ((), _right) = self.calls.call(right, set)?;
        let mut known = self.known();
        if !known.shares_of(place).is_empty() {
            known.set.insert(place.clone(), bytes);
        }
        Ok(())
    }

    /// Compares a limit with NVML.
    fn read_back(&self, place: &Place) -> Result<(), LimitError> {
        let Some(right) = self.calls.take(Duration::ZERO) else {
            return Ok(());
        };
        let Some(expected) = self.known().set.get(place).copied() else {
            return Ok(());
        };
        let of = place.clone();
        let read = move |library: &dyn GpuLibrary| {
            library.cgroup_memory(&GpuUuid::new(&of.gpu), &of.directory)
        };
        let read = self.calls.call(right, read);
        // Its containers have ended.
        if !place.directory.is_dir() {
            return Ok(());
        }
        let (memory, _right) = read?;
        let found = memory.limit_bytes;
        let is_same = match (found, expected) {
            (Some(found), Some(expected)) => found.abs_diff(expected) < ROUNDING,
            (found, expected) => found == expected,
        };
        if is_same {
            return Ok(());
        }
        self.known().set.remove(place);
        Err(LimitError::Changed {
            gpu: place.gpu.clone(),
            directory: place.directory.clone(),
            expected,
            found,
        })
    }

    /// Returns the limit of a place: the sum of those of its shares, `None` if one of them has none.
    fn limit_of(&self, known: &mut Known, place: &Place) -> Result<Option<u64>, LimitError> {
        let mut sum = Some(0_u64);
        for (uid, share) in known.shares_of(place) {
            let bytes = self.page_limit(&uid, &share, &mut known.pages)?;
            sum = sum.zip(bytes).map(|(sum, bytes)| sum.saturating_add(bytes));
        }
        Ok(sum)
    }

    /// Sets all limits that differ from the limits pages, and now and then those that differ in NVML; forgets cgroups that are gone
    /// and claims without a record. Returns what failed; it is tried again by the next call.
    pub fn follow(&self) -> Vec<LimitError> {
        let claims = self.known().claims.clone().unwrap_or_default();
        let follows = self.follows.fetch_add(1, Ordering::Relaxed);
        let reads_back = follows.is_multiple_of(READ_EVERY);
        let store = RecordStore::new(self.layout.claims());
        let mut failures = Vec::new();
        for uid in claims.into_keys() {
            let is_recorded = match store.version(&uid) {
                Some(_) => Ok(true),
                // The page stays while the record is damaged or of another build.
                None => store
                    .load(&uid)
                    .map(|loaded| !matches!(loaded, Loaded::Absent)),
            };
            match is_recorded {
                Ok(true) => failures.extend(self.follow_claim(&uid, reads_back)),
                Ok(false) => failures.extend(self.remove(&uid).err()),
                Err(error) => failures.push(error.into()),
            }
        }
        failures
    }

    /// A cgroup that fails holds up no other.
    fn follow_claim(&self, uid: &ClaimUid, reads_back: bool) -> Vec<LimitError> {
        let places = match self.places(uid) {
            Ok(places) => places,
            Err(error) => return vec![error],
        };
        let mut failures = Vec::new();
        for place in places {
            if reads_back {
                failures.extend(self.read_back(&place).err());
            }
            let is_set = {
                let mut known = self.known();
                self.limit_of(&mut known, &place)
                    .map(|bytes| known.set.get(&place) == Some(&bytes))
            };
            match is_set {
                Ok(true) => {}
                // Who calls NVML at present says what is wrong.
                Ok(false) => match self.settle(&place, Duration::ZERO) {
                    Ok(()) | Err(LimitError::NoAnswer) => {}
                    Err(error) => failures.push(error),
                },
                Err(error) => failures.push(error),
            }
        }
        failures
    }

    /// Returns the limited places of a claim, and forgets those that are gone.
    fn places(&self, uid: &ClaimUid) -> Result<Vec<Place>, LimitError> {
        let mut known = self.known();
        let claims = known.claims.get_or_insert_default();
        let Some(present) = claims.get_mut(uid) else {
            return Ok(Vec::new());
        };
        let (kept, gone): (Vec<_>, Vec<_>) = present
            .iter()
            .cloned()
            .partition(|cgroup| cgroup.place.directory.is_dir());
        if !gone.is_empty() {
            present.clone_from(&kept);
            known
                .set
                .retain(|place, _| gone.iter().all(|gone| gone.place != *place));
            self.write(uid, &kept)?;
        }
        Ok(kept.into_iter().map(|cgroup| cgroup.place).collect())
    }

    /// Removes the limits of a claim. A limit that NVML cannot remove ends with its cgroup.
    ///
    /// # Errors
    /// When the file of the limited cgroups cannot be removed.
    pub fn remove(&self, uid: &ClaimUid) -> Result<(), LimitError> {
        let path = self.path(uid);
        // The file is written before the first limit.
        if matches!(path.try_exists(), Ok(false)) {
            return Ok(());
        }
        let limited = {
            let mut known = self.known();
            known.pages.retain(|(of, _), _| of != uid);
            known.claims.get_or_insert_default().remove(uid)
        };
        let mut answers = true;
        for LimitedCgroup { place, .. } in limited.unwrap_or_default() {
            if !place.directory.is_dir() {
                self.known().set.remove(&place);
                continue;
            }
            // NVML that hangs is waited for once.
            let lowered = match answers {
                true => self.settle(&place, TURN),
                false => Err(LimitError::NoAnswer),
            };
            if let Err(error) = lowered {
                answers &= !matches!(error, LimitError::NoAnswer);
                self.known().set.remove(&place);
                let cgroup = place.directory.display();
                tracing::warn!(%cgroup, error = describe(&error), "cannot remove a memory limit; it ends with its cgroup");
            }
            let mut known = self.known();
            if known.shares_of(&place).is_empty() {
                known.set.remove(&place);
            }
        }
        // The claim may have been limited again meanwhile.
        let known = self.known();
        if known.claims.iter().any(|claims| claims.contains_key(uid)) {
            return Ok(());
        }
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(LimitError::File {
                operation: "remove",
                path,
                source,
            }),
            _ => Ok(()),
        }
    }

    /// Returns the limit in the page of a share; `None` for no limit.
    fn page_limit(
        &self,
        uid: &ClaimUid,
        share: &ShareId,
        pages: &mut BTreeMap<(ClaimUid, ShareId), Page>,
    ) -> Result<Option<u64>, LimitError> {
        let directory = self.layout.limits(uid, share);
        let key = (uid.clone(), share.clone());
        let read = || {
            let page = match pages.entry(key) {
                Entry::Occupied(entry) if entry.get().is_current() => entry.into_mut(),
                Entry::Occupied(mut entry) => {
                    entry.insert(Page::open(&directory)?);
                    entry.into_mut()
                }
                Entry::Vacant(entry) => entry.insert(Page::open(&directory)?),
            };
            page.refresh()?;
            Ok(page.limits().memory_limit_bytes)
        };
        read().map_err(|source| LimitError::Page {
            path: directory.join(paths::PAGE_FILE),
            source,
        })
    }

    fn path(&self, uid: &ClaimUid) -> PathBuf {
        self.layout.cgroup_limits().join(uid.as_str())
    }

    fn limited_claims(&self) -> Vec<ClaimUid> {
        let entries = fs::read_dir(self.layout.cgroup_limits());
        let names = entries.into_iter().flatten().flatten();
        let claims = names.filter_map(|entry| ClaimUid::parse(entry.file_name().to_str()?).ok());
        claims.collect()
    }

    fn read(&self, uid: &ClaimUid) -> Result<Vec<LimitedCgroup>, LimitError> {
        let path = self.path(uid);
        let file = |source| LimitError::File {
            operation: "read",
            path: path.clone(),
            source,
        };
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| file(error.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(file(source)),
        }
    }

    fn write(&self, uid: &ClaimUid, limited: &[LimitedCgroup]) -> Result<(), LimitError> {
        let path = self.path(uid);
        let write = || {
            fs::create_dir_all(self.layout.cgroup_limits())?;
            let bytes = serde_json::to_vec(limited)?;
            files::write_atomically(&path, &bytes, 0o600)
        };
        write().map_err(|source| LimitError::File {
            operation: "write",
            path: path.clone(),
            source,
        })
    }
}
