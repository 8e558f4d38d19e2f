//! Memsets.

use std::ffi::{c_uchar, c_uint, c_ushort};

use simulator_machine::protocol::Work;

use crate::State;
use crate::abi::{CudaResult, entry_points};
use crate::copy::{Completion, MAX_STORED_BYTES, nanos_for};
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::operation::{Operation, enqueue};
use crate::stream::Stream;
use crate::types::{CUdeviceptr, CUmemsetNodeParams, CUstream};

impl CUmemsetNodeParams {
    /// Bytes of one row.
    fn row(&self) -> CudaResult<u64> {
        if !matches!(self.element_size, 1 | 2 | 4) {
            return Err(CudaError::InvalidValue);
        }
        let row = u64::from(self.element_size).checked_mul(self.width as u64);
        row.ok_or(CudaError::InvalidValue)
    }
}

/// Writes a pattern over a device range.
fn write_pattern(address: u64, pattern: &[u8], bytes: u64) -> CudaResult {
    let length =
        usize::try_from(bytes.min(MAX_STORED_BYTES)).map_err(|_| CudaError::InvalidValue)?;
    let base = usize::try_from(address).map_err(|_| CudaError::InvalidValue)?;
    let base: *mut u8 = std::ptr::with_exposed_provenance_mut(base);
    // SAFETY: checked to lie within an allocation, which is mapped.
    let range = unsafe { std::slice::from_raw_parts_mut(base, length) };
    if let [byte] = pattern {
        // `fill` is fast in debug builds, unlike the loop below.
        range.fill(*byte);
        return Ok(());
    }
    for chunk in range.chunks_exact_mut(pattern.len().max(1)) {
        chunk.copy_from_slice(pattern);
    }
    Ok(())
}

impl State {
    /// Sets memory, and submits the duration to the stream.
    pub(crate) fn run_fill(
        &mut self,
        driver: &Driver,
        stream: Stream,
        fill: &CUmemsetNodeParams,
    ) -> CudaResult<Option<Point>> {
        let row = fill.row()?;
        let rows = fill.height as u64;
        if row == 0 || rows == 0 {
            return Ok(None);
        }
        let pitch = fill.pitch as u64;
        if rows > 1 && pitch < row {
            return Err(CudaError::InvalidValue);
        }
        let span = pitch
            .checked_mul(rows - 1)
            .and_then(|before| before.checked_add(row));
        self.require_range(fill.to, span.ok_or(CudaError::InvalidValue)?)?;
        let pattern = fill.value.to_le_bytes();
        let pattern = pattern.get(..fill.element_size as usize);
        let pattern = pattern.ok_or(CudaError::InvalidValue)?;
        for index in 0..rows.min(MAX_STORED_BYTES / row + 1) {
            write_pattern(fill.to + index * pitch, pattern, row)?;
        }
        let context = self.contexts.get(&stream.context);
        let context = context.ok_or(CudaError::ContextIsDestroyed)?;
        let model = driver.model(context.device)?;
        let work = Work::Kernel {
            nanos: nanos_for(row.saturating_mul(rows), model.memory.bytes_per_second),
            multiprocessors: model.compute.multiprocessors,
        };
        self.submit_timed(driver, stream, work)
    }
}

fn fill(
    to: CUdeviceptr,
    value: c_uint,
    element_size: c_uint,
    count: usize,
    stream: CUstream,
    completion: Completion,
) -> CudaResult {
    fill_rows(to, 0, value, element_size, count, 1, stream, completion)
}

/// Sets rows of `width` elements, `pitch` bytes apart. A synchronous memset does not wait here, but
/// is unsafe during a capture.
#[expect(clippy::too_many_arguments, reason = "the CUDA function has as many")]
fn fill_rows(
    to: CUdeviceptr,
    pitch: usize,
    value: c_uint,
    element_size: c_uint,
    width: usize,
    height: usize,
    stream: CUstream,
    completion: Completion,
) -> CudaResult {
    if completion == Completion::Awaited {
        driver()?.state().require_safe_in_capture()?;
    }
    let fill = CUmemsetNodeParams {
        to,
        pitch,
        value,
        element_size,
        width,
        height,
    };
    enqueue(stream, |_, _, _| Ok(Operation::Fill(fill))).map(drop)
}

use Completion::{Awaited, Queued};

entry_points! {
    "cuMemsetD8" 3020 fn cuMemsetD8_v2(to: CUdeviceptr, value: c_uchar, count: usize) ptds(stream) cuMemsetD8_v2_ptds { fill(to, value.into(), 1, count, stream, Awaited) }
    "cuMemsetD16" 3020 fn cuMemsetD16_v2(to: CUdeviceptr, value: c_ushort, count: usize) ptds(stream) cuMemsetD16_v2_ptds { fill(to, value.into(), 2, count, stream, Awaited) }
    "cuMemsetD32" 3020 fn cuMemsetD32_v2(to: CUdeviceptr, value: c_uint, count: usize) ptds(stream) cuMemsetD32_v2_ptds { fill(to, value, 4, count, stream, Awaited) }
    "cuMemsetD8Async" 3020 fn cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream) ptsz(stream) cuMemsetD8Async_ptsz { fill(to, value.into(), 1, count, stream, Queued) }
    "cuMemsetD16Async" 3020 fn cuMemsetD16Async(to: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream) ptsz(stream) cuMemsetD16Async_ptsz { fill(to, value.into(), 2, count, stream, Queued) }
    "cuMemsetD32Async" 3020 fn cuMemsetD32Async(to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream) ptsz(stream) cuMemsetD32Async_ptsz { fill(to, value, 4, count, stream, Queued) }
    "cuMemsetD2D8" 3020 fn cuMemsetD2D8_v2(to: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize) ptds(stream) cuMemsetD2D8_v2_ptds { fill_rows(to, pitch, value.into(), 1, width, height, stream, Awaited) }
    "cuMemsetD2D16" 3020 fn cuMemsetD2D16_v2(to: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize) ptds(stream) cuMemsetD2D16_v2_ptds { fill_rows(to, pitch, value.into(), 2, width, height, stream, Awaited) }
    "cuMemsetD2D32" 3020 fn cuMemsetD2D32_v2(to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize) ptds(stream) cuMemsetD2D32_v2_ptds { fill_rows(to, pitch, value, 4, width, height, stream, Awaited) }
    "cuMemsetD2D8Async" 3020 fn cuMemsetD2D8Async(to: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize, stream: CUstream) ptsz(stream) cuMemsetD2D8Async_ptsz { fill_rows(to, pitch, value.into(), 1, width, height, stream, Queued) }
    "cuMemsetD2D16Async" 3020 fn cuMemsetD2D16Async(to: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize, stream: CUstream) ptsz(stream) cuMemsetD2D16Async_ptsz { fill_rows(to, pitch, value.into(), 2, width, height, stream, Queued) }
    "cuMemsetD2D32Async" 3020 fn cuMemsetD2D32Async(to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize, stream: CUstream) ptsz(stream) cuMemsetD2D32Async_ptsz { fill_rows(to, pitch, value, 4, width, height, stream, Queued) }
}
