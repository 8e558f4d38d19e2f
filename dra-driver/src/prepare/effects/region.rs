//! The files in the usage directory of a share, which tenants can change.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use drava_vgpu_abi::{REGION_SIZE, paths};
use rustix::fs::{FallocateFlags, fallocate};

use super::Ensured;

/// Ensures the region file. A region of zeros is unused. No container sees the file before it has its size, because the
/// CDI spec that mounts its directory is written later.
///
/// A tenant that is root in its container can truncate, remove or replace the file. An existing file is kept and resized:
/// a second region would account the share twice.
pub(super) fn ensure(path: &Path) -> io::Result<Ensured> {
    match fs::symlink_metadata(path) {
        Ok(present) if present.is_file() => {
            if present.len() == REGION_SIZE as u64 {
                return Ok(Ensured::Present);
            }
            allocate(&open(path, false)?)?;
            Ok(Ensured::Replaced)
        }
        Ok(present) => {
            if present.is_dir() {
                fs::remove_dir_all(path)?
            } else {
                fs::remove_file(path)?
            }
            create_region(path)?;
            Ok(Ensured::Replaced)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create_region(path)?;
            Ok(Ensured::Created)
        }
        Err(error) => Err(error),
    }
}

fn create_region(path: &Path) -> io::Result<()> {
    let file = open(path, true)?;
    allocate(&file)?;
    file.set_permissions(fs::Permissions::from_mode(paths::REGION_FILE_MODE))
}

/// Creates the file that the CDI hook empties. In a pod with a user namespace, the hook is an ordinary user.
pub(super) fn create_pending(path: &Path) -> io::Result<()> {
    let mut file = open(path, true)?;
    file.write_all(b"no container has this directory yet\n")?;
    file.set_permissions(fs::Permissions::from_mode(0o666))
}

/// Gives the file its size and its memory. In a sparse file, the first write to a page of the mapping would raise SIGBUS once
/// another file of the tenant has filled the file system.
fn allocate(file: &fs::File) -> io::Result<()> {
    let size = REGION_SIZE as u64;
    file.set_len(size)?;
    Ok(fallocate(file, FallocateFlags::empty(), 0, size)?)
}

/// Opens a file for writing. A tenant controls the path, so links are not followed and a FIFO does not block.
fn open(path: &Path, new: bool) -> io::Result<fs::File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(new)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("not a regular file"))
    }
}
