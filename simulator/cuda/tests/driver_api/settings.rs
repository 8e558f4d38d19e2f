//! Settings and queries of contexts, streams, functions, libraries and host memory.

use std::ffi::CStr;

use simulator_machine::description::{H100X2, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_HANDLE, INVALID_VALUE, Invoke, call};

const NONE: Handle = std::ptr::null_mut();
const FILE_NOT_FOUND: u32 = 301;

/// Reads an integer with the named function.
fn read(api: &Api, name: &str) -> i32 {
    let mut value = -77i32;
    let code: u32 = Invoke::invoke(api.symbol(name), (&raw mut value,));
    assert_eq!(code, 0, "{name}");
    value
}

/// Reads an integer property of a handle.
fn read_of<T>(api: &Api, name: &str, of: T) -> i32 {
    let mut value = -77i32;
    let code: u32 = Invoke::invoke(api.symbol(name), (&raw mut value, of));
    assert_eq!(code, 0, "{name}");
    value
}

fn apply<T>(api: &Api, name: &str, arguments: T)
where
    T: Invoke,
{
    let code = T::invoke(api.symbol(name), arguments);
    assert_eq!(code, 0, "{name}");
}

#[test]
fn returns_the_settings_of_a_context() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    assert_eq!(read(&api, "cuCtxGetCacheConfig"), 0);
    apply(&api, "cuCtxSetCacheConfig", (2u32,));
    assert_eq!(read(&api, "cuCtxGetCacheConfig"), 2);
    assert_eq!(read(&api, "cuCtxGetDevice"), 0);
    assert_eq!(read_of(&api, "cuCtxGetDevice_v2", NONE), 0);
    let mut current = NONE;
    apply(&api, "cuCtxAttach", (&raw mut current, 0u32));
    let (mut least, mut greatest) = (9, 9);
    apply(
        &api,
        "cuCtxGetStreamPriorityRange",
        (&raw mut least, &raw mut greatest),
    );
    assert_eq!((least, greatest), (0, -5));
    apply(&api, "cuCtxSynchronize_v2", (NONE,));
}

#[test]
fn pushes_and_pops_contexts_in_both_versions() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let (mut other, mut popped) = (NONE, NONE);
    apply(&api, "cuCtxCreate_v2", (&raw mut other, 0u32, 1));
    for (push, pop) in [
        ("cuCtxPushCurrent", "cuCtxPopCurrent"),
        ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
    ] {
        apply(&api, pop, (&raw mut popped,));
        assert_eq!(popped, other);
        assert_eq!(read(&api, "cuCtxGetDevice"), 0);
        apply(&api, push, (other,));
        assert_eq!(read(&api, "cuCtxGetDevice"), 1);
    }
    apply(&api, "cuCtxDetach", (other,));
    assert_eq!(read(&api, "cuCtxGetDevice"), 0);
}

#[test]
fn returns_device_and_context_of_a_stream() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let (mut stream, mut device) = (NONE, -1);
    apply(
        &api,
        "cuStreamCreateWithPriority",
        (&raw mut stream, 1u32, -3),
    );
    apply(&api, "cuStreamGetDevice", (stream, &raw mut device));
    assert_eq!(device, 0);
    let (mut of, mut current) = (NONE, NONE);
    apply(&api, "cuStreamGetCtx", (stream, &raw mut of));
    apply(&api, "cuCtxGetCurrent", (&raw mut current,));
    assert_eq!(of, current);
    apply(&api, "cuStreamDestroy", (stream,));
    let code = call!(api, "cuStreamGetCtx", stream, &raw mut of);
    assert_eq!(code, INVALID_HANDLE);
    for destroy in ["cuEventDestroy", "cuEventDestroy_v2"] {
        let event = api.event();
        apply(&api, destroy, (event,));
        assert_eq!(call!(api, "cuEventQuery", event), INVALID_HANDLE);
    }
}

fn text(pointer: *const std::ffi::c_char) -> String {
    assert!(!pointer.is_null());
    unsafe { CStr::from_ptr(pointer) }
        .to_str()
        .unwrap()
        .to_owned()
}

#[test]
fn returns_attributes_and_occupancy_of_a_function() {
    const DYNAMIC_SHARED: u32 = 8;
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let used = || machine.gpu(0).unwrap().used_bytes;
    let (file, mut module, mut function) = (machine.root().join("code"), NONE, NONE);
    let path = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
    let load = |module: &mut Handle| {
        call!(
            api,
            "cuModuleLoad",
            std::ptr::from_mut(module),
            path.as_ptr()
        )
    };
    assert_eq!(load(&mut module), FILE_NOT_FOUND);
    std::fs::write(&file, "any image").unwrap();
    assert_eq!(load(&mut module), 0);
    apply(
        &api,
        "cuModuleGetFunction",
        (&raw mut function, module, c"spin".as_ptr()),
    );
    let mut value = 0;
    apply(&api, "cuFuncSetAttribute", (function, DYNAMIC_SHARED, 4096));
    apply(
        &api,
        "cuFuncGetAttribute",
        (&raw mut value, DYNAMIC_SHARED, function),
    );
    assert_eq!(value, 4096);
    assert_eq!(
        call!(api, "cuFuncSetAttribute", function, 999u32, 1),
        INVALID_VALUE
    );
    apply(&api, "cuFuncSetCacheConfig", (function, 1u32));
    for occupancy in [
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    ] {
        let mut blocks = 0;
        apply(
            &api,
            occupancy,
            (&raw mut blocks, function, 256, 0usize, 0u32),
        );
        assert_eq!(blocks, 4, "{occupancy}");
    }
    let before = used();
    let (mut address, mut bytes) = (0u64, 0usize);
    apply(
        &api,
        "cuModuleGetGlobal_v2",
        (&raw mut address, &raw mut bytes, module, c"global".as_ptr()),
    );
    assert!(bytes > 0);
    api.write(address, &[1]);
    apply(&api, "cuModuleUnload", (module,));
    assert_eq!(used(), before);
    assert_eq!(call!(api, "cuModuleUnload", module), INVALID_HANDLE);
}

#[test]
fn loads_modules_and_globals_of_a_library() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let (file, mut library) = (machine.root().join("code"), NONE);
    let path = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
    let load = |library: &mut Handle| {
        let library = std::ptr::from_mut(library);
        call!(
            api,
            "cuLibraryLoadFromFile",
            library,
            path.as_ptr(),
            NONE,
            NONE,
            0u32,
            NONE,
            NONE,
            0u32
        )
    };
    assert_eq!(load(&mut library), FILE_NOT_FOUND);
    std::fs::write(&file, "any image").unwrap();
    assert_eq!(load(&mut library), 0);
    let (mut module, mut address, mut bytes) = (NONE, 0u64, 0usize);
    apply(&api, "cuLibraryGetModule", (&raw mut module, library));
    apply(
        &api,
        "cuLibraryGetGlobal",
        (
            &raw mut address,
            &raw mut bytes,
            library,
            c"global".as_ptr(),
        ),
    );
    assert!(bytes > 0 && !module.is_null());
}

#[test]
fn allocates_and_frees_host_memory_in_each_version() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (mut first, mut second, mut third) = (0u64, 0u64, 0u64);
    apply(&api, "cuMemAllocHost", (&raw mut first, 4096u32));
    apply(&api, "cuMemAllocHost_v2", (&raw mut second, 4096usize));
    apply(&api, "cuMemHostAlloc", (&raw mut third, 4096usize, 3u32));
    for address in [first, second, third] {
        apply(&api, "cuMemFreeHost", (address,));
        assert_eq!(call!(api, "cuMemFreeHost", address), INVALID_VALUE);
    }
}

#[test]
fn returns_uuids_and_error_texts() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let (mut first, mut second) = ([0u8; 16], [0u8; 16]);
    apply(&api, "cuDeviceGetUuid", (first.as_mut_ptr(), 0));
    apply(&api, "cuDeviceGetUuid_v2", (second.as_mut_ptr(), 0));
    assert_eq!(first, second);
    let mut message = std::ptr::null();
    apply(&api, "cuGetErrorString", (2u32, &raw mut message));
    assert_eq!(text(message), "out of memory");
}
