//! Contexts: created ones, retained primary ones, and the current one of a thread.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};

use simulator_machine::kernel::PAGE_BYTES;
use simulator_machine::protocol::{ContextId, GpuIndex, InstanceId, MigRequest, Reply, Request};

use crate::State;
use crate::abi::{CudaResult, In, Out, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::heap::Heap;
use crate::types::{CUcontext, CUctxCreateParams, CUdevice};

mod current;
mod faults;
mod reserve;

use current::CurrentContext;
pub(crate) use current::{current_context, current_handle};
pub(crate) use faults::{fail, require_usable};

use reserve::{DEFAULT_HEAP_BYTES, DEFAULT_STACK_BYTES, KernelReserves};

#[derive(Debug)]
pub(crate) struct Context {
    /// The daemon's id of the context.
    pub(crate) id: ContextId,
    pub(crate) device: CUdevice,
    flags: c_uint,
    /// Number of `cuCtxAttach` calls.
    attached: u32,
    limits: BTreeMap<c_uint, usize>,
    cache_config: c_uint,
    /// Memory reserved for kernels.
    pub(crate) reserves: KernelReserves,
    /// Allocator of small requests.
    pub(crate) heap: Heap,
    /// Set for green contexts.
    pub(crate) green: Option<Green>,
}

/// Properties of a green context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Green {
    /// The primary context, which owns memory, modules and events.
    pub(crate) primary: CUcontext,
    /// Maximum number of multiprocessors of its kernels.
    pub(crate) multiprocessors: u32,
}

/// The primary context of one device.
#[derive(Debug, Default)]
pub(crate) struct PrimaryContext {
    context: Option<CUcontext>,
    retained: u32,
    flags: c_uint,
}

impl State {
    pub(crate) fn current(&self) -> CudaResult<&Context> {
        let context = self.contexts.get(&current_handle()?);
        context.ok_or(CudaError::ContextIsDestroyed)
    }

    /// Returns a context on a device, preferably the current one.
    pub(crate) fn context_on(&self, device: CUdevice) -> CudaResult<CUcontext> {
        let current = current_handle()?;
        let is_there = |handle: &CUcontext| {
            let context = self.contexts.get(handle);
            context.is_some_and(|context| context.device == device)
        };
        if is_there(&current) {
            return Ok(current);
        }
        let mut handles = self.contexts.keys();
        let other = handles.find(|handle| is_there(handle));
        other.copied().ok_or(CudaError::InvalidContext)
    }

    pub(crate) fn current_mut(&mut self) -> CudaResult<&mut Context> {
        let context = self.contexts.get_mut(&current_handle()?);
        context.ok_or(CudaError::ContextIsDestroyed)
    }

    fn create_context(
        &mut self,
        driver: &Driver,
        device: CUdevice,
        flags: c_uint,
    ) -> CudaResult<CUcontext> {
        driver.require_healthy()?;
        let used = driver.device(device)?;
        let gpu = used.gpu;
        let Reply::ContextCreated { context: id } =
            driver.request(&Request::CreateContext { gpu })?
        else {
            return Err(CudaError::Unknown);
        };
        if let Some(instance) = &used.instance {
            enter_instance(driver, gpu, instance.id, id)?;
        }
        let handle = CUcontext(self.handle());
        let context = Context {
            id,
            device,
            flags,
            attached: 0,
            limits: default_limits(),
            cache_config: 0,
            reserves: KernelReserves::default(),
            heap: Heap::new(PAGE_BYTES),
            green: None,
        };
        self.contexts.insert(handle, context);
        Ok(handle)
    }

    /// Creates a green context of a primary one.
    pub(crate) fn add_green_context(
        &mut self,
        primary: CUcontext,
        green: Green,
    ) -> CudaResult<CUcontext> {
        let owner = self
            .contexts
            .get(&primary)
            .ok_or(CudaError::InvalidContext)?;
        let context = Context {
            id: owner.id,
            device: owner.device,
            flags: owner.flags,
            attached: 0,
            limits: default_limits(),
            cache_config: 0,
            reserves: KernelReserves::default(),
            heap: Heap::new(PAGE_BYTES),
            green: Some(green),
        };
        let handle = CUcontext(self.handle());
        self.contexts.insert(handle, context);
        Ok(handle)
    }

    /// Removes a green context and its streams.
    pub(crate) fn remove_green_context(&mut self, handle: CUcontext) {
        self.contexts.remove(&handle);
        self.remove_streams(handle);
        self.greens.remove_context(handle);
    }

    /// Returns the context that owns memory, modules and events of a context.
    pub(crate) fn owner(&self, context: CUcontext) -> CUcontext {
        let green = self
            .contexts
            .get(&context)
            .and_then(|context| context.green);
        green.map_or(context, |green| green.primary)
    }

    fn destroy_context(&mut self, driver: &Driver, handle: CUcontext) -> CudaResult {
        let context = self
            .contexts
            .remove(&handle)
            .ok_or(CudaError::InvalidContext)?;
        let parts: Vec<CUcontext> = self
            .contexts
            .iter()
            .filter(|(_, part)| part.green.is_some_and(|green| green.primary == handle))
            .map(|(part, _)| *part)
            .collect();
        for part in parts {
            self.remove_green_context(part);
        }
        faults::forget(handle);
        self.close_opened(driver, handle)?;
        self.addresses.remove_context(handle);
        self.report_managed(driver)?;
        self.pools.remove_context(handle);
        self.graphs.memory.remove_context(handle);
        self.remove_streams(handle);
        self.events.remove_context(handle);
        self.modules.remove_context(handle);
        self.libraries.remove_context(handle);
        self.unmap_arrays(driver, handle)?;
        self.arrays.remove_context(handle);
        driver
            .request(&Request::DestroyContext {
                context: context.id,
            })
            .map(drop)
    }

    fn primary(&mut self, device: CUdevice) -> CudaResult<&mut PrimaryContext> {
        let index = usize::try_from(device).map_err(|_| CudaError::InvalidDevice)?;
        self.primaries
            .get_mut(index)
            .ok_or(CudaError::InvalidDevice)
    }

    /// Retains a device's primary context, creating it if needed.
    pub(crate) fn retain_primary(
        &mut self,
        driver: &Driver,
        device: CUdevice,
    ) -> CudaResult<CUcontext> {
        let primary = self.primary(device)?;
        let flags = primary.flags;
        let handle = match primary.context {
            Some(handle) => handle,
            None => self.create_context(driver, device, flags)?,
        };
        let primary = self.primary(device)?;
        primary.context = Some(handle);
        primary.retained += 1;
        Ok(handle)
    }

    pub(crate) fn release_primary(&mut self, driver: &Driver, device: CUdevice) -> CudaResult {
        let primary = self.primary(device)?;
        primary.retained = primary
            .retained
            .checked_sub(1)
            .ok_or(CudaError::InvalidContext)?;
        if primary.retained == 0 {
            self.reset_primary(driver, device)
        } else {
            Ok(())
        }
    }

    fn reset_primary(&mut self, driver: &Driver, device: CUdevice) -> CudaResult {
        let primary = self.primary(device)?;
        primary.retained = 0;
        match primary.context.take() {
            Some(handle) => self.destroy_context(driver, handle),
            None => Ok(()),
        }
    }

    fn is_primary(&self, handle: CUcontext) -> bool {
        self.primaries
            .iter()
            .any(|primary| primary.context == Some(handle))
    }
}

/// `CU_LIMIT_STACK_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`
const STACK_SIZE: c_uint = 0;
const MALLOC_HEAP_SIZE: c_uint = 2;

fn default_limits() -> BTreeMap<c_uint, usize> {
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    BTreeMap::from([
        (STACK_SIZE, size(DEFAULT_STACK_BYTES)),
        (1, 1 << 20), // printf buffer
        (MALLOC_HEAP_SIZE, size(DEFAULT_HEAP_BYTES)),
        (3, 2),    // depth of device-side synchronization
        (4, 2048), // pending device-side launches
        (5, 64),   // L2 fetch granularity
        (6, 0),    // persisting L2
    ])
}

entry_points! {
    "cuCtxCreate" 2000 fn cuCtxCreate(context: Out<CUcontext>, flags: c_uint, device: CUdevice) { create(context, flags, device) }
    "cuCtxCreate" 3020 fn cuCtxCreate_v2(context: Out<CUcontext>, flags: c_uint, device: CUdevice) { create(context, flags, device) }
    "cuCtxCreate" 11040 fn cuCtxCreate_v3(context: Out<CUcontext>, _affinity: In<u64>, _count: c_int, flags: c_uint, device: CUdevice) { create(context, flags, device) }
    "cuCtxCreate" 12050 fn cuCtxCreate_v4(context: Out<CUcontext>, _parameters: In<CUctxCreateParams>, flags: c_uint, device: CUdevice) { create(context, flags, device) }

    "cuCtxDestroy" 2000 fn cuCtxDestroy(context: CUcontext) { destroy(context) }
    "cuCtxDestroy" 4000 fn cuCtxDestroy_v2(context: CUcontext) { destroy(context) }

    "cuCtxAttach" 2000 fn cuCtxAttach(context: Out<CUcontext>, flags: c_uint) {
        if flags != 0 || context.is_null() {
            return Err(CudaError::InvalidValue);
        }
        driver()?.state().current_mut()?.attached += 1;
        context.set(current_handle()?)
    }
    "cuCtxDetach" 2000 fn cuCtxDetach(context: CUcontext) { detach(context) }

    "cuCtxPushCurrent" 2000 fn cuCtxPushCurrent(context: CUcontext) { push(context) }
    "cuCtxPushCurrent" 4000 fn cuCtxPushCurrent_v2(context: CUcontext) { push(context) }
    "cuCtxPopCurrent" 2000 fn cuCtxPopCurrent(context: Out<CUcontext>) { pop(context) }
    "cuCtxPopCurrent" 4000 fn cuCtxPopCurrent_v2(context: Out<CUcontext>) { pop(context) }

    "cuCtxSetCurrent" 4000 fn cuCtxSetCurrent(context: CUcontext) {
        driver()?;
        let entered = match context {
            CUcontext::NULL => None,
            context => Some(CurrentContext::find(context)?),
        };
        current::replace(entered);
        Ok(())
    }

    "cuCtxGetCurrent" 4000 fn cuCtxGetCurrent(context: Out<CUcontext>) {
        driver()?;
        context.set(current::top().map_or(CUcontext::NULL, |entered| entered.context))
    }

    "cuCtxGetDevice" 2000 fn cuCtxGetDevice(device: Out<CUdevice>) {
        device.set(driver()?.state().current()?.device)
    }

    "cuCtxGetDevice" 13000 fn cuCtxGetDevice_v2(device: Out<CUdevice>, context: CUcontext) {
        with_context(context, |context| device.set(context.device))
    }

    "cuCtxSetFlags" 12010 fn cuCtxSetFlags(flags: c_uint) {
        driver()?.state().current_mut()?.flags = flags;
        Ok(())
    }

    "cuCtxGetStreamPriorityRange" 5050 fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        driver()?.state().current()?;
        least.set_if_not_null(0);
        greatest.set_if_not_null(-5);
        Ok(())
    }

    "cuCtxGetLimit" 3010 fn cuCtxGetLimit(value: Out<usize>, limit: c_uint) {
        let driver = driver()?;
        let state = driver.state();
        let found = state.current()?.limits.get(&limit).copied();
        value.set(found.ok_or(CudaError::UnsupportedLimit)?)
    }

    "cuCtxSetLimit" 3010 fn cuCtxSetLimit(limit: c_uint, value: usize) {
        let driver = driver()?;
        let handle = current_handle()?;
        let mut state = driver.state();
        if !state.current()?.limits.contains_key(&limit) {
            return Err(CudaError::UnsupportedLimit);
        }
        state.require_safe_in_capture()?;
        if limit == STACK_SIZE && state.grows_local(driver, handle, value as u64)? {
            drop(state);
            driver.wait_for_context(handle)?;
            state = driver.state();
        }
        match limit {
            STACK_SIZE => state.set_local(driver, handle, value as u64)?,
            MALLOC_HEAP_SIZE => state.require_heap(driver, handle, value as u64)?,
            _ => {}
        }
        state.current_mut()?.limits.insert(limit, value);
        Ok(())
    }

    "cuCtxGetCacheConfig" 3020 fn cuCtxGetCacheConfig(config: Out<c_uint>) {
        config.set(driver()?.state().current()?.cache_config)
    }

    "cuCtxSetCacheConfig" 3020 fn cuCtxSetCacheConfig(config: c_uint) {
        driver()?.state().current_mut()?.cache_config = config;
        Ok(())
    }

    "cuDevicePrimaryCtxRetain" 7000 fn cuDevicePrimaryCtxRetain(context: Out<CUcontext>, device: CUdevice) {
        let driver = driver()?;
        context.set(driver.state().retain_primary(driver, device)?)
    }

    "cuDevicePrimaryCtxRelease" 7000 fn cuDevicePrimaryCtxRelease(device: CUdevice) { release(device) }
    "cuDevicePrimaryCtxRelease" 11000 fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) { release(device) }
    "cuDevicePrimaryCtxReset" 7000 fn cuDevicePrimaryCtxReset(device: CUdevice) { reset(device) }
    "cuDevicePrimaryCtxReset" 11000 fn cuDevicePrimaryCtxReset_v2(device: CUdevice) { reset(device) }

    "cuDevicePrimaryCtxGetState" 7000 fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: Out<c_uint>, active: Out<c_int>) {
        let driver = driver()?;
        let mut state = driver.state();
        let primary = state.primary(device)?;
        flags.set_if_not_null(primary.flags);
        active.set_if_not_null(c_int::from(primary.context.is_some()));
        Ok(())
    }
}

/// Moves a new context into a MIG device. Destroys the context if the instance has no free memory.
fn enter_instance(
    driver: &Driver,
    gpu: GpuIndex,
    instance: InstanceId,
    context: ContextId,
) -> CudaResult {
    let request = MigRequest::Enter { context, instance };
    let entered = driver.request(&Request::Mig { gpu, request });
    if entered.is_err() {
        driver.request(&Request::DestroyContext { context })?;
    }
    entered.map(drop)
}

fn create(context: Out<CUcontext>, flags: c_uint, device: CUdevice) -> CudaResult {
    if context.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let driver = driver()?;
    let handle = driver.state().create_context(driver, device, flags)?;
    current::push(CurrentContext::created(handle));
    context.set(handle)
}

/// Waits for all work of a context.
pub(crate) fn drain(driver: &Driver, context: CUcontext) -> CudaResult {
    let points = driver.state().points_of_context(driver, context);
    driver.wait_for(&points)
}

/// `cuCtxDetach`: the last detach destroys the context.
fn detach(context: CUcontext) -> CudaResult {
    if current_handle()? != context {
        return Err(CudaError::InvalidContext);
    }
    {
        let mut state = driver()?.state();
        let current = state.current_mut()?;
        if let Some(left) = current.attached.checked_sub(1) {
            current.attached = left;
            return Ok(());
        }
    }
    destroy(context)
}

fn destroy(context: CUcontext) -> CudaResult {
    let driver = driver()?;
    drain(driver, context)?;
    let mut state = driver.state();
    let is_green = state.owner(context) != context;
    if state.is_primary(context) || is_green {
        return Err(CudaError::InvalidContext);
    }
    state.destroy_context(driver, context)?;
    if current::top().is_some_and(|entered| entered.context == context) {
        current::pop();
    }
    Ok(())
}

fn push(context: CUcontext) -> CudaResult {
    current::push(CurrentContext::find(context)?);
    Ok(())
}

fn pop(context: Out<CUcontext>) -> CudaResult {
    driver()?;
    let popped = current::pop().ok_or(CudaError::InvalidContext)?;
    context.set_if_not_null(popped.context);
    Ok(())
}

/// Runs an action with a context; the null handle means the current one.
pub(crate) fn with_context(
    handle: CUcontext,
    action: impl FnOnce(&Context) -> CudaResult,
) -> CudaResult {
    let driver = driver()?;
    let state = driver.state();
    let context = match handle {
        CUcontext::NULL => state.current()?,
        handle => state
            .contexts
            .get(&handle)
            .ok_or(CudaError::InvalidContext)?,
    };
    action(context)
}

fn drain_primary(driver: &Driver, device: CUdevice) -> CudaResult {
    let context = driver.state().primary(device)?.context;
    context.map_or(Ok(()), |context| drain(driver, context))
}

fn release(device: CUdevice) -> CudaResult {
    let driver = driver()?;
    drain_primary(driver, device)?;
    driver.state().release_primary(driver, device)
}

fn reset(device: CUdevice) -> CudaResult {
    let driver = driver()?;
    drain_primary(driver, device)?;
    driver.state().reset_primary(driver, device)
}
