//! Memory that a context takes for its kernels beside what programs ask for: local memory of all
//! threads that a card can hold at once, and the heap of device-side `malloc`.
//!
//! What the limits are by default is part of a context's own memory. Local memory grows when a
//! kernel needs more than any before it, at its launch; both keep their size until the context goes.

use std::collections::BTreeMap;

use simulator_machine::protocol::{AllocationId, Reply, Request};

use crate::abi::Answer;
use crate::driver::{Driver, State};
use crate::error::CudaError;
use crate::types::CUcontext;

/// What memory is kept for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// Stacks and spilled registers.
    Local,
    /// Device-side `malloc`.
    Heap,
}

/// Size by default: local memory of one thread, or the heap.
pub(super) const DEFAULT_STACK_BYTES: u64 = 1024;
pub(super) const DEFAULT_HEAP_BYTES: u64 = 8 << 20;

/// What a context keeps beyond the defaults.
#[derive(Debug, Default)]
pub(crate) struct Reserves(BTreeMap<Purpose, Reserve>);

#[derive(Clone, Copy, Debug)]
struct Reserve {
    allocation: AllocationId,
    bytes: u64,
}

impl State {
    /// Sees to it that every thread has so much local memory.
    pub(crate) fn require_local(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        bytes_per_thread: u64,
    ) -> Answer {
        if bytes_per_thread <= DEFAULT_STACK_BYTES {
            return Ok(());
        }
        let device = self.contexts.get(&context);
        let device = device.ok_or(CudaError::ContextIsDestroyed)?.device;
        let compute = &driver.model(device)?.compute;
        let threads =
            u64::from(compute.multiprocessors) * u64::from(compute.threads_per_multiprocessor);
        let bytes = bytes_per_thread.saturating_mul(threads);
        self.grow(driver, context, Purpose::Local, bytes)
    }

    /// Sees to it that the heap has a size.
    pub(super) fn require_heap(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        bytes: u64,
    ) -> Answer {
        if bytes <= DEFAULT_HEAP_BYTES {
            return Ok(());
        }
        self.grow(driver, context, Purpose::Heap, bytes)
    }

    fn grow(&mut self, driver: &Driver, handle: CUcontext, purpose: Purpose, bytes: u64) -> Answer {
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
        // The larger one is there before the smaller one goes, as kernels may be running.
        let Reply::Allocated { allocation, .. } = driver.request(&request)? else {
            return Err(CudaError::Unknown);
        };
        context
            .reserves
            .0
            .insert(purpose, Reserve { allocation, bytes });
        match old {
            Some(Reserve { allocation, .. }) => {
                driver.request(&Request::Free { allocation }).map(drop)
            }
            None => Ok(()),
        }
    }
}
