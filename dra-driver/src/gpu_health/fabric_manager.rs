//! Fabric manager of a node with NVSwitches whose NVML reports no fabric.
//!
//! CUDA fails with error 802 on GPUs on NVSwitches until the fabric manager runs. NVML reports the registration of a GPU since
//! Hopper. For the two chips before (DGX-2, HGX A100) the node has the evidence: PCI devices that are NVSwitches, and no process
//! of the fabric manager. A fabric manager in a container is a process of the node too. Virtual machines to which the host gives
//! GPUs of its own fabric have no NVSwitches, and need no fabric manager.
//!
//! Only its name tells the fabric manager, which runs under any user, on the node or in a container. So a process of a tenant with that
//! name hides the fault: programs on the node then fail with error 802, as they do without drava.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use drava_nvml::{ComputeCapability, FabricState, Sensor, Status};

use crate::node::process;

/// Time for which what was found holds: all GPUs of a node ask.
const VALID: Duration = Duration::from_secs(4);

/// Name of the process, as long as the kernel keeps names: `nv-fabricmanager` has one character more.
const PROCESS: &str = "nv-fabricmanage";

/// NVIDIA in PCI.
const VENDOR: &str = "0x10de";

/// Class and subclass of NVSwitches in PCI: other bridge.
const CLASS: &str = "0x0680";

/// Whether a node has the fabric manager that its NVSwitches need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// The node has no NVSwitches.
    NotNeeded,
    /// A process runs.
    Running(u32),
    /// No process runs.
    Missing,
}

/// Fabric manager of a node.
#[derive(Debug)]
pub struct FabricManager {
    sysfs: PathBuf,
    proc_root: PathBuf,
    /// What was found last, and when; `None` where the node could not be read.
    found: Mutex<Option<(Instant, Option<Presence>)>>,
}

impl FabricManager {
    /// Returns the fabric manager of the node with these mount points of sysfs and procfs.
    #[must_use]
    pub const fn new(sysfs: PathBuf, proc_root: PathBuf) -> Self {
        Self {
            sysfs,
            proc_root,
            found: Mutex::new(None),
        }
    }

    /// Returns the registration of a GPU with its fabric: as NVML reports it, or by the fabric manager of a GPU of which NVML
    /// reports none. It has failed where the node cannot be read.
    pub fn fabric(
        &self,
        reported: &Sensor<FabricState>,
        capability: ComputeCapability,
    ) -> Sensor<FabricState> {
        match reported {
            Sensor::Absent if reports_no_fabric(capability) => {
                match self.presence(Instant::now()) {
                    Some(Presence::NotNeeded) => Sensor::Absent,
                    Some(Presence::Running(_)) => Sensor::Value(FabricState::Completed),
                    Some(Presence::Missing) => Sensor::Value(FabricState::NotStarted),
                    None => Sensor::Failed(Status::NotFound),
                }
            }
            reported => reported.clone(),
        }
    }

    fn presence(&self, now: Instant) -> Option<Presence> {
        // The value is valid after a panic: it is replaced as a whole.
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match *found {
            Some((at, presence)) if now.duration_since(at) < VALID => return presence,
            before => before.map(|(_, presence)| presence),
        };
        let presence = match self.find(before.flatten()) {
            Ok(presence) => Some(presence),
            Err(error) => {
                // Once for a failure that lasts.
                if before != Some(None) {
                    tracing::warn!(%error, "cannot tell whether the fabric manager runs");
                }
                None
            }
        };
        *found = Some((now, presence));
        presence
    }

    /// Looks for the process that was found before, then for NVSwitches, then at all processes.
    fn find(&self, before: Option<Presence>) -> io::Result<Presence> {
        match before {
            Some(Presence::Running(pid)) if self.is_manager(pid) => {
                return Ok(Presence::Running(pid));
            }
            _ => {}
        }
        if !has_nvswitches(&self.sysfs)? {
            return Ok(Presence::NotNeeded);
        }
        for entry in fs::read_dir(&self.proc_root)? {
            let name = entry?.file_name();
            let pid = name.to_str().and_then(|name| name.parse().ok());
            if let Some(pid) = pid.filter(|pid| self.is_manager(*pid)) {
                return Ok(Presence::Running(pid));
            }
        }
        Ok(Presence::Missing)
    }

    fn is_manager(&self, pid: u32) -> bool {
        process::running_name(&self.proc_root, pid).is_some_and(|name| name == PROCESS)
    }
}

/// Returns whether GPUs of this chip can be on NVSwitches of which NVML reports nothing: GV100 and GA100.
const fn reports_no_fabric(capability: ComputeCapability) -> bool {
    matches!(
        capability,
        ComputeCapability {
            major: 7 | 8,
            minor: 0
        }
    )
}

/// Returns whether a PCI device is an NVSwitch. A device that is removed meanwhile is none.
fn has_nvswitches(sysfs: &Path) -> io::Result<bool> {
    let devices = match fs::read_dir(sysfs.join("bus/pci/devices")) {
        // A node without PCI.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        devices => devices?,
    };
    for device in devices {
        let device = device?.path();
        let has = |name: &str, prefix: &str| {
            fs::read_to_string(device.join(name)).is_ok_and(|text| text.starts_with(prefix))
        };
        if has("class", CLASS) && has("vendor", VENDOR) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A100: ComputeCapability = ComputeCapability { major: 8, minor: 0 };

    fn node() -> (tempfile::TempDir, FabricManager) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("proc")).unwrap();
        let manager = FabricManager::new(dir.path().join("sys"), dir.path().join("proc"));
        (dir, manager)
    }

    fn add_device(dir: &Path, address: &str, class: &str, vendor: &str) {
        let device = dir.join("sys/bus/pci/devices").join(address);
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("class"), format!("{class}\n")).unwrap();
        fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
    }

    fn set_process(dir: &Path, pid: u32, name: &str, state: char) {
        let process = dir.join(format!("proc/{pid}"));
        fs::create_dir_all(&process).unwrap();
        let zeroes = "0 ".repeat(18);
        let stat = format!("{pid} ({name}) {state} {zeroes}5 0\n");
        fs::write(process.join("stat"), stat).unwrap();
    }

    #[test]
    fn finds_process_of_fabric_manager() {
        let (dir, manager) = node();
        add_device(dir.path(), "0000:c4:00.0", "0x068000", "0x10de");
        assert_eq!(manager.find(None).unwrap(), Presence::Missing);
        set_process(dir.path(), 7, "nvidia-persiste", 'S');
        set_process(dir.path(), 8, "nv-fabricmanage", 'Z');
        assert_eq!(manager.find(None).unwrap(), Presence::Missing);
        set_process(dir.path(), 9, "nv-fabricmanage", 'S');
        assert_eq!(manager.find(None).unwrap(), Presence::Running(9));
        set_process(dir.path(), 9, "nv-fabricmanage", 'Z');
        let before = Some(Presence::Running(9));
        assert_eq!(manager.find(before).unwrap(), Presence::Missing);
        // Another process has its PID since.
        set_process(dir.path(), 9, "sleep", 'S');
        assert_eq!(manager.find(before).unwrap(), Presence::Missing);
        set_process(dir.path(), 7, "nv-fabricmanage", 'S');
        assert_eq!(manager.find(before).unwrap(), Presence::Running(7));
    }

    #[test]
    fn node_that_cannot_be_read_tells_nothing() {
        let (dir, manager) = node();
        add_device(dir.path(), "0000:c4:00.0", "0x068000", "0x10de");
        fs::remove_dir(dir.path().join("proc")).unwrap();
        let failed = Sensor::Failed(Status::NotFound);
        assert_eq!(manager.fabric(&Sensor::Absent, A100), failed);
        let (dir, manager) = node();
        let devices = dir.path().join("sys/bus/pci/devices");
        fs::create_dir_all(devices.parent().unwrap()).unwrap();
        fs::write(devices, "").unwrap();
        assert_eq!(manager.fabric(&Sensor::Absent, A100), failed);
    }

    #[test]
    fn looks_again_after_some_seconds() {
        let (dir, manager) = node();
        add_device(dir.path(), "0000:c4:00.0", "0x068000", "0x10de");
        let now = Instant::now();
        assert_eq!(manager.presence(now), Some(Presence::Missing));
        set_process(dir.path(), 7, "nv-fabricmanage", 'S');
        assert_eq!(manager.presence(now), Some(Presence::Missing));
        let later = now + VALID;
        assert_eq!(manager.presence(later), Some(Presence::Running(7)));
        let absent = Sensor::Absent;
        let completed = Sensor::Value(FabricState::Completed);
        assert_eq!(manager.fabric(&absent, A100), completed);
    }

    #[test]
    fn needs_fabric_manager_for_nvswitches_only() {
        let (dir, manager) = node();
        assert_eq!(manager.find(None).unwrap(), Presence::NotNeeded);
        // A GPU, and a bridge of another vendor.
        add_device(dir.path(), "0000:07:00.0", "0x030200", "0x10de");
        add_device(dir.path(), "0000:00:1f.0", "0x068000", "0x8086");
        assert_eq!(manager.find(None).unwrap(), Presence::NotNeeded);
        add_device(dir.path(), "0000:c4:00.0", "0x068000", "0x10de");
        assert_eq!(manager.find(None).unwrap(), Presence::Missing);
    }

    #[test]
    fn what_nvml_reports_precedes() {
        let (dir, manager) = node();
        add_device(dir.path(), "0000:c4:00.0", "0x068000", "0x10de");
        let absent = Sensor::Absent;
        let not_started = Sensor::Value(FabricState::NotStarted);
        // DGX-2 has V100.
        for (major, minor) in [(7, 0), (8, 0)] {
            let chip = ComputeCapability { major, minor };
            assert_eq!(manager.fabric(&absent, chip), not_started);
        }
        let completed = Sensor::Value(FabricState::Completed);
        assert_eq!(manager.fabric(&completed, A100), completed);
        // GPUs of other chips of the node are not on NVSwitches, or NVML reports their fabric.
        for (major, minor) in [(7, 5), (8, 6), (9, 0), (10, 0)] {
            let other = ComputeCapability { major, minor };
            assert_eq!(manager.fabric(&absent, other), absent);
        }
    }
}
