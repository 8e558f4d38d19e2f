//! Traces of a cluster on this machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Traces of the cluster in `state` on this machine: processes, mounts, cgroups, files.
pub(crate) fn traces(state: &Path) -> Vec<String> {
    let mut found = vec![];
    let text = state.display().to_string();
    let name = format!("drava-{}", hash_of(state));
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let read = |file: &str| {
            String::from_utf8_lossy(&fs::read(process.path().join(file)).unwrap_or_default())
                .into_owned()
        };
        if process
            .file_name()
            .to_string_lossy()
            .chars()
            .all(|digit| digit.is_ascii_digit())
            && process.file_name().to_string_lossy() != std::process::id().to_string()
            && (read("cmdline").contains(&text) || read("cgroup").contains(&name))
        {
            found.push(format!(
                "process {} {}",
                process.path().display(),
                read("cmdline").replace('\0', " ")
            ));
        }
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    found.extend(
        mounts
            .lines()
            .filter(|line| line.contains(&text))
            .map(|line| format!("mount {line}")),
    );
    let hierarchies = fs::read_dir("/sys/fs/cgroup")
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let cgroups = hierarchies
        .chain([PathBuf::from("/sys/fs/cgroup")])
        .map(|dir| dir.join(&name));
    found.extend(
        cgroups
            .filter(|dir| dir.exists())
            .map(|dir| format!("cgroup {}", dir.display())),
    );
    if state.exists() {
        found.push(format!("directory {text}"));
    }
    found
}

pub(crate) fn hash_of(state: &Path) -> String {
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(state.as_os_str().as_encoded_bytes());
    digest
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Identities of a process's namespaces.
pub(crate) fn namespaces(process: &Path) -> BTreeSet<PathBuf> {
    let links = ["mnt", "pid", "net", "uts", "ipc", "cgroup"]
        .map(|name| fs::read_link(process.join("ns").join(name)));
    links.into_iter().flatten().collect()
}

/// Time since boot, clock ticks of 10 ms.
pub(crate) fn now_ticks() -> u64 {
    let uptime = fs::read_to_string("/proc/uptime").unwrap();
    let uptime = uptime.split(' ').next().unwrap();
    uptime.replace('.', "").parse().unwrap()
}

/// Start of a process since boot, clock ticks; `None` if it is gone.
pub(crate) fn start_ticks(process: &Path) -> Option<u64> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Names of the machine's network devices.
pub(crate) fn devices() -> BTreeSet<String> {
    fs::read_dir("/sys/class/net")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}
