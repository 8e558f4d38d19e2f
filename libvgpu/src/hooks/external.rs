//! External memory, exported by a graphics API or another process and held by an object of this process.
//!
//! An import is charged unless the memory belongs to the same share; see [`crate::limits::imports`].

use crate::accounts::blocks::BLOCK;
use crate::accounts::charge_map::Charge;
use crate::current::{Target, target_of_current_context};
use crate::driver_api::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_EXTERNAL_MEMORY_HANDLE_DESC, CUDA_SUCCESS, CUexternalMemory,
    CUresult,
};
use crate::driver_api::functions::{cuDestroyExternalMemory, cuImportExternalMemory};
use crate::hooks::driver_cache::reserve_with;
use crate::hooks::memory::free_charged;
use crate::process::Process;

pub(crate) unsafe fn import(
    original: cuImportExternalMemory::Function,
    external: *mut CUexternalMemory,
    description: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(external, description) };
    let gpu = match target_of_current_context() {
        Target::Unlimited => return call(),
        Target::Denied => return CUDA_ERROR_OUT_OF_MEMORY,
        Target::Limited(gpu) => gpu,
    };
    // SAFETY: null, which libcuda rejects, or the caller's description.
    let size = unsafe { description.as_ref() }.map_or(0, |description| description.size);
    let bytes = size.checked_next_multiple_of(BLOCK).unwrap_or(size);
    if !reserve_with(gpu, bytes, || gpu.import(bytes).is_ok()) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let result = call();
    if result == CUDA_SUCCESS {
        let charge = Charge {
            bytes,
            gpu: gpu.index(),
            context: 0,
        };
        // SAFETY: libcuda has written the object.
        let key = unsafe { external.read() }.expose_provenance() as u64;
        Process::of(gpu).externals.insert(key, charge);
    } else {
        gpu.end_import(bytes);
    }
    result
}

pub(crate) unsafe fn destroy(
    original: cuDestroyExternalMemory::Function,
    external: CUexternalMemory,
) -> CUresult {
    free_charged(
        |process| &process.externals,
        external.expose_provenance() as u64,
        // SAFETY: the caller's arguments.
        || unsafe { original(external) },
        |process, _, charge| {
            if let Some(gpu) = process.gpu(charge.gpu) {
                gpu.end_import(charge.bytes);
            }
        },
    )
}
