//! Device resources and green contexts: a part of a device's multiprocessors, with streams of its
//! own, over the memory of the device's primary context.
//!
//! What is allocated, loaded or created while a green context is current belongs to the primary
//! context, which a green one retains. Its kernels fill at most its multiprocessors; that those are
//! others than its neighbour's shows only in that both run at once.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use crate::abi::{Answer, In, Out, entry_points};
use crate::context::{self, Green};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::types::{CUcontext, CUdevResource, CUdevResourceDesc, CUdevice, CUgreenCtx, CUstream};

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

entry_points! {
    "cuDeviceGetDevResource" 12040 fn cuDeviceGetDevResource(device: CUdevice, result: Out<CUdevResource>, kind: c_uint) {
        let driver = driver()?;
        let multiprocessors = driver.model(device)?.compute.multiprocessors;
        if kind != CUdevResource::SM {
            return Err(CudaError::InvalidValue);
        }
        result.set(resource(driver, Part { device, multiprocessors })?)
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

    // Of the two, the one that it is not of is null.
    "cuStreamGetCtx" 12050 fn cuStreamGetCtx_v2(stream: CUstream, context: Out<CUcontext>, green: Out<CUgreenCtx>) ptsz(stream) cuStreamGetCtx_v2_ptsz {
        let driver = driver()?;
        let mut state = driver.state();
        let found = state.stream(driver, stream)?.context;
        let of = state.greens.of_context(found);
        green.set_if_wanted(of.unwrap_or(CUgreenCtx(0)));
        context.set(of.map_or(found, |_| CUcontext::NULL))
    }
}
