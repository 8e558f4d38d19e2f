//! External memory imported from file descriptors.

use std::os::fd::RawFd;

use cudarc::driver::sys;
use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, call};
use crate::virtual_memory::{create, release};

const PAGE: u64 = 2 * MIB;
const NONE: Handle = std::ptr::null_mut();

fn export(api: &Api, memory: u64) -> RawFd {
    let mut descriptor = -1;
    let code = call!(
        api,
        "cuMemExportToShareableHandle",
        &raw mut descriptor,
        memory,
        1u32,
        0u64
    );
    assert_eq!(code, 0);
    descriptor
}

/// Layout of the header, with handle types that the bindings lack.
#[repr(C, align(8))]
struct Description {
    kind: u32,
    /// Preceded by four bytes of padding.
    descriptor: Handles,
    bytes: u64,
    flags: u32,
    reserved: [u32; 16],
}

#[repr(C, align(8))]
struct Handles([RawFd; 4]);

fn import(api: &Api, kind: u32, descriptor: RawFd, bytes: u64) -> Result<Handle, u32> {
    let description = Description {
        kind,
        descriptor: Handles([descriptor, 0, 0, 0]),
        bytes,
        flags: 0,
        reserved: [0; 16],
    };
    assert_eq!(
        size_of_val(&description),
        size_of::<sys::CUDA_EXTERNAL_MEMORY_HANDLE_DESC>()
    );
    let mut external = NONE;
    match call!(
        api,
        "cuImportExternalMemory",
        &raw mut external,
        &raw const description
    ) {
        0 => Ok(external),
        code => Err(code),
    }
}

fn buffer(api: &Api, external: Handle, offset: u64, bytes: u64) -> Result<u64, u32> {
    let mut description: sys::CUDA_EXTERNAL_MEMORY_BUFFER_DESC = unsafe { std::mem::zeroed() };
    (description.offset, description.size) = (offset, bytes);
    let mut address = 0u64;
    match call!(
        api,
        "cuExternalMemoryGetMappedBuffer",
        &raw mut address,
        external,
        &raw const description
    ) {
        0 => Ok(address),
        code => Err(code),
    }
}

#[test]
fn holds_external_memory_and_maps_parts_of_it() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let memory = create(&api, 4 * PAGE).unwrap();
    let descriptor = export(&api, memory);
    let external = import(&api, 1, descriptor, 4 * PAGE).unwrap();
    // The driver owns the descriptor.
    assert_eq!(unsafe { libc::fcntl(descriptor, libc::F_GETFD) }, -1);
    assert_eq!(release(&api, memory), 0);
    assert_eq!(used(), 4 * PAGE);
    let first = buffer(&api, external, 0, 4 * PAGE).unwrap();
    let second = buffer(&api, external, PAGE, 100).unwrap();
    api.write(first + PAGE, b"the same bytes");
    assert_eq!(api.read(second, 14), b"the same bytes");
    assert_eq!(
        call!(api, "cuMemsetD8_v2", second, 0u8, 101usize),
        INVALID_VALUE
    );
    assert_eq!(buffer(&api, external, 4 * PAGE, 1), Err(INVALID_VALUE));
    api.free(first);
    api.free(second);
    assert_eq!(used(), 4 * PAGE);
    assert_eq!(call!(api, "cuDestroyExternalMemory", external), 0);
    assert_eq!(used(), 0);
    assert_eq!(
        call!(api, "cuDestroyExternalMemory", external),
        INVALID_HANDLE
    );
}

#[test]
fn rejects_descriptors_that_are_not_memory() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let memory = create(&api, PAGE).unwrap();
    let descriptor = export(&api, memory);
    assert_eq!(import(&api, 4, descriptor, PAGE), Err(NOT_SUPPORTED));
    assert_eq!(import(&api, 1, descriptor, PAGE + 1), Err(INVALID_VALUE));
    assert_eq!(import(&api, 1, -1, PAGE), Err(INVALID_VALUE));
    assert!(import(&api, 1, 0, PAGE).is_err());
    let idle = machine.gpu(0).unwrap().used_bytes;
    assert!(import(&api, 1, descriptor, PAGE).is_ok());
    assert_eq!(machine.gpu(0).unwrap().used_bytes, idle);
}
