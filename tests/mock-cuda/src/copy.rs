//! Copies and memsets.
//!
//! Bytes move when the call is made, the time is spent in the stream: kernels compute nothing, so
//! the order that a program can observe is the order of its calls. Of one operation at most
//! [`KEPT_BYTES`] are moved, so that a program can fill a card larger than the host's memory.

use std::ffi::{c_uchar, c_uint, c_ushort};

use drava_mock_machine::description::Pcie;
use drava_mock_machine::kernel::Nanos;
use drava_mock_machine::kernel::engine::{Direction, Work};

use crate::abi::{Address, Answer, entry_points};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::memory::RangeKind;
use crate::stream::{Point, Stream, wait_for, with_room};
use crate::types::{CUcontext, CUdeviceptr, CUstream};

/// Most bytes that one operation really moves.
pub(crate) const KEPT_BYTES: u64 = 64 << 20;
/// Operations on an idle stream that are shorter than this are done when the call returns.
const INSTANT: Nanos = 2_000;

/// Where the bytes of a copy come from and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
    /// By the addresses: what no allocation has is the host's.
    Unified,
}

/// Whether the caller waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Completion {
    Awaited,
    Queued,
}

fn nanos_for(bytes: u64, bytes_per_second: u64) -> Nanos {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second.max(1));
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

/// What a PCIe link carries after its protocol's overhead.
fn link_bytes_per_second(pcie: Pcie) -> u64 {
    let lane: u64 = match pcie.generation {
        0..=3 => 985_000_000,
        4 => 1_969_000_000,
        _ => 3_938_000_000,
    };
    lane * u64::from(pcie.width) * 9 / 10
}

impl State {
    /// Refuses a range that is not within one allocation.
    pub(crate) fn require_range(&self, address: CUdeviceptr, bytes: u64) -> Answer {
        let (start, size, _) = self.allocation_at(address).ok_or(CudaError::InvalidValue)?;
        match (address - start).checked_add(bytes) {
            Some(end) if end <= size => Ok(()),
            _ => Err(CudaError::InvalidValue),
        }
    }

    fn on_card(&self, address: CUdeviceptr) -> bool {
        let found = self.allocation_at(address);
        found.is_some_and(|(_, _, kind)| {
            !matches!(kind, RangeKind::Host { .. } | RangeKind::Managed { .. })
        })
    }

    /// The route of a copy between unified addresses.
    fn resolve(&self, route: Route, to: u64, from: u64) -> Route {
        match (route, self.on_card(to), self.on_card(from)) {
            (Route::Unified, true, false) => Route::HostToDevice,
            (Route::Unified, false, true) => Route::DeviceToHost,
            (Route::Unified, true, true) => Route::DeviceToDevice,
            (route, _, _) => route,
        }
    }

    /// The time of a copy, as work for a stream.
    fn copy_work(&self, driver: &Driver, stream: Stream, route: Route, bytes: u64) -> Answer<Work> {
        let context = self
            .contexts
            .get(&stream.context)
            .ok_or(CudaError::ContextIsDestroyed)?;
        let model = driver.model(context.device)?;
        let over_link = nanos_for(bytes, link_bytes_per_second(model.pcie));
        Ok(match route {
            Route::HostToDevice => Work::Copy {
                nanos: over_link,
                direction: Direction::ToCard,
            },
            Route::DeviceToHost => Work::Copy {
                nanos: over_link,
                direction: Direction::ToHost,
            },
            // Read and written.
            Route::DeviceToDevice => Work::Kernel {
                nanos: nanos_for(bytes.saturating_mul(2), model.memory.bytes_per_second),
                multiprocessors: model.compute.multiprocessors,
            },
            // Between host addresses: the host's business.
            Route::Unified => Work::Kernel {
                nanos: 0,
                multiprocessors: 1,
            },
        })
    }

    /// Puts work on a stream unless it is over before anyone could look.
    fn spend(&mut self, driver: &Driver, stream: Stream, work: Work) -> Answer<Option<Point>> {
        let (Work::Kernel { nanos, .. } | Work::Copy { nanos, .. }) = work else {
            return self.submit(driver, stream, work).map(Some);
        };
        if nanos < INSTANT && self.idle(driver, stream) {
            return Ok(None);
        }
        self.submit(driver, stream, work).map(Some)
    }
}

/// Copies between addresses of this process.
pub(crate) fn move_bytes(to: u64, from: u64, bytes: u64) -> Answer {
    let length = usize::try_from(bytes.min(KEPT_BYTES)).map_err(|_| CudaError::InvalidValue)?;
    let pointer = |address: u64| usize::try_from(address).map_err(|_| CudaError::InvalidValue);
    let from: *const u8 = std::ptr::with_exposed_provenance(pointer(from)?);
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(pointer(to)?);
    // SAFETY: card addresses were checked to lie within an allocation, which is mapped; host
    // addresses are valid by the caller's promise. The ranges may overlap.
    unsafe { std::ptr::copy(from, to, length) };
    Ok(())
}

/// Writes a pattern over a range of a card.
fn write_pattern(address: u64, pattern: &[u8], bytes: u64) -> Answer {
    let length = usize::try_from(bytes.min(KEPT_BYTES)).map_err(|_| CudaError::InvalidValue)?;
    let base = usize::try_from(address).map_err(|_| CudaError::InvalidValue)?;
    let base: *mut u8 = std::ptr::with_exposed_provenance_mut(base);
    // SAFETY: checked to lie within an allocation, which is mapped.
    let range = unsafe { std::slice::from_raw_parts_mut(base, length) };
    for chunk in range.chunks_exact_mut(pattern.len()) {
        chunk.copy_from_slice(pattern);
    }
    Ok(())
}

fn copy(
    to: u64,
    from: u64,
    bytes: usize,
    route: Route,
    stream: CUstream,
    completion: Completion,
) -> Answer {
    let bytes = bytes as u64;
    let point = with_room(stream, |driver, state, stream| {
        if bytes == 0 {
            return Ok(None);
        }
        let route = state.resolve(route, to, from);
        if matches!(route, Route::HostToDevice | Route::DeviceToDevice) {
            state.require_range(to, bytes)?;
        }
        if matches!(route, Route::DeviceToHost | Route::DeviceToDevice) {
            state.require_range(from, bytes)?;
        }
        move_bytes(to, from, bytes)?;
        let work = state.copy_work(driver, stream, route, bytes)?;
        state.spend(driver, stream, work)
    })?;
    complete(point, completion)
}

fn fill(to: CUdeviceptr, pattern: &[u8], count: usize, stream: CUstream) -> Answer {
    let bytes = (pattern.len() as u64)
        .checked_mul(count as u64)
        .ok_or(CudaError::InvalidValue)?;
    with_room(stream, |driver, state, stream| {
        if bytes == 0 {
            return Ok(());
        }
        state.require_range(to, bytes)?;
        write_pattern(to, pattern, bytes)?;
        state.spend_fill(driver, stream, bytes)
    })
}

/// Rows of `width` elements, `pitch` bytes apart.
fn fill_rows(
    to: CUdeviceptr,
    pitch: usize,
    pattern: &[u8],
    width: usize,
    height: usize,
    stream: CUstream,
) -> Answer {
    let row = (pattern.len() as u64)
        .checked_mul(width as u64)
        .ok_or(CudaError::InvalidValue)?;
    let pitch = pitch as u64;
    let rows = height as u64;
    with_room(stream, |driver, state, stream| {
        if row == 0 || rows == 0 {
            return Ok(());
        }
        let span = pitch
            .checked_mul(rows - 1)
            .and_then(|before| before.checked_add(row));
        if rows > 1 && pitch < row {
            return Err(CudaError::InvalidValue);
        }
        state.require_range(to, span.ok_or(CudaError::InvalidValue)?)?;
        for index in 0..rows.min(KEPT_BYTES / row.max(1) + 1) {
            write_pattern(to + index * pitch, pattern, row)?;
        }
        state.spend_fill(driver, stream, row.saturating_mul(rows))
    })
}

impl State {
    fn spend_fill(&mut self, driver: &Driver, stream: Stream, bytes: u64) -> Answer {
        let context = self
            .contexts
            .get(&stream.context)
            .ok_or(CudaError::ContextIsDestroyed)?;
        let model = driver.model(context.device)?;
        let nanos = nanos_for(bytes, model.memory.bytes_per_second);
        let multiprocessors = model.compute.multiprocessors;
        self.spend(
            driver,
            stream,
            Work::Kernel {
                nanos,
                multiprocessors,
            },
        )
        .map(drop)
    }
}

fn complete(point: Option<Point>, completion: Completion) -> Answer {
    match (point, completion) {
        (Some(point), Completion::Awaited) => wait_for(driver()?, &[point]),
        _ => Ok(()),
    }
}

use Completion::{Awaited, Queued};
use Route::{DeviceToDevice, DeviceToHost, HostToDevice, Unified};

entry_points! {
    "cuMemcpy" 4000 fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) ptds(stream) cuMemcpy_ptds { copy(to, from, bytes, Unified, stream, Awaited) }
    "cuMemcpyAsync" 4000 fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyAsync_ptsz { copy(to, from, bytes, Unified, stream, Queued) }
    "cuMemcpyPeer" 4000 fn cuMemcpyPeer(to: CUdeviceptr, _to_context: CUcontext, from: CUdeviceptr, _from_context: CUcontext, bytes: usize) ptds(stream) cuMemcpyPeer_ptds { copy(to, from, bytes, DeviceToDevice, stream, Awaited) }
    "cuMemcpyPeerAsync" 4000 fn cuMemcpyPeerAsync(to: CUdeviceptr, _to_context: CUcontext, from: CUdeviceptr, _from_context: CUcontext, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyPeerAsync_ptsz { copy(to, from, bytes, DeviceToDevice, stream, Queued) }

    "cuMemcpyHtoD" 3020 fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: Address, bytes: usize) ptds(stream) cuMemcpyHtoD_v2_ptds { copy(to, from.number(), bytes, HostToDevice, stream, Awaited) }
    "cuMemcpyDtoH" 3020 fn cuMemcpyDtoH_v2(to: Address, from: CUdeviceptr, bytes: usize) ptds(stream) cuMemcpyDtoH_v2_ptds { copy(to.number(), from, bytes, DeviceToHost, stream, Awaited) }
    "cuMemcpyDtoD" 3020 fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) ptds(stream) cuMemcpyDtoD_v2_ptds { copy(to, from, bytes, DeviceToDevice, stream, Awaited) }
    "cuMemcpyHtoDAsync" 3020 fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: Address, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyHtoDAsync_v2_ptsz { copy(to, from.number(), bytes, HostToDevice, stream, Queued) }
    "cuMemcpyDtoHAsync" 3020 fn cuMemcpyDtoHAsync_v2(to: Address, from: CUdeviceptr, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyDtoHAsync_v2_ptsz { copy(to.number(), from, bytes, DeviceToHost, stream, Queued) }
    "cuMemcpyDtoDAsync" 3020 fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyDtoDAsync_v2_ptsz { copy(to, from, bytes, DeviceToDevice, stream, Queued) }

    "cuMemsetD8" 3020 fn cuMemsetD8_v2(to: CUdeviceptr, value: c_uchar, count: usize) ptds(stream) cuMemsetD8_v2_ptds { fill(to, &[value], count, stream) }
    "cuMemsetD16" 3020 fn cuMemsetD16_v2(to: CUdeviceptr, value: c_ushort, count: usize) ptds(stream) cuMemsetD16_v2_ptds { fill(to, &value.to_ne_bytes(), count, stream) }
    "cuMemsetD32" 3020 fn cuMemsetD32_v2(to: CUdeviceptr, value: c_uint, count: usize) ptds(stream) cuMemsetD32_v2_ptds { fill(to, &value.to_ne_bytes(), count, stream) }
    "cuMemsetD8Async" 3020 fn cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream) ptsz(stream) cuMemsetD8Async_ptsz { fill(to, &[value], count, stream) }
    "cuMemsetD16Async" 3020 fn cuMemsetD16Async(to: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream) ptsz(stream) cuMemsetD16Async_ptsz { fill(to, &value.to_ne_bytes(), count, stream) }
    "cuMemsetD32Async" 3020 fn cuMemsetD32Async(to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream) ptsz(stream) cuMemsetD32Async_ptsz { fill(to, &value.to_ne_bytes(), count, stream) }
    "cuMemsetD2D8" 3020 fn cuMemsetD2D8_v2(to: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize) ptds(stream) cuMemsetD2D8_v2_ptds { fill_rows(to, pitch, &[value], width, height, stream) }
    "cuMemsetD2D16" 3020 fn cuMemsetD2D16_v2(to: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize) ptds(stream) cuMemsetD2D16_v2_ptds { fill_rows(to, pitch, &value.to_ne_bytes(), width, height, stream) }
    "cuMemsetD2D32" 3020 fn cuMemsetD2D32_v2(to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize) ptds(stream) cuMemsetD2D32_v2_ptds { fill_rows(to, pitch, &value.to_ne_bytes(), width, height, stream) }
    "cuMemsetD2D8Async" 3020 fn cuMemsetD2D8Async(to: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize, stream: CUstream) ptsz(stream) cuMemsetD2D8Async_ptsz { fill_rows(to, pitch, &[value], width, height, stream) }
    "cuMemsetD2D16Async" 3020 fn cuMemsetD2D16Async(to: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize, stream: CUstream) ptsz(stream) cuMemsetD2D16Async_ptsz { fill_rows(to, pitch, &value.to_ne_bytes(), width, height, stream) }
    "cuMemsetD2D32Async" 3020 fn cuMemsetD2D32Async(to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize, stream: CUstream) ptsz(stream) cuMemsetD2D32Async_ptsz { fill_rows(to, pitch, &value.to_ne_bytes(), width, height, stream) }
}
