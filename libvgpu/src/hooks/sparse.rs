//! Sparse arrays: their only memory is mapped physical memory, which lives until its last mapping is gone. So a
//! mapping to an array counts as a mapping to an address; see [`crate::hooks::physical`].
//!
//! A mapping is removed when the same part is unmapped or mapped again; otherwise its memory stays charged until
//! the array is destroyed. libcuda unmaps in stream order; the charge is released when the call returns.

use core::ffi::{c_uint, c_void};
use core::mem::MaybeUninit;
use core::ptr;

use crate::accounts::records::Binding;
use crate::driver_api::cuda::{
    CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL, CU_MEM_OPERATION_TYPE_MAP,
    CU_RESOURCE_TYPE_ARRAY, CUDA_ARRAY_SPARSE_PROPERTIES, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS,
    CUarrayMapInfo, CUmemGenericAllocationHandle, CUresult, CUstream,
};
use crate::driver_api::driver::{Library, Original};
use crate::driver_api::functions::cuMemMapArrayAsync;
use crate::hooks::physical::{self, Denied, DroppedReference};
use crate::process::Process;
use crate::system::temporary_list::TemporaryList;

/// Size of a tile, whatever its extent.
const TILE: u64 = 64 << 10;

static OF_ARRAY: Original<GetProperties> =
    Original::new(Library::Cuda, c"cuArrayGetSparseProperties");
static OF_MIPMAPPED: Original<GetProperties> =
    Original::new(Library::Cuda, c"cuMipmappedArrayGetSparseProperties");
type GetProperties =
    unsafe extern "C" fn(*mut CUDA_ARRAY_SPARSE_PROPERTIES, *mut c_void) -> CUresult;

impl CUarrayMapInfo {
    fn maps(&self) -> bool {
        self.memOperationType == CU_MEM_OPERATION_TYPE_MAP
    }

    /// Returns the end of the used range of the memory.
    fn end_in_memory(&self) -> u64 {
        let [_, _, _, _, low, high, ..] = self.subresource;
        let bytes = if self.subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL {
            self.tiles().saturating_mul(TILE)
        } else {
            u64::from(high) << 32 | u64::from(low)
        };
        self.offset.saturating_add(bytes)
    }

    /// Returns the number of tiles of the part; one if libcuda does not know their extent and rejects the call.
    fn tiles(&self) -> u64 {
        let [_, _, _, _, _, extent @ ..] = self.subresource;
        let tile = self.tile().unwrap_or([c_uint::MAX; 3]);
        let sides = extent.into_iter().zip(tile);
        sides.fold(1, |tiles, (extent, tile)| {
            tiles.saturating_mul(u64::from(extent.div_ceil(tile.max(1)).max(1)))
        })
    }

    /// Returns the extent of a tile of the array, in elements.
    fn tile(&self) -> Option<[c_uint; 3]> {
        let get = if self.resourceType == CU_RESOURCE_TYPE_ARRAY {
            &OF_ARRAY
        } else {
            &OF_MIPMAPPED
        };
        let get = get.get()?;
        let mut properties = MaybeUninit::<CUDA_ARRAY_SPARSE_PROPERTIES>::zeroed();
        let array = ptr::with_exposed_provenance_mut(usize::try_from(self.resource).ok()?);
        // SAFETY: writes one set of properties; libcuda rejects other arrays.
        let result = unsafe { get(properties.as_mut_ptr(), array) };
        // SAFETY: all zeroes is a valid set of properties.
        (result == CUDA_SUCCESS).then_some(unsafe { properties.assume_init() }.tileExtent)
    }
}

/// Returns the key of the array part.
fn part_of(operation: &CUarrayMapInfo) -> u64 {
    let mix = |key: u64, number: u32| {
        (key ^ u64::from(number))
            .rotate_left(23)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    let numbers = operation.subresource.iter().enumerate();
    let is_level = operation.subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL;
    numbers
        // A part of the mip tail: a layer, padding, offset and size.
        .filter(|(index, _)| is_level || !matches!(index, 1 | 6..))
        .fold(
            mix(operation.resource, operation.subresourceType),
            |key, (_, number)| mix(key, *number),
        )
}

/// Removes the mappings of an array that ends with its context.
pub(crate) fn drop_mappings(process: &'static Process, array: u64) {
    let ends = |mapping: &Binding| mapping.object == array;
    process.array_mappings.remove_all(ends, |_, mapping| {
        physical::drop_mapping(process, mapping.memory);
    });
}

/// A part of an array that a call changes.
#[derive(Clone, Copy)]
struct ChangedPart {
    key: u64,
    /// The share's memory that the call maps to it.
    mapped: Option<CUmemGenericAllocationHandle>,
    /// The mapping that the call ends.
    ended: Option<(Binding, DroppedReference)>,
}

/// Records a change before libcuda is called; otherwise another thread could release mapped memory unnoticed, or get
/// other memory with the handle of unmapped memory.
fn begin_change(
    process: &'static Process,
    operation: &CUarrayMapInfo,
) -> Result<ChangedPart, Denied> {
    let key = part_of(operation);
    let memory = operation.memHandle;
    // Memory that is not the share's has no record.
    let is_mapped =
        operation.maps() && physical::begin_mapping(process, memory, || operation.end_in_memory())?;
    let ended = process.array_mappings.remove(key);
    let ended = ended.map(|mapping| {
        let dropped = physical::begin_drop_mapping(process, mapping.memory);
        (mapping, dropped)
    });
    if is_mapped {
        let object = operation.resource;
        process
            .array_mappings
            .insert(key, Binding { memory, object });
    }
    Ok(ChangedPart {
        key,
        mapped: is_mapped.then_some(memory),
        ended,
    })
}

/// Confirms or reverts the changes after the call.
fn end_changes(process: &'static Process, parts: &mut [ChangedPart], result: CUresult) {
    // From the last to the first, because an operation may change the part of an earlier one.
    for part in parts.iter_mut().rev() {
        if result == CUDA_SUCCESS {
            part.mapped = None;
        } else if part.mapped.is_some() && process.array_mappings.remove(part.key).is_none() {
            // Another thread has destroyed the array and dropped the mapping.
            part.mapped = None;
        }
        if let Some((mapping, dropped)) = part.ended {
            dropped.end(process, result);
            if result != CUDA_SUCCESS {
                process.array_mappings.insert(part.key, mapping);
            }
        }
    }
    // After the ended mappings are restored, because imported memory without a mapping is not charged.
    for memory in parts.iter().filter_map(|part| part.mapped) {
        physical::cancel_mapping(process, memory);
    }
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
    let operation_count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller's list, if there is one.
    let operation = |index: usize| unsafe { operations.wrapping_add(index).as_ref() };
    let list = || (0..operation_count).map_while(operation);
    let Some(mut parts) = TemporaryList::with_capacity(list().count()) else {
        return CUDA_ERROR_OUT_OF_MEMORY;
    };
    for operation in list() {
        match begin_change(process, operation) {
            Ok(part) => parts.push(part),
            Err(Denied) => {
                end_changes(process, parts.as_mut_slice(), CUDA_ERROR_OUT_OF_MEMORY);
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
        }
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { original(operations, count, stream) };
    end_changes(process, parts.as_mut_slice(), result);
    result
}
