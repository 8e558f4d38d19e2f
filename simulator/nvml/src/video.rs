//! Video engines and frame buffer capture: each process of the GPU has a session of both, and the engines are as busy as the
//! GPU, so that a client sees the work of all processes.

use std::ffi::{c_int, c_uint};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEncoderSessionInfo_t, nvmlEncoderType_t, nvmlFBCSessionInfo_t, nvmlFBCStats_t,
};
use simulator_machine::protocol::ReportedValue;

use crate::abi::{NvmlResult, Out, entry_points, set_list};
use crate::error::NvmlError;
use crate::sensors::not_partitioned;

/// Sampling period of the engines.
const SAMPLING_PERIOD_MICROSECONDS: c_uint = 1_000_000 / 6;
const FRAMES_PER_SECOND: c_uint = 30;
const LATENCY_MICROSECONDS: c_uint = 1000;

entry_points! {
    fn nvmlDeviceGetEncoderUtilization(handle: nvmlDevice_t, percent: Out<c_uint>, period: Out<c_uint>) { engine(handle, percent, period) }
    fn nvmlDeviceGetDecoderUtilization(handle: nvmlDevice_t, percent: Out<c_uint>, period: Out<c_uint>) { engine(handle, percent, period) }
    fn nvmlDeviceGetJpgUtilization(handle: nvmlDevice_t, percent: Out<c_uint>, period: Out<c_uint>) { engine(handle, percent, period) }
    fn nvmlDeviceGetOfaUtilization(handle: nvmlDevice_t, percent: Out<c_uint>, period: Out<c_uint>) { engine(handle, percent, period) }

    // Percent of the encoder that is not in use.
    fn nvmlDeviceGetEncoderCapacity(handle: nvmlDevice_t, codec: nvmlEncoderType_t, percent: Out<c_int>) {
        const AV1: nvmlEncoderType_t = 2;
        let sessions = pids(handle)?.len().min(10);
        if codec > AV1 {
            return Err(NvmlError::InvalidArgument);
        }
        let sessions = c_int::try_from(sessions).map_err(|_| NvmlError::Unknown)?;
        percent.set(100 - 10 * sessions)
    }

    fn nvmlDeviceGetEncoderStats(handle: nvmlDevice_t, sessions: Out<c_uint>, frames: Out<c_uint>, latency: Out<c_uint>) {
        let count = length(&pids(handle)?)?;
        sessions.set(count)?;
        frames.set(if count == 0 { 0 } else { FRAMES_PER_SECOND })?;
        latency.set(if count == 0 { 0 } else { LATENCY_MICROSECONDS })
    }

    fn nvmlDeviceGetEncoderSessions(handle: nvmlDevice_t, count: Out<c_uint>, sessions: Out<nvmlEncoderSessionInfo_t>) {
        let pids = pids(handle)?;
        let session = |(sessionId, pid)| nvmlEncoderSessionInfo_t {
            sessionId,
            pid,
            vgpuInstance: 0,
            codecType: 0,
            hResolution: 1920,
            vResolution: 1080,
            averageFps: FRAMES_PER_SECOND,
            averageLatency: LATENCY_MICROSECONDS,
        };
        list(count, sessions, (0..).zip(pids).map(session).collect())
    }

    fn nvmlDeviceGetFBCStats(handle: nvmlDevice_t, stats: Out<nvmlFBCStats_t>) {
        let sessionsCount = length(&pids(handle)?)?;
        stats.set(nvmlFBCStats_t {
            sessionsCount,
            averageFPS: if sessionsCount == 0 { 0 } else { FRAMES_PER_SECOND },
            averageLatency: if sessionsCount == 0 { 0 } else { LATENCY_MICROSECONDS },
        })
    }

    fn nvmlDeviceGetFBCSessions(handle: nvmlDevice_t, count: Out<c_uint>, sessions: Out<nvmlFBCSessionInfo_t>) {
        let pids = pids(handle)?;
        let session = |(sessionId, pid)| nvmlFBCSessionInfo_t {
            sessionId,
            pid,
            vgpuInstance: 0,
            displayOrdinal: 0,
            sessionType: 0,
            sessionFlags: 0,
            hMaxResolution: 1920,
            vMaxResolution: 1080,
            hResolution: 1920,
            vResolution: 1080,
            averageFPS: FRAMES_PER_SECOND,
            averageLatency: LATENCY_MICROSECONDS,
        };
        list(count, sessions, (0..).zip(pids).map(session).collect())
    }
}

fn engine(handle: nvmlDevice_t, percent: Out<c_uint>, period: Out<c_uint>) -> NvmlResult {
    let utilization = not_partitioned(handle)?.reporting(ReportedValue::Utilization)?;
    percent.set(utilization.utilization.gpu_percent)?;
    period.set(SAMPLING_PERIOD_MICROSECONDS)
}

fn pids(handle: nvmlDevice_t) -> NvmlResult<Vec<c_uint>> {
    let state = not_partitioned(handle)?.reporting(ReportedValue::Processes)?;
    Ok(state.processes.iter().map(|process| process.pid).collect())
}

fn length<T>(list: &[T]) -> NvmlResult<c_uint> {
    c_uint::try_from(list.len()).map_err(|_| NvmlError::Unknown)
}

/// Writes sessions. With a capacity of zero, the length alone; a list needs an array.
fn list<T>(count: Out<c_uint>, array: Out<T>, sessions: Vec<T>) -> NvmlResult {
    if count.get()? == 0 {
        return count.set(length(&sessions)?);
    }
    if array.is_null() {
        return Err(NvmlError::InvalidArgument);
    }
    set_list(count, array, sessions)
}
