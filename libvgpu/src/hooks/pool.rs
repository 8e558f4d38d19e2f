//! Memory pools and stream-ordered allocation.
//!
//! A pool takes memory from the card in chunks, hands out parts of them, and keeps what is freed until it is
//! synchronised or trimmed. So what counts is not what the program has allocated but what the pool has reserved,
//! and that is what the pool itself says.
//!
//! Before an allocation the most that the pool may grow by is reserved; afterwards the charge is made what the
//! pool says. Before a refusal the process's pools are trimmed.
//!
//! Invariant: a pool's charge is what it said last. It says so after each allocation; between, it can only have
//! shrunk.

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

use crate::card::{Card, Target, current_device, target_of_current_context, target_of_device};
use crate::cuda::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST,
    CU_MEM_LOCATION_TYPES_OF_HOST, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, CU_MEMPOOL_ATTR_LOCATION_TYPE,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdevice, CUdeviceptr, CUmemLocation, CUmemPoolProps,
    CUmemoryPool, CUresult, CUstream,
};
use crate::driver::{Library, Original};
use crate::held::Held;
use crate::hooks::graph_memory;
use crate::hooks::memory::free_linear;
use crate::process::Process;
use crate::table::{
    cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync, cuMemPoolCreate, cuMemPoolDestroy,
};

/// Chunks in which pools grow.
const CHUNK: u64 = 32 << 20;

static GET_POOL: Original = Original::new(Library::Cuda, c"cuDeviceGetMemPool");
static GET_ATTRIBUTE: Original = Original::new(Library::Cuda, c"cuMemPoolGetAttribute");
static TRIM: Original = Original::new(Library::Cuda, c"cuMemPoolTrimTo");

static GET_DEFAULT_FOR: Original = Original::new(Library::Cuda, c"cuMemGetDefaultMemPool");
static GET_FOR: Original = Original::new(Library::Cuda, c"cuMemGetMemPool");

type GetPoolFor = unsafe extern "C" fn(*mut CUmemoryPool, *mut CUmemLocation, c_int) -> CUresult;
type GetPool = unsafe extern "C" fn(*mut CUmemoryPool, CUdevice) -> CUresult;
type GetAttribute = unsafe extern "C" fn(CUmemoryPool, c_int, *mut c_void) -> CUresult;
type Trim = unsafe extern "C" fn(CUmemoryPool, usize) -> CUresult;

/// The pool that `cuMemAllocAsync` takes from.
fn current_pool(device: CUdevice) -> Option<CUmemoryPool> {
    let get = GET_POOL.address()?;
    // SAFETY: the signature of `cuDeviceGetMemPool`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetPool>(get) };
    let mut pool = core::ptr::null_mut();
    // SAFETY: writes one pool.
    let result = unsafe { get(&raw mut pool, device) };
    (result == CUDA_SUCCESS).then_some(pool)
}

fn attribute(pool: CUmemoryPool, attribute: c_int) -> Option<u64> {
    let get = GET_ATTRIBUTE.address()?;
    // SAFETY: the signature of `cuMemPoolGetAttribute`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetAttribute>(get) };
    let mut value = 0u64;
    // SAFETY: the attributes asked for are 64 bits wide.
    let result = unsafe { get(pool, attribute, (&raw mut value).cast()) };
    (result == CUDA_SUCCESS).then_some(value)
}

/// Whether the pool's memory is pinned memory of the host, which takes nothing of a card. Since CUDA 13.2 pools say
/// so; before, the host's own pool is known by asking for it.
fn is_hosts(pool: CUmemoryPool) -> bool {
    let location = attribute(pool, CU_MEMPOOL_ATTR_LOCATION_TYPE);
    let r#type = attribute(pool, CU_MEMPOOL_ATTR_ALLOCATION_TYPE);
    if let (Some(location), Some(r#type)) = (location, r#type) {
        return is_host(location, r#type);
    }
    [&GET_DEFAULT_FOR, &GET_FOR]
        .into_iter()
        .any(|get| host_pool(get) == Some(pool))
}

/// Whether a location and a `CUmemAllocationType` mean pinned memory of the host.
fn is_host(location: u64, r#type: u64) -> bool {
    r#type == CU_MEM_ALLOCATION_TYPE_PINNED && CU_MEM_LOCATION_TYPES_OF_HOST.contains(&location)
}

/// The host's pool, as one of two functions knows it.
fn host_pool(get: &'static Original) -> Option<CUmemoryPool> {
    let get = get.address()?;
    // SAFETY: the signature of `cuMemGetMemPool` and `cuMemGetDefaultMemPool`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetPoolFor>(get) };
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

/// Remembers that a pool takes nothing of a card.
fn know_hosts(process: &Process, pool: CUmemoryPool) {
    let held = Held {
        bytes: 0,
        card: u8::MAX,
        context: 0,
    };
    process.pools.insert(key_of(pool), held);
}

fn trim(pool: CUmemoryPool) {
    if let Some(trim) = TRIM.address() {
        // SAFETY: the signature of `cuMemPoolTrimTo`.
        let trim = unsafe { core::mem::transmute::<NonNull<c_void>, Trim>(trim) };
        // SAFETY: keeps what is in use.
        unsafe { trim(pool, 0) };
    }
}

fn key_of(pool: CUmemoryPool) -> u64 {
    pool.expose_provenance() as u64
}

/// Makes the pool's charge what the pool says, `ahead` bytes of which were reserved for its growth.
fn settle(card: Card, pool: CUmemoryPool, ahead: u64) {
    let process = card.process();
    let _guard = process.pool_guard();
    let charged = process
        .pools
        .remove(key_of(pool))
        .map_or(0, |held| held.bytes);
    let bytes = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        .unwrap_or(charged.saturating_add(ahead));
    card.correct(charged.saturating_add(ahead), bytes);
    let held = Held {
        bytes,
        card: card.index(),
        context: 0,
    };
    process.pools.insert(key_of(pool), held);
}

fn for_each_pool(card: Card, each: impl Fn(CUmemoryPool)) {
    card.process().pools.for_each(|key, held| {
        if held.card == card.index() && held.bytes != 0 {
            let address = usize::try_from(key).unwrap_or(0);
            each(core::ptr::with_exposed_provenance_mut(address));
        }
    });
}

/// Notes what the card's pools have given back to it meanwhile.
pub(crate) fn refresh(card: Card) {
    graph_memory::refresh(card);
    for_each_pool(card, |pool| settle(card, pool, 0));
}

/// Makes the process's pools give back what they do not use, and tries once more.
pub(crate) fn reserve_after_trim(card: Card, bytes: u64) -> bool {
    let process = card.process();
    let (mut has_pools, mut has_graphs) = (false, false);
    process
        .pools
        .for_each(|_, held| has_pools |= held.card == card.index());
    process
        .graph_pools
        .for_each(|_, held| has_graphs |= held.card == card.index());
    if has_pools {
        for_each_pool(card, |pool| {
            trim(pool);
            settle(card, pool, 0);
        });
    }
    if has_graphs {
        graph_memory::trim_all(card);
    }
    (has_pools || has_graphs) && card.reserve(bytes).is_ok()
}

/// Allocates with `call` from `pool`, which belongs to a card that is limited. `undo` frees what `call` allocated.
///
/// Where nothing can be reserved ahead, a pool with enough unused memory is asked all the same, or a program that
/// lives within a full pool would be refused for no reason. If the pool grows nevertheless, because its unused
/// memory is in pieces, the allocation is undone; this is the one place where a share can be exceeded, by one
/// request and for the time of two calls.
fn allocate(
    card: Card,
    pool: CUmemoryPool,
    bytes: usize,
    call: impl FnOnce() -> CUresult,
    undo: impl FnOnce(),
) -> CUresult {
    let growth = (bytes as u64)
        .checked_next_multiple_of(CHUNK)
        .unwrap_or(u64::MAX);
    let has_reserved = card.reserve(growth).is_ok()
        || (!has_room(pool, bytes as u64) && {
            if !reserve_after_trim(card, growth) {
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            true
        });
    if has_reserved {
        let result = call();
        settle(card, pool, growth);
        return result;
    }
    let before = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).unwrap_or(0);
    let result = call();
    let after = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).unwrap_or(0);
    let grown = after.saturating_sub(before);
    if result != CUDA_SUCCESS || grown == 0 {
        return result;
    }
    let fits = card.reserve(grown).is_ok();
    if !fits {
        undo();
        trim(pool);
    }
    settle(card, pool, if fits { grown } else { 0 });
    if fits {
        result
    } else {
        CUDA_ERROR_OUT_OF_MEMORY
    }
}

/// Frees an allocation that does not fit after all.
///
/// # Safety
/// `pointer` points to what `cuMemAllocAsync` or its like has just written for `stream`.
unsafe fn free_again(pointer: *mut CUdeviceptr, stream: CUstream) {
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

/// Whether the pool has reserved so much more than is in use.
fn has_room(pool: CUmemoryPool, bytes: u64) -> bool {
    let reserved = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    let used = attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    matches!((reserved, used), (Some(reserved), Some(used)) if reserved.saturating_sub(used) >= bytes)
}

pub(crate) unsafe fn alloc_async(
    original: cuMemAllocAsync::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pointer, bytes, stream) };
    // Without a context the driver refuses by itself.
    let Some(device) = current_device() else {
        return call();
    };
    match target_of_device(device) {
        Target::Unlimited => call(),
        Target::Refused => CUDA_ERROR_OUT_OF_MEMORY,
        Target::Limited(card) => match current_pool(device) {
            // SAFETY: called only after the allocation succeeded.
            Some(pool) => allocate(card, pool, bytes, call, || unsafe {
                free_again(pointer, stream);
            }),
            None => call(),
        },
    }
}

pub(crate) unsafe fn alloc_from_pool_async(
    original: cuMemAllocFromPoolAsync::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pointer, bytes, pool, stream) };
    // A pool's own card is known from its making; others belong to the card that they are used on, or the host.
    let process = Process::get();
    let known = process.and_then(|process| Some((process, process.pools.get(key_of(pool))?)));
    let target = match known {
        Some((process, held)) => {
            Card::at(process, held.card).map_or(Target::Unlimited, Target::Limited)
        }
        None => match target_of_current_context() {
            Target::Limited(card) if is_hosts(pool) => {
                know_hosts(card.process(), pool);
                Target::Unlimited
            }
            target => target,
        },
    };
    match target {
        Target::Unlimited => call(),
        Target::Refused => CUDA_ERROR_OUT_OF_MEMORY,
        // SAFETY: called only after the allocation succeeded.
        Target::Limited(card) => allocate(card, pool, bytes, call, || unsafe {
            free_again(pointer, stream);
        }),
    }
}

/// What is freed stays in its pool; a plain allocation may be freed this way too.
pub(crate) unsafe fn free_async(
    original: cuMemFreeAsync::Function,
    pointer: CUdeviceptr,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    free_linear(pointer, || unsafe { original(pointer, stream) })
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
    let location = properties.location;
    // SAFETY: the driver has written the pool.
    let pool = unsafe { pool.read() };
    let number = |value: c_int| u64::try_from(value).unwrap_or(0);
    if location.r#type == CU_MEM_LOCATION_TYPE_DEVICE {
        if let Target::Limited(card) = target_of_device(location.id) {
            settle(card, pool, 0);
        }
    } else if let Some(process) = Process::get()
        && is_host(number(location.r#type), number(properties.allocType))
    {
        know_hosts(process, pool);
    }
    result
}

/// The memory of a destroyed pool lives on as long as something allocated from it does; that much stays charged.
pub(crate) unsafe fn destroy(original: cuMemPoolDestroy::Function, pool: CUmemoryPool) -> CUresult {
    let in_use = attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT).unwrap_or(0);
    // SAFETY: the caller's arguments.
    let result = unsafe { original(pool) };
    let process = Process::get().filter(|_| result == CUDA_SUCCESS);
    if let Some(process) = process {
        let _guard = process.pool_guard();
        if let Some(held) = process.pools.remove(key_of(pool))
            && let Some(card) = Card::at(process, held.card)
        {
            card.release(held.bytes.saturating_sub(in_use));
        }
    }
    result
}
