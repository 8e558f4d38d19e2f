//! Finds the device nodes of GPUs, MIG devices and the kernel driver.

use std::io::{Read, Result};
use std::path::PathBuf;

use rustix::fs::FileType;

use super::{DriverRoot, Part};
use crate::{DeviceNode, DeviceNumber};

/// Control node of the kernel driver, opened by every client.
pub(super) const CONTROL: &str = "/dev/nvidiactl";

/// Node of unified memory. CUDA needs it for every allocation; its module is often loaded after the node has started.
pub(super) const UNIFIED_MEMORY: &str = "/dev/nvidia-uvm";

/// Device nodes that belong to no single GPU.
///
/// Of the channels of the IMEX service only the first is listed: an administrator creates it for nodes whose tenants trust
/// each other; NVIDIA's DRA driver creates the others for its compute domains.
const CONTROL_NODES: [(Part, &str); 6] = [
    (Part::Utility, CONTROL),
    (Part::Compute, UNIFIED_MEMORY),
    (Part::Compute, "/dev/nvidia-uvm-tools"),
    (Part::Display, "/dev/nvidia-modeset"),
    (Part::Transfer, "/dev/gdrdrv"),
    (Part::Transfer, "/dev/nvidia-caps-imex-channels/channel0"),
];

/// Device nodes of GPUDirect Storage: this prefix and a number.
const STORAGE: &str = "/dev/nvidia-fs";

/// Directory with the minor numbers of MIG capabilities. Files of `/proc` are read from the driver root, or from this
/// process's `/proc` where the root has none, as with the GPU operator's driver container.
const CAPABILITIES: &str = "/proc/driver/nvidia/capabilities";

/// Major numbers of the kernel's drivers.
const DEVICES: &str = "/proc/devices";

/// Name of MIG capabilities in [`DEVICES`].
const CAPABILITIES_DRIVER: &str = "nvidia-caps";

/// Size limit of the files.
const MAX_BYTES: u64 = 64 << 10;

/// A device has no usable node.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The node is missing or not a character device.
    #[error(
        "no device node {path} under the device root {root}; run `nvidia-modprobe -c 0 -u` to load the modules and create it"
    )]
    Missing {
        /// Path in the tree.
        path: String,
        /// Device root in this process's view.
        root: PathBuf,
    },
    /// The capability file cannot be read.
    #[error(
        "cannot read the MIG capability {path}; check that the MIG instance exists and that /proc/driver/nvidia is visible"
    )]
    Capability {
        /// Capability file.
        path: String,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The kernel driver has no major number for capabilities.
    #[error(
        "/proc/devices has no major number {CAPABILITIES_DRIVER}, so that containers cannot get MIG devices; load the NVIDIA \
         kernel driver, release 450 or later"
    )]
    NoCapabilities,
    /// The capability file has no minor number.
    #[error("the MIG capability {path} contains no DeviceFileMinor")]
    CapabilityContents {
        /// Capability file.
        path: String,
    },
}

/// Returns the existing nodes that belong to no single GPU.
pub(super) fn control(root: &DriverRoot) -> Vec<(Part, String)> {
    let listed = CONTROL_NODES.map(|(part, path)| (part, path.to_owned()));
    let names = root.names("/dev").into_iter();
    let storage = names
        .map(|name| format!("/dev/{name}"))
        .filter(|path| is_storage(path))
        .map(|path| (Part::Transfer, path));
    listed
        .into_iter()
        .chain(storage)
        .filter(|(_, path)| is_character_device(root, path))
        .collect()
}

/// Returns whether a node is one of GPUDirect Storage.
pub(super) fn is_storage(path: &str) -> bool {
    let number = path.strip_prefix(STORAGE);
    number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Returns the node of a GPU.
pub(super) fn gpu(root: &DriverRoot, minor: u32) -> std::result::Result<String, NodeError> {
    present(root, format!("/dev/nvidia{minor}"))
}

/// Returns a GPU's nodes in `/dev/dri`, found by PCI address; none without the display driver.
pub(super) fn dri(root: &DriverRoot, pci_bus_id: &str) -> Vec<String> {
    let node = |kind| root.resolve(&format!("/dev/dri/by-path/pci-{pci_bus_id}-{kind}"));
    ["card", "render"]
        .into_iter()
        .filter_map(node)
        .filter(|(_, kind)| kind.is_char_device())
        .map(|(path, _)| path)
        .collect()
}

/// Returns the nodes of the capabilities of a MIG compute instance and its GPU instance. The host need not have them: the
/// kernel driver creates no nodes, and no program has used a new instance.
pub(super) fn capabilities(
    root: &DriverRoot,
    minor: u32,
    gpu_instance: u32,
    compute_instance: u32,
) -> std::result::Result<[DeviceNode; 2], NodeError> {
    let major = capabilities_major(root)?;
    let gpu = format!("{CAPABILITIES}/gpu{minor}/mig/gi{gpu_instance}");
    Ok([
        capability(root, major, format!("{gpu}/access"))?,
        capability(root, major, format!("{gpu}/ci{compute_instance}/access"))?,
    ])
}

/// Returns the major number of MIG capabilities.
pub(super) fn capabilities_major(root: &DriverRoot) -> std::result::Result<u32, NodeError> {
    let text = read(root, DEVICES).unwrap_or_default();
    character_major(&text, CAPABILITIES_DRIVER).ok_or(NodeError::NoCapabilities)
}

fn capability(
    root: &DriverRoot,
    major: u32,
    path: String,
) -> std::result::Result<DeviceNode, NodeError> {
    let text = match read(root, &path) {
        Ok(text) => text,
        Err(source) => return Err(NodeError::Capability { path, source }),
    };
    let Some(minor) = device_file_minor(&text) else {
        return Err(NodeError::CapabilityContents { path });
    };
    let path = format!("/dev/nvidia-caps/nvidia-cap{minor}");
    Ok(DeviceNode::numbered(path, DeviceNumber { major, minor }))
}

/// Parses the number of a character device in the text of [`DEVICES`]: lines of number and name below a heading, up to an
/// empty line.
fn character_major(text: &str, name: &str) -> Option<u32> {
    let mut lines = text.lines().map(str::trim);
    lines.find(|line| *line == "Character devices:")?;
    let numbers = lines.take_while(|line| !line.is_empty());
    let mut numbers = numbers.filter_map(|line| line.split_once(' '));
    let (number, _) = numbers.find(|(_, of)| *of == name)?;
    number.parse().ok()
}

fn read(root: &DriverRoot, path: &str) -> Result<String> {
    let file = match root.read(path) {
        Ok(file) => file,
        Err(_) => std::fs::File::open(path)?,
    };
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// Parses the number in the line `DeviceFileMinor: <number>`.
fn device_file_minor(text: &str) -> Option<u32> {
    text.lines()
        .find_map(|line| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok())
}

fn present(root: &DriverRoot, path: String) -> std::result::Result<String, NodeError> {
    if is_character_device(root, &path) {
        return Ok(path);
    }
    Err(NodeError::Missing {
        path,
        root: root.mount().to_owned(),
    })
}

fn is_character_device(root: &DriverRoot, path: &str) -> bool {
    root.resolve(path)
        .is_some_and(|(_, kind)| kind == FileType::CharacterDevice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_minor_number_of_capability() {
        let text = "DeviceFileMinor: 30\nDeviceFileMode: 292\nDeviceFileModify: 1\n";
        assert_eq!(device_file_minor(text), Some(30));
        assert_eq!(device_file_minor("DeviceFileMode: 292\n"), None);
        assert_eq!(device_file_minor("DeviceFileMinor: many\n"), None);
    }

    #[test]
    fn parses_major_number_of_character_devices_only() {
        let text = "Character devices:\n  1 mem\n195 nvidia\n235 nvidia-caps-imex-channels\n237 nvidia-caps\n\n\
                    Block devices:\n  7 loop\n";
        assert_eq!(character_major(text, "nvidia-caps"), Some(237));
        assert_eq!(character_major(text, "mem"), Some(1));
        for name in ["loop", "nvidia-cap", "caps"] {
            assert_eq!(character_major(text, name), None, "{name}");
        }
        assert_eq!(character_major("", "nvidia-caps"), None);
    }
}
