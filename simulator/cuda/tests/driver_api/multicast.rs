//! Multicast objects and the lifetime of bindings.

use cudarc::driver::sys;
use simulator_machine::description::{H100X2, MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, ILLEGAL_STATE, INVALID_DEVICE, INVALID_VALUE, call};
use crate::virtual_memory::{allow, create, map, release, reserve, unmap};

const PAGE: u64 = 2 * MIB;

fn properties(devices: u32) -> sys::CUmulticastObjectProp {
    sys::CUmulticastObjectProp {
        numDevices: devices,
        size: usize::try_from(8 * PAGE).unwrap(),
        handleTypes: 0,
        flags: 0,
    }
}

fn object(api: &Api) -> u64 {
    let (mut object, properties) = (0u64, properties(2));
    assert_eq!(
        call!(
            api,
            "cuMulticastCreate",
            &raw mut object,
            &raw const properties
        ),
        0
    );
    object
}

fn bind(api: &Api, object: u64, offset: u64, memory: u64, bytes: u64) -> u32 {
    call!(
        api,
        "cuMulticastBindMem",
        object,
        offset,
        memory,
        0usize,
        bytes,
        0u64
    )
}

#[test]
fn holds_bound_memory_until_unbound_or_destroyed() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let object = object(&api);
    let memory = create(&api, 2 * PAGE).unwrap();
    assert_eq!(bind(&api, object, 0, memory, 2 * PAGE), ILLEGAL_STATE);
    for device in 0..2 {
        assert_eq!(call!(api, "cuMulticastAddDevice", object, device), 0);
    }
    assert_eq!(call!(api, "cuMulticastAddDevice", object, 1), INVALID_VALUE);
    assert_eq!(bind(&api, object, 0, memory, 2 * PAGE), 0);
    assert_eq!(bind(&api, object, PAGE, memory, PAGE), INVALID_VALUE);
    assert_eq!(
        bind(&api, object, 7 * PAGE, memory, 2 * PAGE),
        INVALID_VALUE
    );
    assert_eq!(release(&api, memory), 0);
    assert_eq!(used(), 2 * PAGE);

    let by_address = create(&api, PAGE).unwrap();
    let address = reserve(&api, PAGE);
    assert_eq!(map(&api, address, PAGE, by_address), 0);
    assert_eq!(allow(&api, address, PAGE), 0);
    let code = call!(
        api,
        "cuMulticastBindAddr",
        object,
        4 * PAGE,
        address,
        PAGE,
        0u64
    );
    assert_eq!(code, 0);
    assert_eq!(unmap(&api, address, PAGE), 0);
    assert_eq!(release(&api, by_address), 0);
    assert_eq!(used(), 3 * PAGE);

    let unbind = |device: i32, offset: u64, bytes: u64| {
        call!(api, "cuMulticastUnbind", object, device, offset, bytes)
    };
    assert_eq!(unbind(0, 0, PAGE), INVALID_VALUE);
    assert_eq!(unbind(0, 0, 2 * PAGE), 0);
    assert_eq!(used(), PAGE);

    // The object lives while mapped.
    let window = reserve(&api, 8 * PAGE);
    assert_eq!(map(&api, window, 8 * PAGE, object), 0);
    assert_eq!(release(&api, object), 0);
    assert_eq!(used(), PAGE);
    assert_eq!(unmap(&api, window, 8 * PAGE), 0);
    assert_eq!(used(), 0);
}

#[test]
fn binds_memory_for_a_named_device() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let object = object(&api);
    for device in 0..2 {
        assert_eq!(call!(api, "cuMulticastAddDevice", object, device), 0);
    }
    let memory = create(&api, PAGE).unwrap();
    let bind = |device: i32| {
        call!(
            api,
            "cuMulticastBindMem_v2",
            object,
            device,
            0usize,
            memory,
            0usize,
            PAGE,
            0u64
        )
    };
    assert_eq!(bind(2), INVALID_DEVICE);
    assert_eq!(bind(1), 0);
    assert_eq!(call!(api, "cuMulticastUnbind", object, 1, 0usize, PAGE), 0);
    let address = reserve(&api, PAGE);
    assert_eq!(map(&api, address, PAGE, memory), 0);
    let code = call!(
        api,
        "cuMulticastBindAddr_v2",
        object,
        0,
        0usize,
        address,
        PAGE,
        0u64
    );
    assert_eq!(code, 0);
}

#[test]
fn rejects_objects_of_fewer_than_two_devices() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    for devices in [1, 2] {
        let (mut object, properties) = (0u64, properties(devices));
        let code = call!(
            api,
            "cuMulticastCreate",
            &raw mut object,
            &raw const properties
        );
        assert_eq!(code, INVALID_VALUE, "{devices}");
    }
}
