//! Sparse arrays: they have no memory but what is mapped to parts of them, and physical memory lives until it is mapped
//! nowhere any more. So what is mapped to an array counts as what is mapped to an address does.
//!
//! A part that is unmapped, or gets other memory, as it was mapped is known; of any other, the memory stays charged until
//! the array is gone. The driver works in the stream's order; what it unmaps is given back when it is told to.

use core::ffi::c_uint;

use crate::cuda::{
    CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL, CU_MEM_OPERATION_TYPE_MAP, CUDA_SUCCESS,
    CUarrayMapInfo, CUresult, CUstream,
};
use crate::held::Held;
use crate::hooks::vmm;
use crate::process::Process;
use crate::table::cuMemMapArrayAsync;

/// As much of an array's handle as a charge has room for.
fn short(array: u64) -> u64 {
    array & 0xffff_ffff_ffff
}

/// Which part of which array, as a key.
fn part_of(operation: &CUarrayMapInfo) -> u64 {
    let mix = |key: u64, number: u32| {
        (key ^ u64::from(number))
            .rotate_left(23)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    let numbers = operation.subresource.iter().enumerate();
    let is_level = operation.subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL;
    numbers
        // A part of the tail of a mipmapped array: a layer, padding, offset and size.
        .filter(|(index, _)| is_level || !matches!(index, 1 | 6..))
        .fold(
            mix(operation.resource, operation.subresourceType),
            |key, (_, number)| mix(key, *number),
        )
}

fn drop_part(process: &'static Process, part: u64) {
    if let Some(mapping) = process.array_mappings.remove(part) {
        vmm::drop_mapping(process, mapping.context);
    }
}

/// The array is gone, and with it what was mapped to it.
pub(crate) fn forget(process: &'static Process, array: u64) {
    let ends = |held: &Held| held.bytes == short(array);
    process.array_mappings.remove_all(ends, |_, mapping| {
        vmm::drop_mapping(process, mapping.context);
    });
}

pub(crate) unsafe fn map(
    original: cuMemMapArrayAsync::Function,
    operations: *mut CUarrayMapInfo,
    count: c_uint,
    stream: CUstream,
) -> CUresult {
    let Some(process) = Process::get() else {
        // SAFETY: the caller's arguments.
        return unsafe { original(operations, count, stream) };
    };
    let count_of_them = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller's list, if there is one.
    let operation = |index: usize| unsafe { operations.wrapping_add(index).as_ref() };
    let list = || (0..count_of_them).map_while(operation);
    let maps = |operation: &CUarrayMapInfo| operation.memOperationType == CU_MEM_OPERATION_TYPE_MAP;
    // Before the driver is asked, or another thread could release the memory unseen.
    for operation in list().filter(|operation| maps(operation)) {
        vmm::add_mapping(process, operation.memHandle);
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { original(operations, count, stream) };
    for operation in list() {
        if result != CUDA_SUCCESS {
            if maps(operation) {
                vmm::drop_mapping(process, operation.memHandle);
            }
            continue;
        }
        let part = part_of(operation);
        drop_part(process, part);
        // Other memory is not the share's.
        if maps(operation) && process.physical.get(operation.memHandle).is_some() {
            let mapping = Held {
                bytes: short(operation.resource),
                card: u8::MAX,
                context: operation.memHandle,
            };
            process.array_mappings.insert(part, mapping);
        }
    }
    result
}
