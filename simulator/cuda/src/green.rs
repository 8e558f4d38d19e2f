//! Device resources and green contexts: a subset of a device's multiprocessors over the memory of
//! its primary context.
//!
//! A green context retains the primary context, which owns everything allocated, loaded or created
//! while the green context is current. Kernels fill at most the green context's multiprocessors;
//! disjoint sets are observable only as concurrency.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use crate::abi::{CudaResult, In, Out, entry_points};
use crate::context::{self, Green};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::types::{CUcontext, CUdevResource, CUdevResourceDesc, CUdevice, CUgreenCtx, CUstream};

/// Green contexts and resource descriptors of this process.
#[derive(Debug, Default)]
pub(crate) struct GreenContexts {
    descriptions: BTreeMap<CUdevResourceDesc, MultiprocessorSet>,
    contexts: BTreeMap<CUgreenCtx, CUcontext>,
}

/// Multiprocessors of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MultiprocessorSet {
    device: CUdevice,
    multiprocessors: u32,
}

impl GreenContexts {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        let descriptions = self.descriptions.keys().map(|description| description.0);
        descriptions.chain(self.contexts.keys().map(|context| context.0))
    }

    fn context(&self, green: CUgreenCtx) -> CudaResult<CUcontext> {
        let context = self.contexts.get(&green);
        context.copied().ok_or(CudaError::InvalidContext)
    }

    fn of_context(&self, context: CUcontext) -> Option<CUgreenCtx> {
        let mut all = self.contexts.iter();
        all.find(|(_, other)| **other == context)
            .map(|(green, _)| *green)
    }

    pub(crate) fn remove_context(&mut self, context: CUcontext) {
        self.contexts.retain(|_, other| *other != context);
    }
}

/// Granularity of partitions.
fn granularity(driver: &Driver, device: CUdevice) -> CudaResult<u32> {
    Ok(match driver.model(device)?.compute_capability.major {
        9.. => 8,
        8 => 4,
        7 => 2,
        _ => 1,
    })
}

fn resource(driver: &Driver, set: MultiprocessorSet) -> CudaResult<CUdevResource> {
    let granularity = granularity(driver, set.device)?;
    Ok(CUdevResource::multiprocessors(
        set.device,
        set.multiprocessors,
        granularity,
    ))
}

fn multiprocessor_set(resource: &CUdevResource) -> CudaResult<MultiprocessorSet> {
    if resource.kind != CUdevResource::SM || resource.multiprocessors == 0 {
        return Err(CudaError::InvalidValue);
    }
    Ok(MultiprocessorSet {
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
        result.set(resource(driver, MultiprocessorSet { device, multiprocessors })?)
    }

    "cuDevResourceGenerateDesc" 12040 fn cuDevResourceGenerateDesc(description: Out<CUdevResourceDesc>, resources: In<CUdevResource>, count: c_uint) {
        let driver = driver()?;
        let sets = resources.list(count as usize)?;
        let sets: Vec<MultiprocessorSet> = sets.iter().map(multiprocessor_set).collect::<CudaResult<_>>()?;
        let device = sets.first().ok_or(CudaError::InvalidValue)?.device;
        if sets.iter().any(|set| set.device != device) {
            return Err(CudaError::InvalidValue);
        }
        let multiprocessors = sets.iter().map(|set| set.multiprocessors).sum();
        if multiprocessors > driver.model(device)?.compute.multiprocessors {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver.state();
        let handle = CUdevResourceDesc(state.handle());
        state.greens.descriptions.insert(handle, MultiprocessorSet { device, multiprocessors });
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
        let set = state.greens.descriptions.get(&description).copied();
        let set = set.ok_or(CudaError::InvalidValue)?;
        if set.device != device {
            return Err(CudaError::InvalidDevice);
        }
        let primary = state.retain_primary(driver, device)?;
        let context = state.add_green_context(primary, Green { primary, multiprocessors: set.multiprocessors })?;
        let handle = CUgreenCtx(state.handle());
        state.greens.contexts.insert(handle, context);
        green.set(handle)
    }

    // Releases the primary context, which the program may still retain.
    "cuGreenCtxDestroy" 12040 fn cuGreenCtxDestroy(green: CUgreenCtx) {
        let driver = driver()?;
        let handle = driver.state().greens.context(green)?;
        context::drain(driver, handle)?;
        let mut state = driver.state();
        let device = state.contexts.get(&handle).ok_or(CudaError::InvalidContext)?.device;
        state.remove_green_context(handle);
        state.release_primary(driver, device)
    }

    "cuCtxFromGreenCtx" 12040 fn cuCtxFromGreenCtx(context: Out<CUcontext>, green: CUgreenCtx) {
        context.set(driver()?.state().greens.context(green)?)
    }

    // Exactly one of the two outputs is not null.
    "cuStreamGetCtx" 12050 fn cuStreamGetCtx_v2(stream: CUstream, context: Out<CUcontext>, green: Out<CUgreenCtx>) ptsz(stream) cuStreamGetCtx_v2_ptsz {
        let driver = driver()?;
        let mut state = driver.state();
        let found = state.stream(driver, stream)?.context;
        let of = state.greens.of_context(found);
        green.set_if_not_null(of.unwrap_or(CUgreenCtx(0)));
        context.set(of.map_or(found, |_| CUcontext::NULL))
    }
}
