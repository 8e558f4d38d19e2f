//! Allocates through every pointer to an allocating function: the account moves with each allocation, and back.

use std::ffi::c_void;
use std::ptr;

use anyhow::{Context as _, Result};
use cudarc::driver::{result, sys};
use serde::Serialize;

use crate::gpu::{Gpu, error_name};
use crate::lookup::Driver;
use crate::memory::{descriptor, on_device_0};

/// Size of an allocation, a multiple of every granularity.
const BYTES: usize = 64 << 20;
/// Rows of [`BYTES`] that need no padding.
const ROW: usize = 1 << 20;

/// Calls an allocating function by its address; writes what it allocates.
type Allocate = fn(*mut c_void, *mut u64) -> sys::CUresult;

struct Function {
    /// Its name for `cuGetProcAddress`.
    name: &'static str,
    /// Its symbol, without the suffixes of streams.
    symbol: &'static str,
    /// First version with sizes of 64 bits. Programs with the sizes before it had 32 bits.
    since: i32,
    allocate: Allocate,
    release: fn(u64) -> sys::CUresult,
}

const FUNCTIONS: [Function; 9] = [
    Function {
        name: "cuMemAlloc",
        symbol: "cuMemAlloc_v2",
        since: 3020,
        allocate: plain,
        release: free,
    },
    Function {
        name: "cuMemAllocPitch",
        symbol: "cuMemAllocPitch_v2",
        since: 3020,
        allocate: pitched,
        release: free,
    },
    Function {
        name: "cuMemAllocManaged",
        symbol: "cuMemAllocManaged",
        since: 6000,
        allocate: managed,
        release: free,
    },
    Function {
        name: "cuMemCreate",
        symbol: "cuMemCreate",
        since: 10_020,
        allocate: physical,
        // SAFETY: a handle that `physical` created, released once.
        release: |handle| unsafe { sys::cuMemRelease(handle) },
    },
    Function {
        name: "cuArrayCreate",
        symbol: "cuArrayCreate_v2",
        since: 3020,
        allocate: array,
        // SAFETY: an array that `array` created, destroyed once.
        release: |array| unsafe { sys::cuArrayDestroy(handle(array)) },
    },
    Function {
        name: "cuArray3DCreate",
        symbol: "cuArray3DCreate_v2",
        since: 3020,
        allocate: array_3d,
        // SAFETY: an array that `array_3d` created, destroyed once.
        release: |array| unsafe { sys::cuArrayDestroy(handle(array)) },
    },
    Function {
        name: "cuMipmappedArrayCreate",
        symbol: "cuMipmappedArrayCreate",
        since: 5000,
        allocate: mipmapped,
        // SAFETY: an array that `mipmapped` created, destroyed once.
        release: |array| unsafe { sys::cuMipmappedArrayDestroy(handle(array)) },
    },
    Function {
        name: "cuMemAllocAsync",
        symbol: "cuMemAllocAsync",
        since: 11_020,
        allocate: queued,
        release: free_queued,
    },
    Function {
        name: "cuMemAllocFromPoolAsync",
        symbol: "cuMemAllocFromPoolAsync",
        since: 11_020,
        allocate: queued_from_pool,
        release: free_queued,
    },
];

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Called {
    name: &'static str,
    /// Ways to look the function up, each of which was called once.
    lookups: usize,
    /// Lookups whose allocation failed or did not move the account, with the reason.
    failures: Vec<String>,
}

pub(crate) fn run() -> Result<()> {
    let _gpu = Gpu::open()?;
    let driver = Driver::open()?;
    let called = FUNCTIONS.iter().map(|function| function.call_all(&driver));
    crate::print(&called.collect::<Result<Vec<_>>>()?)
}

impl Function {
    fn call_all(&self, driver: &Driver) -> Result<Called> {
        let mut lookups = Vec::new();
        for suffix in ["", "_ptsz", "_ptds"] {
            let symbol = format!("{}{suffix}", self.symbol);
            let address = driver.library.symbol(&symbol)?;
            lookups.extend(address.map(|address| (format!("dlsym/{symbol}"), address)));
        }
        for procedure in driver.procedures(self.name)? {
            if procedure.version >= self.since {
                lookups.push((procedure.to_string(), procedure.address));
            }
        }
        // The first use of a function may take memory of the driver that stays.
        if let Some((_, address)) = lookups.first() {
            self.call(*address)?;
        }
        let mut failures = Vec::new();
        for (lookup, address) in &lookups {
            if let Some(failure) = self.call(*address)? {
                failures.push(format!("{lookup}: {failure}"));
            }
        }
        Ok(Called {
            name: self.name,
            lookups: lookups.len(),
            failures,
        })
    }

    /// Allocates and releases once, and returns what was wrong.
    fn call(&self, address: *mut c_void) -> Result<Option<String>> {
        let free_bytes = || result::mem_get_info().context("cuMemGetInfo");
        let (before, _) = free_bytes()?;
        let mut allocated = 0;
        if let Some(error) = error_name((self.allocate)(address, &raw mut allocated)) {
            return Ok(Some(error));
        }
        let (during, _) = free_bytes()?;
        if let Some(error) = error_name((self.release)(allocated)) {
            return Ok(Some(format!("release: {error}")));
        }
        let (after, _) = free_bytes()?;
        let charged = before.saturating_sub(during);
        Ok(if charged < BYTES {
            Some(format!("charged {charged} of {BYTES} bytes"))
        } else if after != before {
            Some(format!("{before} bytes free before, {after} after"))
        } else {
            None
        })
    }
}

/// Returns the function at an address.
///
/// # Safety
/// `F` is the type of the function pointer.
unsafe fn typed<F: Copy>(address: *mut c_void) -> F {
    // SAFETY: by the caller; function pointers have the size of addresses.
    unsafe { std::mem::transmute_copy(&address) }
}

/// Returns an opaque handle as the pointer that it is.
fn handle<T>(value: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(usize::try_from(value).unwrap_or_default())
}

fn plain(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call = unsafe extern "C" fn(*mut u64, usize) -> sys::CUresult;
    // SAFETY: `cuMemAlloc_v2` has this type.
    let call: Call = unsafe { typed(address) };
    // SAFETY: writes one pointer.
    unsafe { call(place, BYTES) }
}

fn pitched(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call = unsafe extern "C" fn(*mut u64, *mut usize, usize, usize, u32) -> sys::CUresult;
    // SAFETY: `cuMemAllocPitch_v2` has this type.
    let call: Call = unsafe { typed(address) };
    let mut pitch = 0;
    // SAFETY: writes one pointer and one size.
    unsafe { call(place, &raw mut pitch, ROW, BYTES / ROW, 4) }
}

fn managed(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call = unsafe extern "C" fn(*mut u64, usize, u32) -> sys::CUresult;
    // SAFETY: `cuMemAllocManaged` has this type.
    let call: Call = unsafe { typed(address) };
    // SAFETY: writes one pointer.
    unsafe { call(place, BYTES, 1) }
}

fn physical(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call = unsafe extern "C" fn(
        *mut u64,
        usize,
        *const sys::CUmemAllocationProp,
        u64,
    ) -> sys::CUresult;
    // SAFETY: `cuMemCreate` has this type.
    let call: Call = unsafe { typed(address) };
    let properties = on_device_0(|properties: &mut sys::CUmemAllocationProp| {
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        &mut properties.location
    });
    // SAFETY: writes one handle; the properties live through the call.
    unsafe { call(place, BYTES, &raw const properties, 0) }
}

fn array(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call = unsafe extern "C" fn(*mut u64, *const sys::CUDA_ARRAY_DESCRIPTOR) -> sys::CUresult;
    // SAFETY: `cuArrayCreate_v2` has this type.
    let call: Call = unsafe { typed(address) };
    let of_3d = descriptor(BYTES);
    let descriptor = sys::CUDA_ARRAY_DESCRIPTOR {
        Width: of_3d.Width,
        Height: of_3d.Height,
        Format: of_3d.Format,
        NumChannels: of_3d.NumChannels,
    };
    // SAFETY: writes one handle; the descriptor lives through the call.
    unsafe { call(place, &raw const descriptor) }
}

fn array_3d(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call =
        unsafe extern "C" fn(*mut u64, *const sys::CUDA_ARRAY3D_DESCRIPTOR) -> sys::CUresult;
    // SAFETY: `cuArray3DCreate_v2` has this type.
    let call: Call = unsafe { typed(address) };
    let descriptor = descriptor(BYTES);
    // SAFETY: writes one handle; the descriptor lives through the call.
    unsafe { call(place, &raw const descriptor) }
}

fn mipmapped(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call =
        unsafe extern "C" fn(*mut u64, *const sys::CUDA_ARRAY3D_DESCRIPTOR, u32) -> sys::CUresult;
    // SAFETY: `cuMipmappedArrayCreate` has this type.
    let call: Call = unsafe { typed(address) };
    let descriptor = descriptor(BYTES);
    // SAFETY: writes one handle; the descriptor lives through the call.
    unsafe { call(place, &raw const descriptor, 1) }
}

fn queued(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call = unsafe extern "C" fn(*mut u64, usize, sys::CUstream) -> sys::CUresult;
    // SAFETY: `cuMemAllocAsync` has this type.
    let call: Call = unsafe { typed(address) };
    // SAFETY: writes one pointer; the null stream is a default one.
    unsafe { call(place, BYTES, ptr::null_mut()) }
}

fn queued_from_pool(address: *mut c_void, place: *mut u64) -> sys::CUresult {
    type Call =
        unsafe extern "C" fn(*mut u64, usize, sys::CUmemoryPool, sys::CUstream) -> sys::CUresult;
    // SAFETY: `cuMemAllocFromPoolAsync` has this type.
    let call: Call = unsafe { typed(address) };
    default_pool(|pool| {
        // SAFETY: writes one pointer; the null stream is a default one.
        unsafe { call(place, BYTES, pool, ptr::null_mut()) }
    })
}

fn free(address: u64) -> sys::CUresult {
    // SAFETY: memory that is freed once.
    unsafe { sys::cuMemFree_v2(address) }
}

/// Frees memory of a pool, which then returns it to the GPU.
fn free_queued(address: u64) -> sys::CUresult {
    // SAFETY: memory that is freed once; the null stream follows all others.
    let code = unsafe { sys::cuMemFreeAsync(address, ptr::null_mut()) };
    if code != sys::CUresult::CUDA_SUCCESS {
        return code;
    }
    // SAFETY: no arguments; the context is current.
    let code = unsafe { sys::cuCtxSynchronize() };
    if code != sys::CUresult::CUDA_SUCCESS {
        return code;
    }
    // SAFETY: a pool that lives as long as the device.
    default_pool(|pool| unsafe { sys::cuMemPoolTrimTo(pool, 0) })
}

/// Calls with the default pool of device 0.
fn default_pool(call: impl FnOnce(sys::CUmemoryPool) -> sys::CUresult) -> sys::CUresult {
    let mut pool = ptr::null_mut();
    // SAFETY: writes one handle.
    match unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, 0) } {
        sys::CUresult::CUDA_SUCCESS => call(pool),
        code => code,
    }
}
