//! `cuStreamWaitValue32`: a stream waits until a word of memory satisfies a condition.
//!
//! The host function thread polls the word once the stream reaches the wait. A pending wait blocks
//! only its own stream.

use std::ffi::c_uint;

use crate::abi::entry_points;
use crate::operation::{Operation, ValueWait, WORD_BYTES, enqueue};
use crate::types::{CUdeviceptr, CUstream};

entry_points! {
    "cuStreamWaitValue32" 11070 fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) ptsz(stream) cuStreamWaitValue32_v2_ptsz {
        let wait = ValueWait::new(address, value, flags)?;
        enqueue(stream, |_, state, _| {
            state.require_range(address, WORD_BYTES)?;
            Ok(Operation::WaitValue(wait))
        })
        .map(drop)
    }
}
