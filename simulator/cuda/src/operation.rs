//! Operations of streams: executed immediately, by a graph, or captured into one.

use simulator_machine::protocol::Work;

use crate::State;
use crate::abi::CudaResult;
use crate::driver::{Driver, Point};
use crate::error::CudaError;
use crate::stream::{Stream, with_capacity};
use crate::types::{
    CUdevice, CUdeviceptr, CUevent, CUgraph, CUmemcpy3D, CUmemsetNodeParams, CUstream,
};

mod host_function;
mod launch;
mod value_wait;

pub(crate) use host_function::{HostFn, HostFunction};
pub(crate) use launch::{Launch, Shape};
pub(crate) use value_wait::{ValueWait, WORD_BYTES};

/// One operation of a stream, or one node of a graph.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Kernel(Launch),
    Copy(CUmemcpy3D),
    Fill(CUmemsetNodeParams),
    Host(HostFunction),
    /// A graph that belongs to the node.
    Child(CUgraph),
    Empty,
    Wait(CUevent),
    /// Allocates graph memory.
    Allocate(MemoryNode),
    Free(CUdeviceptr),
    /// Waits for a value of a 32-bit word.
    WaitValue(ValueWait),
}

/// Memory of an allocation node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryNode {
    pub(crate) address: CUdeviceptr,
    pub(crate) device: CUdevice,
    /// Requested size.
    pub(crate) bytes: u64,
}

impl Operation {
    /// `CUgraphNodeType`
    pub(crate) fn node_type(&self) -> std::ffi::c_uint {
        match self {
            Self::Kernel(_) => 0,
            Self::Copy(_) => 1,
            Self::Fill(_) => 2,
            Self::Host(_) => 3,
            Self::Child(_) => 4,
            Self::Empty => 5,
            Self::Wait(_) => 6,
            Self::Allocate(_) => 10,
            Self::Free(_) => 11,
            Self::WaitValue(_) => 12,
        }
    }
}

impl State {
    /// Submits an operation to a stream. `None` if it completed within the call.
    pub(crate) fn perform(
        &mut self,
        driver: &Driver,
        stream: Stream,
        operation: &Operation,
    ) -> CudaResult<Option<Point>> {
        match operation {
            Operation::Kernel(launch) => self.run_kernel(driver, stream, *launch),
            Operation::Copy(copy) => self.run_copy(driver, stream, copy),
            Operation::Fill(fill) => self.run_fill(driver, stream, fill),
            Operation::Host(function) => self.call_host(driver, stream, *function).map(Some),
            Operation::Wait(event) => match self.wait_event(driver, stream, *event)? {
                // Graph launches cannot block the calling thread for another context.
                Some(_) => Err(CudaError::NotSupported),
                None => Ok(None),
            },
            Operation::Allocate(memory) => {
                self.map_graph_memory(driver, self.owner(stream.context), memory)?;
                Ok(None)
            }
            Operation::Free(address) => self.free(driver, *address).map(|()| None),
            Operation::WaitValue(wait) => self
                .call_host(driver, stream, HostFunction::WaitValue(*wait))
                .map(Some),
            Operation::Empty => self.marker(driver, stream).map(Some),
            // Instantiation inlines child graphs.
            Operation::Child(_) => Err(CudaError::InvalidValue),
        }
    }

    /// Returns a point that is reached when all earlier work of a stream is done.
    pub(crate) fn marker(&mut self, driver: &Driver, stream: Stream) -> CudaResult<Point> {
        let nothing = Work::Wait {
            stream: stream.cell,
            ticket: 0,
        };
        self.submit(driver, stream, nothing)
    }
}

/// Submits an operation to a stream, or captures it. `None` if there is nothing to wait for.
pub(crate) fn enqueue(
    handle: CUstream,
    operation: impl FnOnce(&'static Driver, &mut State, Stream) -> CudaResult<Operation>,
) -> CudaResult<Option<Point>> {
    with_capacity(handle, |driver, state, stream| {
        if state.is_capturing(stream)? {
            let operation = operation(driver, state, stream)?;
            return state.capture(stream, operation).map(|_| None);
        }
        let operation = operation(driver, state, stream)?;
        state.perform(driver, stream, &operation)
    })
}
