//! Identity: device count, handles, names, PCI data.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{
    NVML_DEVICE_ARCH_ADA, NVML_DEVICE_ARCH_AMPERE, NVML_DEVICE_ARCH_BLACKWELL,
    NVML_DEVICE_ARCH_HOPPER, NVML_DEVICE_ARCH_TURING, nvmlBrandType_enum_NVML_BRAND_GEFORCE_RTX,
    nvmlBrandType_enum_NVML_BRAND_NVIDIA, nvmlBrandType_enum_NVML_BRAND_NVIDIA_RTX,
    nvmlBrandType_enum_NVML_BRAND_TESLA, nvmlBrandType_t, nvmlBusType_t, nvmlDevice_t,
    nvmlDeviceArchitecture_t, nvmlGpuVirtualizationMode_t, nvmlPciInfo_t, nvmlPciInfoExt_t,
    nvmlUUID_t, nvmlUUIDType_t_NVML_UUID_TYPE_ASCII, nvmlUUIDType_t_NVML_UUID_TYPE_BINARY,
};
use simulator_machine::description::{Architecture, Brand, BusId};

use crate::abi::{In, NvmlResult, Out, Text, entry_points, fixed_text, struct_version, uuid_bytes};
use crate::error::NvmlError;
use crate::handle::{AnyDevice, Device, any_device, device, handle, mig_handle, visible_devices};
use crate::instances::instance_name;
use crate::library::library;

entry_points! {
    fn nvmlDeviceGetCount(count: Out<c_uint>) { count.set(visible_count()?) }
    fn nvmlDeviceGetCount_v2(count: Out<c_uint>) { count.set(visible_count()?) }

    fn nvmlDeviceGetHandleByIndex(index: c_uint, result: Out<nvmlDevice_t>) { by_index(index, result) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, result: Out<nvmlDevice_t>) { by_index(index, result) }

    fn nvmlDeviceGetHandleByUUID(uuid: Text, result: Out<nvmlDevice_t>) {
        by_uuid(&uuid.get()?, result)
    }

    fn nvmlDeviceGetHandleByUUIDV(uuid: In<nvmlUUID_t>, result: Out<nvmlDevice_t>) {
        by_uuid(&uuid_text(uuid)?, result)
    }

    fn nvmlDeviceGetHandleBySerial(serial: Text, result: Out<nvmlDevice_t>) {
        let serial = serial.get()?;
        find(result, |device| Ok(device.described()?.serial.as_ref() == Some(&serial)))
    }

    fn nvmlDeviceGetHandleByPciBusId(bus_id: Text, result: Out<nvmlDevice_t>) { by_bus_id(bus_id, result) }
    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: Text, result: Out<nvmlDevice_t>) { by_bus_id(bus_id, result) }

    fn nvmlDeviceGetName(handle: nvmlDevice_t, name: Out<c_char>, length: c_uint) {
        name.set_text(length, &match any_device(handle)? {
            AnyDevice::Gpu(device) => device.model()?.name.clone(),
            AnyDevice::Mig(device) => {
                format!("{} MIG {}", device.device().model()?.name, instance_name(&device)?)
            }
        })
    }

    fn nvmlDeviceGetUUID(handle: nvmlDevice_t, uuid: Out<c_char>, length: c_uint) {
        match any_device(handle)? {
            AnyDevice::Gpu(device) => uuid.set_text(length, &device.described()?.uuid),
            AnyDevice::Mig(device) => uuid.set_text(length, &device.compute.uuid),
        }
    }

    fn nvmlDeviceGetSerial(handle: nvmlDevice_t, serial: Out<c_char>, length: c_uint) {
        let described = device(handle)?.described()?;
        let known = described.serial.as_ref().ok_or(NvmlError::NotSupported)?;
        serial.set_text(length, known)
    }

    fn nvmlDeviceGetBoardPartNumber(handle: nvmlDevice_t, number: Out<c_char>, length: c_uint) {
        number.set_text(length, &device(handle)?.model()?.board_part_number)
    }

    fn nvmlDeviceGetVbiosVersion(handle: nvmlDevice_t, version: Out<c_char>, length: c_uint) {
        version.set_text(length, &device(handle)?.model()?.vbios_version)
    }

    fn nvmlDeviceGetIndex(handle: nvmlDevice_t, index: Out<c_uint>) {
        index.set(match any_device(handle)? {
            AnyDevice::Gpu(device) => device.index()?,
            AnyDevice::Mig(device) => device.compute.index,
        })
    }

    fn nvmlDeviceGetMinorNumber(handle: nvmlDevice_t, minor: Out<c_uint>) {
        minor.set(device(handle)?.gpu.0)
    }

    fn nvmlDeviceGetVirtualizationMode(handle: nvmlDevice_t, mode: Out<nvmlGpuVirtualizationMode_t>) {
        // `NVML_GPU_VIRTUALIZATION_MODE_NONE`: bare metal.
        const NONE: nvmlGpuVirtualizationMode_t = 0;
        device(handle)?.described()?;
        mode.set(NONE)
    }

    fn nvmlDeviceGetModuleId(handle: nvmlDevice_t, module: Out<c_uint>) {
        module.set(device(handle)?.gpu.0 + 1)
    }

    fn nvmlDeviceGetBoardId(handle: nvmlDevice_t, board: Out<c_uint>) {
        let BusId { domain, bus, device } = device(handle)?.described()?.bus_id;
        board.set(domain << 16 | u32::from(bus) << 8 | u32::from(device))
    }

    fn nvmlDeviceGetMultiGpuBoard(handle: nvmlDevice_t, multi: Out<c_uint>) {
        device(handle)?;
        multi.set(0)
    }

    fn nvmlDeviceOnSameBoard(first: nvmlDevice_t, second: nvmlDevice_t, same: Out<c_int>) {
        same.set(c_int::from(device(first)?.gpu == device(second)?.gpu))
    }

    fn nvmlDeviceGetBrand(handle: nvmlDevice_t, brand: Out<nvmlBrandType_t>) {
        brand.set(match device(handle)?.model()?.brand {
            Brand::Nvidia => nvmlBrandType_enum_NVML_BRAND_NVIDIA,
            Brand::Tesla => nvmlBrandType_enum_NVML_BRAND_TESLA,
            Brand::GeforceRtx => nvmlBrandType_enum_NVML_BRAND_GEFORCE_RTX,
            Brand::NvidiaRtx => nvmlBrandType_enum_NVML_BRAND_NVIDIA_RTX,
        })
    }

    fn nvmlDeviceGetArchitecture(handle: nvmlDevice_t, architecture: Out<nvmlDeviceArchitecture_t>) {
        architecture.set(match device(handle)?.model()?.architecture {
            Architecture::Turing => NVML_DEVICE_ARCH_TURING,
            Architecture::Ampere => NVML_DEVICE_ARCH_AMPERE,
            Architecture::Ada => NVML_DEVICE_ARCH_ADA,
            Architecture::Hopper => NVML_DEVICE_ARCH_HOPPER,
            Architecture::Blackwell => NVML_DEVICE_ARCH_BLACKWELL,
        })
    }

    fn nvmlDeviceGetCudaComputeCapability(handle: nvmlDevice_t, major: Out<c_int>, minor: Out<c_int>) {
        let capability = device(handle)?.model()?.compute_capability;
        let number = |value| c_int::try_from(value).map_err(|_| NvmlError::Unknown);
        major.set(number(capability.major)?)?;
        minor.set(number(capability.minor)?)
    }

    fn nvmlDeviceGetNumGpuCores(handle: nvmlDevice_t, cores: Out<c_uint>) {
        cores.set(device(handle)?.model()?.compute.cores)
    }

    fn nvmlDeviceGetPciInfo(handle: nvmlDevice_t, pci: Out<nvmlPciInfo_t>) { pci_info(handle, pci) }
    fn nvmlDeviceGetPciInfo_v2(handle: nvmlDevice_t, pci: Out<nvmlPciInfo_t>) { pci_info(handle, pci) }
    fn nvmlDeviceGetPciInfo_v3(handle: nvmlDevice_t, pci: Out<nvmlPciInfo_t>) { pci_info(handle, pci) }

    fn nvmlDeviceGetPciInfoExt(handle: nvmlDevice_t, pci: Out<nvmlPciInfoExt_t>) {
        let device = device(handle)?;
        let version = pci.require_version(1)?;
        let (bus_id, model) = (device.described()?.bus_id, device.model()?);
        pci.set(nvmlPciInfoExt_t {
            version,
            domain: bus_id.domain,
            bus: bus_id.bus.into(),
            device: bus_id.device.into(),
            pciDeviceId: model.pci_device_id,
            pciSubSystemId: model.pci_subsystem_id,
            // 3D controller.
            baseClass: 0x03,
            subClass: 0x02,
            busId: fixed_text(&bus_id.to_string()),
        })
    }

    fn nvmlDeviceGetBusType(handle: nvmlDevice_t, kind: Out<nvmlBusType_t>) {
        const PCIE: nvmlBusType_t = 2;
        device(handle)?;
        kind.set(PCIE)
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(handle: nvmlDevice_t, generation: Out<c_uint>) {
        generation.set(device(handle)?.model()?.pcie.generation)
    }

    fn nvmlDeviceGetGpuMaxPcieLinkGeneration(handle: nvmlDevice_t, generation: Out<c_uint>) {
        generation.set(device(handle)?.model()?.pcie.generation)
    }

    fn nvmlDeviceGetCurrPcieLinkGeneration(handle: nvmlDevice_t, generation: Out<c_uint>) {
        generation.set(device(handle)?.model()?.pcie.generation)
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(handle: nvmlDevice_t, width: Out<c_uint>) {
        width.set(device(handle)?.model()?.pcie.width)
    }

    fn nvmlDeviceGetCurrPcieLinkWidth(handle: nvmlDevice_t, width: Out<c_uint>) {
        width.set(device(handle)?.model()?.pcie.width)
    }
}

fn visible_count() -> NvmlResult<c_uint> {
    c_uint::try_from(library()?.visible().len()).map_err(|_| NvmlError::Unknown)
}

fn by_index(index: c_uint, result: Out<nvmlDevice_t>) -> NvmlResult {
    let index = usize::try_from(index).map_err(|_| NvmlError::InvalidArgument)?;
    let library = library()?;
    let gpu = *library
        .visible()
        .get(index)
        .ok_or(NvmlError::InvalidArgument)?;
    // A lost GPU is listed but cannot be opened.
    library.state(gpu)?;
    result.set(handle(gpu))
}

/// Handle of a GPU or MIG device.
fn by_uuid(uuid: &str, result: Out<nvmlDevice_t>) -> NvmlResult {
    if !uuid.starts_with("MIG-") {
        return find(result, |device| Ok(device.described()?.uuid == uuid));
    }
    let library = library()?;
    for gpu in library.visible().iter().copied() {
        let devices = visible_devices(library, gpu)?;
        if let Some(device) = devices.iter().find(|device| device.compute.uuid == uuid) {
            return result.set(mig_handle(gpu, device.id()));
        }
    }
    Err(NvmlError::NotFound)
}

/// A UUID as text; the binary form is for whole GPUs.
fn uuid_text(uuid: In<nvmlUUID_t>) -> NvmlResult<String> {
    let nvmlUUID_t {
        version,
        type_,
        value,
    } = uuid.get()?;
    if version != struct_version::<nvmlUUID_t>(1) {
        return Err(NvmlError::ArgumentVersionMismatch);
    }
    let bytes = uuid_bytes(value);
    let hex = |range: std::ops::Range<usize>| -> String {
        let bytes = bytes.iter().take(range.end).skip(range.start);
        bytes.map(|byte| format!("{byte:02x}")).collect()
    };
    match type_ {
        nvmlUUIDType_t_NVML_UUID_TYPE_ASCII => {
            let text: Vec<u8> = bytes.into_iter().take_while(|byte| *byte != 0).collect();
            String::from_utf8(text).map_err(|_| NvmlError::InvalidArgument)
        }
        nvmlUUIDType_t_NVML_UUID_TYPE_BINARY => Ok(format!(
            "GPU-{}-{}-{}-{}-{}",
            hex(0..4),
            hex(4..6),
            hex(6..8),
            hex(8..10),
            hex(10..16)
        )),
        _ => Err(NvmlError::InvalidArgument),
    }
}

fn by_bus_id(text: Text, result: Out<nvmlDevice_t>) -> NvmlResult {
    let bus_id = BusId::parse(&text.get()?).ok_or(NvmlError::InvalidArgument)?;
    find(result, |device| Ok(device.described()?.bus_id == bus_id))
}

/// Handle of the first visible GPU that matches.
fn find(result: Out<nvmlDevice_t>, matches: impl Fn(Device) -> NvmlResult<bool>) -> NvmlResult {
    let library = library()?;
    for gpu in library.visible().iter().copied() {
        if matches(Device { library, gpu })? {
            // A lost GPU is listed but cannot be opened.
            library.state(gpu)?;
            return result.set(handle(gpu));
        }
    }
    Err(NvmlError::NotFound)
}

/// PCI data of a GPU, common to all versions of the struct.
pub(crate) fn pci_of(device: Device) -> NvmlResult<nvmlPciInfo_t> {
    let (bus_id, model) = (device.described()?.bus_id, device.model()?);
    Ok(nvmlPciInfo_t {
        busIdLegacy: fixed_text(&bus_id.short().to_uppercase()),
        domain: bus_id.domain,
        bus: bus_id.bus.into(),
        device: bus_id.device.into(),
        pciDeviceId: model.pci_device_id,
        pciSubSystemId: model.pci_subsystem_id,
        busId: fixed_text(&bus_id.to_string()),
    })
}

fn pci_info(handle: nvmlDevice_t, pci: Out<nvmlPciInfo_t>) -> NvmlResult {
    pci.set(pci_of(device(handle)?)?)
}
