//! Copies.
//!
//! Bytes move during the call; the time passes in the stream. Kernels compute nothing, so the only
//! order that a program can observe is that of its calls. One operation moves at most
//! [`MAX_STORED_BYTES`], so a program can fill a GPU larger than host memory.
//!
//! Every copy is a `CUDA_MEMCPY3D`, with one row if linear, since graphs return copies in this
//! form.

use simulator_machine::description::Pcie;
use simulator_machine::protocol::{Direction, Nanos, Work};

use crate::State;
use crate::abi::{Address, CudaResult, entry_points};
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::memory::RangeKind;
use crate::operation::{Operation, enqueue};
use crate::stream::Stream;
use crate::types::{
    CUarray, CUcontext, CUdeviceptr, CUmemcpy3D, CUmemcpy3DSide, CUstream, MemoryType,
};

mod batch;
mod shaped;

pub(crate) use batch::ENTRY_POINTS as BATCH_ENTRY_POINTS;
pub(crate) use shaped::ENTRY_POINTS as SHAPED_ENTRY_POINTS;

/// Most bytes that one operation moves.
pub(crate) const MAX_STORED_BYTES: u64 = 64 << 20;
/// Shorter operations on an idle stream complete within the call.
const MIN_QUEUED_NANOS: Nanos = 2_000;

/// Whether the call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    Awaited,
    Queued,
}

/// Location of one side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rows {
    base: u64,
    /// Bytes from one row to the next.
    pitch: u64,
    /// Bytes from one layer to the next.
    slice: u64,
    on_gpu: bool,
}

impl Rows {
    fn row(self, y: u64, z: u64) -> u64 {
        self.base + z * self.slice + y * self.pitch
    }
}

pub(crate) fn nanos_for(bytes: u64, bytes_per_second: u64) -> Nanos {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second.max(1));
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

/// Bandwidth of a PCIe link after protocol overhead.
fn link_bytes_per_second(pcie: Pcie) -> u64 {
    let lane: u64 = match pcie.generation {
        0..=3 => 985_000_000,
        4 => 1_969_000_000,
        _ => 3_938_000_000,
    };
    lane * u64::from(pcie.width) * 9 / 10
}

impl CUmemcpy3DSide {
    /// Linear memory at an address.
    pub(crate) fn linear(memory_type: std::ffi::c_uint, address: u64) -> Self {
        Self {
            x: 0,
            y: 0,
            z: 0,
            lod: 0,
            memory_type,
            host: usize::try_from(address).unwrap_or(usize::MAX),
            device: address,
            array: CUarray(0),
            context: CUcontext::NULL,
            pitch: 0,
            height: 0,
        }
    }

    /// Start address of linear memory.
    fn address(&self) -> CudaResult<u64> {
        match self.memory_type {
            MemoryType::HOST => Ok(self.host as u64),
            MemoryType::DEVICE | MemoryType::UNIFIED => Ok(self.device),
            _ => Err(CudaError::InvalidValue),
        }
    }
}

impl CUmemcpy3D {
    /// A linear copy.
    pub(crate) fn linear(to: CUmemcpy3DSide, from: CUmemcpy3DSide, bytes: usize) -> Self {
        Self {
            from,
            to,
            width: bytes,
            height: 1,
            depth: 1,
        }
    }

    fn bytes(&self) -> u64 {
        let sides = [self.width, self.height, self.depth];
        sides
            .iter()
            .fold(1, |product: u64, side| product.saturating_mul(*side as u64))
    }

    /// Rows of a side in linear memory.
    fn rows_of_memory(&self, side: &CUmemcpy3DSide) -> CudaResult<Rows> {
        let right = side.x.checked_add(self.width);
        let right = right.ok_or(CudaError::InvalidValue)?;
        let pitch = if side.pitch == 0 { right } else { side.pitch };
        if pitch < right && (self.height > 1 || self.depth > 1) {
            return Err(CudaError::InvalidValue);
        }
        let height = if side.height == 0 {
            side.y.saturating_add(self.height)
        } else {
            side.height
        };
        let slice = pitch.checked_mul(height).ok_or(CudaError::InvalidValue)?;
        let start = || {
            let layers = (slice as u64).checked_mul(side.z as u64)?;
            let rows = (pitch as u64).checked_mul(side.y as u64)?;
            let address = side.address().ok()?;
            address
                .checked_add(layers)?
                .checked_add(rows)?
                .checked_add(side.x as u64)
        };
        Ok(Rows {
            base: start().ok_or(CudaError::InvalidValue)?,
            pitch: pitch as u64,
            slice: slice as u64,
            on_gpu: side.memory_type == MemoryType::DEVICE,
        })
    }

    /// Bytes from the first to the last byte touched, inclusive.
    fn span(&self, rows: Rows) -> Option<u64> {
        let layers = rows
            .slice
            .checked_mul((self.depth as u64).checked_sub(1)?)?;
        let lines = rows
            .pitch
            .checked_mul((self.height as u64).checked_sub(1)?)?;
        layers.checked_add(lines)?.checked_add(self.width as u64)
    }
}

impl State {
    /// Errors unless a range lies within one allocation.
    pub(crate) fn require_range(&self, address: CUdeviceptr, bytes: u64) -> CudaResult {
        let (start, size, kind) = self.allocation_at(address).ok_or(CudaError::InvalidValue)?;
        if kind == RangeKind::Virtual {
            return match self.virtual_memory.is_accessible(address, bytes) {
                true => Ok(()),
                false => Err(CudaError::InvalidValue),
            };
        }
        match (address - start).checked_add(bytes) {
            Some(end) if end <= size => Ok(()),
            _ => Err(CudaError::InvalidValue),
        }
    }

    fn on_gpu(&self, address: CUdeviceptr) -> bool {
        let found = self.allocation_at(address);
        let reserved = self.virtual_memory.is_reserved(address);
        reserved
            || found.is_some_and(|(_, _, kind)| {
                !matches!(
                    kind,
                    RangeKind::Host { .. } | RangeKind::Managed { .. } | RangeKind::HostPool { .. }
                )
            })
    }

    /// Locates a side of a copy. Device ranges must lie within one allocation.
    fn locate(&self, copy: &CUmemcpy3D, side: &CUmemcpy3DSide) -> CudaResult<Rows> {
        if side.memory_type == MemoryType::ARRAY {
            return self.locate_in_array(copy, side);
        }
        let mut rows = copy.rows_of_memory(side)?;
        rows.on_gpu |= side.memory_type == MemoryType::UNIFIED && self.on_gpu(rows.base);
        if rows.on_gpu {
            let span = copy.span(rows).ok_or(CudaError::InvalidValue)?;
            self.require_range(rows.base, span)?;
        }
        Ok(rows)
    }

    fn locate_in_array(&self, copy: &CUmemcpy3D, side: &CUmemcpy3DSide) -> CudaResult<Rows> {
        let array = self.arrays.get(side.array)?;
        if array.is_sparse() {
            return Err(CudaError::NotSupported);
        }
        let [row, rows, layers] = array.sides();
        for (start, length, most) in [
            (side.x, copy.width, row),
            (side.y, copy.height, rows),
            (side.z, copy.depth, layers),
        ] {
            if start.checked_add(length).is_none_or(|end| end > most) {
                return Err(CudaError::InvalidValue);
            }
        }
        let (pitch, slice) = (row as u64, row as u64 * rows as u64);
        let start = side.z as u64 * slice + side.y as u64 * pitch + side.x as u64;
        Ok(Rows {
            base: array.address + start,
            pitch,
            slice,
            on_gpu: true,
        })
    }

    /// Copies, and submits the duration to the stream.
    pub(crate) fn run_copy(
        &mut self,
        driver: &Driver,
        stream: Stream,
        copy: &CUmemcpy3D,
    ) -> CudaResult<Option<Point>> {
        let bytes = copy.bytes();
        if bytes == 0 {
            return Ok(None);
        }
        let (to, from) = (self.locate(copy, &copy.to)?, self.locate(copy, &copy.from)?);
        let width = copy.width as u64;
        let mut left = MAX_STORED_BYTES;
        'layers: for z in 0..copy.depth as u64 {
            for y in 0..copy.height as u64 {
                move_bytes(to.row(y, z), from.row(y, z), width.min(left))?;
                left = left.saturating_sub(width);
                if left == 0 {
                    break 'layers;
                }
            }
        }
        let work = self.copy_work(driver, stream, to.on_gpu, from.on_gpu, bytes)?;
        self.submit_timed(driver, stream, work)
    }

    /// The duration of a copy as work of a stream.
    fn copy_work(
        &self,
        driver: &Driver,
        stream: Stream,
        to_gpu: bool,
        from_gpu: bool,
        bytes: u64,
    ) -> CudaResult<Work> {
        let context = self
            .contexts
            .get(&stream.context)
            .ok_or(CudaError::ContextIsDestroyed)?;
        let model = driver.model(context.device)?;
        let over_link = nanos_for(bytes, link_bytes_per_second(model.pcie));
        Ok(match (to_gpu, from_gpu) {
            (true, false) => Work::Copy {
                nanos: over_link,
                direction: Direction::ToGpu,
            },
            (false, true) => Work::Copy {
                nanos: over_link,
                direction: Direction::ToHost,
            },
            // Read and written.
            (true, true) => Work::Kernel {
                nanos: nanos_for(bytes.saturating_mul(2), model.memory.bytes_per_second),
                multiprocessors: model.compute.multiprocessors,
            },
            // Host to host takes no GPU time.
            (false, false) => Work::Kernel {
                nanos: 0,
                multiprocessors: 1,
            },
        })
    }

    /// Submits work unless it completes within the call.
    pub(crate) fn submit_timed(
        &mut self,
        driver: &Driver,
        stream: Stream,
        work: Work,
    ) -> CudaResult<Option<Point>> {
        let (Work::Kernel { nanos, .. } | Work::Copy { nanos, .. }) = work else {
            return self.submit(driver, stream, work).map(Some);
        };
        if nanos < MIN_QUEUED_NANOS && self.is_idle(driver, stream) {
            return Ok(None);
        }
        self.submit(driver, stream, work).map(Some)
    }
}

/// Copies between addresses of this process.
pub(crate) fn move_bytes(to: u64, from: u64, bytes: u64) -> CudaResult {
    let length =
        usize::try_from(bytes.min(MAX_STORED_BYTES)).map_err(|_| CudaError::InvalidValue)?;
    let pointer = |address: u64| usize::try_from(address).map_err(|_| CudaError::InvalidValue);
    let from: *const u8 = std::ptr::with_exposed_provenance(pointer(from)?);
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(pointer(to)?);
    // SAFETY: device addresses were checked to lie within a mapped allocation; host addresses are
    // valid by the caller's contract. The ranges may overlap.
    unsafe { std::ptr::copy(from, to, length) };
    Ok(())
}

/// Submits a copy to a stream.
pub(crate) fn copy(copy: CUmemcpy3D, stream: CUstream, completion: Completion) -> CudaResult {
    let point = enqueue(stream, |_, _, _| Ok(Operation::Copy(copy)))?;
    match (point, completion) {
        (Some(point), Completion::Awaited) => driver()?.wait_for(&[point]),
        _ => Ok(()),
    }
}

/// Submits a linear copy between two memory types.
fn linear(
    (to_type, to): (std::ffi::c_uint, u64),
    (from_type, from): (std::ffi::c_uint, u64),
    bytes: usize,
    stream: CUstream,
    completion: Completion,
) -> CudaResult {
    let to = CUmemcpy3DSide::linear(to_type, to);
    let from = CUmemcpy3DSide::linear(from_type, from);
    copy(CUmemcpy3D::linear(to, from, bytes), stream, completion)
}

use Completion::{Awaited, Queued};

const HOST: std::ffi::c_uint = MemoryType::HOST;
const DEVICE: std::ffi::c_uint = MemoryType::DEVICE;
const UNIFIED: std::ffi::c_uint = MemoryType::UNIFIED;

entry_points! {
    "cuMemcpy" 4000 fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) ptds(stream) cuMemcpy_ptds { linear((UNIFIED, to), (UNIFIED, from), bytes, stream, Awaited) }
    "cuMemcpyAsync" 4000 fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyAsync_ptsz { linear((UNIFIED, to), (UNIFIED, from), bytes, stream, Queued) }
    "cuMemcpyPeer" 4000 fn cuMemcpyPeer(to: CUdeviceptr, _to_context: CUcontext, from: CUdeviceptr, _from_context: CUcontext, bytes: usize) ptds(stream) cuMemcpyPeer_ptds { linear((DEVICE, to), (DEVICE, from), bytes, stream, Awaited) }
    "cuMemcpyPeerAsync" 4000 fn cuMemcpyPeerAsync(to: CUdeviceptr, _to_context: CUcontext, from: CUdeviceptr, _from_context: CUcontext, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyPeerAsync_ptsz { linear((DEVICE, to), (DEVICE, from), bytes, stream, Queued) }

    "cuMemcpyHtoD" 3020 fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: Address, bytes: usize) ptds(stream) cuMemcpyHtoD_v2_ptds { linear((DEVICE, to), (HOST, from.number()), bytes, stream, Awaited) }
    "cuMemcpyDtoH" 3020 fn cuMemcpyDtoH_v2(to: Address, from: CUdeviceptr, bytes: usize) ptds(stream) cuMemcpyDtoH_v2_ptds { linear((HOST, to.number()), (DEVICE, from), bytes, stream, Awaited) }
    "cuMemcpyDtoD" 3020 fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) ptds(stream) cuMemcpyDtoD_v2_ptds { linear((DEVICE, to), (DEVICE, from), bytes, stream, Awaited) }
    "cuMemcpyHtoDAsync" 3020 fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: Address, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyHtoDAsync_v2_ptsz { linear((DEVICE, to), (HOST, from.number()), bytes, stream, Queued) }
    "cuMemcpyDtoHAsync" 3020 fn cuMemcpyDtoHAsync_v2(to: Address, from: CUdeviceptr, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyDtoHAsync_v2_ptsz { linear((HOST, to.number()), (DEVICE, from), bytes, stream, Queued) }
    "cuMemcpyDtoDAsync" 3020 fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) ptsz(stream) cuMemcpyDtoDAsync_v2_ptsz { linear((DEVICE, to), (DEVICE, from), bytes, stream, Queued) }
}
