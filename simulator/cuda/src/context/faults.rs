//! Sticky errors: after a kernel has failed, every call in its context fails until the context ends. Those of an MPS client fail
//! until the process ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::current;
use crate::abi::CudaResult;
use crate::driver::require_healthy;
use crate::error::CudaError;
use crate::types::CUcontext;

/// Contexts with their errors. Locked last, since calls check it with the state locked and unlocked.
static FAULTS: Mutex<Vec<(CUcontext, CudaError)>> = Mutex::new(Vec::new());
/// Whether there are any.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Functions that work in a context with an error, by the beginnings of their names: those about devices, threads and
/// the context's end.
const USABLE: [&str; 10] = [
    "cuInit",
    "cuGet",
    "cuDriverGet",
    "cuDevice",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPush",
    "cuCtxPop",
    "cuCtxGetDevice",
    "cuCtxDestroy",
];

fn faults() -> MutexGuard<'static, Vec<(CUcontext, CudaError)>> {
    FAULTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records that a kernel of a context has failed.
pub(crate) fn fail(context: CUcontext, error: CudaError) {
    faults().push((context, error));
    IS_ANY.store(true, Ordering::Release);
}

/// Drops the errors of a context that ends.
pub(super) fn forget(context: CUcontext) {
    faults().retain(|(failed, _)| *failed != context);
}

/// Errors if `function` cannot be called in the current context because a kernel has failed.
pub(crate) fn require_usable(function: &str) -> CudaResult {
    let is_usable = || USABLE.iter().any(|usable| function.starts_with(usable));
    let healthy = require_healthy();
    if healthy.is_err() && !is_usable() {
        return healthy;
    }
    if !IS_ANY.load(Ordering::Acquire) || is_usable() {
        return Ok(());
    }
    let Some(owner) = current::owner() else {
        return Ok(());
    };
    let faults = faults();
    let fault = faults.iter().find(|(failed, _)| *failed == owner);
    fault.map_or(Ok(()), |(_, error)| Err(*error))
}
