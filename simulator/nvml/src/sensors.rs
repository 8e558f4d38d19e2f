//! Temperature, power, clocks, utilization and modes.

use std::ffi::{c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlClockId_t, nvmlClockType_t, nvmlDevice_t, nvmlEnableState_t,
    nvmlGpuDynamicPstatesInfo_st__bindgen_ty_1 as Domain, nvmlGpuDynamicPstatesInfo_t,
    nvmlPcieUtilCounter_t, nvmlPstates_t, nvmlTemperature_t, nvmlTemperatureSensors_t,
    nvmlTemperatureThresholds_t, nvmlUtilization_t,
};
use simulator_machine::protocol::ReportedValue;

use crate::abi::{NvmlResult, Out, entry_points};
use crate::error::NvmlError;
use crate::handle::{Device, device};

const DISABLED: nvmlEnableState_t = 0;
const ENABLED: nvmlEnableState_t = 1;
/// `NVML_TEMPERATURE_GPU`
const GPU_SENSOR: nvmlTemperatureSensors_t = 0;

entry_points! {
    fn nvmlDeviceGetUtilizationRates(handle: nvmlDevice_t, rates: Out<nvmlUtilization_t>) {
        let utilization = not_partitioned(handle)?.reporting(ReportedValue::Utilization)?.utilization;
        rates.set(nvmlUtilization_t { gpu: utilization.gpu_percent, memory: utilization.memory_percent })
    }

    // As if the work of the GPU were that of its memory and bus, too.
    fn nvmlDeviceGetDynamicPstatesInfo(handle: nvmlDevice_t, info: Out<nvmlGpuDynamicPstatesInfo_t>) {
        let utilization = not_partitioned(handle)?.reporting(ReportedValue::Utilization)?.utilization;
        let domain = |percentage| Domain { bIsPresent: 1, percentage, incThreshold: 0, decThreshold: 0 };
        let mut domains = [Domain { bIsPresent: 0, percentage: 0, incThreshold: 0, decThreshold: 0 }; 8];
        let percents = [utilization.gpu_percent, utilization.memory_percent, 0, utilization.gpu_percent];
        for (slot, percent) in domains.iter_mut().zip(percents) {
            *slot = domain(percent);
        }
        info.set(nvmlGpuDynamicPstatesInfo_t { flags: 0, utilization: domains })
    }

    // KB/s.
    fn nvmlDeviceGetPcieThroughput(handle: nvmlDevice_t, counter: nvmlPcieUtilCounter_t, value: Out<c_uint>) {
        const RECEIVED: nvmlPcieUtilCounter_t = 1;
        let utilization = not_partitioned(handle)?.reporting(ReportedValue::Utilization)?.utilization;
        if counter > RECEIVED {
            return Err(NvmlError::InvalidArgument);
        }
        value.set(1 + utilization.gpu_percent * 1000)
    }

    fn nvmlDeviceGetTemperature(handle: nvmlDevice_t, sensor: nvmlTemperatureSensors_t, celsius: Out<c_uint>) {
        let device = device(handle)?;
        if sensor != GPU_SENSOR {
            return Err(NvmlError::InvalidArgument);
        }
        celsius.set(device.reporting(ReportedValue::Temperature)?.temperature_celsius)
    }

    fn nvmlDeviceGetTemperatureV(handle: nvmlDevice_t, reading: Out<nvmlTemperature_t>) {
        let device = device(handle)?;
        let version = reading.require_version(1)?;
        if reading.get()?.sensorType != GPU_SENSOR {
            return Err(NvmlError::InvalidArgument);
        }
        let celsius = device.reporting(ReportedValue::Temperature)?.temperature_celsius;
        let temperature = c_int::try_from(celsius).map_err(|_| NvmlError::Unknown)?;
        reading.set(nvmlTemperature_t { version, sensorType: GPU_SENSOR, temperature })
    }

    fn nvmlDeviceGetTemperatureThreshold(handle: nvmlDevice_t, threshold: nvmlTemperatureThresholds_t, celsius: Out<c_uint>) {
        const SHUTDOWN: nvmlTemperatureThresholds_t = 0;
        const SLOWDOWN: nvmlTemperatureThresholds_t = 1;
        let temperature = device(handle)?.model()?.temperature_celsius;
        match threshold {
            SHUTDOWN => celsius.set(temperature.shutdown),
            SLOWDOWN => celsius.set(temperature.slowdown),
            _ => Err(NvmlError::NotSupported),
        }
    }

    fn nvmlDeviceGetPowerUsage(handle: nvmlDevice_t, milliwatts: Out<c_uint>) {
        milliwatts.set(device(handle)?.reporting(ReportedValue::Power)?.power_milliwatts)
    }

    fn nvmlDeviceGetTotalEnergyConsumption(handle: nvmlDevice_t, millijoules: Out<c_ulonglong>) {
        millijoules.set(device(handle)?.reporting(ReportedValue::Power)?.energy_millijoules)
    }

    fn nvmlDeviceGetPowerManagementMode(handle: nvmlDevice_t, mode: Out<nvmlEnableState_t>) {
        device(handle)?;
        mode.set(ENABLED)
    }

    fn nvmlDeviceGetPowerManagementLimit(handle: nvmlDevice_t, milliwatts: Out<c_uint>) { power_limit(handle, milliwatts) }
    fn nvmlDeviceGetPowerManagementDefaultLimit(handle: nvmlDevice_t, milliwatts: Out<c_uint>) { power_limit(handle, milliwatts) }
    fn nvmlDeviceGetEnforcedPowerLimit(handle: nvmlDevice_t, milliwatts: Out<c_uint>) { power_limit(handle, milliwatts) }

    fn nvmlDeviceGetPowerManagementLimitConstraints(handle: nvmlDevice_t, lowest: Out<c_uint>, highest: Out<c_uint>) {
        let power = device(handle)?.model()?.power_milliwatts;
        lowest.set(power.limit / 2)?;
        highest.set(power.limit)
    }

    fn nvmlDeviceGetClockInfo(handle: nvmlDevice_t, clock: nvmlClockType_t, megahertz: Out<c_uint>) {
        let device = device(handle)?;
        megahertz.set(current_clock(device, clock)?)
    }

    fn nvmlDeviceGetMaxClockInfo(handle: nvmlDevice_t, clock: nvmlClockType_t, megahertz: Out<c_uint>) {
        megahertz.set(highest_clock(device(handle)?, clock)?)
    }

    fn nvmlDeviceGetClock(handle: nvmlDevice_t, clock: nvmlClockType_t, which: nvmlClockId_t, megahertz: Out<c_uint>) {
        const CURRENT: nvmlClockId_t = 0;
        let device = device(handle)?;
        let value = if which == CURRENT { current_clock(device, clock)? } else { highest_clock(device, clock)? };
        megahertz.set(value)
    }

    fn nvmlDeviceGetApplicationsClock(handle: nvmlDevice_t, clock: nvmlClockType_t, megahertz: Out<c_uint>) {
        megahertz.set(highest_clock(device(handle)?, clock)?)
    }

    fn nvmlDeviceGetDefaultApplicationsClock(handle: nvmlDevice_t, clock: nvmlClockType_t, megahertz: Out<c_uint>) {
        megahertz.set(highest_clock(device(handle)?, clock)?)
    }

    fn nvmlDeviceGetPerformanceState(handle: nvmlDevice_t, state: Out<nvmlPstates_t>) {
        device(handle)?;
        state.set(0)
    }

    fn nvmlDeviceGetPowerState(handle: nvmlDevice_t, state: Out<nvmlPstates_t>) {
        device(handle)?;
        state.set(0)
    }

    fn nvmlDeviceGetCurrentClocksEventReasons(handle: nvmlDevice_t, reasons: Out<c_ulonglong>) { clock_reasons(handle, reasons) }
    fn nvmlDeviceGetCurrentClocksThrottleReasons(handle: nvmlDevice_t, reasons: Out<c_ulonglong>) { clock_reasons(handle, reasons) }

    fn nvmlDeviceGetPersistenceMode(handle: nvmlDevice_t, mode: Out<nvmlEnableState_t>) {
        device(handle)?;
        mode.set(ENABLED)
    }

    fn nvmlDeviceGetDisplayMode(handle: nvmlDevice_t, mode: Out<nvmlEnableState_t>) {
        device(handle)?;
        mode.set(DISABLED)
    }

    fn nvmlDeviceGetDisplayActive(handle: nvmlDevice_t, active: Out<nvmlEnableState_t>) {
        device(handle)?;
        active.set(DISABLED)
    }
}

/// Utilization is not supported in MIG mode.
pub(crate) fn not_partitioned(handle: nvmlDevice_t) -> NvmlResult<Device> {
    let device = device(handle)?;
    match device.state()?.mig_enabled {
        false => Ok(device),
        true => Err(NvmlError::NotSupported),
    }
}

fn power_limit(handle: nvmlDevice_t, milliwatts: Out<c_uint>) -> NvmlResult {
    milliwatts.set(device(handle)?.model()?.power_milliwatts.limit)
}

/// `nvmlClocksEventReasonGpuIdle` if idle.
fn clock_reasons(handle: nvmlDevice_t, reasons: Out<c_ulonglong>) -> NvmlResult {
    let idle = device(handle)?.state()?.utilization.gpu_percent == 0;
    reasons.set(c_ulonglong::from(idle))
}

const GRAPHICS_CLOCK: nvmlClockType_t = 0;
const SM_CLOCK: nvmlClockType_t = 1;
const MEMORY_CLOCK: nvmlClockType_t = 2;
const VIDEO_CLOCK: nvmlClockType_t = 3;

fn highest_clock(device: Device, clock: nvmlClockType_t) -> NvmlResult<c_uint> {
    let clocks = device.model()?.clocks_mhz;
    match clock {
        GRAPHICS_CLOCK | SM_CLOCK => Ok(clocks.graphics),
        MEMORY_CLOCK => Ok(clocks.memory),
        VIDEO_CLOCK => Ok(clocks.video),
        _ => Err(NvmlError::InvalidArgument),
    }
}

fn current_clock(device: Device, clock: nvmlClockType_t) -> NvmlResult<c_uint> {
    match clock {
        GRAPHICS_CLOCK | SM_CLOCK => Ok(device.state()?.graphics_mhz),
        _ => device.state().and_then(|_| highest_clock(device, clock)),
    }
}
