//! Allocations of pools that are shared between processes, pointer by pointer.
//!
//! They are paid for as linear memory is that is opened by IPC handle; see [`crate::imports`]. CUDA wants whoever
//! imported memory to free it before its maker does. If the maker dies first, it stays charged to the maker's share.

use core::ffi::c_void;
use core::ptr::NonNull;

use crate::card::{Card, Target, target_of_current_context};
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUmemoryPool, CUresult};
use crate::hooks::ipc;
use crate::process::Process;
use crate::room;
use crate::table::{cuMemFree_v2, cuMemPoolExportPointer, cuMemPoolImportPointer};

pub(crate) unsafe fn export_pointer(
    original: cuMemPoolExportPointer::Function,
    data: *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(data, pointer) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS)
        && let Some((index, chunk)) = process.room.chunk_of(pointer)
        && let Some(card) = Card::at(process, index)
    {
        let is_first = {
            let _guard = process.guard();
            !process.pool_exports.has(pointer) && process.pool_exports.add(pointer, index, chunk)
        };
        if is_first {
            card.export(chunk.bytes);
        }
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
        Target::Refused => return CUDA_ERROR_OUT_OF_MEMORY,
        Target::Limited(card) => card,
    };
    let result = call();
    if result != CUDA_SUCCESS {
        return result;
    }
    let process = card.process();
    // SAFETY: the driver has written the pointer.
    let address = unsafe { pointer.read() };
    let (start, bytes) = ipc::range_of(address).unwrap_or((address, room::CHUNK));
    let chunk = room::chunk_around(start, bytes);
    let is_first = {
        let _guard = process.guard();
        process.pool_imports.add(address, card.index(), chunk)
    };
    if is_first && card.import(chunk.bytes).is_err() {
        {
            let _guard = process.guard();
            process.pool_imports.remove(address);
        }
        // The pointer is unknown to the program.
        free(address);
        // SAFETY: the driver has written the pointer.
        unsafe { pointer.write(0) };
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    result
}

/// Gives an imported pointer back that the program has not seen.
fn free(address: CUdeviceptr) {
    let Some(free) = cuMemFree_v2::ORIGINAL.address() else {
        return;
    };
    // SAFETY: the driver's function of that name has this signature.
    let free = unsafe { core::mem::transmute::<NonNull<c_void>, cuMemFree_v2::Function>(free) };
    // SAFETY: imported just now, and unknown to the program.
    unsafe { free(address) };
}

/// After a pointer was freed: others cannot import it any more, or what was imported is closed.
pub(crate) fn freed(process: &'static Process, pointer: CUdeviceptr) {
    let (exported, imported) = {
        let _guard = process.guard();
        let exported = process.pool_exports.remove(pointer);
        (exported, process.pool_imports.remove(pointer))
    };
    if let Some(chunk) = exported
        && let Some(card) = Card::at(process, chunk.card)
    {
        card.end_export(chunk.bytes);
    }
    if let Some(chunk) = imported
        && let Some(card) = Card::at(process, chunk.card)
    {
        card.end_import(chunk.bytes);
    }
}
