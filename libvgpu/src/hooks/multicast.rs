//! Multicast objects. Bound physical memory lives until it is unbound or the object is destroyed, so a binding
//! counts as a mapping. The objects themselves use no memory of the share.
//!
//! An object is recorded by its handle, as physical memory of zero bytes; see [`crate::hooks::physical`].

use core::ffi::c_void;

use crate::accounts::records::Binding;
use crate::driver_api::cuda::{
    CUDA_SUCCESS, CUdevice, CUdeviceptr, CUmemGenericAllocationHandle, CUresult,
};
use crate::driver_api::functions::{
    cuMemRelease, cuMemRetainAllocationHandle, cuMulticastBindAddr, cuMulticastBindAddr_v2,
    cuMulticastBindMem, cuMulticastBindMem_v2, cuMulticastCreate, cuMulticastUnbind,
};
use crate::hooks::ending_references::{EndingReferences, end_references};
use crate::hooks::physical;
use crate::process::Process;

/// Returns the key of a binding.
fn binding_key(object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize) -> u64 {
    let device = u64::from(device.unsigned_abs());
    let within = (offset as u64).rotate_left(8) ^ device;
    object.rotate_left(32) ^ within.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Binds physical memory with `call`. It is counted before: afterwards another thread could have released it.
fn bind_counted(
    object: CUmemGenericAllocationHandle,
    device: Option<CUdevice>,
    offset: usize,
    memory: CUmemGenericAllocationHandle,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let device = device.or_else(|| physical::device_of(memory));
    let Some(device) = device.filter(|_| physical::add_mapping(process, memory)) else {
        return call();
    };
    let result = call();
    if result == CUDA_SUCCESS {
        let key = binding_key(object, device, offset);
        process.bindings.insert(key, Binding { memory, object });
    } else {
        physical::drop_mapping(process, memory);
    }
    result
}

pub(crate) unsafe fn create(
    original: cuMulticastCreate::Function,
    object: *mut CUmemGenericAllocationHandle,
    properties: *const c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(object, properties) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        // SAFETY: libcuda has written the handle.
        physical::add_object(process, unsafe { object.read() });
    }
    result
}

pub(crate) unsafe fn bind(
    original: cuMulticastBindMem::Function,
    object: CUmemGenericAllocationHandle,
    offset: usize,
    memory: CUmemGenericAllocationHandle,
    memory_offset: usize,
    bytes: usize,
    flags: u64,
) -> CUresult {
    bind_counted(object, None, offset, memory, || {
        // SAFETY: the caller's arguments.
        unsafe { original(object, offset, memory, memory_offset, bytes, flags) }
    })
}

#[expect(clippy::too_many_arguments, reason = "the original's arguments")]
pub(crate) unsafe fn bind_v2(
    original: cuMulticastBindMem_v2::Function,
    object: CUmemGenericAllocationHandle,
    device: CUdevice,
    offset: usize,
    memory: CUmemGenericAllocationHandle,
    memory_offset: usize,
    bytes: usize,
    flags: u64,
) -> CUresult {
    bind_counted(object, Some(device), offset, memory, || {
        // SAFETY: the caller's arguments.
        unsafe { original(object, device, offset, memory, memory_offset, bytes, flags) }
    })
}

/// As [`bind_counted`], of the memory that is mapped at an address.
fn bind_mapped(
    object: CUmemGenericAllocationHandle,
    device: Option<CUdevice>,
    offset: usize,
    address: CUdeviceptr,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let retain = cuMemRetainAllocationHandle::ORIGINAL.get();
    let release = cuMemRelease::ORIGINAL.get();
    let (Some(retain), Some(release)) = (retain, release) else {
        return call();
    };
    let address = usize::try_from(address).unwrap_or(0);
    let pointer = core::ptr::with_exposed_provenance_mut(address);
    let mut memory = 0;
    // SAFETY: writes one handle; libcuda rejects unknown addresses.
    if unsafe { retain(&raw mut memory, pointer) } != CUDA_SUCCESS {
        return call();
    }
    let result = bind_counted(object, device, offset, memory, call);
    // SAFETY: the handle was just retained.
    unsafe { release(memory) };
    result
}

pub(crate) unsafe fn bind_address(
    original: cuMulticastBindAddr::Function,
    object: CUmemGenericAllocationHandle,
    offset: usize,
    address: CUdeviceptr,
    bytes: usize,
    flags: u64,
) -> CUresult {
    bind_mapped(object, None, offset, address, || {
        // SAFETY: the caller's arguments.
        unsafe { original(object, offset, address, bytes, flags) }
    })
}

pub(crate) unsafe fn bind_address_v2(
    original: cuMulticastBindAddr_v2::Function,
    object: CUmemGenericAllocationHandle,
    device: CUdevice,
    offset: usize,
    address: CUdeviceptr,
    bytes: usize,
    flags: u64,
) -> CUresult {
    bind_mapped(object, Some(device), offset, address, || {
        // SAFETY: the caller's arguments.
        unsafe { original(object, device, offset, address, bytes, flags) }
    })
}

pub(crate) unsafe fn unbind(
    original: cuMulticastUnbind::Function,
    object: CUmemGenericAllocationHandle,
    device: CUdevice,
    offset: usize,
    bytes: usize,
) -> CUresult {
    let key = binding_key(object, device, offset);
    end_references(
        |process| EndingReferences::of_binding(process, key),
        // SAFETY: the caller's arguments.
        || unsafe { original(object, device, offset, bytes) },
    )
}
