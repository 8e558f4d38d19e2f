//! A driver root: a directory tree with the user-space driver in it, seen from two sides.
//!
//! The driver's pod sees the tree at one path (`mount`), the node and with it the container runtime at another
//! (`node`). Paths in this crate are those *inside* the tree, with every symbolic link resolved inside it, so that
//! they mean the same on both sides.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat2, readlinkat};
use rustix::io::Errno;

/// A driver root, opened.
#[derive(Debug)]
pub struct DriverRoot {
    mount: PathBuf,
    node: PathBuf,
    /// The directory at `mount`.
    dir: OwnedFd,
    /// Its path as the kernel gives it, which precedes that of every file in it.
    real: PathBuf,
}

/// The driver root cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RootError {
    /// It cannot be opened.
    #[error("cannot open the driver root {path}: is it mounted into this container?")]
    Open {
        /// The root, as this process sees it.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The path on the node is not one that can stand in a specification.
    #[error("the driver root {path} must be an absolute path in UTF-8")]
    NodePath {
        /// The path on the node.
        path: PathBuf,
    },
}

impl DriverRoot {
    /// Opens the tree that this process sees at `mount` and that the node sees at `node`.
    ///
    /// # Errors
    /// [`RootError`] with the path.
    pub fn open(mount: impl Into<PathBuf>, node: impl Into<PathBuf>) -> Result<Self, RootError> {
        let (mount, node) = (mount.into(), node.into());
        if !node.is_absolute() || node.to_str().is_none() {
            return Err(RootError::NodePath { path: node });
        }
        let failed = |errno: Errno| RootError::Open {
            path: mount.clone(),
            source: errno.into(),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir =
            openat2(CWD, &mount, flags, Mode::empty(), ResolveFlags::empty()).map_err(failed)?;
        let real = kernel_path(&dir).map_err(failed)?;
        Ok(Self {
            mount,
            node,
            dir,
            real,
        })
    }

    /// The tree as this process sees it.
    #[must_use]
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// The tree as the node sees it.
    #[must_use]
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// The path on the node of a file that is at `path` in the tree.
    pub(crate) fn on_node(&self, path: &str) -> String {
        let joined: PathBuf = self
            .node
            .join(path.trim_start_matches('/'))
            .components()
            .collect();
        joined.to_string_lossy().into_owned()
    }

    /// The resolved path in the tree of what is at `path`, with its type; `None` where nothing is there, or where its
    /// path is not UTF-8 and cannot stand in a specification.
    pub(crate) fn resolve(&self, path: &str) -> Option<(String, FileType)> {
        let file = self.open_in_tree(path, OFlags::PATH).ok()?;
        let kind = FileType::from_raw_mode(fstat(&file).ok()?.st_mode);
        let path = kernel_path(&file).ok()?;
        let inside = path.strip_prefix(&self.real).ok()?.to_str()?;
        Some((format!("/{inside}"), kind))
    }

    /// The resolved path in the tree of what is at `path`, if it is a regular file.
    pub(crate) fn file(&self, path: &str) -> Option<String> {
        self.resolve(path)
            .filter(|(_, kind)| kind.is_file())
            .map(|(path, _)| path)
    }

    /// Opens the regular file at `path` in the tree.
    pub(crate) fn read(&self, path: &str) -> rustix::io::Result<File> {
        // Without NONBLOCK a FIFO would hang this process.
        let file = self.open_in_tree(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        if FileType::from_raw_mode(fstat(&file)?.st_mode).is_file() {
            Ok(file.into())
        } else {
            Err(Errno::INVAL)
        }
    }

    /// Names in the directory at `path` in the tree, sorted; none where it is no directory.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let open = || {
            let dir = self.open_in_tree(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
            Dir::read_from(dir)
        };
        let Ok(entries) = open() else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().to_str().ok().map(str::to_owned))
            .filter(|name| name != "." && name != "..")
            .collect();
        names.sort_unstable();
        names
    }

    fn open_in_tree(&self, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        openat2(
            &self.dir,
            path,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            resolve,
        )
    }
}

/// The path of an open file, as this process sees it.
fn kernel_path(file: &OwnedFd) -> rustix::io::Result<PathBuf> {
    let path = readlinkat(
        CWD,
        format!("/proc/self/fd/{}", file.as_raw_fd()),
        Vec::new(),
    )?;
    Ok(PathBuf::from(OsString::from_vec(path.into_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_resolved_inside_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("usr/lib")).unwrap();
        std::fs::write(dir.path().join("usr/lib/libx.so.1.2"), "x").unwrap();
        symlink("usr/lib", dir.path().join("lib")).unwrap();
        symlink("/lib/libx.so.1.2", dir.path().join("usr/lib/libx.so.1")).unwrap();
        symlink(
            "../../../../../etc/passwd",
            dir.path().join("usr/lib/escape"),
        )
        .unwrap();
        let root = DriverRoot::open(dir.path(), "/run/nvidia/driver").unwrap();

        assert_eq!(
            root.file("/lib/libx.so.1").as_deref(),
            Some("/usr/lib/libx.so.1.2")
        );
        assert_eq!(
            root.file("/usr/lib/escape"),
            None,
            "/etc/passwd of the host is not in the tree"
        );
        assert_eq!(
            root.on_node("/usr/lib/libx.so.1.2"),
            "/run/nvidia/driver/usr/lib/libx.so.1.2"
        );
        assert_eq!(root.names("/lib"), ["escape", "libx.so.1", "libx.so.1.2"]);
    }

    #[test]
    fn the_root_of_the_node_adds_no_slash() {
        let root = DriverRoot::open("/", "/").unwrap();
        assert_eq!(root.on_node("/dev/null"), "/dev/null");
        assert_eq!(root.resolve("/dev/null").unwrap().0, "/dev/null");
    }

    #[test]
    fn a_root_that_is_missing_or_relative_is_named() {
        let error = DriverRoot::open("/nonexistent/root", "/").unwrap_err();
        assert!(error.to_string().contains("/nonexistent/root"), "{error}");
        let error = DriverRoot::open("/", "relative").unwrap_err();
        assert!(error.to_string().contains("relative"), "{error}");
    }
}
