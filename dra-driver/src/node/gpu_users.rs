//! Programs that hold a GPU or a MIG instance open, such as monitors: NVIDIA's driver switches MIG mode, and destroys instances,
//! only without them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of programs in a text.
const NAMED: usize = 5;

/// Returns the device files of a GPU instance and of its compute instances (`/dev/nvidia-caps/nvidia-cap<n>`). The kernel module
/// names their numbers in `/proc/driver/nvidia/capabilities`.
#[must_use]
pub fn capability_files(proc_root: &Path, minor: u32, instance: u32) -> Vec<PathBuf> {
    let dir = proc_root.join(format!(
        "driver/nvidia/capabilities/gpu{minor}/mig/gi{instance}"
    ));
    let below = fs::read_dir(&dir).into_iter().flatten().flatten();
    let below = below.map(|entry| entry.path());
    let number = |dir: PathBuf| {
        let access = fs::read_to_string(dir.join("access")).ok()?;
        let number = access
            .lines()
            .find_map(|line| line.strip_prefix("DeviceFileMinor:"))?;
        number.trim().parse::<u32>().ok()
    };
    let numbers = std::iter::once(dir.clone()).chain(below).filter_map(number);
    numbers
        .map(|number| PathBuf::from(format!("/dev/nvidia-caps/nvidia-cap{number}")))
        .collect()
}

/// Returns the programs that have one of these device files open, and the processes with these PIDs, as text such as
/// `dcgm-exporter (process 123)`. The calling process is left out.
#[must_use]
pub fn describe(proc_root: &Path, files: &[PathBuf], pids: &[u32]) -> String {
    let mut programs: BTreeMap<u32, String> = BTreeMap::new();
    let listed = fs::read_dir(proc_root).into_iter().flatten().flatten();
    let listed = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let holding = listed.filter(|pid| has_open(&proc_root.join(pid.to_string()), files));
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

/// Returns whether a process has one of the files open. The paths are those in the mount namespace of the process.
fn has_open(process: &Path, files: &[PathBuf]) -> bool {
    let descriptors = fs::read_dir(process.join("fd"))
        .into_iter()
        .flatten()
        .flatten();
    let mut links = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    links.any(|link| files.contains(&link))
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
        let file = |minor: u32| [PathBuf::from(format!("/dev/nvidia{minor}"))];
        let text = describe(proc_root.path(), &file(1), &[9]);
        assert_eq!(text, "dcgm-exporter (process 7), python (process 9)");
        assert!(describe(proc_root.path(), &file(2), &[]).contains("none is visible"));
    }

    #[test]
    fn finds_device_files_of_instance() {
        let proc_root = tempfile::tempdir().unwrap();
        let dir = proc_root
            .path()
            .join("driver/nvidia/capabilities/gpu1/mig/gi7");
        for (dir, number) in [(dir.clone(), 66), (dir.join("ci0"), 67)] {
            fs::create_dir_all(&dir).unwrap();
            let text = format!("DeviceFileMinor: {number}\nDeviceFileMode: 256\n");
            fs::write(dir.join("access"), text).unwrap();
        }
        let mut files = capability_files(proc_root.path(), 1, 7);
        files.sort();
        let expected = [
            "/dev/nvidia-caps/nvidia-cap66",
            "/dev/nvidia-caps/nvidia-cap67",
        ];
        assert_eq!(files, expected.map(PathBuf::from));
        assert!(capability_files(proc_root.path(), 0, 7).is_empty());
    }
}
