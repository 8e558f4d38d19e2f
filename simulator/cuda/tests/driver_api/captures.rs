//! Stream capture: results and invalidation.

use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, call};

const MS: u64 = 1_000_000;
const NON_BLOCKING: u32 = 1;
const NONE: Handle = std::ptr::null_mut();
/// Blocks that fill a T4, at 1024 threads each.
const ALL: u32 = 40;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

const ILLEGAL_STATE: u32 = 401;
const UNSUPPORTED: u32 = 900;
const INVALIDATED: u32 = 901;
const MERGE: u32 = 902;
const UNMATCHED: u32 = 903;
const UNJOINED: u32 = 904;
const ISOLATION: u32 = 905;
const IMPLICIT: u32 = 906;
const CAPTURED_EVENT: u32 = 907;
const WRONG_THREAD: u32 = 908;

fn begin(api: &Api, stream: Handle, mode: u32) {
    assert_eq!(call!(api, "cuStreamBeginCapture_v2", stream, mode), 0);
}

fn end(api: &Api, stream: Handle) -> Result<Handle, u32> {
    let mut graph = NONE;
    match call!(api, "cuStreamEndCapture", stream, &raw mut graph) {
        0 => Ok(graph),
        error => {
            assert!(graph.is_null());
            Err(error)
        }
    }
}

fn status(api: &Api, stream: Handle) -> u32 {
    let mut status = 9u32;
    let code = call!(api, "cuStreamIsCapturing", stream, &raw mut status);
    assert_eq!(code, 0);
    status
}

fn record(api: &Api, event: Handle, stream: Handle) -> u32 {
    call!(api, "cuEventRecord", event, stream)
}

fn wait(api: &Api, stream: Handle, event: Handle) -> u32 {
    call!(api, "cuStreamWaitEvent", stream, event, 0u32)
}

fn node_count(api: &Api, graph: Handle) -> usize {
    let mut count = 0usize;
    let code = call!(api, "cuGraphGetNodes", graph, NONE, &raw mut count);
    assert_eq!(code, 0);
    count
}

/// Runs on a new thread in the same context.
fn on_new_thread<T: Send>(api: &Api, action: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            api.enter(0);
            action()
        });
        thread.join().unwrap()
    })
}

#[test]
fn defers_captured_work_until_launch() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let (stream, side) = (api.stream(NON_BLOCKING), api.stream(NON_BLOCKING));
    let (forked, joined) = (api.event(), api.event());
    let memory = api.allocate(4 * MIB).unwrap();
    assert_eq!(status(&api, stream), 0);
    begin(&api, stream, GLOBAL);
    assert_eq!((status(&api, stream), status(&api, side)), (1, 0));
    api.spin(spin, stream, ALL, 10 * MS);
    assert_eq!(record(&api, forked, stream), 0);
    assert_eq!(wait(&api, side, forked), 0);
    assert_eq!(status(&api, side), 1);
    api.spin(spin, stream, ALL / 2, 20 * MS);
    api.spin(spin, side, ALL / 2, 30 * MS);
    assert_eq!(record(&api, joined, side), 0);
    assert_eq!(wait(&api, stream, joined), 0);
    let code = call!(api, "cuMemsetD8Async", memory, 7u8, 4 * MIB, stream);
    assert_eq!(code, 0);
    let graph = end(&api, stream).unwrap();
    assert_eq!((status(&api, stream), status(&api, side)), (0, 0));
    assert_eq!(node_count(&api, graph), 4);
    assert_eq!(machine.gpu(0).unwrap().processes[0].kernels, 0);

    let mut exec = NONE;
    let code = call!(
        api,
        "cuGraphInstantiateWithFlags",
        &raw mut exec,
        graph,
        0u64
    );
    assert_eq!(code, 0);
    for round in 1..=3 {
        assert_eq!(call!(api, "cuGraphLaunch", exec, stream), 0);
        api.synchronize();
        let process = &machine.gpu(0).unwrap().processes[0];
        let kernels = process.busy_nanos / (10 * MS);
        // 10 ms, then 20 ms concurrent with 30 ms, and the memset.
        assert_eq!((process.kernels, kernels), (4 * round, 4 * round));
    }
}

#[test]
fn invalidates_captures_by_mode_and_thread() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let (stream, other) = (api.stream(NON_BLOCKING), api.stream(NON_BLOCKING));
    let event = api.event();
    assert_eq!(record(&api, event, other), 0);
    api.synchronize();
    let (mut pool, mut graph) = (NONE, NONE);
    assert_eq!(call!(api, "cuDeviceGetDefaultMemPool", &raw mut pool, 0), 0);
    assert_eq!(call!(api, "cuGraphCreate", &raw mut graph, 0u32), 0);
    // Numbers, since handles cannot be sent to other threads.
    let (event, other) = (event.addr(), other.addr());
    let (pool, graph) = (pool.addr(), graph.addr());
    let calls: [(&str, &(dyn Fn() -> u32 + Sync)); 12] = [
        ("cuEventQuery", &|| call!(api, "cuEventQuery", event)),
        ("cuEventSynchronize", &|| {
            call!(api, "cuEventSynchronize", event)
        }),
        ("cuStreamQuery", &|| call!(api, "cuStreamQuery", other)),
        ("cuStreamSynchronize", &|| {
            call!(api, "cuStreamSynchronize", other)
        }),
        ("cuMemAlloc", &|| {
            let mut address = 0u64;
            call!(api, "cuMemAlloc_v2", &raw mut address, 4096usize)
        }),
        ("cuMemFree", &|| call!(api, "cuMemFree_v2", 0u64)),
        ("cuMemAllocAsync", &|| {
            let mut address = 0u64;
            let bytes = 4096usize;
            call!(api, "cuMemAllocAsync", &raw mut address, bytes, other)
        }),
        ("cuMemPoolGetAttribute", &|| {
            let mut value = 0u64;
            call!(api, "cuMemPoolGetAttribute", pool, 5u32, &raw mut value)
        }),
        ("cuMemPoolSetAttribute", &|| {
            let mut value = 0u64;
            call!(api, "cuMemPoolSetAttribute", pool, 4u32, &raw mut value)
        }),
        ("cuMemPoolTrimTo", &|| {
            call!(api, "cuMemPoolTrimTo", pool, 0usize)
        }),
        ("cuCtxSetLimit", &|| {
            call!(api, "cuCtxSetLimit", 0u32, 1024usize)
        }),
        ("cuGraphInstantiate", &|| {
            let mut exec = NONE;
            call!(
                api,
                "cuGraphInstantiateWithFlags",
                &raw mut exec,
                graph,
                0u64
            )
        }),
    ];
    for (name, made) in calls {
        for (mode, own, expected) in [
            (GLOBAL, false, UNSUPPORTED),
            (THREAD_LOCAL, false, 0),
            (RELAXED, false, 0),
            (GLOBAL, true, UNSUPPORTED),
            (THREAD_LOCAL, true, UNSUPPORTED),
            (RELAXED, true, 0),
        ] {
            begin(&api, stream, mode);
            api.spin(spin, stream, 1, MS);
            let code = if own {
                made()
            } else {
                on_new_thread(&api, made)
            };
            assert_eq!(code, expected, "{name} in mode {mode}, own thread: {own}");
            let is_invalidated = expected != 0;
            assert_eq!(status(&api, stream), if is_invalidated { 2 } else { 1 });
            if is_invalidated {
                let event = api.event();
                assert_eq!(record(&api, event, stream), INVALIDATED);
                assert_eq!(end(&api, stream), Err(INVALIDATED));
            } else {
                let graph = end(&api, stream).unwrap();
                assert_eq!(call!(api, "cuGraphDestroy", graph), 0);
            }
            assert_eq!(status(&api, stream), 0);
        }
    }
}

/// As on an H200.
#[test]
fn keeps_captures_beside_safe_calls_of_other_threads() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(NON_BLOCKING);
    let calls: [(&str, &(dyn Fn() -> u32 + Sync)); 4] = [
        ("cuModuleLoadData", &|| {
            let mut module = NONE;
            let image = c"any image".as_ptr();
            call!(api, "cuModuleLoadData", &raw mut module, image)
        }),
        ("cuDeviceGetGraphMemAttribute", &|| {
            let mut value = 0u64;
            call!(api, "cuDeviceGetGraphMemAttribute", 0, 2u32, &raw mut value)
        }),
        ("cuDeviceGraphMemTrim", &|| {
            call!(api, "cuDeviceGraphMemTrim", 0)
        }),
        ("cuMemGetInfo", &|| {
            let (mut free, mut total) = (0usize, 0usize);
            call!(api, "cuMemGetInfo_v2", &raw mut free, &raw mut total)
        }),
    ];
    for (name, made) in calls {
        begin(&api, stream, GLOBAL);
        assert_eq!(on_new_thread(&api, made), 0, "{name}");
        let graph = end(&api, stream).unwrap();
        assert_eq!(call!(api, "cuGraphDestroy", graph), 0);
    }
}

#[test]
fn ignores_unsafe_calls_in_relaxed_mode() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(NON_BLOCKING);
    let mut mode = RELAXED;
    let exchange = |mode: &mut u32| {
        call!(
            api,
            "cuThreadExchangeStreamCaptureMode",
            std::ptr::from_mut(mode)
        )
    };
    begin(&api, stream, GLOBAL);
    assert_eq!((exchange(&mut mode), mode), (0, GLOBAL));
    api.allocate(4096).unwrap();
    assert_eq!((exchange(&mut mode), mode), (0, RELAXED));
    assert_eq!(status(&api, stream), 1);
    assert_eq!(api.allocate(4096), Err(UNSUPPORTED));
    assert_eq!(end(&api, stream), Err(INVALIDATED));
}

#[test]
fn rejects_synchronization_with_a_captured_stream() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(NON_BLOCKING);
    let event = api.event();
    let waits: [&dyn Fn() -> u32; 4] = [
        &|| call!(api, "cuStreamSynchronize", stream),
        &|| call!(api, "cuStreamQuery", stream),
        &|| call!(api, "cuCtxSynchronize"),
        &|| {
            let mut host = [0u8; 4];
            let address = api.allocate(4096).unwrap_or(0);
            call!(api, "cuMemcpyDtoH_v2", host.as_mut_ptr(), address, 4usize)
        },
    ];
    for refused in waits {
        begin(&api, stream, RELAXED);
        let code = refused();
        // The synchronous copy uses another stream, which relaxed mode allows.
        if code == 0 {
            end(&api, stream).unwrap();
            continue;
        }
        assert_eq!(code, UNSUPPORTED);
        assert_eq!(end(&api, stream), Err(INVALIDATED));
    }
    begin(&api, stream, GLOBAL);
    assert_eq!(record(&api, event, stream), 0);
    assert_eq!(call!(api, "cuEventQuery", event), CAPTURED_EVENT);
    assert_eq!(call!(api, "cuEventSynchronize", event), CAPTURED_EVENT);
    // Neither call invalidates the capture.
    end(&api, stream).unwrap();
}

#[test]
fn requires_joins_in_the_origin_stream() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let (stream, side) = (api.stream(NON_BLOCKING), api.stream(NON_BLOCKING));
    let event = api.event();
    let fork = || {
        begin(&api, stream, GLOBAL);
        api.spin(spin, stream, 1, MS);
        assert_eq!(record(&api, event, stream), 0);
        assert_eq!(wait(&api, side, event), 0);
    };
    fork();
    // No work was captured from the second stream, so it counts as joined.
    let graph = end(&api, stream).unwrap();
    assert_eq!(node_count(&api, graph), 1);

    fork();
    api.spin(spin, side, 1, MS);
    assert_eq!(end(&api, stream), Err(UNJOINED));

    fork();
    assert_eq!(end(&api, side), Err(UNMATCHED));
    assert_eq!(end(&api, stream), Err(INVALIDATED));

    assert_eq!(end(&api, stream), Err(ILLEGAL_STATE));
    fork();
    // Destroying the stream does not leave the capture open.
    assert_eq!(call!(api, "cuStreamDestroy_v2", side), 0);
    assert_eq!(end(&api, stream), Err(INVALIDATED));
}

#[test]
fn rejects_mixing_captures_and_outside_work() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (first, second) = (api.stream(NON_BLOCKING), api.stream(NON_BLOCKING));
    let event = api.event();
    begin(&api, first, THREAD_LOCAL);
    begin(&api, second, THREAD_LOCAL);
    assert_eq!(record(&api, event, first), 0);
    assert_eq!(wait(&api, second, event), MERGE);
    assert_eq!(end(&api, first), Err(INVALIDATED));
    assert_eq!(end(&api, second), Err(INVALIDATED));

    let outside = api.event();
    assert_eq!(record(&api, outside, second), 0);
    begin(&api, first, GLOBAL);
    assert_eq!(wait(&api, first, outside), ISOLATION);
    assert_eq!(end(&api, first), Err(INVALIDATED));

    begin(&api, first, THREAD_LOCAL);
    let number = first.addr();
    let ended = on_new_thread(&api, || {
        let mut graph = 0usize;
        call!(api, "cuStreamEndCapture", number, &raw mut graph)
    });
    assert_eq!(ended, WRONG_THREAD);
    end(&api, first).unwrap();
}

#[test]
fn rejects_default_stream_work_during_capture() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let blocking = api.stream(0);
    let event = api.event();
    assert_eq!(
        call!(api, "cuStreamBeginCapture_v2", NONE, RELAXED),
        UNSUPPORTED
    );
    begin(&api, blocking, RELAXED);
    assert_eq!(record(&api, event, NONE), IMPLICIT);
    assert_eq!(end(&api, blocking), Err(INVALIDATED));
    // The default stream ignores non-blocking streams.
    let free = api.stream(NON_BLOCKING);
    begin(&api, free, RELAXED);
    api.spin(spin, NONE, 1, MS);
    end(&api, free).unwrap();
}

#[test]
fn captures_stream_ordered_allocation() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(NON_BLOCKING);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    begin(&api, stream, GLOBAL);
    let mut address = 0u64;
    let code = call!(api, "cuMemAllocAsync", &raw mut address, 64 * MIB, stream);
    assert_eq!(code, 0);
    assert_eq!(call!(api, "cuMemFreeAsync", address, stream), 0);
    let graph = end(&api, stream).unwrap();
    assert_eq!(used(), 0);
    let mut exec = NONE;
    let code = call!(
        api,
        "cuGraphInstantiateWithFlags",
        &raw mut exec,
        graph,
        0u64
    );
    assert_eq!(code, 0);
    assert_eq!(call!(api, "cuGraphLaunch", exec, stream), 0);
    api.synchronize();
    assert_eq!(used(), 64 * MIB);
    assert_eq!(call!(api, "cuDeviceGraphMemTrim", 0), 0);
    assert_eq!(used(), 0);
}

#[test]
fn captures_graph_launch_as_child_graph() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let stream = api.stream(NON_BLOCKING);
    let instantiate = |graph: Handle| {
        let mut exec = NONE;
        let code = call!(
            api,
            "cuGraphInstantiateWithFlags",
            &raw mut exec,
            graph,
            0u64
        );
        assert_eq!(code, 0);
        exec
    };
    begin(&api, stream, GLOBAL);
    api.spin(spin, stream, ALL, 10 * MS);
    api.spin(spin, stream, ALL, 10 * MS);
    let inner = instantiate(end(&api, stream).unwrap());
    begin(&api, stream, GLOBAL);
    assert_eq!(call!(api, "cuGraphLaunch", inner, stream), 0);
    api.spin(spin, stream, ALL, 5 * MS);
    let outer = end(&api, stream).unwrap();
    assert_eq!(node_count(&api, outer), 2);
    let outer = instantiate(outer);
    assert_eq!(call!(api, "cuGraphLaunch", outer, stream), 0);
    api.synchronize();
    let process = &machine.gpu(0).unwrap().processes[0];
    assert_eq!((process.kernels, process.busy_nanos), (3, 25 * MS));
}
