//! The driver root: a directory laid out like the root of a host with the NVIDIA driver.
//!
//! `usr/lib/x86_64-linux-gnu/libcuda.so.1` and `libnvidia-ml.so.1` (with their versioned files),
//! `dev/nvidia<minor>`, `dev/nvidiactl`, `dev/nvidia-uvm`, `dev/nvidia-uvm-tools`,
//! `run/nvidia-persistenced/socket` (the daemon) and `run/simulator-machine/control`; for MIG also
//! `proc/driver/nvidia/capabilities`, `proc/driver/nvidia-caps/mig-minors` and `proc/devices`; the
//! PCI devices of GPUs and NVSwitches in `sys`; for the multi-process service `usr/bin/nvidia-cuda-mps-control` and
//! `nvidia-cuda-mps-server` with the C library that they need after a `chroot`; for NVSwitches `dev/nvidia-nvswitch*` and
//! `usr/bin/nv-fabricmanager`.
//!
//! A library finds the root from its own path: the same file serves a test on the host and, mounted
//! at `/usr/lib/x86_64-linux-gnu`, a container whose root is `/`. Device nodes are nodes of
//! `/dev/null`; only their presence matters.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, makedev, mknodat};
use rustix::io::Errno;

use crate::description::CapabilityNodes;
use crate::protocol::{GpuIndex, MigState};

mod capabilities;
mod pci;
mod programs;

pub use capabilities::CAPABILITIES_MAJOR;
pub use pci::PciDevice;
pub use programs::{FABRIC_MANAGER, MPS_CONTROL, MPS_SERVER};

/// Overrides the driver root that a library finds from its path.
pub const ROOT_VARIABLE: &str = "SIMULATOR_ROOT";

/// Library directory below the root, as Debian and Ubuntu lay it out.
pub const LIBRARY_DIR: &str = if cfg!(target_arch = "aarch64") {
    "usr/lib/aarch64-linux-gnu"
} else {
    "usr/lib/x86_64-linux-gnu"
};

/// A driver root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverRoot(PathBuf);

impl DriverRoot {
    /// Creates a root at a directory.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// Returns the root of a library: what precedes `/usr/` in its path, or `/`. [`ROOT_VARIABLE`]
    /// has precedence.
    #[must_use]
    pub fn of_library(library: Option<&Path>) -> Self {
        if let Some(root) = std::env::var_os(ROOT_VARIABLE) {
            return Self(root.into());
        }
        let Some(library) = library else {
            return Self::new("/");
        };
        let library = fs::canonicalize(library).unwrap_or_else(|_| library.to_owned());
        let usr = library
            .ancestors()
            .find(|ancestor| ancestor.file_name().is_some_and(|name| name == "usr"));
        Self::new(usr.and_then(Path::parent).unwrap_or(Path::new("/")))
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Directory of the libraries.
    #[must_use]
    pub fn library_dir(&self) -> PathBuf {
        self.0.join(LIBRARY_DIR)
    }

    /// The daemon's socket, at the path of `nvidia-persistenced`, which container runtimes mount.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.0.join("run/nvidia-persistenced/socket")
    }

    /// The control socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.0.join("run/simulator-machine/control")
    }

    /// Locked by the daemon that serves this root.
    #[must_use]
    pub fn lock_file(&self) -> PathBuf {
        self.0.join("run/simulator-machine/lock")
    }

    /// Device node of a GPU.
    #[must_use]
    pub fn device_node(&self, gpu: GpuIndex) -> PathBuf {
        self.0.join(format!("dev/nvidia{}", gpu.0))
    }

    /// Whether a GPU's device node is present, so that this process may use the GPU.
    #[must_use]
    pub fn sees(&self, gpu: GpuIndex) -> bool {
        self.device_node(gpu).exists()
    }

    /// Lays the root out, replacing the files of an earlier daemon.
    ///
    /// # Errors
    /// The path that could not be written.
    pub fn lay_out(&self, layout: &Layout<'_>) -> Result<(), LayOutError> {
        let at = |path: &Path, result: io::Result<()>| {
            result.map_err(|source| LayOutError {
                path: path.to_owned(),
                source,
            })
        };
        for directory in [
            self.library_dir(),
            self.0.join("dev"),
            self.0.join("run/nvidia-persistenced"),
            self.0.join("run/simulator-machine"),
        ] {
            at(&directory, fs::create_dir_all(&directory))?;
        }
        let control = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
            .map(|name| self.0.join("dev").join(name));
        let indices = (0..).map(GpuIndex).take(layout.devices.len());
        let gpus = indices.clone().map(|gpu| self.device_node(gpu));
        let switches = (0..layout.switches.len()).map(|index| format!("nvidia-nvswitch{index}"));
        let control_of_switches =
            (!layout.switches.is_empty()).then(|| "nvidia-nvswitchctl".to_owned());
        let switches = switches.chain(control_of_switches);
        let switches = switches.map(|name| self.0.join("dev").join(name));
        for node in control.into_iter().chain(gpus).chain(switches) {
            at(&node, make_node(&node, 0o666))?;
        }
        let capabilities = self.path().join("dev/nvidia-caps");
        at(&capabilities, self.lay_out_machine_capabilities())?;
        for gpu in indices {
            let nothing = MigState::default();
            let nodes = layout.capability_nodes;
            at(&capabilities, self.lay_out_instances(gpu, &nothing, nodes))?;
        }
        at(
            &self.path().join("sys"),
            pci::lay_out(
                &self.path().join("sys"),
                layout.devices.iter().chain(layout.switches),
            ),
        )?;
        let failed = |(path, source)| LayOutError { path, source };
        if let Some(libraries) = layout.files.libraries {
            for library in &LIBRARIES {
                library
                    .install(libraries, &self.library_dir(), layout)
                    .map_err(failed)?;
            }
        }
        if let Some(program) = layout.files.nvidia_smi {
            let directory = self.0.join("usr/bin");
            at(&directory, fs::create_dir_all(&directory))?;
            install(program, &directory, "nvidia-smi", unchanged).map_err(failed)?;
        }
        if layout.has_mps {
            self.install_mps().map_err(failed)?;
        }
        if !layout.switches.is_empty() {
            self.install_fabric_manager().map_err(failed)?;
        }
        Ok(())
    }

    /// Returns a directory of the root that no daemon laid out. A root with one belongs to others, and [`Self::lay_out`] would
    /// replace its files.
    #[must_use]
    pub fn foreign_directory(&self) -> Option<PathBuf> {
        let is_ours = self.lock_file().parent().is_some_and(Path::exists);
        // `proc` may be there: a node mounts the files of the kernel driver from it.
        let mut laid_out = ["dev", "sys", "usr"]
            .map(|name| self.0.join(name))
            .into_iter();
        laid_out.find(|directory| !is_ours && directory.exists())
    }

    /// Removes everything that [`Self::lay_out`] and the daemon created; the directory itself stays.
    ///
    /// # Errors
    /// The path that could not be removed.
    pub fn remove(&self) -> Result<(), RemoveError> {
        // `run` marks the root as ours, so it is the last.
        for name in [
            "dev", "lib", "lib64", "proc", "sys", "tmp", "usr", "var", "run",
        ] {
            let path = self.0.join(name);
            match fs::remove_dir_all(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(RemoveError { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Files that are installed into a driver root.
#[derive(Clone, Copy, Debug, Default)]
pub struct Files<'a> {
    /// Directory with the built libraries.
    pub libraries: Option<&'a Path>,
    /// Program to install as `nvidia-smi`.
    pub nvidia_smi: Option<&'a Path>,
}

/// A path of the driver root could not be removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot remove {} of the driver root", path.display())]
pub struct RemoveError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Parameters of [`DriverRoot::lay_out`].
#[derive(Clone, Copy, Debug)]
pub struct Layout<'a> {
    /// PCI devices of the GPUs.
    pub devices: &'a [PciDevice],
    /// PCI devices of the NVSwitches.
    pub switches: &'a [PciDevice],
    /// Suffix of the library files.
    pub driver_version: &'a str,
    /// Whether the NVML library has the functions of memory limits.
    pub has_memory_limits: bool,
    /// Files to install.
    pub files: Files<'a>,
    /// Whether the programs of the multi-process service are installed.
    pub has_mps: bool,
    /// Device nodes of MIG capabilities.
    pub capability_nodes: CapabilityNodes,
}

/// A path of the driver root could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot lay out the driver root: {}", path.display())]
pub struct LayOutError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

struct Library {
    built: &'static str,
    stem: &'static str,
}

/// File names of the libraries: cargo's and the driver's.
const LIBRARIES: [Library; 2] = [
    Library {
        built: "libsimulator_cuda.so",
        stem: "libcuda.so",
    },
    Library {
        built: "libsimulator_nvml.so",
        stem: "libnvidia-ml.so",
    },
];

impl Library {
    fn install(
        &self,
        from: &Path,
        to: &Path,
        layout: &Layout<'_>,
    ) -> Result<(), (PathBuf, io::Error)> {
        let file = format!("{}.{}", self.stem, layout.driver_version);
        let edit = match layout.has_memory_limits {
            true => unchanged,
            false => without_memory_limits,
        };
        install(&from.join(self.built), to, &file, edit)?;
        let link = to.join(format!("{}.1", self.stem));
        replace_link(Path::new(&file), &link).map_err(|error| (link, error))
    }
}

/// Copies `source` to `file` of the directory `to`, under a temporary name first: a process may have the old file mapped.
fn install(
    source: &Path,
    to: &Path,
    file: &str,
    edit: fn(&Path) -> io::Result<()>,
) -> Result<(), (PathBuf, io::Error)> {
    let temporary = to.join(format!(".{file}.new"));
    fs::copy(source, &temporary).map_err(|error| (source.to_owned(), error))?;
    edit(&temporary).map_err(|error| (temporary.clone(), error))?;
    let target = to.join(file);
    fs::rename(&temporary, &target).map_err(|error| (target, error))
}

fn unchanged(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Renames the functions of memory limits in a library, so that it has no such symbols, as that of an older release.
fn without_memory_limits(library: &Path) -> io::Result<()> {
    let mut bytes = fs::read(library)?;
    for name in [
        b"nvmlDeviceSetMemoryLimits_v1",
        b"nvmlDeviceGetMemoryLimits_v1",
    ] {
        let mut from = 0;
        while let Some(at) = find(bytes.get(from..).unwrap_or_default(), name) {
            let (start, end) = (from + at, from + at + name.len());
            if let Some(found) = bytes.get_mut(start..end) {
                found.make_ascii_uppercase();
            }
            from = end;
        }
    }
    fs::write(library, bytes)
}

fn find(bytes: &[u8], name: &[u8]) -> Option<usize> {
    bytes.windows(name.len()).position(|window| window == name)
}

fn replace_link(target: &Path, link: &Path) -> io::Result<()> {
    match fs::remove_file(link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    symlink(target, link)
}

/// Creates a character device 1:3, or an empty file without the privilege.
fn make_node(path: &Path, mode: u32) -> io::Result<()> {
    let made = mknodat(
        rustix::fs::CWD,
        path,
        FileType::CharacterDevice,
        Mode::from_raw_mode(mode),
        makedev(1, 3),
    );
    match made {
        Ok(()) => set_mode(path, mode),
        Err(Errno::EXIST) => Ok(()),
        Err(Errno::PERM | Errno::ACCESS) if path.exists() => Ok(()),
        Err(Errno::PERM | Errno::ACCESS) => {
            fs::write(path, [])?;
            set_mode(path, mode)
        }
        Err(errno) => Err(errno.into()),
    }
}

/// The umask does not apply to the driver's nodes.
fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derives_the_root_from_the_library_path() {
        let of = |path: &str| DriverRoot::of_library(Some(Path::new(path)));
        assert_eq!(
            of("/opt/sim/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
            DriverRoot::new("/opt/sim")
        );
        assert_eq!(of("/usr/lib64/libcuda.so.1"), DriverRoot::new("/"));
        assert_eq!(of("/usr/local/lib/libcuda.so.1"), DriverRoot::new("/"));
        assert_eq!(
            of("/target/debug/libsimulator_cuda.so"),
            DriverRoot::new("/")
        );
        assert_eq!(DriverRoot::of_library(None), DriverRoot::new("/"));
    }

    fn device(bus: u8) -> PciDevice {
        PciDevice {
            bus_id: crate::description::BusId {
                domain: 0,
                bus,
                device: 0,
            },
            class: 0x03_02_00,
            device_id: 0x2330_10de,
            subsystem_id: 0x16c1_10de,
            numa_node: None,
        }
    }

    #[test]
    fn replaces_libraries_and_keeps_nodes_at_relayout() {
        let built = tempfile::tempdir().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(directory.path());
        for content in ["old", "new"] {
            for library in &LIBRARIES {
                fs::write(built.path().join(library.built), content).unwrap();
            }
            fs::write(built.path().join("view"), content).unwrap();
            root.lay_out(&Layout {
                devices: &[device(0x1b), device(0x9d)],
                switches: &[],
                driver_version: "580.65.06",
                has_memory_limits: true,
                files: Files {
                    libraries: Some(built.path()),
                    nvidia_smi: Some(&built.path().join("view")),
                },
                has_mps: false,
                capability_nodes: CapabilityNodes::OnDemand,
            })
            .unwrap();
            let linked = root.library_dir().join("libcuda.so.1");
            assert_eq!(fs::read_to_string(linked).unwrap(), content);
            let program = directory.path().join("usr/bin/nvidia-smi");
            assert_eq!(fs::read_to_string(program).unwrap(), content);
        }
        assert!(root.sees(GpuIndex(1)));
        assert!(!root.sees(GpuIndex(2)));
    }

    #[test]
    fn names_a_missing_library() {
        let built = tempfile::tempdir().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let error = DriverRoot::new(directory.path())
            .lay_out(&Layout {
                devices: &[],
                switches: &[],
                driver_version: "1",
                has_memory_limits: false,
                files: Files {
                    libraries: Some(built.path()),
                    nvidia_smi: Some(&built.path().join("view")),
                },
                has_mps: false,
                capability_nodes: CapabilityNodes::OnDemand,
            })
            .unwrap_err();
        assert!(
            error.to_string().contains("libsimulator_cuda.so"),
            "{error}"
        );
    }
}
