//! Finds the user-space NVIDIA driver under a driver root, and says what of it a device gets.
//!
//! What is mounted is decided by a closed list ([`Part`]): a file that is not on it is not mounted, however much its
//! name looks like NVIDIA's. That is what keeps ways around the limits (graphics, video, OpenCL allocate device memory
//! outside the CUDA driver API) away from metered devices.

use std::path::PathBuf;

use crate::{ContainerEdits, DeviceNode, HookProgram, Link, Mount};

mod files;
mod libraries;
mod nodes;
mod parts;
mod root;

pub use files::Binary;
pub use libraries::{Library, Substitute};
pub use nodes::NodeError;
pub use parts::{METERED, Part, UNMETERED};
pub use root::{DriverRoot, RootError};

/// Tells `nvidia-container-runtime`, where it is the node's default runtime, to add nothing of its own.
const NO_OTHER_RUNTIME: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// The user-space driver of a node, as it was found.
#[derive(Debug)]
pub struct Driver {
    root: DriverRoot,
    version: Option<String>,
    libraries: Vec<Library>,
    binaries: Vec<Binary>,
    firmware: Vec<String>,
    sockets: Vec<String>,
    control_nodes: Vec<(Part, String)>,
}

/// The driver was not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoverError {
    /// The driver root cannot be read.
    #[error(transparent)]
    Root(#[from] RootError),
    /// No `libcuda.so.1` in any directory.
    #[error(
        "no libcuda.so.1 for this machine under the driver root {root} (searched {searched}): install the NVIDIA driver on this node, or point --driver-root at it"
    )]
    NoDriver {
        /// The root, as this process sees it.
        root: PathBuf,
        /// The directories searched.
        searched: String,
    },
    /// The driver's libraries are there, the device file that controls the kernel driver is not.
    #[error(
        "no /dev/nvidiactl under the driver root {root}: load the NVIDIA kernel driver (nvidia-modprobe makes the device files)"
    )]
    NoControlNode {
        /// The root, as this process sees it.
        root: PathBuf,
    },
}

impl Driver {
    /// Looks through the driver root. Takes some milliseconds; the result is good until the driver is replaced.
    ///
    /// # Errors
    /// [`DiscoverError`], with the directories searched.
    pub fn discover(root: DriverRoot) -> Result<Self, DiscoverError> {
        let found = libraries::find(&root)?;
        if !found.libraries.iter().any(Library::is_cuda) {
            return Err(DiscoverError::NoDriver {
                root: root.mount().to_owned(),
                searched: found.searched.join(", "),
            });
        }
        let control_nodes = nodes::control(&root);
        if !control_nodes.iter().any(|(_, path)| path == nodes::CONTROL) {
            return Err(DiscoverError::NoControlNode {
                root: root.mount().to_owned(),
            });
        }
        Ok(Self {
            binaries: files::binaries(&root),
            firmware: files::firmware(&root, found.version.as_deref()),
            sockets: files::sockets(&root),
            version: found.version,
            libraries: found.libraries,
            control_nodes,
            root,
        })
    }

    /// The driver root.
    #[must_use]
    pub fn root(&self) -> &DriverRoot {
        &self.root
    }

    /// Version of the libraries, such as `580.65.06`; `None` where file names do not tell.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// The libraries found, by path.
    #[must_use]
    pub fn libraries(&self) -> &[Library] {
        &self.libraries
    }

    /// The programs found, by path.
    #[must_use]
    pub fn binaries(&self) -> &[Binary] {
        &self.binaries
    }

    /// The library that programs know by this name.
    #[must_use]
    pub fn library(&self, soname: &str) -> Option<&Library> {
        self.libraries
            .iter()
            .find(|library| library.soname == soname)
    }

    /// What every device needs that may use `parts`: control nodes, libraries, programs, firmware, sockets, and the
    /// hooks that make the libraries known to the container's loader. Without the card itself ([`Driver::card`]).
    ///
    /// Libraries that have a substitute are mounted where that says. The substitute has their place, and so all of
    /// their names.
    #[must_use]
    pub fn edits(
        &self,
        parts: &[Part],
        substitutes: &[Substitute],
        hook: &HookProgram,
    ) -> ContainerEdits {
        let wanted = |part: Part| parts.contains(&part);
        let libraries: Vec<&Library> = self
            .libraries
            .iter()
            .filter(|library| wanted(library.part))
            .collect();
        let binaries = self.binaries.iter().filter(|binary| wanted(binary.part));
        let nodes = self.control_nodes.iter().filter(|(part, _)| wanted(*part));

        let mut mounts: Vec<Mount> = Vec::new();
        for library in &libraries {
            let of_it = |substitute: &&Substitute| substitute.soname == library.soname;
            if let Some(substitute) = substitutes.iter().find(of_it) {
                mounts.push(self.mounted_as(&library.path, &substitute.original));
                mounts.push(Mount::read_only(&substitute.host_path, &library.path));
            } else {
                mounts.push(self.mounted_as(&library.path, &library.path));
            }
        }
        mounts.extend(binaries.map(|binary| self.mounted_as(&binary.path, &binary.container_path)));
        mounts.extend(
            self.firmware
                .iter()
                .map(|path| Mount::data(self.root.on_node(path), path)),
        );
        mounts.extend(
            self.sockets
                .iter()
                .map(|path| Mount::data(self.root.on_node(path), path)),
        );

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
        ContainerEdits {
            env: vec![NO_OTHER_RUNTIME.to_owned()],
            device_nodes: nodes.map(|(_, path)| self.node(path)).collect(),
            hooks,
            mounts,
        }
    }

    /// The device node of one card, and for graphics its nodes in `/dev/dri`. `pci_bus_id` in the spelling of sysfs.
    ///
    /// # Errors
    /// [`NodeError`] where the card has no device node under the driver root.
    pub fn card(
        &self,
        minor: u32,
        pci_bus_id: &str,
        parts: &[Part],
    ) -> Result<ContainerEdits, NodeError> {
        let mut device_nodes = vec![self.node(&nodes::card(&self.root, minor)?)];
        if parts.contains(&Part::Graphics) || parts.contains(&Part::Display) {
            device_nodes.extend(
                nodes::dri(&self.root, pci_bus_id)
                    .iter()
                    .map(|path| self.node(path)),
            );
        }
        Ok(ContainerEdits {
            device_nodes,
            ..ContainerEdits::default()
        })
    }

    /// The device nodes that open one MIG compute instance: the card's, and the capabilities of both instances.
    ///
    /// # Errors
    /// [`NodeError`] where a node or a capability file is missing.
    pub fn mig(
        &self,
        minor: u32,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<ContainerEdits, NodeError> {
        let mut paths = vec![nodes::card(&self.root, minor)?];
        paths.extend(nodes::capabilities(
            &self.root,
            minor,
            gpu_instance,
            compute_instance,
        )?);
        let device_nodes = paths.iter().map(|path| self.node(path)).collect();
        Ok(ContainerEdits {
            device_nodes,
            ..ContainerEdits::default()
        })
    }

    fn node(&self, path: &str) -> DeviceNode {
        DeviceNode::read_write(path, self.root.on_node(path))
    }

    fn mounted_as(&self, path: &str, container_path: &str) -> Mount {
        Mount::read_only(self.root.on_node(path), container_path)
    }
}
