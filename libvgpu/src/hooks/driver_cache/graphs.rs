//! What the driver keeps per device for the graphs of the process.
//!
//! Launches of one executable graph come after each other, however many streams they are in, so a graph needs its memory
//! once: the driver never has more than all graphs together that were ever launched. A launch reserves no more than what is
//! missing to that; for the rest, what is charged already serves it. Should a driver have more nevertheless, this is not
//! relied on any more.
//!
//! Invariant: a device's charge for graphs is what its pool said last, but for what launches under way have reserved.
//! Between launches it can only have shrunk.

use core::ffi::{c_uint, c_void};
use core::ptr::NonNull;

use crate::cache_charge::CacheCharge;
use crate::card::Card;
use crate::charge_map::Charge;
use crate::cuda::{CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, CUDA_SUCCESS, CUdevice, CUresult};
use crate::driver::{Library, Original};
use crate::process::Process;

static GET_ATTRIBUTE: Original = Original::new(Library::Cuda, c"cuDeviceGetGraphMemAttribute");
static TRIM: Original = Original::new(Library::Cuda, c"cuDeviceGraphMemTrim");

type GetAttribute = unsafe extern "C" fn(CUdevice, c_uint, *mut c_void) -> CUresult;
type Trim = unsafe extern "C" fn(CUdevice) -> CUresult;

/// What the driver's pool for graphs has reserved on a device.
fn reserved(device: CUdevice) -> Option<u64> {
    let get = GET_ATTRIBUTE.address()?;
    // SAFETY: the signature of `cuDeviceGetGraphMemAttribute`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetAttribute>(get) };
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
    if let Some(trim) = TRIM.address() {
        // SAFETY: the signature of `cuDeviceGraphMemTrim`.
        let trim = unsafe { core::mem::transmute::<NonNull<c_void>, Trim>(trim) };
        // SAFETY: gives back what no graph uses.
        unsafe { trim(device) };
    }
}

fn key_of(device: CUdevice) -> u64 {
    u64::from(device.cast_unsigned())
}

/// In the place of a context: the graph has not been launched yet.
const NOT_LAUNCHED: u64 = 1 << 32;

/// What is remembered of an executable graph that may need so much, of which nothing was launched or uploaded yet.
pub(crate) fn new_charge(card: Card, device: CUdevice, need_bytes: u64) -> Charge {
    Charge {
        bytes: need_bytes,
        card: card.index(),
        context: key_of(device) | NOT_LAUNCHED,
    }
}

/// The device of an executable graph.
pub(crate) fn device_of(held: &Charge) -> CUdevice {
    CUdevice::try_from(held.context & !NOT_LAUNCHED).unwrap_or(0)
}

/// More than any card has, and as much as is remembered.
const UNBOUNDED: u64 = (1 << 48) - 1;

/// What the driver may have at most: what all graphs together need that were ever launched, or [`UNBOUNDED`] if it has had
/// more.
fn max_bytes(process: &Process, device: CUdevice) -> u64 {
    let known = process.graph_needs.get(key_of(device));
    known.map_or(UNBOUNDED, |held| held.bytes)
}

/// Counts in what an executable graph needs, unless it was already. The caller holds the guard of what is kept. What is
/// gone stays counted: its memory may still be there.
fn add_need(process: &Process, exec: u64) {
    let launched = |held: &Charge| Charge {
        context: held.context & !NOT_LAUNCHED,
        ..*held
    };
    let before = process.graphs.change(exec, |held| Some(launched(held)));
    let Some(new) = before.filter(|held| held.context & NOT_LAUNCHED != 0) else {
        return;
    };
    let (needs, key) = (&process.graph_needs, new.context & !NOT_LAUNCHED);
    let more = |bytes: u64| Charge {
        bytes: bytes.saturating_add(new.bytes).min(UNBOUNDED),
        ..launched(&new)
    };
    if needs.change(key, |held| Some(more(held.bytes))).is_none() {
        needs.insert(key, more(0));
    }
}

/// Notes that an executable graph was uploaded as it was made.
pub(crate) fn record_upload(process: &Process, exec: u64) {
    let _guard = process.pool_guard();
    add_need(process, exec);
}

/// Has a launch of an executable graph that may need so much use what is charged, as far as it can without the driver
/// having more in the end. Returns that.
pub(crate) fn reuse_charge(card: Card, device: CUdevice, exec: u64, need_bytes: u64) -> u64 {
    let process = card.process();
    let _guard = process.pool_guard();
    add_need(process, exec);
    let (mut reused, most) = (0, max_bytes(process, device));
    process.graph_pools.change(key_of(device), |held| {
        let growth;
        (growth, reused) = CacheCharge::of(held).reuse_charge(need_bytes, most);
        Some(growth.to_charge(held.card))
    });
    reused
}

/// Notes that a graph is about to be launched that has reserved so much for what it may need.
pub(crate) fn add_reservation(card: Card, device: CUdevice, reserved_bytes: u64) {
    let process = card.process();
    let _guard = process.pool_guard();
    super::add_reservation(card, &process.graph_pools, key_of(device), reserved_bytes);
}

/// Makes the device's charge for graphs what the pool says, after a launch that had reserved `reserved_bytes` for its growth,
/// or was reused so much.
pub(crate) fn settle(card: Card, device: CUdevice, reserved_bytes: u64) {
    let process = card.process();
    let _guard = process.pool_guard();
    let (caches, key) = (&process.graph_pools, key_of(device));
    let has_bytes = reserved(device);
    if has_bytes.is_some_and(|bytes| bytes > max_bytes(process, device)) {
        process.graph_needs.change(key, |held| {
            Some(Charge {
                bytes: UNBOUNDED,
                ..*held
            })
        });
    }
    super::settle(card, caches, key, reserved_bytes, has_bytes);
}

fn for_each_pool(card: Card, each: impl Fn(CUdevice)) {
    card.process().graph_pools.for_each(|key, held| {
        if held.card == card.index() && held.bytes != 0 {
            each(CUdevice::try_from(key).unwrap_or(0));
        }
    });
}

/// Notes what the driver's pools for graphs have given back meanwhile.
pub(super) fn refresh(card: Card) {
    for_each_pool(card, |device| settle(card, device, 0));
}

/// Makes the driver's pools for graphs give back what they do not use. `false` if there are none on that card.
pub(super) fn trim_all(card: Card) -> bool {
    let mut has_any = false;
    card.process()
        .graph_pools
        .for_each(|_, held| has_any |= held.card == card.index());
    if has_any {
        for_each_pool(card, |device| {
            trim(device);
            settle(card, device, 0);
        });
    }
    has_any
}
