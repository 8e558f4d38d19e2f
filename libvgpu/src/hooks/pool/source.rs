//! Which card the memory of a pool is taken from, and which pool that of a stream.
//!
//! A pool's own card counts, and a stream takes from the current pool of its own: neither need be the card of the current
//! context.

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

use super::streams;
use crate::card::{Card, Target, target_of_current_context, target_of_device};
use crate::charge_map::Charge;
use crate::cuda::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST,
    CU_MEM_LOCATION_TYPES_OF_HOST, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, CU_MEMPOOL_ATTR_LOCATION_ID,
    CU_MEMPOOL_ATTR_LOCATION_TYPE, CUDA_SUCCESS, CUdevice, CUmemLocation, CUmemPoolProps,
    CUmemoryPool, CUresult, CUstream,
};
use crate::driver::{Library, Original};
use crate::hooks::driver_cache::pools::{attribute, key_of, settle};
use crate::process::Process;

static GET_COUNT: Original = Original::new(Library::Cuda, c"cuDeviceGetCount");
static GET_POOL: Original = Original::new(Library::Cuda, c"cuDeviceGetMemPool");
static GET_DEFAULT_POOL: Original = Original::new(Library::Cuda, c"cuDeviceGetDefaultMemPool");
static GET_DEFAULT_FOR: Original = Original::new(Library::Cuda, c"cuMemGetDefaultMemPool");
static GET_FOR: Original = Original::new(Library::Cuda, c"cuMemGetMemPool");

type GetCount = unsafe extern "C" fn(*mut c_int) -> CUresult;
type GetPool = unsafe extern "C" fn(*mut CUmemoryPool, CUdevice) -> CUresult;
type GetPoolFor = unsafe extern "C" fn(*mut CUmemoryPool, *mut CUmemLocation, c_int) -> CUresult;

/// Where an allocation comes from.
#[derive(Clone, Copy)]
pub(super) enum AllocationSource {
    /// Memory that none counts.
    Uncounted,
    /// A card of which nothing may be taken.
    Refused,
    /// A pool of a limited card.
    Pool(Card, CUmemoryPool),
}

impl AllocationSource {
    /// What `cuMemAllocAsync` takes from. Without a context the driver refuses by itself.
    pub(super) fn of_stream(stream: CUstream) -> Self {
        let Some(device) = streams::device_of(stream) else {
            return Self::Uncounted;
        };
        match target_of_device(device) {
            Target::Unlimited => Self::Uncounted,
            Target::Denied => Self::Refused,
            Target::Limited(card) => {
                pool_of(&GET_POOL, device).map_or(Self::Uncounted, |pool| Self::Pool(card, pool))
            }
        }
    }

    /// What is taken from that pool.
    pub(super) fn of_pool(pool: CUmemoryPool) -> Self {
        let Some(process) = Process::get() else {
            return Self::Refused;
        };
        if let Some(held) = process.pools.get(key_of(pool)) {
            return Card::at(process, held.card)
                .map_or(Self::Uncounted, |card| Self::Pool(card, pool));
        }
        match target_of(pool) {
            Target::Limited(card) => Self::Pool(card, pool),
            Target::Denied => Self::Refused,
            Target::Unlimited => {
                record_uncounted(process, pool);
                Self::Uncounted
            }
        }
    }
}

/// Remembers where a pool that was made just now takes memory.
pub(super) fn record(pool: CUmemoryPool, properties: &CUmemPoolProps) {
    let Some(process) = Process::get() else {
        return;
    };
    let location = properties.location;
    let number = |value: c_int| u64::try_from(value).unwrap_or(0);
    if location.r#type == CU_MEM_LOCATION_TYPE_DEVICE {
        match target_of_device(location.id) {
            Target::Limited(card) => {
                settle(card, pool, 0);
            }
            Target::Unlimited => record_uncounted(process, pool),
            Target::Denied => {}
        }
    } else if is_host(number(location.r#type), number(properties.allocType)) {
        record_uncounted(process, pool);
    }
}

/// Remembers that a pool takes nothing that is counted.
fn record_uncounted(process: &Process, pool: CUmemoryPool) {
    let held = Charge {
        bytes: 0,
        card: u8::MAX,
        context: 0,
    };
    let _guard = process.pool_guard();
    // Of another one that is gone.
    process.pools.remove(key_of(pool));
    process.pools.insert(key_of(pool), held);
}

/// What applies to the memory of a pool that this process has not made. Since CUDA 13.2 pools say where they are; before,
/// those that are there from the start are known by asking for them, and any other is taken to be the current card's.
fn target_of(pool: CUmemoryPool) -> Target {
    let location = attribute(pool, CU_MEMPOOL_ATTR_LOCATION_TYPE);
    let r#type = attribute(pool, CU_MEMPOOL_ATTR_ALLOCATION_TYPE);
    if let (Some(location), Some(r#type)) = (location, r#type) {
        if is_host(location, r#type) {
            return Target::Unlimited;
        }
        let id = attribute(pool, CU_MEMPOOL_ATTR_LOCATION_ID);
        let is_on_card = c_int::try_from(location) == Ok(CU_MEM_LOCATION_TYPE_DEVICE);
        return match id.and_then(|id| CUdevice::try_from(id).ok()) {
            Some(device) if is_on_card => target_of_device(device),
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
    (0..device_count())
        .find(is_of)
        .map_or_else(target_of_current_context, target_of_device)
}

fn device_count() -> c_int {
    let Some(get) = GET_COUNT.address() else {
        return 0;
    };
    // SAFETY: the signature of `cuDeviceGetCount`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetCount>(get) };
    let mut count = 0;
    // SAFETY: writes one number.
    let result = unsafe { get(&raw mut count) };
    if result == CUDA_SUCCESS { count } else { 0 }
}

/// A pool of a device, as one of two functions knows it.
fn pool_of(get: &'static Original, device: CUdevice) -> Option<CUmemoryPool> {
    let get = get.address()?;
    // SAFETY: the signature of `cuDeviceGetMemPool` and `cuDeviceGetDefaultMemPool`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetPool>(get) };
    let mut pool = core::ptr::null_mut();
    // SAFETY: writes one pool.
    let result = unsafe { get(&raw mut pool, device) };
    (result == CUDA_SUCCESS).then_some(pool)
}

/// Whether a location and a `CUmemAllocationType` mean pinned memory of the host, which takes nothing of a card.
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
