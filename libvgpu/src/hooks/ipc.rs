//! Linear memory that other processes open by IPC handle; see [`crate::hooks::shared_memory`].

use core::ffi::c_uint;

use crate::driver_api::cuda::{CUDA_SUCCESS, CUdeviceptr, CUipcMemHandle, CUresult};
use crate::driver_api::device::current_context;
use crate::driver_api::functions::{cuIpcCloseMemHandle, cuIpcGetMemHandle, cuIpcOpenMemHandle};
use crate::hooks::shared_memory::{self, blocks_around, range_of};
use crate::process::Process;

pub(crate) unsafe fn get_handle(
    original: cuIpcGetMemHandle::Function,
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(handle, pointer) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS)
        && let Some((base, _)) = range_of(pointer)
        && let Some(charge) = process.pointers.get(base)
        && let Some(gpu) = process.gpu(charge.gpu)
    {
        // A small allocation is opened with its block.
        let chunk = blocks_around(base, charge.bytes);
        shared_memory::add_export(process, gpu, base, chunk);
    }
    result
}

pub(crate) unsafe fn open(
    original: cuIpcOpenMemHandle::Function,
    pointer: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pointer, handle, flags) };
    // Opened twice, it is the same memory at the same address.
    let context = || current_context().unwrap_or(0);
    // SAFETY: the call writes the pointer.
    unsafe { shared_memory::open_with(pointer, call, blocks_around, context, undo_open) }
}

/// Closes an import that was denied.
fn undo_open(address: CUdeviceptr) {
    let Some(close) = cuIpcCloseMemHandle::ORIGINAL.get() else {
        return;
    };
    // SAFETY: just opened, and unknown to the program.
    unsafe { close(address) };
}

pub(crate) unsafe fn close(
    original: cuIpcCloseMemHandle::Function,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(pointer) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        shared_memory::close(process, pointer);
    }
    result
}
