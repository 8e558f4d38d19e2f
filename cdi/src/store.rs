//! The directory of CDI specifications that runtimes watch.
//!
//! Specifications are created, replaced and removed atomically: a reader sees the old file, the new file, or none. A
//! crash leaves at most a temporary file, whose name runtimes ignore and which the next [`SpecDir::sweep`] removes. The
//! directory is usually a tmpfs. On a disk a power failure can lose or damage a specification; runtimes skip damaged
//! ones, and [`SpecDir::read`] reports them.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::{ReadError, Spec};

/// Suffix of temporary files. Runtimes read only `*.json` and `*.yaml`.
const TEMPORARY: &str = ".tmp";
/// Size limit of a specification that is read; those of drava have some tens of KiB.
const MAX_BYTES: u64 = 4 << 20;

/// A directory of specifications, and the file name prefix of drava's specifications.
#[derive(Debug, Clone)]
pub struct SpecDir {
    dir: PathBuf,
    prefix: String,
}

/// A specification cannot be written, read, listed or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A system call failed.
    #[error("cannot {operation} {path}")]
    Io {
        /// Attempted operation.
        operation: &'static str,
        /// Path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The id cannot be part of a file name.
    #[error("invalid CDI spec id {id:?}: use at most 200 letters, digits, '-', '_' and '.'")]
    Id {
        /// The id.
        id: String,
    },
    /// A file with drava's prefix is not a specification of drava.
    #[error("cannot read the CDI spec {path}")]
    Read {
        /// Path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: ReadError,
    },
}

impl SpecDir {
    /// Returns the directory `dir`. drava's files are named `<prefix><id>.json`, such as
    /// `gpu.drava.dev-claim-<claim UID>.json`.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, prefix: impl Into<String>) -> Self {
        Self {
            dir: dir.into(),
            prefix: prefix.into(),
        }
    }

    /// Returns the path of the specification `id`.
    ///
    /// # Errors
    /// [`StoreError::Id`] where the id cannot be part of a file name.
    pub fn path(&self, id: &str) -> Result<PathBuf, StoreError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if id.is_empty() || id.len() > 200 || !id.chars().all(allowed) {
            return Err(StoreError::Id { id: id.to_owned() });
        }
        Ok(self.dir.join(format!("{}{id}.json", self.prefix)))
    }

    /// Writes or replaces the specification `id`, and returns its path. The file is readable by all, because
    /// runtimes may run as another user, and writable by the owner.
    ///
    /// # Errors
    /// [`StoreError`] with the path; the old file, if any, is then unchanged.
    pub fn write(&self, id: &str, spec: &Spec) -> Result<PathBuf, StoreError> {
        let path = self.path(id)?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.dir)
            .map_err(io("create", &self.dir))?;
        // Threads of two instances of the driver can write one specification at once.
        let thread = rustix::thread::gettid();
        let temporary = format!(
            ".{}{id}.{}{TEMPORARY}",
            self.prefix,
            thread.as_raw_nonzero()
        );
        let temporary = self.dir.join(temporary);
        let written = write(&temporary, spec.to_json().as_bytes());
        written
            .and_then(|()| fs::rename(&temporary, &path).map_err(io("replace", &path)))
            .inspect_err(|_| {
                // Report the first error; the next sweep removes a remaining temporary file.
                let _ = fs::remove_file(&temporary);
            })?;
        Ok(path)
    }

    /// Reads the specification `id`; returns `None` if it does not exist.
    ///
    /// # Errors
    /// [`StoreError`] when the file exists and cannot be read or is invalid.
    pub fn read(&self, id: &str) -> Result<Option<Spec>, StoreError> {
        let path = self.path(id)?;
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io("open", &path)(error)),
        };
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut io::Read::take(file, MAX_BYTES), &mut bytes)
            .map_err(io("read", &path))?;
        Spec::from_json(&bytes)
            .map(Some)
            .map_err(|source| StoreError::Read { path, source })
    }

    /// Removes the specification `id` and returns whether it existed.
    ///
    /// # Errors
    /// [`StoreError`] with the path.
    pub fn remove(&self, id: &str) -> Result<bool, StoreError> {
        let path = self.path(id)?;
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io("remove", &path)(error)),
        }
    }

    /// Returns the sorted ids of drava's specifications; none if the directory does not exist.
    ///
    /// # Errors
    /// [`StoreError`] with the path.
    pub fn list(&self) -> Result<Vec<String>, StoreError> {
        let mut ids: Vec<String> = self
            .names()?
            .iter()
            .filter_map(|name| self.id(name))
            .collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// Removes the temporary files of killed writers. No writer may run at the same time.
    ///
    /// # Errors
    /// [`StoreError`] with the path.
    pub fn sweep(&self) -> Result<(), StoreError> {
        let ours = format!(".{}", self.prefix);
        for name in self.names()? {
            if name.starts_with(&ours) && name.ends_with(TEMPORARY) {
                let path = self.dir.join(name);
                fs::remove_file(&path).map_err(io("remove", &path))?;
            }
        }
        Ok(())
    }

    fn id(&self, name: &str) -> Option<String> {
        Some(
            name.strip_prefix(&self.prefix)?
                .strip_suffix(".json")?
                .to_owned(),
        )
    }

    /// Returns the file names in the directory, without names that are not UTF-8: drava writes none.
    fn names(&self) -> Result<Vec<String>, StoreError> {
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io("list", &self.dir)(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io("list", &self.dir))?;
            names.extend(entry.file_name().to_str().map(str::to_owned));
        }
        Ok(names)
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
        .map_err(io("create", path))?;
    // The umask must not hide the file from runtimes.
    file.set_permissions(Permissions::from_mode(0o644))
        .map_err(io("set the mode of", path))?;
    file.write_all(bytes).map_err(io("write", path))
}

fn io(operation: &'static str, path: impl AsRef<OsStr>) -> impl FnOnce(io::Error) -> StoreError {
    let path = PathBuf::from(path.as_ref());
    move |source| StoreError::Io {
        operation,
        path,
        source,
    }
}
