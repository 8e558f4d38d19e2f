//! Directories of the daemons of MPS. Programs of claims trust the sockets there.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Another user could replace what programs of claims trust, or it is not known whether one could.
#[derive(Debug, thiserror::Error)]
pub enum UnsafeDirectory {
    /// Another user owns the directory or can write to it, or it is none.
    #[error(
        "the directory {} of MPS belongs to user {owner} with mode {mode:03o}; programs of claims trust its sockets, so it must belong \
         to root and be writable for no other user: remove it", path.display()
    )]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its user.
        owner: u32,
        /// Its permissions.
        mode: u32,
    },
    /// It cannot be read.
    #[error("cannot check the directory {} of MPS", path.display())]
    Read {
        /// The directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// Checks the directory that has those of the GPUs, and all of these. What is missing is safe.
///
/// # Errors
/// The first directory that is not safe.
pub fn check_all(mps: &Path) -> Result<(), UnsafeDirectory> {
    check(mps)?;
    let unread = |source| UnsafeDirectory::Read {
        path: mps.to_owned(),
        source,
    };
    let gpus = match fs::read_dir(mps) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        gpus => gpus.map_err(unread)?,
    };
    for gpu in gpus {
        check_gpu(&gpu.map_err(unread)?.path())?;
    }
    Ok(())
}

/// Checks the directories of a GPU. What is missing is safe.
///
/// # Errors
/// The first directory that is not safe.
pub fn check_gpu(gpu: &Path) -> Result<(), UnsafeDirectory> {
    check(gpu)?;
    check(&gpu.join("pipe"))
}

/// Checks a directory alone. A missing one is safe.
///
/// # Errors
/// When it is not safe.
pub fn check(path: &Path) -> Result<(), UnsafeDirectory> {
    let path = path.to_owned();
    let found = match fs::symlink_metadata(&path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(UnsafeDirectory::Read { path, source }),
    };
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let is_own = owner == rustix::process::geteuid().as_raw();
    if is_own && found.is_dir() && mode & 0o022 == 0 {
        return Ok(());
    }
    Err(UnsafeDirectory::Owner { path, owner, mode })
}
