//! Host memory of the machine: checkpoints take it from their processes.
//!
//! The daemon keeps the bytes itself, so it charges the cgroup of the process in its own books, on top of what the files of the cgroup
//! say. Beyond a limit of the cgroup, or of one above, or of the machine, the process is killed, as Linux does.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::cgroups::Cgroups;

/// Books of the host memory that checkpoints have taken.
#[derive(Debug)]
pub(super) struct HostMemory {
    /// Memory of the machine; `None` for that of the computer.
    bytes: Option<u64>,
    /// By PID: directories of cgroups, and bytes.
    charges: BTreeMap<u32, (Vec<PathBuf>, u64)>,
}

impl HostMemory {
    pub(super) fn new(bytes: Option<u64>) -> Self {
        Self {
            bytes,
            charges: BTreeMap::new(),
        }
    }

    /// Charges a checkpoint; `false` if the process exceeds a limit by it, and is to be killed.
    pub(super) fn charge(&mut self, cgroups: &Cgroups, pid: u32, bytes: u64) -> bool {
        let groups = cgroups.memory_groups(pid);
        let has_room = groups.iter().all(|group| {
            let charged = self.charged(|groups| groups.contains(group));
            room(group).is_none_or(|room| charged.saturating_add(bytes) <= room)
        });
        let fits = has_room && bytes <= self.available();
        if fits {
            self.charges.insert(pid, (groups, bytes));
        }
        fits
    }

    /// Forgets processes that are restored or have ended. Returns whether there were any.
    pub(super) fn retain(&mut self, is_held: impl Fn(u32) -> bool) -> bool {
        let before = self.charges.len();
        self.charges.retain(|pid, _| is_held(*pid));
        before != self.charges.len()
    }

    /// `proc/meminfo` of the machine; `None` if it has the memory of the computer.
    pub(super) fn meminfo(&self) -> Option<String> {
        let total = self.bytes? >> 10;
        let free = self.available() >> 10;
        Some(format!(
            "MemTotal:       {total} kB\nMemFree:        {free} kB\nMemAvailable:   {free} kB\n"
        ))
    }

    fn available(&self) -> u64 {
        let all = self.bytes.unwrap_or_else(of_computer);
        all.saturating_sub(self.charged(|_| true))
    }

    fn charged(&self, counts: impl Fn(&Vec<PathBuf>) -> bool) -> u64 {
        let charges = self.charges.values();
        let charges = charges.filter(|(groups, _)| counts(groups));
        charges.map(|(_, bytes)| bytes).sum()
    }
}

/// What the cgroup with this directory may still use; `None` without a limit.
fn room(group: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"));
    Some(limit.saturating_sub(used.unwrap_or(0)))
}

fn of_computer() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let mut lines = meminfo.lines();
    let available = lines.find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = available.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
