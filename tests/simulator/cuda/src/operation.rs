//! What can be put on a stream, whether at once, by a graph, or into a graph that is captured.

use simulator_machine::kernel::engine::Work;

use crate::abi::Answer;
use crate::driver::{Driver, State};
use crate::error::CudaError;
use crate::graph::memory::MemoryNode;
use crate::host::HostFunction;
use crate::launch::Launch;
use crate::stream::{Point, Stream, with_room};
use crate::stream_memory::ValueWait;
use crate::types::{CUdeviceptr, CUevent, CUgraph, CUmemcpy3D, CUmemsetNodeParams, CUstream};

/// One operation of a stream, or one node of a graph.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// Runs a kernel.
    Kernel(Launch),
    /// Copies.
    Copy(CUmemcpy3D),
    /// Sets memory.
    Fill(CUmemsetNodeParams),
    /// Calls a function of the program's.
    Host(HostFunction),
    /// Runs another graph, which belongs to the node.
    Child(CUgraph),
    /// Nothing.
    Empty,
    /// Waits for an event.
    Wait(CUevent),
    /// Takes memory of the graph's card.
    Allocate(MemoryNode),
    /// Gives it back.
    Free(CUdeviceptr),
    /// Waits for a value of a 32-bit word.
    WaitValue(ValueWait),
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
    /// Puts an operation on a stream. `None` when it was over before anyone could look.
    pub(crate) fn perform(
        &mut self,
        driver: &Driver,
        stream: Stream,
        operation: &Operation,
    ) -> Answer<Option<Point>> {
        match operation {
            Operation::Kernel(launch) => self.run_kernel(driver, stream, *launch),
            Operation::Copy(copy) => self.run_copy(driver, stream, copy),
            Operation::Fill(fill) => self.run_fill(driver, stream, fill),
            Operation::Host(function) => self.call_host(driver, stream, *function).map(Some),
            Operation::Wait(event) => match self.wait_event(driver, stream, *event)? {
                // Nobody can wait in the place of a stream of another context.
                Some(_) => Err(CudaError::NotSupported),
                None => Ok(None),
            },
            Operation::Allocate(memory) => {
                self.take_graph_memory(driver, self.owner(stream.context), memory)?;
                Ok(None)
            }
            Operation::Free(address) => self.free(driver, *address).map(|()| None),
            Operation::WaitValue(wait) => self
                .call_host(driver, stream, HostFunction::WaitValue(*wait))
                .map(Some),
            Operation::Empty => self.marker(driver, stream).map(Some),
            // Graphs are taken apart when they are instantiated.
            Operation::Child(_) => Err(CudaError::InvalidValue),
        }
    }

    /// A point that is reached when all earlier work of a stream is.
    pub(crate) fn marker(&mut self, driver: &Driver, stream: Stream) -> Answer<Point> {
        let nothing = Work::Wait {
            stream: stream.cell,
            ticket: 0,
        };
        self.submit(driver, stream, nothing)
    }
}

/// Puts an operation on a stream, or into the graph that is captured from it. `None` when there is
/// nothing to wait for.
pub(crate) fn enqueue(
    handle: CUstream,
    operation: impl FnOnce(&'static Driver, &mut State, Stream) -> Answer<Operation>,
) -> Answer<Option<Point>> {
    with_room(handle, |driver, state, stream| {
        if state.is_capturing(stream)? {
            let operation = operation(driver, state, stream)?;
            return state.capture(stream, operation).map(|_| None);
        }
        let operation = operation(driver, state, stream)?;
        state.perform(driver, stream, &operation)
    })
}
