//! Cgroups of processes, from the kernel or from the directory that stands for them.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::description::{MemoryLimitBackend, MemoryLimits};
use crate::protocol::Refusal;

/// The controller of [`MemoryLimitBackend::Dmem`].
const CONTROLLER: &str = "dmem";
/// Bit of `CAP_SYS_ADMIN`.
const SYS_ADMIN: u32 = 21;

/// Cgroup v2 of the machine.
#[derive(Debug)]
pub(super) struct Cgroups {
    limits: MemoryLimits,
}

impl Cgroups {
    pub(super) fn new(limits: MemoryLimits) -> Self {
        Self { limits }
    }

    /// Whether memory is counted by cgroup.
    pub(super) fn are_counted(&self) -> bool {
        self.limits.backend != MemoryLimitBackend::None
    }

    /// Cgroup of a process; `None` if the process is unknown or has none.
    pub(super) fn of(&self, pid: u32) -> Option<String> {
        match &self.limits.cgroup_root {
            None => unified(&fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?),
            Some(root) => {
                let mut listed = Vec::new();
                list(root, "", &mut listed);
                let of = |pid: u32| listed.iter().find(|(_, pids)| pids.contains(&pid));
                let mut pid = pid;
                loop {
                    if let Some((cgroup, _)) = of(pid) {
                        return Some(cgroup.clone());
                    }
                    pid = match parent(pid)? {
                        0 | 1 => return Some("/".to_owned()),
                        parent => parent,
                    };
                }
            }
        }
    }

    /// The cgroup with this directory.
    ///
    /// # Errors
    /// If there is no such cgroup, or an ancestor does not enable the controller.
    pub(super) fn resolve(&self, directory: &str) -> Result<String, Refusal> {
        let root = self.limits.root();
        let path = Path::new(directory);
        let below = path.strip_prefix(root).map_err(|_| Refusal::Invalid)?;
        let mut names = below.components();
        if !names.all(|name| matches!(name, Component::Normal(_))) {
            return Err(Refusal::Invalid);
        }
        if !path.is_dir() {
            return Err(Refusal::NotFound);
        }
        if self.limits.backend == MemoryLimitBackend::Dmem {
            let mut ancestors = path.ancestors().skip(1);
            let mut enabled = ancestors
                .by_ref()
                .take_while(|ancestor| ancestor.starts_with(root));
            // The root of the hierarchy has no limits of its own.
            if path == root || !enabled.all(enables) {
                return Err(Refusal::NotSupported);
            }
        }
        Ok(format!("/{}", below.display()))
    }

    /// Whether a cgroup exists.
    pub(super) fn exists(&self, cgroup: &str) -> bool {
        let below = cgroup.trim_start_matches('/');
        self.limits.root().join(below).is_dir()
    }
}

fn enables(ancestor: &Path) -> bool {
    let enabled = fs::read_to_string(ancestor.join("cgroup.subtree_control"));
    enabled.is_ok_and(|enabled| {
        let mut names = enabled.split_whitespace();
        names.any(|name| name.trim_start_matches('+') == CONTROLLER)
    })
}

/// The cgroup of version 2 in `/proc/<pid>/cgroup`.
fn unified(cgroups: &str) -> Option<String> {
    let mut lines = cgroups.lines();
    lines.find_map(|line| line.strip_prefix("0::").map(str::to_owned))
}

/// Processes by cgroup.
fn list(root: &Path, cgroup: &str, listed: &mut Vec<(String, Vec<u32>)>) {
    let directory = root.join(cgroup.trim_start_matches('/'));
    let pids = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    let pids = pids.lines().filter_map(|pid| pid.trim().parse().ok());
    let name = if cgroup.is_empty() { "/" } else { cgroup };
    listed.push((name.to_owned(), pids.collect()));
    let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut names: Vec<PathBuf> = directories.map(|entry| entry.file_name().into()).collect();
    names.sort();
    for name in names {
        list(root, &format!("{cgroup}/{}", name.display()), listed);
    }
}

fn parent(pid: u32) -> Option<u32> {
    field(pid, "PPid:")?.parse().ok()
}

/// Whether a process may administer GPUs: root of one container of many may not, nor root of a user namespace of its own, which has
/// all capabilities in it.
pub(super) fn is_administrator(pid: u32, uid: u32) -> bool {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/user")).ok();
    let is_of_node = namespace("self") == namespace(&pid.to_string());
    let capabilities =
        field(pid, "CapEff:").and_then(|capabilities| u64::from_str_radix(&capabilities, 16).ok());
    uid == 0
        && is_of_node
        && capabilities.is_some_and(|capabilities| capabilities >> SYS_ADMIN & 1 == 1)
}

/// A field of `/proc/<pid>/status`.
fn field(pid: u32, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(backend: MemoryLimitBackend) -> (tempfile::TempDir, Cgroups) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("pods/one/leaf")).unwrap();
        let cgroups = Cgroups::new(MemoryLimits {
            backend,
            cgroup_root: Some(root.path().to_owned()),
        });
        (root, cgroups)
    }

    #[test]
    fn refuses_cgroup_below_an_ancestor_without_the_controller() {
        let (root, cgroups) = tree(MemoryLimitBackend::Dmem);
        let leaf = root.path().join("pods/one/leaf");
        let leaf = leaf.to_str().unwrap();
        for ancestor in ["", "pods", "pods/one"] {
            assert_eq!(cgroups.resolve(leaf), Err(Refusal::NotSupported));
            let file = root.path().join(ancestor).join("cgroup.subtree_control");
            fs::write(file, "cpu +dmem\n").unwrap();
        }
        assert_eq!(cgroups.resolve(leaf).as_deref(), Ok("/pods/one/leaf"));
    }

    #[test]
    fn refuses_what_is_no_cgroup() {
        let (root, cgroups) = tree(MemoryLimitBackend::Misc);
        let at = |path: &str| cgroups.resolve(&format!("{}{path}", root.path().display()));
        assert_eq!(at("/pods/one").as_deref(), Ok("/pods/one"));
        assert_eq!(at("/pods/two"), Err(Refusal::NotFound));
        assert_eq!(at("/pods/../pods"), Err(Refusal::Invalid));
        assert_eq!(cgroups.resolve("/"), Err(Refusal::Invalid));
        assert!(cgroups.exists("/pods") && !cgroups.exists("/gone"));
    }

    #[test]
    fn finds_cgroup_of_process_and_of_its_children() {
        let (root, cgroups) = tree(MemoryLimitBackend::Misc);
        let own = std::process::id();
        assert_eq!(cgroups.of(own).as_deref(), Some("/"));
        let parent = parent(own).unwrap();
        let outer = root.path().join("pods/cgroup.procs");
        fs::write(outer, format!("7\n{parent}\n")).unwrap();
        assert_eq!(cgroups.of(own).as_deref(), Some("/pods"));
        let inner = root.path().join("pods/one/leaf/cgroup.procs");
        fs::write(inner, format!("{own}\n")).unwrap();
        assert_eq!(cgroups.of(own).as_deref(), Some("/pods/one/leaf"));
        assert_eq!(cgroups.of(u32::MAX), None);
    }

    #[test]
    fn reads_only_cgroups_of_version_2() {
        assert_eq!(unified("4:memory:/a\n0::/b\n").as_deref(), Some("/b"));
        assert_eq!(unified("4:memory:/a\n"), None);
    }

    #[test]
    fn only_root_with_the_capability_is_administrator() {
        assert!(!is_administrator(std::process::id(), 1000));
        assert!(!is_administrator(u32::MAX, 0));
    }
}
