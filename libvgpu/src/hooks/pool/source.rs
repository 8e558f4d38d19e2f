//! The GPU of a pool's memory, and the pool of a stream.
//!
//! The pool's own GPU counts, and a stream uses the current pool of its own device: neither need be the GPU of the
//! current context.

use core::ffi::c_int;

use crate::accounts::cache_charge::Cache;
use crate::accounts::records::NO_GPU;
use crate::current::{Target, target_of_current_context, target_of_device};
use crate::driver_api::cuda::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST,
    CU_MEM_LOCATION_TYPES_OF_HOST, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, CU_MEMPOOL_ATTR_LOCATION_ID,
    CU_MEMPOOL_ATTR_LOCATION_TYPE, CUDA_SUCCESS, CUdevice, CUmemLocation, CUmemPoolProps,
    CUmemoryPool, CUresult, CUstream,
};
use crate::driver_api::device::device_count;
use crate::driver_api::driver::{Library, Original};
use crate::hooks::driver_cache::pools::{attribute, key_of, settle};
use crate::hooks::streams;
use crate::limits::gpu::Gpu;
use crate::process::Process;

static GET_POOL: Original<GetPool> = Original::new(Library::Cuda, c"cuDeviceGetMemPool");
static GET_DEFAULT_POOL: Original<GetPool> =
    Original::new(Library::Cuda, c"cuDeviceGetDefaultMemPool");
static GET_DEFAULT_FOR: Original<GetPoolFor> =
    Original::new(Library::Cuda, c"cuMemGetDefaultMemPool");
static GET_FOR: Original<GetPoolFor> = Original::new(Library::Cuda, c"cuMemGetMemPool");

type GetPool = unsafe extern "C" fn(*mut CUmemoryPool, CUdevice) -> CUresult;
type GetPoolFor = unsafe extern "C" fn(*mut CUmemoryPool, *mut CUmemLocation, c_int) -> CUresult;

/// Source of an allocation.
#[derive(Clone, Copy)]
pub(super) enum AllocationSource {
    /// Memory that is not counted.
    Uncounted,
    /// A denied GPU.
    Refused,
    /// A pool of a limited GPU.
    Pool(Gpu, CUmemoryPool),
}

impl AllocationSource {
    /// Returns the source of `cuMemAllocAsync`. Without a context libcuda reports the error.
    pub(super) fn of_stream(stream: CUstream) -> Self {
        let Some(device) = streams::device_of(stream) else {
            return Self::Uncounted;
        };
        match target_of_device(device) {
            Target::Unlimited => Self::Uncounted,
            Target::Denied => Self::Refused,
            Target::Limited(gpu) => {
                pool_of(&GET_POOL, device).map_or(Self::Uncounted, |pool| Self::Pool(gpu, pool))
            }
        }
    }

    /// Returns the source of an allocation from the pool.
    pub(super) fn of_pool(pool: CUmemoryPool) -> Self {
        let Some(process) = Process::get() else {
            return Self::Refused;
        };
        if let Some(charge) = process.pools.get(key_of(pool)) {
            return process
                .gpu(charge.gpu)
                .map_or(Self::Uncounted, |gpu| Self::Pool(gpu, pool));
        }
        match target_of(pool) {
            Target::Limited(gpu) => Self::Pool(gpu, pool),
            Target::Denied => Self::Refused,
            Target::Unlimited => {
                record_uncounted(process, pool);
                Self::Uncounted
            }
        }
    }
}

/// Records the source of a new pool.
pub(super) fn record(pool: CUmemoryPool, properties: &CUmemPoolProps) {
    let Some(process) = Process::get() else {
        return;
    };
    let location = properties.location;
    let number = |value: c_int| u64::try_from(value).unwrap_or(0);
    if location.r#type == CU_MEM_LOCATION_TYPE_DEVICE {
        match target_of_device(location.id) {
            Target::Limited(gpu) => {
                settle(gpu, pool, 0, CUDA_SUCCESS);
            }
            Target::Unlimited => record_uncounted(process, pool),
            Target::Denied => {}
        }
    } else if is_host(number(location.r#type), number(properties.allocType)) {
        record_uncounted(process, pool);
    }
}

/// Records that a pool's memory is not counted.
fn record_uncounted(process: &Process, pool: CUmemoryPool) {
    let uncounted = Cache {
        charged_bytes: 0,
        gpu: NO_GPU,
        reserved_bytes: 0,
    };
    let _guard = process.pool_guard();
    // The key may belong to a destroyed pool.
    process.pools.remove(key_of(pool));
    process.pools.insert(key_of(pool), uncounted);
}

/// Returns the limit that applies to a pool that this process did not create. Since CUDA 13.2 a pool reports its
/// location. Before that, the built-in pools are recognized by querying them, and any other pool is assumed to be
/// on the current GPU.
fn target_of(pool: CUmemoryPool) -> Target {
    let location = attribute(pool, CU_MEMPOOL_ATTR_LOCATION_TYPE);
    let r#type = attribute(pool, CU_MEMPOOL_ATTR_ALLOCATION_TYPE);
    if let (Some(location), Some(r#type)) = (location, r#type) {
        if is_host(location, r#type) {
            return Target::Unlimited;
        }
        let id = attribute(pool, CU_MEMPOOL_ATTR_LOCATION_ID);
        let is_on_gpu = c_int::try_from(location) == Ok(CU_MEM_LOCATION_TYPE_DEVICE);
        return match id.and_then(|id| CUdevice::try_from(id).ok()) {
            Some(device) if is_on_gpu => target_of_device(device),
            _ => target_of_current_context(),
        };
    }
    let hosts = [&GET_DEFAULT_FOR, &GET_FOR].into_iter();
    if hosts.filter_map(host_pool).any(|hosts| hosts == pool) {
        return Target::Unlimited;
    }
    let is_of = |device: &CUdevice| {
        let pools = [&GET_DEFAULT_POOL, &GET_POOL].into_iter();
        pools
            .filter_map(|get| pool_of(get, *device))
            .any(|devices| devices == pool)
    };
    (0..device_count().unwrap_or(0))
        .find(is_of)
        .map_or_else(target_of_current_context, target_of_device)
}

/// Returns a pool of a device, from one of two functions.
fn pool_of(get: &'static Original<GetPool>, device: CUdevice) -> Option<CUmemoryPool> {
    let get = get.get()?;
    let mut pool = core::ptr::null_mut();
    // SAFETY: writes one pool.
    let result = unsafe { get(&raw mut pool, device) };
    (result == CUDA_SUCCESS).then_some(pool)
}

/// Returns whether a location and a `CUmemAllocationType` mean pinned host memory, which uses no GPU memory.
fn is_host(location: u64, r#type: u64) -> bool {
    r#type == CU_MEM_ALLOCATION_TYPE_PINNED && CU_MEM_LOCATION_TYPES_OF_HOST.contains(&location)
}

/// Returns the host's pool, from one of two functions.
fn host_pool(get: &'static Original<GetPoolFor>) -> Option<CUmemoryPool> {
    let get = get.get()?;
    let mut location = CUmemLocation {
        r#type: CU_MEM_LOCATION_TYPE_HOST,
        id: 0,
    };
    let mut pool = core::ptr::null_mut();
    let r#type = c_int::try_from(CU_MEM_ALLOCATION_TYPE_PINNED).unwrap_or(0);
    // SAFETY: reads one location and writes one pool.
    let result = unsafe { get(&raw mut pool, &raw mut location, r#type) };
    (result == CUDA_SUCCESS).then_some(pool)
}
