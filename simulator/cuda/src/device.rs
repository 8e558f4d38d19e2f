//! Initialization, versions and device queries.

use std::ffi::{c_char, c_int, c_uint};

use simulator_machine::protocol::{ComputeMode, Reply, Request};

use crate::abi::{CudaResult, Out, entry_points};
use crate::attributes::attribute;
use crate::driver::{Driver, driver, initialize};
use crate::error::CudaError;
use crate::types::{CUdevice, CUuuid};

entry_points! {
    "cuInit" 2000 fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        initialize()
    }

    // Available before `cuInit`.
    "cuDriverGetVersion" 2020 fn cuDriverGetVersion(version: Out<c_int>) {
        version.set(driver().map_or(Ok(DRIVER_VERSION), |driver| {
            let version = driver.machine().cuda_version;
            c_int::try_from(version.major * 1000 + version.minor * 10).map_err(|_| CudaError::Unknown)
        })?)
    }

    "cuDeviceGetCount" 2000 fn cuDeviceGetCount(count: Out<c_int>) {
        let devices = driver()?.devices().len();
        count.set(c_int::try_from(devices).map_err(|_| CudaError::Unknown)?)
    }

    "cuDeviceGet" 2000 fn cuDeviceGet(device: Out<CUdevice>, ordinal: c_int) {
        driver()?.device(ordinal)?;
        device.set(ordinal)
    }

    "cuDeviceGetName" 2000 fn cuDeviceGetName(name: Out<c_char>, length: c_int, device: CUdevice) {
        name.set_text(length, &driver()?.model(device)?.name)
    }

    "cuDeviceGetUuid" 9020 fn cuDeviceGetUuid(uuid: Out<CUuuid>, device: CUdevice) {
        let driver = driver()?;
        uuid.set(bytes_of(&driver.description(driver.device(device)?)?.uuid))
    }
    "cuDeviceGetUuid" 11040 fn cuDeviceGetUuid_v2(uuid: Out<CUuuid>, device: CUdevice) {
        let driver = driver()?;
        let device = driver.device(device)?;
        // MIG devices have a UUID of their own since this version.
        uuid.set(bytes_of(match &device.instance {
            Some(instance) => &instance.uuid,
            None => &driver.description(device)?.uuid,
        }))
    }

    "cuDeviceTotalMem" 2000 fn cuDeviceTotalMem(bytes: Out<c_uint>, device: CUdevice) {
        let total = driver()?.model(device)?.memory.usable_bytes();
        bytes.set(c_uint::try_from(total).unwrap_or(c_uint::MAX))
    }
    "cuDeviceTotalMem" 3020 fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: CUdevice) {
        let total = driver()?.model(device)?.memory.usable_bytes();
        bytes.set(usize::try_from(total).map_err(|_| CudaError::InvalidValue)?)
    }

    "cuDeviceGetAttribute" 2000 fn cuDeviceGetAttribute(value: Out<c_int>, which: c_uint, device: CUdevice) {
        let driver = driver()?;
        if which == COMPUTE_MODE {
            return value.set(compute_mode(driver, device)?);
        }
        let description = driver.description(driver.device(device)?)?;
        let found = attribute(which, driver.model(device)?, description);
        value.set(found.ok_or(CudaError::InvalidValue)?)
    }
}

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`
const COMPUTE_MODE: c_uint = 20;

/// `CUcomputemode`
fn compute_mode(driver: &Driver, device: CUdevice) -> CudaResult<c_int> {
    let gpu = driver.device(device)?.gpu;
    let Reply::GpuState(state) = driver.request(&Request::GpuState { gpu })? else {
        return Err(CudaError::Unknown);
    };
    Ok(match state.compute_mode {
        ComputeMode::Default => 0,
        ComputeMode::Prohibited => 2,
        ComputeMode::ExclusiveProcess => 3,
    })
}

/// Reported before `cuInit`.
const DRIVER_VERSION: c_int = 13000;

/// Bytes of a UUID after its prefix `GPU-` or `MIG-`.
fn bytes_of(uuid: &str) -> CUuuid {
    let digits: Vec<u8> = uuid
        .trim_start_matches("GPU-")
        .trim_start_matches("MIG-")
        .chars()
        .filter_map(|digit| u8::try_from(digit.to_digit(16)?).ok())
        .collect();
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair.iter().fold(0, |byte, digit| byte << 4 | digit);
    }
    CUuuid { bytes }
}
