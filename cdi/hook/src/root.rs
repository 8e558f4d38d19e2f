//! A container's root directory. All its contents are untrusted.
//!
//! The kernel resolves every path as for a process with this root: symbolic links, including absolute ones, and `..`
//! stay inside. Files are replaced by a rename in their directory, so a reader sees the old or the new contents, and a
//! link or FIFO at a file's path is replaced, never followed.
//!
//! A runtime can make the root read-only before it runs hooks, as crun before 1.26 does. The mount is then writable for the
//! time of one write: no process of the container runs yet.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fchmod, fstat,
    fstatvfs, ftruncate, mkdirat, openat, openat2, readlinkat, renameat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};

const DIRECTORY_MODE: u32 = 0o755;
const FILE_MODE: u32 = 0o644;

/// A container's root directory.
pub(crate) struct Root {
    dir: OwnedFd,
}

/// An operation in a container's root failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RootError {
    #[error("cannot open the container's root {path}")]
    Open { path: PathBuf, source: io::Error },
    #[error(
        "openat2 is not available: Linux 5.6 or later is required, and seccomp must allow the call"
    )]
    NoOpenat2,
    #[error("cannot {operation} {path} in the container{hint}")]
    Operation {
        operation: &'static str,
        path: String,
        hint: &'static str,
        source: io::Error,
    },
    #[error("{path} in the container is larger than {limit} bytes")]
    TooLarge { path: String, limit: u64 },
    #[error("{path} is not a path to a file")]
    NoFile { path: String },
}

impl RootError {
    fn is_read_only(&self) -> bool {
        let Self::Operation { source, .. } = self else {
            return false;
        };
        Errno::from_io_error(source) == Some(Errno::ROFS)
    }
}

impl Root {
    pub(crate) fn open(path: PathBuf) -> Result<Self, RootError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat2(CWD, &path, flags, Mode::empty(), ResolveFlags::empty()) {
            Ok(dir) => Ok(Self { dir }),
            Err(Errno::NOSYS | Errno::PERM) => Err(RootError::NoOpenat2),
            Err(errno) => Err(RootError::Open {
                path,
                source: errno.into(),
            }),
        }
    }

    /// Opens the regular file at `path`, following links inside the root. Returns `None` where no file or a file of
    /// another type exists: the loader ignores those too.
    pub(crate) fn file(&self, path: &str) -> Result<Option<File>, RootError> {
        let failed = |errno| operation("open", path, errno);
        match self.resolve(path, OFlags::PATH) {
            Ok(file) if is_regular(&file).map_err(failed)? => {}
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            Err(errno) => return Err(failed(errno)),
        }
        // Another container of the pod can replace the file concurrently: a FIFO must not block.
        let file = self
            .resolve(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)
            .map_err(failed)?;
        Ok(is_regular(&file).map_err(failed)?.then(|| file.into()))
    }

    /// Returns the contents of the regular file at `path`; `None` as for [`Root::file`].
    pub(crate) fn read(&self, path: &str, limit: u64) -> Result<Option<Vec<u8>>, RootError> {
        let Some(file) = self.file(path)? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        file.take(limit + 1)
            .read_to_end(&mut bytes)
            .map_err(|source| failed("read", path, source))?;
        if bytes.len() as u64 > limit {
            return Err(RootError::TooLarge {
                path: path.to_owned(),
                limit,
            });
        }
        Ok(Some(bytes))
    }

    /// Returns the time of the last change of the file or directory `path`, in seconds since 1970; `None` where it does not
    /// exist.
    pub(crate) fn modified(&self, path: &str) -> Result<Option<i64>, RootError> {
        let failed = |errno| operation("read the time of", path, errno);
        match self.resolve(path, OFlags::PATH) {
            Ok(file) => Ok(Some(fstat(&file).map_err(failed)?.st_mtime)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Returns the names in the directory `path`, at most `limit`; none where no directory exists.
    pub(crate) fn names(&self, path: &str, limit: usize) -> Result<Vec<String>, RootError> {
        let directory = match self.resolve(path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(directory) => directory,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(Vec::new()),
            Err(errno) => return Err(operation("open the directory", path, errno)),
        };
        let entries = Dir::read_from(&directory)
            .map_err(|errno| operation("read the directory", path, errno))?;
        let mut names: Vec<String> = entries
            .take(limit)
            .filter_map(|entry| entry.ok()?.file_name().to_str().ok().map(str::to_owned))
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Opens the file or directory `path` without access to its content, as a place for a mount.
    pub(crate) fn mount_point(&self, path: &str) -> Result<OwnedFd, RootError> {
        self.resolve(path, OFlags::PATH)
            .map_err(|errno| operation("open", path, errno))
    }

    /// Removes the content of the regular file at `path`, in a directory that another container can change too. A link is not
    /// followed: its target can be any file of this container. Does nothing where something else is at the path, or where
    /// the file cannot be written: the other container must not prevent the start of this one.
    pub(crate) fn empty(&self, path: &str) {
        let open = |flags| {
            let file = self.resolve(path, flags | OFlags::NOFOLLOW).ok()?;
            matches!(is_regular(&file), Ok(true)).then_some(file)
        };
        // Access to a device can have effects, so the type is read first. The file can be replaced concurrently: a FIFO must not
        // block.
        let written = open(OFlags::PATH)
            .and_then(|_| open(OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY));
        if let Some(file) = written {
            let _ = ftruncate(&file, 0);
        }
    }

    /// Creates or replaces the regular file `path` with `contents`, readable by all.
    pub(crate) fn replace(&self, path: &str, contents: &[u8]) -> Result<(), RootError> {
        self.put(path, |directory, temporary| {
            let flags =
                OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = openat(directory, temporary, flags, Mode::from_raw_mode(FILE_MODE))?;
            // The runtime's umask may hide the file from the tenant's user, whose loader would then ignore it.
            fchmod(&file, Mode::from_raw_mode(FILE_MODE))?;
            // No fsync: after a power failure the container starts again only with this hook.
            File::from(file).write_all(contents)
        })
    }

    /// Creates or replaces the symbolic link `path` to `target`.
    pub(crate) fn link(&self, path: &str, target: &str) -> Result<(), RootError> {
        self.put(path, |directory, temporary| {
            Ok(symlinkat(target, directory, temporary)?)
        })
    }

    /// Returns the target of the symbolic link at `path`; `None` where no link exists.
    pub(crate) fn link_target(&self, path: &str) -> Result<Option<Vec<u8>>, RootError> {
        let (directory, name) = split(path)?;
        let Ok(directory) = self.resolve(directory, OFlags::PATH | OFlags::DIRECTORY) else {
            return Ok(None);
        };
        match readlinkat(&directory, name, Vec::new()) {
            Ok(target) => Ok(Some(target.into_bytes())),
            Err(Errno::NOENT | Errno::INVAL) => Ok(None),
            Err(errno) => Err(operation("read the link", path, errno)),
        }
    }

    /// Creates a file under a temporary name in the directory of `path` and renames it to `path`.
    fn put(
        &self,
        path: &str,
        make: impl Fn(&OwnedFd, &OsStr) -> io::Result<()>,
    ) -> Result<(), RootError> {
        match self.try_put(path, &make) {
            Err(error) if error.is_read_only() => {
                let Some(flags) = self.read_only_flags() else {
                    return Err(error);
                };
                let failed = |errno| operation("remount the root to write", path, errno);
                self.remount(flags - MountFlags::RDONLY).map_err(failed)?;
                let written = self.try_put(path, &make);
                self.remount(flags).map_err(failed)?;
                written
            }
            result => result,
        }
    }

    /// Returns the flags of the root's mount if it is read-only.
    fn read_only_flags(&self) -> Option<MountFlags> {
        let present = fstatvfs(&self.dir).ok()?.f_flag;
        let flags = [
            (StatVfsMountFlags::RDONLY, MountFlags::RDONLY),
            (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
            (StatVfsMountFlags::NODEV, MountFlags::NODEV),
            (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
            (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
            (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
            (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
        ];
        let flags = flags
            .into_iter()
            .filter(|(flag, _)| present.contains(*flag));
        let flags: MountFlags = flags.map(|(_, flag)| flag).collect();
        flags.contains(MountFlags::RDONLY).then_some(flags)
    }

    /// Changes the flags of the root's mount in the mount namespace of the container.
    fn remount(&self, flags: MountFlags) -> rustix::io::Result<()> {
        let path = format!("/proc/self/fd/{}", self.dir.as_raw_fd());
        mount_remount(path, flags | MountFlags::BIND, "")
    }

    fn try_put(
        &self,
        path: &str,
        make: &impl Fn(&OwnedFd, &OsStr) -> io::Result<()>,
    ) -> Result<(), RootError> {
        let (directory, name) = split(path)?;
        let directory = self.directory(directory)?;
        let temporary = format!(".{name}.drava");
        let temporary = OsStr::new(&temporary);
        // A killed run, or the image, can leave a file of that name.
        match unlinkat(&directory, temporary, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(operation("write", path, errno)),
        }
        make(&directory, temporary).map_err(|source| failed("write", path, source))?;
        renameat(&directory, temporary, &directory, name).map_err(|errno| {
            // Reports the first error.
            let _ = unlinkat(&directory, temporary, AtFlags::empty());
            operation("replace", path, errno)
        })
    }

    /// Opens a directory and creates missing components.
    fn directory(&self, path: &str) -> Result<OwnedFd, RootError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        match self.resolve(path, flags) {
            Ok(directory) => return Ok(directory),
            Err(Errno::NOENT) if path != "/" => {}
            Err(errno) => return Err(operation("open the directory", path, errno)),
        }
        let (parent, name) = split(path)?;
        let parent = self.directory(parent)?;
        match mkdirat(&parent, name, Mode::from_raw_mode(DIRECTORY_MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(operation("create the directory", path, errno)),
        }
        self.resolve(path, flags)
            .map_err(|errno| operation("open the directory", path, errno))
    }

    fn resolve(&self, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        // The kernel returns EAGAIN when a concurrent rename disturbs the resolution of `..`.
        let mut attempts = 0..32;
        loop {
            match openat2(
                &self.dir,
                path,
                flags | OFlags::CLOEXEC,
                Mode::empty(),
                resolve,
            ) {
                Err(Errno::AGAIN) if attempts.next().is_some() => {}
                result => return result,
            }
        }
    }
}

/// Splits an absolute path into directory and name.
fn split(path: &str) -> Result<(&str, &str), RootError> {
    match path.rsplit_once('/') {
        Some((_, "")) | None => Err(RootError::NoFile {
            path: path.to_owned(),
        }),
        Some(("", name)) => Ok(("/", name)),
        Some((directory, name)) => Ok((directory, name)),
    }
}

fn is_regular(file: &OwnedFd) -> rustix::io::Result<bool> {
    Ok(FileType::from_raw_mode(fstat(file)?.st_mode).is_file())
}

fn operation(operation: &'static str, path: &str, errno: Errno) -> RootError {
    failed(operation, path, errno.into())
}

fn failed(operation: &'static str, path: &str, source: io::Error) -> RootError {
    let hint = match Errno::from_io_error(&source) {
        Some(Errno::ROFS) => {
            ": read-only mount; mount volumes below that directory instead of over it"
        }
        Some(Errno::BUSY) => ": a volume is mounted at that path; mount it elsewhere",
        Some(Errno::ISDIR) => ": a directory of the image",
        Some(_) | None => "",
    };
    RootError::Operation {
        operation,
        path: path.to_owned(),
        hint,
        source,
    }
}
