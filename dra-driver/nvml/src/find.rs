//! Finds NVML below a driver root.
//!
//! A driver root is a directory tree with the NVIDIA driver's user-space files: `/` for a driver installed on the node,
//! `/run/nvidia/driver` with the GPU operator, other paths on managed nodes. Symbolic links are resolved inside the
//! root, as after a chroot.

use std::ffi::OsString;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2, readlinkat};

/// SONAME of NVML.
const NVML: &str = "libnvidia-ml.so.1";

/// Library directories of a driver root, in order of preference: Debian, Red Hat and SUSE, others, the
/// Container-Optimized OS of GKE (whose root is `/home/kubernetes/bin/nvidia`), Talos, NixOS, WSL.
#[cfg(target_arch = "x86_64")]
const DIRECTORIES: [&str; 9] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib64",
    "lib/x86_64-linux-gnu",
    "lib64",
    "usr/lib",
    "lib",
    "usr/local/glibc/usr/lib",
    "run/opengl-driver/lib",
    "usr/lib/wsl/lib",
];
/// Library directories of a driver root on Arm.
#[cfg(not(target_arch = "x86_64"))]
const DIRECTORIES: [&str; 8] = [
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib/aarch64-linux-gnu",
    "lib64",
    "usr/lib",
    "lib",
    "usr/local/glibc/usr/lib",
    "run/opengl-driver/lib",
];

/// NVML was not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FindError {
    /// The driver root cannot be opened.
    #[error("cannot open the driver root {root}; mount it into this container")]
    Root {
        /// The driver root.
        root: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// No directory has the library.
    #[error(
        "no {NVML} below the driver root {root} (searched {searched}); install the NVIDIA driver on this node, or set --driver-root to its root"
    )]
    NotFound {
        /// The driver root.
        root: PathBuf,
        /// The searched directories.
        searched: Searched,
    },
}

/// Searched directories, displayed as a list. Errors other than "not found" are displayed with the directory.
#[derive(Debug)]
pub struct Searched(Vec<(&'static str, rustix::io::Errno)>);

impl fmt::Display for Searched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (directory, errno)) in self.0.iter().enumerate() {
            let separator = if position == 0 { "" } else { ", " };
            write!(f, "{separator}{directory}")?;
            if *errno != rustix::io::Errno::NOENT {
                write!(f, " ({errno})")?;
            }
        }
        Ok(())
    }
}

/// Returns the path of NVML below `driver_root_mount`, with symbolic links resolved inside the root, so that the dynamic
/// loader of this process can open it.
///
/// # Errors
/// When the root cannot be opened or has no NVML.
pub fn find(driver_root_mount: &Path) -> Result<PathBuf, FindError> {
    let root = openat2(
        CWD,
        driver_root_mount,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::empty(),
    )
    .map_err(|errno| FindError::Root {
        root: driver_root_mount.to_owned(),
        source: errno.into(),
    })?;
    let mut searched = Vec::with_capacity(DIRECTORIES.len());
    for directory in DIRECTORIES {
        match resolve(&root, &format!("{directory}/{NVML}")) {
            Ok(path) => return Ok(path),
            Err(errno) => searched.push((directory, errno)),
        }
    }
    Err(FindError::NotFound {
        root: driver_root_mount.to_owned(),
        searched: Searched(searched),
    })
}

/// Resolves `path` inside `root`. Returns the path for this process.
fn resolve(root: &OwnedFd, path: &str) -> rustix::io::Result<PathBuf> {
    let file = openat2(
        root.as_fd(),
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    )?;
    let target = readlinkat(
        CWD,
        format!("/proc/self/fd/{}", file.as_raw_fd()),
        Vec::new(),
    )?;
    Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn resolves_absolute_links_inside_the_root() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("usr/lib64")).unwrap();
        std::fs::write(root.join("usr/lib64/libnvidia-ml.so.580.65.06"), "").unwrap();
        symlink(
            "/usr/lib64/libnvidia-ml.so.580.65.06",
            root.join("usr/lib64/libnvidia-ml.so.1"),
        )
        .unwrap();

        assert_eq!(
            find(&root).unwrap(),
            root.join("usr/lib64/libnvidia-ml.so.580.65.06")
        );
    }

    #[test]
    fn error_lists_searched_directories_and_remedy() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("usr/lib64")).unwrap();
        symlink(
            "libnvidia-ml.so.1",
            root.path().join("usr/lib64/libnvidia-ml.so.1"),
        )
        .unwrap();

        let message = find(root.path()).unwrap_err().to_string();
        assert!(
            message.contains(&*root.path().to_string_lossy()),
            "{message}"
        );
        assert!(
            message.contains("usr/lib64 (Too many levels of symbolic links"),
            "{message}"
        );
        assert!(message.contains("lib64,"), "{message}");
        assert!(message.contains("--driver-root"), "{message}");
    }

    #[test]
    fn reports_missing_root() {
        let message = find(Path::new("/nonexistent/driver-root"))
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("cannot open the driver root /nonexistent/driver-root"),
            "{message}"
        );
    }
}
