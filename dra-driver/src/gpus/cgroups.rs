//! Cgroup v2 of the node.
//!
//! The mount point is the same path on the node and in the driver's container: NVML and the CDI hook name cgroups by it.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Component, Path, PathBuf};

/// Mount point of cgroup v2 that the NVIDIA driver requires.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Controller of the kernel for device memory, since Linux 6.14.
const DEVICE_MEMORY: &str = "dmem";

/// Name of the cgroup with which the driver finds out what NVML can do.
const PROBE: &str = "drava-probe";

/// Cgroups cannot be used for limits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// There is no cgroup v2.
    #[error("{} has no cgroup v2", root.display())]
    NoUnified {
        /// Mount point.
        root: PathBuf,
    },
    /// The cgroup is not one of a container.
    #[error("{cgroup:?} is not the cgroup of a container")]
    NotOfContainer {
        /// The cgroup.
        cgroup: String,
    },
    /// An ancestor of a cgroup does not enable the controller.
    #[error(
        "cannot enable the controller dmem in {}; the NVIDIA driver limits no memory below it", path.display()
    )]
    Controller {
        /// File of the ancestor.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A file of a cgroup could not be changed.
    #[error("cannot {operation} {}", path.display())]
    File {
        /// Operation.
        operation: &'static str,
        /// File or directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// The hierarchy of cgroup v2.
#[derive(Debug, Clone)]
pub struct Cgroups {
    root: PathBuf,
}

impl Cgroups {
    /// Returns the hierarchy with this mount point.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the mount point.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of a cgroup, given by its path in the hierarchy.
    ///
    /// # Errors
    /// When the path is that of the root, or not absolute.
    pub fn directory(&self, cgroup: &str) -> Result<PathBuf, CgroupError> {
        let below = cgroup.strip_prefix('/').map(Path::new);
        let is_plain = |below: &&Path| {
            let mut names = below.components().peekable();
            names.peek().is_some() && names.all(|name| matches!(name, Component::Normal(_)))
        };
        let below = below.filter(is_plain);
        let below = below.ok_or_else(|| CgroupError::NotOfContainer {
            cgroup: cgroup.to_owned(),
        })?;
        Ok(self.root.join(below))
    }

    /// Returns whether the kernel has the controller of device memory.
    #[must_use]
    pub fn has_device_memory(&self) -> bool {
        let available = fs::read_to_string(self.root.join("cgroup.controllers"));
        available.is_ok_and(|available| has_controller(&available))
    }

    /// Enables the controller of device memory in all ancestors of a cgroup, which systemd and kubelet do not do. Without the
    /// controller in the kernel nothing changes: the NVIDIA driver counts by itself then.
    ///
    /// # Errors
    /// When there is no cgroup v2, or an ancestor refuses.
    pub fn enable_ancestors(&self, directory: &Path) -> Result<(), CgroupError> {
        let available = fs::read_to_string(self.root.join("cgroup.controllers"));
        let available = available.map_err(|_| CgroupError::NoUnified {
            root: self.root.clone(),
        })?;
        if !has_controller(&available) {
            return Ok(());
        }
        let ancestors = directory.ancestors().skip(1);
        let mut ancestors: Vec<&Path> = ancestors
            .take_while(|ancestor| ancestor.starts_with(&self.root))
            .collect();
        ancestors.reverse();
        ancestors.into_iter().try_for_each(enable)
    }

    /// Calls `probe` with the directory of a cgroup of its own, and whether its ancestors enable the controller.
    ///
    /// # Errors
    /// When there is no cgroup v2, or the cgroup cannot be created.
    pub fn with_probe<T>(
        &self,
        probe: impl FnOnce(&Path, Result<(), CgroupError>) -> T,
    ) -> Result<T, CgroupError> {
        let directory = self.root.join(PROBE);
        let enabled = match self.enable_ancestors(&directory) {
            Err(error @ CgroupError::NoUnified { .. }) => return Err(error),
            enabled => enabled,
        };
        match fs::create_dir(&directory) {
            // Of an instance that ended in between, or that probes now.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(|source| CgroupError::File {
                operation: "create the cgroup",
                path: directory.clone(),
                source,
            })?,
        }
        let outcome = probe(&directory, enabled);
        // It has no processes. The next probe uses one that stays.
        let _ = fs::remove_dir(&directory);
        Ok(outcome)
    }
}

fn has_controller(names: &str) -> bool {
    let mut names = names.split_whitespace();
    names.any(|name| name.trim_start_matches('+') == DEVICE_MEMORY)
}

fn enable(ancestor: &Path) -> Result<(), CgroupError> {
    let path = ancestor.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&path).unwrap_or_default();
    if has_controller(&enabled) {
        return Ok(());
    }
    let file = fs::OpenOptions::new().write(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(b"+dmem"));
    written.map_err(|source| CgroupError::Controller { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(controllers: &str) -> (tempfile::TempDir, Cgroups) {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.controllers"), controllers).unwrap();
        for cgroup in ["", "pods", "pods/one", "pods/one/leaf"] {
            let directory = root.path().join(cgroup);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("cgroup.subtree_control"), "").unwrap();
        }
        let cgroups = Cgroups::new(root.path());
        (root, cgroups)
    }

    #[test]
    fn enables_controller_in_every_ancestor_and_not_in_the_leaf() {
        let (root, cgroups) = tree("cpu dmem memory\n");
        let leaf = cgroups.directory("/pods/one/leaf").unwrap();
        cgroups.enable_ancestors(&leaf).unwrap();
        let control = |cgroup: &str| {
            let path = root.path().join(cgroup).join("cgroup.subtree_control");
            fs::read_to_string(path).unwrap()
        };
        let all = ["", "pods", "pods/one", "pods/one/leaf"].map(control);
        assert_eq!(all, ["+dmem", "+dmem", "+dmem", ""]);
    }

    #[test]
    fn changes_nothing_without_controller_and_needs_version_2() {
        let (root, cgroups) = tree("cpu memory\n");
        let leaf = cgroups.directory("/pods/one/leaf").unwrap();
        cgroups.enable_ancestors(&leaf).unwrap();
        let control = root.path().join("pods/cgroup.subtree_control");
        assert_eq!(fs::read_to_string(control).unwrap(), "");
        fs::remove_file(root.path().join("cgroup.controllers")).unwrap();
        let error = cgroups.enable_ancestors(&leaf).unwrap_err();
        assert!(error.to_string().ends_with("has no cgroup v2"), "{error}");
    }

    #[test]
    fn refuses_paths_outside_the_hierarchy() {
        let cgroups = Cgroups::new("/sys/fs/cgroup");
        for bad in ["/", "", "pods", "/pods/../..", "/../pods"] {
            assert!(cgroups.directory(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn removes_cgroup_of_the_probe() {
        let (root, cgroups) = tree("dmem");
        let existed =
            cgroups.with_probe(|directory, enabled| directory.is_dir() && enabled.is_ok());
        let existed = existed.unwrap();
        assert!(existed && !root.path().join(PROBE).exists());
    }
}
