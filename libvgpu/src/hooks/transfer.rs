//! Fills and copies within a GPU, which use GPU time as kernels do.
//!
//! Copies between host and GPU use copy engines and are not metered; for functions that do both, the addresses
//! decide.

use core::ffi::{c_int, c_uint, c_void};

use drava_vgpu_abi::cost::LaunchKind;

use crate::driver_api::cuda::{
    CU_MEMORYTYPE_HOST, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUDA_MEMCPY2D, CUDA_MEMCPY3D,
    CUDA_SUCCESS, CUarray, CUcontext, CUdeviceptr, CUresult, CUstream,
};
use crate::driver_api::driver::{Library, Original};
use crate::hooks::metering::{NullStream, metered};

static POINTER_ATTRIBUTE: Original<PointerAttribute> =
    Original::new(Library::Cuda, c"cuPointerGetAttribute");

type PointerAttribute = unsafe extern "C" fn(*mut c_void, c_int, CUdeviceptr) -> CUresult;

/// Returns whether the address is GPU memory; `true` if libcuda does not know.
fn is_on_gpu(address: CUdeviceptr) -> bool {
    let Some(ask) = POINTER_ATTRIBUTE.get() else {
        return true;
    };
    let mut r#type: c_uint = CU_MEMORYTYPE_HOST;
    let place = (&raw mut r#type).cast();
    // SAFETY: this attribute is a number of 32 bits; libcuda rejects unknown addresses.
    let result = unsafe { ask(place, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) };
    result == CUDA_SUCCESS && r#type != CU_MEMORYTYPE_HOST
}

fn fill_kind(element: usize, count: usize) -> LaunchKind {
    LaunchKind::fill((element as u64).saturating_mul(count as u64))
}

type Fill<T> = unsafe extern "C" fn(CUdeviceptr, T, usize) -> c_int;
type FillAsync<T> = unsafe extern "C" fn(CUdeviceptr, T, usize, CUstream) -> c_int;
type FillRows<T> = unsafe extern "C" fn(CUdeviceptr, usize, T, usize, usize) -> c_int;
type FillRowsAsync<T> =
    unsafe extern "C" fn(CUdeviceptr, usize, T, usize, usize, CUstream) -> c_int;

fn fill_on<T>(count: usize, stream: CUstream, call: impl Fn() -> CUresult) -> CUresult {
    metered!(fill_kind(size_of::<T>(), count), stream, call())
}

pub(crate) unsafe fn fill<S: NullStream, T: Copy>(
    original: Fill<T>,
    to: CUdeviceptr,
    value: T,
    count: usize,
) -> CUresult {
    // SAFETY: the caller's arguments.
    fill_on::<T>(count, S::STREAM, || unsafe { original(to, value, count) })
}

pub(crate) unsafe fn fill_async<S: NullStream, T: Copy>(
    original: FillAsync<T>,
    to: CUdeviceptr,
    value: T,
    count: usize,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    fill_on::<T>(count, S::resolve(stream), || unsafe {
        original(to, value, count, stream)
    })
}

pub(crate) unsafe fn fill_rows<S: NullStream, T: Copy>(
    original: FillRows<T>,
    to: CUdeviceptr,
    pitch: usize,
    value: T,
    width: usize,
    height: usize,
) -> CUresult {
    // SAFETY: the caller's arguments.
    fill_on::<T>(width.saturating_mul(height), S::STREAM, || unsafe {
        original(to, pitch, value, width, height)
    })
}

pub(crate) unsafe fn fill_rows_async<S: NullStream, T: Copy>(
    original: FillRowsAsync<T>,
    to: CUdeviceptr,
    pitch: usize,
    value: T,
    width: usize,
    height: usize,
    stream: CUstream,
) -> CUresult {
    let count = width.saturating_mul(height);
    // SAFETY: the caller's arguments.
    fill_on::<T>(count, S::resolve(stream), || unsafe {
        original(to, pitch, value, width, height, stream)
    })
}

fn copy_on(
    bytes: usize,
    is_within_gpu: bool,
    stream: CUstream,
    call: impl Fn() -> CUresult,
) -> CUresult {
    if is_within_gpu {
        metered!(LaunchKind::copy(bytes as u64), stream, call())
    } else {
        call()
    }
}

/// Copies: the copied bytes, whether they stay within a GPU, and the stream, from an argument or the default.
macro_rules! copies {
    ($(
        $(#[$attribute:meta])*
        $name:ident($($argument:ident: $type:ty),* $(; $stream:ident)?) of $bytes:expr, within $within:expr;
    )*) => {
        $(
            $(#[$attribute])*
            pub(crate) unsafe fn $name<S: NullStream>(
                original: unsafe extern "C" fn($($type,)* $(copies!(@type $stream))?) -> c_int,
                $($argument: $type,)*
                $($stream: CUstream,)?
            ) -> CUresult {
                let into = copies!(@into $($stream)?);
                // SAFETY: the caller's arguments.
                copy_on($bytes, $within, into, || unsafe { original($($argument,)* $($stream)?) })
            }
        )*
    };
    (@type $stream:ident) => { CUstream };
    (@into $stream:ident) => { S::resolve($stream) };
    (@into) => { S::STREAM };
}

copies! {
    unified(to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        of bytes, within is_on_gpu(to) && is_on_gpu(from);
    device(to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        of bytes, within true;
    peer(to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, bytes: usize)
        of bytes, within true;
    to_array(to: CUarray, offset: usize, from: CUdeviceptr, bytes: usize)
        of bytes, within true;
    from_array(to: CUdeviceptr, from: CUarray, offset: usize, bytes: usize)
        of bytes, within true;
    arrays(to: CUarray, to_offset: usize, from: CUarray, from_offset: usize, bytes: usize)
        of bytes, within true;
    rows(copy: *const CUDA_MEMCPY2D) of rows_bytes(copy), within is_rows_within(copy);
    volume(copy: *const CUDA_MEMCPY3D) of volume_bytes(copy), within is_volume_within(copy);
    unified_async(to: CUdeviceptr, from: CUdeviceptr, bytes: usize; stream)
        of bytes, within is_on_gpu(to) && is_on_gpu(from);
    device_async(to: CUdeviceptr, from: CUdeviceptr, bytes: usize; stream)
        of bytes, within true;
    peer_async(to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, bytes: usize; stream)
        of bytes, within true;
    rows_async(copy: *const CUDA_MEMCPY2D; stream) of rows_bytes(copy), within is_rows_within(copy);
    volume_async(copy: *const CUDA_MEMCPY3D; stream) of volume_bytes(copy), within is_volume_within(copy);
    with_attributes(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, attributes: *mut c_void; stream)
        of bytes, within is_on_gpu(to) && is_on_gpu(from);
    /// The descriptions of these calls differ between toolkits and are not read: the charge is the average of such
    /// calls, whatever their size.
    volume_with_attributes(copy: *mut c_void, flags: u64; stream)
        of 0, within !copy.is_null();
    #[expect(clippy::too_many_arguments, reason = "the original's arguments")]
    batch(to: *mut CUdeviceptr, from: *mut CUdeviceptr, sizes: *mut usize, count: usize, attributes: *mut c_void, indices: *mut usize, attribute_count: usize, failed: *mut usize; stream)
        of batch_bytes(sizes, count), within is_batch_within(to, from, count);
    #[expect(clippy::too_many_arguments, reason = "the original's arguments")]
    batch_v2(to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: *const usize, count: usize, attributes: *mut c_void, indices: *mut usize, attribute_count: usize; stream)
        of batch_bytes(sizes, count), within is_batch_within(to, from, count);
    /// As [`volume_with_attributes`].
    volumes(count: usize, copies: *mut c_void, failed: *mut usize, flags: u64; stream)
        of count, within !copies.is_null();
    /// As [`volume_with_attributes`].
    volumes_v2(count: usize, copies: *mut c_void, flags: u64; stream)
        of count, within !copies.is_null();
}

/// Returns whether the end is GPU memory. libcuda is asked for a unified address.
fn is_end_on_gpu(r#type: c_uint, address: CUdeviceptr) -> bool {
    const UNIFIED: c_uint = 4;
    match r#type {
        CU_MEMORYTYPE_HOST => false,
        UNIFIED => is_on_gpu(address),
        _ => true,
    }
}

fn rows_bytes(copy: *const CUDA_MEMCPY2D) -> usize {
    // SAFETY: the caller passes null, which libcuda rejects, or a description.
    unsafe { copy.as_ref() }.map_or(0, |copy| copy.WidthInBytes.saturating_mul(copy.Height))
}

fn is_rows_within(copy: *const CUDA_MEMCPY2D) -> bool {
    // SAFETY: as above.
    unsafe { copy.as_ref() }.is_some_and(|copy| {
        is_end_on_gpu(copy.srcMemoryType, copy.srcDevice)
            && is_end_on_gpu(copy.dstMemoryType, copy.dstDevice)
    })
}

fn volume_bytes(copy: *const CUDA_MEMCPY3D) -> usize {
    // SAFETY: as above.
    unsafe { copy.as_ref() }.map_or(0, |copy| {
        copy.WidthInBytes
            .saturating_mul(copy.Height)
            .saturating_mul(copy.Depth)
    })
}

fn is_volume_within(copy: *const CUDA_MEMCPY3D) -> bool {
    // SAFETY: as above.
    unsafe { copy.as_ref() }.is_some_and(|copy| {
        is_end_on_gpu(copy.srcMemoryType, copy.srcDevice)
            && is_end_on_gpu(copy.dstMemoryType, copy.dstDevice)
    })
}

/// Returns the bytes of a batch.
fn batch_bytes(sizes: *const usize, count: usize) -> usize {
    if sizes.is_null() {
        return 0;
    }
    // SAFETY: the caller passes `count` sizes.
    let sizes = unsafe { core::slice::from_raw_parts(sizes, count) };
    sizes
        .iter()
        .fold(0usize, |sum, size| sum.saturating_add(*size))
}

/// Returns whether the first copy of a batch is within a GPU; batches are rarely mixed.
fn is_batch_within(to: *const CUdeviceptr, from: *const CUdeviceptr, count: usize) -> bool {
    if to.is_null() || from.is_null() || count == 0 {
        return false;
    }
    // SAFETY: the caller passes at least one of each.
    let to = unsafe { to.read() };
    // SAFETY: as above.
    let from = unsafe { from.read() };
    is_on_gpu(to) && is_on_gpu(from)
}
