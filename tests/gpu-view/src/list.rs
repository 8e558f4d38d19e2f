//! `-L`: one line for each GPU.

use std::fmt::Write;

use nvml_wrapper::Device;

use crate::ViewError;

pub(crate) fn list(devices: &[Device<'_>]) -> Result<String, ViewError> {
    let mut lines = String::new();
    for device in devices {
        let (index, name, uuid) = (device.index()?, device.name()?, device.uuid()?);
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "GPU {index}: {name} (UUID: {uuid})");
    }
    Ok(lines)
}
