//! Graph memory that libcuda caches per device.
//!
//! Launches of one executable graph are serialized, in all streams, so a graph needs its memory once: the cache
//! never exceeds the total need of all graphs ever launched. A launch reserves only the part that is missing to
//! that total; the present charge covers the rest. If the cache exceeds the total nevertheless, the bound is
//! dropped.
//!
//! Invariant: the charge for a device is the last reported size of its cache, apart from the reservations of
//! launches in flight. Between launches the cache can only shrink.

use core::ffi::{c_uint, c_void};

use crate::accounts::cache_charge::CacheCharge;
use crate::accounts::records::{GraphNeed, TotalNeed};
use crate::driver_api::cuda::{
    CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, CUDA_SUCCESS, CUdevice, CUresult,
};
use crate::driver_api::driver::{Library, Original};
use crate::limits::gpu::Gpu;
use crate::process::Process;

static GET_ATTRIBUTE: Original<GetAttribute> =
    Original::new(Library::Cuda, c"cuDeviceGetGraphMemAttribute");
static TRIM: Original<Trim> = Original::new(Library::Cuda, c"cuDeviceGraphMemTrim");

type GetAttribute = unsafe extern "C" fn(CUdevice, c_uint, *mut c_void) -> CUresult;
type Trim = unsafe extern "C" fn(CUdevice) -> CUresult;

/// Returns the reserved size of a device's graph memory.
fn reserved(device: CUdevice) -> Option<u64> {
    let get = GET_ATTRIBUTE.get()?;
    let mut bytes = 0u64;
    // SAFETY: the attribute is 64 bits wide.
    let result = unsafe {
        get(
            device,
            CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
            (&raw mut bytes).cast(),
        )
    };
    (result == CUDA_SUCCESS).then_some(bytes)
}

fn trim(device: CUdevice) {
    if let Some(trim) = TRIM.get() {
        // SAFETY: trims only unused memory.
        unsafe { trim(device) };
    }
}

fn key_of(device: CUdevice) -> u64 {
    u64::from(device.cast_unsigned())
}

/// Larger than any GPU, and the largest value of a charge.
const UNBOUNDED: u64 = (1 << 48) - 1;

/// Returns the bound of the cache: the total need of all graphs ever launched, or [`UNBOUNDED`] after the cache
/// exceeded it.
fn max_bytes(process: &Process, device: CUdevice) -> u64 {
    let known = process.graph_needs.get(key_of(device));
    known.map_or(UNBOUNDED, |TotalNeed(bytes)| bytes)
}

/// Adds the need of an executable graph to the total, once. The caller holds the guard of the caches. A destroyed
/// graph stays counted: its memory may still be cached.
fn add_need(process: &Process, exec: u64) {
    let counted = |need: &GraphNeed| {
        Some(GraphNeed {
            is_counted: true,
            ..*need
        })
    };
    let before = process.graphs.change(exec, counted);
    let Some(new) = before.filter(|need| !need.is_counted) else {
        return;
    };
    let (needs, key) = (&process.graph_needs, key_of(new.device));
    let more = |bytes: u64| TotalNeed(bytes.saturating_add(new.bytes).min(UNBOUNDED));
    let added = needs.change(key, |TotalNeed(bytes)| Some(more(*bytes)));
    if added.is_none() {
        needs.insert(key, more(0));
    }
}

/// Records that an executable graph was uploaded at instantiation.
pub(crate) fn record_upload(process: &Process, exec: u64) {
    let _guard = process.pool_guard();
    add_need(process, exec);
}

/// Covers the need of a launch with the present charge, as far as the bound of the cache allows, and returns the
/// covered bytes.
pub(crate) fn reuse_charge(gpu: Gpu, device: CUdevice, exec: u64, need_bytes: u64) -> u64 {
    let process = Process::of(gpu);
    let _guard = process.pool_guard();
    add_need(process, exec);
    let (mut reused, most) = (0, max_bytes(process, device));
    process.graph_pools.change(key_of(device), |cache| {
        let growth;
        (growth, reused) = CacheCharge::of(cache).reuse_charge(need_bytes, most);
        Some(growth.on(cache.gpu))
    });
    reused
}

/// Adds the reservation of a launch in flight.
pub(crate) fn add_reservation(gpu: Gpu, device: CUdevice, reserved_bytes: u64) {
    let process = Process::of(gpu);
    let _guard = process.pool_guard();
    super::add_reservation(gpu, &process.graph_pools, key_of(device), reserved_bytes);
}

/// Sets the device's charge to the reported size, after a launch with `reserved_bytes` reserved or reused. Without a
/// report, `grown_bytes` of them stay charged.
pub(crate) fn settle(gpu: Gpu, device: CUdevice, reserved_bytes: u64, grown_bytes: u64) {
    let process = Process::of(gpu);
    let (caches, key) = (&process.graph_pools, key_of(device));
    let report = super::query(process, || reserved(device));
    let _guard = process.pool_guard();
    let has_bytes = super::latest_bytes(process, key, report);
    if has_bytes.is_some_and(|bytes| bytes > max_bytes(process, device)) {
        process
            .graph_needs
            .change(key, |_| Some(TotalNeed(UNBOUNDED)));
    }
    super::settle(gpu, caches, key, reserved_bytes, grown_bytes, has_bytes);
}

fn for_each_pool(gpu: Gpu, each: impl Fn(CUdevice)) {
    Process::of(gpu).graph_pools.for_each(|key, cache| {
        if cache.gpu == gpu.index() && cache.charged_bytes != 0 {
            each(CUdevice::try_from(key).unwrap_or(0));
        }
    });
}

/// Updates the charges after libcuda returned graph memory to the GPU.
pub(super) fn refresh(gpu: Gpu) {
    for_each_pool(gpu, |device| settle(gpu, device, 0, 0));
}

/// Trims the graph memory. Returns `false` if the GPU has none.
pub(super) fn trim_all(gpu: Gpu) -> bool {
    let mut has_any = false;
    Process::of(gpu)
        .graph_pools
        .for_each(|_, cache| has_any |= cache.gpu == gpu.index());
    if has_any {
        for_each_pool(gpu, |device| {
            trim(device);
            settle(gpu, device, 0, 0);
        });
    }
    has_any
}
