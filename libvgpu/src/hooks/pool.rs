//! Memory pools and stream-ordered allocation.
//!
//! The charge is the pool's reserved size, not the program's allocations; see [`crate::hooks::driver_cache`]. An
//! allocation reserves the largest growth of the pool first; then the charge is set to the reported size. If the
//! growth cannot be reserved, the allocation is made in free space of the pool that is certain (see
//! [`crate::accounts::pool_free_space`]), exclusively, so that no other thread gets that space meanwhile. Otherwise the
//! process's pools are trimmed before a denial.

use crate::accounts::pool_free_space::{CHUNK, SizeChange};
use crate::driver_api::cuda::{
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUmemPoolProps, CUmemoryPool, CUresult,
    CUstream,
};
use crate::driver_api::functions::{
    cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync, cuMemPoolCreate, cuMemPoolDestroy,
};
use crate::hooks::driver_cache::pools::{
    add_reservation, attribute, key_of, reserved_of, settle, trim, uncharged_bytes,
};
use crate::hooks::driver_cache::{deny, reserve_ahead};
use crate::hooks::metering::{self, NullStream};
use crate::hooks::{graph_memory, shared_memory, streams};
use crate::limits::gpu::Gpu;
use crate::process::Process;

pub(crate) mod share;
mod source;

use source::AllocationSource;

/// An allocation to make from a pool of a limited GPU.
#[derive(Clone, Copy)]
struct PoolRequest {
    gpu: Gpu,
    pool: CUmemoryPool,
    bytes: u64,
    stream: CUstream,
}

impl PoolRequest {
    /// Makes the allocation with `call`, which writes to `pointer`, if the growth can be reserved.
    ///
    /// # Safety
    /// `call` calls libcuda, which writes to `pointer` on success.
    unsafe fn allocate(self, pointer: *mut CUdeviceptr, call: impl Fn() -> CUresult) -> CUresult {
        let growth = self
            .bytes
            .checked_next_multiple_of(CHUNK)
            .unwrap_or(u64::MAX);
        let process = Process::of(self.gpu);
        let at_once = || {
            let attempt = process.pending_reservations.begin();
            self.gpu.try_reserve(growth).then_some(attempt)
        };
        let attempt = match at_once() {
            Some(attempt) => attempt,
            None => {
                // SAFETY: the caller's contract.
                if let Some(result) = unsafe { self.allocate_in_free_space(pointer, &call) } {
                    return result;
                }
                match reserve_ahead(self.gpu, growth) {
                    Some(attempt) => attempt,
                    None => {
                        // A call that was awaited may have made space in the pool.
                        // SAFETY: the caller's contract.
                        let result = unsafe { self.allocate_in_free_space(pointer, &call) };
                        return result.unwrap_or_else(|| deny(self.gpu));
                    }
                }
            }
        };
        let _passage = process.reuse_gate.enter();
        add_reservation(self.gpu, self.pool, growth);
        let result = call();
        let change = settle(self.gpu, self.pool, growth, result);
        drop(attempt);
        if result == CUDA_SUCCESS {
            // SAFETY: written by libcuda.
            self.record(unsafe { pointer.read() }, change);
        }
        result
    }

    /// Makes the allocation with `call` in the pool's reserved memory. Returns `None` without free space that is
    /// certain.
    ///
    /// If the pool grows nevertheless, beyond its charge, the allocation is undone.
    ///
    /// # Safety
    /// As for [`PoolRequest::allocate`].
    unsafe fn allocate_in_free_space(
        self,
        pointer: *mut CUdeviceptr,
        call: impl Fn() -> CUresult,
    ) -> Option<CUresult> {
        let process = Process::of(self.gpu);
        // Without free space no thread needs to wait.
        self.has_free_space().then_some(())?;
        let _alone = process.reuse_gate.enter_exclusive()?;
        self.has_free_space().then_some(())?;
        let result = call();
        if result != CUDA_SUCCESS {
            return Some(result);
        }
        let grown = uncharged_bytes(self.gpu, self.pool);
        // No wait here: another thread may be waiting for this call to end.
        if grown == 0 || self.gpu.reserve(grown).is_ok() {
            add_reservation(self.gpu, self.pool, grown);
            let change = settle(self.gpu, self.pool, grown, result);
            // SAFETY: written by libcuda.
            self.record(unsafe { pointer.read() }, change);
            return Some(result);
        }
        // SAFETY: just written by libcuda.
        unsafe { undo_allocation(pointer, self.stream) };
        trim(self.pool);
        process.pool_free_space.end_pool(key_of(self.pool));
        settle(self.gpu, self.pool, 0, result);
        Some(deny(self.gpu))
    }

    fn has_free_space(self) -> bool {
        let has_passed = |other| may_reuse(self.pool) && streams::has_passed(other);
        streams::key_of(self.stream).is_some_and(|stream| {
            Process::of(self.gpu).pool_free_space.has_space(
                key_of(self.pool),
                stream,
                self.bytes,
                has_passed,
            )
        })
    }

    /// Records an allocation.
    fn record(self, start: CUdeviceptr, change: SizeChange) {
        let (pool, gpu) = (key_of(self.pool), self.gpu.index());
        Process::of(self.gpu)
            .pool_free_space
            .allocate(pool, gpu, start, self.bytes, change);
    }
}

/// Returns whether the pool may reuse memory freed in another stream that has completed the free.
fn may_reuse(pool: CUmemoryPool) -> bool {
    attribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC).is_some_and(|allows| allows != 0)
}

/// Frees an allocation that is denied.
///
/// # Safety
/// `pointer` points to an allocation that was just made for `stream`.
unsafe fn undo_allocation(pointer: *mut CUdeviceptr, stream: CUstream) {
    let Some(free) = cuMemFreeAsync::ORIGINAL.get() else {
        return;
    };
    // SAFETY: written by libcuda.
    let allocated = unsafe { pointer.read() };
    // SAFETY: just allocated, and unknown to the program.
    unsafe { free(allocated, stream) };
    // SAFETY: as above; the program must not see it.
    unsafe { pointer.write(0) };
}

pub(crate) unsafe fn alloc_async<S: NullStream>(
    original: cuMemAllocAsync::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pointer, bytes, stream) };
    let stream = S::resolve(stream);
    // SAFETY: the call writes to `pointer`.
    unsafe {
        allocate(
            pointer,
            bytes,
            stream,
            || AllocationSource::of_stream(stream),
            call,
        )
    }
}

pub(crate) unsafe fn alloc_from_pool_async<S: NullStream>(
    original: cuMemAllocFromPoolAsync::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pointer, bytes, pool, stream) };
    let stream = S::resolve(stream);
    // SAFETY: the call writes to `pointer`.
    unsafe {
        allocate(
            pointer,
            bytes,
            stream,
            || AllocationSource::of_pool(pool),
            call,
        )
    }
}

/// Allocates with `call` from `source`. A captured allocation takes memory when its graph is launched; see
/// [`crate::hooks::graph_memory`].
///
/// # Safety
/// `call` calls libcuda, which writes to `pointer` on success.
unsafe fn allocate(
    pointer: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
    source: impl FnOnce() -> AllocationSource,
    call: impl Fn() -> CUresult,
) -> CUresult {
    if metering::is_capturing(stream) {
        graph_memory::expect_allocations();
        return call();
    }
    let (gpu, pool) = match source() {
        AllocationSource::Uncounted => return call(),
        AllocationSource::Refused => return CUDA_ERROR_OUT_OF_MEMORY,
        AllocationSource::Pool(gpu, pool) => (gpu, pool),
    };
    let request = PoolRequest {
        gpu,
        pool,
        bytes: bytes as u64,
        stream,
    };
    // SAFETY: the caller's contract.
    unsafe { request.allocate(pointer, call) }
}

/// Frees a pool allocation of this process, or an import, with `call`: the memory stays in its pool. Records the
/// stream of the free, if its order is known.
pub(crate) fn free(
    process: &'static Process,
    pointer: CUdeviceptr,
    stream: Option<CUstream>,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    // A captured free happens when the graph is launched.
    let key = stream
        .filter(|stream| !metering::is_capturing(*stream))
        .and_then(streams::key_of);
    let _passage = process.reuse_gate.enter();
    let charge = process.pool_free_space.free(pointer, key);
    let result = call();
    if result == CUDA_SUCCESS {
        shared_memory::close(process, pointer);
    } else if let Some(charge) = charge {
        process.pool_free_space.restore(pointer, charge);
    }
    result
}

/// Returns whether the pointer is a pool allocation of this process, or imported from another one.
pub(crate) fn is_from_pool(process: &Process, pointer: CUdeviceptr) -> bool {
    process.pool_free_space.is_from_pool(pointer)
        || process.exported.contains(pointer)
        || process.opened.contains(pointer)
}

pub(crate) unsafe fn create(
    original: cuMemPoolCreate::Function,
    pool: *mut CUmemoryPool,
    properties: *const CUmemPoolProps,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(pool, properties) };
    // SAFETY: libcuda has accepted the properties.
    let properties = unsafe { properties.as_ref() };
    let Some(properties) = properties.filter(|_| result == CUDA_SUCCESS) else {
        return result;
    };
    // SAFETY: libcuda has written the pool.
    source::record(unsafe { pool.read() }, properties);
    result
}

/// A destroyed pool keeps the chunks that have allocations. It cannot be queried any more, so they stay charged until the
/// process ends.
pub(crate) unsafe fn destroy(original: cuMemPoolDestroy::Function, pool: CUmemoryPool) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pool) };
    let Some(process) = Process::get() else {
        return call();
    };
    let key = key_of(pool);
    // Removed first: another thread would query or trim a destroyed pool. No query is in flight meanwhile: it would record
    // the pool again.
    let known = {
        let _alone = process.pool_gate.enter_exclusive();
        let _guard = process.pool_guard();
        process.cache_reports.remove(key);
        process.pools.remove(key)
    };
    let Some(charge) = known else {
        return call();
    };
    trim(pool);
    let used = attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    let is_in_use = used.is_none_or(|bytes| bytes != 0);
    let kept = reserved_of(pool).filter(|_| is_in_use).unwrap_or(0);
    let result = call();
    if result != CUDA_SUCCESS {
        process.pools.insert(key, charge);
        return result;
    }
    if let Some(gpu) = process.gpu(charge.gpu) {
        gpu.release(charge.charged_bytes.saturating_sub(kept));
    }
    process.pool_free_space.end_pool(key);
    result
}

/// Drops a destroyed stream, which orders no more frees and allocations.
pub(crate) fn forget_stream(stream: CUstream) {
    if let Some(process) = Process::get()
        && let Some(key) = streams::key_of(stream)
    {
        process.pool_free_space.forget_stream(key);
    }
}
