//! The library through nvml-wrapper, an independent client.

use anyhow::Context;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::GpuVirtualizationMode;
use nvml_wrapper::enum_wrappers::device::{Brand, Clock, TemperatureSensor};
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::error::NvmlError;
use simulator_machine::description::{H100X2, MIB, T4};
use simulator_machine::testing::Machine;

fn nvml(machine: &Machine) -> anyhow::Result<Nvml> {
    let library = machine.lib_dir().join("libnvidia-ml.so.1");
    Nvml::builder()
        .lib_path(library.as_os_str())
        .init()
        .context("nvmlInit")
}

#[test]
fn reports_the_machine_file_of_an_h100() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let nvml = nvml(&machine)?;
    assert_eq!(nvml.sys_driver_version()?, "580.65.06");
    assert_eq!(nvml.sys_cuda_driver_version()?, 13000);
    assert_eq!(nvml.device_count()?, 2);
    let device = nvml.device_by_index(1)?;
    assert_eq!(device.name()?, "NVIDIA H100 80GB HBM3");
    assert_eq!(device.brand()?, Brand::Nvidia);
    assert_eq!(device.architecture()?, DeviceArchitecture::Hopper);
    assert_eq!(device.cuda_compute_capability()?.major, 9);
    assert_eq!(device.minor_number()?, 1);
    assert_eq!(device.numa_node_id()?, 1);
    assert_eq!(device.virtualization_mode()?, GpuVirtualizationMode::Bare);
    assert_eq!(device.num_cores()?, 16896);
    assert_eq!(device.pci_info()?.bus_id, "00000000:9D:00.0");
    assert_eq!(device.pci_info()?.pci_device_id, 0x2330_10de);
    assert_eq!(device.mig_mode()?.current, 0);
    assert_eq!(device.max_clock_info(Clock::SM)?, 1980);
    assert!(device.is_ecc_enabled()?.currently_enabled);
    assert_eq!(device.temperature(TemperatureSensor::Gpu)?, 30);
    let memory = device.memory_info()?;
    assert_eq!(memory.total, 85_520_809_984);
    assert_eq!((memory.used, memory.reserved / MIB), (0, 551));
    assert_eq!(memory.free, memory.total - memory.reserved);
    assert!(device.running_compute_processes()?.is_empty());
    Ok(())
}

#[test]
fn reports_mig_as_unsupported_on_a_t4() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let nvml = nvml(&machine)?;
    let device = nvml.device_by_index(0)?;
    assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(
        device.profile_info(0),
        Err(NvmlError::NotSupported)
    ));
    assert!(matches!(
        nvml.device_by_index(1),
        Err(NvmlError::InvalidArg)
    ));
    Ok(())
}

#[test]
fn returns_equal_handles_by_index_uuid_and_bus_id() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let nvml = nvml(&machine)?;
    for index in 0..2 {
        let device = nvml.device_by_index(index)?;
        for other in [
            nvml.device_by_uuid(device.uuid()?)?,
            nvml.device_by_pci_bus_id(device.pci_info()?.bus_id)?,
        ] {
            assert_eq!(other.index()?, index);
        }
    }
    let unknown = nvml.device_by_uuid("GPU-00000000-0000-0000-0000-000000000000");
    assert!(matches!(unknown, Err(NvmlError::NotFound)));
    Ok(())
}

#[test]
fn hides_gpus_without_device_node() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    std::fs::remove_file(machine.root().join("dev/nvidia0"))?;
    let nvml = nvml(&machine)?;
    assert_eq!(nvml.device_count()?, 1);
    let device = nvml.device_by_index(0)?;
    assert_eq!((device.index()?, device.minor_number()?), (0, 1));
    let hidden = nvml.device_by_uuid("GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01");
    assert!(matches!(hidden, Err(NvmlError::NotFound)));
    Ok(())
}

#[test]
fn isolates_two_machines() -> anyhow::Result<()> {
    let (large, small) = (Machine::start(H100X2)?, Machine::start(T4)?);
    let (large, small) = (nvml(&large)?, nvml(&small)?);
    assert_eq!((large.device_count()?, small.device_count()?), (2, 1));
    assert_eq!(small.device_by_index(0)?.name()?, "Tesla T4");
    Ok(())
}

#[test]
fn reports_driver_not_loaded_until_a_daemon_starts() -> anyhow::Result<()> {
    let mut machine = Machine::start(T4)?;
    let first = nvml(&machine)?;
    let device = first.device_by_index(0)?;
    machine.restart()?;
    assert!(matches!(
        device.memory_info(),
        Err(NvmlError::DriverNotLoaded)
    ));
    first.shutdown()?;
    assert_eq!(nvml(&machine)?.device_by_index(0)?.memory_info()?.used, 0);
    Ok(())
}
