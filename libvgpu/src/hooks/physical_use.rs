//! The GPU's used memory as libcuda reports it, compared with the share's account.

use core::ffi::c_int;

use crate::card::Card;
use crate::cuda::{CUDA_SUCCESS, CUcontext, CUdevice, CUresult};
use crate::driver::{Library, Original};
use crate::functions::cuMemGetInfo_v2;

static GET_ATTRIBUTE: Original<GetAttribute> =
    Original::new(Library::Cuda, c"cuDeviceGetAttribute");
static PUSH: Original<Push> = Original::new(Library::Cuda, c"cuCtxPushCurrent_v2");
type Push = unsafe extern "C" fn(CUcontext) -> CUresult;
static POP: Original<Pop> = Original::new(Library::Cuda, c"cuCtxPopCurrent_v2");
type Pop = unsafe extern "C" fn(*mut CUcontext) -> CUresult;
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, CUdevice) -> CUresult;

/// Returns a `CU_DEVICE_ATTRIBUTE_*`.
pub(crate) fn attribute(device: CUdevice, attribute: c_int) -> Option<u64> {
    let get = GET_ATTRIBUTE.get()?;
    let mut value = 0;
    // SAFETY: writes one number.
    let result = unsafe { get(&raw mut value, attribute, device) };
    u64::try_from(value).ok().filter(|_| result == CUDA_SUCCESS)
}

/// Readings of used memory before it is unknown, because the account keeps changing.
const MAX_READINGS: u32 = 8;

/// Returns the used memory of the current context's GPU that the share's account does not contain: that of other
/// tenants, and that of libcuda as far as it is not charged. Negative if less is used than charged: managed memory is
/// charged before a GPU uses it.
///
/// `None` if libcuda does not report it, or the account changed during each reading.
pub(crate) fn uncounted_bytes(card: Card) -> Option<i128> {
    for _ in 0..MAX_READINGS {
        let counted = card.counted_bytes();
        let used = used_bytes()?;
        if card.counted_bytes() == counted {
            return Some(i128::from(used).saturating_sub(i128::from(counted)));
        }
    }
    None
}

/// Returns how much [`uncounted_bytes`] has grown.
pub(crate) fn growth(before: i128, after: i128) -> u64 {
    u64::try_from(after.saturating_sub(before)).unwrap_or(0)
}

/// Makes `calls` with `context` current; `None` if it cannot be made current.
pub(crate) fn with_context<T>(context: CUcontext, calls: impl FnOnce() -> T) -> Option<T> {
    let (push, pop) = (PUSH.get()?, POP.get()?);
    // SAFETY: the caller's context, which has not ended.
    if unsafe { push(context) } != CUDA_SUCCESS {
        return None;
    }
    let value = calls();
    let mut popped = core::ptr::null_mut();
    // SAFETY: pops the pushed context and writes it.
    unsafe { pop(&raw mut popped) };
    Some(value)
}

/// Returns the used memory of the current context's GPU.
fn used_bytes() -> Option<u64> {
    let get = cuMemGetInfo_v2::ORIGINAL.get()?;
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: writes two sizes.
    let result = unsafe { get(&raw mut free, &raw mut total) };
    let used = (total as u64).saturating_sub(free as u64);
    (result == CUDA_SUCCESS).then_some(used)
}

/// Returns the memory of a context that was created and is charged `estimate` bytes: what the GPU's used memory
/// shows beyond the rest of the account, if that is near the estimate. Other tenants' memory makes it far larger,
/// because each of them has a context; unused managed memory and the requests of other processes in flight, which are
/// charged already, make it smaller. So two equal readings count, and a much smaller one does not.
pub(crate) fn measured_context(card: Card, context: CUcontext, estimate: u64) -> Option<u64> {
    let (first, second) = with_context(context, || (uncounted_bytes(card), uncounted_bytes(card)))?;
    let uncounted = first.filter(|_| first == second)?;
    let measured = u64::try_from(uncounted.saturating_add(i128::from(estimate))).ok()?;
    let least = estimate.saturating_sub(estimate / 8);
    let most = estimate.saturating_add(estimate / 2);
    (least..=most).contains(&measured).then_some(measured)
}
