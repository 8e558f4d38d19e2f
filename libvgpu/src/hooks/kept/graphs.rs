//! What the driver keeps per device for the graphs of the process.
//!
//! Invariant: a device's charge for graphs is what its pool said last, but for what launches under way have reserved.
//! Between launches it can only have shrunk.

use core::ffi::{c_uint, c_void};
use core::ptr::NonNull;

use crate::card::Card;
use crate::cuda::{CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, CUDA_SUCCESS, CUdevice, CUresult};
use crate::driver::{Library, Original};

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

/// Notes that a graph is about to be launched that has reserved so much for what it may need.
pub(crate) fn expect(card: Card, device: CUdevice, ahead_bytes: u64) {
    let process = card.process();
    let _guard = process.pool_guard();
    super::expect(card, &process.graph_pools, key_of(device), ahead_bytes);
}

/// Makes the device's charge for graphs what the pool says, after a launch that had reserved `ahead_bytes` for its growth.
pub(crate) fn settle(card: Card, device: CUdevice, ahead_bytes: u64) {
    let process = card.process();
    let _guard = process.pool_guard();
    let (kept, key) = (&process.graph_pools, key_of(device));
    super::settle(card, kept, key, ahead_bytes, reserved(device));
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
