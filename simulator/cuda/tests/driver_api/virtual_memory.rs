//! Virtual memory management in one process.

use std::ffi::c_void;

use cudarc::driver::sys;
use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, INVALID_VALUE, OUT_OF_MEMORY, call};

const PAGE: u64 = 2 * MIB;

/// Memory of device 0.
pub(crate) fn properties(exportable: bool) -> sys::CUmemAllocationProp {
    type Kind = sys::CUmemAllocationHandleType;
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.requestedHandleTypes = match exportable {
        true => Kind::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        false => Kind::CU_MEM_HANDLE_TYPE_NONE,
    };
    properties
}

pub(crate) fn create(api: &Api, bytes: u64) -> Result<u64, u32> {
    let mut handle = 0u64;
    let properties = properties(true);
    match call!(
        api,
        "cuMemCreate",
        &raw mut handle,
        bytes,
        &raw const properties,
        0u64
    ) {
        0 => Ok(handle),
        error => Err(error),
    }
}

pub(crate) fn reserve(api: &Api, bytes: u64) -> u64 {
    let mut address = 0u64;
    let code = call!(
        api,
        "cuMemAddressReserve",
        &raw mut address,
        bytes,
        0usize,
        0u64,
        0u64
    );
    assert_eq!(code, 0);
    assert!(address.is_multiple_of(PAGE));
    address
}

pub(crate) fn map(api: &Api, address: u64, bytes: u64, handle: u64) -> u32 {
    call!(api, "cuMemMap", address, bytes, 0usize, handle, 0u64)
}

pub(crate) fn allow(api: &Api, address: u64, bytes: u64) -> u32 {
    let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
    access.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    call!(
        api,
        "cuMemSetAccess",
        address,
        bytes,
        &raw const access,
        1usize
    )
}

pub(crate) fn unmap(api: &Api, address: u64, bytes: u64) -> u32 {
    call!(api, "cuMemUnmap", address, bytes)
}

pub(crate) fn release(api: &Api, handle: u64) -> u32 {
    call!(api, "cuMemRelease", handle)
}

fn set(api: &Api, address: u64, bytes: u64) -> u32 {
    call!(api, "cuMemsetD8_v2", address, 7u8, bytes)
}

#[test]
fn keeps_memory_until_handles_and_mappings_are_released() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let address = reserve(&api, 4 * PAGE);
    assert_eq!(used(), 0);
    let handle = create(&api, 2 * PAGE).unwrap();
    assert_eq!(used(), 2 * PAGE);
    assert_eq!(map(&api, address, 2 * PAGE, handle), 0);
    assert_eq!(map(&api, address + 2 * PAGE, 2 * PAGE, handle), 0);
    assert_eq!(release(&api, handle), 0);
    assert_eq!(release(&api, handle), INVALID_VALUE);
    assert_eq!(used(), 2 * PAGE);
    assert_eq!(unmap(&api, address, 2 * PAGE), 0);
    assert_eq!(used(), 2 * PAGE);
    let mut retained = 0u64;
    let inside =
        std::ptr::without_provenance_mut::<c_void>(usize::try_from(address + 3 * PAGE).unwrap());
    let code = call!(
        api,
        "cuMemRetainAllocationHandle",
        &raw mut retained,
        inside
    );
    assert_eq!(code, 0);
    assert_eq!(unmap(&api, address + 2 * PAGE, 2 * PAGE), 0);
    assert_eq!(used(), 2 * PAGE);
    assert_eq!(release(&api, retained), 0);
    assert_eq!(used(), 0);
    assert_eq!(call!(api, "cuMemAddressFree", address, 4 * PAGE), 0);
}

#[test]
fn requires_access_flags_for_mapped_memory() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let address = reserve(&api, 4 * PAGE);
    let handles = [create(&api, PAGE).unwrap(), create(&api, PAGE).unwrap()];
    assert_eq!(set(&api, address, 1), INVALID_VALUE);
    assert_eq!(map(&api, address, PAGE, handles[0]), 0);
    assert_eq!(set(&api, address, 1), INVALID_VALUE);
    assert_eq!(allow(&api, address, PAGE), 0);
    assert_eq!(set(&api, address, PAGE), 0);
    assert_eq!(set(&api, address, PAGE + 1), INVALID_VALUE);
    // Adjacent mappings form one range for copies.
    assert_eq!(map(&api, address + PAGE, PAGE, handles[1]), 0);
    assert_eq!(set(&api, address, 2 * PAGE), INVALID_VALUE);
    assert_eq!(allow(&api, address, 2 * PAGE), 0);
    assert_eq!(set(&api, address, 2 * PAGE), 0);
    let mut read = [0u8; 4];
    let host = read.as_mut_ptr().cast::<c_void>();
    let middle = address + PAGE - 2;
    assert_eq!(call!(api, "cuMemcpyDtoH_v2", host, middle, 4usize), 0);
    assert_eq!(read, [7; 4]);
    // A gap.
    assert_eq!(unmap(&api, address + PAGE, PAGE), 0);
    assert_eq!(set(&api, address, 2 * PAGE), INVALID_VALUE);
    assert_eq!(set(&api, address, PAGE), 0);
}

#[test]
fn rejects_invalid_sizes_and_mappings() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (free, _) = api.memory_info();
    assert_eq!(create(&api, 0), Err(INVALID_VALUE));
    assert_eq!(create(&api, PAGE + 1), Err(INVALID_VALUE));
    assert_eq!(create(&api, free / PAGE * PAGE + PAGE), Err(OUT_OF_MEMORY));
    let all = create(&api, free / PAGE * PAGE).unwrap();
    assert_eq!(create(&api, PAGE), Err(OUT_OF_MEMORY));
    assert_eq!(api.allocate(1), Err(OUT_OF_MEMORY));
    assert_eq!(release(&api, all), 0);
    let handle = create(&api, 2 * PAGE).unwrap();
    let address = reserve(&api, 4 * PAGE);
    for (at, bytes) in [
        (address + 1, PAGE),
        (address, PAGE + 1),
        (address, 4 * PAGE),
        (address + 3 * PAGE, 2 * PAGE),
        (address - PAGE, PAGE),
    ] {
        assert_eq!(map(&api, at, bytes, handle), INVALID_VALUE);
    }
    assert_eq!(map(&api, address + PAGE, 2 * PAGE, handle), 0);
    for at in [address, address + PAGE, address + 2 * PAGE] {
        assert_eq!(map(&api, at, 2 * PAGE, handle), INVALID_VALUE);
    }
    assert_eq!(unmap(&api, address + PAGE, PAGE), INVALID_VALUE);
    assert_eq!(
        call!(api, "cuMemAddressFree", address, 4 * PAGE),
        INVALID_VALUE
    );
    assert_eq!(call!(api, "cuMemFree_v2", address + PAGE), INVALID_VALUE);
    let mut granularity = 0usize;
    let properties = properties(false);
    let code = call!(
        api,
        "cuMemGetAllocationGranularity",
        &raw mut granularity,
        &raw const properties,
        0u32
    );
    assert_eq!((code, granularity as u64), (0, PAGE));
}
