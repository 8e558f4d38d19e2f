//! Memory that graphs take: an address from the moment when its node is made, memory behind it
//! from a launch until it is freed by a node or by the program.
//!
//! What is freed stays with the device's graph pool for the next launch, and goes back to the card
//! when the pool is trimmed, as in the real driver.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use drava_mock_machine::kernel::PAGE_BYTES;
use drava_mock_machine::protocol::{AllocationId, Reply, Request};

use crate::abi::{Answer, Untyped, entry_points};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::memory::{Mapping, RangeKind, Reservation};
use crate::types::{CUcontext, CUdevice, CUdeviceptr};

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
    idle: Vec<Chunk>,
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
        let idle = self.idle.iter().filter(|chunk| chunk.device == device);
        self.used(device) + idle.map(|chunk| chunk.bytes).sum::<u64>()
    }

    fn take_idle(&mut self, device: CUdevice, bytes: u64) -> Option<Chunk> {
        let fits = |chunk: &Chunk| chunk.device == device && chunk.bytes == bytes;
        let position = self.idle.iter().position(fits)?;
        Some(self.idle.swap_remove(position))
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
        self.idle.retain(|chunk| chunk.context != context);
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
        let chunk = match memory.take_idle(node.device, bytes) {
            Some(chunk) => chunk,
            None => self.new_chunk(driver, context, node.device, bytes)?,
        };
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
                memory.idle.push(chunk);
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

    /// Takes the memory behind an address away again, and keeps it for the next launch.
    pub(crate) fn release_graph_memory(&mut self, address: CUdeviceptr) -> Answer {
        let memory = &mut self.graphs.memory;
        let allocation = memory.allocations.get_mut(&address);
        let allocation = allocation.ok_or(CudaError::InvalidValue)?;
        let chunk = allocation.memory.take().ok_or(CudaError::InvalidValue)?;
        memory.idle.push(chunk);
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
        let (idle, kept) = memory.idle.iter().partition(|chunk| chunk.device == device);
        memory.idle = kept;
        let idle: Vec<Chunk> = idle;
        for chunk in idle {
            let allocation = chunk.allocation;
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

    "cuDeviceSetGraphMemAttribute" 11040 fn cuDeviceSetGraphMemAttribute(device: CUdevice, which: c_uint, value: Untyped) {
        let driver = driver()?;
        driver.device(device)?;
        // The high-water marks can only be reset.
        if value.input::<u64>().get()? != 0 {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver.state();
        let memory = &mut state.graphs.memory;
        let (used, reserved) = (memory.used(device), memory.reserved(device));
        let highest = memory.highest.entry(device).or_default();
        match which {
            attribute::USED_HIGH => highest.used = used,
            attribute::RESERVED_HIGH => highest.reserved = reserved,
            _ => return Err(CudaError::InvalidValue),
        }
        Ok(())
    }

    "cuDeviceGraphMemTrim" 11040 fn cuDeviceGraphMemTrim(device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        driver.state().trim_graph_memory(driver, device)
    }
}
