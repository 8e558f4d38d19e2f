//! GPU performance monitoring (GPM): differences of two samples of a GPU or GPU instance.
//!
//! Supported from Hopper on, for the metrics of multiprocessors; other metrics report that they are
//! not supported.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_uint};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nvml_wrapper_sys::bindings::{
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_SUPPORT_VERSION, nvmlDevice_t, nvmlGpmMetric_t,
    nvmlGpmMetric_t__bindgen_ty_1, nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL,
    nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL, nvmlGpmMetricsGet_t, nvmlGpmSample_t,
    nvmlGpmSupport_t,
};
use simulator_machine::protocol::{CountersState, Reply, Request};

use crate::abi::{NvmlResult, Out, entry_points};
use crate::error::NvmlError;
use crate::handle::{Device, device};
use crate::library::require_initialized;

/// Samples of this process by handle; `None` until taken.
static SAMPLES: Mutex<BTreeMap<usize, Option<CountersState>>> = Mutex::new(BTreeMap::new());
/// First handle: above every mappable address.
const FIRST: usize = 0x0100_6e76_6770_0000;
/// Hopper.
const SINCE_MAJOR: u32 = 9;

fn samples() -> MutexGuard<'static, BTreeMap<usize, Option<CountersState>>> {
    SAMPLES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_supported(device: Device) -> NvmlResult<bool> {
    Ok(device.model()?.compute_capability.major >= SINCE_MAJOR)
}

/// Takes a sample of a GPU or of one GPU instance.
fn take(device: Device, gpu_instance: Option<u32>, sample: nvmlGpmSample_t) -> NvmlResult {
    if !is_supported(device)? {
        return Err(NvmlError::NotSupported);
    }
    if !samples().contains_key(&sample.addr()) {
        return Err(NvmlError::InvalidArgument);
    }
    let gpu = device.gpu;
    let Reply::Counters(counters) = device
        .library
        .request(&Request::Counters { gpu, gpu_instance })?
    else {
        return Err(NvmlError::Unknown);
    };
    samples().insert(sample.addr(), Some(counters));
    Ok(())
}

/// Returns a metric between two samples, percent.
fn metric(id: c_uint, before: &CountersState, after: &CountersState) -> Option<f64> {
    let part = |used: u128, of: u128| {
        let per_million = used * 1_000_000 / of.max(1);
        let per_million = u32::try_from(per_million.min(1_000_000)).unwrap_or(1_000_000);
        f64::from(per_million) / 10_000.0
    };
    let length = u128::from(after.at.saturating_sub(before.at));
    match id {
        nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL => {
            let busy = after.busy_nanos.saturating_sub(before.busy_nanos);
            Some(part(u128::from(busy), length))
        }
        nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL => {
            let occupied = after
                .multiprocessor_nanos
                .saturating_sub(before.multiprocessor_nanos);
            Some(part(occupied, length * u128::from(after.multiprocessors)))
        }
        _ => None,
    }
}

fn described(id: c_uint) -> nvmlGpmMetric_t__bindgen_ty_1 {
    let (short, long) = match id {
        nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL => (c"gr_util", c"Graphics Utilization"),
        nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL => (c"sm_util", c"SM Utilization"),
        _ => (c"", c""),
    };
    let text = |text: &'static std::ffi::CStr| -> *mut c_char { text.as_ptr().cast_mut() };
    nvmlGpmMetric_t__bindgen_ty_1 {
        shortName: text(short),
        longName: text(long),
        unit: text(c"%"),
    }
}

entry_points! {
    fn nvmlGpmQueryDeviceSupport(handle: nvmlDevice_t, support: Out<nvmlGpmSupport_t>) {
        let device = device(handle)?;
        let mut asked = support.get()?;
        if asked.version != NVML_GPM_SUPPORT_VERSION {
            return Err(NvmlError::ArgumentVersionMismatch);
        }
        asked.isSupportedDevice = is_supported(device)?.into();
        support.set(asked)
    }

    fn nvmlGpmSampleAlloc(sample: Out<nvmlGpmSample_t>) {
        require_initialized()?;
        let mut samples = samples();
        let handle = samples.last_key_value().map_or(FIRST, |(last, _)| last + 16);
        sample.set(std::ptr::without_provenance_mut(handle))?;
        samples.insert(handle, None);
        Ok(())
    }

    fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) {
        require_initialized()?;
        samples().remove(&sample.addr()).map(drop).ok_or(NvmlError::InvalidArgument)
    }

    fn nvmlGpmSampleGet(handle: nvmlDevice_t, sample: nvmlGpmSample_t) { take(device(handle)?, None, sample) }

    fn nvmlGpmMigSampleGet(handle: nvmlDevice_t, gpu_instance: c_uint, sample: nvmlGpmSample_t) {
        let device = device(handle)?;
        let exists = device.library.mig(device.gpu)?.gpu_instances.iter().any(|one| one.id == gpu_instance);
        match exists {
            true => take(device, Some(gpu_instance), sample),
            false => Err(NvmlError::InvalidArgument),
        }
    }

    fn nvmlGpmMetricsGet(metrics: Out<nvmlGpmMetricsGet_t>) {
        require_initialized()?;
        let mut asked = metrics.get()?;
        if asked.version != NVML_GPM_METRICS_GET_VERSION {
            return Err(NvmlError::ArgumentVersionMismatch);
        }
        let taken = |sample: nvmlGpmSample_t| samples().get(&sample.addr()).copied().flatten();
        let before = taken(asked.sample1).ok_or(NvmlError::InvalidArgument)?;
        let after = taken(asked.sample2).ok_or(NvmlError::InvalidArgument)?;
        let count = usize::try_from(asked.numMetrics).map_err(|_| NvmlError::InvalidArgument)?;
        let wanted: &mut [nvmlGpmMetric_t] = asked.metrics.get_mut(..count).ok_or(NvmlError::InvalidArgument)?;
        for one in wanted {
            let value = metric(one.metricId, &before, &after);
            one.nvmlReturn = match value {
                Some(_) => 0,
                None => NvmlError::NotSupported.into(),
            };
            one.value = value.unwrap_or(0.0);
            one.metricInfo = described(one.metricId);
        }
        metrics.set(asked)
    }

    // Samples are taken on request.
    fn nvmlGpmQueryIfStreamingEnabled(handle: nvmlDevice_t, enabled: Out<c_uint>) {
        match is_supported(device(handle)?)? {
            true => enabled.set(0),
            false => Err(NvmlError::NotSupported),
        }
    }
    fn nvmlGpmSetStreamingEnabled(handle: nvmlDevice_t, _enabled: c_uint) {
        match is_supported(device(handle)?)? {
            true => Ok(()),
            false => Err(NvmlError::NotSupported),
        }
    }
}
