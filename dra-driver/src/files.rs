//! Durable file operations: after they return, a power cut changes nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Begins the names of files that are not complete. A crashed writer leaves them for [`sweep`].
const TEMPORARY: &str = ".tmp-";

/// Puts `bytes` at `path`: the file is either the old one or the whole new one, also after a crash.
///
/// # Errors
/// The first operation that failed. No temporary file is left behind.
pub fn write_durably(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = temporary_beside(path);
    let written = write_synced(&temporary, bytes, mode).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    sync_dir(parent(path))
}

/// Removes a file, which need not exist.
///
/// # Errors
/// When it is there and cannot be removed.
pub fn remove_durably(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => sync_dir(parent(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes the entries of a directory durable.
///
/// # Errors
/// When it cannot be opened or synced.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Writes a new file and syncs its content.
///
/// # Errors
/// When it exists or cannot be written.
pub fn write_synced(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)?;
    file.write_all(bytes)?;
    // The mode given at creation passes through the umask.
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    file.sync_all()
}

/// A name beside `path` that no other writer of this or another process uses, now or after a crash.
#[must_use]
pub fn temporary_beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!("{TEMPORARY}{}-{name}", uuid::Uuid::new_v4()))
}

/// Removes what writers that died left in `dir`: temporary files older than `age`. Returns how many.
///
/// # Errors
/// When the directory cannot be read or a file not be removed.
pub fn sweep(dir: &Path, age: Duration) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let is_temporary = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
        // A file from the future (a clock that was set back) is left for later.
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
    fn a_write_replaces_and_leaves_nothing_else() {
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
    fn only_old_temporaries_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("a.json");
        write_durably(&record, b"a", 0o600).unwrap();
        fs::write(temporary_beside(&record), b"half").unwrap();
        assert_eq!(sweep(dir.path(), Duration::from_secs(3600)).unwrap(), 0);
        assert_eq!(sweep(dir.path(), Duration::ZERO).unwrap(), 1);
        assert!(record.exists());
    }

    #[test]
    fn removing_what_is_not_there_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        remove_durably(&dir.path().join("a")).unwrap();
    }
}
