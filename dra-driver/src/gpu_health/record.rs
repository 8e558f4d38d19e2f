//! Faults of the GPUs in the run directory: a restarted driver does not take a GPU for healthy without a new recovery
//! window. A reboot, which resets the GPUs, ends the record.

use std::io;
use std::path::{Path, PathBuf};

use drava_nvml::{GpuUuid, Placement};
use serde::{Deserialize, Serialize};

use super::RecordedFaults;
use super::state::{Fault, Scope};
use crate::node::files;

/// The record.
#[derive(Debug, Clone)]
pub struct RecordFile {
    path: PathBuf,
    /// Boot of the node: the run directory may survive a reboot.
    boot_id: String,
}

/// Content of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    boot_id: String,
    faults: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    /// UUID of the GPU.
    gpu: String,
    /// First memory slice and number of memory slices of a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slices: Option<(u32, u32)>,
    fault: Fault,
}

impl RecordFile {
    /// Returns the record at `path` in this boot of the node.
    #[must_use]
    pub const fn new(path: PathBuf, boot_id: String) -> Self {
        Self { path, boot_id }
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the faults; none of another boot.
    ///
    /// # Errors
    /// When the file exists and is not readable.
    pub fn read(&self) -> io::Result<RecordedFaults> {
        let bytes = match std::fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(RecordedFaults::new());
            }
            Err(error) => return Err(error),
        };
        let content: Content = serde_json::from_slice(&bytes)?;
        let mut recorded = RecordedFaults::new();
        if content.boot_id == self.boot_id {
            for Entry { gpu, slices, fault } in content.faults {
                let slices = slices.map(|(start, size)| Scope::Slices(Placement { start, size }));
                let faults = recorded.entry(GpuUuid::new(gpu)).or_default();
                faults.push((slices.unwrap_or(Scope::Gpu), fault));
            }
        }
        Ok(recorded)
    }

    /// Replaces the faults.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, recorded: &RecordedFaults) -> io::Result<()> {
        let entries = recorded.iter().flat_map(|(gpu, faults)| {
            faults.iter().map(|(scope, fault)| Entry {
                gpu: gpu.to_string(),
                slices: match scope {
                    Scope::Gpu => None,
                    Scope::Slices(Placement { start, size }) => Some((*start, *size)),
                },
                fault: *fault,
            })
        });
        let content = Content {
            boot_id: self.boot_id.clone(),
            faults: entries.collect(),
        };
        files::write_atomically(&self.path, &serde_json::to_vec(&content)?, 0o600)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_written_faults_in_same_boot_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpu-health.json");
        let record = |boot: &str| RecordFile::new(path.clone(), boot.to_owned());
        assert!(record("one").read().unwrap().is_empty(), "no file");
        let slices = Scope::Slices(Placement { start: 4, size: 2 });
        let faults = RecordedFaults::from([(
            GpuUuid::new("GPU-1"),
            vec![(Scope::Gpu, Fault::Xid(79)), (slices, Fault::DoubleBitEcc)],
        )]);
        record("one").write(&faults).unwrap();
        assert_eq!(record("one").read().unwrap(), faults);
        assert!(record("two").read().unwrap().is_empty(), "rebooted");
        std::fs::write(&path, b"noise").unwrap();
        assert!(record("one").read().is_err());
    }
}
