//! MIG capabilities, as in the driver: files in `/proc` with the minor numbers of configuration, of
//! monitoring, of every GPU instance and every compute instance.
//!
//! `proc/driver/nvidia/capabilities` has the files of existing instances;
//! `proc/driver/nvidia-caps/mig-minors` lists the minor numbers of all possible instances;
//! `proc/devices` has the major number. The kernel driver creates no device nodes: programs do, as
//! `nvidia-modprobe`, which NVIDIA's libraries run. So a process may use an instance if it sees both
//! of its nodes, or, outside of containers, both of its files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::description::CapabilityNodes;
use crate::protocol::{GpuIndex, InstanceId, MigState};

use super::{DriverRoot, make_node};

/// GPUs in the driver's table of minor numbers.
const GPUS: u32 = 32;
/// GPU instances of a GPU in the table.
const GPU_INSTANCES: u32 = 15;
/// Compute instances of a GPU instance in the table.
const COMPUTE_INSTANCES: u32 = 8;

/// Minor numbers of a GPU.
const MINORS_OF_GPU: u32 = GPU_INSTANCES * MINORS_OF_INSTANCE;
/// Minor numbers of a GPU instance and its compute instances.
const MINORS_OF_INSTANCE: u32 = 1 + COMPUTE_INSTANCES;
/// Lower minors are not for instances.
const FIRST_MINOR: u32 = 3;
/// Capabilities of the whole machine: name, minor number, mode of the device node.
const MACHINE: [(&str, u32, u32); 2] = [("config", 1, 0o400), ("monitor", 2, INSTANCE_MODE)];
/// Mode of the device nodes of instances.
const INSTANCE_MODE: u32 = 0o444;

fn gpu_instance_minor(gpu: GpuIndex, gpu_instance: u32) -> u32 {
    FIRST_MINOR + gpu.0 * MINORS_OF_GPU + gpu_instance * MINORS_OF_INSTANCE
}

fn compute_minor(gpu: GpuIndex, id: InstanceId) -> u32 {
    gpu_instance_minor(gpu, id.gpu_instance) + 1 + id.compute
}

impl DriverRoot {
    /// Device node of a capability.
    #[must_use]
    pub fn capability_node(&self, minor: u32) -> PathBuf {
        let node = format!("dev/nvidia-caps/nvidia-cap{minor}");
        self.path().join(node)
    }

    fn capabilities(&self, gpu: GpuIndex) -> PathBuf {
        let directory = format!("proc/driver/nvidia/capabilities/gpu{}/mig", gpu.0);
        self.path().join(directory)
    }

    /// Whether this process may use an instance: it sees the nodes, or the files by which it could
    /// create them.
    #[must_use]
    pub fn sees_instance(&self, gpu: GpuIndex, id: InstanceId) -> bool {
        let gpu_instance = self
            .capabilities(gpu)
            .join(format!("gi{}", id.gpu_instance));
        let files = [
            gpu_instance.join("access"),
            gpu_instance.join(format!("ci{}/access", id.compute)),
        ];
        let nodes = [
            gpu_instance_minor(gpu, id.gpu_instance),
            compute_minor(gpu, id),
        ];
        let has_nodes = nodes
            .into_iter()
            .all(|minor| self.capability_node(minor).exists());
        has_nodes || files.iter().all(|file| file.exists())
    }

    /// Lays out the capabilities of the whole machine, the table of all minor numbers, and the major
    /// number. The nodes of the two capabilities exist on most machines: administrators use them.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn lay_out_machine_capabilities(&self) -> io::Result<()> {
        let directory = self.path().join("proc/driver/nvidia/capabilities/mig");
        for (name, minor, mode) in MACHINE {
            self.create_capability_node(minor, mode)?;
            lay_out_capability(&directory.join(name), minor, mode)?;
        }
        fs::write(self.path().join("proc/devices"), table_of_majors())?;
        let table = self.path().join("proc/driver/nvidia-caps");
        fs::create_dir_all(&table)?;
        fs::write(table.join("mig-minors"), table_of_minors())
    }

    fn create_capability_node(&self, minor: u32, mode: u32) -> io::Result<()> {
        let node = self.capability_node(minor);
        if let Some(parent) = node.parent() {
            fs::create_dir_all(parent)?;
        }
        make_node(&node, mode)
    }

    /// Lays out the capabilities of existing instances. Correct files are not replaced, since they
    /// may be open. Device nodes are created with [`CapabilityNodes::Created`] only.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn lay_out_instances(
        &self,
        gpu: GpuIndex,
        state: &MigState,
        nodes: CapabilityNodes,
    ) -> io::Result<()> {
        let directory = self.capabilities(gpu);
        let mut wanted: BTreeMap<PathBuf, u32> = BTreeMap::new();
        for gpu_instance in &state.gpu_instances {
            let instance = directory.join(format!("gi{}", gpu_instance.id));
            wanted.insert(
                instance.join("access"),
                gpu_instance_minor(gpu, gpu_instance.id),
            );
            for compute in &gpu_instance.compute_instances {
                let id = InstanceId {
                    gpu_instance: gpu_instance.id,
                    compute: compute.id,
                };
                let access = instance.join(format!("ci{}/access", compute.id));
                wanted.insert(access, compute_minor(gpu, id));
            }
        }
        let minors: BTreeSet<u32> = wanted.values().copied().collect();
        let first = gpu_instance_minor(gpu, 0);
        for minor in (first..first + MINORS_OF_GPU).filter(|minor| !minors.contains(minor)) {
            remove(&self.capability_node(minor))?;
        }
        remove_stale(&directory, &wanted)?;
        for (access, minor) in wanted {
            if access.exists() {
                continue;
            }
            if nodes == CapabilityNodes::Created {
                self.create_capability_node(minor, INSTANCE_MODE)?;
            }
            lay_out_capability(&access, minor, INSTANCE_MODE)?;
        }
        Ok(())
    }
}

/// Writes the file with the minor number of a capability.
fn lay_out_capability(file: &Path, minor: u32, mode: u32) -> io::Result<()> {
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent)?;
    }
    let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n");
    fs::write(file, text)
}

/// Major number of the capabilities; the kernel chooses it when the module is loaded.
pub const CAPABILITIES_MAJOR: u32 = 237;

/// The kernel's `/proc/devices`, shortened.
fn table_of_majors() -> String {
    format!(
        "Character devices:\n  1 mem\n  5 /dev/tty\n195 nvidia\n195 nvidiactl\n{CAPABILITIES_MAJOR} nvidia-caps\n\
         510 nvidia-uvm\n\nBlock devices:\n  7 loop\n259 blkext\n"
    )
}

/// The driver's `mig-minors`: one line per capability.
fn table_of_minors() -> String {
    let mut text = String::new();
    let mut line = |name: std::fmt::Arguments<'_>, minor: u32| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name} {minor}");
    };
    for (name, minor, _) in MACHINE {
        line(format_args!("{name}"), minor);
    }
    for gpu in 0..GPUS {
        for gpu_instance in 0..GPU_INSTANCES {
            let minor = gpu_instance_minor(GpuIndex(gpu), gpu_instance);
            line(format_args!("gpu{gpu}/gi{gpu_instance}/access"), minor);
            for compute in 0..COMPUTE_INSTANCES {
                let minor = compute_minor(
                    GpuIndex(gpu),
                    InstanceId {
                        gpu_instance,
                        compute,
                    },
                );
                line(
                    format_args!("gpu{gpu}/gi{gpu_instance}/ci{compute}/access"),
                    minor,
                );
            }
        }
    }
    text
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
    use std::os::unix::fs::symlink;

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
        let gpu_instance = |(id, computes): &(u32, &[u32])| GpuInstanceState {
            id: *id,
            profile: 19,
            start: 0,
            used_bytes: 0,
            compute_instances: computes.iter().map(compute).collect(),
        };
        MigState {
            enabled: true,
            pending: true,
            gpu_instances: gpu_instances.iter().map(gpu_instance).collect(),
        }
    }

    #[test]
    fn creates_and_removes_capabilities_with_instances() {
        let directory = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(directory.path());
        let gpu = GpuIndex(1);
        let id = |gpu_instance, compute| InstanceId {
            gpu_instance,
            compute,
        };
        let lay_out = |instances| {
            root.lay_out_instances(gpu, &state(instances), CapabilityNodes::OnDemand)
                .unwrap();
        };
        lay_out(&[(7, &[0, 1]), (2, &[])]);
        assert!(root.sees_instance(gpu, id(7, 1)));
        assert!(!root.capability_node(203).exists(), "programs create nodes");
        assert!(!root.sees_instance(gpu, id(2, 0)));
        assert!(!root.sees_instance(GpuIndex(0), id(7, 1)));
        let access = "proc/driver/nvidia/capabilities/gpu1/mig/gi7/ci1/access";
        let text = fs::read_to_string(root.path().join(access)).unwrap();
        // 3 + 135 + 7 * 9 + 2: from the driver's table of minors.
        assert_eq!(
            text,
            "DeviceFileMinor: 203\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
        );

        // A container has nodes but no files.
        root.create_capability_node(compute_minor(gpu, id(7, 1)), INSTANCE_MODE)
            .unwrap();
        let container = DriverRoot::new(directory.path().join("container"));
        fs::create_dir(container.path()).unwrap();
        symlink(directory.path().join("dev"), container.path().join("dev")).unwrap();
        assert!(!container.sees_instance(gpu, id(7, 1)));
        root.create_capability_node(gpu_instance_minor(gpu, 7), INSTANCE_MODE)
            .unwrap();
        assert!(container.sees_instance(gpu, id(7, 1)));

        lay_out(&[(7, &[0])]);
        assert!(root.sees_instance(gpu, id(7, 0)));
        assert!(!root.sees_instance(gpu, id(7, 1)));
        lay_out(&[]);
        assert!(!root.sees_instance(gpu, id(7, 0)));
        assert!(!root.path().join(access).exists());

        root.lay_out_instances(gpu, &state(&[(7, &[1])]), CapabilityNodes::Created)
            .unwrap();
        assert!(root.capability_node(203).exists(), "the option");
    }

    #[test]
    fn lays_out_configuration_and_monitoring() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(directory.path());
        root.lay_out_machine_capabilities().unwrap();
        // Instances come and go; the capabilities of the machine stay.
        for instances in [&[(1, &[0][..])][..], &[]] {
            root.lay_out_instances(GpuIndex(0), &state(instances), CapabilityNodes::OnDemand)
                .unwrap();
        }
        let devices = fs::read_to_string(root.path().join("proc/devices")).unwrap();
        assert!(devices.contains("\n237 nvidia-caps\n"), "{devices}");
        for (name, minor, mode) in [("config", 1, 256), ("monitor", 2, 292)] {
            let file = format!("proc/driver/nvidia/capabilities/mig/{name}");
            assert_eq!(
                fs::read_to_string(root.path().join(file)).unwrap(),
                format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n")
            );
            let node = fs::metadata(root.capability_node(minor)).unwrap();
            assert_eq!(node.permissions().mode() & 0o777, mode, "{name}");
        }
    }

    #[test]
    fn lists_minors_of_all_possible_instances() {
        let table = table_of_minors();
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(
            lines[..5],
            [
                "config 1",
                "monitor 2",
                "gpu0/gi0/access 3",
                "gpu0/gi0/ci0/access 4",
                "gpu0/gi0/ci1/access 5"
            ]
        );
        // Minors of two instances on a real A100, and the first of its neighbor.
        for line in [
            "gpu0/gi2/ci0/access 22",
            "gpu0/gi3/ci0/access 31",
            "gpu1/gi0/access 138",
        ] {
            assert!(lines.contains(&line), "{line}");
        }
        assert_eq!(lines.len(), 2 + 32 * 15 * 9);
        assert_eq!(lines.last(), Some(&"gpu31/gi14/ci7/access 4322"));
    }
}
