//! Streams that wait for a value of a word of memory.

use std::sync::atomic::{AtomicU32, Ordering};

use simulator_machine::description::T4;
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_VALUE, NOT_READY, call};

const AT_LEAST: u32 = 0;
const EQUAL: u32 = 1;

fn wait(api: &Api, stream: Handle, address: u64, value: u32, flags: u32) -> u32 {
    call!(api, "cuStreamWaitValue32_v2", stream, address, value, flags)
}

#[test]
fn blocks_a_stream_until_a_device_word_has_the_value() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (waiter, writer) = (api.stream(1), api.stream(1));
    let word = api.allocate(64).unwrap();
    let set = |value: u32| {
        assert_eq!(
            call!(api, "cuMemsetD32Async", word, value, 1usize, writer),
            0
        );
        assert_eq!(call!(api, "cuStreamSynchronize", writer), 0);
    };
    set(0);
    assert_eq!(wait(&api, waiter, word, 5, EQUAL), 0);
    let reached = api.event();
    assert_eq!(call!(api, "cuEventRecord", reached, waiter), 0);
    set(4);
    assert_eq!(call!(api, "cuEventQuery", reached), NOT_READY);
    set(5);
    assert_eq!(call!(api, "cuEventSynchronize", reached), 0);
}

#[test]
fn rejects_a_misaligned_word_and_unknown_flags() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(1);
    let word = api.allocate(64).unwrap();
    assert_eq!(wait(&api, stream, word + 1, 5, EQUAL), INVALID_VALUE);
    assert_eq!(wait(&api, stream, 0xdead_0000, 5, EQUAL), INVALID_VALUE);
    assert_eq!(wait(&api, stream, word, 5, 4), INVALID_VALUE);
}

#[test]
fn resumes_a_stream_when_the_host_writes_the_value() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(1);
    let mut address = 0u64;
    assert_eq!(
        call!(api, "cuMemHostAlloc", &raw mut address, 4096usize, 0u32),
        0
    );
    let pointer = std::ptr::with_exposed_provenance::<AtomicU32>(usize::try_from(address).unwrap());
    let word = unsafe { pointer.as_ref() }.unwrap();
    word.store(0, Ordering::Release);
    assert_eq!(wait(&api, stream, address, 3, AT_LEAST), 0);
    // A satisfied wait of another stream is not blocked by the pending one.
    let other = api.stream(1);
    assert_eq!(wait(&api, other, address + 4, 0, AT_LEAST), 0);
    assert_eq!(call!(api, "cuStreamSynchronize", other), 0);
    assert_eq!(call!(api, "cuStreamQuery", stream), NOT_READY);
    word.store(3, Ordering::Release);
    assert_eq!(call!(api, "cuStreamSynchronize", stream), 0);
}
