//! Finds the device nodes of GPUs, MIG devices and the kernel driver.

use std::io::{Read, Result};
use std::path::PathBuf;

use rustix::fs::FileType;

use super::{DriverRoot, Part};

/// Control node of the kernel driver, opened by every client.
pub(super) const CONTROL: &str = "/dev/nvidiactl";

/// Node of unified memory. CUDA needs it for every allocation; its module is often loaded after the node has started.
pub(super) const UNIFIED_MEMORY: &str = "/dev/nvidia-uvm";

/// Device nodes that belong to no single GPU.
const CONTROL_NODES: [(Part, &str); 4] = [
    (Part::Utility, CONTROL),
    (Part::Compute, UNIFIED_MEMORY),
    (Part::Compute, "/dev/nvidia-uvm-tools"),
    (Part::Display, "/dev/nvidia-modeset"),
];

/// Directory with the minor numbers of MIG capabilities. Read from the driver root, or from this process's `/proc`
/// where the root has none, as with the GPU operator's driver container.
const CAPABILITIES: &str = "/proc/driver/nvidia/capabilities";

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
    /// The capability file has no minor number.
    #[error("the MIG capability {path} contains no DeviceFileMinor")]
    CapabilityContents {
        /// Capability file.
        path: String,
    },
}

/// Returns the existing nodes that belong to no single GPU.
pub(super) fn control(root: &DriverRoot) -> Vec<(Part, String)> {
    CONTROL_NODES
        .iter()
        .filter(|(_, path)| is_character_device(root, path))
        .map(|(part, path)| (*part, (*path).to_owned()))
        .collect()
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

/// Returns the nodes of the capabilities of a MIG compute instance and its GPU instance. `devices` is the tree with `/dev`.
pub(super) fn capabilities(
    root: &DriverRoot,
    devices: &DriverRoot,
    minor: u32,
    gpu_instance: u32,
    compute_instance: u32,
) -> std::result::Result<[String; 2], NodeError> {
    let gpu = format!("{CAPABILITIES}/gpu{minor}/mig/gi{gpu_instance}");
    Ok([
        capability(root, devices, format!("{gpu}/access"))?,
        capability(root, devices, format!("{gpu}/ci{compute_instance}/access"))?,
    ])
}

fn capability(
    root: &DriverRoot,
    devices: &DriverRoot,
    path: String,
) -> std::result::Result<String, NodeError> {
    let text = match read(root, &path) {
        Ok(text) => text,
        Err(source) => return Err(NodeError::Capability { path, source }),
    };
    match device_file_minor(&text) {
        Some(minor) => present(devices, format!("/dev/nvidia-caps/nvidia-cap{minor}")),
        None => Err(NodeError::CapabilityContents { path }),
    }
}

fn read(root: &DriverRoot, path: &str) -> Result<String> {
    let file = match root.read(path) {
        Ok(file) => file,
        Err(_) => std::fs::File::open(path)?,
    };
    let mut text = String::new();
    file.take(4096).read_to_string(&mut text)?;
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
}
