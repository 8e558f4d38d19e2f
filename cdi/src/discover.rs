//! Discovers the user-space NVIDIA driver under a driver root and selects the files for each device.
//!
//! A closed list ([`Part`]) decides which files are mounted; a file outside the list is never mounted, whatever its
//! name. The list keeps libraries that allocate device memory outside the CUDA driver API (graphics, video, OpenCL),
//! and would bypass the limits, out of containers with metered devices.

use std::path::PathBuf;

use crate::{ContainerEdits, DeviceNode, Hook, HookProgram, Link, Mount};

mod files;
mod libraries;
mod nodes;
mod parts;
mod root;

pub use files::{Binary, DataFile};
pub use libraries::{Library, Substitute};
pub use nodes::NodeError;
pub use parts::{METERED, Part, UNMETERED};
pub use root::{DriverRoot, RootError};

/// Disables `nvidia-container-runtime`'s own device injection on nodes where it is the default runtime.
const NO_OTHER_RUNTIME: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// The same for runtimes that are configured to take the devices from mounts instead of the environment.
const NO_OTHER_RUNTIME_MOUNT: &str = "/var/run/nvidia-container-devices/void";

/// Directory in which the library of GPUDirect Storage finds the PCI device of a disk.
const DEVICE_DATABASE: &str = "/run/udev";

/// The user-space NVIDIA driver of a node.
#[derive(Debug)]
pub struct Driver {
    root: DriverRoot,
    /// Tree with the device files; `None` where the driver root has them.
    devices: Option<DriverRoot>,
    version: Option<String>,
    libraries: Vec<Library>,
    binaries: Vec<Binary>,
    configs: Vec<DataFile>,
    firmware: Vec<DataFile>,
    sockets: Vec<String>,
    control_nodes: Vec<(Part, String)>,
}

/// Two views are equal if containers get the same files.
impl PartialEq for Driver {
    fn eq(&self, other: &Self) -> bool {
        let Self {
            root,
            devices,
            version,
            libraries,
            binaries,
            configs,
            firmware,
            sockets,
            control_nodes,
        } = self;
        let paths = |devices: &Option<DriverRoot>| {
            let devices = devices.as_ref();
            devices.map(|root| (root.mount().to_owned(), root.node().to_owned()))
        };
        (root.mount(), root.node()) == (other.root.mount(), other.root.node())
            && (paths(devices), configs) == (paths(&other.devices), &other.configs)
            && (version, libraries, binaries) == (&other.version, &other.libraries, &other.binaries)
            && (firmware, sockets, control_nodes)
                == (&other.firmware, &other.sockets, &other.control_nodes)
    }
}

/// The NVIDIA driver is missing or incomplete.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoverError {
    /// The driver root cannot be read.
    #[error(transparent)]
    Root(#[from] RootError),
    /// No directory has `libcuda.so.1`.
    #[error(
        "no libcuda.so.1 for this machine under the driver root {root} (searched {searched}); install the NVIDIA driver on this node, or set --driver-root"
    )]
    NoDriver {
        /// Driver root in this process's view.
        root: PathBuf,
        /// Directories searched.
        searched: String,
    },
    /// CUDA fails in containers that get libraries of another version than the kernel driver's.
    #[error(
        "the kernel driver has the version {kernel}, and libcuda.so.1 under the driver root {root} the version {files}; install \
         libcuda of the version {kernel}, or load the kernel driver of the version {files}"
    )]
    Version {
        /// Driver root in this process's view.
        root: PathBuf,
        /// Version of the kernel driver.
        kernel: String,
        /// Version of the libraries.
        files: String,
    },
    /// The libraries exist, the control device of the kernel driver does not.
    #[error(
        "no /dev/nvidiactl under the device root {root}; load the NVIDIA kernel driver (nvidia-modprobe creates the device nodes), or set --dev-root to the directory whose /dev has them, as / on GKE"
    )]
    NoControlNode {
        /// Device root in this process's view.
        root: PathBuf,
    },
}

impl Driver {
    /// Searches a driver root with device files. Takes some milliseconds; the result is valid until the NVIDIA driver is
    /// replaced.
    ///
    /// # Errors
    /// [`DiscoverError`], with the directories searched.
    pub fn discover(root: DriverRoot) -> Result<Self, DiscoverError> {
        Self::discover_with_devices(root, None, None)
    }

    /// As [`discover`](Self::discover), with the device files below `devices`, as on nodes whose NVIDIA driver is installed
    /// in a directory without `/dev`, and for the version of the kernel driver. Without that version it is the version of
    /// the file to which `libcuda.so.1` leads.
    ///
    /// # Errors
    /// [`DiscoverError`], with the directories searched.
    pub fn discover_with_devices(
        root: DriverRoot,
        devices: Option<DriverRoot>,
        kernel_version: Option<&str>,
    ) -> Result<Self, DiscoverError> {
        let found = libraries::find(&root, kernel_version);
        if !found.libraries.iter().any(Library::is_cuda) {
            return Err(DiscoverError::NoDriver {
                root: root.mount().to_owned(),
                searched: found.searched.join(", "),
            });
        }
        if let (Some(kernel), Some(files)) = (kernel_version, &found.version)
            && kernel != files
        {
            return Err(DiscoverError::Version {
                root: root.mount().to_owned(),
                kernel: kernel.to_owned(),
                files: files.clone(),
            });
        }
        let device_root = devices.as_ref().unwrap_or(&root);
        let control_nodes = nodes::control(device_root);
        if !control_nodes.iter().any(|(_, path)| path == nodes::CONTROL) {
            return Err(DiscoverError::NoControlNode {
                root: device_root.mount().to_owned(),
            });
        }
        Ok(Self {
            binaries: files::binaries(&root),
            configs: files::configs(&root),
            firmware: files::firmware(&root, found.version.as_deref()),
            sockets: files::sockets(&root),
            version: found.version,
            libraries: found.libraries,
            control_nodes,
            devices,
            root,
        })
    }

    /// Returns the driver root.
    #[must_use]
    pub fn root(&self) -> &DriverRoot {
        &self.root
    }

    /// Returns the tree with the device files.
    #[must_use]
    pub fn device_root(&self) -> &DriverRoot {
        self.devices.as_ref().unwrap_or(&self.root)
    }

    /// Returns the version of the libraries, such as `580.65.06`; `None` where no file name contains it.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// Returns the libraries, sorted by path.
    #[must_use]
    pub fn libraries(&self) -> &[Library] {
        &self.libraries
    }

    /// Returns the programs, sorted by path.
    #[must_use]
    pub fn binaries(&self) -> &[Binary] {
        &self.binaries
    }

    /// Returns the library with this SONAME.
    #[must_use]
    pub fn library(&self, soname: &str) -> Option<&Library> {
        self.libraries
            .iter()
            .find(|library| library.soname == soname)
    }

    /// Returns the edits for every device that may use `parts`: control nodes, libraries, programs, configuration, firmware,
    /// sockets, and the hooks that add the libraries to the container's loader cache and mask the parameters of the kernel
    /// driver. The GPU's own nodes come from [`Driver::gpu`].
    #[must_use]
    pub fn edits(&self, parts: &[Part], hook: &HookProgram) -> ContainerEdits {
        let wanted = |part: Part| parts.contains(&part);
        let libraries: Vec<&Library> = self
            .libraries
            .iter()
            .filter(|library| wanted(library.part))
            .collect();
        let binaries = self.binaries.iter().filter(|binary| wanted(binary.part));
        let nodes = self.control_nodes.iter().filter(|(part, _)| wanted(*part));

        let mounted = libraries.iter();
        let mut mounts: Vec<Mount> = mounted
            .map(|library| self.mounted_as(&library.path, &library.path))
            .collect();
        mounts.extend(binaries.map(|binary| self.mounted_as(&binary.path, &binary.container_path)));
        let files = self.firmware.iter().chain(&self.configs);
        mounts.extend(
            files
                .filter(|file| wanted(file.part))
                .map(|file| Mount::data(self.root.on_node(&file.path), &file.container_path)),
        );
        // A daemon may have ended since the discovery; a mount of a missing file keeps containers from starting.
        let sockets = self
            .sockets
            .iter()
            .filter(|path| files::is_socket(&self.root, path));
        mounts.extend(sockets.map(|path| Mount::data(self.root.on_node(path), path)));
        mounts.push(Mount::data("/dev/null", NO_OTHER_RUNTIME_MOUNT));
        if self
            .control_nodes
            .iter()
            .any(|(part, path)| wanted(*part) && nodes::is_storage(path))
            && let Some(directory) = self.root.directory(DEVICE_DATABASE)
        {
            mounts.push(Mount::data(self.root.on_node(&directory), DEVICE_DATABASE));
        }

        let links: Vec<Link> = libraries
            .iter()
            .flat_map(|library| library.container_links())
            .collect();
        let names: Vec<String> = libraries
            .iter()
            .flat_map(|library| library.container_names())
            .collect();
        let mut hooks = hook.symlinks(&links);
        hooks.extend(hook.ldcache(&names));
        hooks.push(hook.params());
        ContainerEdits {
            env: vec![NO_OTHER_RUNTIME.to_owned()],
            device_nodes: nodes.map(|(_, path)| self.node(path)).collect(),
            hooks,
            mounts,
        }
    }

    /// Returns the mounts that put substitutes in the place of their libraries: of the mounts at one path in a container, the
    /// last one counts. A substitute so has all names of its library; the library itself is mounted at
    /// [`Substitute::original`].
    #[must_use]
    pub fn substituted(&self, substitutes: &[Substitute]) -> Vec<Mount> {
        let mut mounts = Vec::new();
        for substitute in substitutes {
            if let Some(library) = self.library(&substitute.soname) {
                mounts.push(self.mounted_as(&library.path, &substitute.original));
                mounts.push(Mount::read_only(&substitute.host_path, &library.path));
            }
        }
        mounts
    }

    /// Returns the hook that prefers the CUDA compatibility libraries of newer images, for GPUs that support them. The driver
    /// supports CUDA up to `cuda_version`. Runs after the hooks of [`Driver::edits`].
    #[must_use]
    pub fn compat(&self, hook: &HookProgram, cuda_version: Option<&str>) -> Option<Hook> {
        let version = self.version.as_ref()?;
        Some(hook.compat(version, cuda_version))
    }

    /// Returns a GPU's device node and, for graphics, its nodes in `/dev/dri`. `pci_bus_id` is spelled as in sysfs.
    ///
    /// # Errors
    /// [`NodeError`] where the GPU, or for compute unified memory, has no device node under the driver root.
    pub fn gpu(
        &self,
        minor: u32,
        pci_bus_id: &str,
        parts: &[Part],
    ) -> Result<ContainerEdits, NodeError> {
        self.require_unified_memory(parts)?;
        let devices = self.device_root();
        let mut device_nodes = vec![self.node(&nodes::gpu(devices, minor)?)];
        if parts.contains(&Part::Graphics) || parts.contains(&Part::Display) {
            device_nodes.extend(
                nodes::dri(devices, pci_bus_id)
                    .iter()
                    .map(|path| self.node(path)),
            );
        }
        Ok(ContainerEdits {
            device_nodes,
            ..ContainerEdits::default()
        })
    }

    /// Returns the device nodes of a MIG compute instance: the GPU's node, and the capabilities of both instances.
    ///
    /// # Errors
    /// [`NodeError`] where a node or a capability file is missing.
    pub fn mig(
        &self,
        minor: u32,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<ContainerEdits, NodeError> {
        let mut device_nodes = vec![self.node(&self.partitionable(minor)?)];
        device_nodes.extend(nodes::capabilities(
            &self.root,
            minor,
            gpu_instance,
            compute_instance,
        )?);
        Ok(ContainerEdits {
            device_nodes,
            ..ContainerEdits::default()
        })
    }

    /// Checks that containers can get MIG devices of a GPU, before an instance exists.
    ///
    /// # Errors
    /// [`NodeError`] where a node or the major number of capabilities is missing.
    pub fn check_mig(&self, minor: u32) -> Result<(), NodeError> {
        self.partitionable(minor)?;
        nodes::capabilities_major(&self.root).map(drop)
    }

    /// Returns the node of a GPU whose MIG devices have what CUDA needs.
    fn partitionable(&self, minor: u32) -> Result<String, NodeError> {
        self.require_unified_memory(UNMETERED)?;
        nodes::gpu(self.device_root(), minor)
    }

    /// Checks that containers with compute libraries get the node that CUDA needs.
    fn require_unified_memory(&self, parts: &[Part]) -> Result<(), NodeError> {
        let has_node = |(_, path): &(Part, String)| path == nodes::UNIFIED_MEMORY;
        if !parts.contains(&Part::Compute) || self.control_nodes.iter().any(has_node) {
            return Ok(());
        }
        Err(NodeError::Missing {
            path: nodes::UNIFIED_MEMORY.to_owned(),
            root: self.device_root().mount().to_owned(),
        })
    }

    fn node(&self, path: &str) -> DeviceNode {
        DeviceNode::read_write(path, self.device_root().on_node(path))
    }

    fn mounted_as(&self, path: &str, container_path: &str) -> Mount {
        Mount::read_only(self.root.on_node(path), container_path)
    }
}
