//! Memory pools and stream-ordered allocation.
//!
//! A pool reserves GPU memory in chunks and suballocates. Freed memory stays reserved until a
//! synchronization finds more unused memory than the release threshold, as in the real driver; and
//! until the stream of the free has reached it, also if the pool is trimmed.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};

use simulator_machine::kernel::PAGE_BYTES;
use simulator_machine::protocol::{AllocationId, Request};

use crate::State;
use crate::abi::{CudaResult, In, Out, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::heap::{Freed, Heap};
use crate::memory::{Mapping, RangeKind};
use crate::operation::Operation;
use crate::stream::with_capacity;
use crate::types::{
    CUcontext, CUdevice, CUdeviceptr, CUmemLocation, CUmemPoolProps, CUmemoryPool, CUstream,
};
use crate::virtual_memory::FILE_DESCRIPTOR;

mod attributes;
mod location;
mod share;

pub(crate) use attributes::ENTRY_POINTS as ATTRIBUTE_ENTRY_POINTS;
use location::PoolLocation;
pub(crate) use share::ENTRY_POINTS as SHARE_ENTRY_POINTS;

/// Size of chunks for small allocations, and address alignment of all chunks.
const CHUNK_BYTES: u64 = 32 << 20;

#[derive(Debug, Default)]
pub(crate) struct Pools {
    pools: BTreeMap<CUmemoryPool, Pool>,
    /// Default pools.
    defaults: BTreeMap<PoolLocation, CUmemoryPool>,
    /// Pools set as current; `cuMemAllocAsync` uses the one of the device.
    current: BTreeMap<PoolLocation, CUmemoryPool>,
}

#[derive(Debug)]
struct Pool {
    location: PoolLocation,
    max_bytes: Option<u64>,
    threshold: u64,
    heap: Heap,
    /// Allocations with a chunk of their own: start and requested size.
    large: BTreeMap<u64, u64>,
    /// Chunks by start.
    chunks: BTreeMap<u64, Chunk>,
    used: u64,
    used_high: u64,
    reserved_high: u64,
    /// Destroyed by the program; removed with its last allocation.
    destroyed: bool,
    exportable: bool,
    /// Imported from another process; allocation is rejected.
    imported: bool,
    /// Reuse policies, without effect.
    policies: BTreeMap<c_uint, c_int>,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    context: CUcontext,
    /// `None` for host memory.
    allocation: Option<AllocationId>,
    bytes: u64,
    idle: bool,
    /// The work in front of the last free in a stream.
    in_use_until: Option<Point>,
}

impl Pool {
    fn new(location: PoolLocation, max_bytes: Option<u64>) -> Self {
        Self {
            location,
            max_bytes,
            threshold: 0,
            heap: Heap::new(CHUNK_BYTES),
            large: BTreeMap::new(),
            chunks: BTreeMap::new(),
            used: 0,
            used_high: 0,
            reserved_high: 0,
            destroyed: false,
            exportable: false,
            imported: false,
            policies: BTreeMap::new(),
        }
    }

    fn reserved(&self) -> u64 {
        self.chunks.values().map(|chunk| chunk.bytes).sum()
    }

    fn record_use(&mut self, bytes: u64) {
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
    }

    fn containing(&self, address: u64) -> Option<(u64, u64)> {
        if let Some((start, bytes)) = self.large.range(..=address).next_back()
            && address - start < *bytes
        {
            return Some((*start, *bytes));
        }
        self.heap.containing(address)
    }
}

impl Pools {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        self.pools.keys().map(|pool| pool.0)
    }

    /// Start and size of the allocation that contains an address.
    pub(crate) fn containing(&self, pool: CUmemoryPool, address: u64) -> Option<(u64, u64)> {
        self.pools.get(&pool)?.containing(address)
    }

    fn get(&mut self, pool: CUmemoryPool) -> CudaResult<&mut Pool> {
        self.pools.get_mut(&pool).ok_or(CudaError::InvalidValue)
    }

    /// Removes the chunks of a destroyed context.
    pub(crate) fn remove_context(&mut self, context: CUcontext) {
        for pool in self.pools.values_mut() {
            let before = pool.chunks.len();
            pool.chunks.retain(|_, chunk| chunk.context != context);
            if pool.chunks.len() != before {
                pool.heap = Heap::new(CHUNK_BYTES);
                pool.large.clear();
                pool.used = 0;
            }
        }
    }
}

impl State {
    fn default_pool(&mut self, location: PoolLocation) -> CUmemoryPool {
        if let Some(pool) = self.pools.defaults.get(&location) {
            return *pool;
        }
        let handle = CUmemoryPool(self.handle());
        self.pools.pools.insert(handle, Pool::new(location, None));
        self.pools.defaults.insert(location, handle);
        handle
    }

    fn current_pool(&mut self, location: PoolLocation) -> CUmemoryPool {
        match self.pools.current.get(&location) {
            Some(pool) => *pool,
            None => self.default_pool(location),
        }
    }

    fn map_chunk(
        &mut self,
        driver: &Driver,
        handle: CUmemoryPool,
        context: CUcontext,
        bytes: u64,
    ) -> CudaResult<(Option<AllocationId>, Mapping, RangeKind)> {
        let location = self.pools.get(handle)?.location;
        if location.device().is_none() {
            let is_managed = matches!(location, PoolLocation::Managed(..));
            let kind = RangeKind::HostPool {
                context,
                pool: handle,
                is_managed,
            };
            return Ok((None, Mapping::anonymous(bytes)?, kind));
        }
        let (allocation, mapping) = match self.map_aligned(driver, context, bytes, CHUNK_BYTES) {
            Err(CudaError::OutOfMemory) => {
                // Idle chunks are freed before an allocation fails.
                self.trim(driver, handle, 0)?;
                self.map_aligned(driver, context, bytes, CHUNK_BYTES)?
            }
            mapped => mapped?,
        };
        let kind = RangeKind::Pool {
            context,
            allocation,
            pool: handle,
        };
        Ok((Some(allocation), mapping, kind))
    }

    /// Returns a chunk: an idle one of the same size, or a new one.
    fn chunk(&mut self, driver: &Driver, handle: CUmemoryPool, bytes: u64) -> CudaResult<u64> {
        let pool = self.pools.get(handle)?;
        let fits = |(_, chunk): &(&u64, &mut Chunk)| chunk.idle && chunk.bytes == bytes;
        if let Some((base, chunk)) = pool.chunks.iter_mut().find(fits) {
            chunk.idle = false;
            return Ok(*base);
        }
        let reserved = pool.reserved();
        if pool.max_bytes.is_some_and(|most| reserved + bytes > most) {
            return Err(CudaError::OutOfMemory);
        }
        // A context on the pool's GPU, whichever context is current.
        let context = match pool.location.device() {
            Some(device) => self.context_on(device)?,
            None => current_handle()?,
        };
        let (allocation, mapping, kind) = self.map_chunk(driver, handle, context, bytes)?;
        let base = self.addresses.insert(mapping, bytes, kind);
        if allocation.is_none() {
            self.report_managed(driver)?;
        }
        let pool = self.pools.get(handle)?;
        pool.chunks.insert(
            base,
            Chunk {
                context,
                allocation,
                bytes,
                idle: false,
                in_use_until: None,
            },
        );
        pool.reserved_high = pool.reserved_high.max(pool.reserved());
        Ok(base)
    }

    fn allocate_from(
        &mut self,
        driver: &Driver,
        handle: CUmemoryPool,
        bytes: u64,
    ) -> CudaResult<CUdeviceptr> {
        let pool = self.pools.get(handle)?;
        if bytes == 0 || pool.imported {
            return Err(CudaError::InvalidValue);
        }
        if bytes > pool.heap.max_allocation_bytes() {
            let rounded = bytes
                .checked_next_multiple_of(PAGE_BYTES)
                .ok_or(CudaError::OutOfMemory)?;
            let base = self.chunk(driver, handle, rounded)?;
            let pool = self.pools.get(handle)?;
            pool.large.insert(base, bytes);
            pool.record_use(bytes);
            return Ok(base);
        }
        if let Some(address) = pool.heap.allocate(bytes) {
            pool.record_use(bytes);
            return Ok(address);
        }
        let base = self.chunk(driver, handle, CHUNK_BYTES)?;
        let pool = self.pools.get(handle)?;
        pool.heap.add_block(base);
        let address = pool.heap.allocate(bytes).ok_or(CudaError::OutOfMemory)?;
        pool.record_use(bytes);
        Ok(address)
    }

    /// Frees an allocation; the pool keeps the memory, which is in use until that point is reached.
    pub(crate) fn free_to_pool(
        &mut self,
        driver: &Driver,
        address: CUdeviceptr,
        in_use_until: Option<Point>,
    ) -> CudaResult {
        let (start, bytes, kind) = self.allocation_at(address).ok_or(CudaError::InvalidValue)?;
        let (RangeKind::Pool { pool: handle, .. } | RangeKind::HostPool { pool: handle, .. }) =
            kind
        else {
            return self.free(driver, address);
        };
        if start != address {
            return Err(CudaError::InvalidValue);
        }
        let pool = self.pools.get(handle)?;
        let is_emptied = if pool.large.remove(&address).is_some() {
            true
        } else {
            match pool.heap.free(address) {
                Freed::Unknown => return Err(CudaError::InvalidValue),
                Freed::BlockInUse => false,
                Freed::BlockEmpty => true,
            }
        };
        pool.used = pool.used.saturating_sub(bytes);
        if let Some((_, chunk)) = pool.chunks.range_mut(..=address).next_back() {
            chunk.idle = is_emptied;
            chunk.in_use_until = in_use_until.or(chunk.in_use_until);
        }
        self.remove_unused_pool(driver, handle)
    }

    /// Removes a destroyed pool that has no allocations.
    fn remove_unused_pool(&mut self, driver: &Driver, handle: CUmemoryPool) -> CudaResult {
        if !self.pools.get(handle)?.destroyed {
            return Ok(());
        }
        self.trim(driver, handle, 0)?;
        if self.pools.get(handle)?.chunks.is_empty() {
            self.pools.pools.remove(&handle);
        }
        Ok(())
    }

    /// Frees idle chunks until the pool reserves at most `keep` bytes.
    fn trim(&mut self, driver: &Driver, handle: CUmemoryPool, keep: u64) -> CudaResult {
        loop {
            let pool = self.pools.get(handle)?;
            if pool.reserved() <= keep {
                return Ok(());
            }
            let is_unused = |chunk: &Chunk| {
                let in_use_until = chunk.in_use_until;
                chunk.idle && in_use_until.is_none_or(|point| driver.is_reached(point))
            };
            let idle = pool.chunks.iter().find(|(_, chunk)| is_unused(chunk));
            let Some((base, allocation)) = idle.map(|(base, chunk)| (*base, chunk.allocation))
            else {
                return Ok(());
            };
            pool.chunks.remove(&base);
            self.addresses.remove(base);
            match allocation {
                Some(allocation) => drop(driver.request(&Request::Free { allocation })?),
                None => self.report_managed(driver)?,
            }
        }
    }

    /// Applies release thresholds, at a synchronization.
    pub(crate) fn trim_pools(&mut self, driver: &Driver) -> CudaResult {
        let pools: Vec<(CUmemoryPool, u64)> = self
            .pools
            .pools
            .iter()
            .map(|(handle, pool)| (*handle, pool.threshold))
            .collect();
        pools.into_iter().try_for_each(|(handle, threshold)| {
            self.trim(driver, handle, threshold)?;
            self.remove_unused_pool(driver, handle)
        })
    }
}

/// Allocates from a pool, or from the device's current one. During a capture, adds an allocation
/// node.
fn allocate_async(
    address: Out<CUdeviceptr>,
    bytes: usize,
    pool: Option<CUmemoryPool>,
    stream: CUstream,
) -> CudaResult {
    if address.is_null() {
        return Err(CudaError::InvalidValue);
    }
    address.set(with_capacity(stream, |driver, state, stream| {
        let context = state.contexts.get(&stream.context);
        let mut location =
            PoolLocation::Device(context.ok_or(CudaError::ContextIsDestroyed)?.device);
        if let Some(pool) = pool {
            location = state.pools.get(pool)?.location;
        }
        if state.is_capturing(stream)? {
            // Graph memory is GPU memory.
            let device = location.device().ok_or(CudaError::NotSupported)?;
            let memory = state.new_memory_node(driver, device, bytes as u64)?;
            state.capture(stream, Operation::Allocate(memory))?;
            return Ok(memory.address);
        }
        state.require_safe_in_capture()?;
        let pool = pool.unwrap_or_else(|| state.current_pool(location));
        state.allocate_from(driver, pool, bytes as u64)
    })?)
}

fn pool_location(location: In<CUmemLocation>, kind: c_uint) -> CudaResult<PoolLocation> {
    PoolLocation::new(driver()?, location.get()?, kind)
}

fn set_current(location: PoolLocation, pool: CUmemoryPool) -> CudaResult {
    let driver = driver()?;
    let mut state = driver.state();
    if state.pools.get(pool)?.location != location {
        return Err(CudaError::InvalidValue);
    }
    state.pools.current.insert(location, pool);
    Ok(())
}

entry_points! {
    "cuMemAllocAsync" 11020 fn cuMemAllocAsync(address: Out<CUdeviceptr>, bytes: usize, stream: CUstream) ptsz(stream) cuMemAllocAsync_ptsz { allocate_async(address, bytes, None, stream) }
    "cuMemAllocFromPoolAsync" 11020 fn cuMemAllocFromPoolAsync(address: Out<CUdeviceptr>, bytes: usize, pool: CUmemoryPool, stream: CUstream) ptsz(stream) cuMemAllocFromPoolAsync_ptsz { allocate_async(address, bytes, Some(pool), stream) }

    "cuMemFreeAsync" 11020 fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) ptsz(stream) cuMemFreeAsync_ptsz {
        with_capacity(stream, |driver, state, stream| {
            match state.is_capturing(stream)? {
                true => state.capture(stream, Operation::Free(address)).map(drop),
                false => {
                    state.require_safe_in_capture()?;
                    let before = state.unfinished(driver, stream.cell);
                    state.free_to_pool(driver, address, before)
                }
            }
        })
    }

    "cuDeviceGetDefaultMemPool" 11020 fn cuDeviceGetDefaultMemPool(pool: Out<CUmemoryPool>, device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        pool.set(driver.state().default_pool(PoolLocation::Device(device)))
    }

    "cuDeviceGetMemPool" 11020 fn cuDeviceGetMemPool(pool: Out<CUmemoryPool>, device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        pool.set(driver.state().current_pool(PoolLocation::Device(device)))
    }

    "cuDeviceSetMemPool" 11020 fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) {
        driver()?.device(device)?;
        set_current(PoolLocation::Device(device), pool)
    }

    "cuMemGetDefaultMemPool" 13000 fn cuMemGetDefaultMemPool(pool: Out<CUmemoryPool>, location: In<CUmemLocation>, kind: c_uint) {
        pool.set(driver()?.state().default_pool(pool_location(location, kind)?))
    }
    "cuMemGetMemPool" 13000 fn cuMemGetMemPool(pool: Out<CUmemoryPool>, location: In<CUmemLocation>, kind: c_uint) {
        pool.set(driver()?.state().current_pool(pool_location(location, kind)?))
    }

    "cuMemPoolCreate" 11020 fn cuMemPoolCreate(pool: Out<CUmemoryPool>, properties: In<CUmemPoolProps>) {
        let properties = properties.get()?;
        let driver = driver()?;
        if pool.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let location = PoolLocation::new(driver, properties.location, properties.alloc_type)?;
        let exportable = properties.handle_types & FILE_DESCRIPTOR != 0;
        if exportable && location.device().is_none() {
            return Err(CudaError::NotSupported);
        }
        let most = (properties.max_size > 0).then_some(properties.max_size as u64);
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        let handle = CUmemoryPool(state.handle());
        let mut created = Pool::new(location, most);
        created.exportable = exportable;
        state.pools.pools.insert(handle, created);
        pool.set(handle)
    }

    "cuMemPoolDestroy" 11020 fn cuMemPoolDestroy(pool: CUmemoryPool) {
        let driver = driver()?;
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        if state.pools.defaults.values().any(|default| *default == pool) {
            return Err(CudaError::InvalidValue);
        }
        state.pools.get(pool)?.destroyed = true;
        state.pools.current.retain(|_, current| *current != pool);
        state.remove_unused_pool(driver, pool)
    }

    "cuMemPoolTrimTo" 11020 fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) {
        let driver = driver()?;
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        state.trim(driver, pool, keep as u64)
    }
}
