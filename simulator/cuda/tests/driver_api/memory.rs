use std::ffi::c_void;

use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, INVALID_VALUE, OUT_OF_MEMORY, call};

const PAGE: u64 = 2 * MIB;

#[test]
fn packs_small_requests_and_rounds_large_ones() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let first = api.allocate(1).unwrap();
    assert_eq!(used(), PAGE);
    let second = api.allocate(MIB).unwrap();
    assert_eq!(used(), PAGE);
    let large = api.allocate(MIB + 1).unwrap();
    assert_eq!(used(), 2 * PAGE);
    for address in [first, second, large] {
        api.free(address);
    }
    assert_eq!(used(), 0);
}

#[test]
fn denies_memory_exactly_when_the_gpu_is_full() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (free, total) = api.memory_info();
    assert_eq!(
        total,
        machine.gpu(0).unwrap().total_bytes - machine.gpu(0).unwrap().reserved_bytes
    );
    assert_eq!(api.allocate(free + 1), Err(OUT_OF_MEMORY));
    let all = api.allocate(free / PAGE * PAGE).unwrap();
    assert_eq!(api.allocate(1), Err(OUT_OF_MEMORY));
    api.free(all);
    assert_eq!(api.memory_info().0, free);
    assert_eq!(api.allocate(0), Err(INVALID_VALUE));
}

#[test]
fn rejects_free_of_foreign_addresses_except_null() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (small, large) = (api.allocate(1024).unwrap(), api.allocate(4 * MIB).unwrap());
    for address in [small + 512, large + 512, 0xdead_0000, u64::MAX] {
        assert_eq!(
            call!(api, "cuMemFree_v2", address),
            INVALID_VALUE,
            "{address:#x}"
        );
    }
    api.free(0);
    api.free(small);
    assert_eq!(call!(api, "cuMemFree_v2", small), INVALID_VALUE);
    let (mut base, mut size) = (0u64, 0usize);
    assert_eq!(
        call!(
            api,
            "cuMemGetAddressRange_v2",
            &raw mut base,
            &raw mut size,
            large + 5
        ),
        0
    );
    assert_eq!((base, size as u64), (large, 4 * MIB));
}

#[test]
fn reads_back_written_bytes() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (first, second) = (api.allocate(4096).unwrap(), api.allocate(4 * MIB).unwrap());
    let written: Vec<u8> = (0..=255).collect();
    let mut read = vec![0u8; 256];
    assert_eq!(
        call!(
            api,
            "cuMemcpyHtoD_v2",
            first,
            written.as_ptr().cast::<c_void>(),
            256usize
        ),
        0
    );
    assert_eq!(call!(api, "cuMemcpyDtoD_v2", second, first, 256usize), 0);
    assert_eq!(
        call!(api, "cuMemsetD32_v2", second + 8, 0x0403_0201u32, 2usize),
        0
    );
    assert_eq!(
        call!(
            api,
            "cuMemcpyDtoH_v2",
            read.as_mut_ptr().cast::<c_void>(),
            second,
            256usize
        ),
        0
    );
    assert_eq!(read[..8], written[..8]);
    assert_eq!(read[8..16], [1, 2, 3, 4, 1, 2, 3, 4]);
    assert_eq!(read[16..], written[16..]);
}

#[test]
fn rejects_copies_beyond_an_allocation() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let address = api.allocate(1024).unwrap();
    let mut host = [0u8; 2048];
    let host = host.as_mut_ptr().cast::<c_void>();
    assert_eq!(call!(api, "cuMemcpyDtoH_v2", host, address, 1024usize), 0);
    assert_eq!(
        call!(api, "cuMemcpyDtoH_v2", host, address, 1025usize),
        INVALID_VALUE
    );
    assert_eq!(
        call!(api, "cuMemcpyHtoD_v2", address + 1024, host, 1usize),
        INVALID_VALUE
    );
    assert_eq!(
        call!(api, "cuMemsetD8_v2", address + 1, 0u8, 1024usize),
        INVALID_VALUE
    );
}

#[test]
fn aligns_pitched_rows_to_512_bytes() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (mut address, mut pitch) = (0u64, 0usize);
    let code = call!(
        api,
        "cuMemAllocPitch_v2",
        &raw mut address,
        &raw mut pitch,
        513usize,
        10usize,
        4u32
    );
    assert_eq!((code, pitch), (0, 1024));
    assert_eq!(
        call!(
            api,
            "cuMemsetD2D8_v2",
            address,
            pitch,
            7u8,
            513usize,
            10usize
        ),
        0
    );
    assert_eq!(
        call!(
            api,
            "cuMemsetD2D8_v2",
            address,
            pitch,
            7u8,
            513usize,
            11usize
        ),
        INVALID_VALUE
    );
}

#[test]
fn allocates_module_memory_at_first_launch() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let used = || machine.gpu(0).unwrap().used_bytes;
    let idle = used();
    let function = api.function(c"noop");
    assert_eq!(used(), idle);
    api.spin(function, std::ptr::null_mut(), 1, 0);
    assert_eq!(used(), idle + PAGE);
    api.spin(function, std::ptr::null_mut(), 1, 0);
    assert_eq!(used(), idle + PAGE);
}

#[test]
fn allocates_through_the_unlisted_entry_point() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let mut address = 0u64;
    assert_eq!(
        call!(api, "cuMemAllocUnlisted", &raw mut address, 3 * PAGE),
        0
    );
    assert_eq!(machine.gpu(0).unwrap().used_bytes, idle + 3 * PAGE);
    let mut found: *mut c_void = std::ptr::null_mut();
    let code = call!(
        api,
        "cuGetProcAddress",
        c"cuMemAllocUnlisted".as_ptr(),
        &raw mut found,
        13000,
        0u64
    );
    assert_eq!((code, found), (0, api.symbol("cuMemAllocUnlisted")));
    api.free(address);
    assert_eq!(machine.gpu(0).unwrap().used_bytes, idle);
}
