//! Memory that a context reserves for kernels: local memory of all threads that a GPU can hold, the
//! heap of device-side `malloc`, the buffer of `printf`, and what profilers let it reserve.
//!
//! The defaults are part of the context's own memory. Local memory grows at the launch of a kernel
//! that needs more, with the context's limit. It shrinks only by that limit, and the heap not at all,
//! as on an H200.

use std::collections::BTreeMap;

use simulator_machine::protocol::{AllocationId, Reply, Request};

use crate::State;
use crate::abi::CudaResult;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::types::CUcontext;

use super::STACK_SIZE;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// Local memory: stacks and spilled registers.
    Local,
    /// Device-side `malloc`.
    Heap,
    /// Device-side `printf`.
    Print,
    Profiler,
}

/// Defaults: local memory per thread, and the heap.
pub(super) const DEFAULT_STACK_BYTES: u64 = 1024;
pub(super) const DEFAULT_HEAP_BYTES: u64 = 8 << 20;

/// Buffer of the first module that prints, and of a profiler.
const PRINT_BYTES: u64 = 64 << 20;
const PROFILER_BYTES: u64 = 256 << 20;

/// Reservations beyond the defaults.
#[derive(Debug, Default)]
pub(crate) struct KernelReserves(BTreeMap<Purpose, KernelReserve>);

#[derive(Clone, Copy, Debug)]
struct KernelReserve {
    allocation: AllocationId,
    bytes: u64,
}

impl State {
    /// KernelReserves local memory for every thread.
    pub(crate) fn require_local(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        bytes_per_thread: u64,
    ) -> CudaResult {
        if !self.grows_local(driver, context, bytes_per_thread)? {
            return Ok(());
        }
        let bytes = self.local_bytes(driver, context, bytes_per_thread)?;
        self.grow(driver, context, Purpose::Local, bytes)?;
        self.set_stack_limit(context, bytes_per_thread)
    }

    /// Sets local memory for every thread, more or less than before.
    pub(super) fn set_local(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        bytes_per_thread: u64,
    ) -> CudaResult {
        if self.grows_local(driver, context, bytes_per_thread)? {
            return self.require_local(driver, context, bytes_per_thread);
        }
        let bytes = self.local_bytes(driver, context, bytes_per_thread)?;
        let reserves = self.contexts.get_mut(&context);
        let reserves = &mut reserves.ok_or(CudaError::ContextIsDestroyed)?.reserves.0;
        let shrinks = |reserve: &KernelReserve| reserve.bytes > bytes;
        if reserves.get(&Purpose::Local).is_some_and(shrinks)
            && let Some(KernelReserve { allocation, .. }) = reserves.remove(&Purpose::Local)
        {
            driver.request(&Request::Free { allocation })?;
            if bytes != 0 {
                self.grow(driver, context, Purpose::Local, bytes)?;
            }
        }
        self.set_stack_limit(context, bytes_per_thread)
    }

    fn set_stack_limit(&mut self, context: CUcontext, bytes_per_thread: u64) -> CudaResult {
        let context = self.contexts.get_mut(&context);
        let limits = &mut context.ok_or(CudaError::ContextIsDestroyed)?.limits;
        let bytes = usize::try_from(bytes_per_thread).map_err(|_| CudaError::InvalidValue)?;
        limits.insert(STACK_SIZE, bytes);
        Ok(())
    }

    /// Returns whether a kernel with this local memory extends that of its context.
    pub(crate) fn grows_local(
        &self,
        driver: &Driver,
        context: CUcontext,
        bytes_per_thread: u64,
    ) -> CudaResult<bool> {
        if !driver.machine().side_effects.contexts_grow {
            return Ok(false);
        }
        let bytes = self.local_bytes(driver, context, bytes_per_thread)?;
        let context = self.contexts.get(&context);
        let reserves = &context.ok_or(CudaError::ContextIsDestroyed)?.reserves.0;
        let has = reserves
            .get(&Purpose::Local)
            .map_or(0, |reserve| reserve.bytes);
        Ok(bytes > has)
    }

    fn local_bytes(
        &self,
        driver: &Driver,
        context: CUcontext,
        bytes_per_thread: u64,
    ) -> CudaResult<u64> {
        let device = self.contexts.get(&context);
        let device = device.ok_or(CudaError::ContextIsDestroyed)?.device;
        let compute = &driver.model(device)?.compute;
        let threads =
            u64::from(compute.multiprocessors) * u64::from(compute.threads_per_multiprocessor);
        let beyond_default = bytes_per_thread.saturating_sub(DEFAULT_STACK_BYTES);
        Ok(beyond_default.saturating_mul(threads))
    }

    /// KernelReserves the heap.
    pub(super) fn require_heap(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        bytes: u64,
    ) -> CudaResult {
        if bytes <= DEFAULT_HEAP_BYTES {
            return Ok(());
        }
        self.grow(driver, context, Purpose::Heap, bytes)
    }

    pub(crate) fn require_print_buffer(
        &mut self,
        driver: &Driver,
        context: CUcontext,
    ) -> CudaResult {
        let context = self.owner(context);
        self.grow(driver, context, Purpose::Print, PRINT_BYTES)
    }

    pub(crate) fn require_profiler(&mut self, driver: &Driver, context: CUcontext) -> CudaResult {
        let context = self.owner(context);
        self.grow(driver, context, Purpose::Profiler, PROFILER_BYTES)
    }

    fn grow(
        &mut self,
        driver: &Driver,
        handle: CUcontext,
        purpose: Purpose,
        bytes: u64,
    ) -> CudaResult {
        if !driver.machine().side_effects.contexts_grow {
            return Ok(());
        }
        let context = self.contexts.get_mut(&handle);
        let context = context.ok_or(CudaError::ContextIsDestroyed)?;
        let old = context.reserves.0.get(&purpose).copied();
        if old.is_some_and(|old| old.bytes >= bytes) {
            return Ok(());
        }
        let request = Request::Allocate {
            context: context.id,
            bytes,
        };
        // Allocated before the old reservation is freed, since kernels may be running.
        let Reply::Allocated { allocation, .. } = driver.request(&request)? else {
            return Err(CudaError::Unknown);
        };
        context
            .reserves
            .0
            .insert(purpose, KernelReserve { allocation, bytes });
        match old {
            Some(KernelReserve { allocation, .. }) => {
                driver.request(&Request::Free { allocation }).map(drop)
            }
            None => Ok(()),
        }
    }
}
