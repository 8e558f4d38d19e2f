//! MIG devices of a GPU.

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;

use crate::ViewError;

/// Returns the MIG devices of a GPU by index; none outside MIG mode.
pub(crate) fn of<'nvml>(gpu: &Device<'nvml>) -> Result<Vec<(u32, Device<'nvml>)>, ViewError> {
    let mut found = Vec::new();
    let count = match gpu.mig_device_count() {
        Ok(count) => count,
        Err(NvmlError::NotSupported) => 0,
        Err(error) => return Err(error.into()),
    };
    for index in 0..count {
        match gpu.mig_device_by_index(index) {
            Ok(device) => found.push((index, device)),
            // Indices have gaps; without MIG mode there are no devices.
            Err(NvmlError::NotFound | NvmlError::NotSupported | NvmlError::InvalidArg) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}

/// Returns the profile in a MIG device's name, such as `3g.40gb`.
pub(crate) fn profile(device: &Device<'_>) -> Result<String, ViewError> {
    let name = device.name()?;
    let profile = name.rsplit_once("MIG ").map(|(_, profile)| profile);
    Ok(profile.unwrap_or(&name).to_owned())
}
