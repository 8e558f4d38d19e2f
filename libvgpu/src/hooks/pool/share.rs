//! Pool allocations shared between processes by pointer; see [`crate::hooks::shared_memory`].

use core::ffi::c_void;

use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUmemoryPool, CUresult};
use crate::current::{Target, target_of_current_context};
use crate::functions::{cuMemPoolExportPointer, cuMemPoolImportPointer};
use crate::hooks::memory::undo_allocation;
use crate::hooks::shared_memory::{self, range_of};
use crate::pool_free_space;
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
        && let Some(card) = process.card(index)
    {
        shared_memory::add_export(process, card, pointer, chunk);
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
    let card = match target_of_current_context() {
        Target::Unlimited => return call(),
        Target::Denied => return CUDA_ERROR_OUT_OF_MEMORY,
        Target::Limited(card) => card,
    };
    let result = call();
    if result != CUDA_SUCCESS {
        return result;
    }
    // SAFETY: libcuda has written the pointer.
    let address = unsafe { pointer.read() };
    let (start, bytes) = range_of(address).unwrap_or((address, pool_free_space::CHUNK));
    // It belongs to the pool, whichever context is current.
    if shared_memory::open(
        card,
        address,
        pool_free_space::chunk_around(start, bytes),
        0,
    ) {
        return result;
    }
    // SAFETY: just imported, and unknown to the program.
    unsafe { undo_allocation(address) };
    // SAFETY: libcuda has written the pointer.
    unsafe { pointer.write(0) };
    CUDA_ERROR_OUT_OF_MEMORY
}
