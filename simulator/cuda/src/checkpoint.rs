//! Process checkpoints: lock, checkpoint to host memory, restore, unlock.
//!
//! The daemon decides which transitions are allowed. A locked process blocks in its next call. A lock waits for the work of the
//! process, up to its time limit; the process then runs on. A lock of a process with a thread in uninterruptible sleep does not return
//! before that ends, whatever the limit.
//! Memory that another process also holds prevents a checkpoint, and so does managed memory.

use std::ffi::{c_int, c_uint};
use std::time::{Duration, Instant};

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
        Err(ClientError::Refused(Refusal::InUse)) => Err(CudaError::NotReady),
        Err(ClientError::Refused(Refusal::NotSupported)) => Err(CudaError::NotSupported),
        Ok(_) => Err(CudaError::Unknown),
        Err(error) => Err(error.into()),
    }
}

/// Time between two attempts to lock a process with work.
const RETRY: Duration = Duration::from_millis(2);

/// Returns whether a thread of the process is in uninterruptible sleep.
fn is_uninterruptible(pid: c_int) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    let mut threads = threads.into_iter().flatten().flatten();
    threads.any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The name may contain anything.
        let state = stat.rsplit_once(')').map(|(_, state)| state.trim_start());
        state.is_some_and(|state| state.starts_with('D'))
    })
}

/// Locks a process; 0 ms is no time limit.
fn lock(pid: c_int, timeout_ms: c_uint) -> CudaResult {
    while is_uninterruptible(pid) {
        std::thread::sleep(RETRY);
    }
    let end = Instant::now() + Duration::from_millis(timeout_ms.into());
    loop {
        match ask(pid, CheckpointAction::Lock) {
            Err(CudaError::NotReady) if timeout_ms == 0 || Instant::now() < end => {
                std::thread::sleep(RETRY);
            }
            Err(CudaError::NotReady) => {
                ask(pid, CheckpointAction::EndLock)?;
                return Err(CudaError::Timeout);
            }
            outcome => return outcome.map(drop),
        }
    }
}

/// Returns the time limit in the arguments of a lock, which are optional.
fn timeout_ms(arguments: In<c_uint>) -> c_uint {
    arguments.get().unwrap_or(0)
}

entry_points! {
    "cuCheckpointProcessGetState" 12080 fn cuCheckpointProcessGetState(pid: c_int, state: Out<c_uint>) {
        state.set(match ask(pid, CheckpointAction::Look)? {
            ProcessPhase::Running => 0,
            ProcessPhase::Locked => 1,
            ProcessPhase::Checkpointed => 2,
            ProcessPhase::Failed => 3,
        })
    }

    "cuCheckpointProcessLock" 12080 fn cuCheckpointProcessLock(pid: c_int, arguments: In<c_uint>) { lock(pid, timeout_ms(arguments)) }
    "cuCheckpointProcessCheckpoint" 12080 fn cuCheckpointProcessCheckpoint(pid: c_int, _arguments: In<u64>) { ask(pid, CheckpointAction::Checkpoint).map(drop) }
    "cuCheckpointProcessRestore" 12080 fn cuCheckpointProcessRestore(pid: c_int, _arguments: In<u64>) { ask(pid, CheckpointAction::Restore).map(drop) }
    "cuCheckpointProcessUnlock" 12080 fn cuCheckpointProcessUnlock(pid: c_int, _arguments: In<u64>) { ask(pid, CheckpointAction::Unlock).map(drop) }
}
