//! Reserved size of memory pools. A pool takes memory from the GPU in chunks, allocates parts of them, and keeps
//! freed memory until it is synchronized or trimmed.
//!
//! Queries and trims are made in the relaxed capture mode: in the others they invalidate captures of other threads.
//!
//! Invariant: the charge for a pool is its last reported size, apart from the reservations of allocations in
//! flight. The size is queried after each allocation; between allocations the pool can only shrink.

use core::ffi::{c_int, c_void};

use crate::accounts::cache_charge::CacheCharge;
use crate::accounts::pool_free_space::SizeChange;
use crate::driver_api::cuda::{
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CUDA_SUCCESS, CUmemoryPool, CUresult,
};
use crate::driver_api::driver::{Library, Original};
use crate::hooks::metering::relaxed;
use crate::limits::gpu::Gpu;
use crate::process::Process;

static GET_ATTRIBUTE: Original<GetAttribute> =
    Original::new(Library::Cuda, c"cuMemPoolGetAttribute");
static TRIM: Original<Trim> = Original::new(Library::Cuda, c"cuMemPoolTrimTo");

type GetAttribute = unsafe extern "C" fn(CUmemoryPool, c_int, *mut c_void) -> CUresult;
type Trim = unsafe extern "C" fn(CUmemoryPool, usize) -> CUresult;

/// Returns the reserved size of the pool.
pub(crate) fn reserved_of(pool: CUmemoryPool) -> Option<u64> {
    attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
}

/// Returns a `CU_MEMPOOL_ATTR_*`.
pub(crate) fn attribute(pool: CUmemoryPool, attribute: c_int) -> Option<u64> {
    let get = GET_ATTRIBUTE.get()?;
    let mut value = 0u64;
    // SAFETY: the attributes asked for are at most 64 bits wide.
    let result = relaxed(|| unsafe { get(pool, attribute, (&raw mut value).cast()) });
    (result == CUDA_SUCCESS).then_some(value)
}

/// Trims the pool.
pub(crate) fn trim(pool: CUmemoryPool) {
    if let Some(trim) = TRIM.get() {
        // SAFETY: trims only unused memory.
        relaxed(|| unsafe { trim(pool, 0) });
    }
}

/// Returns the pool's key.
pub(crate) fn key_of(pool: CUmemoryPool) -> u64 {
    pool.expose_provenance() as u64
}

/// Adds the reservation of an allocation in flight.
pub(crate) fn add_reservation(gpu: Gpu, pool: CUmemoryPool, reserved_bytes: u64) {
    let process = Process::of(gpu);
    let _guard = process.pool_guard();
    super::add_reservation(gpu, &process.pools, key_of(pool), reserved_bytes);
}

/// Sets the pool's charge to the reported size, after an allocation with `reserved_bytes` reserved.
pub(crate) fn settle(
    gpu: Gpu,
    pool: CUmemoryPool,
    reserved_bytes: u64,
    result: CUresult,
) -> SizeChange {
    let (process, key) = (Process::of(gpu), key_of(pool));
    let report = super::query(process, || reserved_of(pool));
    let grown_bytes = if result == CUDA_SUCCESS {
        reserved_bytes
    } else {
        0
    };
    let (before_bytes, after_bytes) = {
        let _guard = process.pool_guard();
        let has_bytes = super::latest_bytes(process, key, report);
        let caches = &process.pools;
        super::settle(gpu, caches, key, reserved_bytes, grown_bytes, has_bytes)
    };
    if after_bytes < before_bytes {
        process.pool_free_space.invalidate(key);
    }
    SizeChange {
        before_bytes,
        after_bytes,
    }
}

/// Returns the part of the reported size that is neither charged nor reserved.
pub(crate) fn uncharged_bytes(gpu: Gpu, pool: CUmemoryPool) -> u64 {
    let process = Process::of(gpu);
    let has_bytes = reserved_of(pool).unwrap_or(0);
    let _guard = process.pool_guard();
    let known = process.pools.get(key_of(pool));
    let growth = known
        .as_ref()
        .map_or(CacheCharge::default(), CacheCharge::of);
    growth.uncharged_bytes(has_bytes)
}

/// Sets the pool's charge to the reported size, after a trim if `trims`. A pool that another thread has destroyed
/// is not queried.
fn refresh_pool(gpu: Gpu, pool: CUmemoryPool, trims: bool) {
    let process = Process::of(gpu);
    let _used = process.pool_gate.enter();
    if process.pools.get(key_of(pool)).is_none() {
        return;
    }
    if trims {
        trim(pool);
    }
    settle(gpu, pool, 0, CUDA_SUCCESS);
}

fn for_each_pool(gpu: Gpu, each: impl Fn(CUmemoryPool)) {
    Process::of(gpu).pools.for_each(|key, pool| {
        if pool.gpu == gpu.index() && pool.charged_bytes != 0 {
            let address = usize::try_from(key).unwrap_or(0);
            each(core::ptr::with_exposed_provenance_mut(address));
        }
    });
}

/// Updates the charges after pools returned memory to the GPU.
pub(super) fn refresh(gpu: Gpu) {
    for_each_pool(gpu, |pool| refresh_pool(gpu, pool, false));
}

/// Trims the process's pools. Returns `false` if the GPU has none.
pub(super) fn trim_all(gpu: Gpu) -> bool {
    let mut has_any = false;
    Process::of(gpu)
        .pools
        .for_each(|_, pool| has_any |= pool.gpu == gpu.index());
    if has_any {
        for_each_pool(gpu, |pool| refresh_pool(gpu, pool, true));
    }
    has_any
}
