//! Pool allocations shared between processes by pointer; see [`crate::hooks::shared_memory`].

use core::ffi::c_void;

use crate::accounts::pool_free_space::chunk_around;
use crate::driver_api::cuda::{CUDA_SUCCESS, CUdeviceptr, CUmemoryPool, CUresult};
use crate::driver_api::functions::{cuMemPoolExportPointer, cuMemPoolImportPointer};
use crate::hooks::memory::undo_allocation;
use crate::hooks::shared_memory;
use crate::process::Process;

pub(crate) unsafe fn export_pointer(
    original: cuMemPoolExportPointer::Function,
    data: *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(data, pointer) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS)
        && let Some((index, chunk)) = process.pool_free_space.chunk_of(pointer)
        && let Some(gpu) = process.gpu(index)
    {
        shared_memory::add_export(process, gpu, pointer, chunk);
    }
    result
}

pub(crate) unsafe fn import_pointer(
    original: cuMemPoolImportPointer::Function,
    pointer: *mut CUdeviceptr,
    pool: CUmemoryPool,
    data: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pointer, pool, data) };
    // It belongs to the pool, whichever context is current.
    let context = || 0;
    // SAFETY: just imported, and unknown to the program.
    let undo = |address| unsafe { undo_allocation(address) };
    // SAFETY: the call writes the pointer.
    unsafe { shared_memory::open_with(pointer, call, chunk_around, context, undo) }
}
