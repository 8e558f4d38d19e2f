//! Events: points in streams with the GPU time at which they were reached.

use std::collections::BTreeMap;
use std::ffi::{c_float, c_uint};

use simulator_machine::channel::EVENTS;
use simulator_machine::protocol::Work;

use crate::State;
use crate::abi::{CudaResult, Out, entry_points};
use crate::capture::CapturedPoint;
use crate::context::current_handle;
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::operation::Operation;
use crate::stream::{Stream, with_capacity};
use crate::types::{CUcontext, CUevent, CUstream};

/// `CU_EVENT_INTERPROCESS`
const INTERPROCESS: c_uint = 4;
/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: c_uint = 2;

#[derive(Debug, Default)]
pub(crate) struct Events {
    created: BTreeMap<CUevent, Event>,
    /// Recordings per cell; continues when a cell is reused.
    recordings: Vec<u64>,
    /// Cells of destroyed events.
    free: Vec<u32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Event {
    context: CUcontext,
    cell: u32,
    flags: c_uint,
    last: Option<Recorded>,
    /// Set if the last recording was in a captured stream.
    captured: Option<CapturedPoint>,
}

#[derive(Clone, Copy, Debug)]
struct Recorded {
    context: CUcontext,
    point: Point,
    recording: u64,
}

impl Events {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        self.created.keys().map(|event| event.0)
    }

    fn cell(&mut self) -> CudaResult<u32> {
        if let Some(cell) = self.free.pop() {
            return Ok(cell);
        }
        let cell = u32::try_from(self.recordings.len())
            .ok()
            .filter(|cell| *cell < EVENTS);
        self.recordings.push(0);
        cell.ok_or(CudaError::OutOfMemory)
    }

    fn get(&self, handle: CUevent) -> CudaResult<Event> {
        self.created
            .get(&handle)
            .cloned()
            .ok_or(CudaError::InvalidHandle)
    }

    fn get_mut(&mut self, handle: CUevent) -> CudaResult<&mut Event> {
        self.created
            .get_mut(&handle)
            .ok_or(CudaError::InvalidHandle)
    }

    /// Removes the events of a destroyed context.
    pub(crate) fn remove_context(&mut self, context: CUcontext) {
        let free = &mut self.free;
        self.created.retain(|_, event| {
            let keep = event.context != context;
            if !keep {
                free.push(event.cell);
            }
            keep
        });
    }
}

impl Event {
    /// Returns whether the last recording is not reached yet.
    fn is_pending(&self, driver: &Driver) -> bool {
        self.last.is_some() && self.reached(driver).is_none()
    }

    /// Returns when the last recording was reached, or `None` if it was not.
    fn reached(&self, driver: &Driver) -> Option<u64> {
        let last = self.last?;
        let (recording, at) = driver.channel().event(self.cell);
        (recording >= last.recording).then_some(at)
    }

    /// Errors if the event was last recorded in a captured stream.
    fn require_recorded(&self) -> CudaResult {
        match self.captured {
            Some(_) => Err(CudaError::CapturedEvent),
            None => Ok(()),
        }
    }
}

impl State {
    pub(crate) fn require_event(&self, event: CUevent) -> CudaResult {
        self.events.get(event).map(drop)
    }

    /// Records an event in a stream.
    pub(crate) fn record(
        &mut self,
        driver: &Driver,
        stream: Stream,
        handle: CUevent,
    ) -> CudaResult<Point> {
        let Event { cell, context, .. } = self.events.get(handle)?;
        if context != self.owner(stream.context) {
            return Err(CudaError::InvalidHandle);
        }
        let count = self.events.recordings.get_mut(cell as usize);
        let count = count.ok_or(CudaError::InvalidHandle)?;
        *count += 1;
        let recording = *count;
        let work = Work::Record {
            event: cell,
            recording,
        };
        let point = self.submit(driver, stream, work)?;
        let event = self.events.get_mut(handle)?;
        event.captured = None;
        event.last = Some(Recorded {
            context,
            point,
            recording,
        });
        Ok(point)
    }

    /// Makes a stream wait for an event. Returns the point that the caller has to wait for when the
    /// event was recorded in another context.
    pub(crate) fn wait_event(
        &mut self,
        driver: &Driver,
        stream: Stream,
        handle: CUevent,
    ) -> CudaResult<Option<Point>> {
        let event = self.events.get(handle)?;
        let Some(last) = event.last.filter(|_| event.is_pending(driver)) else {
            return Ok(None);
        };
        if self.owner(last.context) != self.owner(stream.context) {
            return Ok(Some(last.point));
        }
        let work = Work::Wait {
            stream: last.point.cell,
            ticket: last.point.ticket,
        };
        self.submit(driver, stream, work).map(|_| None)
    }
}

/// `CU_EVENT_WAIT_EXTERNAL`: the wait becomes a node of the captured graph.
const EXTERNAL: c_uint = 1;

entry_points! {
    "cuEventCreate" 2000 fn cuEventCreate(result: Out<CUevent>, flags: c_uint) {
        if flags & INTERPROCESS != 0 {
            return Err(CudaError::NotSupported);
        }
        if flags > 3 || result.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let context = current_handle()?;
        let mut state = driver.state();
        state.current()?;
        let cell = state.events.cell()?;
        let handle = CUevent(state.handle());
        state.events.created.insert(handle, Event { context, cell, flags, last: None, captured: None });
        result.set(handle)
    }

    "cuEventDestroy" 2000 fn cuEventDestroy(event: CUevent) { destroy(event) }
    "cuEventDestroy" 4000 fn cuEventDestroy_v2(event: CUevent) { destroy(event) }

    "cuEventRecord" 2000 fn cuEventRecord(event: CUevent, stream: CUstream) ptsz(stream) cuEventRecord_ptsz { record(event, stream) }

    "cuEventQuery" 2000 fn cuEventQuery(event: CUevent) {
        let driver = driver()?;
        let mut state = driver.state();
        let event = state.events.get(event)?;
        event.require_recorded()?;
        state.require_safe_in_capture()?;
        match event.is_pending(driver) {
            true => Err(CudaError::NotReady),
            false => Ok(()),
        }
    }

    "cuEventSynchronize" 2000 fn cuEventSynchronize(event: CUevent) {
        let driver = driver()?;
        let mut state = driver.state();
        let event = state.events.get(event)?;
        event.require_recorded()?;
        state.require_safe_in_capture()?;
        drop(state);
        if let Some(last) = event.last.filter(|_| event.is_pending(driver)) {
            driver.wait_for(&[last.point])?;
        }
        driver.state().trim_pools(driver)
    }

    "cuEventElapsedTime" 2000 fn cuEventElapsedTime(milliseconds: Out<c_float>, start: CUevent, end: CUevent) { elapsed(milliseconds, start, end) }
    "cuEventElapsedTime" 12080 fn cuEventElapsedTime_v2(milliseconds: Out<c_float>, start: CUevent, end: CUevent) { elapsed(milliseconds, start, end) }

    "cuStreamWaitEvent" 3020 fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) ptsz(stream) cuStreamWaitEvent_ptsz {
        if flags & !EXTERNAL != 0 {
            return Err(CudaError::InvalidValue);
        }
        let foreign = with_capacity(stream, |driver, state, stream| {
            let found = state.events.get(event)?;
            if let Some(captured) = found.captured {
                return state.join(stream, &captured).map(|()| None);
            }
            if !state.is_capturing(stream)? {
                return state.wait_event(driver, stream, event);
            }
            if flags & EXTERNAL != 0 {
                return state.capture(stream, Operation::Wait(event)).map(|_| None);
            }
            match found.last {
                // The graph would wait for work outside of it.
                Some(_) => Err(state.invalidate(stream, CudaError::StreamCaptureIsolation)),
                None => Ok(None),
            }
        })?;
        match foreign {
            // The daemon orders streams of one context only: the calling thread waits.
            Some(point) => driver()?.wait_for(&[point]),
            None => Ok(()),
        }
    }
}

fn destroy(handle: CUevent) -> CudaResult {
    let driver = driver()?;
    let mut state = driver.state();
    let event = state
        .events
        .created
        .remove(&handle)
        .ok_or(CudaError::InvalidHandle)?;
    state.events.free.push(event.cell);
    Ok(())
}

fn record(handle: CUevent, stream: CUstream) -> CudaResult {
    with_capacity(stream, |driver, state, stream| {
        if !state.is_capturing(stream)? {
            return state.record(driver, stream, handle).map(drop);
        }
        let point = state.captured_point(stream)?;
        state.events.get_mut(handle)?.captured = Some(point);
        Ok(())
    })
}

fn elapsed(milliseconds: Out<c_float>, start: CUevent, end: CUevent) -> CudaResult {
    let driver = driver()?;
    let state = driver.state();
    let (start, end) = (state.events.get(start)?, state.events.get(end)?);
    for event in [&start, &end] {
        event.require_recorded()?;
        if event.flags & DISABLE_TIMING != 0 || event.last.is_none() {
            return Err(CudaError::InvalidHandle);
        }
    }
    let reached = |event: &Event| event.reached(driver).ok_or(CudaError::NotReady);
    let (start, end) = (reached(&start)?, reached(&end)?);
    #[expect(clippy::cast_possible_truncation, reason = "CUDA returns a float")]
    #[expect(clippy::cast_precision_loss, reason = "as above")]
    let length = |nanos: u64| (nanos as f64 / 1e6) as c_float;
    milliseconds.set(if end >= start {
        length(end - start)
    } else {
        -length(start - end)
    })
}
