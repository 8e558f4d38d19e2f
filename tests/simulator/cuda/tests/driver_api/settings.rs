//! What is set is what is read: contexts, streams, functions, kernels, memory; and what is read of
//! things that are not set.

use std::ffi::CStr;

use simulator_machine::description::{H100X2, MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_HANDLE, INVALID_VALUE, Invoke, call};

const NONE: Handle = std::ptr::null_mut();
const FILE_NOT_FOUND: u32 = 301;

/// Reads a number with the function that is named.
fn read(api: &Api, name: &str) -> i32 {
    let mut value = -77i32;
    let code: u32 = Invoke::invoke(api.symbol(name), (&raw mut value,));
    assert_eq!(code, 0, "{name}");
    value
}

/// Reads a number about something.
fn read_of<T>(api: &Api, name: &str, of: T) -> i32 {
    let mut value = -77i32;
    let code: u32 = Invoke::invoke(api.symbol(name), (&raw mut value, of));
    assert_eq!(code, 0, "{name}");
    value
}

/// The same, where what it is about comes first.
fn read_from<T>(api: &Api, name: &str, of: T) -> i32 {
    let mut value = -77i32;
    let code: u32 = Invoke::invoke(api.symbol(name), (of, &raw mut value));
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
fn settings_of_a_context_are_kept() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    for (set, get) in [
        ("cuCtxSetFlags", "cuCtxGetFlags"),
        ("cuCtxSetCacheConfig", "cuCtxGetCacheConfig"),
        ("cuCtxSetSharedMemConfig", "cuCtxGetSharedMemConfig"),
    ] {
        assert_eq!(read(&api, get), 0, "{get}");
        apply(&api, set, (2u32,));
        assert_eq!(read(&api, get), 2, "{get}");
    }
    assert_eq!(read(&api, "cuCtxGetDevice"), 0);
    assert_eq!(read_of(&api, "cuCtxGetDevice_v2", NONE), 0);
    assert_eq!(read_from(&api, "cuCtxGetApiVersion", NONE), 3020);
    let mut current = NONE;
    apply(&api, "cuCtxAttach", (&raw mut current, 0u32));
    let mut ids = [0u64; 2];
    apply(&api, "cuCtxGetId", (NONE, &raw mut ids[0]));
    apply(&api, "cuCtxGetId", (current, &raw mut ids[1]));
    assert_eq!(ids[0], ids[1]);
    let (mut least, mut greatest) = (9, 9);
    apply(
        &api,
        "cuCtxGetStreamPriorityRange",
        (&raw mut least, &raw mut greatest),
    );
    assert_eq!((least, greatest), (0, -5));
    apply(&api, "cuCtxResetPersistingL2Cache", ());
    apply(&api, "cuCtxSynchronize_v2", (NONE,));
}

#[test]
fn contexts_are_pushed_and_popped() {
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
    for set in [
        "cuDevicePrimaryCtxSetFlags",
        "cuDevicePrimaryCtxSetFlags_v2",
    ] {
        let flags = 4 + u32::from(set.ends_with("v2"));
        apply(&api, set, (1, flags));
        let (mut found, mut active) = (0u32, 9);
        apply(
            &api,
            "cuDevicePrimaryCtxGetState",
            (1, &raw mut found, &raw mut active),
        );
        assert_eq!((found, active), (flags, 0), "{set}");
    }
}

#[test]
fn a_stream_says_how_it_was_made() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let mut stream = NONE;
    for (wanted, kept) in [(-3, -3), (-9, -5), (7, 0)] {
        apply(
            &api,
            "cuStreamCreateWithPriority",
            (&raw mut stream, 1u32, wanted),
        );
        assert_eq!(read_from(&api, "cuStreamGetPriority", stream), kept);
        assert_eq!(read_from(&api, "cuStreamGetFlags", stream), 1);
        assert_eq!(read_from(&api, "cuStreamGetDevice", stream), 0);
    }
    let (mut of, mut current) = (NONE, NONE);
    apply(&api, "cuStreamGetCtx", (stream, &raw mut of));
    apply(&api, "cuCtxGetCurrent", (&raw mut current,));
    assert_eq!(of, current);
    let mut ids = [0u64; 2];
    let other = api.stream(1);
    apply(&api, "cuStreamGetId", (stream, &raw mut ids[0]));
    apply(&api, "cuStreamGetId", (other, &raw mut ids[1]));
    assert_ne!(ids[0], ids[1]);
    apply(&api, "cuStreamDestroy", (stream,));
    let code = call!(api, "cuStreamGetCtx", stream, &raw mut of);
    assert_eq!(code, INVALID_HANDLE);
    for destroy in ["cuEventDestroy", "cuEventDestroy_v2"] {
        let event = api.event();
        apply(&api, "cuEventRecordWithFlags", (event, other, 0u32));
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
fn functions_know_their_module_and_their_settings() {
    const DYNAMIC_SHARED: u32 = 8;
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let used = || machine.card(0).unwrap().used_bytes;
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
    let mut of = NONE;
    apply(&api, "cuFuncGetModule", (&raw mut of, function));
    assert_eq!(of, module);
    let mut name = std::ptr::null();
    apply(&api, "cuFuncGetName", (&raw mut name, function));
    assert_eq!(text(name), "spin");
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
    apply(&api, "cuFuncSetSharedMemConfig", (function, 1u32));
    apply(&api, "cuFuncSetSharedSize", (function, 64u32));
    let (mut offset, mut size) = (9usize, 0usize);
    apply(
        &api,
        "cuFuncGetParamInfo",
        (function, 0usize, &raw mut offset, &raw mut size),
    );
    assert_eq!((offset, size), (0, 8));
    // Loaded when it is asked to be.
    const LAZY: i32 = 2;
    assert_eq!(read(&api, "cuModuleGetLoadingMode"), LAZY);
    let before = used();
    assert_eq!(read_of(&api, "cuFuncIsLoaded", function), 0);
    apply(&api, "cuFuncLoad", (function,));
    assert_eq!(read_of(&api, "cuFuncIsLoaded", function), 1);
    assert_eq!(used(), before + 2 * MIB);
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
    let (mut address, mut bytes) = (0u64, 0usize);
    apply(
        &api,
        "cuModuleGetGlobal_v2",
        (&raw mut address, &raw mut bytes, module, c"global".as_ptr()),
    );
    assert!(bytes > 0);
    api.write(address, &[1]);
    apply(&api, "cuModuleUnload", (module,));
    // The global is gone; code memory is kept for the next module.
    assert_eq!(used(), before + 2 * MIB);
    assert_eq!(call!(api, "cuModuleUnload", module), INVALID_HANDLE);
    let mut fat = NONE;
    apply(
        &api,
        "cuModuleLoadFatBinary",
        (&raw mut fat, c"any image".as_ptr()),
    );
}

#[test]
fn kernels_know_their_library_and_their_settings() {
    const DYNAMIC_SHARED: u32 = 8;
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let (file, mut library, mut kernel) = (machine.root().join("code"), NONE, NONE);
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
    apply(
        &api,
        "cuLibraryGetKernel",
        (&raw mut kernel, library, c"spin".as_ptr()),
    );
    assert_eq!(read_of(&api, "cuLibraryGetKernelCount", library), 1);
    let (mut listed, mut of) = ([NONE; 2], NONE);
    apply(
        &api,
        "cuLibraryEnumerateKernels",
        (listed.as_mut_ptr(), 2u32, library),
    );
    assert_eq!(listed, [kernel, NONE]);
    apply(&api, "cuKernelGetLibrary", (&raw mut of, kernel));
    assert_eq!(of, library);
    let mut name = std::ptr::null();
    apply(&api, "cuKernelGetName", (&raw mut name, kernel));
    assert_eq!(text(name), "spin");
    // For each device its own.
    let mut value = 0;
    apply(
        &api,
        "cuKernelSetAttribute",
        (DYNAMIC_SHARED, 4096, kernel, 1),
    );
    for (device, expected) in [(0, 48 << 10), (1, 4096)] {
        apply(
            &api,
            "cuKernelGetAttribute",
            (&raw mut value, DYNAMIC_SHARED, kernel, device),
        );
        assert_eq!(value, expected, "{device}");
    }
    apply(&api, "cuKernelSetCacheConfig", (kernel, 1u32, 0));
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
    const NOT_FOUND: u32 = 500;
    let none = call!(
        api,
        "cuLibraryGetManaged",
        &raw mut address,
        &raw mut bytes,
        library,
        c"x".as_ptr()
    );
    assert_eq!(none, NOT_FOUND);
    let none = call!(
        api,
        "cuLibraryGetUnifiedFunction",
        &raw mut of,
        library,
        c"x".as_ptr()
    );
    assert_eq!(none, NOT_FOUND);
}

#[test]
fn host_memory_is_known_by_its_flags() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (mut first, mut device) = (0u64, 0u64);
    apply(&api, "cuMemAllocHost", (&raw mut first, 4096u32));
    apply(
        &api,
        "cuMemHostGetDevicePointer_v2",
        (&raw mut device, first, 0u32),
    );
    assert_eq!(device, first);
    assert_eq!(read_of(&api, "cuMemHostGetFlags", first), 0);
    apply(&api, "cuMemFreeHost", (first,));
    assert_eq!(call!(api, "cuMemFreeHost", first), INVALID_VALUE);
    let mut second = 0u64;
    apply(&api, "cuMemHostAlloc", (&raw mut second, 4096usize, 3u32));
    assert_eq!(read_of(&api, "cuMemHostGetFlags", second), 3);
    let mut own = vec![0u8; 8192];
    let own = own.as_mut_ptr().expose_provenance() as u64;
    apply(&api, "cuMemHostRegister", (own, 8192u32, 2u32));
    assert_eq!(read_of(&api, "cuMemHostGetFlags", own + 5), 2);
    let again = call!(api, "cuMemHostRegister_v2", own, 8192usize, 2u32);
    assert_eq!(
        api.error_name(again),
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    );
    let mut value = 1u8;
    apply(
        &api,
        "cuPointerSetAttribute",
        (&raw const value, 6u32, second),
    );
    value = 0;
    assert_eq!(
        call!(api, "cuPointerSetAttribute", &raw const value, 1u32, second),
        INVALID_VALUE
    );
}

#[test]
fn devices_are_found_by_their_bus_id() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    for device in 0..2 {
        let mut id = [0u8; 32];
        apply(&api, "cuDeviceGetPCIBusId", (id.as_mut_ptr(), 32, device));
        assert_eq!(read_of(&api, "cuDeviceGetByPCIBusId", id.as_ptr()), device);
    }
    let (mut major, mut minor) = (0, 0);
    apply(
        &api,
        "cuDeviceComputeCapability",
        (&raw mut major, &raw mut minor, 0),
    );
    assert_eq!((major, minor), (9, 0));
    let (mut first, mut second) = ([0u8; 16], [0u8; 16]);
    apply(&api, "cuDeviceGetUuid", (first.as_mut_ptr(), 0));
    apply(&api, "cuDeviceGetUuid_v2", (second.as_mut_ptr(), 0));
    assert_eq!(first, second);
    const ACCESS_SUPPORTED: u32 = 2;
    let mut value = 0;
    apply(
        &api,
        "cuDeviceGetP2PAttribute",
        (&raw mut value, ACCESS_SUPPORTED, 0, 1),
    );
    assert_eq!(value, 1);
    let mut width = 0usize;
    apply(
        &api,
        "cuDeviceGetTexture1DLinearMaxWidth",
        (&raw mut width, 0x20u32, 4u32, 0),
    );
    assert_eq!(width, 1 << 28);
    let mut message = std::ptr::null();
    apply(&api, "cuGetErrorString", (2u32, &raw mut message));
    assert_eq!(text(message), "out of memory");
}
