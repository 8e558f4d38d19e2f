//! A driver root: a directory tree with the user-space NVIDIA driver.
//!
//! The node driver's pod mounts the tree at one path (`mount`); the node, and with it the container runtime, has the
//! tree at another (`node`). All paths in this crate are relative to the tree and free of symbolic links, so that they
//! have the same meaning in both views.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat2, readlinkat};
use rustix::io::Errno;

/// An open driver root.
#[derive(Debug)]
pub struct DriverRoot {
    mount: PathBuf,
    node: PathBuf,
    /// The directory at `mount`.
    dir: OwnedFd,
    /// Path of `mount` as reported by the kernel: prefix of the path of every file in the tree.
    real: PathBuf,
}

/// A driver root is unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RootError {
    /// The directory cannot be opened.
    #[error("cannot open the driver root {path}: is it mounted into this container?")]
    Open {
        /// Path in this process's view.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The path on the node is relative or not UTF-8, so a specification cannot contain it.
    #[error("the driver root {path} must be an absolute path in UTF-8")]
    NodePath {
        /// Path on the node.
        path: PathBuf,
    },
}

impl DriverRoot {
    /// Opens the tree at `mount` in this process's view and at `node` in the node's view.
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

    /// Path of the tree in this process's view.
    #[must_use]
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// Path of the tree in the node's view.
    #[must_use]
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// Returns the node's path of the file `path` of the tree.
    pub(crate) fn on_node(&self, path: &str) -> String {
        let joined: PathBuf = self
            .node
            .join(path.trim_start_matches('/'))
            .components()
            .collect();
        joined.to_string_lossy().into_owned()
    }

    /// Resolves `path` inside the tree and returns the resolved path and the file type. Returns `None` where no file
    /// exists or the path is not UTF-8, so a specification cannot contain it.
    pub(crate) fn resolve(&self, path: &str) -> Option<(String, FileType)> {
        let file = self.open_in_tree(path, OFlags::PATH).ok()?;
        let kind = FileType::from_raw_mode(fstat(&file).ok()?.st_mode);
        let path = kernel_path(&file).ok()?;
        let inside = path.strip_prefix(&self.real).ok()?.to_str()?;
        Some((format!("/{inside}"), kind))
    }

    /// Returns the resolved path of `path` if it is a regular file.
    #[must_use]
    pub fn file(&self, path: &str) -> Option<String> {
        self.resolve(path)
            .filter(|(_, kind)| kind.is_file())
            .map(|(path, _)| path)
    }

    /// Returns the resolved path of `path` if it is a directory.
    pub(crate) fn directory(&self, path: &str) -> Option<String> {
        self.resolve(path)
            .filter(|(_, kind)| kind.is_dir())
            .map(|(path, _)| path)
    }

    /// Opens the regular file `path` of the tree.
    ///
    /// # Errors
    /// When there is no regular file, or it cannot be opened.
    pub fn read(&self, path: &str) -> rustix::io::Result<File> {
        // Without NONBLOCK a FIFO would hang this process.
        let file = self.open_in_tree(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        if FileType::from_raw_mode(fstat(&file)?.st_mode).is_file() {
            Ok(file.into())
        } else {
            Err(Errno::INVAL)
        }
    }

    /// Returns the sorted names in the directory `path` of the tree; none where it is not a directory.
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

/// Returns the path of an open file in this process's view.
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
    fn resolves_links_inside_the_tree() {
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
            "/etc/passwd of the host is outside the tree"
        );
        assert_eq!(
            root.on_node("/usr/lib/libx.so.1.2"),
            "/run/nvidia/driver/usr/lib/libx.so.1.2"
        );
        assert_eq!(root.names("/lib"), ["escape", "libx.so.1", "libx.so.1.2"]);
    }

    #[test]
    fn adds_no_slash_for_root_of_node() {
        let root = DriverRoot::open("/", "/").unwrap();
        assert_eq!(root.on_node("/dev/null"), "/dev/null");
        assert_eq!(root.resolve("/dev/null").unwrap().0, "/dev/null");
    }

    #[test]
    fn errors_name_missing_and_relative_roots() {
        let error = DriverRoot::open("/nonexistent/root", "/").unwrap_err();
        assert!(error.to_string().contains("/nonexistent/root"), "{error}");
        let error = DriverRoot::open("/", "relative").unwrap_err();
        assert!(error.to_string().contains("relative"), "{error}");
    }
}
