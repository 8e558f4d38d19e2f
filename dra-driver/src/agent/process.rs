//! Which container a process on a card belongs to, and how it appears in a slot. Reads `/proc`.
//!
//! NVML gives PIDs of the host, a slot has the PID of the container's namespace: `/proc/<pid>` has both. The shares of a
//! container are the limits directories that are mounted in it. A process that has moved itself to where these mounts
//! are not seen still is in the container's cgroup, and has the shares of the others there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::paths;

/// A process as `/proc` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// How it appears in a slot.
    pub owner: Owner,
    /// Name of its program.
    pub name: String,
    /// IDs of the shares that its container has.
    pub shares: Vec<String>,
}

/// Reads `/proc`, and remembers what cannot change about a process.
#[derive(Debug)]
pub struct Processes {
    root: PathBuf,
    /// By PID; the start time in the owner tells one that has the PID of a dead one.
    known: BTreeMap<u32, Described>,
}

impl Processes {
    /// Below `root`, which is `/proc`.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self {
            root,
            known: BTreeMap::new(),
        }
    }

    /// Forgets all but these.
    pub fn retain(&mut self, pids: &[u32]) {
        self.known.retain(|pid, _| pids.contains(pid));
    }

    /// The process with this PID; `None` when it is gone.
    pub fn describe(&mut self, pid: u32) -> Option<Described> {
        let dir = self.root.join(pid.to_string());
        let (name, start_time) = parse_stat(&fs::read_to_string(dir.join("stat")).ok()?)?;
        if let Some(known) = self.known.get(&pid)
            && known.owner.start_time == start_time
            && !known.shares.is_empty()
        {
            return Some(known.clone());
        }
        let owner = Owner {
            pid: innermost_pid(&fs::read_to_string(dir.join("status")).ok()?)?,
            start_time,
            pid_namespace: fs::metadata(dir.join("ns/pid")).ok()?.ino(),
        };
        let mut shares = mounted_shares(&dir);
        if shares.is_empty() {
            shares = self.shares_of_cgroup(&dir);
        }
        let described = Described {
            owner,
            name,
            shares,
        };
        self.known.insert(pid, described.clone());
        Some(described)
    }

    fn shares_of_cgroup(&self, dir: &Path) -> Vec<String> {
        let cgroup = |dir: &Path| fs::read_to_string(dir.join("cgroup")).ok();
        // Outside of pods a cgroup has all sorts of processes.
        let Some(own) = cgroup(dir).filter(|path| path.contains("kubepods")) else {
            return Vec::new();
        };
        let Ok(entries) = fs::read_dir(&self.root) else {
            return Vec::new();
        };
        entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|other| {
                other
                    .file_name()
                    .is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit))
            })
            .filter(|other| cgroup(other).as_ref() == Some(&own))
            .map(|other| mounted_shares(&other))
            .find(|shares| !shares.is_empty())
            .unwrap_or_default()
    }
}

/// Name and start time of `/proc/<pid>/stat`. The name may contain anything, parentheses too.
fn parse_stat(stat: &str) -> Option<(String, u64)> {
    let (head, fields) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let start_time = fields.split_ascii_whitespace().nth(19)?.parse().ok()?;
    Some((name.to_owned(), start_time))
}

/// PID in the innermost namespace.
fn innermost_pid(status: &str) -> Option<u32> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

fn mounted_shares(dir: &Path) -> Vec<String> {
    fs::read_to_string(dir.join("mountinfo"))
        .map(|mounts| parse_mounts(&mounts))
        .unwrap_or_default()
}

/// Shares whose limits directory is mounted. The mount point is the fifth field.
fn parse_mounts(mounts: &str) -> Vec<String> {
    let share = |line: &str| {
        let point = line.split_ascii_whitespace().nth(4)?;
        let below = point.strip_prefix(paths::RUN_DIR)?.strip_prefix('/')?;
        let (share, rest) = below.split_once('/')?;
        (rest == paths::LIMITS_DIR).then(|| share.to_owned())
    };
    let mut shares: Vec<String> = mounts.lines().filter_map(share).collect();
    shares.sort();
    shares.dedup();
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_do_not_shift_the_fields() {
        let stat = "7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(parse_stat(stat), Some(("a) b (c)".to_owned(), 4711)));
        assert_eq!(parse_stat("7"), None);
    }

    #[test]
    fn the_pid_of_the_container_is_the_last_one() {
        assert_eq!(innermost_pid("Name:\tx\nNSpid:\t4242\t17\t1\n"), Some(1));
        assert_eq!(innermost_pid("Name:\tx\n"), None);
    }

    #[test]
    fn shares_are_the_mounted_limits_directories() {
        let mounts = "30 1 0:5 / / rw - overlay o rw\n\
            31 30 8:1 /var/lib/drava/claims/u/s1/limits /run/drava/s1/limits ro - ext4 /dev/sda rw\n\
            32 30 0:9 / /run/drava/s1/usage rw - tmpfs tmpfs rw\n\
            33 30 8:1 / /data/run/drava/s2/limits ro - ext4 /dev/sda rw\n";
        assert_eq!(parse_mounts(mounts), ["s1"]);
    }

    #[test]
    fn this_process_is_described_as_libvgpu_would_write_it() {
        let own = Processes::new("/proc".into())
            .describe(std::process::id())
            .unwrap();
        assert_ne!((own.owner.start_time, own.owner.pid_namespace), (0, 0));
        assert_eq!(own.shares, Vec::<String>::new());
        assert_eq!(Processes::new("/proc".into()).describe(u32::MAX), None);
    }

    #[test]
    fn a_process_that_hides_its_mounts_is_found_by_its_cgroup() {
        let root = tempfile::tempdir().unwrap();
        for (pid, mounts) in [
            (10, "1 1 8:1 /x /run/drava/s1/limits ro"),
            (11, "1 1 8:1 / / rw"),
        ] {
            let dir = root.path().join(pid.to_string());
            fs::create_dir_all(dir.join("ns")).unwrap();
            fs::write(dir.join("stat"), format!("{pid} (x) {}", "1 ".repeat(30))).unwrap();
            fs::write(dir.join("status"), format!("NSpid:\t{pid}\t2\n")).unwrap();
            fs::write(dir.join("ns/pid"), "").unwrap();
            fs::write(dir.join("mountinfo"), mounts).unwrap();
            fs::write(dir.join("cgroup"), "0::/kubepods.slice/pod1/c1\n").unwrap();
        }
        let mut processes = Processes::new(root.path().to_owned());
        assert_eq!(processes.describe(11).unwrap().shares, ["s1"]);
        fs::write(
            root.path().join("11/cgroup"),
            "0::/kubepods.slice/pod2/c1\n",
        )
        .unwrap();
        let mut processes = Processes::new(root.path().to_owned());
        assert!(processes.describe(11).unwrap().shares.is_empty());
        // Outside of pods a cgroup says nothing.
        for pid in ["10", "11"] {
            fs::write(root.path().join(pid).join("cgroup"), "0::/system.slice\n").unwrap();
        }
        let mut processes = Processes::new(root.path().to_owned());
        assert!(processes.describe(11).unwrap().shares.is_empty());
    }

    #[test]
    fn a_pid_that_is_used_again_is_another_process() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("10");
        fs::create_dir_all(dir.join("ns")).unwrap();
        let stat = |start: &str| format!("10 (x) {} {start} 0", "1 ".repeat(19).trim());
        fs::write(dir.join("stat"), stat("500")).unwrap();
        fs::write(dir.join("status"), "NSpid:\t10\t2\n").unwrap();
        fs::write(dir.join("ns/pid"), "").unwrap();
        fs::write(dir.join("mountinfo"), "1 1 8:1 /x /run/drava/s1/limits ro").unwrap();
        let mut processes = Processes::new(root.path().to_owned());
        assert_eq!(processes.describe(10).unwrap().shares, ["s1"]);
        fs::write(dir.join("stat"), stat("600")).unwrap();
        fs::write(dir.join("mountinfo"), "1 1 8:1 /x /run/drava/s2/limits ro").unwrap();
        let other = processes.describe(10).unwrap();
        assert_eq!(
            (other.owner.start_time, other.shares),
            (600, vec!["s2".to_owned()])
        );
    }
}
