//! Streams that write words of memory and wait for them.

use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use simulator_machine::description::T4;
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_VALUE, NOT_READY, call};

const NONE: Handle = std::ptr::null_mut();
const AT_LEAST: u32 = 0;
const EQUAL: u32 = 1;

/// Waits of a stream, by name and width.
fn operate(api: &Api, name: &str, stream: Handle, address: u64, value: u64, flags: u32) -> u32 {
    let symbol = api.symbol(name);
    match name.contains("32") {
        true => {
            let value = u32::try_from(value).unwrap();
            crate::api::Invoke::invoke(symbol, (stream, address, value, flags))
        }
        false => crate::api::Invoke::invoke(symbol, (stream, address, value, flags)),
    }
}

#[test]
fn a_stream_waits_until_another_one_writes() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (waiter, writer) = (api.stream(1), api.stream(1));
    for (wait, write) in [
        ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"),
        ("cuStreamWaitValue64_v2", "cuStreamWriteValue64_v2"),
        ("cuStreamWaitValue32", "cuStreamWriteValue32"),
        ("cuStreamWaitValue64", "cuStreamWriteValue64"),
    ] {
        let word = api.allocate(64).unwrap();
        assert_eq!(call!(api, "cuMemsetD8_v2", word, 0u8, 64usize), 0);
        assert_eq!(operate(&api, wait, waiter, word, 5, EQUAL), 0, "{wait}");
        let reached = api.event();
        assert_eq!(call!(api, "cuEventRecord", reached, waiter), 0);
        assert_eq!(operate(&api, write, writer, word, 4, 0), 0, "{write}");
        assert_eq!(call!(api, "cuStreamSynchronize", writer), 0);
        assert_eq!(call!(api, "cuEventQuery", reached), NOT_READY, "{wait}");
        assert_eq!(operate(&api, write, writer, word, 5, 0), 0, "{write}");
        assert_eq!(call!(api, "cuEventSynchronize", reached), 0);
        assert_eq!(api.read(word, 8), 5u64.to_le_bytes(), "{write}");
        assert_eq!(
            operate(&api, wait, waiter, word + 1, 5, EQUAL),
            INVALID_VALUE
        );
        assert_eq!(
            operate(&api, wait, waiter, 0xdead_0000, 5, EQUAL),
            INVALID_VALUE
        );
        assert_eq!(operate(&api, wait, waiter, word, 5, 4), INVALID_VALUE);
    }
}

#[test]
fn the_host_can_let_a_stream_go_on() {
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
    assert_eq!(
        operate(&api, "cuStreamWaitValue32_v2", stream, address, 3, AT_LEAST),
        0
    );
    // A wait of another stream is not held up by this one.
    let other = api.stream(1);
    assert_eq!(
        operate(&api, "cuStreamWriteValue32_v2", other, address + 4, 1, 0),
        0
    );
    assert_eq!(call!(api, "cuStreamSynchronize", other), 0);
    assert_eq!(call!(api, "cuStreamQuery", stream), NOT_READY);
    word.store(3, Ordering::Release);
    assert_eq!(call!(api, "cuStreamSynchronize", stream), 0);
}

fn batch(word: u64, waited: u32, written: u64) -> [sys::CUstreamBatchMemOpParams; 3] {
    type Kind = sys::CUstreamBatchMemOpType;
    let mut batch: [sys::CUstreamBatchMemOpParams; 3] = unsafe { std::mem::zeroed() };
    let [wait, barrier, write] = &mut batch;
    let wait = unsafe { &mut wait.waitValue };
    wait.operation = Kind::CU_STREAM_MEM_OP_WAIT_VALUE_32;
    wait.address = word;
    wait.__bindgen_anon_1.value = waited;
    wait.flags = EQUAL;
    barrier.operation = Kind::CU_STREAM_MEM_OP_BARRIER;
    let write = unsafe { &mut write.writeValue };
    write.operation = Kind::CU_STREAM_MEM_OP_WRITE_VALUE_64;
    write.address = word + 8;
    write.__bindgen_anon_1.value64 = written;
    batch
}

#[test]
fn a_batch_is_done_in_order_on_a_stream_and_in_a_graph() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let word = api.allocate(64).unwrap();
    assert_eq!(call!(api, "cuMemsetD8_v2", word, 0u8, 64usize), 0);
    let (stream, writer) = (api.stream(1), api.stream(1));
    let value = 0x0102_0304_0506_0708u64;
    let mut operations = batch(word, 1, value);
    for name in ["cuStreamBatchMemOp", "cuStreamBatchMemOp_v2"] {
        let symbol = api.symbol(name);
        let code: u32 =
            crate::api::Invoke::invoke(symbol, (stream, 3u32, operations.as_mut_ptr(), 0u32));
        assert_eq!(code, 0, "{name}");
        assert_eq!(call!(api, "cuStreamQuery", stream), NOT_READY, "{name}");
        assert_eq!(
            operate(&api, "cuStreamWriteValue32_v2", writer, word, 1, 0),
            0
        );
        assert_eq!(call!(api, "cuStreamSynchronize", stream), 0);
        assert_eq!(api.read(word + 8, 8), value.to_le_bytes(), "{name}");
        assert_eq!(call!(api, "cuMemsetD8_v2", word, 0u8, 64usize), 0);
    }
    assert_eq!(
        call!(
            api,
            "cuStreamBatchMemOp_v2",
            stream,
            257u32,
            operations.as_mut_ptr(),
            0u32
        ),
        INVALID_VALUE
    );

    let (mut graph, mut node, mut exec) = (NONE, NONE, NONE);
    assert_eq!(call!(api, "cuGraphCreate", &raw mut graph, 0u32), 0);
    let params = sys::CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: std::ptr::null_mut(),
        count: 3,
        paramArray: operations.as_mut_ptr(),
        flags: 0,
    };
    let code = call!(
        api,
        "cuGraphAddBatchMemOpNode",
        &raw mut node,
        graph,
        NONE,
        0usize,
        &raw const params
    );
    assert_eq!(code, 0);
    let mut kind = 0u32;
    assert_eq!(call!(api, "cuGraphNodeGetType", node, &raw mut kind), 0);
    assert_eq!(kind, 12);
    assert_eq!(
        call!(
            api,
            "cuGraphInstantiateWithFlags",
            &raw mut exec,
            graph,
            0u64
        ),
        0
    );
    assert_eq!(call!(api, "cuGraphLaunch", exec, stream), 0);
    assert_eq!(call!(api, "cuStreamQuery", stream), NOT_READY);
    assert_eq!(
        operate(&api, "cuStreamWriteValue32_v2", writer, word, 1, 0),
        0
    );
    assert_eq!(call!(api, "cuStreamSynchronize", stream), 0);
    assert_eq!(api.read(word + 8, 8), value.to_le_bytes());
}
