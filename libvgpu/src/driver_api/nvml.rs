//! Types and constants of NVML that the hooks use. Names as in `nvml.h`.

#![expect(
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "names are those of nvml.h"
)]

use core::ffi::{c_int, c_longlong, c_uint, c_ulonglong, c_void};
use core::mem::{offset_of, size_of};

pub(crate) type nvmlReturn_t = c_int;
pub(crate) type nvmlDevice_t = *mut c_void;

pub(crate) const NVML_SUCCESS: nvmlReturn_t = 0;
pub(crate) const NVML_ERROR_NOT_SUPPORTED: nvmlReturn_t = 3;
pub(crate) const NVML_ERROR_NOT_FOUND: nvmlReturn_t = 6;
pub(crate) const NVML_ERROR_INSUFFICIENT_SIZE: nvmlReturn_t = 7;
pub(crate) const NVML_ERROR_LIBRARY_NOT_FOUND: nvmlReturn_t = 12;
pub(crate) const NVML_ERROR_FUNCTION_NOT_FOUND: nvmlReturn_t = 13;

/// IDs of the GPU instance and the compute instance outside MIG.
pub(crate) const NO_INSTANCE: c_uint = c_uint::MAX;

/// Values of `nvmlSamplingType_t`.
pub(crate) const NVML_GPU_UTILIZATION_SAMPLES: c_uint = 1;
pub(crate) const NVML_MEMORY_UTILIZATION_SAMPLES: c_uint = 2;
pub(crate) const NVML_ENC_UTILIZATION_SAMPLES: c_uint = 3;
pub(crate) const NVML_DEC_UTILIZATION_SAMPLES: c_uint = 4;
pub(crate) const NVML_JPG_UTILIZATION_SAMPLES: c_uint = 8;
pub(crate) const NVML_OFA_UTILIZATION_SAMPLES: c_uint = 9;
/// Value of `nvmlValueType_t`.
pub(crate) const NVML_VALUE_TYPE_UNSIGNED_INT: c_uint = 1;

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
pub(crate) const UUID_BUFFER_SIZE: c_uint = 96;

#[repr(C)]
pub(crate) struct nvmlMemory_t {
    pub(crate) total: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

#[repr(C)]
pub(crate) struct nvmlConfComputeMemSizeInfo_t {
    pub(crate) protectedMemSizeKib: c_ulonglong,
    pub(crate) unprotectedMemSizeKib: c_ulonglong,
}

#[repr(C)]
pub(crate) struct nvmlMemory_v2_t {
    pub(crate) version: c_uint,
    pub(crate) total: c_ulonglong,
    pub(crate) reserved: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlProcessInfo_v1_t {
    pub(crate) pid: c_uint,
    pub(crate) usedGpuMemory: c_ulonglong,
}

/// Versions 2 and 3, which have the same layout.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlProcessInfo_t {
    pub(crate) pid: c_uint,
    pub(crate) usedGpuMemory: c_ulonglong,
    pub(crate) gpuInstanceId: c_uint,
    pub(crate) computeInstanceId: c_uint,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlProcessDetail_v1_t {
    pub(crate) pid: c_uint,
    pub(crate) usedGpuMemory: c_ulonglong,
    pub(crate) gpuInstanceId: c_uint,
    pub(crate) computeInstanceId: c_uint,
    pub(crate) usedGpuCcProtectedMemory: c_ulonglong,
}

/// Version 1.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlProcessDetailList_t {
    pub(crate) version: c_uint,
    pub(crate) mode: c_uint,
    pub(crate) numProcArrayEntries: c_uint,
    pub(crate) procArray: *mut nvmlProcessDetail_v1_t,
}

#[repr(C)]
pub(crate) struct nvmlAccountingStats_t {
    pub(crate) gpuUtilization: c_uint,
    pub(crate) memoryUtilization: c_uint,
    pub(crate) maxMemoryUsage: c_ulonglong,
    pub(crate) time: c_ulonglong,
    pub(crate) startTime: c_ulonglong,
    pub(crate) isRunning: c_uint,
    pub(crate) reserved: [c_uint; 5],
}

#[repr(C)]
pub(crate) struct nvmlAccountingStats_v2_t {
    /// Set by the caller.
    pub(crate) pid: c_uint,
    pub(crate) isRunning: c_uint,
    pub(crate) gpuUtilization: c_uint,
    pub(crate) memoryUtilization: c_uint,
    pub(crate) maxMemoryUsage: c_ulonglong,
    pub(crate) sampleCount: c_uint,
    /// Sums over the samples, in hundredths of a percent.
    pub(crate) sumGpuUtil: c_ulonglong,
    pub(crate) sumFbUtil: c_ulonglong,
    pub(crate) time: c_ulonglong,
    pub(crate) startTime: c_ulonglong,
}

#[repr(C)]
pub(crate) struct nvmlGpmSupport_t {
    pub(crate) version: c_uint,
    pub(crate) isSupportedDevice: c_uint,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlUtilization_t {
    pub(crate) gpu: c_uint,
    pub(crate) memory: c_uint,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlProcessUtilizationSample_t {
    pub(crate) pid: c_uint,
    pub(crate) timeStamp: c_ulonglong,
    pub(crate) smUtil: c_uint,
    pub(crate) memUtil: c_uint,
    pub(crate) encUtil: c_uint,
    pub(crate) decUtil: c_uint,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlProcessUtilizationInfo_v1_t {
    pub(crate) timeStamp: c_ulonglong,
    pub(crate) pid: c_uint,
    pub(crate) smUtil: c_uint,
    pub(crate) memUtil: c_uint,
    pub(crate) encUtil: c_uint,
    pub(crate) decUtil: c_uint,
    pub(crate) jpgUtil: c_uint,
    pub(crate) ofaUtil: c_uint,
}

/// Domains of `nvmlGpuDynamicPstatesInfo_t`.
pub(crate) const NVML_GPU_UTILIZATION_DOMAIN_GPU: usize = 0;
pub(crate) const NVML_GPU_UTILIZATION_DOMAIN_FB: usize = 1;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlGpuDynamicPstatesUtilization_t {
    /// One bit; the others are undefined.
    pub(crate) bIsPresent: c_uint,
    pub(crate) percentage: c_uint,
    pub(crate) incThreshold: c_uint,
    pub(crate) decThreshold: c_uint,
}

#[repr(C)]
pub(crate) struct nvmlGpuDynamicPstatesInfo_t {
    pub(crate) flags: c_uint,
    pub(crate) utilization: [nvmlGpuDynamicPstatesUtilization_t; 8],
}

#[repr(C)]
pub(crate) struct nvmlFBCStats_t {
    pub(crate) sessionsCount: c_uint,
    pub(crate) averageFPS: c_uint,
    pub(crate) averageLatency: c_uint,
}

#[repr(C)]
pub(crate) struct nvmlFieldValue_t {
    pub(crate) fieldId: c_uint,
    pub(crate) scopeId: c_uint,
    pub(crate) timestamp: c_longlong,
    pub(crate) latencyUsec: c_longlong,
    pub(crate) valueType: c_uint,
    pub(crate) nvmlReturn: nvmlReturn_t,
    /// Union of number types, which all start at offset 0.
    pub(crate) value: c_ulonglong,
}

/// Value of an event type.
pub(crate) const nvmlEventTypeXidCriticalError: c_ulonglong = 8;

/// Version 1.
#[repr(C)]
pub(crate) struct nvmlProcessesUtilizationInfo_t {
    pub(crate) version: c_uint,
    pub(crate) processSamplesCount: c_uint,
    pub(crate) lastSeenTimeStamp: c_ulonglong,
    pub(crate) procUtilArray: *mut nvmlProcessUtilizationInfo_v1_t,
}

/// `nvmlProcessDetailList_v1`: size and version number.
pub(crate) const PROCESS_DETAIL_LIST_V1: c_uint = 24 | 1 << 24;
/// `nvmlProcessesUtilizationInfo_v1`: size and version number.
pub(crate) const PROCESSES_UTILIZATION_INFO_V1: c_uint = 24 | 1 << 24;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct nvmlSample_t {
    pub(crate) timeStamp: c_ulonglong,
    /// Union of number types, which all start at offset 0.
    pub(crate) sampleValue: c_ulonglong,
}

const _: () = {
    assert!(size_of::<nvmlProcessInfo_v1_t>() == 16);
    assert!(size_of::<nvmlProcessInfo_t>() == 24);
    assert!(offset_of!(nvmlProcessInfo_t, usedGpuMemory) == 8);
    assert!(size_of::<nvmlProcessDetail_v1_t>() == 32);
    assert!(size_of::<nvmlProcessDetailList_t>() == 24);
    assert!(size_of::<nvmlAccountingStats_t>() == 56);
    assert!(size_of::<nvmlAccountingStats_v2_t>() == 64);
    assert!(offset_of!(nvmlAccountingStats_v2_t, sumGpuUtil) == 32);
    assert!(size_of::<nvmlUtilization_t>() == 8);
    assert!(size_of::<nvmlProcessUtilizationSample_t>() == 32);
    assert!(offset_of!(nvmlProcessUtilizationSample_t, smUtil) == 16);
    assert!(size_of::<nvmlProcessUtilizationInfo_v1_t>() == 40);
    assert!(offset_of!(nvmlProcessUtilizationInfo_v1_t, pid) == 8);
    assert!(size_of::<nvmlProcessesUtilizationInfo_t>() == 24);
    assert!(offset_of!(nvmlProcessesUtilizationInfo_t, procUtilArray) == 16);
    assert!(size_of::<nvmlSample_t>() == 16);
    assert!(size_of::<nvmlConfComputeMemSizeInfo_t>() == 16);
    assert!(size_of::<nvmlGpuDynamicPstatesInfo_t>() == 132);
    assert!(size_of::<nvmlFBCStats_t>() == 12);
    assert!(size_of::<nvmlFieldValue_t>() == 40);
    assert!(offset_of!(nvmlFieldValue_t, nvmlReturn) == 28);
    assert!(size_of::<nvmlMemory_t>() == 24);
    assert!(size_of::<nvmlMemory_v2_t>() == 40);
    assert!(offset_of!(nvmlMemory_v2_t, total) == 8);
};
