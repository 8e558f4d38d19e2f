//! Injected faults, as monitoring programs see them.

use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use simulator_machine::control::Command;
use simulator_machine::description::H100X2;
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{GpuIndex, ReportedValue};
use simulator_machine::testing::Machine;

fn start() -> anyhow::Result<(Machine, Nvml)> {
    let machine = Machine::start(H100X2)?;
    let library = machine.lib_dir().join("libnvidia-ml.so.1");
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init()?;
    Ok((machine, nvml))
}

fn break_gpu(machine: &Machine, faults: Faults) -> anyhow::Result<()> {
    let gpu = GpuIndex(1);
    machine.control(&Command::Break { gpu, faults })?;
    Ok(())
}

#[test]
fn reports_a_lost_gpu_without_affecting_others() -> anyhow::Result<()> {
    let (machine, nvml) = start()?;
    let device = nvml.device_by_index(1)?;
    break_gpu(
        &machine,
        Faults {
            lost: true,
            ..Faults::default()
        },
    )?;
    assert!(matches!(device.memory_info(), Err(NvmlError::GpuLost)));
    assert!(matches!(nvml.device_by_index(1), Err(NvmlError::GpuLost)));
    assert_eq!(nvml.device_count()?, 2);
    assert_eq!(nvml.device_by_index(0)?.memory_info()?.used, 0);
    let refused = machine
        .program("cuda-probe")?
        .args(["alloc", "--mib", "1", "--device", "1"])
        .output()?;
    assert_eq!(refused.status.code(), Some(2));
    break_gpu(&machine, Faults::default())?;
    assert_eq!(device.memory_info()?.used, 0);
    Ok(())
}

#[test]
fn delays_only_the_slow_gpu() -> anyhow::Result<()> {
    let (machine, nvml) = start()?;
    let delay = Duration::from_millis(400);
    break_gpu(
        &machine,
        Faults {
            delay,
            ..Faults::default()
        },
    )?;
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| {
            let begin = Instant::now();
            nvml.device_by_index(1).map(|_| begin.elapsed())
        });
        // Another process, another connection.
        machine.status()?;
        assert!(!slow.is_finished());
        assert!(slow.join().unwrap()? >= delay);
        anyhow::Ok(())
    })
}

#[test]
fn reports_missing_values_as_not_supported() -> anyhow::Result<()> {
    let (machine, nvml) = start()?;
    let unsupported = [
        ReportedValue::Memory,
        ReportedValue::Processes,
        ReportedValue::Utilization,
        ReportedValue::Temperature,
        ReportedValue::Power,
    ];
    break_gpu(
        &machine,
        Faults {
            unsupported: unsupported.into(),
            ..Faults::default()
        },
    )?;
    let device = nvml.device_by_index(1)?;
    assert!(matches!(device.memory_info(), Err(NvmlError::NotSupported)));
    assert!(matches!(
        device.running_compute_processes(),
        Err(NvmlError::NotSupported)
    ));
    assert!(matches!(
        device.utilization_rates(),
        Err(NvmlError::NotSupported)
    ));
    assert!(matches!(
        device.temperature(TemperatureSensor::Gpu),
        Err(NvmlError::NotSupported)
    ));
    assert!(matches!(device.power_usage(), Err(NvmlError::NotSupported)));
    assert_eq!(device.name()?, "NVIDIA H100 80GB HBM3");
    Ok(())
}

#[test]
fn refuses_contexts_on_demand() -> anyhow::Result<()> {
    let (machine, _nvml) = start()?;
    break_gpu(
        &machine,
        Faults {
            refuses_contexts: true,
            ..Faults::default()
        },
    )?;
    let refused = machine.program("cuda-probe")?.args(["info"]).output()?;
    assert!(refused.status.success());
    let refused = machine
        .program("cuda-probe")?
        .args(["alloc", "--mib", "1", "--device", "1"])
        .output()?;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("CUDA_ERROR_OUT_OF_MEMORY"));
    Ok(())
}

#[test]
fn reports_temperature_on_demand() -> anyhow::Result<()> {
    let (machine, nvml) = start()?;
    let device = nvml.device_by_index(1)?;
    let hot = Faults {
        temperature_celsius: Some(86),
        ..Faults::default()
    };
    break_gpu(&machine, hot)?;
    assert_eq!(device.temperature(TemperatureSensor::Gpu)?, 86);
    break_gpu(&machine, Faults::default())?;
    assert_eq!(device.temperature(TemperatureSensor::Gpu)?, 30);
    Ok(())
}
