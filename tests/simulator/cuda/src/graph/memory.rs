//! Memory that graphs take: an address from the moment when its node is made, memory behind it
//! from a launch until it is freed by a node or by the program.
//!
//! What is freed stays with the device's graph pool for the next launch, and goes back to the card
//! when the pool is trimmed, as in the real driver. What a launch has freed can be used by later
//! launches of the same executable graph, which come after it, and by nobody else until it is over.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use simulator_machine::kernel::PAGE_BYTES;
use simulator_machine::protocol::{AllocationId, Reply, Request};

use crate::abi::{Answer, Untyped, entry_points};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::memory::{Mapping, RangeKind, Reservation};
use crate::operation::Operation;
use crate::stream::Point;
use crate::types::{CUcontext, CUdevice, CUdeviceptr, CUgraphExec};

/// A node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryNode {
    pub(crate) address: CUdeviceptr,
    pub(crate) device: CUdevice,
    /// As asked for.
    pub(crate) bytes: u64,
}

/// The memory of all graphs.
#[derive(Debug, Default)]
pub(crate) struct GraphMemory {
    /// By address.
    allocations: BTreeMap<CUdeviceptr, Allocation>,
    /// Freed and kept.
    idle: Vec<Idle>,
    /// The executable graph that is being launched.
    launching: Option<CUgraphExec>,
    highest: BTreeMap<CUdevice, Highest>,
}

#[derive(Debug)]
struct Allocation {
    reservation: Reservation,
    node_exists: bool,
    memory: Option<Chunk>,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    device: CUdevice,
    context: CUcontext,
    allocation: AllocationId,
    offset: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    chunk: Chunk,
    /// The launch that has freed it: of which executable graph, and its end once that is known.
    freed_by: Option<(CUgraphExec, Option<Point>)>,
}

impl Idle {
    /// Whether nobody uses it any more.
    fn is_free(&self, driver: &Driver) -> bool {
        match self.freed_by {
            None => true,
            Some((_, end)) => end.is_some_and(|end| driver.is_reached(end)),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Highest {
    used: u64,
    reserved: u64,
}

impl GraphMemory {
    fn used(&self, device: CUdevice) -> u64 {
        let chunks = self.allocations.values().filter_map(|found| found.memory);
        let of_device = chunks.filter(|chunk| chunk.device == device);
        of_device.map(|chunk| chunk.bytes).sum()
    }

    fn reserved(&self, device: CUdevice) -> u64 {
        let idle = self.idle.iter().map(|idle| idle.chunk);
        let idle = idle.filter(|chunk| chunk.device == device);
        self.used(device) + idle.map(|chunk| chunk.bytes).sum::<u64>()
    }

    fn take_idle(&mut self, driver: &Driver, device: CUdevice, bytes: u64) -> Option<Chunk> {
        let fits = |idle: &Idle| {
            let is_own = idle
                .freed_by
                .is_some_and(|(exec, _)| self.launching == Some(exec));
            let chunk = idle.chunk;
            chunk.device == device && chunk.bytes == bytes && (is_own || idle.is_free(driver))
        };
        let position = self.idle.iter().position(fits)?;
        Some(self.idle.swap_remove(position).chunk)
    }

    fn keep(&mut self, chunk: Chunk) {
        let freed_by = self.launching.map(|exec| (exec, None));
        self.idle.push(Idle { chunk, freed_by });
    }

    /// An executable graph is about to be launched.
    pub(super) fn begin_launch(&mut self, exec: CUgraphExec) {
        self.launching = Some(exec);
    }

    /// It was launched, and is over at that point.
    pub(super) fn end_launch(&mut self, end: Option<Point>) {
        let Some(launched) = self.launching.take() else {
            return;
        };
        for idle in &mut self.idle {
            if idle.freed_by == Some((launched, None)) {
                idle.freed_by = end.map(|end| (launched, Some(end)));
            }
        }
    }

    /// The node is gone; so is its address, unless memory is still behind it.
    pub(crate) fn forget_node(&mut self, address: CUdeviceptr) {
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.node_exists = false;
            if allocation.memory.is_none() {
                self.allocations.remove(&address);
            }
        }
    }

    /// Forgets memory of a context that is destroyed.
    pub(crate) fn forget_context(&mut self, context: CUcontext) {
        self.idle.retain(|idle| idle.chunk.context != context);
        self.allocations.retain(|_, allocation| {
            if allocation
                .memory
                .is_some_and(|chunk| chunk.context == context)
            {
                allocation.memory = None;
            }
            allocation.node_exists || allocation.memory.is_some()
        });
    }

    /// Whether memory is behind an address.
    pub(super) fn is_taken(&self, address: CUdeviceptr) -> bool {
        let allocation = self.allocations.get(&address);
        allocation.is_some_and(|allocation| allocation.memory.is_some())
    }
}

impl State {
    /// An address for a new memory node.
    pub(crate) fn new_memory_node(
        &mut self,
        driver: &Driver,
        device: CUdevice,
        bytes: u64,
    ) -> Answer<MemoryNode> {
        driver.device(device)?;
        let rounded = bytes.checked_next_multiple_of(PAGE_BYTES);
        let rounded = rounded.filter(|rounded| *rounded > 0);
        let reservation = Reservation::new(rounded.ok_or(CudaError::InvalidValue)?, PAGE_BYTES)?;
        let node = MemoryNode {
            address: reservation.base(),
            device,
            bytes,
        };
        let allocation = Allocation {
            reservation,
            node_exists: true,
            memory: None,
        };
        self.graphs
            .memory
            .allocations
            .insert(node.address, allocation);
        Ok(node)
    }

    /// Puts memory behind a node's address.
    pub(crate) fn take_graph_memory(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        node: &MemoryNode,
    ) -> Answer {
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get(&node.address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        if allocation.memory.is_some() {
            // Launched twice without being freed in between.
            return Err(CudaError::InvalidValue);
        }
        let bytes = allocation.reservation.length();
        let chunk = self.chunk_ahead(driver, context, node)?;
        let card = &driver.device(node.device)?.memory;
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get_mut(&node.address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        let placed = Mapping::place(
            &allocation.reservation,
            node.address,
            card,
            chunk.offset,
            bytes,
        );
        let mapping = match placed {
            Ok(mapping) => mapping,
            Err(errno) => {
                memory.keep(chunk);
                return Err(errno.into());
            }
        };
        allocation.memory = Some(chunk);
        let (used, reserved) = (memory.used(node.device), memory.reserved(node.device));
        let highest = memory.highest.entry(node.device).or_default();
        highest.used = highest.used.max(used);
        highest.reserved = highest.reserved.max(reserved);
        let kind = RangeKind::Graph {
            context: chunk.context,
        };
        self.addresses.insert(mapping, node.bytes, kind);
        Ok(())
    }

    fn new_chunk(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        device: CUdevice,
        bytes: u64,
    ) -> Answer<Chunk> {
        let request = Request::Allocate {
            context: self.context_id(context)?,
            bytes,
        };
        let reply = match driver.request(&request) {
            Err(CudaError::OutOfMemory) => {
                // What the pool keeps unused is given up before a request is refused.
                self.trim_graph_memory(driver, device)?;
                driver.request(&request)?
            }
            reply => reply?,
        };
        match reply {
            Reply::Allocated {
                allocation,
                offset,
                bytes,
            } => Ok(Chunk {
                device,
                context,
                allocation,
                offset,
                bytes,
            }),
            _ => Err(CudaError::Unknown),
        }
    }

    /// Takes what a launch of these operations will put behind its nodes, for the pool to keep until then.
    pub(super) fn take_graph_memory_ahead<'a>(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        operations: impl Iterator<Item = &'a Operation>,
    ) -> Answer {
        let mut taken = BTreeMap::new();
        let mut done = Ok(());
        for operation in operations {
            match operation {
                Operation::Allocate(node) if !self.graphs.memory.is_taken(node.address) => {
                    match self.chunk_ahead(driver, context, node) {
                        Ok(chunk) => {
                            taken.insert(node.address, chunk);
                        }
                        Err(error) => done = Err(error),
                    }
                }
                Operation::Free(address) => {
                    if let Some(chunk) = taken.remove(address) {
                        self.graphs.memory.keep(chunk);
                    }
                }
                _ => {}
            }
            if done.is_err() {
                break;
            }
        }
        for chunk in taken.into_values() {
            self.graphs.memory.keep(chunk);
        }
        done
    }

    fn chunk_ahead(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        node: &MemoryNode,
    ) -> Answer<Chunk> {
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get(&node.address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        let bytes = allocation.reservation.length();
        match memory.take_idle(driver, node.device, bytes) {
            Some(chunk) => Ok(chunk),
            None => self.new_chunk(driver, context, node.device, bytes),
        }
    }

    /// Takes the memory behind an address away again, and keeps it for the next launch.
    pub(crate) fn release_graph_memory(&mut self, address: CUdeviceptr) -> Answer {
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get_mut(&address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        let chunk = allocation.memory.take().ok_or(CudaError::InvalidValue)?;
        memory.keep(chunk);
        self.addresses.remove(address);
        let memory = &mut self.graphs.memory;
        if memory
            .allocations
            .get(&address)
            .is_some_and(|allocation| !allocation.node_exists)
        {
            memory.allocations.remove(&address);
        }
        Ok(())
    }

    /// Gives what is unused back to the card.
    fn trim_graph_memory(&mut self, driver: &Driver, device: CUdevice) -> Answer {
        let memory = &mut self.graphs.memory;
        let is_unused = |idle: &&Idle| idle.chunk.device == device && idle.is_free(driver);
        let (unused, kept) = memory.idle.iter().partition(is_unused);
        memory.idle = kept;
        let unused: Vec<Idle> = unused;
        for idle in unused {
            let allocation = idle.chunk.allocation;
            driver.request(&Request::Free { allocation })?;
        }
        Ok(())
    }
}

/// `CU_GRAPH_MEM_ATTR_*`
mod attribute {
    use std::ffi::c_uint;

    pub(super) const USED: c_uint = 0;
    pub(super) const USED_HIGH: c_uint = 1;
    pub(super) const RESERVED: c_uint = 2;
    pub(super) const RESERVED_HIGH: c_uint = 3;
}

entry_points! {
    "cuDeviceGetGraphMemAttribute" 11040 fn cuDeviceGetGraphMemAttribute(device: CUdevice, which: c_uint, value: Untyped) {
        let driver = driver()?;
        driver.device(device)?;
        let state = driver.state();
        let memory = &state.graphs.memory;
        let highest = memory.highest.get(&device).copied().unwrap_or_default();
        value.out::<u64>().set(match which {
            attribute::USED => memory.used(device),
            attribute::USED_HIGH => highest.used,
            attribute::RESERVED => memory.reserved(device),
            attribute::RESERVED_HIGH => highest.reserved,
            _ => return Err(CudaError::InvalidValue),
        })
    }

    "cuDeviceGraphMemTrim" 11040 fn cuDeviceGraphMemTrim(device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        driver.state().trim_graph_memory(driver, device)
    }
}
