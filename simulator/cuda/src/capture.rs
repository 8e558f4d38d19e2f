//! Stream capture: operations of a stream become a graph instead of being executed.
//!
//! A capture begins in one stream and spreads to streams that wait for one of its events. During a
//! capture, calls that could wait for captured work or that affect the whole device are rejected
//! and invalidate it: calls of every thread in global mode, of the capturing thread in thread-local
//! mode, of none in relaxed mode. Which calls those are was measured on an H200. An invalidated capture rejects everything but its end.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;

use crate::State;
use crate::abi::{CudaResult, In, InOut, Out, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::operation::Operation;
use crate::stream::{Stream, this_thread};
use crate::types::{CUgraph, CUgraphEdgeData, CUgraphNode, CUstream};

/// `CUstreamCaptureMode`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    fn from_code(code: c_uint) -> CudaResult<Self> {
        match code {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(CudaError::InvalidValue),
        }
    }

    fn code(self) -> c_uint {
        match self {
            Self::Global => 0,
            Self::ThreadLocal => 1,
            Self::Relaxed => 2,
        }
    }
}

thread_local! {
    /// Capture mode of this thread, for its unsafe calls.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// `CUstreamCaptureStatus`
const STATUS_NONE: c_uint = 0;
const STATUS_ACTIVE: c_uint = 1;
const STATUS_INVALIDATED: c_uint = 2;

/// All open captures.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    captures: BTreeMap<u64, Capture>,
    /// CapturedPoint streams, by cell.
    branches: BTreeMap<u32, Branch>,
    next_id: u64,
}

#[derive(Debug)]
struct Capture {
    mode: Mode,
    thread: u64,
    /// Cell of the stream in which the capture began and has to end.
    origin: u32,
    graph: CUgraph,
    /// Whether the program supplied the graph.
    is_borrowed: bool,
    valid: bool,
}

#[derive(Clone, Debug)]
struct Branch {
    capture: u64,
    stream: Stream,
    /// Dependencies of the next operation.
    dependencies: Vec<CUgraphNode>,
}

/// A point in a captured stream, recorded in an event.
#[derive(Clone, Debug)]
pub(crate) struct CapturedPoint {
    capture: u64,
    dependencies: Vec<CUgraphNode>,
}

impl Captures {
    /// Drops the captures of streams that ended with their context.
    pub(crate) fn remove_cells(&mut self, cells: &[u32]) {
        let branches = cells.iter().filter_map(|cell| self.branches.get(cell));
        let ended: BTreeSet<u64> = branches.map(|branch| branch.capture).collect();
        self.captures.retain(|id, _| !ended.contains(id));
        self.branches
            .retain(|_, branch| !ended.contains(&branch.capture));
    }

    fn branch(&mut self, stream: Stream) -> CudaResult<&mut Branch> {
        let branch = self.branches.get_mut(&stream.cell);
        branch.ok_or(CudaError::IllegalState)
    }

    /// Returns the valid capture of a stream.
    fn valid(&self, stream: Stream) -> CudaResult<&Capture> {
        let branch = self.branches.get(&stream.cell);
        let capture = branch.and_then(|branch| self.captures.get(&branch.capture));
        match capture {
            Some(capture) if capture.valid => Ok(capture),
            Some(_) => Err(CudaError::StreamCaptureInvalidated),
            None => Err(CudaError::IllegalState),
        }
    }

    fn invalidate(&mut self, affects: impl Fn(u64, &Capture) -> bool) -> bool {
        let mut any = false;
        for (id, capture) in &mut self.captures {
            if affects(*id, capture) {
                capture.valid = false;
                any = true;
            }
        }
        any
    }

    fn end(&mut self, id: u64) {
        self.captures.remove(&id);
        self.branches.retain(|_, branch| branch.capture != id);
    }

    /// Invalidates the capture of a destroyed stream.
    pub(crate) fn remove_stream(&mut self, cell: u32) {
        if let Some(branch) = self.branches.remove(&cell) {
            self.invalidate(|id, _| id == branch.capture);
            self.captures
                .retain(|id, capture| *id != branch.capture || capture.origin != cell);
        }
    }
}

impl State {
    /// Returns whether operations of a stream are captured. An operation of the legacy default
    /// stream would wait for captured blocking streams: it is rejected and invalidates their
    /// captures.
    pub(crate) fn is_capturing(&mut self, stream: Stream) -> CudaResult<bool> {
        if self.captures.branches.is_empty() {
            return Ok(false);
        }
        if self.captures.branches.contains_key(&stream.cell) {
            return Ok(true);
        }
        if !stream.is_legacy() {
            return Ok(false);
        }
        let implied: BTreeSet<u64> = self
            .captures
            .branches
            .values()
            .filter(|branch| branch.stream.is_blocking() && branch.stream.context == stream.context)
            .map(|branch| branch.capture)
            .collect();
        if self.captures.invalidate(|id, _| implied.contains(&id)) {
            return Err(CudaError::StreamCaptureImplicit);
        }
        Ok(false)
    }

    /// Appends an operation to the graph of a captured stream.
    pub(crate) fn capture(
        &mut self,
        stream: Stream,
        operation: Operation,
    ) -> CudaResult<CUgraphNode> {
        let graph = self.captures.valid(stream)?.graph;
        let dependencies = self.captures.branch(stream)?.dependencies.clone();
        let node = self.add_node(graph, &dependencies, operation)?;
        self.captures.branch(stream)?.dependencies = vec![node];
        Ok(node)
    }

    pub(crate) fn captured_graph(&self, stream: Stream) -> CudaResult<CUgraph> {
        Ok(self.captures.valid(stream)?.graph)
    }

    /// The current point of a captured stream.
    pub(crate) fn captured_point(&mut self, stream: Stream) -> CudaResult<CapturedPoint> {
        self.captures.valid(stream)?;
        let branch = self.captures.branch(stream)?;
        Ok(CapturedPoint {
            capture: branch.capture,
            dependencies: branch.dependencies.clone(),
        })
    }

    /// Makes a stream wait for a point of a captured one, which adds the stream to the capture.
    pub(crate) fn join(&mut self, stream: Stream, point: &CapturedPoint) -> CudaResult {
        let Some(capture) = self.captures.captures.get(&point.capture) else {
            return Err(CudaError::CapturedEvent);
        };
        if !capture.valid {
            return Err(CudaError::StreamCaptureInvalidated);
        }
        if stream.is_legacy() {
            return Err(self.invalidate_capture(point.capture, CudaError::StreamCaptureImplicit));
        }
        match self.captures.branches.get_mut(&stream.cell) {
            None => {
                let branch = Branch {
                    capture: point.capture,
                    stream,
                    dependencies: point.dependencies.clone(),
                };
                self.captures.branches.insert(stream.cell, branch);
                Ok(())
            }
            Some(branch) if branch.capture == point.capture => {
                for node in &point.dependencies {
                    if !branch.dependencies.contains(node) {
                        branch.dependencies.push(*node);
                    }
                }
                Ok(())
            }
            Some(branch) => {
                let other = branch.capture;
                self.captures
                    .invalidate(|id, _| id == other || id == point.capture);
                Err(CudaError::StreamCaptureMerge)
            }
        }
    }

    /// Invalidates the capture of a stream and returns the error for the caller.
    pub(crate) fn invalidate(&mut self, stream: Stream, error: CudaError) -> CudaError {
        match self.captures.branches.get(&stream.cell) {
            Some(branch) => {
                let id = branch.capture;
                self.invalidate_capture(id, error)
            }
            None => error,
        }
    }

    fn invalidate_capture(&mut self, id: u64, error: CudaError) -> CudaError {
        let known = self.captures.captures.get(&id);
        if known.is_some_and(|capture| !capture.valid) {
            return CudaError::StreamCaptureInvalidated;
        }
        self.captures.invalidate(|other, _| other == id);
        error
    }

    /// Rejects a call that is unsafe while the calling thread, or in global mode any thread,
    /// captures, and invalidates these captures.
    pub(crate) fn require_safe_in_capture(&mut self) -> CudaResult {
        if self.captures.captures.is_empty() || self.tolerates_unsafe_calls {
            return Ok(());
        }
        let (mode, thread) = (MODE.get(), this_thread());
        let affects = |_: u64, capture: &Capture| match mode {
            Mode::Relaxed => false,
            Mode::ThreadLocal => capture.thread == thread && capture.mode != Mode::Relaxed,
            Mode::Global => {
                capture.mode == Mode::Global
                    || capture.thread == thread && capture.mode != Mode::Relaxed
            }
        };
        match self.captures.invalidate(affects) {
            true => Err(CudaError::StreamCaptureUnsupported),
            false => Ok(()),
        }
    }

    /// Rejects synchronization with, or a query of, a captured stream.
    pub(crate) fn require_not_capturing(&mut self, stream: Stream) -> CudaResult {
        match self.is_capturing(stream)? {
            true => Err(self.invalidate(stream, CudaError::StreamCaptureUnsupported)),
            false => self.require_safe_in_capture(),
        }
    }

    /// Rejects synchronization with a context that has a captured stream.
    pub(crate) fn require_no_capture_in(&mut self, context: crate::types::CUcontext) -> CudaResult {
        let captured = self.captures.branches.values();
        let inside: BTreeSet<u64> = captured
            .filter(|branch| branch.stream.context == context)
            .map(|branch| branch.capture)
            .collect();
        match self.captures.invalidate(|id, _| inside.contains(&id)) {
            true => Err(CudaError::StreamCaptureUnsupported),
            false => self.require_safe_in_capture(),
        }
    }

    fn begin(
        &mut self,
        stream: Stream,
        mode: Mode,
        into: Option<(CUgraph, Vec<CUgraphNode>)>,
    ) -> CudaResult {
        if self.is_capturing(stream)? {
            return Err(self.invalidate(stream, CudaError::IllegalState));
        }
        if stream.is_legacy() {
            return Err(CudaError::StreamCaptureUnsupported);
        }
        let is_borrowed = into.is_some();
        let (graph, dependencies) = match into {
            Some(into) => into,
            None => (self.create_graph(), Vec::new()),
        };
        self.captures.next_id += 1;
        let id = self.captures.next_id;
        let capture = Capture {
            mode,
            thread: this_thread(),
            origin: stream.cell,
            graph,
            is_borrowed,
            valid: true,
        };
        self.captures.captures.insert(id, capture);
        let branch = Branch {
            capture: id,
            stream,
            dependencies,
        };
        self.captures.branches.insert(stream.cell, branch);
        Ok(())
    }

    /// Ends a capture and returns its graph if valid.
    fn end_capture(&mut self, driver: &Driver, stream: Stream) -> CudaResult<CUgraph> {
        let branch = self.captures.branch(stream)?;
        let (id, joined) = (branch.capture, branch.dependencies.clone());
        let Some(capture) = self.captures.captures.get_mut(&id) else {
            // The stream in which the capture began was destroyed.
            self.captures.end(id);
            return Err(CudaError::StreamCaptureInvalidated);
        };
        if capture.origin != stream.cell {
            capture.valid = false;
            return Err(CudaError::StreamCaptureUnmatched);
        }
        if capture.mode != Mode::Relaxed && capture.thread != this_thread() {
            return Err(CudaError::StreamCaptureWrongThread);
        }
        let (graph, valid, is_borrowed) = (capture.graph, capture.valid, capture.is_borrowed);
        let forked: BTreeSet<CUgraphNode> = self
            .captures
            .branches
            .values()
            .filter(|branch| branch.capture == id)
            .flat_map(|branch| branch.dependencies.iter().copied())
            .collect();
        self.captures.end(id);
        let reached = self.with_ancestors(&joined);
        let error = if !valid {
            CudaError::StreamCaptureInvalidated
        } else if !forked.is_subset(&reached) {
            CudaError::StreamCaptureUnjoined
        } else {
            return Ok(graph);
        };
        if !is_borrowed {
            self.destroy_graph(driver, graph)?;
        }
        Err(error)
    }

    fn capture_status(&mut self, handle: CUstream) -> CudaResult<(c_uint, Option<Stream>)> {
        let driver = driver()?;
        let stream = self.stream(driver, handle)?;
        if !self.is_capturing(stream)? {
            return Ok((STATUS_NONE, None));
        }
        match self.captures.valid(stream) {
            Ok(_) => Ok((STATUS_ACTIVE, Some(stream))),
            Err(_) => Ok((STATUS_INVALIDATED, None)),
        }
    }
}

/// Outputs of all versions of `cuStreamGetCaptureInfo`.
struct Info {
    status: Out<c_uint>,
    id: Out<u64>,
    graph: Out<CUgraph>,
    dependencies: Out<*const CUgraphNode>,
    edges: Out<*const CUgraphEdgeData>,
    count: Out<usize>,
}

fn info(handle: CUstream, results: &Info) -> CudaResult {
    let driver = driver()?;
    let mut state = driver.state();
    let (status, stream) = state.capture_status(handle)?;
    results.status.set(status)?;
    let Some(stream) = stream else {
        return Ok(());
    };
    let graph = state.captured_graph(stream)?;
    let branch = state.captures.branch(stream)?;
    results.id.set_if_not_null(branch.capture);
    results.graph.set_if_not_null(graph);
    // The list belongs to the driver and is valid until the next operation of the stream.
    let list = branch.dependencies.as_ptr();
    results.dependencies.set_if_not_null(list);
    results.edges.set_if_not_null(std::ptr::null());
    results.count.set_if_not_null(branch.dependencies.len());
    Ok(())
}

fn begin_capture(stream: CUstream, mode: c_uint) -> CudaResult {
    let mode = Mode::from_code(mode)?;
    let driver = driver()?;
    let mut state = driver.state();
    let stream = state.stream(driver, stream)?;
    state.begin(stream, mode, None)
}

entry_points! {
    "cuStreamBeginCapture" 10000 fn cuStreamBeginCapture(stream: CUstream) ptsz(stream) cuStreamBeginCapture_ptsz { begin_capture(stream, Mode::Global.code()) }
    "cuStreamBeginCapture" 10010 fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) ptsz(stream) cuStreamBeginCapture_v2_ptsz { begin_capture(stream, mode) }

    "cuStreamBeginCaptureToGraph" 12030 fn cuStreamBeginCaptureToGraph(stream: CUstream, graph: CUgraph, nodes: In<CUgraphNode>, _edges: In<CUgraphEdgeData>, count: usize, mode: c_uint) ptsz(stream) cuStreamBeginCaptureToGraph_ptsz {
        let mode = Mode::from_code(mode)?;
        let nodes = nodes.list(count)?;
        let driver = driver()?;
        let mut state = driver.state();
        let stream = state.stream(driver, stream)?;
        state.require_graph(graph)?;
        for node in &nodes {
            state.require_node(graph, *node)?;
        }
        state.begin(stream, mode, Some((graph, nodes)))
    }

    "cuStreamEndCapture" 10000 fn cuStreamEndCapture(stream: CUstream, graph: Out<CUgraph>) ptsz(stream) cuStreamEndCapture_ptsz {
        graph.set(CUgraph(0))?;
        let driver = driver()?;
        let mut state = driver.state();
        let stream = state.stream(driver, stream)?;
        graph.set(state.end_capture(driver, stream)?)
    }

    "cuStreamIsCapturing" 10000 fn cuStreamIsCapturing(stream: CUstream, status: Out<c_uint>) ptsz(stream) cuStreamIsCapturing_ptsz {
        status.set(driver()?.state().capture_status(stream)?.0)
    }

    "cuStreamGetCaptureInfo" 10010 fn cuStreamGetCaptureInfo(stream: CUstream, status: Out<c_uint>, id: Out<u64>) ptsz(stream) cuStreamGetCaptureInfo_ptsz {
        info(stream, &Info { status, id, graph: Out::NULL, dependencies: Out::NULL, edges: Out::NULL, count: Out::NULL })
    }
    "cuStreamGetCaptureInfo" 11030 fn cuStreamGetCaptureInfo_v2(stream: CUstream, status: Out<c_uint>, id: Out<u64>, graph: Out<CUgraph>, dependencies: Out<*const CUgraphNode>, count: Out<usize>) ptsz(stream) cuStreamGetCaptureInfo_v2_ptsz {
        info(stream, &Info { status, id, graph, dependencies, edges: Out::NULL, count })
    }
    "cuStreamGetCaptureInfo" 12030 fn cuStreamGetCaptureInfo_v3(stream: CUstream, status: Out<c_uint>, id: Out<u64>, graph: Out<CUgraph>, dependencies: Out<*const CUgraphNode>, edges: Out<*const CUgraphEdgeData>, count: Out<usize>) ptsz(stream) cuStreamGetCaptureInfo_v3_ptsz {
        info(stream, &Info { status, id, graph, dependencies, edges, count })
    }

    "cuThreadExchangeStreamCaptureMode" 10010 fn cuThreadExchangeStreamCaptureMode(mode: InOut<c_uint>) {
        driver()?;
        let new = Mode::from_code(mode.get()?)?;
        mode.set(MODE.replace(new).code())
    }
}
