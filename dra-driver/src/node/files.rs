//! Atomic file operations. The result of a durable operation survives a power failure.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Prefix of temporary files. [`sweep`] removes those of a crashed writer.
const TEMPORARY: &str = ".tmp-";

/// Replaces the file at `path` atomically and durably: after a crash or power failure the file has the old or the complete
/// new content.
///
/// # Errors
/// When an operation fails. The temporary file is removed.
pub fn write_durably(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace(path, |temporary| write_synced(temporary, bytes, mode))?;
    sync_dir(parent(path))
}

/// Replaces the file at `path` atomically: a reader sees the old or the complete new content. After a power failure the
/// file can be missing or damaged.
///
/// # Errors
/// When an operation fails. The temporary file is removed.
pub fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace(path, |temporary| {
        write_new(temporary, bytes, mode).map(drop)
    })
}

fn replace(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary_path(path);
    let written = write(&temporary).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The first error is returned.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Removes a file durably. Succeeds when the file does not exist.
///
/// # Errors
/// When the file exists and cannot be removed.
pub fn remove_durably(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => sync_dir(parent(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes the entries of a directory durable.
fn sync_dir(dir: &Path) -> io::Result<()> {
    sync(&File::open(dir)?, dir)
}

/// Creates a file and syncs its content.
fn write_synced(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    sync(&write_new(path, bytes, mode)?, path)
}

/// Waits until the disk has the file. The log has each call, because it may take many milliseconds.
#[expect(clippy::disallowed_methods, reason = "the only caller")]
fn sync(file: &File, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    tracing::trace!(path = %path.display(), "synced to disk");
    Ok(())
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<File> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)?;
    file.write_all(bytes)?;
    // The umask restricts the mode at creation.
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    Ok(file)
}

/// Returns a unique temporary path in the directory of `path`.
#[must_use]
pub fn temporary_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!("{TEMPORARY}{}-{name}", uuid::Uuid::new_v4()))
}

/// Removes temporary files of at least `age` from `dir`. Returns their number.
///
/// # Errors
/// When the directory cannot be read or a file cannot be removed.
pub fn sweep(dir: &Path, age: Duration) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let is_temporary = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
        // A modification time in the future means that the clock was set back; a later sweep removes the file.
        if is_temporary
            && entry
                .metadata()?
                .modified()?
                .elapsed()
                .is_ok_and(|since| since >= age)
        {
            fs::remove_file(entry.path())?;
            removed += 1;
        }
    }
    Ok(removed)
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn replaces_file_without_temporary_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        write_durably(&path, b"old", 0o600).unwrap();
        write_durably(&path, b"new", 0o644).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o644
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn sweeps_only_old_temporary_files() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("a.json");
        write_durably(&record, b"a", 0o600).unwrap();
        fs::write(temporary_path(&record), b"half").unwrap();
        assert_eq!(sweep(dir.path(), Duration::from_secs(3600)).unwrap(), 0);
        assert_eq!(sweep(dir.path(), Duration::ZERO).unwrap(), 1);
        assert!(record.exists());
    }

    #[test]
    fn removing_missing_file_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        remove_durably(&dir.path().join("a")).unwrap();
    }
}
