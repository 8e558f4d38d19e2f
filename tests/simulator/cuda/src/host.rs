//! Host functions: called on a thread of this library's when their stream comes to them. The
//! stream goes on when they return.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::time::Duration;

use simulator_machine::channel::{Action, Command};
use simulator_machine::kernel::engine::Work;
use simulator_machine::protocol::ContextId;
use simulator_machine::server::now;

use crate::abi::{Answer, entry_points};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::operation::{Operation, enqueue};
use crate::stream::{Point, Stream};
use crate::stream_memory::ValueWait;
use crate::types::{CUcontext, CUstream};

/// How often the thread looks whether the driver is still there.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often it looks at a word of memory that a stream waits for.
const WATCH: Duration = Duration::from_micros(200);

/// `CUhostFn`
pub(crate) type HostFn = unsafe extern "C" fn(*mut c_void);

/// A function of the program's with its argument, an address.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostFunction {
    /// `CUhostFn`
    Plain { function: HostFn, data: usize },
    /// `cuStreamWaitValue32`: no function, a word of memory that the stream waits for.
    WaitValue(ValueWait),
}

impl HostFunction {
    pub(crate) fn plain(function: Option<HostFn>, data: *mut c_void) -> Answer<Self> {
        let function = function.ok_or(CudaError::InvalidValue)?;
        let data = data.expose_provenance();
        Ok(Self::Plain { function, data })
    }

    fn call(self) {
        match self {
            Self::Plain { function, data } => {
                let data = std::ptr::with_exposed_provenance_mut(data);
                // SAFETY: the program asked for this call with this argument.
                unsafe { function(data) };
            }
            Self::WaitValue(_) => {}
        }
    }
}

/// Host functions that wait for their turn.
#[derive(Debug, Default)]
pub(crate) struct HostFunctions {
    /// By the stream's cell, in order.
    waiting: BTreeMap<u32, VecDeque<Waiting>>,
    started: bool,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    context: ContextId,
    ticket: u64,
    function: HostFunction,
}

impl State {
    /// Puts a host function on a stream.
    pub(crate) fn call_host(
        &mut self,
        driver: &Driver,
        stream: Stream,
        function: HostFunction,
    ) -> Answer<Point> {
        self.start_host_thread()?;
        let context = self.context_id(stream.context)?;
        let point = self.submit(driver, stream, Work::Host)?;
        let waiting = Waiting {
            context,
            ticket: point.ticket,
            function,
        };
        let queue = self.host_functions.waiting.entry(point.cell).or_default();
        queue.push_back(waiting);
        Ok(point)
    }

    /// The daemon's name of a context.
    pub(crate) fn context_id(&self, context: CUcontext) -> Answer<ContextId> {
        let context = self.contexts.get(&context);
        Ok(context.ok_or(CudaError::ContextIsDestroyed)?.id)
    }

    fn start_host_thread(&mut self) -> Answer {
        if self.host_functions.started {
            return Ok(());
        }
        let thread = std::thread::Builder::new().name("cuda-host-functions".to_owned());
        thread.spawn(run).map_err(|_| CudaError::OperatingSystem)?;
        self.host_functions.started = true;
        Ok(())
    }

    /// What the thread has to do next.
    fn due(&mut self, driver: &Driver) -> Due {
        let mut otherwise = Due::Nothing;
        let first = |queue: &VecDeque<Waiting>| queue.front().copied();
        let heads = self.host_functions.waiting.iter();
        let heads: Vec<(u32, Waiting)> = heads
            .filter_map(|(cell, queue)| Some((*cell, first(queue)?)))
            .collect();
        for (cell, waiting) in heads {
            if driver.channel().host_ready(cell) < waiting.ticket {
                continue;
            }
            if let HostFunction::WaitValue(wait) = waiting.function
                && !self.is_satisfied(wait)
            {
                otherwise = Due::Watch;
                continue;
            }
            if let Some(queue) = self.host_functions.waiting.get_mut(&cell) {
                queue.pop_front();
                if queue.is_empty() {
                    self.host_functions.waiting.remove(&cell);
                }
            }
            return Due::OnStream(cell, waiting);
        }
        otherwise
    }
}

/// What the thread has to do next.
enum Due {
    /// A function whose stream has come to it.
    OnStream(u32, Waiting),
    /// Look again soon: a word of memory is waited for.
    Watch,
    Nothing,
}

/// The thread: calls what is due, one after the other, until the driver is gone.
fn run() {
    let Ok(driver) = driver() else {
        return;
    };
    loop {
        let seen = driver.channel().host_calls();
        let due = driver.state().due(driver);
        match due {
            Due::OnStream(cell, waiting) => {
                waiting.function.call();
                // Submissions are serialised by the state's lock.
                let _state = driver.state();
                driver.channel().submit(Command {
                    at: now(),
                    context: waiting.context,
                    stream: cell,
                    ticket: waiting.ticket,
                    action: Action::HostDone,
                });
            }
            Due::Watch | Due::Nothing if driver.require_alive().is_err() => return,
            Due::Watch => driver.channel().wait_host_calls(seen, WATCH),
            Due::Nothing => driver.channel().wait_host_calls(seen, PATIENCE),
        }
    }
}

entry_points! {
    "cuLaunchHostFunc" 10000 fn cuLaunchHostFunc(stream: CUstream, function: Option<HostFn>, data: *mut c_void) ptsz(stream) cuLaunchHostFunc_ptsz {
        let function = HostFunction::plain(function, data)?;
        enqueue(stream, |_, _, _| Ok(Operation::Host(function))).map(drop)
    }
}
