//! Device memory, managed memory and host memory.
//!
//! Device memory is a mapped range of the GPU's memory file. The address of an allocation is that
//! of its mapping; processes that share the allocation see the same bytes.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use simulator_machine::kernel::PAGE_BYTES;
use simulator_machine::protocol::{AllocationId, GpuIndex, MigReply, MigRequest, Reply, Request};

use crate::State;
use crate::abi::{Address, CudaResult, Out, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, driver};
use crate::enumerate::Instance;
use crate::error::CudaError;
use crate::heap::Freed;
use crate::types::{CUcontext, CUdeviceptr, CUmemoryPool};

mod mapping;

pub(crate) use mapping::{Mapping, Reservation};

/// All ranges by first byte. Invariant: ranges are disjoint.
#[derive(Debug, Default)]
pub(crate) struct AddressSpace {
    ranges: BTreeMap<u64, Range>,
}

#[derive(Debug)]
struct Range {
    mapping: Mapping,
    /// Requested size; the mapping is rounded up.
    bytes: u64,
    kind: RangeKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeKind {
    /// One allocation on a GPU.
    Device {
        context: CUcontext,
        allocation: AllocationId,
    },
    /// A block of small allocations on a GPU.
    Heap {
        context: CUcontext,
        allocation: AllocationId,
    },
    /// A chunk of a memory pool.
    Pool {
        context: CUcontext,
        allocation: AllocationId,
        pool: CUmemoryPool,
    },
    /// Memory of a graph.
    Graph { context: CUcontext },
    /// Mapped into reserved addresses, without a context.
    Virtual,
    /// IPC memory of another process.
    Opened {
        context: CUcontext,
        allocation: AllocationId,
    },
    /// External memory, held by its object.
    External { context: CUcontext },
    /// A chunk of a pool of host or managed memory.
    HostPool {
        context: CUcontext,
        pool: CUmemoryPool,
        is_managed: bool,
    },
    /// Managed memory, on the host.
    Managed { context: CUcontext },
    /// Pinned host memory.
    Host { context: CUcontext },
}

impl RangeKind {
    /// Whether it is managed memory, plain or of a pool.
    pub(crate) fn is_managed(self) -> bool {
        matches!(
            self,
            Self::Managed { .. }
                | Self::HostPool {
                    is_managed: true,
                    ..
                }
        )
    }

    /// The owning context.
    pub(crate) fn context(self) -> CUcontext {
        match self {
            Self::Device { context, .. }
            | Self::Heap { context, .. }
            | Self::Pool { context, .. }
            | Self::Graph { context }
            | Self::External { context }
            | Self::HostPool { context, .. }
            | Self::Opened { context, .. }
            | Self::Managed { context }
            | Self::Host { context } => context,
            Self::Virtual => CUcontext::NULL,
        }
    }
}

impl AddressSpace {
    pub(crate) fn insert(&mut self, mapping: Mapping, bytes: u64, kind: RangeKind) -> u64 {
        let base = mapping.base();
        self.ranges.insert(
            base,
            Range {
                mapping,
                bytes,
                kind,
            },
        );
        base
    }

    /// The range that contains an address.
    fn containing(&self, address: u64) -> Option<(u64, &Range)> {
        let (base, range) = self.ranges.range(..=address).next_back()?;
        (address - base < range.mapping.length()).then_some((*base, range))
    }

    /// Base and kind of the range that contains an address.
    pub(crate) fn bounds(&self, address: u64) -> Option<(u64, RangeKind)> {
        let (base, range) = self.containing(address)?;
        Some((base, range.kind))
    }

    pub(crate) fn remove(&mut self, base: u64) -> Option<RangeKind> {
        self.ranges.remove(&base).map(|range| range.kind)
    }

    /// Removes the ranges of a context.
    pub(crate) fn remove_context(&mut self, context: CUcontext) {
        self.ranges
            .retain(|_, range| range.kind.context() != context);
    }
}

impl State {
    /// Tells the daemon whether this process has managed memory, if that has changed.
    pub(crate) fn report_managed(&mut self, driver: &Driver) -> CudaResult {
        let mut ranges = self.addresses.ranges.values();
        let is_used = ranges.any(|range| range.kind.is_managed());
        if is_used != self.uses_managed {
            driver.request(&Request::SetManaged { is_used })?;
            self.uses_managed = is_used;
        }
        Ok(())
    }

    /// Allocates memory on the current context's GPU and maps it.
    pub(crate) fn map_new(
        &mut self,
        driver: &Driver,
        bytes: u64,
    ) -> CudaResult<(AllocationId, Mapping)> {
        self.map_aligned(driver, current_handle()?, bytes, PAGE_BYTES)
    }

    /// Allocates memory on a context's GPU and maps it at a multiple of `alignment`.
    pub(crate) fn map_aligned(
        &mut self,
        driver: &Driver,
        context: CUcontext,
        bytes: u64,
        alignment: u64,
    ) -> CudaResult<(AllocationId, Mapping)> {
        let context = self.contexts.get(&context);
        let context = context.ok_or(CudaError::ContextIsDestroyed)?;
        let (id, device) = (context.id, driver.device(context.device)?);
        let request = Request::Allocate { context: id, bytes };
        let Reply::Allocated {
            allocation,
            offset,
            bytes,
        } = driver.request(&request)?
        else {
            return Err(CudaError::Unknown);
        };
        match Mapping::of_file_aligned(&device.memory, offset, bytes, alignment) {
            Ok(mapping) => Ok((allocation, mapping)),
            Err(errno) => {
                driver.request(&Request::Free { allocation })?;
                Err(errno.into())
            }
        }
    }

    /// `cuMemAlloc`.
    pub(crate) fn allocate(&mut self, driver: &Driver, bytes: u64) -> CudaResult<CUdeviceptr> {
        if bytes == 0 {
            return Err(CudaError::InvalidValue);
        }
        let context = current_handle()?;
        self.current()?;
        if bytes > self.current()?.heap.max_allocation_bytes() {
            let (allocation, mapping) = self.map_new(driver, bytes)?;
            return Ok(self.addresses.insert(
                mapping,
                bytes,
                RangeKind::Device {
                    context,
                    allocation,
                },
            ));
        }
        if let Some(address) = self.current_mut()?.heap.allocate(bytes) {
            return Ok(address);
        }
        let (allocation, mapping) = self.map_new(driver, PAGE_BYTES)?;
        let kind = RangeKind::Heap {
            context,
            allocation,
        };
        let base = self.addresses.insert(mapping, PAGE_BYTES, kind);
        let heap = &mut self.current_mut()?.heap;
        heap.add_block(base);
        heap.allocate(bytes).ok_or(CudaError::OutOfMemory)
    }

    /// `cuMemFree`; accepts the null pointer.
    pub(crate) fn free(&mut self, driver: &Driver, address: CUdeviceptr) -> CudaResult {
        if address == 0 {
            return Ok(());
        }
        let (base, range) = self
            .addresses
            .containing(address)
            .ok_or(CudaError::InvalidValue)?;
        let allocation = match range.kind {
            RangeKind::Device { allocation, .. } if base == address => allocation,
            RangeKind::Heap {
                context,
                allocation,
            } => {
                let owner = self
                    .contexts
                    .get_mut(&context)
                    .ok_or(CudaError::InvalidValue)?;
                match owner.heap.free(address) {
                    Freed::Unknown => return Err(CudaError::InvalidValue),
                    Freed::BlockInUse => return Ok(()),
                    Freed::BlockEmpty => allocation,
                }
            }
            // Like a free on a completed stream.
            RangeKind::Pool { .. } | RangeKind::HostPool { .. } => {
                return self.free_to_pool(driver, address, None);
            }
            RangeKind::Graph { .. } if base == address => {
                return self.release_graph_memory(address);
            }
            RangeKind::Opened { .. } => return self.free_opened(driver, address),
            // The external memory object holds the memory.
            RangeKind::Managed { .. } | RangeKind::External { .. } if base == address => {
                self.addresses.ranges.remove(&base);
                return self.report_managed(driver);
            }
            _ => return Err(CudaError::InvalidValue),
        };
        self.addresses.ranges.remove(&base);
        driver.request(&Request::Free { allocation }).map(drop)
    }

    /// Start, size and kind of the allocation that contains an address.
    pub(crate) fn allocation_at(
        &self,
        address: CUdeviceptr,
    ) -> Option<(CUdeviceptr, u64, RangeKind)> {
        let (base, range) = self.addresses.containing(address)?;
        if let RangeKind::Heap { context, .. } = range.kind {
            let (start, length) = self.contexts.get(&context)?.heap.containing(address)?;
            return Some((start, length, range.kind));
        }
        if let RangeKind::Pool { pool, .. } | RangeKind::HostPool { pool, .. } = range.kind {
            let (start, length) = self.pools.containing(pool, address)?;
            return Some((start, length, range.kind));
        }
        (address - base < range.bytes).then_some((base, range.bytes, range.kind))
    }
}

entry_points! {
    "cuMemGetInfo" 2000 fn cuMemGetInfo(free: Out<c_uint>, total: Out<c_uint>) {
        let (free_bytes, total_bytes) = memory_info()?;
        let narrow = |bytes| c_uint::try_from(bytes).unwrap_or(c_uint::MAX);
        free.set_if_not_null(narrow(free_bytes));
        total.set_if_not_null(narrow(total_bytes));
        Ok(())
    }
    "cuMemGetInfo" 3020 fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (free_bytes, total_bytes) = memory_info()?;
        let size = |bytes| usize::try_from(bytes).map_err(|_| CudaError::InvalidValue);
        free.set_if_not_null(size(free_bytes)?);
        total.set_if_not_null(size(total_bytes)?);
        Ok(())
    }

    "cuMemAlloc" 2000 fn cuMemAlloc(address: Out<c_uint>, bytes: c_uint) {
        // 32-bit addresses, which a 64-bit process does not have.
        let _ = (address, bytes);
        Err(CudaError::NotSupported)
    }
    "cuMemAlloc" 3020 fn cuMemAlloc_v2(address: Out<CUdeviceptr>, bytes: usize) {
        if address.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        address.set(state.allocate(driver, bytes as u64)?)
    }

    "cuMemAllocPitch" 2000 fn cuMemAllocPitch(address: Out<c_uint>, pitch: Out<c_uint>, width: c_uint, height: c_uint, element: c_uint) {
        let _ = (address, pitch, width, height, element);
        Err(CudaError::NotSupported)
    }
    "cuMemAllocPitch" 3020 fn cuMemAllocPitch_v2(address: Out<CUdeviceptr>, pitch: Out<usize>, width: usize, height: usize, element: c_uint) {
        if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 || address.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let row = width.checked_next_multiple_of(512).ok_or(CudaError::InvalidValue)?;
        let bytes = row.checked_mul(height).ok_or(CudaError::InvalidValue)?;
        pitch.set(row)?;
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        address.set(state.allocate(driver, bytes as u64)?)
    }

    "cuMemFree" 2000 fn cuMemFree(address: c_uint) { free(address.into()) }
    "cuMemFree" 3020 fn cuMemFree_v2(address: CUdeviceptr) { free(address) }

    "cuMemGetAddressRange" 3020 fn cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, size: Out<usize>, address: CUdeviceptr) {
        let driver = driver()?;
        let (start, bytes, _) = driver.state().allocation_at(address).ok_or(CudaError::NotFound)?;
        base.set_if_not_null(start);
        size.set_if_not_null(usize::try_from(bytes).map_err(|_| CudaError::InvalidValue)?);
        Ok(())
    }

    // Managed memory lives on the host; device copies are a cache.
    "cuMemAllocManaged" 6000 fn cuMemAllocManaged(address: Out<CUdeviceptr>, bytes: usize, flags: c_uint) {
        const ATTACH_GLOBAL: c_uint = 1;
        const ATTACH_HOST: c_uint = 2;
        if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) || bytes == 0 || address.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let context = current_handle()?;
        address.set(on_host(bytes, RangeKind::Managed { context })?)
    }

    "cuMemAllocHost" 2000 fn cuMemAllocHost(address: Out<Address>, bytes: c_uint) {
        allocate_host(address, usize::try_from(bytes).map_err(|_| CudaError::InvalidValue)?)
    }
    "cuMemAllocHost" 3020 fn cuMemAllocHost_v2(address: Out<Address>, bytes: usize) { allocate_host(address, bytes) }
    "cuMemHostAlloc" 2020 fn cuMemHostAlloc(address: Out<Address>, bytes: usize, _flags: c_uint) { allocate_host(address, bytes) }

    "cuMemFreeHost" 2000 fn cuMemFreeHost(address: Address) {
        let driver = driver()?;
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        let base = address.number();
        let range = state.addresses.ranges.get(&base).ok_or(CudaError::InvalidValue)?;
        if !matches!(range.kind, RangeKind::Host { .. }) {
            return Err(CudaError::InvalidValue);
        }
        state.addresses.ranges.remove(&base);
        Ok(())
    }
}

fn memory_info() -> CudaResult<(u64, u64)> {
    let driver = driver()?;
    let device = driver.state().current()?.device;
    let device = driver.device(device)?;
    let gpu = device.gpu;
    if let Some(instance) = &device.instance {
        return instance_memory_info(driver, gpu, instance);
    }
    match driver.request(&Request::MemoryInfo { gpu })? {
        Reply::MemoryInfo {
            free_bytes,
            total_bytes,
        } => Ok((free_bytes, total_bytes)),
        _ => Err(CudaError::Unknown),
    }
}

/// Free and total memory of the GPU instance of a MIG device.
fn instance_memory_info(
    driver: &Driver,
    gpu: GpuIndex,
    instance: &Instance,
) -> CudaResult<(u64, u64)> {
    let request = MigRequest::State;
    let reply = driver.request(&Request::Mig { gpu, request })?;
    let Reply::Mig(MigReply::State(state)) = reply else {
        return Err(CudaError::Unknown);
    };
    let mut gpus = state.gpu_instances.iter();
    let gpu_instance = gpus.find(|gpu_instance| gpu_instance.id == instance.id.gpu_instance);
    let used = gpu_instance.ok_or(CudaError::InvalidDevice)?.used_bytes;
    let total = instance.model.memory.usable_bytes();
    Ok((total.saturating_sub(used), total))
}

fn free(address: CUdeviceptr) -> CudaResult {
    let driver = driver()?;
    let mut state = driver.state();
    state.require_safe_in_capture()?;
    state.free(driver, address)
}

fn on_host(bytes: usize, kind: RangeKind) -> CudaResult<u64> {
    let driver = driver()?;
    let mut state = driver.state();
    state.current()?;
    state.require_safe_in_capture()?;
    let mapping = Mapping::anonymous(bytes as u64)?;
    let base = state.addresses.insert(mapping, bytes as u64, kind);
    if kind.is_managed() {
        state.report_managed(driver)?;
    }
    Ok(base)
}

fn allocate_host(address: Out<Address>, bytes: usize) -> CudaResult {
    if bytes == 0 || address.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let context = current_handle()?;
    let base = on_host(bytes, RangeKind::Host { context })?;
    address.set(Address::at(base))
}
