//! Which stream memory was freed in.
//!
//! A handle tells streams apart only as long as they live, and the default streams have handles that mean another stream
//! in each context, or in each thread.

use core::ptr::{self, NonNull};

use crate::card::current_context;
use crate::cuda::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUDA_SUCCESS, CUresult, CUstream};
use crate::driver::{Library, Original};
use crate::{meter, sys};

/// Marks of keys that are made from something else than a handle, whose addresses are below.
const LEGACY: u64 = 1 << 63;
const PER_THREAD: u64 = 1 << 62;
/// Where the number of a thread stands, of which Linux has fewer than 2²².
const THREAD_SHIFT: u32 = 40;

static QUERY: Original = Original::new(Library::Cuda, c"cuStreamQuery");
type Query = unsafe extern "C" fn(CUstream) -> CUresult;

/// What tells this stream of this thread from others; `None` without a context.
pub(super) fn key_of(stream: CUstream) -> Option<u64> {
    if stream.is_null() || stream == CU_STREAM_LEGACY {
        return Some(LEGACY | current_context()?);
    }
    if stream == CU_STREAM_PER_THREAD {
        let thread = u64::from(sys::thread_id()).wrapping_shl(THREAD_SHIFT);
        return Some(PER_THREAD | (current_context()? ^ thread));
    }
    Some(stream.expose_provenance() as u64)
}

/// Whether a stream has done everything that it was told to. Not asked of default streams, which have no handle of
/// their own, nor while anything is being captured, which the question would spoil.
pub(super) fn has_passed(key: u64) -> bool {
    if key & (LEGACY | PER_THREAD) != 0 {
        return false;
    }
    let (Some(query), Ok(address)) = (QUERY.address(), usize::try_from(key)) else {
        return false;
    };
    // SAFETY: the signature of `cuStreamQuery`.
    let query = unsafe { core::mem::transmute::<NonNull<_>, Query>(query) };
    let stream = ptr::with_exposed_provenance_mut(address);
    // SAFETY: a stream that was used and has not been destroyed: `pool::forget_stream`.
    meter::while_nothing_is_captured(|| unsafe { query(stream) }) == Some(CUDA_SUCCESS)
}
