//! Sparse arrays and the lifetime of mappings.

use cudarc::driver::sys;
use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_HANDLE, INVALID_VALUE, call};
use crate::virtual_memory::{create, release};

const NONE: Handle = std::ptr::null_mut();
const PAGE: u64 = 2 * MIB;

fn array(api: &Api, flags: u32) -> Handle {
    let (mut array, descriptor) = (
        NONE,
        sys::CUDA_ARRAY3D_DESCRIPTOR {
            Width: 1000,
            Height: 1024,
            Depth: 0,
            Format: sys::CUarray_format::CU_AD_FORMAT_FLOAT,
            NumChannels: 1,
            Flags: flags,
        },
    );
    let result = call!(
        api,
        "cuArray3DCreate_v2",
        &raw mut array,
        &raw const descriptor
    );
    assert_eq!(result, 0);
    array
}

/// Maps or unmaps whole rows of tiles.
fn map(api: &Api, array: Handle, memory: Option<u64>, row: u32, rows: u32) -> u32 {
    let operation_type = match memory {
        Some(_) => sys::CUmemOperationType::CU_MEM_OPERATION_TYPE_MAP,
        None => sys::CUmemOperationType::CU_MEM_OPERATION_TYPE_UNMAP,
    };
    let mut operation = sys::CUarrayMapInfo {
        resourceType: sys::CUresourcetype::CU_RESOURCE_TYPE_ARRAY,
        resource: sys::CUarrayMapInfo_st__bindgen_ty_1 {
            array: array.cast(),
        },
        subresourceType:
            sys::CUarraySparseSubresourceType::CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL,
        subresource: sys::CUarrayMapInfo_st__bindgen_ty_2 {
            sparseLevel: sys::CUarrayMapInfo_st__bindgen_ty_2__bindgen_ty_1 {
                level: 0,
                layer: 0,
                offsetX: 0,
                offsetY: 128 * row,
                offsetZ: 0,
                extentWidth: 1000,
                extentHeight: 128 * rows,
                extentDepth: 1,
            },
        },
        memOperationType: operation_type,
        memHandleType: sys::CUmemHandleType::CU_MEM_HANDLE_TYPE_GENERIC,
        memHandle: sys::CUarrayMapInfo_st__bindgen_ty_3 {
            memHandle: memory.unwrap_or(0),
        },
        offset: 0,
        deviceBitMask: 1,
        flags: 0,
        reserved: [0; 2],
    };
    call!(api, "cuMemMapArrayAsync", &raw mut operation, 1u32, NONE)
}

#[test]
fn holds_mapped_tiles_until_unmapped_or_destroyed() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let sparse = array(&api, sys::CUDA_ARRAY3D_SPARSE);
    assert_eq!(used(), 0);
    let mut properties: sys::CUDA_ARRAY_SPARSE_PROPERTIES = unsafe { std::mem::zeroed() };
    let result = call!(
        api,
        "cuArrayGetSparseProperties",
        &raw mut properties,
        sparse
    );
    assert_eq!(result, 0);
    let tile = properties.tileExtent;
    assert_eq!((tile.width, tile.height, tile.depth), (128, 128, 1));

    let memory = create(&api, PAGE).unwrap();
    assert_eq!(map(&api, sparse, Some(memory), 0, 4), 0);
    assert_eq!(release(&api, memory), 0);
    assert_eq!(used(), PAGE);
    // Remaps one row, then unmaps in two steps.
    let other = create(&api, PAGE).unwrap();
    assert_eq!(map(&api, sparse, Some(other), 1, 1), 0);
    assert_eq!(release(&api, other), 0);
    assert_eq!(used(), 2 * PAGE);
    assert_eq!(map(&api, sparse, None, 1, 3), 0);
    assert_eq!(used(), PAGE);
    assert_eq!(map(&api, sparse, None, 0, 1), 0);
    assert_eq!(used(), 0);
    // Unmapping empty tiles is allowed.
    assert_eq!(map(&api, sparse, None, 0, 8), 0);

    let memory = create(&api, PAGE).unwrap();
    assert_eq!(map(&api, sparse, Some(memory), 0, 1), 0);
    assert_eq!(release(&api, memory), 0);
    assert_eq!(call!(api, "cuArrayDestroy", sparse), 0);
    assert_eq!(used(), 0);
}

#[test]
fn rejects_tiles_outside_array_or_memory() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (sparse, plain) = (array(&api, sys::CUDA_ARRAY3D_SPARSE), array(&api, 0));
    let memory = create(&api, PAGE).unwrap();
    assert_eq!(map(&api, plain, Some(memory), 0, 1), INVALID_VALUE);
    assert_eq!(map(&api, sparse, Some(memory), 8, 1), INVALID_VALUE);
    assert_eq!(
        map(&api, sparse, Some(memory), 0, 5),
        INVALID_VALUE,
        "40 tiles"
    );
    assert_eq!(map(&api, sparse, Some(memory + 1), 0, 1), INVALID_VALUE);
    assert_eq!(map(&api, NONE, Some(memory), 0, 1), INVALID_HANDLE);
    assert_eq!(map(&api, sparse, Some(memory), 0, 4), 0);
}
