//! Free by pointer: one function for all kinds of allocations.

use crate::driver_api::cuda::{CUdeviceptr, CUdeviceptr_v1, CUresult, CUstream};
use crate::driver_api::functions::{cuMemFree, cuMemFree_v2, cuMemFreeAsync};
use crate::hooks::memory::free_linear;
use crate::hooks::metering::NullStream;
use crate::hooks::pool;
use crate::hooks::shared_memory::{self, blocks_around};
use crate::process::Process;

fn free(
    pointer: CUdeviceptr,
    stream: Option<CUstream>,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let charge = process.pointers.get(pointer);
    let is_from_pool = charge.is_none() && pool::is_from_pool(process, pointer);
    let chunk = || match charge {
        Some(charge) => Some((charge.gpu, blocks_around(pointer, charge.bytes))),
        None => process.pool_free_space.chunk_of(pointer),
    };
    shared_memory::free_exported(process, pointer, chunk, || {
        if is_from_pool {
            pool::free(process, pointer, stream, call)
        } else {
            free_linear(pointer, call)
        }
    })
}

pub(crate) unsafe fn now(original: cuMemFree_v2::Function, pointer: CUdeviceptr) -> CUresult {
    // SAFETY: the caller's arguments.
    free(pointer, None, || unsafe { original(pointer) })
}

pub(crate) unsafe fn now_v1(original: cuMemFree::Function, pointer: CUdeviceptr_v1) -> CUresult {
    // SAFETY: the caller's arguments.
    free(u64::from(pointer), None, || unsafe { original(pointer) })
}

pub(crate) unsafe fn in_order<S: NullStream>(
    original: cuMemFreeAsync::Function,
    pointer: CUdeviceptr,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pointer, stream) };
    free(pointer, Some(S::resolve(stream)), call)
}
