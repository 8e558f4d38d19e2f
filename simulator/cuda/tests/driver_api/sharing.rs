//! Memory shared between processes: descriptors, IPC handles, pools.

use std::ffi::c_void;
use std::os::fd::RawFd;

use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, INVALID_CONTEXT, INVALID_VALUE, call};
use crate::processes::start_with;
use crate::virtual_memory::{allow, create, map as map_at, release, reserve, unmap};

const CONTEXT: u64 = 104 * MIB;
pub(crate) const BYTES: u64 = 64 * MIB;
pub(crate) const PATTERN: [u8; 8] = [3, 1, 4, 1, 5, 9, 2, 6];
const FILE_DESCRIPTOR: u32 = 1;

fn export(api: &Api, handle: u64) -> RawFd {
    let mut descriptor: RawFd = -1;
    let code = call!(
        api,
        "cuMemExportToShareableHandle",
        &raw mut descriptor,
        handle,
        FILE_DESCRIPTOR,
        0u64
    );
    assert_eq!(code, 0);
    descriptor
}

pub(crate) fn import(api: &Api, descriptor: RawFd) -> u64 {
    let mut handle = 0u64;
    let code = call!(
        api,
        "cuMemImportFromShareableHandle",
        &raw mut handle,
        descriptor as isize,
        FILE_DESCRIPTOR
    );
    assert_eq!(code, 0);
    handle
}

fn close(descriptor: RawFd) {
    assert_eq!(unsafe { libc::close(descriptor) }, 0);
}

/// Maps memory at a new address; returns the address and the reserved bytes.
pub(crate) fn map(api: &Api, handle: u64, bytes: u64) -> (u64, u64) {
    let address = reserve(api, bytes);
    assert_eq!(map_at(api, address, bytes, handle), 0);
    assert_eq!(allow(api, address, bytes), 0);
    (address, bytes)
}

fn write(api: &Api, address: u64) {
    let host = PATTERN.as_ptr().cast::<c_void>();
    assert_eq!(call!(api, "cuMemcpyHtoD_v2", address, host, 8usize), 0);
}

pub(crate) fn read(api: &Api, address: u64) -> [u8; 8] {
    let mut read = [0u8; 8];
    let host = read.as_mut_ptr().cast::<c_void>();
    assert_eq!(call!(api, "cuMemcpyDtoH_v2", host, address, 8usize), 0);
    read
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Handle([u8; 64]);

impl Handle {
    fn to_text(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn from_text(text: &str) -> Self {
        let mut bytes = [0; 64];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap();
        }
        Self(bytes)
    }
}

/// Returns the IPC handle of memory as text.
fn share(api: &Api, address: u64) -> String {
    let mut handle = Handle([0; 64]);
    let code = call!(api, "cuIpcGetMemHandle", &raw mut handle, address);
    assert_eq!(code, 0);
    handle.to_text()
}

/// Imports a pool and a pointer of it.
pub(crate) fn import_pointer(api: &Api, descriptor: RawFd, data: &str) -> u64 {
    let (mut pool, mut address) = (0usize, 0u64);
    let code = call!(
        api,
        "cuMemPoolImportFromShareableHandle",
        &raw mut pool,
        descriptor as isize,
        FILE_DESCRIPTOR,
        0u64
    );
    assert_eq!(code, 0);
    let data = Handle::from_text(data);
    let code = call!(
        api,
        "cuMemPoolImportPointer",
        &raw mut address,
        pool,
        &raw const data
    );
    assert_eq!(code, 0);
    // Allocation from an imported pool is rejected.
    let mut other = 0u64;
    let code = call!(
        api,
        "cuMemAllocFromPoolAsync",
        &raw mut other,
        4096usize,
        pool,
        0usize
    );
    assert_eq!(code, INVALID_VALUE);
    address
}

pub(crate) fn open(api: &Api, handle: &str) -> Result<u64, u32> {
    let bytes = Handle::from_text(handle);
    let function: unsafe extern "C" fn(*mut u64, Handle, u32) -> u32 =
        unsafe { std::mem::transmute(api.symbol("cuIpcOpenMemHandle_v2")) };
    let mut address = 0u64;
    match unsafe { function(&raw mut address, bytes, 1) } {
        0 => Ok(address),
        error => Err(error),
    }
}

#[test]
fn keeps_memory_while_a_descriptor_is_open() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let used = || machine.gpu(0).unwrap().used_bytes - CONTEXT;
    let handle = create(&api, BYTES).unwrap();
    let descriptor = export(&api, handle);
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    assert_eq!(release(&api, handle), 0);
    assert_eq!(used(), BYTES);
    close(descriptor);
    let imported = import(&api, copy);
    let again = import(&api, copy);
    close(copy);
    assert_eq!(used(), BYTES);
    let (address, bytes) = map(&api, imported, BYTES);
    assert_eq!(release(&api, imported), 0);
    assert_eq!(release(&api, again), 0);
    assert_eq!(used(), BYTES);
    assert_eq!(unmap(&api, address, bytes), 0);
    machine
        .wait_for_gpu(0, |gpu| gpu.used_bytes == CONTEXT)
        .unwrap();
    let descriptor = export(&api, create(&api, BYTES).unwrap());
    // Other descriptors are rejected.
    let (mut handle, not_memory) = (0u64, machine_pipe());
    let code = call!(
        api,
        "cuMemImportFromShareableHandle",
        &raw mut handle,
        not_memory as isize,
        FILE_DESCRIPTOR
    );
    assert_ne!(code, 0);
    close(not_memory);
    close(descriptor);
}

fn machine_pipe() -> RawFd {
    use std::os::fd::IntoRawFd;
    std::io::pipe().unwrap().1.into_raw_fd()
}

#[test]
fn keeps_imported_memory_after_owner_release() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let handle = create(&api, BYTES).unwrap();
    let (address, bytes) = map(&api, handle, BYTES);
    write(&api, address);
    let descriptor = export(&api, handle);
    let argument = descriptor.to_string();
    let mut child = start_with(&machine, "import", &argument, Some(descriptor));
    close(descriptor);
    // One memory for both, charged to its creator.
    let gpu = machine.gpu(0).unwrap();
    assert_eq!(gpu.used_bytes, 2 * CONTEXT + BYTES);
    let used_by = |pid: u32| {
        let processes = machine.gpu(0).unwrap().processes;
        let process = processes.into_iter().find(|process| process.pid == pid);
        process.unwrap().used_bytes
    };
    assert_eq!(used_by(std::process::id()), CONTEXT + BYTES);
    assert_eq!(unmap(&api, address, bytes), 0);
    assert_eq!(release(&api, handle), 0);
    assert_eq!(used_by(std::process::id()), CONTEXT);
    assert_eq!(used_by(child.id()), CONTEXT + BYTES);
    assert_eq!(machine.gpu(0).unwrap().used_bytes, 2 * CONTEXT + BYTES);
    child.kill().unwrap();
    child.wait().unwrap();
    machine
        .wait_for_gpu(0, |gpu| gpu.used_bytes == CONTEXT)
        .unwrap();
}

#[test]
fn keeps_opened_memory_after_owner_free() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let small = api.allocate(4096).unwrap();
    let large = api.allocate(BYTES).unwrap();
    assert_eq!(
        open(&api, &share(&api, large)),
        Err(INVALID_CONTEXT),
        "opening its own memory"
    );
    assert_eq!(open(&api, &"00".repeat(64)), Err(INVALID_VALUE));
    let mut children = Vec::new();
    for address in [small, large] {
        write(&api, address);
        let handle = share(&api, address);
        children.push(start_with(&machine, "open", &handle, None));
    }
    let taken = BYTES + 2 * MIB;
    assert_eq!(machine.gpu(0).unwrap().used_bytes, 3 * CONTEXT + taken);
    api.free(small);
    api.free(large);
    assert_eq!(machine.gpu(0).unwrap().used_bytes, 3 * CONTEXT + taken);
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    machine
        .wait_for_gpu(0, |gpu| gpu.used_bytes == CONTEXT)
        .unwrap();
}

#[test]
fn shares_pool_memory_by_pointer() {
    use cudarc::driver::sys;

    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.handleTypes =
        sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let mut pool = 0usize;
    let code = call!(api, "cuMemPoolCreate", &raw mut pool, &raw const properties);
    assert_eq!(code, 0);
    let allocate = |bytes: u64| {
        let mut address = 0u64;
        let code = call!(
            api,
            "cuMemAllocFromPoolAsync",
            &raw mut address,
            bytes,
            pool,
            0usize
        );
        assert_eq!(code, 0);
        address
    };
    let address = allocate(BYTES);
    write(&api, address);
    let mut descriptor: RawFd = -1;
    let code = call!(
        api,
        "cuMemPoolExportToShareableHandle",
        &raw mut descriptor,
        pool,
        FILE_DESCRIPTOR,
        0u64
    );
    assert_eq!(code, 0);
    let mut data = Handle([0; 64]);
    let code = call!(api, "cuMemPoolExportPointer", &raw mut data, address);
    assert_eq!(code, 0);
    let argument = format!("{descriptor} {}", data.to_text());
    let mut child = start_with(&machine, "pool", &argument, Some(descriptor));
    close(descriptor);
    assert_eq!(call!(api, "cuMemFreeAsync", address, 0usize), 0);
    assert_eq!(call!(api, "cuMemPoolTrimTo", pool, 0usize), 0);
    // Freed here, still held by the child.
    assert_eq!(machine.gpu(0).unwrap().used_bytes, 2 * CONTEXT + BYTES);
    child.kill().unwrap();
    child.wait().unwrap();
    machine
        .wait_for_gpu(0, |gpu| gpu.used_bytes == CONTEXT)
        .unwrap();
    // Memory outside exportable pools cannot be exported.
    let private = api.allocate(4096).unwrap();
    let code = call!(api, "cuMemPoolExportPointer", &raw mut data, private);
    assert_eq!(code, INVALID_VALUE);
}
