//! Host functions: called on a thread of this library when their stream reaches them. The stream
//! resumes when they return.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::time::Duration;

use simulator_machine::protocol::{Action, Command, ContextId, Work};
use simulator_machine::server::now;

use crate::State;
use crate::abi::{CudaResult, entry_points};
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::operation::{HostFn, HostFunction, Operation, enqueue};
use crate::stream::Stream;
use crate::types::{CUcontext, CUstream};

/// Interval of the check that the daemon is alive.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(500);
/// Polling interval of memory words.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Pending host functions.
#[derive(Debug, Default)]
pub(crate) struct HostFunctions {
    /// By cell of the stream, in order.
    waiting: BTreeMap<u32, VecDeque<PendingCall>>,
    started: bool,
}

#[derive(Clone, Copy, Debug)]
struct PendingCall {
    context: ContextId,
    ticket: u64,
    function: HostFunction,
}

impl State {
    /// Submits a host function to a stream.
    pub(crate) fn call_host(
        &mut self,
        driver: &Driver,
        stream: Stream,
        function: HostFunction,
    ) -> CudaResult<Point> {
        self.start_host_thread()?;
        let context = self.context_id(stream.context)?;
        let point = self.submit(driver, stream, Work::Host)?;
        let waiting = PendingCall {
            context,
            ticket: point.ticket,
            function,
        };
        let queue = self.host_functions.waiting.entry(point.cell).or_default();
        queue.push_back(waiting);
        Ok(point)
    }

    /// The daemon's id of a context.
    pub(crate) fn context_id(&self, context: CUcontext) -> CudaResult<ContextId> {
        let context = self.contexts.get(&context);
        Ok(context.ok_or(CudaError::ContextIsDestroyed)?.id)
    }

    fn start_host_thread(&mut self) -> CudaResult {
        if self.host_functions.started {
            return Ok(());
        }
        let thread = std::thread::Builder::new().name("cuda-host-functions".to_owned());
        thread.spawn(run).map_err(|_| CudaError::OperatingSystem)?;
        self.host_functions.started = true;
        Ok(())
    }

    /// Returns the next task of the thread.
    fn next_task(&mut self, driver: &Driver) -> NextTask {
        let mut otherwise = NextTask::Nothing;
        let first = |queue: &VecDeque<PendingCall>| queue.front().copied();
        let heads = self.host_functions.waiting.iter();
        let heads: Vec<(u32, PendingCall)> = heads
            .filter_map(|(cell, queue)| Some((*cell, first(queue)?)))
            .collect();
        for (cell, waiting) in heads {
            if driver.channel().host_ready(cell) < waiting.ticket {
                continue;
            }
            if let HostFunction::WaitValue(wait) = waiting.function
                && !self.is_satisfied(wait)
            {
                otherwise = NextTask::Poll;
                continue;
            }
            if let Some(queue) = self.host_functions.waiting.get_mut(&cell) {
                queue.pop_front();
                if queue.is_empty() {
                    self.host_functions.waiting.remove(&cell);
                }
            }
            return NextTask::OnStream(cell, waiting);
        }
        otherwise
    }
}

/// The next task of the host function thread.
enum NextTask {
    /// A function that its stream has reached.
    OnStream(u32, PendingCall),
    /// A stream waits for a memory word: poll again.
    Poll,
    Nothing,
}

/// Main loop: runs due functions one by one until the daemon is gone.
fn run() {
    let Ok(driver) = driver() else {
        return;
    };
    loop {
        let seen = driver.channel().host_calls();
        let task = driver.state().next_task(driver);
        match task {
            NextTask::OnStream(cell, waiting) => {
                waiting.function.call();
                // The state's lock serializes submissions.
                let _state = driver.state();
                driver.channel().submit(Command {
                    at: now(),
                    context: waiting.context,
                    stream: cell,
                    ticket: waiting.ticket,
                    action: Action::HostDone,
                });
            }
            NextTask::Poll | NextTask::Nothing if driver.require_alive().is_err() => return,
            NextTask::Poll => driver.channel().wait_host_calls(seen, POLL_INTERVAL),
            NextTask::Nothing => driver.channel().wait_host_calls(seen, LIVENESS_INTERVAL),
        }
    }
}

entry_points! {
    "cuLaunchHostFunc" 10000 fn cuLaunchHostFunc(stream: CUstream, function: Option<HostFn>, data: *mut c_void) ptsz(stream) cuLaunchHostFunc_ptsz {
        let function = HostFunction::plain(function, data)?;
        enqueue(stream, |_, _, _| Ok(Operation::Host(function))).map(drop)
    }
}
