//! Streams: in-order queues of work, and the ordering rules of default streams.
//!
//! Each stream has a cell in the process's channel. Work gets the stream's next ticket; the daemon
//! publishes the last completed ticket.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::thread::ThreadId;

use simulator_machine::channel::STREAMS;
use simulator_machine::protocol::{Action, Command, ContextId, Work};
use simulator_machine::server::now;

use crate::State;
use crate::abi::{CudaResult, Out, entry_points};
use crate::context::current_context;
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::types::{CUcontext, CUdevice, CUstream};

/// Queue capacity; a launch into a full stream blocks, as on hardware.
const QUEUE_DEPTH: u64 = 1024;

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: c_uint = 1;

#[derive(Debug, Default)]
pub(crate) struct Streams {
    created: BTreeMap<CUstream, Stream>,
    /// Default streams.
    defaults: BTreeMap<(CUcontext, DefaultStream), Stream>,
    /// Last ticket per cell; tickets increase when a cell is reused.
    last: Vec<u64>,
    /// Cells of destroyed streams.
    free: Vec<u32>,
}

/// A default stream of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DefaultStream {
    Legacy,
    PerThread(u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    pub(crate) context: CUcontext,
    pub(crate) cell: u32,
    flags: c_uint,
    legacy: bool,
}

impl Stream {
    /// An internal stream without implicit ordering.
    pub(crate) fn hidden(context: CUcontext, cell: u32) -> Self {
        Self {
            context,
            cell,
            flags: NON_BLOCKING,
            legacy: false,
        }
    }

    /// Whether the stream is ordered with the legacy default stream.
    pub(crate) fn is_blocking(&self) -> bool {
        self.flags & NON_BLOCKING == 0
    }

    /// Whether this is the legacy default stream.
    pub(crate) fn is_legacy(&self) -> bool {
        self.legacy
    }
}

/// Returns a number that identifies the calling thread.
pub(crate) fn this_thread() -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    thread_local!(static NUMBER: u64 = {
        let id: ThreadId = std::thread::current().id();
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        hasher.finish()
    });
    NUMBER.with(|number| *number)
}

impl Streams {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        self.created.keys().map(|stream| stream.0)
    }

    fn cell(&mut self, completed: impl Fn(u32) -> u64) -> CudaResult<u32> {
        let last = &self.last;
        let idle = |cell: &u32| {
            last.get(*cell as usize)
                .is_none_or(|last| completed(*cell) >= *last)
        };
        if let Some(position) = self.free.iter().position(idle) {
            return Ok(self.free.swap_remove(position));
        }
        let cell = u32::try_from(self.last.len())
            .ok()
            .filter(|cell| *cell < STREAMS);
        self.last.push(0);
        cell.ok_or(CudaError::OutOfMemory)
    }

    fn last(&self, cell: u32) -> u64 {
        self.last.get(cell as usize).copied().unwrap_or(0)
    }

    fn next_ticket(&mut self, cell: u32) -> u64 {
        self.last.get_mut(cell as usize).map_or(0, |last| {
            *last += 1;
            *last
        })
    }

    fn all(&self) -> impl Iterator<Item = &Stream> {
        self.created.values().chain(self.defaults.values())
    }

    fn of_context(&self, context: CUcontext) -> impl Iterator<Item = &Stream> {
        self.all().filter(move |stream| stream.context == context)
    }
}

impl State {
    /// Resolves a handle; the null handle is the current context's legacy stream.
    pub(crate) fn stream(&mut self, driver: &Driver, handle: CUstream) -> CudaResult<Stream> {
        let which = match handle {
            CUstream::NULL | CUstream::LEGACY => DefaultStream::Legacy,
            CUstream::PER_THREAD => DefaultStream::PerThread(this_thread()),
            handle => {
                require_any_context(self)?;
                return self
                    .streams
                    .created
                    .get(&handle)
                    .copied()
                    .ok_or(CudaError::InvalidHandle);
            }
        };
        let context = current_context()?;
        self.current()?;
        if let Some(stream) = self.streams.defaults.get(&(context, which)) {
            return Ok(*stream);
        }
        let cell = self.streams.cell(|cell| driver.channel().completed(cell))?;
        let legacy = which == DefaultStream::Legacy;
        let stream = Stream {
            context,
            cell,
            flags: 0,
            legacy,
        };
        self.streams.defaults.insert((context, which), stream);
        Ok(stream)
    }

    /// Appends work to a stream, after the work that default stream rules order before it.
    pub(crate) fn submit(
        &mut self,
        driver: &Driver,
        stream: Stream,
        work: Work,
    ) -> CudaResult<Point> {
        let context = self
            .contexts
            .get(&stream.context)
            .ok_or(CudaError::ContextIsDestroyed)?
            .id;
        for point in self.ordered_before(driver, stream) {
            self.append(
                driver,
                context,
                stream.cell,
                Work::Wait {
                    stream: point.cell,
                    ticket: point.ticket,
                },
            );
        }
        Ok(self.append(driver, context, stream.cell, work))
    }

    /// Unfinished work that default stream rules order before new work of a stream.
    fn ordered_before(&self, driver: &Driver, stream: Stream) -> Vec<Point> {
        if !stream.is_blocking() {
            return Vec::new();
        }
        let orders = |other: &&Stream| {
            other.cell != stream.cell && other.is_blocking() && (stream.legacy || other.legacy)
        };
        let before = self.streams.of_context(stream.context).filter(orders);
        before
            .filter_map(|other| self.unfinished(driver, other.cell))
            .collect()
    }

    /// Returns a cell for an internal stream.
    pub(crate) fn hidden_cell(&mut self, driver: &Driver) -> CudaResult<u32> {
        self.streams.cell(|cell| driver.channel().completed(cell))
    }

    /// Releases cells; queued work still completes.
    pub(crate) fn free_cells(&mut self, cells: Vec<u32>) {
        self.streams.free.extend(cells);
    }

    /// The last point of a stream, unless completed.
    pub(crate) fn unfinished(&self, driver: &Driver, cell: u32) -> Option<Point> {
        let ticket = self.streams.last(cell);
        (driver.channel().completed(cell) < ticket).then_some(Point { cell, ticket })
    }

    fn append(&mut self, driver: &Driver, context: ContextId, cell: u32, work: Work) -> Point {
        let ticket = self.streams.next_ticket(cell);
        let action = Action::Submit(work);
        driver.channel().submit(Command {
            at: now(),
            context,
            stream: cell,
            ticket,
            action,
        });
        Point { cell, ticket }
    }

    /// The point to wait for before a full stream accepts work.
    pub(crate) fn full_until(&self, driver: &Driver, stream: Stream) -> Option<Point> {
        let last = self.streams.last(stream.cell);
        let pending = last.saturating_sub(driver.channel().completed(stream.cell));
        (pending >= QUEUE_DEPTH).then(|| Point {
            cell: stream.cell,
            ticket: last - QUEUE_DEPTH / 2,
        })
    }

    /// Whether a stream has neither unfinished work nor dependencies.
    pub(crate) fn is_idle(&self, driver: &Driver, stream: Stream) -> bool {
        self.unfinished(driver, stream.cell).is_none()
            && self.ordered_before(driver, stream).is_empty()
    }

    /// The points that a synchronization of a stream waits for.
    fn points_of_stream(&self, driver: &Driver, stream: Stream) -> Vec<Point> {
        let mut points = self.ordered_before(driver, stream);
        if !stream.legacy {
            points.clear();
        }
        points.extend(self.unfinished(driver, stream.cell));
        points
    }

    /// The unfinished points of a context.
    pub(crate) fn points_of_context(&self, driver: &Driver, context: CUcontext) -> Vec<Point> {
        let streams = self.streams.all();
        // Includes its green contexts.
        streams
            .filter(|stream| stream.context == context || self.owner(stream.context) == context)
            .filter_map(|stream| self.unfinished(driver, stream.cell))
            .collect()
    }

    pub(crate) fn create_stream(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        flags: c_uint,
    ) -> CudaResult<CUstream> {
        let cell = self.hidden_cell(driver)?;
        let handle = CUstream(self.handle());
        let stream = Stream {
            context,
            cell,
            flags,
            legacy: false,
        };
        self.streams.created.insert(handle, stream);
        Ok(handle)
    }

    /// Removes the streams of a destroyed context.
    pub(crate) fn remove_streams(&mut self, context: CUcontext) {
        let cells: Vec<u32> = self
            .streams
            .of_context(context)
            .map(|stream| stream.cell)
            .collect();
        self.captures.remove_cells(&cells);
        self.streams.free.extend(cells);
        self.streams
            .created
            .retain(|_, stream| stream.context != context);
        self.streams
            .defaults
            .retain(|(owner, _), _| *owner != context);
    }
}

/// A created stream needs no current context, but at least one context.
fn require_any_context(state: &State) -> CudaResult {
    match state.contexts.is_empty() {
        true => Err(CudaError::InvalidContext),
        false => Ok(()),
    }
}

/// Runs an action with the state locked, once the stream accepts work.
pub(crate) fn with_capacity<T>(
    handle: CUstream,
    action: impl FnOnce(&'static Driver, &mut State, Stream) -> CudaResult<T>,
) -> CudaResult<T> {
    let driver = driver()?;
    loop {
        let mut state = driver.state();
        let stream = state.stream(driver, handle)?;
        match state.full_until(driver, stream) {
            None => return action(driver, &mut state, stream),
            Some(point) => {
                drop(state);
                driver.wait_for(&[point])?;
            }
        }
    }
}

entry_points! {
    "cuStreamCreate" 2000 fn cuStreamCreate(stream: Out<CUstream>, flags: c_uint) { create(stream, flags) }
    "cuStreamCreateWithPriority" 5050 fn cuStreamCreateWithPriority(stream: Out<CUstream>, flags: c_uint, _priority: c_int) { create(stream, flags) }

    "cuStreamDestroy" 2000 fn cuStreamDestroy(stream: CUstream) { destroy(stream) }
    "cuStreamDestroy" 4000 fn cuStreamDestroy_v2(stream: CUstream) { destroy(stream) }

    "cuStreamSynchronize" 2000 fn cuStreamSynchronize(stream: CUstream) ptsz(stream) cuStreamSynchronize_ptsz {
        let driver = driver()?;
        let mut state = driver.state();
        let stream = state.stream(driver, stream)?;
        state.require_not_capturing(stream)?;
        let points = state.points_of_stream(driver, stream);
        drop(state);
        driver.wait_for(&points)?;
        driver.state().trim_pools(driver)
    }

    "cuStreamQuery" 2000 fn cuStreamQuery(stream: CUstream) ptsz(stream) cuStreamQuery_ptsz {
        let driver = driver()?;
        let mut state = driver.state();
        let stream = state.stream(driver, stream)?;
        state.require_not_capturing(stream)?;
        match state.points_of_stream(driver, stream).is_empty() {
            true => Ok(()),
            false => Err(CudaError::NotReady),
        }
    }

    "cuStreamGetCtx" 9020 fn cuStreamGetCtx(stream: CUstream, context: Out<CUcontext>) ptsz(stream) cuStreamGetCtx_ptsz {
        let driver = driver()?;
        context.set(driver.state().stream(driver, stream)?.context)
    }

    "cuStreamGetDevice" 12080 fn cuStreamGetDevice(stream: CUstream, device: Out<CUdevice>) ptsz(stream) cuStreamGetDevice_ptsz {
        let driver = driver()?;
        let mut state = driver.state();
        let stream = state.stream(driver, stream)?;
        let context = state.contexts.get(&stream.context).ok_or(CudaError::ContextIsDestroyed)?;
        device.set(context.device)
    }

    "cuCtxSynchronize" 2000 fn cuCtxSynchronize() { synchronize(current_context()?) }
    "cuCtxSynchronize" 13000 fn cuCtxSynchronize_v2(context: CUcontext) {
        let context = if context == CUcontext::NULL { current_context()? } else { context };
        synchronize(context)
    }
}

fn create(result: Out<CUstream>, flags: c_uint) -> CudaResult {
    if flags & !NON_BLOCKING != 0 || result.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let driver = driver()?;
    let context = current_context()?;
    let mut state = driver.state();
    state.current()?;
    result.set(state.create_stream(driver, context, flags)?)
}

/// Removes the handle; queued work still completes.
fn destroy(handle: CUstream) -> CudaResult {
    let driver = driver()?;
    let mut state = driver.state();
    let stream = state
        .streams
        .created
        .remove(&handle)
        .ok_or(CudaError::InvalidHandle)?;
    state.captures.remove_stream(stream.cell);
    state.streams.free.push(stream.cell);
    Ok(())
}

fn synchronize(context: CUcontext) -> CudaResult {
    let driver = driver()?;
    let mut state = driver.state();
    if !state.contexts.contains_key(&context) {
        return Err(CudaError::ContextIsDestroyed);
    }
    state.require_no_capture_in(context)?;
    let points = state.points_of_context(driver, context);
    drop(state);
    driver.wait_for(&points)?;
    driver.state().trim_pools(driver)
}
