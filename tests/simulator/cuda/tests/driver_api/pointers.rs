//! What pointers are, host memory that is registered, and peers.

use std::ffi::c_void;

use simulator_machine::description::{H100X2, MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_VALUE, call};
use crate::sharing;
use crate::virtual_memory::create;

const CONTEXT: u32 = 1;
const MEMORY_TYPE: u32 = 2;
const IS_MANAGED: u32 = 8;
const DEVICE_ORDINAL: u32 = 9;
const RANGE_START: u32 = 11;
const RANGE_SIZE: u32 = 12;
const HOST: u64 = 1;
const DEVICE: u64 = 2;
const NONE: Handle = std::ptr::null_mut();

fn attribute(api: &Api, which: u32, address: u64) -> Result<u64, u32> {
    let mut value = 0u64;
    match call!(api, "cuPointerGetAttribute", &raw mut value, which, address) {
        0 => Ok(value),
        error => Err(error),
    }
}

#[test]
fn a_pointer_is_known_by_where_it_lies() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let plain = api.allocate(4 * MIB).unwrap();
    let (mut managed, mut host) = (0u64, 0u64);
    let code = call!(api, "cuMemAllocManaged", &raw mut managed, MIB, 1u32);
    assert_eq!(code, 0);
    assert_eq!(call!(api, "cuMemAllocHost_v2", &raw mut host, MIB), 0);
    let handle = create(&api, 2 * MIB).unwrap();
    let (mapped, _) = sharing::map(&api, handle, 2 * MIB);
    for (address, kind, is_managed) in [
        (plain, DEVICE, 0),
        (managed, DEVICE, 1),
        (host, HOST, 0),
        (mapped, DEVICE, 0),
    ] {
        assert_eq!(attribute(&api, MEMORY_TYPE, address + 100), Ok(kind));
        assert_eq!(attribute(&api, IS_MANAGED, address + 100), Ok(is_managed));
        assert_eq!(attribute(&api, DEVICE_ORDINAL, address), Ok(0));
        assert_eq!(attribute(&api, RANGE_START, address + 100), Ok(address));
    }
    assert_eq!(attribute(&api, RANGE_SIZE, plain + 5), Ok(4 * MIB));
    let mut current = NONE;
    assert_eq!(call!(api, "cuCtxGetCurrent", &raw mut current), 0);
    assert_eq!(attribute(&api, CONTEXT, plain), Ok(current.addr() as u64));
    let nobodys = std::ptr::from_ref(&machine).addr() as u64;
    assert_eq!(attribute(&api, MEMORY_TYPE, nobodys), Err(INVALID_VALUE));
    // All at once, a pointer of nobody's is nothing.
    let (mut ordinal, mut kind) = (0i32, 9u32);
    let which = [DEVICE_ORDINAL, MEMORY_TYPE];
    let mut data: [*mut c_void; 2] = [(&raw mut ordinal).cast(), (&raw mut kind).cast()];
    let code = call!(
        api,
        "cuPointerGetAttributes",
        2u32,
        which.as_ptr(),
        data.as_mut_ptr(),
        nobodys
    );
    assert_eq!((code, ordinal, kind), (0, -2, 0));
}

#[test]
fn registered_memory_is_the_programs() {
    const ALREADY_REGISTERED: u32 = 712;
    const NOT_REGISTERED: u32 = 713;
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let mut buffer = vec![7u8; 64 << 10];
    let address = buffer.as_mut_ptr();
    let register = |bytes: usize| call!(api, "cuMemHostRegister_v2", address, bytes, 0u32);
    let unregister = || call!(api, "cuMemHostUnregister", address);
    assert_eq!(unregister(), NOT_REGISTERED);
    assert_eq!(register(64 << 10), 0);
    assert_eq!(register(1), ALREADY_REGISTERED);
    assert_eq!(
        attribute(&api, MEMORY_TYPE, address.addr() as u64),
        Ok(HOST)
    );
    let device = api.allocate(64 << 10).unwrap();
    assert_eq!(
        call!(api, "cuMemcpy", device, address.addr(), 64usize << 10),
        0
    );
    assert_eq!(unregister(), 0);
    assert_eq!(register(1), 0);
    assert_eq!(unregister(), 0);
    // Still there, and still the program's.
    assert!(buffer.iter().all(|byte| *byte == 7));
}

#[test]
fn peers_are_enabled_once() {
    const ALREADY_ENABLED: u32 = 704;
    const NOT_ENABLED: u32 = 705;
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let mut other = NONE;
    let code = call!(api, "cuDevicePrimaryCtxRetain", &raw mut other, 1);
    assert_eq!(code, 0);
    let can = |device: i32, peer: i32| {
        let mut can = 9;
        let code = call!(api, "cuDeviceCanAccessPeer", &raw mut can, device, peer);
        (code, can)
    };
    assert_eq!((can(0, 1), can(0, 0)), ((0, 1), (0, 0)));
    let enable = || call!(api, "cuCtxEnablePeerAccess", other, 0u32);
    let disable = || call!(api, "cuCtxDisablePeerAccess", other);
    assert_eq!(disable(), NOT_ENABLED);
    assert_eq!((enable(), enable()), (0, ALREADY_ENABLED));
    assert_eq!((disable(), disable()), (0, NOT_ENABLED));
}
