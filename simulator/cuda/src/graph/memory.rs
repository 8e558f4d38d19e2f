//! Graph memory: addresses assigned at node creation, memory mapped from a launch until a node or
//! the program frees it.
//!
//! Freed memory stays in the device's graph pool for later launches until the pool is trimmed, as
//! in the real driver. Memory freed by a launch can be reused by later launches of the same
//! executable graph, and by others once the launch is complete.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;

use simulator_machine::kernel::PAGE_BYTES;
use simulator_machine::protocol::{AllocationId, Reply, Request};

use crate::State;
use crate::abi::{CudaResult, Untyped, entry_points};
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::memory::{Mapping, RangeKind, Reservation};
use crate::operation::{MemoryNode, Operation};
use crate::types::{CUcontext, CUdevice, CUdeviceptr, CUgraphExec};

#[derive(Debug, Default)]
pub(crate) struct GraphMemory {
    allocations: BTreeMap<CUdeviceptr, Allocation>,
    /// Freed chunks, cached for later launches.
    cached: Vec<CachedChunk>,
    /// The executable graph being launched.
    launching: Option<CUgraphExec>,
    high_water: BTreeMap<CUdevice, HighWater>,
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
struct CachedChunk {
    chunk: Chunk,
    /// The launch that freed the chunk: executable graph, and end point once known.
    freed_by: Option<(CUgraphExec, Option<Point>)>,
}

impl CachedChunk {
    /// Returns whether any launch may use the chunk.
    fn is_free(&self, driver: &Driver) -> bool {
        match self.freed_by {
            None => true,
            Some((_, end)) => end.is_some_and(|end| driver.is_reached(end)),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct HighWater {
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
        let idle = self.cached.iter().map(|idle| idle.chunk);
        let idle = idle.filter(|chunk| chunk.device == device);
        self.used(device) + idle.map(|chunk| chunk.bytes).sum::<u64>()
    }

    fn take_cached(&mut self, driver: &Driver, device: CUdevice, bytes: u64) -> Option<Chunk> {
        let fits = |idle: &CachedChunk| {
            let owner_marker = idle
                .freed_by
                .is_some_and(|(exec, _)| self.launching == Some(exec));
            let chunk = idle.chunk;
            chunk.device == device && chunk.bytes == bytes && (owner_marker || idle.is_free(driver))
        };
        let position = self.cached.iter().position(fits)?;
        Some(self.cached.swap_remove(position).chunk)
    }

    fn cache(&mut self, chunk: Chunk) {
        let freed_by = self.launching.map(|exec| (exec, None));
        self.cached.push(CachedChunk { chunk, freed_by });
    }

    /// Marks the start of a launch.
    pub(super) fn begin_launch(&mut self, exec: CUgraphExec) {
        self.launching = Some(exec);
    }

    /// Marks the end of a launch and its end point.
    pub(super) fn end_launch(&mut self, end: Option<Point>) {
        let Some(launched) = self.launching.take() else {
            return;
        };
        for idle in &mut self.cached {
            if idle.freed_by == Some((launched, None)) {
                idle.freed_by = end.map(|end| (launched, Some(end)));
            }
        }
    }

    /// Removes a node. Its address stays reserved while memory is mapped, or an executable graph may map it.
    pub(crate) fn remove_node(&mut self, address: CUdeviceptr) {
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.node_exists = false;
        }
    }

    /// Releases the addresses without node and memory that no launch needs.
    pub(super) fn retain(&mut self, launched: &BTreeSet<CUdeviceptr>) {
        self.allocations.retain(|address, allocation| {
            allocation.node_exists || allocation.memory.is_some() || launched.contains(address)
        });
    }

    /// Removes the memory of a destroyed context.
    pub(crate) fn remove_context(&mut self, context: CUcontext) {
        self.cached.retain(|idle| idle.chunk.context != context);
        for allocation in self.allocations.values_mut() {
            if allocation
                .memory
                .is_some_and(|chunk| chunk.context == context)
            {
                allocation.memory = None;
            }
        }
    }

    /// Returns whether memory is mapped at an address.
    pub(super) fn is_mapped(&self, address: CUdeviceptr) -> bool {
        let allocation = self.allocations.get(&address);
        allocation.is_some_and(|allocation| allocation.memory.is_some())
    }
}

impl State {
    /// KernelReserves an address for a new node.
    pub(crate) fn new_memory_node(
        &mut self,
        driver: &Driver,
        device: CUdevice,
        bytes: u64,
    ) -> CudaResult<MemoryNode> {
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

    /// Maps memory at a node's address.
    pub(crate) fn map_graph_memory(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        node: &MemoryNode,
    ) -> CudaResult {
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get(&node.address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        if allocation.memory.is_some() {
            // Launched twice without a free in between.
            return Err(CudaError::InvalidValue);
        }
        let bytes = allocation.reservation.length();
        let chunk = self.take_or_allocate_chunk(driver, context, node)?;
        let gpu = &driver.device(node.device)?.memory;
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get_mut(&node.address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        let placed = Mapping::place(
            &allocation.reservation,
            node.address,
            gpu,
            chunk.offset,
            bytes,
        );
        let mapping = match placed {
            Ok(mapping) => mapping,
            Err(errno) => {
                memory.cache(chunk);
                return Err(errno.into());
            }
        };
        allocation.memory = Some(chunk);
        let (used, reserved) = (memory.used(node.device), memory.reserved(node.device));
        let high_water = memory.high_water.entry(node.device).or_default();
        high_water.used = high_water.used.max(used);
        high_water.reserved = high_water.reserved.max(reserved);
        let kind = RangeKind::Graph {
            context: chunk.context,
        };
        self.addresses.insert(mapping, node.bytes, kind);
        Ok(())
    }

    fn allocate_chunk(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        device: CUdevice,
        bytes: u64,
    ) -> CudaResult<Chunk> {
        let request = Request::Allocate {
            context: self.context_id(context)?,
            bytes,
        };
        let reply = match driver.request(&request) {
            Err(CudaError::OutOfMemory) => {
                // Cached chunks are freed before an allocation fails.
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

    /// Allocates the memory of a launch of these operations into the pool.
    pub(super) fn preallocate_graph_memory<'a>(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        operations: impl Iterator<Item = &'a Operation>,
    ) -> CudaResult {
        let mut taken = BTreeMap::new();
        let mut done = Ok(());
        for operation in operations {
            match operation {
                Operation::Allocate(node) if !self.graphs.memory.is_mapped(node.address) => {
                    match self.take_or_allocate_chunk(driver, context, node) {
                        Ok(chunk) => {
                            taken.insert(node.address, chunk);
                        }
                        Err(error) => done = Err(error),
                    }
                }
                Operation::Free(address) => {
                    if let Some(chunk) = taken.remove(address) {
                        self.graphs.memory.cache(chunk);
                    }
                }
                _ => {}
            }
            if done.is_err() {
                break;
            }
        }
        for chunk in taken.into_values() {
            self.graphs.memory.cache(chunk);
        }
        done
    }

    fn take_or_allocate_chunk(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        node: &MemoryNode,
    ) -> CudaResult<Chunk> {
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get(&node.address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        let bytes = allocation.reservation.length();
        match memory.take_cached(driver, node.device, bytes) {
            Some(chunk) => Ok(chunk),
            None => self.allocate_chunk(driver, context, node.device, bytes),
        }
    }

    /// Unmaps the memory at an address and caches it.
    pub(crate) fn release_graph_memory(&mut self, address: CUdeviceptr) -> CudaResult {
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get_mut(&address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        let chunk = allocation.memory.take().ok_or(CudaError::InvalidValue)?;
        memory.cache(chunk);
        self.addresses.remove(address);
        self.graphs.release_addresses();
        Ok(())
    }

    /// Frees unused chunks.
    fn trim_graph_memory(&mut self, driver: &Driver, device: CUdevice) -> CudaResult {
        let memory = &mut self.graphs.memory;
        let is_unused = |idle: &&CachedChunk| idle.chunk.device == device && idle.is_free(driver);
        let (unused, kept) = memory.cached.iter().partition(is_unused);
        memory.cached = kept;
        let unused: Vec<CachedChunk> = unused;
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
        let high_water = memory.high_water.get(&device).copied().unwrap_or_default();
        value.out::<u64>().set(match which {
            attribute::USED => memory.used(device),
            attribute::USED_HIGH => high_water.used,
            attribute::RESERVED => memory.reserved(device),
            attribute::RESERVED_HIGH => high_water.reserved,
            _ => return Err(CudaError::InvalidValue),
        })
    }

    "cuDeviceGraphMemTrim" 11040 fn cuDeviceGraphMemTrim(device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        driver.state().trim_graph_memory(driver, device)
    }
}
