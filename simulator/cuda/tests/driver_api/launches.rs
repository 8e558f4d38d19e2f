//! Launch variants: library kernels, launch functions before CUDA 4, cooperative launches, host
//! functions; and the memory that launches take.

use std::ffi::{CStr, c_void};
use std::sync::Mutex;

use cudarc::driver::sys;
use simulator_machine::description::{H100X2, MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_HANDLE, OUT_OF_MEMORY, call};

const MS: u64 = 1_000_000;
const NONE: Handle = std::ptr::null_mut();
/// Blocks that fill a T4, at 1024 threads each.
const ALL: u32 = 40;
/// Threads that a T4 holds at once.
const THREADS: u64 = 40 * 1024;

fn library(api: &Api) -> Handle {
    let mut library = NONE;
    let code = call!(
        api,
        "cuLibraryLoadData",
        &raw mut library,
        c"any image".as_ptr(),
        NONE,
        NONE,
        0u32,
        NONE,
        NONE,
        0u32
    );
    assert_eq!(code, 0);
    library
}

fn kernel(api: &Api, library: Handle, name: &CStr) -> Handle {
    let mut kernel = NONE;
    let code = call!(
        api,
        "cuLibraryGetKernel",
        &raw mut kernel,
        library,
        name.as_ptr()
    );
    assert_eq!(code, 0);
    kernel
}

fn busy(machine: &Machine, gpu: usize) -> (u64, u64) {
    let gpu = machine.gpu(gpu).unwrap();
    let kernels = gpu.processes.iter().map(|process| process.kernels);
    (kernels.sum(), gpu.busy_nanos)
}

#[test]
fn runs_library_kernel_in_every_context() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::open(&machine);
    assert_eq!(call!(api, "cuInit", 0u32), 0);
    // Needs no context.
    let library = library(&api);
    let spin = kernel(&api, library, c"spin");
    let mut functions = Vec::new();
    for device in 0..2 {
        api.enter(device);
        let index = usize::try_from(device).unwrap();
        let idle = machine.gpu(index).unwrap().used_bytes;
        api.spin(spin, NONE, 1, 5 * MS);
        api.synchronize();
        assert_eq!(busy(&machine, index), (1, 5 * MS));
        // The first use of the kernel loads the module.
        assert!(machine.gpu(index).unwrap().used_bytes > idle);
        let mut function = NONE;
        assert_eq!(
            call!(api, "cuKernelGetFunction", &raw mut function, spin),
            0
        );
        api.spin(function, NONE, 1, 5 * MS);
        api.synchronize();
        assert_eq!(busy(&machine, index), (2, 10 * MS));
        functions.push(function);
    }
    assert_ne!(functions[0], functions[1]);
    assert_eq!(kernel(&api, library, c"spin"), spin);
    assert_eq!(call!(api, "cuLibraryUnload", library), 0);
    let mut function = NONE;
    assert_eq!(
        call!(api, "cuKernelGetFunction", &raw mut function, spin),
        INVALID_HANDLE
    );
}

#[test]
fn launches_with_functions_before_cuda_4() {
    const DEFAULT_KERNEL_NANOS: u64 = 5_000;
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let kernel = api.function(c"kernel");
    assert_eq!(call!(api, "cuFuncSetBlockShape", kernel, 1024, 1, 1), 0);
    assert_eq!(call!(api, "cuLaunch", kernel), 0);
    assert_eq!(call!(api, "cuLaunchGrid", kernel, 40, 2), 0);
    assert_eq!(call!(api, "cuLaunchGridAsync", kernel, 40, 2, NONE), 0);
    api.synchronize();
    assert_eq!(busy(&machine, 0), (3, 3 * DEFAULT_KERNEL_NANOS));
}

#[test]
fn rejects_cooperative_launch_that_is_not_resident() {
    const TOO_LARGE: u32 = 720;
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let stream = api.stream(1);
    let mut nanos = 3 * MS;
    let mut parameters = [(&raw mut nanos).cast::<c_void>()];
    let mut launch = |blocks: u32| {
        let mut params = sys::CUDA_LAUNCH_PARAMS {
            function: spin.cast(),
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 1024,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream.cast(),
            kernelParams: parameters.as_mut_ptr(),
        };
        call!(
            api,
            "cuLaunchCooperativeKernelMultiDevice",
            &raw mut params,
            1u32,
            0u32
        )
    };
    assert_eq!(launch(ALL + 1), TOO_LARGE);
    assert_eq!(launch(ALL), 0);
    api.synchronize();
    assert_eq!(busy(&machine, 0), (1, 3 * MS));
}

#[test]
fn grows_local_memory_at_launch() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let module = 2 * MIB;
    let launch = |name: &CStr| {
        let function = api.function(name);
        let code = api.launch(function, NONE, [1, 32], std::ptr::null_mut());
        api.synchronize();
        code
    };
    assert_eq!(launch(c"local_1024"), 0);
    assert_eq!(used(), module);
    assert_eq!(launch(c"local_4096"), 0);
    assert_eq!(used(), 2 * module + 3072 * THREADS);
    assert_eq!(launch(c"local_2048"), 0);
    assert_eq!(used(), 3 * module + 3072 * THREADS);
    assert_eq!(launch(c"local_8192"), 0);
    assert_eq!(used(), 4 * module + 7168 * THREADS);
    let mut limit = 0usize;
    assert_eq!(call!(api, "cuCtxGetLimit", &raw mut limit, 0u32), 0);
    assert_eq!(limit, 8192);
    assert_eq!(launch(c"local_1048576"), OUT_OF_MEMORY);
    let mut bytes = 0;
    let function = api.function(c"local_4096");
    const LOCAL_SIZE_BYTES: u32 = 3;
    let code = call!(
        api,
        "cuFuncGetAttribute",
        &raw mut bytes,
        LOCAL_SIZE_BYTES,
        function
    );
    assert_eq!((code, bytes), (0, 4096));
}

#[test]
fn reserves_memory_for_stack_and_heap_limits() {
    const STACK_SIZE: u32 = 0;
    const MALLOC_HEAP_SIZE: u32 = 2;
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    let set = |limit: u32, value: u64| call!(api, "cuCtxSetLimit", limit, value);
    assert_eq!(set(MALLOC_HEAP_SIZE, 8 * MIB), 0);
    assert_eq!(used(), 0);
    assert_eq!(set(MALLOC_HEAP_SIZE, 64 * MIB), 0);
    assert_eq!(used(), 64 * MIB);
    assert_eq!(set(STACK_SIZE, 2048), 0);
    assert_eq!(used(), 64 * MIB + 1024 * THREADS);
    assert_eq!(set(STACK_SIZE, 4096), 0);
    assert_eq!(used(), 64 * MIB + 3072 * THREADS);
    assert_eq!(set(STACK_SIZE, 1024), 0);
    assert_eq!(used(), 64 * MIB);
    assert_eq!(set(MALLOC_HEAP_SIZE, 1 << 40), OUT_OF_MEMORY);
    let mut value = 0usize;
    let code = call!(api, "cuCtxGetLimit", &raw mut value, MALLOC_HEAP_SIZE);
    assert_eq!((code, value), (0, 64 << 20));
}

#[test]
fn runs_host_functions_in_stream_order() {
    static SEEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    extern "C" fn note(number: *mut c_void) {
        SEEN.lock().unwrap().push(number.addr());
    }

    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let stream = api.stream(1);
    for number in 0..20usize {
        api.spin(spin, stream, 1, MS);
        let code = call!(
            api,
            "cuLaunchHostFunc",
            stream,
            note as extern "C" fn(*mut c_void),
            number
        );
        assert_eq!(code, 0);
    }
    assert_eq!(call!(api, "cuStreamSynchronize", stream), 0);
    assert_eq!(*SEEN.lock().unwrap(), (0..20).collect::<Vec<_>>());
    assert_eq!(busy(&machine, 0), (20, 20 * MS));
}
