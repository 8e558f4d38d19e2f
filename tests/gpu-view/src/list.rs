//! `-L`: one line per GPU and MIG device.

use std::fmt::Write;

use nvml_wrapper::Device;

use crate::{ViewError, partitions};

pub(crate) fn list(devices: &[Device<'_>]) -> Result<String, ViewError> {
    let mut lines = String::new();
    for device in devices {
        let (index, name, uuid) = (device.index()?, device.name()?, device.uuid()?);
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "GPU {index}: {name} (UUID: {uuid})");
        for (index, device) in partitions::of(device)? {
            let (profile, uuid) = (partitions::profile(&device)?, device.uuid()?);
            let _ = writeln!(
                lines,
                "  MIG {profile:<12}Device {index:>2}: (UUID: {uuid})"
            );
        }
    }
    Ok(lines)
}
