//! Device resources and green contexts.

use cudarc::driver::sys;
use simulator_machine::description::{H100X2, MIB};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_CONTEXT, INVALID_VALUE, call};

const MS: u64 = 1_000_000;
const NONE: Handle = std::ptr::null_mut();
const SM: u32 = 1;
const NON_BLOCKING: u32 = 1;

fn whole(api: &Api) -> sys::CUdevResource {
    let mut resource: sys::CUdevResource = unsafe { std::mem::zeroed() };
    assert_eq!(
        call!(api, "cuDeviceGetDevResource", 0, &raw mut resource, SM),
        0
    );
    resource
}

/// A part of device 0 with this many multiprocessors.
fn part(api: &Api, multiprocessors: u32) -> sys::CUdevResource {
    let mut resource = whole(api);
    resource.__bindgen_anon_1.sm.smCount = multiprocessors;
    resource
}

fn green(api: &Api, resources: &mut [sys::CUdevResource]) -> Handle {
    let (mut description, mut green) = (NONE, NONE);
    let count = u32::try_from(resources.len()).unwrap();
    let code = call!(
        api,
        "cuDevResourceGenerateDesc",
        &raw mut description,
        resources.as_mut_ptr(),
        count
    );
    assert_eq!(code, 0);
    assert_eq!(
        call!(
            api,
            "cuGreenCtxCreate",
            &raw mut green,
            description,
            0,
            0u32
        ),
        INVALID_VALUE
    );
    assert_eq!(
        call!(
            api,
            "cuGreenCtxCreate",
            &raw mut green,
            description,
            0,
            1u32
        ),
        0
    );
    green
}

/// Makes the context of a green context current.
fn enter(api: &Api, green: Handle) -> Handle {
    let mut context = NONE;
    assert_eq!(call!(api, "cuCtxFromGreenCtx", &raw mut context, green), 0);
    assert_eq!(call!(api, "cuCtxSetCurrent", context), 0);
    context
}

#[test]
fn runs_green_contexts_concurrently() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::start(&machine);
    let greens = [64, 68].map(|count| green(&api, &mut [part(&api, count)]));
    let streams = greens.map(|green| {
        enter(&api, green);
        api.stream(NON_BLOCKING)
    });
    let spin = api.function(c"spin");
    let before = machine.gpu(0).unwrap().busy_nanos;
    // Each would fill the whole GPU.
    for stream in streams {
        api.spin(spin, stream, 10_000, 40 * MS);
    }
    api.synchronize();
    let busy = machine.gpu(0).unwrap().busy_nanos - before;
    assert!((40 * MS..80 * MS).contains(&busy), "{busy}");
    let mut of = NONE;
    let mut context = NONE;
    assert_eq!(
        call!(
            api,
            "cuStreamGetCtx_v2",
            streams[1],
            &raw mut context,
            &raw mut of
        ),
        0
    );
    assert_eq!((context, of), (NONE, greens[1]));
}

#[test]
fn charges_green_context_memory_to_the_primary_context() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::open(&machine);
    assert_eq!(call!(api, "cuInit", 0u32), 0);
    let used = || machine.gpu(0).unwrap().used_bytes;
    assert_eq!(used(), 0);
    // Creates the primary context, which the test does not retain itself.
    let green = green(&api, &mut [part(&api, 16)]);
    let context_bytes = used();
    assert!(context_bytes > 0);
    let context = enter(&api, green);
    let mut current = NONE;
    assert_eq!(call!(api, "cuCtxGetCurrent", &raw mut current), 0);
    assert_eq!(current, context);
    let address = api.allocate(64 * MIB).unwrap();
    let small = api.allocate(100).unwrap();
    assert_eq!(used(), context_bytes + 66 * MIB);
    assert_eq!(call!(api, "cuCtxDestroy_v2", context), INVALID_CONTEXT);

    let mut primary = NONE;
    assert_eq!(
        call!(api, "cuDevicePrimaryCtxRetain", &raw mut primary, 0),
        0
    );
    assert_eq!(call!(api, "cuGreenCtxDestroy", green), 0);
    assert_eq!(used(), context_bytes + 66 * MIB);
    assert_eq!(call!(api, "cuCtxSetCurrent", primary), 0);
    api.free(small);
    assert_eq!(used(), context_bytes + 64 * MIB);
    assert_eq!(call!(api, "cuMemsetD8_v2", address, 1u8, 16usize), 0);
    assert_eq!(call!(api, "cuDevicePrimaryCtxRelease_v2", 0), 0);
    assert_eq!(used(), 0);
}

#[test]
fn destroys_primary_context_with_the_last_green_context() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::open(&machine);
    assert_eq!(call!(api, "cuInit", 0u32), 0);
    let greens = [16, 16].map(|count| green(&api, &mut [part(&api, count)]));
    enter(&api, greens[0]);
    api.allocate(8 * MIB).unwrap();
    assert_eq!(call!(api, "cuGreenCtxDestroy", greens[0]), 0);
    assert!(machine.gpu(0).unwrap().used_bytes > 8 * MIB);
    assert_eq!(call!(api, "cuGreenCtxDestroy", greens[1]), 0);
    assert_eq!(machine.gpu(0).unwrap().used_bytes, 0);
    assert_eq!(call!(api, "cuGreenCtxDestroy", greens[1]), INVALID_CONTEXT);
}
