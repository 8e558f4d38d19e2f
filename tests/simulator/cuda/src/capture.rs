//! Stream capture: what is put on a stream becomes a graph instead of being done.
//!
//! A capture begins in one stream and spreads to those that wait for an event of it. While it
//! lasts, calls that could wait for captured work, or that touch the whole device, are refused and
//! spoil it: in global mode of every thread, in thread-local mode of the thread that began it, in
//! relaxed mode of none. A spoilt capture refuses everything but its end.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;

use crate::abi::{Answer, In, InOut, Out, entry_points};
use crate::driver::{Driver, State, driver};
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
    fn from_code(code: c_uint) -> Answer<Self> {
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
    /// Whose captures this thread's unsafe calls respect.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// `CUstreamCaptureStatus`
const STATUS_NONE: c_uint = 0;
const STATUS_ACTIVE: c_uint = 1;
const STATUS_INVALIDATED: c_uint = 2;

/// All captures that have begun and not ended.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    captures: BTreeMap<u64, Capture>,
    /// The streams that are captured, by cell.
    branches: BTreeMap<u32, Branch>,
    next_id: u64,
}

#[derive(Debug)]
struct Capture {
    mode: Mode,
    thread: u64,
    /// Cell of the stream in which it began and has to end.
    origin: u32,
    graph: CUgraph,
    /// Whether the graph was there before.
    borrowed: bool,
    valid: bool,
}

/// One captured stream.
#[derive(Clone, Debug)]
struct Branch {
    capture: u64,
    stream: Stream,
    /// What the next operation depends on.
    dependencies: Vec<CUgraphNode>,
}

/// A point in a captured stream, as an event keeps it.
#[derive(Clone, Debug)]
pub(crate) struct Captured {
    capture: u64,
    dependencies: Vec<CUgraphNode>,
}

impl Captures {
    fn branch(&mut self, stream: Stream) -> Answer<&mut Branch> {
        let branch = self.branches.get_mut(&stream.cell);
        branch.ok_or(CudaError::IllegalState)
    }

    /// The valid capture that a stream belongs to.
    fn valid(&self, stream: Stream) -> Answer<&Capture> {
        let branch = self.branches.get(&stream.cell);
        let capture = branch.and_then(|branch| self.captures.get(&branch.capture));
        match capture {
            Some(capture) if capture.valid => Ok(capture),
            Some(_) => Err(CudaError::StreamCaptureInvalidated),
            None => Err(CudaError::IllegalState),
        }
    }

    fn invalidate(&mut self, spoils: impl Fn(u64, &Capture) -> bool) -> bool {
        let mut any = false;
        for (id, capture) in &mut self.captures {
            if spoils(*id, capture) {
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

    /// Spoils what a destroyed stream takes part in.
    pub(crate) fn forget_stream(&mut self, cell: u32) {
        if let Some(branch) = self.branches.remove(&cell) {
            self.invalidate(|id, _| id == branch.capture);
            self.captures
                .retain(|id, capture| *id != branch.capture || capture.origin != cell);
        }
    }
}

impl State {
    /// Whether operations of a stream go into a graph. An operation of the legacy default stream
    /// would wait for captured blocking streams: it is refused and spoils their captures.
    pub(crate) fn is_capturing(&mut self, stream: Stream) -> Answer<bool> {
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
            .filter(|branch| branch.stream.blocking() && branch.stream.context == stream.context)
            .map(|branch| branch.capture)
            .collect();
        if self.captures.invalidate(|id, _| implied.contains(&id)) {
            return Err(CudaError::StreamCaptureImplicit);
        }
        Ok(false)
    }

    /// Appends an operation to the graph that a stream is captured into.
    pub(crate) fn capture(&mut self, stream: Stream, operation: Operation) -> Answer<CUgraphNode> {
        let graph = self.captures.valid(stream)?.graph;
        let dependencies = self.captures.branch(stream)?.dependencies.clone();
        let node = self.add_node(graph, &dependencies, operation)?;
        self.captures.branch(stream)?.dependencies = vec![node];
        Ok(node)
    }

    /// The graph that a stream is captured into.
    pub(crate) fn captured_graph(&self, stream: Stream) -> Answer<CUgraph> {
        Ok(self.captures.valid(stream)?.graph)
    }

    /// Where a captured stream is.
    pub(crate) fn captured_point(&mut self, stream: Stream) -> Answer<Captured> {
        self.captures.valid(stream)?;
        let branch = self.captures.branch(stream)?;
        Ok(Captured {
            capture: branch.capture,
            dependencies: branch.dependencies.clone(),
        })
    }

    /// Lets a stream wait for a point in a captured one, which makes it part of the capture.
    pub(crate) fn join(&mut self, stream: Stream, point: &Captured) -> Answer {
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

    /// Spoils the capture of a stream; the error is the one to return.
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

    /// What a call does that may not be made while the calling thread, or in global mode any
    /// thread, captures: it is refused, and the captures are spoilt.
    pub(crate) fn potentially_unsafe(&mut self) -> Answer {
        if self.captures.captures.is_empty() {
            return Ok(());
        }
        let (mode, thread) = (MODE.get(), this_thread());
        let spoils = |_: u64, capture: &Capture| match mode {
            Mode::Relaxed => false,
            Mode::ThreadLocal => capture.thread == thread && capture.mode != Mode::Relaxed,
            Mode::Global => {
                capture.mode == Mode::Global
                    || capture.thread == thread && capture.mode != Mode::Relaxed
            }
        };
        match self.captures.invalidate(spoils) {
            true => Err(CudaError::StreamCaptureUnsupported),
            false => Ok(()),
        }
    }

    /// Refuses to wait for a captured stream, or to ask whether it is done.
    pub(crate) fn require_not_capturing(&mut self, stream: Stream) -> Answer {
        match self.is_capturing(stream)? {
            true => Err(self.invalidate(stream, CudaError::StreamCaptureUnsupported)),
            false => self.potentially_unsafe(),
        }
    }

    /// Refuses to wait for a context with a captured stream.
    pub(crate) fn require_no_capture_in(&mut self, context: crate::types::CUcontext) -> Answer {
        let captured = self.captures.branches.values();
        let inside: BTreeSet<u64> = captured
            .filter(|branch| branch.stream.context == context)
            .map(|branch| branch.capture)
            .collect();
        match self.captures.invalidate(|id, _| inside.contains(&id)) {
            true => Err(CudaError::StreamCaptureUnsupported),
            false => self.potentially_unsafe(),
        }
    }

    fn begin(
        &mut self,
        stream: Stream,
        mode: Mode,
        into: Option<(CUgraph, Vec<CUgraphNode>)>,
    ) -> Answer {
        if self.is_capturing(stream)? {
            return Err(self.invalidate(stream, CudaError::IllegalState));
        }
        if stream.is_legacy() {
            return Err(CudaError::StreamCaptureUnsupported);
        }
        let borrowed = into.is_some();
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
            borrowed,
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

    /// Ends a capture; the graph where it is one.
    fn end_capture(&mut self, driver: &Driver, stream: Stream) -> Answer<CUgraph> {
        let branch = self.captures.branch(stream)?;
        let (id, joined) = (branch.capture, branch.dependencies.clone());
        let Some(capture) = self.captures.captures.get_mut(&id) else {
            // The stream in which it began is gone.
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
        let (graph, valid, borrowed) = (capture.graph, capture.valid, capture.borrowed);
        let forked: BTreeSet<CUgraphNode> = self
            .captures
            .branches
            .values()
            .filter(|branch| branch.capture == id)
            .flat_map(|branch| branch.dependencies.iter().copied())
            .collect();
        self.captures.end(id);
        let reached = self.nodes_before(&joined);
        let error = if !valid {
            CudaError::StreamCaptureInvalidated
        } else if !forked.is_subset(&reached) {
            CudaError::StreamCaptureUnjoined
        } else {
            return Ok(graph);
        };
        if !borrowed {
            self.destroy_graph(driver, graph)?;
        }
        Err(error)
    }

    fn capture_status(&mut self, handle: CUstream) -> Answer<(c_uint, Option<Stream>)> {
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

/// Results that `cuStreamGetCaptureInfo` has in all its forms.
struct Info {
    status: Out<c_uint>,
    id: Out<u64>,
    graph: Out<CUgraph>,
    dependencies: Out<*const CUgraphNode>,
    edges: Out<*const CUgraphEdgeData>,
    count: Out<usize>,
}

fn info(handle: CUstream, results: &Info) -> Answer {
    let driver = driver()?;
    let mut state = driver.state();
    let (status, stream) = state.capture_status(handle)?;
    results.status.set(status)?;
    let Some(stream) = stream else {
        return Ok(());
    };
    let graph = state.captured_graph(stream)?;
    let branch = state.captures.branch(stream)?;
    results.id.set_if_wanted(branch.capture);
    results.graph.set_if_wanted(graph);
    // The list is the driver's, and valid until the next operation of the stream.
    let list = branch.dependencies.as_ptr();
    results.dependencies.set_if_wanted(list);
    results.edges.set_if_wanted(std::ptr::null());
    results.count.set_if_wanted(branch.dependencies.len());
    Ok(())
}

fn begin(stream: CUstream, mode: c_uint) -> Answer {
    let mode = Mode::from_code(mode)?;
    let driver = driver()?;
    let mut state = driver.state();
    let stream = state.stream(driver, stream)?;
    state.begin(stream, mode, None)
}

entry_points! {
    "cuStreamBeginCapture" 10000 fn cuStreamBeginCapture(stream: CUstream) ptsz(stream) cuStreamBeginCapture_ptsz { begin(stream, Mode::Global.code()) }
    "cuStreamBeginCapture" 10010 fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) ptsz(stream) cuStreamBeginCapture_v2_ptsz { begin(stream, mode) }

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
