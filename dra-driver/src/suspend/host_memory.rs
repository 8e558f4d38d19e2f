//! Room for the memory of checkpointed processes: their cgroups and the node.
//!
//! libcuda copies GPU memory to memory of the process, which counts in its cgroup and in those above. Beyond a limit the kernel kills
//! the process, and without memory on the node it kills any. So the room is read before anything is locked.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// Memory that a suspension leaves to the node, bytes. Kubelet evicts pods below 100 MiB, and other pods grow meanwhile.
const NODE_MARGIN: u64 = 1 << 30;

/// Memory that a suspension leaves to each cgroup, bytes: a checkpoint takes some of its own.
const CGROUP_MARGIN: u64 = 64 << 20;

/// Files that say how much memory is free.
#[derive(Debug, Clone)]
pub struct HostMemory {
    proc_root: PathBuf,
    driver_root: PathBuf,
    cgroup_root: PathBuf,
}

/// GPU memory of a process that goes to host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// PID on the node.
    pub pid: u32,
    /// Its GPU memory, bytes.
    pub bytes: u64,
}

/// What a cgroup, or the node, has free.
struct Room {
    name: String,
    free: u64,
    needed: u64,
    margin: u64,
}

impl HostMemory {
    /// Returns the memory of a node. `proc/meminfo` in the driver root precedes that in `proc_root`: the driver root is that of the machine
    /// whose GPUs these are, and the container of the node driver may see a larger one. `cgroup_root` is the mount point of
    /// cgroup v2, or the directory of the hierarchies of cgroup v1.
    #[must_use]
    pub fn new(proc_root: &Path, driver_root: &Path, cgroup_root: &Path) -> Self {
        Self {
            proc_root: proc_root.to_owned(),
            driver_root: driver_root.to_owned(),
            cgroup_root: cgroup_root.to_owned(),
        }
    }

    /// Returns why the host memory for the copy is missing; `None` if there is enough. What cannot be read is no room.
    #[must_use]
    pub fn shortage(&self, needs: &[Need]) -> Option<String> {
        let needed = needs.iter().map(|need| need.bytes);
        let needed = needed.fold(0, u64::saturating_add);
        if needed == 0 {
            return None;
        }
        let rooms = self.rooms(needs, needed);
        let rooms = match rooms {
            Ok(rooms) => rooms,
            Err(why) => return Some(why),
        };
        let is_short = |room: &&Room| room.free < room.needed.saturating_add(room.margin);
        let short = rooms.iter().find(is_short)?;
        Some(format!(
            "its {} MiB of GPU memory need as much host memory, and {} has {} MiB free, of which {} MiB are kept; raise the memory limit, \
             or free host memory",
            short.needed.div_ceil(1 << 20),
            short.name,
            short.free >> 20,
            short.margin >> 20,
        ))
    }

    fn rooms(&self, needs: &[Need], needed: u64) -> Result<Vec<Room>, String> {
        let mut by_cgroup: BTreeMap<PathBuf, u64> = BTreeMap::new();
        for need in needs {
            let Some(groups) = self.groups(need.pid)? else {
                // It has ended.
                continue;
            };
            for group in groups {
                let sum = by_cgroup.entry(group).or_default();
                *sum = sum.saturating_add(need.bytes);
            }
        }
        let mut rooms = Vec::new();
        for (group, needed) in by_cgroup {
            let free = free_of_group(&group);
            let free = free.map_err(|error| {
                format!(
                    "cannot read the memory limit of its cgroup {}: {error}",
                    group.display()
                )
            })?;
            rooms.extend(free.map(|free| Room {
                name: format!("its cgroup {}", group.display()),
                free,
                needed,
                margin: CGROUP_MARGIN,
            }));
        }
        let available = self.available();
        let available = available.ok_or("cannot read MemAvailable in /proc/meminfo of the node")?;
        rooms.push(Room {
            name: "the node".to_owned(),
            free: available,
            needed,
            margin: NODE_MARGIN,
        });
        Ok(rooms)
    }

    fn available(&self) -> Option<u64> {
        let of_driver_root = fs::read_to_string(self.driver_root.join("proc/meminfo"));
        let text = of_driver_root.or_else(|_| fs::read_to_string(self.proc_root.join("meminfo")));
        available(&text.ok()?)
    }

    /// Returns the directories of the cgroup of a process and of those above, which have memory limits; `None` if it has ended.
    fn groups(&self, pid: u32) -> Result<Option<Vec<PathBuf>>, String> {
        let Ok(text) = fs::read_to_string(self.proc_root.join(format!("{pid}/cgroup"))) else {
            return Ok(None);
        };
        let unknown = || format!("cannot tell the memory cgroup of process {pid} of the node");
        let (hierarchy, path) = memory_cgroup(&text).ok_or_else(unknown)?;
        let root = self.cgroup_root.join(hierarchy);
        let below = Path::new(path.trim_start_matches('/'));
        // In a cgroup namespace of its own, the node driver does not see where other cgroups are.
        if below
            .components()
            .any(|part| !matches!(part, Component::Normal(_)))
        {
            return Err(unknown());
        }
        let group = root.join(below);
        let above = group.ancestors().map(Path::to_owned);
        Ok(Some(
            above.take_while(|group| group.starts_with(&root)).collect(),
        ))
    }
}

/// Returns the directory of the hierarchy with the memory controller, and the cgroup in it.
fn memory_cgroup(text: &str) -> Option<(&'static str, &str)> {
    // `<hierarchy>:<controllers>:<path>`
    let fields = |line: &'_ str| -> Option<(String, usize)> {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        Some((controllers.to_owned(), line.len() - path.len()))
    };
    let mut unified = None;
    for line in text.lines() {
        let (controllers, at) = fields(line)?;
        let path = line.get(at..)?;
        if controllers
            .split(',')
            .any(|controller| controller == "memory")
        {
            return Some(("memory", path));
        }
        if controllers.is_empty() {
            unified = Some(("", path));
        }
    }
    unified
}

/// Returns the memory that a cgroup has free, bytes; `None` without a limit. Files that were read once and are mapped by nobody give way, as
/// in what kubelet takes for the working set.
fn free_of_group(group: &Path) -> io::Result<Option<u64>> {
    // The cgroup of a process that runs has its directory.
    fs::metadata(group)?;
    let read = |name: &str| match fs::read_to_string(group.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    };
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    let number = |text: String| text.trim().parse::<u64>().map_err(|_| odd());
    // The root of cgroup v2 has no limit.
    let (limit, usage, inactive) = match read("memory.max")? {
        Some(limit) if limit.trim() == "max" => return Ok(None),
        Some(limit) => (limit, "memory.current", "inactive_file "),
        None => match read("memory.limit_in_bytes")? {
            Some(limit) => (limit, "memory.usage_in_bytes", "total_inactive_file "),
            None => return Ok(None),
        },
    };
    let (limit, used) = (number(limit)?, number(read(usage)?.ok_or_else(odd)?)?);
    let stat = read("memory.stat")?.unwrap_or_default();
    let inactive = stat
        .lines()
        .find_map(|line| line.strip_prefix(inactive)?.parse().ok());
    let used = used.saturating_sub(inactive.unwrap_or(0));
    Ok(Some(limit.saturating_sub(used)))
}

/// Returns `MemAvailable`, bytes.
fn available(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let value = lines.find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A node with one container and a pod of 10 GiB above it.
    struct Files(tempfile::TempDir);

    impl Files {
        fn new(cgroup: &str, available_gib: u64) -> Self {
            let files = Self(tempfile::tempdir().unwrap());
            files.write("proc/7/cgroup", cgroup);
            let kib = available_gib << 20;
            files.write(
                "proc/meminfo",
                &format!("MemTotal: 1 kB\nMemAvailable:   {kib} kB\n"),
            );
            files
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn shortage(&self, bytes: u64) -> Option<String> {
            let at = |path: &str| self.0.path().join(path);
            let memory = HostMemory::new(&at("proc"), &at("driver"), &at("cgroup"));
            memory.shortage(&[Need { pid: 7, bytes }])
        }
    }

    #[test]
    fn needs_room_in_each_cgroup_above() {
        for (cgroup, root, [max, current], stat, none) in [
            (
                "0::/pod/app\n",
                "cgroup",
                ["memory.max", "memory.current"],
                "inactive_file",
                "max\n",
            ),
            (
                "9:name=systemd:/x\n4:cpu,memory:/pod/app\n0::/\n",
                "cgroup/memory",
                ["memory.limit_in_bytes", "memory.usage_in_bytes"],
                "total_inactive_file",
                "9223372036854771712\n",
            ),
        ] {
            let files = Files::new(cgroup, 100);
            let write = |group: &str, limit: &str, used: u64| {
                files.write(&format!("{root}/{group}/{max}"), limit);
                files.write(&format!("{root}/{group}/{current}"), &format!("{used}\n"));
            };
            write("pod", &format!("{}\n", 10 * GIB), 3 * GIB);
            write("pod/app", none, 3 * GIB);
            assert_eq!(files.shortage(6 * GIB), None);
            let short = files.shortage(7 * GIB).unwrap();
            assert!(
                short.contains("7168 MiB") && short.contains("/pod has"),
                "{short}"
            );
            // The container has less than its pod.
            write("pod/app", &format!("{}\n", 5 * GIB), 3 * GIB);
            assert!(
                files
                    .shortage(3 * GIB)
                    .unwrap()
                    .contains("/pod/app has 2048 MiB")
            );
            // Files that the kernel gives up for others are no use.
            files.write(
                &format!("{root}/pod/app/memory.stat"),
                &format!("{stat} {}\n", 2 * GIB),
            );
            assert_eq!(files.shortage(3 * GIB), None);
        }
    }

    #[test]
    fn needs_room_on_the_node_beside_others() {
        let files = Files::new("0::/\n", 8);
        files.write("cgroup/cgroup.procs", "");
        assert_eq!(files.shortage(7 * GIB), None);
        assert!(
            files
                .shortage(7 * GIB + 1)
                .unwrap()
                .contains("the node has 8192 MiB")
        );
        // The machine of the GPUs may be another than the one that the container sees.
        files.write("driver/proc/meminfo", "MemAvailable: 16777216 kB\n");
        assert_eq!(files.shortage(15 * GIB), None);
    }

    #[test]
    fn what_cannot_be_read_is_no_room() {
        let files = Files::new("0::/pod\n", 100);
        assert!(
            files
                .shortage(1)
                .unwrap()
                .contains("cannot read the memory limit")
        );
        files.write("cgroup/pod/memory.max", "1 2\n");
        assert!(files.shortage(1).is_some());
        let files = Files::new("0::/../pod\n", 100);
        files.write("cgroup/pod/memory.max", "max\n");
        assert!(
            files
                .shortage(1)
                .unwrap()
                .contains("cannot tell the memory cgroup")
        );
        let files = Files::new("0::/\n", 100);
        files.write("cgroup/cgroup.procs", "");
        assert_eq!(files.shortage(1), None);
        files.write("proc/meminfo", "MemAvailable: many kB\n");
        assert!(files.shortage(1).unwrap().contains("MemAvailable"));
        // Without memory on the GPU there is nothing to copy.
        assert_eq!(files.shortage(0), None);
    }
}
