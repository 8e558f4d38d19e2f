use simulator_machine::description::{H100X2, MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_CONTEXT, NOT_INITIALIZED, call};

const CONTEXT: u64 = 104 * MIB;

#[test]
fn rejects_calls_before_cu_init() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::open(&machine);
    let mut count = 0;
    assert_eq!(
        call!(api, "cuDeviceGetCount", &raw mut count),
        NOT_INITIALIZED
    );
    assert_eq!(
        api.error_name(NOT_INITIALIZED),
        "CUDA_ERROR_NOT_INITIALIZED"
    );
    assert_eq!(call!(api, "cuInit", 0u32), 0);
    assert_eq!(api.allocate(1), Err(INVALID_CONTEXT));
    assert_eq!(machine.gpu(0).unwrap().used_bytes, 0);
}

#[test]
fn holds_primary_context_memory_while_retained() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let used = || machine.gpu(0).unwrap().used_bytes;
    assert_eq!(used(), CONTEXT);
    let mut second: Handle = std::ptr::null_mut();
    assert_eq!(
        call!(api, "cuDevicePrimaryCtxRetain", &raw mut second, 0),
        0
    );
    assert_eq!(used(), CONTEXT);
    api.allocate(64 * MIB).unwrap();
    assert_eq!(call!(api, "cuDevicePrimaryCtxRelease_v2", 0), 0);
    assert_eq!(used(), CONTEXT + 64 * MIB);
    assert_eq!(call!(api, "cuDevicePrimaryCtxRelease_v2", 0), 0);
    assert_eq!(used(), 0);
    assert_eq!(
        call!(api, "cuDevicePrimaryCtxRelease_v2", 0),
        INVALID_CONTEXT
    );
    let (mut flags, mut active) = (7u32, 7);
    assert_eq!(
        call!(
            api,
            "cuDevicePrimaryCtxGetState",
            0,
            &raw mut flags,
            &raw mut active
        ),
        0
    );
    assert_eq!((flags, active), (0, 0));
}

#[test]
fn keeps_one_context_stack_per_thread() {
    let machine = Machine::start(H100X2).unwrap();
    let api = Api::open(&machine);
    assert_eq!(call!(api, "cuInit", 0u32), 0);
    let create = |device: i32| {
        let mut context: Handle = std::ptr::null_mut();
        assert_eq!(
            call!(api, "cuCtxCreate_v2", &raw mut context, 0u32, device),
            0
        );
        context
    };
    let current = || {
        let mut context: Handle = std::ptr::null_mut();
        assert_eq!(call!(api, "cuCtxGetCurrent", &raw mut context), 0);
        context
    };
    let (first, second) = (create(0), create(1));
    assert_eq!(current(), second);
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(current().is_null()));
    });
    assert_eq!(call!(api, "cuCtxDestroy_v2", second), 0);
    assert_eq!(current(), first);
    let mut popped: Handle = std::ptr::null_mut();
    assert_eq!(call!(api, "cuCtxPopCurrent_v2", &raw mut popped), 0);
    assert_eq!((popped, current()), (first, std::ptr::null_mut()));
    assert_eq!(call!(api, "cuCtxPushCurrent_v2", second), INVALID_CONTEXT);
    assert_eq!(machine.gpu(1).unwrap().used_bytes, 0);
}

#[test]
fn hides_gpus_without_device_node() {
    let machine = Machine::start(H100X2).unwrap();
    std::fs::remove_file(machine.root().join("dev/nvidia0")).unwrap();
    let api = Api::start(&machine);
    let mut count = 0;
    assert_eq!(call!(api, "cuDeviceGetCount", &raw mut count), 0);
    assert_eq!(count, 1);
    api.allocate(MIB).unwrap();
    assert_eq!(machine.gpu(0).unwrap().used_bytes, 0);
    assert_ne!(machine.gpu(1).unwrap().used_bytes, 0);
}

#[test]
fn fails_calls_in_context_of_failed_kernel_until_its_end() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    for (error, name) in [
        (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
        (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
        (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (719, "CUDA_ERROR_LAUNCH_FAILED"),
    ] {
        let mut context: Handle = std::ptr::null_mut();
        let created = call!(api, "cuCtxCreate_v2", &raw mut context, 0u32, 0i32);
        assert_eq!(created, 0);
        let event = api.event();
        api.allocate(64 * MIB).unwrap();
        api.spin(
            api.function(c"fault"),
            std::ptr::null_mut(),
            1,
            error.into(),
        );
        assert_eq!(call!(api, "cuCtxSynchronize"), error);
        assert_eq!(call!(api, "cuEventQuery", event), error);
        assert_eq!(api.allocate(1), Err(error));
        assert_eq!(api.error_name(error), name);
        assert_eq!(call!(api, "cuCtxDestroy_v2", context), 0);
        // The primary context of the process still works.
        api.synchronize();
        assert_eq!(machine.gpu(0).unwrap().used_bytes, CONTEXT);
    }
}
