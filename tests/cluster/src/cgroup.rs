//! The cluster's cgroup: created by `up`, entered by the nodes, removed by `down`.
//!
//! On the host the cgroup is `drava-<hash>` at the root of the unified hierarchy (v2) or of each controller's hierarchy
//! (v1), with the group `launch` for the processes that start the nodes, and one group per node. The node's cgroup
//! namespace is rooted at its group, and the node mounts its own view of the hierarchies, so kubelet and runc need no
//! setting for it. The host's mounts are never changed.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Signal, kill_process};

/// Group of the processes that start the nodes.
pub(crate) const LAUNCH: &str = "launch";

/// cgroup version and hierarchies of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// cgroup v2 only.
    Unified(PathBuf),
    /// cgroup v1, optionally with an empty v2 hierarchy.
    Split(Vec<Hierarchy>),
}

/// One cgroup v1 hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    mount_point: PathBuf,
    /// Mount options that select the hierarchy: controllers, or `none,name=…`.
    options: String,
}

impl Layout {
    /// Reads the host's layout.
    pub(crate) fn detect() -> Result<Self> {
        let text =
            fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
        Self::parse(&text).context(
            "no cgroup hierarchy is mounted below /sys/fs/cgroup; kubelet needs cgroup v2, or cgroup v1 with the memory controller",
        )
    }

    fn parse(mountinfo: &str) -> Option<Self> {
        let mut split = vec![];
        for line in mountinfo.lines() {
            let (mount, source) = line.split_once(" - ")?;
            let mount_point = PathBuf::from(mount.split(' ').nth(4)?);
            let mut source = source.split(' ');
            let (kind, options) = (source.next()?, source.nth(1).unwrap_or_default());
            match kind {
                "cgroup2" if mount_point == Path::new("/sys/fs/cgroup") => {
                    return Some(Self::Unified(mount_point));
                }
                "cgroup" if mount_point.starts_with("/sys/fs/cgroup") => {
                    split.push(Hierarchy {
                        mount_point,
                        options: mount_options(options),
                    });
                }
                _ => {}
            }
        }
        split
            .iter()
            .any(|hierarchy| {
                hierarchy
                    .options
                    .split(',')
                    .any(|option| option == "memory")
            })
            .then_some(Self::Split(split))
    }

    fn roots(&self) -> Vec<&Path> {
        match self {
            Self::Unified(root) => vec![root],
            Self::Split(hierarchies) => hierarchies
                .iter()
                .map(|hierarchy| hierarchy.mount_point.as_path())
                .collect(),
        }
    }

    /// Creates the cgroup `name` with the group [`LAUNCH`] and one group per node, and enables all controllers in them.
    pub(crate) fn create(&self, name: &str, nodes: &[String]) -> Result<()> {
        for root in self.roots() {
            let ours = root.join(name);
            let groups = nodes.iter().map(|node| ours.join(node));
            for dir in [ours.clone(), ours.join(LAUNCH)].into_iter().chain(groups) {
                if let Err(error) = fs::create_dir(&dir)
                    && error.kind() != ErrorKind::AlreadyExists
                {
                    return Err(error)
                        .with_context(|| format!("create the cgroup {}", dir.display()));
                }
                match self {
                    Self::Unified(_) => {}
                    Self::Split(_) => inherit_cpuset(&dir)?,
                }
            }
            if let Self::Unified(root) = self {
                delegate(root)?;
                delegate(&ours)?;
            }
        }
        Ok(())
    }

    /// Moves this process into the group `group` of the cgroup `name`.
    pub(crate) fn enter(&self, name: &str, group: &str) -> Result<()> {
        for root in self.roots() {
            let procs = root.join(name).join(group).join("cgroup.procs");
            // 0 means the writing process.
            fs::write(&procs, "0")
                .with_context(|| format!("enter the cgroup {}", procs.display()))?;
        }
        Ok(())
    }

    /// Mounts the hierarchies at `target`, as seen from this process's cgroup namespace.
    pub(crate) fn mount(&self, target: &Path) -> Result<()> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        match self {
            Self::Unified(_) => {
                mount("cgroup2", target, "cgroup2", flags, None).context("mount cgroup2")?;
                // A group with processes cannot enable controllers for its children, so the node's init moves to a
                // leaf.
                let leaf = target.join("init");
                fs::create_dir_all(&leaf).context("create the node's init cgroup")?;
                fs::write(leaf.join("cgroup.procs"), "0")
                    .context("enter the node's init cgroup")?;
                delegate(target)
            }
            Self::Split(hierarchies) => {
                mount("cgroup", target, "tmpfs", flags, Some(c"mode=755"))
                    .context("mount a tmpfs for cgroups")?;
                for hierarchy in hierarchies {
                    let name = hierarchy
                        .mount_point
                        .file_name()
                        .context("a cgroup mounted at /")?;
                    let dir = target.join(name);
                    fs::create_dir(&dir).with_context(|| format!("create {}", dir.display()))?;
                    let options = std::ffi::CString::new(hierarchy.options.as_str())?;
                    mount("cgroup", &dir, "cgroup", flags, Some(options.as_c_str())).with_context(
                        || format!("mount the cgroup hierarchy {}", hierarchy.options),
                    )?;
                }
                link_controllers(target, hierarchies)
            }
        }
    }

    /// Returns whether the cgroup `name` exists.
    pub(crate) fn exists(&self, name: &str) -> bool {
        self.roots().iter().any(|root| root.join(name).exists())
    }

    /// Kills every process in the cgroup `name` and removes the cgroup. Succeeds if the cgroup does not exist.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        for root in self.roots() {
            let ours = root.join(name);
            let deadline = Instant::now() + Duration::from_secs(20);
            while ours.exists() {
                kill_members(&ours);
                if remove_tree(&ours).is_ok() {
                    break;
                }
                if Instant::now() > deadline {
                    bail!(
                        "cannot remove the cgroup {}: its processes survive SIGKILL",
                        ours.display()
                    );
                }
                sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }
}

/// Returns the super block's options that select the hierarchy at mount time.
fn mount_options(super_options: &str) -> String {
    let ignored = [
        "rw",
        "ro",
        "xattr",
        "clone_children",
        "noprefix",
        "cpuset_v2_mode",
    ];
    let selecting: Vec<_> = super_options
        .split(',')
        .filter(|option| !ignored.contains(option) && !option.starts_with("release_agent="))
        .collect();
    match selecting.iter().any(|option| option.starts_with("name=")) {
        true => format!("none,{}", selecting.join(",")),
        false => selecting.join(","),
    }
}

/// Links each controller of a shared hierarchy (`cpu,cpuacct`) under its own name.
fn link_controllers(target: &Path, hierarchies: &[Hierarchy]) -> Result<()> {
    for hierarchy in hierarchies
        .iter()
        .filter(|hierarchy| !hierarchy.options.contains("name="))
    {
        let dir = hierarchy
            .mount_point
            .file_name()
            .context("a cgroup mounted at /")?;
        for controller in hierarchy.options.split(',') {
            let link = target.join(controller);
            if !link.exists() {
                std::os::unix::fs::symlink(dir, &link)
                    .with_context(|| format!("link {}", link.display()))?;
            }
        }
    }
    Ok(())
}

/// Copies the parent's processors and memory nodes: a new v1 cpuset has neither and accepts no process without them.
fn inherit_cpuset(dir: &Path) -> Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let (ours, parents) = (dir.join(file), dir.parent().unwrap_or(dir).join(file));
        if ours.exists() && fs::read_to_string(&ours).is_ok_and(|text| text.trim().is_empty()) {
            let text = fs::read_to_string(&parents)
                .with_context(|| format!("read {}", parents.display()))?;
            fs::write(&ours, text.trim()).with_context(|| format!("write {}", ours.display()))?;
        }
    }
    Ok(())
}

/// Enables every controller of `dir` for its children (v2).
fn delegate(dir: &Path) -> Result<()> {
    let available = dir.join("cgroup.controllers");
    let text =
        fs::read_to_string(&available).with_context(|| format!("read {}", available.display()))?;
    let control = dir.join("cgroup.subtree_control");
    let handed =
        fs::read_to_string(&control).with_context(|| format!("read {}", control.display()))?;
    for controller in text
        .split_whitespace()
        .filter(|name| !handed.split_whitespace().any(|known| known == *name))
    {
        fs::write(&control, format!("+{controller}")).with_context(|| {
            format!(
                "hand the {controller} controller down in {} (where processes of others live in that very cgroup, as in a \
                 container without a cgroup of its own, move them to a child first)",
                dir.display()
            )
        })?;
    }
    Ok(())
}

fn subgroups(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

fn kill_members(dir: &Path) {
    for child in subgroups(dir) {
        kill_members(&child);
    }
    for line in fs::read_to_string(dir.join("cgroup.procs"))
        .unwrap_or_default()
        .lines()
    {
        if let Some(pid) = line.parse().ok().and_then(Pid::from_raw) {
            // The process may have ended already; the next round kills the remaining ones.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

fn remove_tree(dir: &Path) -> std::io::Result<()> {
    for child in subgroups(dir) {
        remove_tree(&child)?;
    }
    fs::remove_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_unified_hierarchy() {
        let mountinfo = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n22 27 0:21 / /proc rw - proc proc rw\n";
        assert_eq!(
            Layout::parse(mountinfo),
            Some(Layout::Unified("/sys/fs/cgroup".into()))
        );
    }

    #[test]
    fn recognizes_v1_hierarchies_with_empty_v2() {
        let mountinfo = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,release_agent=/lib/agent,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
        let Some(Layout::Split(hierarchies)) = Layout::parse(mountinfo) else {
            panic!("split")
        };
        let options: Vec<_> = hierarchies
            .iter()
            .map(|hierarchy| hierarchy.options.as_str())
            .collect();
        assert_eq!(options, ["cpu,cpuacct", "memory", "none,name=systemd"]);
    }

    #[test]
    fn rejects_host_without_cgroups() {
        assert_eq!(
            Layout::parse("22 27 0:21 / /proc rw,relatime - proc proc rw\n"),
            None
        );
    }

    #[test]
    fn enables_only_missing_controllers() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory pids\n").unwrap();
        fs::write(dir.path().join("cgroup.subtree_control"), "cpu memory\n").unwrap();
        delegate(dir.path()).unwrap();
        // The kernel adds a controller per write; a plain file keeps the last write.
        assert_eq!(
            fs::read_to_string(dir.path().join("cgroup.subtree_control")).unwrap(),
            "+pids"
        );
    }
}
