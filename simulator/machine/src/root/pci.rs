//! The GPUs and NVSwitches in sysfs (sysfs-bus-pci of the kernel's ABI documentation): numbers, NUMA node, and the path from
//! the PCIe root complex, from which Kubernetes derives `resource.kubernetes.io/pcieRoot`.
//!
//! A machine file has no bridges. A GPU on bus `0x1b` is below root port `10:01.0` of root complex
//! `pci0000:10`: GPUs whose buses differ only in the last digit have a common root complex.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::description::{BusId, MachineDescription};

/// Class of a GPU: 3D controller.
const CONTROLLER_3D: u32 = 0x03_02_00;

/// Class of an NVSwitch: other bridge.
const OTHER_BRIDGE: u32 = 0x06_80_00;

/// A PCI device: a GPU or an NVSwitch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// PCI address.
    pub bus_id: BusId,
    /// Class, subclass and programming interface.
    pub class: u32,
    /// Device number in the high half, vendor number in the low half.
    pub device_id: u32,
    /// The same of the subsystem.
    pub subsystem_id: u32,
    /// NUMA node, if known.
    pub numa_node: Option<u32>,
}

impl PciDevice {
    /// Returns the GPUs of a machine.
    #[must_use]
    pub fn gpus(machine: &MachineDescription) -> Vec<Self> {
        let device = |gpu| {
            let model = machine.model(gpu);
            Self {
                bus_id: gpu.bus_id,
                class: CONTROLLER_3D,
                device_id: model.pci_device_id,
                subsystem_id: model.pci_subsystem_id,
                numa_node: gpu.numa_node,
            }
        };
        machine.gpus.iter().map(device).collect()
    }

    /// Returns the NVSwitches of a machine.
    #[must_use]
    pub fn switches(machine: &MachineDescription) -> Vec<Self> {
        let switches = machine.nvswitches.iter();
        let devices = switches.flat_map(|switches| {
            switches.bus_ids.iter().map(|bus_id| Self {
                bus_id: *bus_id,
                class: OTHER_BRIDGE,
                device_id: switches.pci_device_id,
                subsystem_id: switches.pci_device_id,
                numa_node: None,
            })
        });
        devices.collect()
    }

    /// Directory of the device below `devices`.
    fn path(&self) -> PathBuf {
        let BusId { domain, bus, .. } = self.bus_id;
        let root = bus & 0xf0;
        let complex = PathBuf::from(format!("pci{domain:04x}:{root:02x}"));
        let below = if bus == root {
            complex
        } else {
            complex.join(format!("{domain:04x}:{root:02x}:01.0"))
        };
        below.join(self.bus_id.short())
    }

    /// Attributes: name and value.
    fn attributes(&self) -> [(&'static str, String); 6] {
        let high = |id: u32| format!("{:#06x}", id >> 16);
        let low = |id: u32| format!("{:#06x}", id & 0xffff);
        [
            ("class", format!("{:#08x}", self.class)),
            ("vendor", low(self.device_id)),
            ("device", high(self.device_id)),
            ("subsystem_vendor", low(self.subsystem_id)),
            ("subsystem_device", high(self.subsystem_id)),
            (
                "numa_node",
                self.numa_node
                    .map_or("-1".to_owned(), |node| node.to_string()),
            ),
        ]
    }
}

/// Lays out `devices` and `bus/pci/devices` below `sysfs`, replacing those of an earlier daemon.
pub(super) fn lay_out<'a>(
    sysfs: &Path,
    devices: impl IntoIterator<Item = &'a PciDevice>,
) -> io::Result<()> {
    match fs::remove_dir_all(sysfs) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let links = sysfs.join("bus/pci/devices");
    fs::create_dir_all(&links)?;
    for device in devices {
        let path = device.path();
        let directory = sysfs.join("devices").join(&path);
        fs::create_dir_all(&directory)?;
        for (name, value) in device.attributes() {
            fs::write(directory.join(name), value + "\n")?;
        }
        let target = Path::new("../../../devices").join(path);
        symlink(target, links.join(device.bus_id.short()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(bus_id: &str, numa_node: Option<u32>) -> PciDevice {
        PciDevice {
            bus_id: BusId::parse(bus_id).unwrap(),
            class: CONTROLLER_3D,
            device_id: 0x2330_10de,
            subsystem_id: 0x16c1_10de,
            numa_node,
        }
    }

    #[test]
    fn links_gpus_below_their_root_complex() {
        let sysfs = tempfile::tempdir().unwrap();
        let stale = device("0000:27:00.0", None);
        lay_out(sysfs.path(), &[stale]).unwrap();
        let devices = [
            device("0000:1b:00.0", Some(0)),
            device("0001:9d:00.0", Some(1)),
            device("0000:00:1e.0", None),
        ];
        lay_out(sysfs.path(), &devices).unwrap();
        let base = sysfs.path().canonicalize().unwrap();
        for (address, path) in [
            ("0000:1b:00.0", "pci0000:10/0000:10:01.0/0000:1b:00.0"),
            ("0001:9d:00.0", "pci0001:90/0001:90:01.0/0001:9d:00.0"),
            ("0000:00:1e.0", "pci0000:00/0000:00:1e.0"),
        ] {
            let link = base.join("bus/pci/devices").join(address);
            assert_eq!(
                link.canonicalize().unwrap(),
                base.join("devices").join(path)
            );
        }
        let links = fs::read_dir(base.join("bus/pci/devices")).unwrap();
        assert_eq!(links.count(), 3);
    }

    #[test]
    fn formats_attributes_as_the_kernel() {
        let sysfs = tempfile::tempdir().unwrap();
        let devices = [
            device("0000:1b:00.0", Some(1)),
            device("0000:1c:00.0", None),
        ];
        lay_out(sysfs.path(), &devices).unwrap();
        let read = |address: &str, name: &str| {
            let links = sysfs.path().join("bus/pci/devices");
            fs::read_to_string(links.join(address).join(name)).unwrap()
        };
        for (name, value) in [
            ("class", "0x030200\n"),
            ("vendor", "0x10de\n"),
            ("device", "0x2330\n"),
            ("subsystem_vendor", "0x10de\n"),
            ("subsystem_device", "0x16c1\n"),
            ("numa_node", "1\n"),
        ] {
            assert_eq!(read("0000:1b:00.0", name), value, "{name}");
        }
        assert_eq!(read("0000:1c:00.0", "numa_node"), "-1\n");
    }
}
