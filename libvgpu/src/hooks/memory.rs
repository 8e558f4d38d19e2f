//! Linear memory of the current context: plain, pitched, managed. Also the common part of all allocating hooks.
//!
//! Reserve, call libcuda, keep or release the charge. A request beyond the limit is denied without calling libcuda.

use core::ffi::{c_int, c_uint};

use crate::accounts::blocks::{self, BLOCK};
use crate::accounts::charge_map::{Charge, ChargeMap, Record};
use crate::current::{Target, target_of_current_context};
use crate::driver_api::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdevice, CUdeviceptr, CUdeviceptr_v1, CUresult,
};
use crate::driver_api::device::{current_context, current_device};
use crate::driver_api::driver::{Library, Original};
use crate::driver_api::functions::{
    cuMemAlloc, cuMemAlloc_v2, cuMemAllocManaged, cuMemAllocPitch, cuMemAllocPitch_v2, cuMemFree_v2,
};
use crate::hooks::driver_cache::{deny, reserve, reserve_ahead};
use crate::limits::gpu::Gpu;
use crate::process::Process;
use crate::system::guard::GateGuard;

static ADVISE: Original<Advise> = Original::new(Library::Cuda, c"cuMemAdvise");
type Advise = unsafe extern "C" fn(CUdeviceptr, usize, c_int, CUdevice) -> CUresult;

const CU_MEM_ATTACH_GLOBAL: c_uint = 1;
const CU_MEM_ADVISE_SET_PREFERRED_LOCATION: c_int = 3;
const CU_MEM_ADVISE_SET_ACCESSED_BY: c_int = 5;
const CU_DEVICE_CPU: CUdevice = -1;

/// Assumed padding of the rows of a pitched request.
const ROW_STEP: u64 = 512;

/// An allocation to make.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    target: Target,
    bytes: u64,
}

impl Request {
    /// Returns a request for memory of the current context.
    pub(crate) fn in_current_context(bytes: u64) -> Self {
        Self {
            target: target_of_current_context(),
            bytes,
        }
    }

    /// Makes the allocation with `call` if it fits, and records its charge in `map` at `key`.
    pub(crate) fn allocate(
        self,
        map: impl FnOnce(&'static Process) -> &'static ChargeMap<Charge>,
        call: impl FnOnce() -> CUresult,
        key: impl FnOnce() -> u64,
    ) -> CUresult {
        let (gpu, process) = match self.limited() {
            Ok(Some(limited)) => limited,
            Ok(None) => return call(),
            Err(result) => return result,
        };
        if !reserve(gpu, self.bytes) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        let result = call();
        if result == CUDA_SUCCESS {
            map(process).insert(key(), self.charge(gpu));
        } else {
            gpu.release(self.bytes);
        }
        result
    }

    /// As [`Request::allocate`], for linear memory, which shares a block if it is small.
    fn allocate_linear(self, linear: &Linear<'_>) -> CUresult {
        let (gpu, _) = match self.limited() {
            Ok(Some(limited)) => limited,
            Ok(None) => return (linear.call)(),
            Err(result) => return result,
        };
        if blocks::is_small(self.bytes) {
            let Some(attempt) = reserve_ahead(gpu, BLOCK) else {
                return deny(gpu);
            };
            self.allocate_reserved(linear, gpu, BLOCK, Some(attempt))
        } else if reserve(gpu, self.bytes) {
            self.allocate_reserved(linear, gpu, self.bytes, None)
        } else {
            CUDA_ERROR_OUT_OF_MEMORY
        }
    }

    /// Makes an allocation with `reserved` bytes charged; with `attempt` it may need less. It may also turn out
    /// larger than estimated: then it is undone if the rest does not fit.
    fn allocate_reserved(
        self,
        linear: &Linear<'_>,
        gpu: Gpu,
        reserved: u64,
        attempt: Option<GateGuard<'_>>,
    ) -> CUresult {
        let process = Process::of(gpu);
        let result = (linear.call)();
        if result != CUDA_SUCCESS {
            gpu.release(reserved);
            return result;
        }
        let address = (linear.pointer)();
        let charge = Charge {
            bytes: (linear.actual)(),
            ..self.charge(gpu)
        };
        let needed = if !blocks::is_small(charge.bytes) {
            charge.bytes
        } else if process.blocks.add(address) {
            BLOCK
        } else {
            0
        };
        gpu.release(reserved.saturating_sub(needed));
        // The need is known now.
        drop(attempt);
        if needed > reserved && !reserve(gpu, needed.saturating_sub(reserved)) {
            gpu.release(reserved);
            if blocks::is_small(charge.bytes) {
                process.blocks.remove(address);
            }
            linear.undo(address);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        process.pointers.insert(address, charge);
        CUDA_SUCCESS
    }

    /// Returns the limited GPU, `None` if there is no limit, or the error to return.
    pub(crate) fn limited(self) -> Result<Option<(Gpu, &'static Process)>, CUresult> {
        match self.target {
            Target::Unlimited => Ok(None),
            Target::Denied => Err(CUDA_ERROR_OUT_OF_MEMORY),
            Target::Limited(gpu) => Ok(Some((gpu, Process::of(gpu)))),
        }
    }

    /// Returns whether a denied request is allocated on the host.
    fn spills(self) -> bool {
        matches!(self.target, Target::Limited(gpu) if gpu.spills())
    }

    pub(crate) fn charge(self, gpu: Gpu) -> Charge {
        Charge {
            bytes: self.bytes,
            gpu: gpu.index(),
            // Called only after the allocation.
            context: current_context().unwrap_or(0),
        }
    }
}

/// Steps of an allocation of linear memory.
struct Linear<'a> {
    /// Calls libcuda.
    call: &'a dyn Fn() -> CUresult,
    /// Returns the written pointer.
    pointer: &'a dyn Fn() -> u64,
    /// Returns the real size.
    actual: &'a dyn Fn() -> u64,
    /// Erases the pointer from the program's memory.
    erase: &'a dyn Fn(),
}

impl Linear<'_> {
    /// Frees an allocation that is denied.
    fn undo(&self, address: u64) {
        // SAFETY: just allocated, and unknown to the program.
        unsafe { undo_allocation(address) };
        (self.erase)();
    }
}

/// Drops the block of linear memory that is freed, and returns the bytes to release.
pub(crate) fn drop_linear(process: &'static Process, pointer: u64, charge: Charge) -> u64 {
    if !blocks::is_small(charge.bytes) {
        charge.bytes
    } else if process.blocks.remove(pointer) {
        BLOCK
    } else {
        0
    }
}

/// Releases the charge of freed linear memory.
fn release_linear(process: &'static Process, pointer: u64, charge: Charge) {
    if let Some(gpu) = process.gpu(charge.gpu) {
        gpu.release(drop_linear(process, pointer, charge));
    }
}

/// Frees linear memory with `call` and releases its charge, if any.
///
/// The charge is removed before libcuda is called: afterwards another thread may have got the same pointer.
pub(crate) fn free_linear(pointer: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    free_charged(|process| &process.pointers, pointer, call, release_linear)
}

/// Frees the object at `key` with `call` and passes its charge, if any, to `release`.
pub(crate) fn free_charged<R: Record + 'static>(
    map: impl FnOnce(&'static Process) -> &'static ChargeMap<R>,
    key: u64,
    call: impl FnOnce() -> CUresult,
    release: impl FnOnce(&'static Process, u64, R),
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let map = map(process);
    let charge = map.remove(key);
    let result = call();
    let Some(charge) = charge else { return result };
    if result != CUDA_SUCCESS {
        map.insert(key, charge);
    } else {
        release(process, key, charge);
    }
    result
}

/// Frees an allocation that the program has not seen.
///
/// # Safety
/// libcuda has just returned `address`.
pub(crate) unsafe fn undo_allocation(address: u64) {
    let Some(free) = cuMemFree_v2::ORIGINAL.get() else {
        return;
    };
    // SAFETY: just allocated, and unknown to the program.
    unsafe { free(address) };
}

/// Allocates host memory, which the GPU accesses through its page tables, in place of memory beyond the limit.
///
/// # Safety
/// As for `cuMemAlloc_v2`.
unsafe fn spill(device: CUdevice, pointer: *mut CUdeviceptr, bytes: usize) -> CUresult {
    let Some(allocate) = cuMemAllocManaged::ORIGINAL.get() else {
        return CUDA_ERROR_OUT_OF_MEMORY;
    };
    // SAFETY: the caller's arguments.
    let result = unsafe { allocate(pointer, bytes, CU_MEM_ATTACH_GLOBAL) };
    if result == CUDA_SUCCESS
        && let Some(advise) = ADVISE.get()
    {
        // SAFETY: libcuda has written the pointer.
        let address = unsafe { pointer.read() };
        for (advice, device) in [
            (CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU),
            (CU_MEM_ADVISE_SET_ACCESSED_BY, device),
        ] {
            // SAFETY: the range was allocated just now. Advice that a GPU does not support has no effect.
            unsafe { advise(address, bytes, advice, device) };
        }
    }
    result
}

pub(crate) unsafe fn alloc(
    original: cuMemAlloc_v2::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
) -> CUresult {
    let bytes_taken = blocks::rounded(bytes as u64);
    let request = Request::in_current_context(bytes_taken);
    let result = request.allocate_linear(&Linear {
        // SAFETY: the caller's arguments.
        call: &|| unsafe { original(pointer, bytes) },
        // SAFETY: libcuda has written the pointer.
        pointer: &|| unsafe { pointer.read() },
        actual: &|| bytes_taken,
        // SAFETY: libcuda has written the pointer.
        erase: &|| unsafe { pointer.write(0) },
    });
    if result == CUDA_ERROR_OUT_OF_MEMORY
        && request.spills()
        && let Some(device) = current_device()
    {
        // SAFETY: the caller's arguments.
        return unsafe { spill(device, pointer, bytes) };
    }
    result
}

pub(crate) unsafe fn alloc_v1(
    original: cuMemAlloc::Function,
    pointer: *mut CUdeviceptr_v1,
    bytes: c_uint,
) -> CUresult {
    let bytes_taken = blocks::rounded(u64::from(bytes));
    Request::in_current_context(bytes_taken).allocate_linear(&Linear {
        // SAFETY: the caller's arguments.
        call: &|| unsafe { original(pointer, bytes) },
        // SAFETY: libcuda has written the pointer.
        pointer: &|| u64::from(unsafe { pointer.read() }),
        actual: &|| bytes_taken,
        // SAFETY: libcuda has written the pointer.
        erase: &|| unsafe { pointer.write(0) },
    })
}

pub(crate) unsafe fn alloc_managed(
    original: cuMemAllocManaged::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    let bytes_taken = blocks::rounded(bytes as u64);
    Request::in_current_context(bytes_taken).allocate_linear(&Linear {
        // SAFETY: the caller's arguments.
        call: &|| unsafe { original(pointer, bytes, flags) },
        // SAFETY: libcuda has written the pointer.
        pointer: &|| unsafe { pointer.read() },
        actual: &|| bytes_taken,
        // SAFETY: libcuda has written the pointer.
        erase: &|| unsafe { pointer.write(0) },
    })
}

/// Returns the size of rows with that pitch.
fn rows(pitch: u64, height: u64) -> u64 {
    pitch.checked_mul(height).map_or(u64::MAX, blocks::rounded)
}

/// Returns the estimated size of a pitched request.
fn pitched(width: u64, height: u64) -> u64 {
    width
        .checked_next_multiple_of(ROW_STEP)
        .map_or(u64::MAX, |pitch| rows(pitch, height))
}

pub(crate) unsafe fn alloc_pitch(
    original: cuMemAllocPitch_v2::Function,
    pointer: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CUresult {
    Request::in_current_context(pitched(width as u64, height as u64)).allocate_linear(&Linear {
        // SAFETY: the caller's arguments.
        call: &|| unsafe { original(pointer, pitch, width, height, element) },
        // SAFETY: libcuda has written the pointer.
        pointer: &|| unsafe { pointer.read() },
        // SAFETY: libcuda has written the pitch.
        actual: &|| rows(unsafe { pitch.read() } as u64, height as u64),
        // SAFETY: libcuda has written the pointer.
        erase: &|| unsafe { pointer.write(0) },
    })
}

pub(crate) unsafe fn alloc_pitch_v1(
    original: cuMemAllocPitch::Function,
    pointer: *mut CUdeviceptr_v1,
    pitch: *mut c_uint,
    width: c_uint,
    height: c_uint,
    element: c_uint,
) -> CUresult {
    Request::in_current_context(pitched(u64::from(width), u64::from(height))).allocate_linear(
        &Linear {
            // SAFETY: the caller's arguments.
            call: &|| unsafe { original(pointer, pitch, width, height, element) },
            // SAFETY: libcuda has written the pointer.
            pointer: &|| u64::from(unsafe { pointer.read() }),
            // SAFETY: libcuda has written the pitch.
            actual: &|| rows(u64::from(unsafe { pitch.read() }), u64::from(height)),
            // SAFETY: libcuda has written the pointer.
            erase: &|| unsafe { pointer.write(0) },
        },
    )
}
