//! Which container a process on a GPU belongs to, and how it appears in a slot. Reads `/proc`.
//!
//! NVML gives PIDs of the host, a slot has the PID of the container's namespace: `/proc/<pid>` has both. The shares of a
//! container are the limits directories that are mounted in it, see [`crate::node::mounts`]. A process in a mount namespace
//! without these mounts still is in the container's cgroup or below it, and has the shares of the other processes there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drava_vgpu_abi::ledger::Owner;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::node::mounts::{ClaimsMount, MountedShare};

/// A process as `/proc` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessInfo {
    /// How it appears in a slot.
    pub owner: Owner,
    /// Name of its program.
    pub name: String,
    /// Shares that its container has.
    pub shares: Vec<MountedShare>,
}

/// Reads `/proc`, and remembers what cannot change about a process.
#[derive(Debug)]
pub struct Processes {
    root: PathBuf,
    claims: PathBuf,
    /// Mount of `claims`, once located.
    mount: Option<ClaimsMount>,
    /// By PID; the start time in the owner tells one that has the PID of a dead one.
    known: BTreeMap<u32, ProcessInfo>,
    ending: Ending,
}

/// Processes that are about to be killed at a time, each on a thread.
const MAX_ENDING: usize = 32;

/// Processes that are about to be killed.
type Ending = Arc<Mutex<BTreeSet<u32>>>;

impl Processes {
    /// Below `root`, which is `/proc`, with the shares of the claims in the directory `claims`.
    #[must_use]
    pub fn new(root: PathBuf, claims: PathBuf) -> Self {
        Self {
            root,
            claims,
            mount: None,
            known: BTreeMap::new(),
            ending: Ending::default(),
        }
    }

    /// Forgets all but these.
    pub fn retain(&mut self, pids: &[u32]) {
        self.known.retain(|pid, _| pids.contains(pid));
    }

    /// The process with this PID; `None` when it is gone.
    pub fn describe(&mut self, pid: u32) -> Option<ProcessInfo> {
        let (_, start_time) = self.identity(pid)?;
        if let Some(known) = self.known.get(&pid)
            && known.owner.start_time == start_time
        {
            return Some(known.clone());
        }
        let (described, is_certain) = self.read(pid)?;
        // A process without shares is remembered too: to find none, all of `/proc` is read.
        if is_certain {
            self.known.insert(pid, described.clone());
        }
        Some(described)
    }

    /// As [`describe`](Self::describe), without memory of an earlier description.
    pub fn describe_again(&mut self, pid: u32) -> Option<ProcessInfo> {
        self.read(pid).map(|(described, _)| described)
    }

    /// Reads the files of a process. Also returns whether its shares are certain: a process whose mounts cannot be read at present
    /// may have some.
    fn read(&mut self, pid: u32) -> Option<(ProcessInfo, bool)> {
        let (name, start_time) = self.identity(pid)?;
        let dir = self.root.join(pid.to_string());
        let owner = Owner {
            pid: innermost_pid(&fs::read_to_string(dir.join("status")).ok()?)?,
            start_time,
            pid_namespace: fs::metadata(dir.join("ns/pid")).ok()?.ino(),
        };
        let mounted = self.mounted_shares(&dir);
        let is_read = mounted.is_some();
        let mut shares = mounted.unwrap_or_default();
        if shares.is_empty() {
            shares = self.shares_of_cgroup(&dir);
        }
        let is_certain = is_read || !shares.is_empty();
        let described = ProcessInfo {
            owner,
            name,
            shares,
        };
        Some((described, is_certain))
    }

    /// Returns the description of a process when it was last described; `None` if it never was, or is forgotten.
    #[must_use]
    pub fn last(&self, pid: u32) -> Option<&ProcessInfo> {
        self.known.get(&pid)
    }

    /// Returns the processes of the containers that have a share; `None` if they cannot be found.
    pub fn with_share(&mut self, share: &MountedShare) -> Option<Vec<u32>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.root).ok()? {
            let Ok(entry) = entry else { continue };
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let dir = entry.path();
            let mounted = self.mounted_shares(&dir);
            let has_share = mounted.is_some_and(|shares| shares.contains(share));
            all.push((pid, has_share, container_of(&dir)));
        }
        self.mount.as_ref()?;
        let sharing = all.iter().filter(|(_, has_share, _)| *has_share);
        let containers: BTreeSet<String> = sharing
            .filter_map(|(.., container)| container.clone())
            .collect();
        let is_member = |(_, has_share, container): &(u32, bool, Option<String>)| {
            let container = container.as_ref();
            *has_share || container.is_some_and(|container| containers.contains(container))
        };
        let members = all.into_iter().filter(is_member);
        Some(members.map(|(pid, ..)| pid).collect())
    }

    /// Kills the process `pid` if `is_target` accepts its description. Returns whether the signal was sent.
    ///
    /// The pidfd is opened before the description is read: it stays with one process, so a process that gets the PID
    /// later is never killed.
    pub fn kill(&mut self, pid: u32, is_target: impl FnOnce(&ProcessInfo) -> bool) -> bool {
        open(pid).is_some_and(|process| {
            self.describe_again(pid)
                .is_some_and(|described| is_target(&described))
                && pidfd_send_signal(process, Signal::KILL).is_ok()
        })
    }

    /// Kills a process like [`Self::kill`], but on a thread and after `before`, which may take a while; at once and without it where
    /// [`MAX_ENDING`] others wait, or no thread can start. Returns whether it will be killed; `false` while an earlier call is about to.
    pub fn kill_after(
        &mut self,
        pid: u32,
        is_target: impl FnOnce(&ProcessInfo) -> bool,
        before: impl FnOnce() + Send + 'static,
    ) -> bool {
        let Some(process) = open(pid) else {
            return false;
        };
        let described = self.describe_again(pid);
        if !described.is_some_and(|described| is_target(&described)) {
            return false;
        }
        let process = Arc::new(process);
        // Fails only for a process that has ended.
        let kill = |process: &OwnedFd| {
            let _ = pidfd_send_signal(process, Signal::KILL);
        };
        let Some(entry) = EndingEntry::new(&self.ending, pid) else {
            return false;
        };
        let (is_full, opened) = (entry.number > MAX_ENDING, Arc::clone(&process));
        let wait_and_kill = move || {
            before();
            kill(&opened);
            drop(entry);
        };
        if is_full || std::thread::Builder::new().spawn(wait_and_kill).is_err() {
            kill(&process);
        }
        true
    }

    /// Returns the start time of a process, clock ticks since boot.
    #[must_use]
    pub fn start_time(&self, pid: u32) -> Option<u64> {
        start_time(&self.root, pid)
    }

    /// Returns the name and the start time of a process.
    fn identity(&self, pid: u32) -> Option<(String, u64)> {
        identity(&self.root, pid)
    }

    /// Returns the shares in the mounts of a process; `None` if they cannot be read.
    fn mounted_shares(&mut self, dir: &Path) -> Option<Vec<MountedShare>> {
        if self.mount.is_none() {
            self.mount = ClaimsMount::locate(&self.claims)
                .inspect_err(|error| {
                    tracing::warn!(%error, "cannot locate the claims directory; no process is attributed to a share");
                })
                .ok();
        }
        let mount = self.mount.as_ref()?;
        let mounts = fs::read_to_string(dir.join("mountinfo")).ok()?;
        Some(mount.shares(&mounts).into_iter().collect())
    }

    fn shares_of_cgroup(&mut self, dir: &Path) -> Vec<MountedShare> {
        // Outside of pods a cgroup has all sorts of processes.
        let Some(own) = container_of(dir) else {
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
            .filter(|other| container_of(other).as_ref() == Some(&own))
            .filter_map(|other| self.mounted_shares(&other))
            .find(|shares| !shares.is_empty())
            .unwrap_or_default()
    }
}

/// Returns the cgroup of the container of the process with this directory in `/proc`; `None` outside of pods.
fn container_of(dir: &Path) -> Option<String> {
    let cgroups = fs::read_to_string(dir.join("cgroup")).ok()?;
    container_cgroup(&cgroups).map(str::to_owned)
}

/// Returns the cgroup of the container in `/proc/<pid>/cgroup`; `None` outside of pods. A program in the container, such as
/// systemd or a container runtime, may have created cgroups below it.
///
/// In a cgroup namespace of its own, the node driver reads paths that begin at its own cgroup, which is in a pod: `/../..` leads
/// to the pods of the same quality of service.
pub(crate) fn container_cgroup(cgroups: &str) -> Option<&str> {
    cgroups.lines().find_map(|line| {
        // `<hierarchy>:<controllers>:<path>`
        let path = line.splitn(3, ':').nth(2)?;
        let mut end = 0;
        let (mut is_in_kubepods, mut is_in_pod) = (false, false);
        let is_relative = path.starts_with("/..");
        for part in path.split_inclusive('/') {
            end += part.len();
            let name = part.trim_end_matches('/');
            if is_in_pod {
                return path.get(..end).map(|path| path.trim_end_matches('/'));
            }
            // With systemd, a name begins with those of all slices above, also with the kubelet's `cgroupRoot`.
            is_in_kubepods |= name.starts_with("kubepods") || name.contains("-kubepods");
            // `pod<uid>`, with systemd `kubepods-<class>-pod<uid>.slice`.
            is_in_pod = is_in_kubepods && (name.starts_with("pod") || name.contains("-pod"));
            is_in_pod |= is_relative && is_pod(name);
        }
        None
    })
}

/// Returns whether a cgroup has the name of a pod's, `pod` and a UID. Those of podman begin in the same way.
fn is_pod(name: &str) -> bool {
    let is_of_uid = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
    let uid = name.strip_prefix("pod");
    uid.is_some_and(|uid| uid.len() >= 32 && uid.bytes().all(is_of_uid))
}

fn lock_ending(ending: &Ending) -> MutexGuard<'_, BTreeSet<u32>> {
    ending.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process among those that are about to be killed, until this is dropped.
struct EndingEntry {
    ending: Ending,
    pid: u32,
    /// How many there are with it.
    number: usize,
}

impl EndingEntry {
    /// Adds a process; `None` if it is there already.
    fn new(ending: &Ending, pid: u32) -> Option<Self> {
        let mut pids = lock_ending(ending);
        let is_new = pids.insert(pid);
        let number = pids.len();
        drop(pids);
        is_new.then(|| Self {
            ending: Arc::clone(ending),
            pid,
            number,
        })
    }
}

impl Drop for EndingEntry {
    fn drop(&mut self) {
        lock_ending(&self.ending).remove(&self.pid);
    }
}

/// Opens a process; `None` if it has ended.
fn open(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Returns the start time of a process, clock ticks since boot.
#[must_use]
pub fn start_time(proc_root: &Path, pid: u32) -> Option<u64> {
    let (_, start_time) = identity(proc_root, pid)?;
    Some(start_time)
}

/// Returns whether a process that was started at this time still runs. One that has ended but is not yet waited for does not.
#[must_use]
pub fn runs(proc_root: &Path, pid: u32, started_at: u64) -> bool {
    // One read: the process may go between two.
    fs::read_to_string(proc_root.join(pid.to_string()).join("stat"))
        .is_ok_and(|stat| stat_runs(&stat, started_at))
}

fn stat_runs(stat: &str, started_at: u64) -> bool {
    let is_same = parse_stat(stat).is_some_and(|(_, start_time)| start_time == started_at);
    let state = stat.rsplit_once(')').map(|(_, state)| state.trim_start());
    is_same && state.is_some_and(|state| !state.starts_with(['Z', 'X']))
}

/// Returns the name of a process, at most 15 bytes of it; `None` if it has ended.
#[must_use]
pub fn running_name(proc_root: &Path, pid: u32) -> Option<String> {
    let stat = fs::read_to_string(proc_root.join(pid.to_string()).join("stat")).ok()?;
    let (name, start_time) = parse_stat(&stat)?;
    stat_runs(&stat, start_time).then_some(name)
}

/// Returns whether a thread of the process is in uninterruptible sleep, as while it waits for a device or a file system.
#[must_use]
pub fn is_uninterruptible(proc_root: &Path, pid: u32) -> bool {
    let process = proc_root.join(pid.to_string());
    let threads = fs::read_dir(process.join("task"));
    let threads = threads.into_iter().flatten().flatten();
    let mut all = threads
        .map(|thread| thread.path())
        .chain(std::iter::once(process));
    all.any(|dir| {
        let stat = fs::read_to_string(dir.join("stat")).unwrap_or_default();
        let state = stat.rsplit_once(')').map(|(_, state)| state.trim_start());
        state.is_some_and(|state| state.starts_with('D'))
    })
}

fn identity(proc_root: &Path, pid: u32) -> Option<(String, u64)> {
    let stat = proc_root.join(pid.to_string()).join("stat");
    parse_stat(&fs::read_to_string(stat).ok()?)
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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn names_with_parentheses_do_not_shift_the_fields() {
        let stat = "7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(parse_stat(stat), Some(("a) b (c)".to_owned(), 4711)));
        assert_eq!(parse_stat("7"), None);
    }

    #[test]
    fn process_that_has_ended_does_not_run() {
        let stat = |state: &str| format!("7 (a) {state} {}4711 20", "1 ".repeat(18));
        for (state, runs) in [("R", true), ("D", true), ("Z", false), ("X", false)] {
            assert_eq!(stat_runs(&stat(state), 4711), runs, "{state}");
            assert!(
                !stat_runs(&stat(state), 4712),
                "another process has its PID"
            );
        }
        // Also while it is waited for.
        let root = Path::new("/proc");
        for _ in 0..50 {
            let mut child = Command::new("sleep").arg("60").spawn().unwrap();
            let pid = child.id();
            let started_at = start_time(root, pid).unwrap();
            assert!(runs(root, pid, started_at));
            child.kill().unwrap();
            let waited = std::thread::spawn(move || child.wait());
            while runs(root, pid, started_at) {}
            while !waited.is_finished() {
                assert!(!runs(root, pid, started_at));
            }
            assert!(!runs(root, pid, started_at));
        }
    }

    #[test]
    fn kills_once_and_only_after_what_is_to_be_done_before() {
        let dir = tempfile::tempdir().unwrap();
        let mut processes = Processes::new("/proc".into(), dir.path().to_owned());
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        let (start, started) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        assert!(!processes.kill_after(pid, |_| false, || unreachable!()));
        let before = move || {
            start.send(()).unwrap();
            let _ = released.recv();
        };
        assert!(processes.kill_after(pid, |_| true, before));
        started.recv().unwrap();
        // While the first one is not over.
        assert!(!processes.kill_after(pid, |_| true, || unreachable!()));
        assert!(child.try_wait().unwrap().is_none(), "killed too early");
        release.send(()).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9)
        );
    }

    #[test]
    fn the_pid_of_the_container_is_the_last_one() {
        assert_eq!(innermost_pid("Name:\tx\nNSpid:\t4242\t17\t1\n"), Some(1));
        assert_eq!(innermost_pid("Name:\tx\n"), None);
    }

    const SHARES: [&str; 2] = [
        "00000000-0000-4000-8000-000000000001",
        "00000000-0000-4000-8000-000000000002",
    ];

    fn processes_of(root: &Path) -> Processes {
        Processes::new(root.to_owned(), root.join("claims"))
    }

    /// Returns a mountinfo with a share of a node whose claims are in `root`.
    fn mounts(root: &Path, share: &str) -> String {
        fs::create_dir_all(root.join("claims")).unwrap();
        let (device, claims) = ClaimsMount::locate(&root.join("claims"))
            .unwrap()
            .into_parts();
        format!(
            "1 1 {device} {}/u/{share}/limits /run/drava/x ro",
            claims.display()
        )
    }

    fn share_ids(described: &ProcessInfo) -> Vec<&str> {
        let shares = described.shares.iter();
        shares.map(|mounted| mounted.share.as_str()).collect()
    }

    #[test]
    fn this_process_is_described_as_libvgpu_would_write_it() {
        let mut processes = Processes::new("/proc".into(), "/tmp".into());
        let own = processes.describe(std::process::id()).unwrap();
        assert_ne!((own.owner.start_time, own.owner.pid_namespace), (0, 0));
        assert_eq!(own.shares, []);
        assert_eq!(processes.describe(u32::MAX), None);
    }

    #[test]
    fn a_process_that_hides_its_mounts_is_found_by_its_cgroup() {
        let root = tempfile::tempdir().unwrap();
        for (pid, mounts) in [
            (10, mounts(root.path(), SHARES[0])),
            (11, "1 1 8:1 / / rw".to_owned()),
        ] {
            let dir = root.path().join(pid.to_string());
            fs::create_dir_all(dir.join("ns")).unwrap();
            fs::write(dir.join("stat"), format!("{pid} (x) {}", "1 ".repeat(30))).unwrap();
            fs::write(dir.join("status"), format!("NSpid:\t{pid}\t2\n")).unwrap();
            fs::write(dir.join("ns/pid"), "").unwrap();
            fs::write(dir.join("mountinfo"), mounts).unwrap();
            fs::write(dir.join("cgroup"), "0::/kubepods.slice/pod1/c1\n").unwrap();
        }
        let mut processes = processes_of(root.path());
        assert_eq!(share_ids(&processes.describe(11).unwrap()), [SHARES[0]]);
        fs::write(
            root.path().join("11/cgroup"),
            "0::/kubepods.slice/pod2/c1\n",
        )
        .unwrap();
        let mut processes = processes_of(root.path());
        assert!(processes.describe(11).unwrap().shares.is_empty());
        // Outside of pods a cgroup says nothing.
        for pid in ["10", "11"] {
            fs::write(root.path().join(pid).join("cgroup"), "0::/system.slice\n").unwrap();
        }
        let mut processes = processes_of(root.path());
        assert!(processes.describe(11).unwrap().shares.is_empty());
    }

    #[test]
    fn finds_container_of_nested_cgroups() {
        for (cgroups, container) in [
            (
                "0::/kubepods.slice/pod1/c1\n",
                Some("/kubepods.slice/pod1/c1"),
            ),
            (
                "0::/kubepods/burstable/pod1/c1/docker/c2\n",
                Some("/kubepods/burstable/pod1/c1"),
            ),
            (
                "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-c1.scope/init.scope\n",
                Some(
                    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-c1.scope",
                ),
            ),
            // systemd repeats the kubelet's `cgroupRoot` in each name, as in kind.
            (
                "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod1.slice/cri-c1.scope\n",
                Some(
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod1.slice/cri-c1.scope",
                ),
            ),
            (
                "0::/../../kubelet-kubepods-pod1.slice/cri-c1.scope\n",
                Some("/../../kubelet-kubepods-pod1.slice/cri-c1.scope"),
            ),
            ("0::/kubelet.slice/kubelet-kubepods.slice/c1\n", None),
            (
                "12:devices:/kubepods/pod1/c1/kubepods/pod2/c3\n1:name=systemd:/\n",
                Some("/kubepods/pod1/c1"),
            ),
            // From the cgroup namespace of the node driver's container.
            (
                "0::/../../pod6c8a6d24-1c1e-4a53-9a0f-0e6a2f3b9c11/c1/init.scope\n",
                Some("/../../pod6c8a6d24-1c1e-4a53-9a0f-0e6a2f3b9c11/c1"),
            ),
            (
                "0::/../../kubepods-besteffort-pod1.slice/cri-c1.scope\n",
                Some("/../../kubepods-besteffort-pod1.slice/cri-c1.scope"),
            ),
            ("0::/../../../../system.slice/podman-auto.scope/c1\n", None),
            ("0::/kubepods.slice/pod1\n", None),
            ("0::/system.slice/podman.service/c1\n", None),
            ("0::/\n", None),
            ("", None),
        ] {
            assert_eq!(container_cgroup(cgroups), container, "{cgroups}");
        }
    }

    /// Writes the files of a process in `/proc`.
    fn add_process(root: &Path, pid: u32, mounts: &str, cgroup: &str) {
        let dir = root.join(pid.to_string());
        fs::create_dir_all(dir.join("ns")).unwrap();
        fs::write(dir.join("stat"), format!("{pid} (x) {}", "1 ".repeat(30))).unwrap();
        fs::write(dir.join("status"), format!("NSpid:\t{pid}\t2\n")).unwrap();
        fs::write(dir.join("ns/pid"), "").unwrap();
        fs::write(dir.join("mountinfo"), mounts).unwrap();
        fs::write(dir.join("cgroup"), format!("0::{cgroup}\n")).unwrap();
    }

    #[test]
    fn finds_shares_of_process_in_nested_cgroup() {
        let root = tempfile::tempdir().unwrap();
        let other = "1 1 8:1 / / rw";
        let shown = mounts(root.path(), SHARES[0]);
        add_process(root.path(), 10, &shown, "/kubepods/pod1/c1/init.scope");
        add_process(root.path(), 11, other, "/kubepods/pod1/c1/docker/c9");
        add_process(root.path(), 12, other, "/kubepods/pod1/c2");
        let mut processes = processes_of(root.path());
        assert_eq!(share_ids(&processes.describe(11).unwrap()), [SHARES[0]]);
        assert!(processes.describe(12).unwrap().shares.is_empty());
    }

    #[test]
    fn finds_all_processes_of_containers_with_share() {
        let root = tempfile::tempdir().unwrap();
        let other = "1 1 8:1 / / rw";
        let shown = mounts(root.path(), SHARES[0]);
        add_process(root.path(), 10, &shown, "/kubepods/pod1/c1");
        add_process(root.path(), 11, other, "/kubepods/pod1/c1/docker/c9");
        add_process(root.path(), 12, other, "/kubepods/pod1/c2");
        add_process(
            root.path(),
            13,
            &mounts(root.path(), SHARES[1]),
            "/kubepods/pod1/c3",
        );
        let mut processes = processes_of(root.path());
        let share = processes.describe(10).unwrap().shares.remove(0);
        let mut found = processes.with_share(&share).unwrap();
        found.sort_unstable();
        assert_eq!(found, [10, 11]);
    }

    #[test]
    fn reads_proc_once_for_process_without_shares() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("claims")).unwrap();
        let (other, cgroup) = ("1 1 8:1 / / rw", "/kubepods/pod1/c1");
        add_process(root.path(), 10, other, cgroup);
        let mut processes = processes_of(root.path());
        assert!(processes.describe(10).unwrap().shares.is_empty());
        // Would be found if the processes of the container were read again.
        let shown = mounts(root.path(), SHARES[0]);
        add_process(root.path(), 11, &shown, cgroup);
        assert!(processes.describe(10).unwrap().shares.is_empty());
        assert_eq!(
            share_ids(&processes.describe_again(10).unwrap()),
            [SHARES[0]]
        );
        // The answer ends with the process.
        processes.retain(&[]);
        assert_eq!(share_ids(&processes.describe(10).unwrap()), [SHARES[0]]);
    }

    #[test]
    fn reads_mounts_again_that_could_not_be_read() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = "/kubepods/pod1/c1";
        let shown = mounts(root.path(), SHARES[0]);
        add_process(root.path(), 10, &shown, cgroup);
        fs::remove_file(root.path().join("10/mountinfo")).unwrap();
        let mut processes = processes_of(root.path());
        assert!(processes.describe(10).unwrap().shares.is_empty());
        add_process(root.path(), 10, &shown, cgroup);
        assert_eq!(share_ids(&processes.describe(10).unwrap()), [SHARES[0]]);
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
        fs::write(dir.join("mountinfo"), mounts(root.path(), SHARES[0])).unwrap();
        let mut processes = processes_of(root.path());
        assert_eq!(share_ids(&processes.describe(10).unwrap()), [SHARES[0]]);
        fs::write(dir.join("stat"), stat("600")).unwrap();
        fs::write(dir.join("mountinfo"), mounts(root.path(), SHARES[1])).unwrap();
        let other = processes.describe(10).unwrap();
        assert_eq!(
            (other.owner.start_time, share_ids(&other)),
            (600, vec![SHARES[1]])
        );
    }
}
