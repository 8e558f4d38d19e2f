//! Process checkpoints: lock, checkpoint to host memory, restore, unlock.
//!
//! The daemon decides which transitions are allowed. A locked process blocks in its next call.
//! Memory that another process also holds prevents a checkpoint.

use std::ffi::{c_int, c_uint};

use simulator_machine::client::ClientError;
use simulator_machine::protocol::{CheckpointAction, ProcessPhase, Refusal, Reply, Request};

use crate::abi::{CudaResult, In, Out, entry_points};
use crate::driver::driver_even_if_locked;
use crate::error::CudaError;

/// Requests a transition of a process, which may be this one.
fn ask(pid: c_int, action: CheckpointAction) -> CudaResult<ProcessPhase> {
    let pid = u32::try_from(pid).map_err(|_| CudaError::InvalidValue)?;
    match driver_even_if_locked()?.try_request(&Request::Checkpoint { pid, action }) {
        Ok(Reply::Phase(phase)) => Ok(phase),
        Err(ClientError::Refused(Refusal::NotFound)) => Err(CudaError::InvalidValue),
        Err(ClientError::Refused(Refusal::Invalid)) => Err(CudaError::IllegalState),
        Err(ClientError::Refused(Refusal::NotSupported)) => Err(CudaError::NotSupported),
        Ok(_) => Err(CudaError::Unknown),
        Err(error) => Err(error.into()),
    }
}

entry_points! {
    "cuCheckpointProcessGetState" 12080 fn cuCheckpointProcessGetState(pid: c_int, state: Out<c_uint>) {
        state.set(match ask(pid, CheckpointAction::Look)? {
            ProcessPhase::Running => 0,
            ProcessPhase::Locked => 1,
            ProcessPhase::Checkpointed => 2,
        })
    }

    "cuCheckpointProcessLock" 12080 fn cuCheckpointProcessLock(pid: c_int, _arguments: In<u64>) { ask(pid, CheckpointAction::Lock).map(drop) }
    "cuCheckpointProcessCheckpoint" 12080 fn cuCheckpointProcessCheckpoint(pid: c_int, _arguments: In<u64>) { ask(pid, CheckpointAction::Checkpoint).map(drop) }
    "cuCheckpointProcessRestore" 12080 fn cuCheckpointProcessRestore(pid: c_int, _arguments: In<u64>) { ask(pid, CheckpointAction::Restore).map(drop) }
    "cuCheckpointProcessUnlock" 12080 fn cuCheckpointProcessUnlock(pid: c_int, _arguments: In<u64>) { ask(pid, CheckpointAction::Unlock).map(drop) }
}
