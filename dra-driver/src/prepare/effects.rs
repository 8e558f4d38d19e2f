//! What preparing a claim changes on the node, one effect per call.
//!
//! Each call is idempotent and leaves its own part whole or absent, so that a crash between any two of them leaves a
//! state that the next prepare or reconciliation completes or takes back. The trait is the seam at which tests cut the
//! power; [`NodeEffects`] is the real node.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use drava_cdi::{Spec, SpecDir};
use drava_vgpu_abi::{LimitsSpec, REGION_SIZE, page, paths};
use rustix::mount::{MountFlags, UnmountFlags};

use super::record::{ClaimRecord, RecordError, RecordStore};
use crate::claim::{ClaimUid, ShareId};
use crate::files;
use crate::layout::{Layout, SPEC_PREFIX};

/// An effect failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EffectError {
    /// A claim record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A CDI spec. No permission and a full disk show here.
    #[error("CDI directory {}", dir.display())]
    Spec {
        /// The directory.
        dir: PathBuf,
        /// Why.
        #[source]
        source: drava_cdi::StoreError,
    },
    /// A file or directory.
    #[error("{operation} {}", path.display())]
    File {
        /// What was attempted.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The share's tmpfs.
    #[error(
        "mount a tmpfs on {} for the share's usage region; the driver needs CAP_SYS_ADMIN (securityContext.privileged) \
         and its run directory mounted with mountPropagation: Bidirectional",
        path.display()
    )]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What was found where something should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ensured {
    /// It was there and is left alone.
    Present,
    /// It was missing and was made.
    Made,
    /// It was there but damaged, and was replaced.
    Replaced,
}

/// Changes on the node.
pub trait Effects: Send + Sync + 'static {
    /// Writes a claim's record.
    ///
    /// # Errors
    /// When it cannot be written.
    fn save_record(&self, record: &ClaimRecord) -> Result<(), EffectError>;

    /// Makes sure that a share has a limits page. A page that reads as one of this share is never touched: programs
    /// that run with it have it mapped.
    ///
    /// # Errors
    /// When it cannot be written.
    fn ensure_page(
        &self,
        uid: &ClaimUid,
        share: &ShareId,
        spec: &LimitsSpec,
    ) -> Result<Ensured, EffectError>;

    /// Makes sure that a share has a usage region on a tmpfs of its own. One that is there is never touched.
    ///
    /// # Errors
    /// When it cannot be mounted or made.
    fn ensure_usage(&self, uid: &ClaimUid, share: &ShareId) -> Result<Ensured, EffectError>;

    /// Makes sure that the claim's CDI spec is exactly `spec`.
    ///
    /// # Errors
    /// When it cannot be written.
    fn ensure_spec(&self, uid: &ClaimUid, spec: &Spec) -> Result<Ensured, EffectError>;

    /// Removes the claim's CDI spec.
    ///
    /// # Errors
    /// When it is there and cannot be removed.
    fn remove_spec(&self, uid: &ClaimUid) -> Result<(), EffectError>;

    /// Unmounts and removes all usage regions of the claim.
    ///
    /// # Errors
    /// When one is there and cannot be removed.
    fn remove_usage(&self, uid: &ClaimUid) -> Result<(), EffectError>;

    /// Removes all limits pages of the claim.
    ///
    /// # Errors
    /// When one is there and cannot be removed.
    fn remove_pages(&self, uid: &ClaimUid) -> Result<(), EffectError>;

    /// Removes the claim's record.
    ///
    /// # Errors
    /// When it is there and cannot be removed.
    fn remove_record(&self, uid: &ClaimUid) -> Result<(), EffectError>;
}

/// The mount calls, which need a privilege that tests lack.
pub trait Tmpfs: Send + Sync + 'static {
    /// Mounts a tmpfs of at most `size_bytes` and `inodes` on `dir`.
    ///
    /// # Errors
    /// Of the system call.
    fn mount(&self, dir: &Path, size_bytes: u64, inodes: u64) -> io::Result<()>;

    /// Unmounts what is mounted on `dir`, also while containers hold it.
    ///
    /// # Errors
    /// Of the system call.
    fn unmount(&self, dir: &Path) -> io::Result<()>;

    /// Whether something is mounted on `dir`, which exists.
    ///
    /// # Errors
    /// When it cannot be looked at.
    fn is_mounted(&self, dir: &Path) -> io::Result<bool>;
}

/// The kernel's mounts.
#[derive(Debug, Clone, Copy, Default)]
pub struct KernelTmpfs;

impl Tmpfs for KernelTmpfs {
    fn mount(&self, dir: &Path, size_bytes: u64, inodes: u64) -> io::Result<()> {
        // Writable for all like /tmp: in a pod with a user namespace the CDI hook, which leaves its mark here, is an
        // ordinary user. What a tenant puts here is bounded and costs only its own share.
        let options = format!("size={size_bytes},nr_inodes={inodes},mode=1777");
        let options = std::ffi::CString::new(options).map_err(io::Error::other)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        rustix::mount::mount("tmpfs", dir, "tmpfs", flags, Some(options.as_c_str()))
            .map_err(Into::into)
    }

    fn unmount(&self, dir: &Path) -> io::Result<()> {
        rustix::mount::unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            .map_err(Into::into)
    }

    fn is_mounted(&self, dir: &Path) -> io::Result<bool> {
        let parent = dir.parent().unwrap_or(dir);
        Ok(fs::symlink_metadata(dir)?.dev() != fs::symlink_metadata(parent)?.dev())
    }
}

/// Inodes of a share's tmpfs: its root, the region, the hook's mark, and the temporary file that becomes the mark.
const USAGE_INODES: u64 = 4;

/// The node that the driver runs on.
pub struct NodeEffects {
    layout: Layout,
    store: RecordStore,
    specs: SpecDir,
    tmpfs: Box<dyn Tmpfs>,
}

impl NodeEffects {
    /// The node whose directories are `layout`.
    #[must_use]
    pub fn new(layout: Layout, tmpfs: Box<dyn Tmpfs>) -> Self {
        let store = RecordStore::new(layout.claims());
        let specs = SpecDir::new(layout.cdi_dir(), SPEC_PREFIX);
        Self {
            layout,
            store,
            specs,
            tmpfs,
        }
    }

    fn spec_error(&self, source: drava_cdi::StoreError) -> EffectError {
        EffectError::Spec {
            dir: self.layout.cdi_dir().to_owned(),
            source,
        }
    }
}

impl Effects for NodeEffects {
    fn save_record(&self, record: &ClaimRecord) -> Result<(), EffectError> {
        Ok(self.store.save(record)?)
    }

    fn ensure_page(
        &self,
        uid: &ClaimUid,
        share: &ShareId,
        spec: &LimitsSpec,
    ) -> Result<Ensured, EffectError> {
        let dir = self.layout.limits(uid, share);
        let path = dir.join(paths::PAGE_FILE);
        let present = match fs::read(&path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => {
                return Err(EffectError::File {
                    operation: "read the limits page",
                    path,
                    source,
                });
            }
        };
        let outcome = match present.as_deref().map(page::decode) {
            Some(Ok(page))
                if page.spec.claim_uid == spec.claim_uid && page.spec.share_id == spec.share_id =>
            {
                return Ok(Ensured::Present);
            }
            Some(_) => Ensured::Replaced,
            None => Ensured::Made,
        };
        let write = || {
            fs::create_dir_all(&dir)?;
            files::write_durably(&path, &page::encode(spec), 0o644)
        };
        write().map_err(|source| EffectError::File {
            operation: "write the limits page",
            path: path.clone(),
            source,
        })?;
        Ok(outcome)
    }

    fn ensure_usage(&self, uid: &ClaimUid, share: &ShareId) -> Result<Ensured, EffectError> {
        let dir = self.layout.usage(uid, share);
        let file = |operation, path: &Path, source| EffectError::File {
            operation,
            path: path.to_owned(),
            source,
        };
        fs::create_dir_all(&dir)
            .map_err(|source| file("create the usage directory", &dir, source))?;
        let mounted = self
            .tmpfs
            .is_mounted(&dir)
            .map_err(|source| file("look at the usage directory", &dir, source))?;
        if !mounted {
            // The region, and one page for its directory.
            let size = (REGION_SIZE as u64).next_multiple_of(4096) + 4096;
            self.tmpfs
                .mount(&dir, size, USAGE_INODES)
                .map_err(|source| EffectError::Mount {
                    path: dir.clone(),
                    source,
                })?;
        }
        let path = dir.join(paths::REGION_FILE);
        ensure_region(&path).map_err(|source| file("create the usage region", &path, source))
    }

    fn ensure_spec(&self, uid: &ClaimUid, spec: &Spec) -> Result<Ensured, EffectError> {
        let outcome = match self.specs.read(uid.as_str()) {
            Ok(Some(present)) if present == *spec => return Ok(Ensured::Present),
            Ok(None) => Ensured::Made,
            Ok(Some(_)) | Err(drava_cdi::StoreError::Read { .. }) => Ensured::Replaced,
            Err(error) => return Err(self.spec_error(error)),
        };
        self.specs
            .write(uid.as_str(), spec)
            .map_err(|error| self.spec_error(error))?;
        Ok(outcome)
    }

    fn remove_spec(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        self.specs
            .remove(uid.as_str())
            .map(drop)
            .map_err(|error| self.spec_error(error))
    }

    fn remove_usage(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        let dir = self.layout.claim_usage(uid);
        let file = |operation, path: &Path, source| EffectError::File {
            operation,
            path: path.to_owned(),
            source,
        };
        let shares = match fs::read_dir(&dir) {
            Ok(shares) => shares,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(file("list", &dir, source)),
        };
        for share in shares {
            let share = share.map_err(|source| file("list", &dir, source))?.path();
            let unmount = || {
                // A crash between two starts can leave a mount on a mount.
                while self.tmpfs.is_mounted(&share)? {
                    self.tmpfs.unmount(&share)?;
                }
                fs::remove_dir_all(&share)
            };
            unmount().map_err(|source| file("unmount and remove", &share, source))?;
        }
        fs::remove_dir(&dir).map_err(|source| file("remove", &dir, source))
    }

    fn remove_pages(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        let dir = self.layout.claim(uid);
        match fs::remove_dir_all(&dir) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(EffectError::File {
                operation: "remove",
                path: dir,
                source,
            }),
        }
    }

    fn remove_record(&self, uid: &ClaimUid) -> Result<(), EffectError> {
        Ok(self.store.remove(uid)?)
    }
}

/// A region of zeros is a region nobody has used yet. No container sees it before it has its size: the CDI spec that
/// mounts its directory comes later.
///
/// A tenant that is root in its container can truncate, remove or replace the file. One that is there is kept and only
/// given its size again: a second region would be a second account of the same share.
fn ensure_region(path: &Path) -> io::Result<Ensured> {
    match fs::symlink_metadata(path) {
        Ok(present) if present.is_file() => {
            if present.len() == REGION_SIZE as u64 {
                return Ok(Ensured::Present);
            }
            let file = open_region(path, false)?;
            file.set_len(REGION_SIZE as u64)?;
            Ok(Ensured::Replaced)
        }
        Ok(present) => {
            if present.is_dir() {
                fs::remove_dir_all(path)?
            } else {
                fs::remove_file(path)?
            }
            make_region(path)?;
            Ok(Ensured::Replaced)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_region(path)?;
            Ok(Ensured::Made)
        }
        Err(error) => Err(error),
    }
}

fn make_region(path: &Path) -> io::Result<()> {
    let file = open_region(path, true)?;
    file.set_len(REGION_SIZE as u64)?;
    file.set_permissions(fs::Permissions::from_mode(paths::REGION_FILE_MODE))
}

/// Opens the region for writing. What lies at the path is a tenant's to choose: links are not followed and a FIFO
/// does not block.
fn open_region(path: &Path, new: bool) -> io::Result<fs::File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(new)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is not a regular file"))
    }
}
