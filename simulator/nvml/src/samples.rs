//! Samples of GPUs and processes.
//!
//! As on hardware, a sampling period is visible once closed. A GPU in MIG mode has no samples.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessUtilizationInfo_v1_t, nvmlProcessUtilizationSample_t,
    nvmlProcessesUtilizationInfo_t, nvmlSample_t,
    nvmlSamplingType_enum_NVML_DEC_UTILIZATION_SAMPLES,
    nvmlSamplingType_enum_NVML_ENC_UTILIZATION_SAMPLES,
    nvmlSamplingType_enum_NVML_GPU_UTILIZATION_SAMPLES,
    nvmlSamplingType_enum_NVML_JPG_UTILIZATION_SAMPLES,
    nvmlSamplingType_enum_NVML_MEMORY_CLK_SAMPLES,
    nvmlSamplingType_enum_NVML_MEMORY_UTILIZATION_SAMPLES,
    nvmlSamplingType_enum_NVML_MODULE_POWER_SAMPLES,
    nvmlSamplingType_enum_NVML_OFA_UTILIZATION_SAMPLES,
    nvmlSamplingType_enum_NVML_PROCESSOR_CLK_SAMPLES,
    nvmlSamplingType_enum_NVML_TOTAL_POWER_SAMPLES, nvmlSamplingType_t, nvmlValue_t,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT, nvmlValueType_t,
};
use simulator_machine::protocol::{ReportedValue, SampleState};

use crate::abi::{NvmlResult, Out, array_at, entry_points, set_list};
use crate::error::NvmlError;
use crate::handle::Device;
use crate::sensors::not_partitioned;

entry_points! {
    fn nvmlDeviceGetSamples(handle: nvmlDevice_t, kind: nvmlSamplingType_t, since: c_ulonglong, value_type: Out<nvmlValueType_t>, count: Out<c_uint>, samples: Out<nvmlSample_t>) {
        let device = not_partitioned(handle)?;
        let value = value_of(device, kind)?;
        value_type.set(nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT)?;
        let kept = device.library.samples(device.gpu, since)?;
        let length = |length: usize| c_uint::try_from(length).map_err(|_| NvmlError::Unknown);
        // A null array requests the capacity.
        if samples.is_null() {
            return count.set(length(kept.len())?.max(1));
        }
        let room = usize::try_from(count.get()?).map_err(|_| NvmlError::InvalidArgument)?;
        let newest = kept.len().saturating_sub(room);
        if kept.is_empty() {
            return Err(NvmlError::NotFound);
        }
        let shown: Vec<nvmlSample_t> = kept.iter().skip(newest).map(|sample| nvmlSample_t {
            timeStamp: device.library.microseconds(sample.end),
            sampleValue: nvmlValue_t { uiVal: value(sample) },
        }).collect();
        count.set(length(shown.len())?)?;
        samples.set_all(shown.into_iter())
    }

    fn nvmlDeviceGetProcessUtilization(handle: nvmlDevice_t, samples: Out<nvmlProcessUtilizationSample_t>, count: Out<c_uint>, since: c_ulonglong) {
        let found = by_process(handle, since)?;
        if samples.is_null() {
            count.set(announced(found.len())?)?;
            return Err(NvmlError::InsufficientSize);
        }
        if found.is_empty() {
            return Err(NvmlError::NotFound);
        }
        set_list(count, samples, found.into_iter().map(|process| nvmlProcessUtilizationSample_t {
            pid: process.pid,
            timeStamp: process.at,
            smUtil: process.gpu_percent,
            memUtil: process.memory_percent,
            encUtil: 0,
            decUtil: 0,
        }).collect())
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(handle: nvmlDevice_t, info: Out<nvmlProcessesUtilizationInfo_t>) {
        info.require_version(1)?;
        let mut asked = info.get()?;
        let found = by_process(handle, asked.lastSeenTimeStamp)?;
        let array = array_at(asked.procUtilArray);
        let room = asked.processSamplesCount;
        asked.processSamplesCount = announced(found.len())?;
        if array.is_null() || room < asked.processSamplesCount {
            info.set(asked)?;
            return Err(NvmlError::InsufficientSize);
        }
        if found.is_empty() {
            return Err(NvmlError::NotFound);
        }
        info.set(asked)?;
        array.set_all(found.into_iter().map(|process| nvmlProcessUtilizationInfo_v1_t {
            timeStamp: process.at,
            pid: process.pid,
            smUtil: process.gpu_percent,
            memUtil: process.memory_percent,
            encUtil: 0,
            decUtil: 0,
            jpgUtil: 0,
            ofaUtil: 0,
        }))
    }
}

/// At least one, so that an idle GPU does not look unsupported.
fn announced(length: usize) -> NvmlResult<c_uint> {
    let length = c_uint::try_from(length).map_err(|_| NvmlError::Unknown)?;
    Ok(length.max(1))
}

/// The value of a sample for one sample type.
type Value = Box<dyn Fn(&SampleState) -> c_uint>;

fn value_of(device: Device, kind: nvmlSamplingType_t) -> NvmlResult<Value> {
    let model = device.model()?;
    let (clocks, power) = (model.clocks_mhz, model.power_milliwatts);
    match kind {
        nvmlSamplingType_enum_NVML_GPU_UTILIZATION_SAMPLES => {
            device.reporting(ReportedValue::Utilization)?;
            Ok(Box::new(|sample| sample.gpu_percent))
        }
        nvmlSamplingType_enum_NVML_MEMORY_UTILIZATION_SAMPLES => {
            device.reporting(ReportedValue::Utilization)?;
            Ok(Box::new(|sample| sample.memory_percent))
        }
        nvmlSamplingType_enum_NVML_TOTAL_POWER_SAMPLES => {
            device.reporting(ReportedValue::Power)?;
            let range = power.limit.saturating_sub(power.idle);
            Ok(Box::new(move |sample| {
                power.idle + range / 100 * sample.gpu_percent
            }))
        }
        nvmlSamplingType_enum_NVML_PROCESSOR_CLK_SAMPLES => Ok(Box::new(move |_| clocks.graphics)),
        nvmlSamplingType_enum_NVML_MEMORY_CLK_SAMPLES => Ok(Box::new(move |_| clocks.memory)),
        nvmlSamplingType_enum_NVML_ENC_UTILIZATION_SAMPLES
        | nvmlSamplingType_enum_NVML_DEC_UTILIZATION_SAMPLES
        | nvmlSamplingType_enum_NVML_JPG_UTILIZATION_SAMPLES
        | nvmlSamplingType_enum_NVML_OFA_UTILIZATION_SAMPLES => {
            device.reporting(ReportedValue::Utilization)?;
            Ok(Box::new(|sample| sample.gpu_percent))
        }
        // For boards with a processor next to the GPU.
        nvmlSamplingType_enum_NVML_MODULE_POWER_SAMPLES => Err(NvmlError::NotSupported),
        _ => Err(NvmlError::InvalidArgument),
    }
}

struct ProcessUtilization {
    pid: c_uint,
    at: c_ulonglong,
    gpu_percent: c_uint,
    memory_percent: c_uint,
}

/// The newest sample of each process that was busy since a time.
fn by_process(handle: nvmlDevice_t, since: c_ulonglong) -> NvmlResult<Vec<ProcessUtilization>> {
    let device = not_partitioned(handle)?;
    device.reporting(ReportedValue::Utilization)?;
    let mut newest = BTreeMap::new();
    for sample in device.library.samples(device.gpu, since)? {
        let at = device.library.microseconds(sample.end);
        for process in sample.processes {
            let utilization = ProcessUtilization {
                pid: process.pid,
                at,
                gpu_percent: process.gpu_percent,
                memory_percent: process.memory_percent,
            };
            newest.insert(process.pid, utilization);
        }
    }
    Ok(newest.into_values().collect())
}
