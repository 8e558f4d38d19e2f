//! Images of modules.

use std::ffi::CStr;

use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, call};

const MS: u64 = 1_000_000;
const NOT_READY: u32 = 600;

/// As on an H200: a load waits for the kernels of its context, and of no other one.
#[test]
fn waits_for_kernels_of_context_that_loads_code() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let none: Handle = std::ptr::null_mut();
    let mut library = none;
    let loaded = call!(
        api,
        "cuLibraryLoadData",
        &raw mut library,
        c"".as_ptr(),
        none,
        none,
        0u32,
        none,
        none,
        0u32
    );
    assert_eq!(loaded, 0);
    let mut kernel = none;
    let spin = api.function(c"spin");
    let stream = api.stream(1);
    api.spin(spin, stream, 1, 200 * MS);
    let requested = call!(
        api,
        "cuLibraryGetKernel",
        &raw mut kernel,
        library,
        c"any".as_ptr()
    );
    assert_eq!(requested, 0);
    assert_eq!(call!(api, "cuStreamQuery", stream), NOT_READY);
    let load = |api: &Api| {
        let mut module = none;
        let image = c"any image".as_ptr();
        call!(api, "cuModuleLoadData", &raw mut module, image)
    };
    let mut own = none;
    assert_eq!(call!(api, "cuCtxGetCurrent", &raw mut own), 0);
    let mut other = none;
    assert_eq!(call!(api, "cuCtxCreate_v2", &raw mut other, 0u32, 0), 0);
    assert_eq!(load(&api), 0);
    assert_eq!(call!(api, "cuCtxSetCurrent", own), 0);
    assert_eq!(call!(api, "cuStreamQuery", stream), NOT_READY);
    assert_eq!(load(&api), 0);
    assert_eq!(call!(api, "cuStreamQuery", stream), 0);
    // The first use of a library is such a load.
    for _ in 0..2 {
        api.spin(spin, stream, 1, 20 * MS);
        let mut function = none;
        assert_eq!(
            call!(api, "cuKernelGetFunction", &raw mut function, kernel),
            0
        );
    }
    assert_eq!(call!(api, "cuStreamQuery", stream), NOT_READY);
    api.synchronize();
}

/// As on an H200: the buffer stays with the context.
#[test]
fn takes_buffer_for_first_module_that_prints() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let mut module: Handle = std::ptr::null_mut();
    let image =
        c".version 6.4\n.extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);\n";
    for _ in 0..2 {
        let image = image.as_ptr();
        assert_eq!(call!(api, "cuModuleLoadData", &raw mut module, image), 0);
        assert_eq!(machine.gpu(0).unwrap().used_bytes - idle, 64 << 20);
        assert_eq!(call!(api, "cuModuleUnload", module), 0);
    }
    assert_eq!(machine.gpu(0).unwrap().used_bytes - idle, 64 << 20);
}

/// As a profiler: by a private function.
#[test]
fn reserves_memory_by_export_table() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let mut table: *const [usize; 2] = std::ptr::null();
    for (id, expected) in [(b"another libraries", 500), (b"simulated export\0", 0)] {
        let got = call!(api, "cuGetExportTable", &raw mut table, id.as_ptr());
        assert_eq!(got, expected);
    }
    // SAFETY: the table has a size and a function.
    let [_, function] = unsafe { table.read() };
    // SAFETY: the function has this signature.
    let begin: extern "C" fn() -> u32 =
        unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<()>(function)) };
    assert_eq!(begin(), 0);
    assert_eq!(machine.gpu(0).unwrap().used_bytes - idle, 256 << 20);
}

#[test]
fn rejects_ptx_with_other_characters_than_ascii() {
    const INVALID_PTX: u32 = 218;
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let load = |image: &CStr| {
        let mut module: Handle = std::ptr::null_mut();
        call!(api, "cuModuleLoadData", &raw mut module, image.as_ptr())
    };
    assert_eq!(load(c".version 6.4\n// c = a * b"), 0);
    assert_eq!(load(c".version 6.4\n// c = a · b"), INVALID_PTX);
    assert_eq!(load(c"// c = a · b\n.version 6.4"), INVALID_PTX);
    assert_eq!(api.error_name(INVALID_PTX), "CUDA_ERROR_INVALID_PTX");
}
