//! Device resources and green contexts: a part of a device's multiprocessors, with streams of its
//! own, over the memory of the device's primary context.
//!
//! What is allocated, loaded or created while a green context is current belongs to the primary
//! context, which a green one retains. Its kernels fill at most its multiprocessors; that those are
//! others than its neighbour's shows only in that both run at once.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong};

use simulator_machine::kernel::engine::Work;

use crate::abi::{Answer, In, InOut, Out, entry_points};
use crate::context::{self, Green, current_context, with};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::stream::Stream;
use crate::types::{
    CUcontext, CUdevResource, CUdevResourceDesc, CUdevice, CUevent, CUgreenCtx, CUstream,
};

/// Green contexts of this process, and descriptions for more.
#[derive(Debug, Default)]
pub(crate) struct Greens {
    descriptions: BTreeMap<CUdevResourceDesc, Part>,
    contexts: BTreeMap<CUgreenCtx, CUcontext>,
}

/// Multiprocessors of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    device: CUdevice,
    multiprocessors: u32,
}

impl Greens {
    fn context(&self, green: CUgreenCtx) -> Answer<CUcontext> {
        let context = self.contexts.get(&green);
        context.copied().ok_or(CudaError::InvalidContext)
    }

    fn of_context(&self, context: CUcontext) -> Option<CUgreenCtx> {
        let mut all = self.contexts.iter();
        all.find(|(_, other)| **other == context)
            .map(|(green, _)| *green)
    }

    /// Forgets a context that is gone.
    pub(crate) fn forget_context(&mut self, context: CUcontext) {
        self.contexts.retain(|_, other| *other != context);
    }
}

/// The smallest part of a device, which every part is a multiple of.
fn granule(driver: &Driver, device: CUdevice) -> Answer<u32> {
    Ok(match driver.model(device)?.compute_capability.major {
        9.. => 8,
        8 => 4,
        7 => 2,
        _ => 1,
    })
}

/// Multiprocessors as a program sees them.
fn resource(driver: &Driver, part: Part) -> Answer<CUdevResource> {
    let granule = granule(driver, part.device)?;
    Ok(CUdevResource::multiprocessors(
        part.device,
        part.multiprocessors,
        granule,
    ))
}

fn part_of(resource: &CUdevResource) -> Answer<Part> {
    if resource.kind != CUdevResource::SM || resource.multiprocessors == 0 {
        return Err(CudaError::InvalidValue);
    }
    Ok(Part {
        device: resource.device,
        multiprocessors: resource.multiprocessors,
    })
}

impl State {
    /// What a context may use of its device.
    fn part(&self, driver: &Driver, context: CUcontext) -> Answer<Part> {
        let context = self
            .contexts
            .get(&context)
            .ok_or(CudaError::InvalidContext)?;
        let all = driver.model(context.device)?.compute.multiprocessors;
        Ok(Part {
            device: context.device,
            multiprocessors: context.green.map_or(all, |green| green.multiprocessors),
        })
    }

    /// Records an event that is reached when all work of a context is.
    fn record_context(&mut self, driver: &Driver, context: CUcontext, event: CUevent) -> Answer {
        self.require_no_capture_in(context)?;
        let points = self.points_of_context(driver, context);
        let cell = self.hidden_cell(driver)?;
        let hidden = Stream::hidden(context, cell);
        for point in points {
            let work = Work::Wait {
                stream: point.cell,
                ticket: point.ticket,
            };
            self.submit(driver, hidden, work)?;
        }
        self.record(driver, hidden, event)?;
        self.free_cells(vec![cell]);
        Ok(())
    }

    /// Lets all streams of a context wait for an event.
    fn wait_in_context(&mut self, driver: &Driver, context: CUcontext, event: CUevent) -> Answer {
        self.require_no_capture_in(context)?;
        for stream in self.streams_of(context) {
            if self.wait_event(driver, stream, event)?.is_some() {
                return Err(CudaError::NotSupported);
            }
        }
        Ok(())
    }
}

/// A context, where the null handle means the current one.
fn or_current(context: CUcontext) -> Answer<CUcontext> {
    match context {
        CUcontext::NULL => current_context(),
        context => Ok(context),
    }
}

entry_points! {
    "cuDeviceGetDevResource" 12040 fn cuDeviceGetDevResource(device: CUdevice, result: Out<CUdevResource>, kind: c_uint) {
        let driver = driver()?;
        let multiprocessors = driver.model(device)?.compute.multiprocessors;
        if kind != CUdevResource::SM {
            return Err(CudaError::InvalidValue);
        }
        result.set(resource(driver, Part { device, multiprocessors })?)
    }

    "cuCtxGetDevResource" 12040 fn cuCtxGetDevResource(context: CUcontext, result: Out<CUdevResource>, kind: c_uint) {
        if kind != CUdevResource::SM {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let part = driver.state().part(driver, or_current(context)?)?;
        result.set(resource(driver, part)?)
    }

    "cuGreenCtxGetDevResource" 12040 fn cuGreenCtxGetDevResource(green: CUgreenCtx, result: Out<CUdevResource>, kind: c_uint) {
        if kind != CUdevResource::SM {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let state = driver.state();
        let part = state.part(driver, state.greens.context(green)?)?;
        result.set(resource(driver, part)?)
    }

    "cuStreamGetDevResource" 13010 fn cuStreamGetDevResource(stream: CUstream, result: Out<CUdevResource>, kind: c_uint) ptsz(stream) cuStreamGetDevResource_ptsz {
        if kind != CUdevResource::SM {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.state();
        let stream = state.stream(driver, stream)?;
        let part = state.part(driver, stream.context)?;
        result.set(resource(driver, part)?)
    }

    "cuDevSmResourceSplitByCount" 12040 fn cuDevSmResourceSplitByCount(groups: Out<CUdevResource>, count: InOut<c_uint>, input: In<CUdevResource>, rest: Out<CUdevResource>, flags: c_uint, least: c_uint) {
        const IGNORE_COSCHEDULING: c_uint = 1;
        const MAX_CLUSTER: c_uint = 2;
        if flags & !(IGNORE_COSCHEDULING | MAX_CLUSTER) != 0 {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let input = part_of(&input.get()?)?;
        let granule = granule(driver, input.device)?;
        let size = least.max(1).checked_next_multiple_of(granule).ok_or(CudaError::InvalidValue)?;
        let fitting = input.multiprocessors / size;
        if fitting == 0 {
            return Err(CudaError::InvalidValue);
        }
        // Without room for groups the question is how many there would be.
        if groups.is_null() {
            return count.set(fitting);
        }
        let made = count.get()?.min(fitting);
        let group = resource(driver, Part { multiprocessors: size, ..input })?;
        groups.set_all((0..made).map(|_| group))?;
        let left = Part { multiprocessors: input.multiprocessors - made * size, ..input };
        rest.set_if_wanted(resource(driver, left)?);
        count.set(made)
    }

    "cuDevResourceGenerateDesc" 12040 fn cuDevResourceGenerateDesc(description: Out<CUdevResourceDesc>, resources: In<CUdevResource>, count: c_uint) {
        let driver = driver()?;
        let parts = resources.list(count as usize)?;
        let parts: Vec<Part> = parts.iter().map(part_of).collect::<Answer<_>>()?;
        let device = parts.first().ok_or(CudaError::InvalidValue)?.device;
        if parts.iter().any(|part| part.device != device) {
            return Err(CudaError::InvalidValue);
        }
        let multiprocessors = parts.iter().map(|part| part.multiprocessors).sum();
        if multiprocessors > driver.model(device)?.compute.multiprocessors {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver.state();
        let handle = CUdevResourceDesc(state.handle());
        state.greens.descriptions.insert(handle, Part { device, multiprocessors });
        description.set(handle)
    }

    "cuGreenCtxCreate" 12040 fn cuGreenCtxCreate(green: Out<CUgreenCtx>, description: CUdevResourceDesc, device: CUdevice, flags: c_uint) {
        const DEFAULT_STREAM: c_uint = 1;
        let driver = driver()?;
        driver.device(device)?;
        if flags != DEFAULT_STREAM || green.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver.state();
        let part = state.greens.descriptions.get(&description).copied();
        let part = part.ok_or(CudaError::InvalidValue)?;
        if part.device != device {
            return Err(CudaError::InvalidDevice);
        }
        let primary = state.retain_primary(driver, device)?;
        let context = state.add_green(primary, Green { primary, multiprocessors: part.multiprocessors })?;
        let handle = CUgreenCtx(state.handle());
        state.greens.contexts.insert(handle, context);
        green.set(handle)
    }

    // The last one takes the primary context with it, unless the program holds that.
    "cuGreenCtxDestroy" 12040 fn cuGreenCtxDestroy(green: CUgreenCtx) {
        let driver = driver()?;
        let handle = driver.state().greens.context(green)?;
        context::finish(driver, handle)?;
        let mut state = driver.state();
        let device = state.contexts.get(&handle).ok_or(CudaError::InvalidContext)?.device;
        state.remove_green(handle);
        state.release_primary(driver, device)
    }

    "cuCtxFromGreenCtx" 12040 fn cuCtxFromGreenCtx(context: Out<CUcontext>, green: CUgreenCtx) {
        context.set(driver()?.state().greens.context(green)?)
    }

    "cuGreenCtxGetId" 13000 fn cuGreenCtxGetId(green: CUgreenCtx, id: Out<c_ulonglong>) {
        id.set(driver()?.state().greens.context(green)?.0 as c_ulonglong)
    }

    "cuGreenCtxStreamCreate" 12050 fn cuGreenCtxStreamCreate(stream: Out<CUstream>, green: CUgreenCtx, flags: c_uint, priority: c_int) {
        const NON_BLOCKING: c_uint = 1;
        if flags != NON_BLOCKING || stream.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.state();
        let context = state.greens.context(green)?;
        stream.set(state.create_stream(driver, context, flags, priority)?)
    }

    "cuStreamGetGreenCtx" 12040 fn cuStreamGetGreenCtx(stream: CUstream, green: Out<CUgreenCtx>) {
        let driver = driver()?;
        let mut state = driver.state();
        let context = state.stream(driver, stream)?.context;
        green.set(state.greens.of_context(context).unwrap_or(CUgreenCtx(0)))
    }

    // Of the two, the one that it is not of is null.
    "cuStreamGetCtx" 12050 fn cuStreamGetCtx_v2(stream: CUstream, context: Out<CUcontext>, green: Out<CUgreenCtx>) ptsz(stream) cuStreamGetCtx_v2_ptsz {
        let driver = driver()?;
        let mut state = driver.state();
        let found = state.stream(driver, stream)?.context;
        let of = state.greens.of_context(found);
        green.set_if_wanted(of.unwrap_or(CUgreenCtx(0)));
        context.set(of.map_or(found, |_| CUcontext::NULL))
    }

    "cuGreenCtxRecordEvent" 12040 fn cuGreenCtxRecordEvent(green: CUgreenCtx, event: CUevent) {
        let driver = driver()?;
        let mut state = driver.state();
        let context = state.greens.context(green)?;
        state.record_context(driver, context, event)
    }
    "cuGreenCtxWaitEvent" 12040 fn cuGreenCtxWaitEvent(green: CUgreenCtx, event: CUevent) {
        let driver = driver()?;
        let mut state = driver.state();
        let context = state.greens.context(green)?;
        state.wait_in_context(driver, context, event)
    }
    "cuCtxRecordEvent" 12050 fn cuCtxRecordEvent(context: CUcontext, event: CUevent) {
        with(context, |_| Ok(()))?;
        let driver = driver()?;
        driver.state().record_context(driver, or_current(context)?, event)
    }
    "cuCtxWaitEvent" 12050 fn cuCtxWaitEvent(context: CUcontext, event: CUevent) {
        with(context, |_| Ok(()))?;
        let driver = driver()?;
        driver.state().wait_in_context(driver, or_current(context)?, event)
    }
}
