//! Memory pools and stream-ordered allocation.
//!
//! What counts is not what the program has allocated but what the pool has reserved, see [`crate::hooks::driver_cache`]. Before an allocation the most that the pool may grow by is reserved; afterwards the charge is made what the
//! pool says. Where so much cannot be reserved, a pool is asked all the same if it certainly has room, see
//! [`crate::pool_free_space`], and alone, so that none else gets that room meanwhile. Else the process's pools are trimmed
//! before it is refused.

use core::ffi::c_void;
use core::ptr::NonNull;

use crate::card::Card;
use crate::cuda::{
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUmemPoolProps, CUmemoryPool, CUresult,
    CUstream,
};
use crate::destroyed_pools::FreedAt;
use crate::hooks::driver_cache::pools::{
    add_reservation, attribute, key_of, reserved_of, settle, trim, uncharged_bytes,
};
use crate::hooks::driver_cache::{deny, reserve_ahead};
use crate::meter::{self, NullStream};
use crate::pool_free_space::{CHUNK, SizeChange};
use crate::process::Process;
use crate::table::{
    cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync, cuMemPoolCreate, cuMemPoolDestroy,
};

pub(crate) mod destroyed;
pub(crate) mod share;
mod source;
mod streams;

use source::AllocationSource;

/// An allocation that is about to be made from a pool of a card that is limited.
#[derive(Clone, Copy)]
struct PoolRequest {
    card: Card,
    pool: CUmemoryPool,
    bytes: u64,
    stream: CUstream,
}

impl PoolRequest {
    /// Makes the allocation with `call`, which writes to `pointer`, if the share has room for it.
    ///
    /// # Safety
    /// `call` asks the driver for it, which writes to `pointer` if it succeeds.
    unsafe fn allocate(self, pointer: *mut CUdeviceptr, call: impl Fn() -> CUresult) -> CUresult {
        let growth = self
            .bytes
            .checked_next_multiple_of(CHUNK)
            .unwrap_or(u64::MAX);
        let process = self.card.process();
        let at_once = || {
            let attempt = process.pending_reservations.begin();
            self.card.try_reserve(growth).then_some(attempt)
        };
        let attempt = match at_once() {
            Some(attempt) => attempt,
            None => {
                // SAFETY: the caller's.
                if let Some(result) = unsafe { self.allocate_in_free_space(pointer, &call) } {
                    return result;
                }
                match reserve_ahead(self.card, growth) {
                    Some(attempt) => attempt,
                    None => {
                        // Whoever has been waited for may have made room in the pool.
                        // SAFETY: the caller's.
                        let result = unsafe { self.allocate_in_free_space(pointer, &call) };
                        return result.unwrap_or_else(|| deny(self.card));
                    }
                }
            }
        };
        let _passage = process.reuse_gate.enter();
        add_reservation(self.card, self.pool, growth);
        let result = call();
        let change = settle(self.card, self.pool, growth);
        drop(attempt);
        if result == CUDA_SUCCESS {
            // SAFETY: written by the driver.
            self.record(unsafe { pointer.read() }, change);
        }
        result
    }

    /// Makes the allocation with `call` in what the pool has reserved already. `None` if there is no room in it for
    /// certain.
    ///
    /// Should the pool grow nevertheless, beyond what is paid for, the allocation is undone.
    ///
    /// # Safety
    /// As for [`PoolRequest::allocate`].
    unsafe fn allocate_in_free_space(
        self,
        pointer: *mut CUdeviceptr,
        call: impl Fn() -> CUresult,
    ) -> Option<CUresult> {
        let process = self.card.process();
        // Nobody needs to be kept waiting where there is no room anyway.
        self.has_free_space().then_some(())?;
        let _alone = process.reuse_gate.enter_exclusive()?;
        self.has_free_space().then_some(())?;
        let result = call();
        if result != CUDA_SUCCESS {
            return Some(result);
        }
        let grown = uncharged_bytes(self.card, self.pool);
        // Nobody may be waited for here, who may be waiting until this call is through.
        if grown == 0 || self.card.reserve(grown).is_ok() {
            add_reservation(self.card, self.pool, grown);
            let change = settle(self.card, self.pool, grown);
            // SAFETY: written by the driver.
            self.record(unsafe { pointer.read() }, change);
            return Some(result);
        }
        // SAFETY: written by the driver just now.
        unsafe { undo_allocation(pointer, self.stream) };
        trim(self.pool);
        process.pool_free_space.forget_pool(key_of(self.pool));
        settle(self.card, self.pool, 0);
        Some(deny(self.card))
    }

    fn has_free_space(self) -> bool {
        let has_passed = |other| may_reuse(self.pool) && streams::has_passed(other);
        streams::key_of(self.stream).is_some_and(|stream| {
            self.card.process().pool_free_space.has_space(
                key_of(self.pool),
                stream,
                self.bytes,
                has_passed,
            )
        })
    }

    /// Notes an allocation that was made.
    fn record(self, start: CUdeviceptr, change: SizeChange) {
        let (pool, card) = (key_of(self.pool), self.card.index());
        self.card
            .process()
            .pool_free_space
            .allocate(pool, card, start, self.bytes, change);
    }
}

/// Whether the pool may use again what was freed in another stream, once that has come so far.
fn may_reuse(pool: CUmemoryPool) -> bool {
    attribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC).is_some_and(|allows| allows != 0)
}

/// Frees an allocation that does not fit after all.
///
/// # Safety
/// `pointer` points to what `cuMemAllocAsync` or its like has just written for `stream`.
unsafe fn undo_allocation(pointer: *mut CUdeviceptr, stream: CUstream) {
    let Some(free) = cuMemFreeAsync::ORIGINAL.address() else {
        return;
    };
    // SAFETY: the driver's function of that name has this signature.
    let free = unsafe { core::mem::transmute::<NonNull<c_void>, cuMemFreeAsync::Function>(free) };
    // SAFETY: written by the driver.
    let allocated = unsafe { pointer.read() };
    // SAFETY: allocated just now, and unknown to the program.
    unsafe { free(allocated, stream) };
    // SAFETY: as above; the program shall not see it.
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
    let stream = S::meant_by(stream);
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
    let stream = S::meant_by(stream);
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

/// Allocates with `call` from where `source` says. What is captured takes memory when its graph is launched; see
/// [`crate::hooks::graph_memory`].
///
/// # Safety
/// `call` asks the driver for it, which writes to `pointer` if it succeeds.
unsafe fn allocate(
    pointer: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
    source: impl FnOnce() -> AllocationSource,
    call: impl Fn() -> CUresult,
) -> CUresult {
    if meter::is_capturing(stream) {
        return call();
    }
    let (card, pool) = match source() {
        AllocationSource::Uncounted => return call(),
        AllocationSource::Refused => return CUDA_ERROR_OUT_OF_MEMORY,
        AllocationSource::Pool(card, pool) => (card, pool),
    };
    let request = PoolRequest {
        card,
        pool,
        bytes: bytes as u64,
        stream,
    };
    // SAFETY: the caller's.
    unsafe { request.allocate(pointer, call) }
}

/// Frees what a pool of this process gave, or of another one, with `call`: it stays in its pool. Says where it was freed,
/// if that is known by the stream's request.
pub(crate) fn free(
    process: &'static Process,
    pointer: CUdeviceptr,
    stream: Option<CUstream>,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    // What is captured is freed when the graph is launched.
    let key = stream
        .filter(|stream| !meter::is_capturing(*stream))
        .and_then(streams::key_of);
    let _passage = process.reuse_gate.enter();
    let held = process.pool_free_space.free(pointer, key);
    let of_destroyed = process.destroyed_pools.begin_free(pointer);
    let result = call();
    if result == CUDA_SUCCESS {
        share::freed(process, pointer);
        if let Some(taken) = of_destroyed {
            let when = match (stream, key) {
                // `cuMemFree` waits for no stream.
                (None, _) => FreedAt::Now,
                (Some(_), Some(key)) => FreedAt::InStream(key),
                (Some(_), None) => FreedAt::Unknown,
            };
            destroyed::freed(process, taken, when);
        }
        return result;
    }
    if let Some(held) = held {
        process.pool_free_space.restore(pointer, held);
    }
    if let Some(taken) = of_destroyed {
        process.destroyed_pools.cancel_free(pointer, taken);
    }
    result
}

/// Whether a pool of this process gave the pointer, or one of another process.
pub(crate) fn is_from_pool(process: &Process, pointer: CUdeviceptr) -> bool {
    process.pool_free_space.is_from_pool(pointer)
        || process.destroyed_pools.contains(pointer)
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
    // SAFETY: the driver has accepted the properties.
    let properties = unsafe { properties.as_ref() };
    let Some(properties) = properties.filter(|_| result == CUDA_SUCCESS) else {
        return result;
    };
    // SAFETY: the driver has written the pool.
    source::record(unsafe { pool.read() }, properties);
    result
}

/// A destroyed pool keeps the chunks in which something is allocated as long as that is; so much stays charged, see
/// [`crate::destroyed_pools`].
pub(crate) unsafe fn destroy(original: cuMemPoolDestroy::Function, pool: CUmemoryPool) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pool) };
    let Some(process) = Process::get() else {
        return call();
    };
    let key = key_of(pool);
    // First of all, or another thread would ask the pool for what it does not use when it is gone.
    let known = {
        let _guard = process.pool_guard();
        process.pools.remove(key)
    };
    let Some(held) = known else {
        return call();
    };
    // Nothing is allocated or freed meanwhile, or it is not certain what is left.
    let alone = process.reuse_gate.enter_exclusive();
    trim(pool);
    let used = attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    let is_in_use = used.is_none_or(|bytes| bytes != 0);
    let kept = reserved_of(pool).filter(|_| is_in_use).unwrap_or(0);
    let is_known =
        alone.is_some() && process.pool_free_space.allocated_in(key) >= used.or(Some(u64::MAX));
    let result = call();
    if result != CUDA_SUCCESS {
        process.pools.insert(key, held);
        return result;
    }
    if let Some(card) = Card::at(process, held.card) {
        card.release(held.bytes.saturating_sub(kept));
    }
    // No more than was charged can come back.
    let charged = kept.min(held.bytes);
    if charged == 0 || !is_known {
        process.pool_free_space.end_pool(key, |_| {});
        return result;
    }
    process.destroyed_pools.add(held.card, charged, |parse| {
        process.pool_free_space.end_pool(key, parse);
    });
    result
}

/// A stream is destroyed: nothing can be freed in it or allocated any more.
pub(crate) fn forget_stream(stream: CUstream) {
    if let Some(process) = Process::get()
        && let Some(key) = streams::key_of(stream)
    {
        process.pool_free_space.forget_stream(key);
        destroyed::forget_stream(process, key);
    }
}
