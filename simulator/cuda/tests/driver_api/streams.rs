use std::time::{Duration, Instant};

use simulator_machine::description::T4;
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_HANDLE, NOT_READY, call};

const MS: u64 = 1_000_000;
/// The legacy default stream.
const DEFAULT: Handle = std::ptr::null_mut();
const NON_BLOCKING: u32 = 1;

fn elapsed_ms(api: &Api, start: Handle, end: Handle) -> f32 {
    let mut milliseconds = 0f32;
    assert_eq!(
        call!(api, "cuEventElapsedTime", &raw mut milliseconds, start, end),
        0
    );
    milliseconds
}

fn record(api: &Api, event: Handle, stream: Handle) {
    assert_eq!(call!(api, "cuEventRecord", event, stream), 0);
}

fn near(measured: f32, expected: f32) -> bool {
    (measured - expected).abs() < 0.001 * expected + 0.01
}

#[test]
fn returns_from_launch_before_kernel_end() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let begin = Instant::now();
    api.spin(spin, DEFAULT, 40, 300 * MS);
    assert_eq!(call!(api, "cuStreamQuery", DEFAULT), NOT_READY);
    assert!(begin.elapsed() < Duration::from_millis(250));
    api.synchronize();
    assert!(begin.elapsed() >= Duration::from_millis(300));
    assert_eq!(call!(api, "cuStreamQuery", DEFAULT), 0);
    let process = &machine.gpu(0).unwrap().processes[0];
    assert_eq!((process.kernels, process.busy_nanos), (1, 300 * MS));
}

#[test]
fn measures_gpu_time_with_events() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let stream = api.stream(NON_BLOCKING);
    let (start, middle, end) = (api.event(), api.event(), api.event());
    // Keeps the GPU busy, so that nothing below waits for this program.
    api.spin(spin, stream, 80, 100 * MS);
    record(&api, start, stream);
    api.spin(spin, stream, 80, 7 * MS);
    record(&api, middle, stream);
    api.spin(spin, stream, 80, 11 * MS);
    record(&api, end, stream);
    assert_eq!(call!(api, "cuEventQuery", end), NOT_READY);
    assert_eq!(call!(api, "cuEventSynchronize", end), 0);
    assert!(near(elapsed_ms(&api, start, middle), 7.0));
    assert!(near(elapsed_ms(&api, middle, end), 11.0));
}

#[test]
fn overlaps_kernels_that_fit_together() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let (first, second) = (api.stream(NON_BLOCKING), api.stream(NON_BLOCKING));
    // A T4 holds 40 blocks of 1024 threads.
    for (blocks, expected) in [(20, 50.0), (40, 100.0)] {
        let (start, done_first, done_second, end) =
            (api.event(), api.event(), api.event(), api.event());
        api.spin(spin, first, 40, 100 * MS);
        record(&api, start, first);
        assert_eq!(call!(api, "cuStreamWaitEvent", second, start, 0u32), 0);
        api.spin(spin, first, blocks, 50 * MS);
        api.spin(spin, second, blocks, 50 * MS);
        record(&api, done_first, first);
        record(&api, done_second, second);
        assert_eq!(call!(api, "cuStreamWaitEvent", first, done_second, 0u32), 0);
        record(&api, end, first);
        api.synchronize();
        let total = elapsed_ms(&api, start, end);
        assert!(near(total, expected), "{blocks} blocks: {total} ms");
    }
}

#[test]
fn orders_default_stream_with_blocking_streams_only() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let (blocking, free) = (api.stream(0), api.stream(NON_BLOCKING));
    let (first, second) = (api.event(), api.event());
    api.spin(spin, blocking, 1, 200 * MS);
    record(&api, first, blocking);
    api.spin(spin, DEFAULT, 1, MS);
    record(&api, second, DEFAULT);
    api.spin(spin, free, 1, MS);
    assert_eq!(call!(api, "cuStreamSynchronize", free), 0);
    assert_eq!(call!(api, "cuEventQuery", first), NOT_READY);
    api.synchronize();
    assert!(near(elapsed_ms(&api, first, second), 1.0));
}

#[test]
fn runs_many_short_kernels_in_order() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    for _ in 0..20_000 {
        api.spin(spin, DEFAULT, 40, 1_000);
    }
    api.synchronize();
    let process = &machine.gpu(0).unwrap().processes[0];
    assert_eq!((process.kernels, process.busy_nanos), (20_000, 20 * MS));
}

#[test]
fn rejects_destroyed_and_foreign_handles() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(0);
    assert_eq!(call!(api, "cuStreamDestroy_v2", stream), 0);
    assert_eq!(call!(api, "cuStreamSynchronize", stream), INVALID_HANDLE);
    assert_eq!(call!(api, "cuStreamDestroy_v2", stream), INVALID_HANDLE);
    assert_eq!(call!(api, "cuEventRecord", stream, DEFAULT), INVALID_HANDLE);
}
