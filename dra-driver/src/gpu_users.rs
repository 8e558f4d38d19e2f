//! Programs that hold a GPU open, such as monitors: NVIDIA's driver switches MIG mode only without them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of programs in a text.
const NAMED: usize = 5;

/// Returns the programs that have the device file `/dev/nvidia<minor>` open, and the processes with these PIDs, as text such
/// as `dcgm-exporter (process 123)`. The calling process is left out.
#[must_use]
pub fn describe(proc_root: &Path, minor: u32, pids: &[u32]) -> String {
    let mut programs: BTreeMap<u32, String> = BTreeMap::new();
    let file = PathBuf::from(format!("/dev/nvidia{minor}"));
    let listed = fs::read_dir(proc_root).into_iter().flatten().flatten();
    let listed = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let holding = listed.filter(|pid| has_open(&proc_root.join(pid.to_string()), &file));
    for pid in holding.chain(pids.iter().copied()) {
        if pid != std::process::id() {
            let name = fs::read_to_string(proc_root.join(pid.to_string()).join("comm"));
            let name = name.unwrap_or_else(|_| "?".to_owned());
            programs.insert(pid, name.trim_end().to_owned());
        }
    }
    if programs.is_empty() {
        return "none is visible; check monitors such as dcgm-exporter and nvidia-persistenced"
            .to_owned();
    }
    let more = programs.len().saturating_sub(NAMED);
    let mut named: Vec<String> = programs
        .into_iter()
        .take(NAMED)
        .map(|(pid, name)| format!("{name} (process {pid})"))
        .collect();
    if more > 0 {
        named.push(format!("{more} more"));
    }
    named.join(", ")
}

/// Returns whether a process has `file` open. The path is that in the mount namespace of the process.
fn has_open(process: &Path, file: &Path) -> bool {
    let descriptors = fs::read_dir(process.join("fd"))
        .into_iter()
        .flatten()
        .flatten();
    let mut links = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    links.any(|link| link == file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_programs_with_open_device_file() {
        let proc_root = tempfile::tempdir().unwrap();
        for (pid, name, file) in [
            (7, "dcgm-exporter", "/dev/nvidia1"),
            (8, "other", "/dev/nvidia10"),
            (9, "python", "/dev/null"),
        ] {
            let process = proc_root.path().join(pid.to_string());
            fs::create_dir_all(process.join("fd")).unwrap();
            fs::write(process.join("comm"), format!("{name}\n")).unwrap();
            std::os::unix::fs::symlink(file, process.join("fd/3")).unwrap();
        }
        let text = describe(proc_root.path(), 1, &[9]);
        assert_eq!(text, "dcgm-exporter (process 7), python (process 9)");
        assert!(describe(proc_root.path(), 2, &[]).contains("none is visible"));
    }
}
