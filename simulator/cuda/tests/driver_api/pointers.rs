//! `cuPointerGetAttribute`.

use simulator_machine::description::{MIB, T4};
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
fn returns_attributes_of_each_memory_type() {
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
    let unknown = std::ptr::from_ref(&machine).addr() as u64;
    assert_eq!(attribute(&api, MEMORY_TYPE, unknown), Err(INVALID_VALUE));
}
