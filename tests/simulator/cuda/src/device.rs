//! Initialisation, versions, and what devices there are.

use std::ffi::{c_char, c_int, c_uint};

use simulator_machine::description::BusId;

use crate::abi::{Out, Text, entry_points};
use crate::attributes::attribute;
use crate::driver::{driver, initialize};
use crate::error::CudaError;
use crate::types::{CUdevice, CUuuid};

entry_points! {
    "cuInit" 2000 fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        initialize()
    }

    // Works before `cuInit`, from what this library imitates.
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
        uuid.set(bytes_of(&driver.described(driver.device(device)?)?.uuid))
    }
    "cuDeviceGetUuid" 11040 fn cuDeviceGetUuid_v2(uuid: Out<CUuuid>, device: CUdevice) {
        let driver = driver()?;
        let device = driver.device(device)?;
        // Since this version a MIG device has its own.
        uuid.set(bytes_of(match &device.instance {
            Some(instance) => &instance.uuid,
            None => &driver.described(device)?.uuid,
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
        let described = driver.described(driver.device(device)?)?;
        let found = attribute(which, driver.model(device)?, described);
        value.set(found.ok_or(CudaError::InvalidValue)?)
    }

    "cuDeviceComputeCapability" 2000 fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: CUdevice) {
        let capability = driver()?.model(device)?.compute_capability;
        let number = |value| c_int::try_from(value).map_err(|_| CudaError::Unknown);
        major.set(number(capability.major)?)?;
        minor.set(number(capability.minor)?)
    }

    "cuDeviceGetPCIBusId" 4010 fn cuDeviceGetPCIBusId(bus_id: Out<c_char>, length: c_int, device: CUdevice) {
        let driver = driver()?;
        let described = driver.described(driver.device(device)?)?;
        bus_id.set_text(length, &described.bus_id.short().to_uppercase())
    }

    "cuDeviceGetByPCIBusId" 4010 fn cuDeviceGetByPCIBusId(device: Out<CUdevice>, bus_id: Text) {
        let driver = driver()?;
        let bus_id = BusId::parse(&bus_id.get()?).ok_or(CudaError::InvalidValue)?;
        let matches = |candidate: &crate::enumerate::Device| {
            driver.described(candidate).is_ok_and(|described| described.bus_id == bus_id)
        };
        let ordinal = driver.devices().iter().position(matches).ok_or(CudaError::InvalidDevice)?;
        device.set(CUdevice::try_from(ordinal).map_err(|_| CudaError::InvalidDevice)?)
    }

    "cuDeviceGetLuid" 10000 fn cuDeviceGetLuid(_luid: Out<c_char>, _mask: Out<c_uint>, device: CUdevice) {
        driver()?.device(device)?;
        // Only Windows has LUIDs.
        Err(CudaError::NotSupported)
    }
}

/// The version that this library imitates when no machine has been asked yet.
const DRIVER_VERSION: c_int = 13000;

/// The bytes of a UUID behind its `GPU-` or `MIG-`.
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
