//! Memory that processes export to and open from each other, with any function.
//!
//! An opened allocation is charged unless it belongs to the same share; see [`crate::limits::imports`]. CUDA requires that
//! it is closed before its process frees it. If that process dies first, the memory stays charged to its share.

use crate::accounts::blocks::BLOCK;
use crate::accounts::shared_chunks::{Chunk, Shared, SharedChunk};
use crate::current::{Target, target_of_current_context};
use crate::driver_api::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUresult};
use crate::driver_api::driver::{Library, Original};
use crate::hooks::driver_cache::reserve_with;
use crate::hooks::freed_bytes::FreedBytes;
use crate::limits::gpu::Gpu;
use crate::process::Process;

static GET_RANGE: Original<GetRange> = Original::new(Library::Cuda, c"cuMemGetAddressRange_v2");
type GetRange = unsafe extern "C" fn(*mut CUdeviceptr, *mut usize, CUdeviceptr) -> CUresult;

/// Returns start and size of the allocation that contains a pointer.
pub(crate) fn range_of(pointer: CUdeviceptr) -> Option<(CUdeviceptr, u64)> {
    let get = GET_RANGE.get()?;
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: writes a pointer and a size.
    let result = unsafe { get(&raw mut base, &raw mut bytes, pointer) };
    (result == CUDA_SUCCESS).then_some((base, bytes as u64))
}

/// Returns the blocks around a range.
pub(crate) fn blocks_around(start: CUdeviceptr, bytes: u64) -> Chunk {
    let address = start & !(BLOCK.saturating_sub(1));
    let bytes = start.saturating_sub(address).saturating_add(bytes);
    Chunk {
        address,
        bytes: bytes.checked_next_multiple_of(BLOCK).unwrap_or(bytes),
    }
}

/// Records that other processes can open an allocation.
pub(crate) fn add_export(process: &'static Process, gpu: Gpu, pointer: CUdeviceptr, chunk: Chunk) {
    let shared = Shared {
        pointer,
        gpu: gpu.index(),
        chunk,
        context: 0,
    };
    process.exported.add_once(shared, |bytes| gpu.export(bytes));
}

/// Frees an allocation with `call`, and ends its export before: afterwards another thread may export other memory at
/// the same pointer. `chunk` is its GPU's index and its memory, to restore the export if the call fails.
pub(crate) fn free_exported(
    process: &'static Process,
    pointer: CUdeviceptr,
    chunk: impl FnOnce() -> Option<(u8, Chunk)>,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    if !process.exported.contains(pointer) {
        return call();
    }
    let chunk = chunk();
    end_export(process, pointer);
    let result = call();
    if result != CUDA_SUCCESS
        && let Some((gpu, chunk)) = chunk
        && let Some(gpu) = process.gpu(gpu)
    {
        add_export(process, gpu, pointer, chunk);
    }
    result
}

/// Ends the export of an allocation.
pub(crate) fn end_export(process: &'static Process, pointer: CUdeviceptr) {
    process.exported.remove(pointer, |chunk| {
        if let Some(gpu) = process.gpu(chunk.gpu) {
            gpu.end_export(chunk.bytes);
        }
    });
}

/// Charges memory opened at `pointer`, in `chunk`, until it is closed or `context` ends, unless that is 0. Returns
/// `false` if the limit is exceeded.
fn open(gpu: Gpu, pointer: CUdeviceptr, chunk: Chunk, context: u64) -> bool {
    let opened = &Process::of(gpu).opened;
    let pay = |bytes| gpu.import(bytes).is_ok();
    let shared = Shared {
        pointer,
        gpu: gpu.index(),
        chunk,
        context,
    };
    reserve_with(gpu, chunk.bytes, || opened.add(shared, pay))
}

/// Opens memory of another process with `call`, which writes its address to `pointer`, and charges the chunk around it
/// as [`open`] does. If that exceeds the limit, `undo` closes it.
///
/// # Safety
/// `call` calls libcuda, which writes to `pointer` on success.
pub(crate) unsafe fn open_with(
    pointer: *mut CUdeviceptr,
    call: impl FnOnce() -> CUresult,
    chunk_around: fn(CUdeviceptr, u64) -> Chunk,
    context: impl FnOnce() -> u64,
    undo: impl FnOnce(CUdeviceptr),
) -> CUresult {
    let gpu = match target_of_current_context() {
        Target::Unlimited => return call(),
        Target::Denied => return CUDA_ERROR_OUT_OF_MEMORY,
        Target::Limited(gpu) => gpu,
    };
    let result = call();
    if result != CUDA_SUCCESS {
        return result;
    }
    // SAFETY: libcuda has written the pointer.
    let address = unsafe { pointer.read() };
    let (start, bytes) = range_of(address).unwrap_or((address, 1));
    if open(gpu, address, chunk_around(start, bytes), context()) {
        return result;
    }
    undo(address);
    // SAFETY: libcuda has written the pointer.
    unsafe { pointer.write(0) };
    CUDA_ERROR_OUT_OF_MEMORY
}

/// Closes memory of another process.
pub(crate) fn close(process: &'static Process, pointer: CUdeviceptr) {
    process
        .opened
        .remove(pointer, |chunk| end_import(process, chunk));
}

/// Closes the memory that was opened in a context that ends.
pub(crate) fn end_context(process: &'static Process, context: u64, freed: &mut FreedBytes) {
    process.opened.end_context(context, |chunk| {
        if let Some(gpu) = process.gpu(chunk.gpu) {
            freed.add(chunk.gpu, gpu.close_import(chunk.bytes));
        }
    });
}

fn end_import(process: &'static Process, chunk: SharedChunk) {
    if let Some(gpu) = process.gpu(chunk.gpu) {
        gpu.end_import(chunk.bytes);
    }
}
