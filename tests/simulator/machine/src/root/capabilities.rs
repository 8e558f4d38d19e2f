//! MIG capabilities, as in the driver: one device node per GPU instance and per compute instance,
//! with minor numbers in `/proc`. A process may use an instance if it sees both nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::protocol::{CardIndex, InstanceId, MigState};

use super::{DriverRoot, make_node};

/// Minor numbers of a GPU: 15 GPU instances with 8 compute instances each.
const MINORS_OF_CARD: u32 = 15 * MINORS_OF_INSTANCE;
/// Minor numbers of a GPU instance and 8 compute instances.
const MINORS_OF_INSTANCE: u32 = 9;
/// Lower minors are not for instances.
const FIRST_MINOR: u32 = 3;

fn gpu_minor(card: CardIndex, gpu: u32) -> u32 {
    FIRST_MINOR + card.0 * MINORS_OF_CARD + gpu * MINORS_OF_INSTANCE
}

fn compute_minor(card: CardIndex, id: InstanceId) -> u32 {
    gpu_minor(card, id.gpu) + 1 + id.compute
}

impl DriverRoot {
    fn capability_node(&self, minor: u32) -> PathBuf {
        let node = format!("dev/nvidia-caps/nvidia-cap{minor}");
        self.path().join(node)
    }

    fn capabilities(&self, card: CardIndex) -> PathBuf {
        let directory = format!("proc/driver/nvidia/capabilities/gpu{}/mig", card.0);
        self.path().join(directory)
    }

    /// Whether the nodes of an instance are present, so that this process may use it.
    #[must_use]
    pub fn sees_instance(&self, card: CardIndex, id: InstanceId) -> bool {
        [gpu_minor(card, id.gpu), compute_minor(card, id)]
            .into_iter()
            .all(|minor| self.capability_node(minor).exists())
    }

    /// Lays out the capabilities of existing instances. Correct files are not replaced, since they
    /// may be open.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn lay_out_instances(&self, card: CardIndex, state: &MigState) -> io::Result<()> {
        let directory = self.capabilities(card);
        let mut wanted: BTreeMap<PathBuf, u32> = BTreeMap::new();
        for gpu in &state.gpu_instances {
            let instance = directory.join(format!("gi{}", gpu.id));
            wanted.insert(instance.join("access"), gpu_minor(card, gpu.id));
            for compute in &gpu.compute_instances {
                let id = InstanceId {
                    gpu: gpu.id,
                    compute: compute.id,
                };
                let access = instance.join(format!("ci{}/access", compute.id));
                wanted.insert(access, compute_minor(card, id));
            }
        }
        let minors: BTreeSet<u32> = wanted.values().copied().collect();
        let first = gpu_minor(card, 0);
        for minor in (first..first + MINORS_OF_CARD).filter(|minor| !minors.contains(minor)) {
            remove(&self.capability_node(minor))?;
        }
        remove_stale(&directory, &wanted)?;
        for (access, minor) in wanted {
            if access.exists() {
                continue;
            }
            let node = self.capability_node(minor);
            for parent in [node.parent(), access.parent()].into_iter().flatten() {
                fs::create_dir_all(parent)?;
            }
            make_node(&node)?;
            let text =
                format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
            fs::write(&access, text)?;
        }
        Ok(())
    }
}

/// Removes directories of destroyed instances.
fn remove_stale(directory: &Path, wanted: &BTreeMap<PathBuf, u32>) -> io::Result<()> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry?.path();
        if !path.is_dir() {
            continue;
        }
        if wanted.contains_key(&path.join("access")) {
            remove_stale(&path, wanted)?;
        } else {
            fs::remove_dir_all(&path)?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{ComputeInstanceState, GpuInstanceState};

    fn state(gpu_instances: &[(u32, &[u32])]) -> MigState {
        let compute = |id: &u32| ComputeInstanceState {
            id: *id,
            profile: 0,
            start: 0,
            slices: 1,
            multiprocessors: 16,
            uuid: String::new(),
            index: 0,
        };
        let gpu = |(id, computes): &(u32, &[u32])| GpuInstanceState {
            id: *id,
            profile: 19,
            start: 0,
            used_bytes: 0,
            compute_instances: computes.iter().map(compute).collect(),
        };
        MigState {
            enabled: true,
            pending: true,
            gpu_instances: gpu_instances.iter().map(gpu).collect(),
        }
    }

    #[test]
    fn creates_and_removes_capabilities_with_instances() {
        let directory = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(directory.path());
        let card = CardIndex(1);
        let id = |gpu, compute| InstanceId { gpu, compute };
        root.lay_out_instances(card, &state(&[(7, &[0, 1]), (2, &[])]))
            .unwrap();
        assert!(root.sees_instance(card, id(7, 1)));
        assert!(!root.sees_instance(card, id(2, 0)));
        assert!(!root.sees_instance(CardIndex(0), id(7, 1)));
        let access = "proc/driver/nvidia/capabilities/gpu1/mig/gi7/ci1/access";
        let text = fs::read_to_string(root.path().join(access)).unwrap();
        // 3 + 135 + 7 * 9 + 2: from the driver's table of minors.
        assert!(text.starts_with("DeviceFileMinor: 203\n"), "{text}");

        root.lay_out_instances(card, &state(&[(7, &[0])])).unwrap();
        assert!(root.sees_instance(card, id(7, 0)));
        assert!(!root.sees_instance(card, id(7, 1)));
        root.lay_out_instances(card, &state(&[])).unwrap();
        assert!(!root.sees_instance(card, id(7, 0)));
        assert!(!root.path().join(access).exists());
    }
}
