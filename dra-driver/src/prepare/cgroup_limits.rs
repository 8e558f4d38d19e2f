//! Memory limits that the NVIDIA driver holds for the containers of shares.
//!
//! The CDI hook of a container asks for its limit before the container starts, see [`CgroupLimits::limit`]. The amount is that of the
//! limits page of the share at that time, and follows the page, see [`CgroupLimits::follow`]: growth, burst and suspension change
//! only the page. Each container of a share has the limit of the whole share; libvgpu keeps their sum.
//!
//! A file names the limited cgroups of a claim. It is written before the first limit, so a crash leaves no limit without it, and no
//! other limit is ever changed. Limits end with their cgroup, also by themselves.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use drava_api::error::describe;
use drava_nvml::{GpuError, GpuLibrary, GpuUuid};
use drava_vgpu_abi::{page, paths};
use serde::{Deserialize, Serialize};

use super::record::{Loaded, RecordError, RecordStore};
use crate::gpus::cgroups::{CgroupError, Cgroups};
use crate::gpus::inventory::OpenLibrary;
use crate::node::claim::{ClaimUid, ShareId};
use crate::node::files;
use crate::node::layout::Layout;

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
    /// A record could not be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The cgroup cannot have a limit.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The limits page of the share cannot be read.
    #[error("cannot read the limits page {}: {reason}", path.display())]
    Page {
        /// The page.
        path: PathBuf,
        /// Cause.
        reason: String,
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
}

/// A cgroup with a limit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct LimitedCgroup {
    share: ShareId,
    /// UUID of the GPU.
    gpu: String,
    directory: PathBuf,
}

/// The limits of the node.
pub struct CgroupLimits {
    layout: Layout,
    cgroups: Cgroups,
    open: OpenLibrary,
    /// Limits that this process has set; held during every change.
    set: Mutex<BTreeMap<LimitedCgroup, Option<u64>>>,
}

impl CgroupLimits {
    /// Returns the limits of a node.
    #[must_use]
    pub fn new(layout: Layout, cgroups: Cgroups, open: OpenLibrary) -> Self {
        Self {
            layout,
            cgroups,
            open,
            set: Mutex::default(),
        }
    }

    fn changes(&self) -> MutexGuard<'_, BTreeMap<LimitedCgroup, Option<u64>>> {
        // The map is valid after a panic: every change is one operation.
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.cgroups.enable_ancestors(&directory)?;
        let bytes = self.page_limit(&uid, &share)?;
        let cgroup = LimitedCgroup {
            share,
            gpu,
            directory,
        };
        let mut set = self.changes();
        let mut present = self.read(&uid)?;
        if !present.contains(&cgroup) {
            present.push(cgroup.clone());
            self.write(&uid, &present)?;
        }
        let library = (self.open)().map_err(LimitError::Library)?;
        set_limit(library.as_ref(), &cgroup, bytes)?;
        set.insert(cgroup, bytes);
        Ok(())
    }

    /// Sets all limits that differ from the limits pages, and forgets cgroups that are gone and claims without a record. Returns
    /// what failed; it is tried again by the next call.
    pub fn follow(&self) -> Vec<LimitError> {
        let mut failures = Vec::new();
        let store = RecordStore::new(self.layout.claims());
        for uid in self.limited_claims() {
            let followed = match store.load(&uid) {
                Ok(Loaded::Absent) => self.remove(&uid),
                // The page stays while the record is damaged or of another build.
                Ok(Loaded::Present(_) | Loaded::Damaged(_) | Loaded::Unsupported(_)) => {
                    self.follow_claim(&uid)
                }
                Err(error) => Err(error.into()),
            };
            failures.extend(followed.err());
        }
        failures
    }

    fn follow_claim(&self, uid: &ClaimUid) -> Result<(), LimitError> {
        let mut set = self.changes();
        let present = self.read(uid)?;
        let (kept, gone): (Vec<_>, Vec<_>) = present
            .into_iter()
            .partition(|cgroup| cgroup.directory.is_dir());
        if !gone.is_empty() {
            set.retain(|cgroup, _| !gone.contains(cgroup));
            self.write(uid, &kept)?;
        }
        for cgroup in kept {
            let bytes = self.page_limit(uid, &cgroup.share)?;
            if set.get(&cgroup) != Some(&bytes) {
                let library = (self.open)().map_err(LimitError::Library)?;
                set_limit(library.as_ref(), &cgroup, bytes)?;
                set.insert(cgroup, bytes);
            }
        }
        Ok(())
    }

    /// Removes the limits of a claim. A limit that NVML cannot remove ends with its cgroup.
    ///
    /// # Errors
    /// When the file of the limited cgroups cannot be read or removed.
    pub fn remove(&self, uid: &ClaimUid) -> Result<(), LimitError> {
        let mut set = self.changes();
        for cgroup in self.read(uid)? {
            set.remove(&cgroup);
            if !cgroup.directory.is_dir() {
                continue;
            }
            let removed = (self.open)()
                .map_err(LimitError::Library)
                .and_then(|library| Ok(set_limit(library.as_ref(), &cgroup, None)?));
            if let Err(error) = removed {
                let cgroup = cgroup.directory.display();
                tracing::warn!(%cgroup, error = describe(&error), "cannot remove a memory limit; it ends with its cgroup");
            }
        }
        let path = self.path(uid);
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
    fn page_limit(&self, uid: &ClaimUid, share: &ShareId) -> Result<Option<u64>, LimitError> {
        let path = self.layout.limits(uid, share).join(paths::PAGE_FILE);
        let read = fs::read(&path).map_err(|error| describe(&error));
        let decoded =
            read.and_then(|bytes| page::decode(&bytes).map_err(|error| error.to_string()));
        match decoded {
            Ok(page) => Ok(page.spec.limits.memory_limit_bytes),
            Err(reason) => Err(LimitError::Page { path, reason }),
        }
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

fn set_limit(
    library: &dyn GpuLibrary,
    cgroup: &LimitedCgroup,
    bytes: Option<u64>,
) -> Result<(), GpuError> {
    let directory: &Path = &cgroup.directory;
    library.set_memory_limit(&GpuUuid::new(&cgroup.gpu), directory, bytes)
}
