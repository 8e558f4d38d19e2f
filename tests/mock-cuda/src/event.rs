//! Events: points in streams, with the card's time at which they were reached.

use std::collections::BTreeMap;
use std::ffi::{c_float, c_uint};

use drava_mock_machine::channel::EVENTS;
use drava_mock_machine::kernel::engine::Work;

use crate::abi::{Answer, Out, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::stream::{Point, wait_for, with_room};
use crate::types::{CUcontext, CUevent, CUstream};

/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: c_uint = 2;

/// All events of this process.
#[derive(Debug, Default)]
pub(crate) struct Events {
    created: BTreeMap<CUevent, Event>,
    /// How often each cell was recorded; goes on over reuse of a cell.
    recordings: Vec<u64>,
    /// Cells of destroyed events.
    free: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Event {
    context: CUcontext,
    cell: u32,
    flags: c_uint,
    last: Option<Recorded>,
}

#[derive(Clone, Copy, Debug)]
struct Recorded {
    context: CUcontext,
    point: Point,
    recording: u64,
}

impl Events {
    fn cell(&mut self) -> Answer<u32> {
        if let Some(cell) = self.free.pop() {
            return Ok(cell);
        }
        let cell = u32::try_from(self.recordings.len())
            .ok()
            .filter(|cell| *cell < EVENTS);
        self.recordings.push(0);
        cell.ok_or(CudaError::OutOfMemory)
    }

    fn get(&self, handle: CUevent) -> Answer<Event> {
        self.created
            .get(&handle)
            .copied()
            .ok_or(CudaError::InvalidHandle)
    }

    /// Forgets the events of a context that is destroyed.
    pub(crate) fn forget_context(&mut self, context: CUcontext) {
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
    /// When the last recording was reached; `None` while it was not.
    fn reached(&self, driver: &Driver) -> Option<u64> {
        let last = self.last?;
        let (recording, at) = driver.channel().event(self.cell);
        (recording >= last.recording).then_some(at)
    }
}

entry_points! {
    "cuEventCreate" 2000 fn cuEventCreate(result: Out<CUevent>, flags: c_uint) {
        if flags > 7 || result.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let context = current_handle()?;
        let mut state = driver.state();
        state.current()?;
        let cell = state.events.cell()?;
        let handle = CUevent(state.handle());
        state.events.created.insert(handle, Event { context, cell, flags, last: None });
        result.set(handle)
    }

    "cuEventDestroy" 2000 fn cuEventDestroy(event: CUevent) { destroy(event) }
    "cuEventDestroy" 4000 fn cuEventDestroy_v2(event: CUevent) { destroy(event) }

    "cuEventRecord" 2000 fn cuEventRecord(event: CUevent, stream: CUstream) ptsz(stream) cuEventRecord_ptsz { record(event, stream) }
    "cuEventRecordWithFlags" 11010 fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, _flags: c_uint) ptsz(stream) cuEventRecordWithFlags_ptsz { record(event, stream) }

    "cuEventQuery" 2000 fn cuEventQuery(event: CUevent) {
        let driver = driver()?;
        let event = driver.state().events.get(event)?;
        match event.last.is_some() && event.reached(driver).is_none() {
            true => Err(CudaError::NotReady),
            false => Ok(()),
        }
    }

    "cuEventSynchronize" 2000 fn cuEventSynchronize(event: CUevent) {
        let driver = driver()?;
        let event = driver.state().events.get(event)?;
        match event.last {
            Some(last) if event.reached(driver).is_none() => wait_for(driver, &[last.point])?,
            _ => {}
        }
        driver.state().trim_pools(driver)
    }

    "cuEventElapsedTime" 2000 fn cuEventElapsedTime(milliseconds: Out<c_float>, start: CUevent, end: CUevent) { elapsed(milliseconds, start, end) }
    "cuEventElapsedTime" 12080 fn cuEventElapsedTime_v2(milliseconds: Out<c_float>, start: CUevent, end: CUevent) { elapsed(milliseconds, start, end) }

    "cuStreamWaitEvent" 3020 fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) ptsz(stream) cuStreamWaitEvent_ptsz {
        if flags > 1 {
            return Err(CudaError::InvalidValue);
        }
        let foreign = with_room(stream, |driver, state, stream| {
            let event = state.events.get(event)?;
            let Some(last) = event.last.filter(|_| event.reached(driver).is_none()) else {
                return Ok(None);
            };
            if last.context != stream.context {
                return Ok(Some(last.point));
            }
            let Point { cell, ticket } = last.point;
            state.submit(driver, stream, Work::Wait { stream: cell, ticket })?;
            Ok(None)
        })?;
        match foreign {
            // Cards do not see each other's streams: the caller waits in the stream's place.
            Some(point) => wait_for(driver()?, &[point]),
            None => Ok(()),
        }
    }
}

fn destroy(handle: CUevent) -> Answer {
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

fn record(handle: CUevent, stream: CUstream) -> Answer {
    with_room(stream, |driver, state, stream| {
        let Event { cell, context, .. } = state.events.get(handle)?;
        if context != stream.context {
            return Err(CudaError::InvalidHandle);
        }
        let recording = state
            .events
            .recordings
            .get_mut(cell as usize)
            .ok_or(CudaError::InvalidHandle)?;
        *recording += 1;
        let recording = *recording;
        let point = state.submit(
            driver,
            stream,
            Work::Record {
                event: cell,
                recording,
            },
        )?;
        if let Some(event) = state.events.created.get_mut(&handle) {
            event.last = Some(Recorded {
                context,
                point,
                recording,
            });
        }
        Ok(())
    })
}

fn elapsed(milliseconds: Out<c_float>, start: CUevent, end: CUevent) -> Answer {
    let driver = driver()?;
    let state = driver.state();
    let (start, end) = (state.events.get(start)?, state.events.get(end)?);
    for event in [&start, &end] {
        if event.flags & DISABLE_TIMING != 0 || event.last.is_none() {
            return Err(CudaError::InvalidHandle);
        }
    }
    let reached = |event: &Event| event.reached(driver).ok_or(CudaError::NotReady);
    let (start, end) = (reached(&start)?, reached(&end)?);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "CUDA measures with the precision of a float"
    )]
    #[expect(clippy::cast_precision_loss, reason = "as above")]
    let length = |nanos: u64| (nanos as f64 / 1e6) as c_float;
    milliseconds.set(if end >= start {
        length(end - start)
    } else {
        -length(start - end)
    })
}
