//! Virtual memory management: reserved addresses, physical memory, mappings.
//!
//! Physical memory lives until its handles are released, its mappings removed, and its exported
//! descriptors closed, in all processes.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use simulator_machine::kernel::PAGE_BYTES;
use simulator_machine::protocol::{AllocationId, GpuIndex, Reply, Request};

use crate::State;
use crate::abi::{Address, CudaResult, In, Out, Untyped, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::memory::{Mapping, RangeKind, Reservation};
use crate::types::{CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};

/// `CUmemGenericAllocationHandle`
pub(crate) type Handle = c_ulonglong;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const PINNED: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub(crate) const FILE_DESCRIPTOR: c_uint = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ` and `_READWRITE`
const ACCESS: [c_uint; 2] = [1, 3];

#[derive(Debug, Default)]
pub(crate) struct VirtualMemory {
    mapped: BTreeMap<u64, Mapped>,
    reservations: BTreeMap<u64, Reservation>,
    memory: BTreeMap<AllocationId, Memory>,
    handles: BTreeMap<Handle, AllocationId>,
}

/// Physical memory of this process: one hold on the daemon for all its uses.
#[derive(Debug)]
struct Memory {
    handle: Handle,
    handles: u32,
    mappings: u32,
    /// Bindings to multicast objects and sparse arrays.
    bindings: u32,
    gpu: GpuIndex,
    offset: u64,
    bytes: u64,
    properties: CUmemAllocationProp,
}

#[derive(Debug)]
struct Mapped {
    allocation: AllocationId,
    bytes: u64,
    /// Access flags by device.
    access: BTreeMap<CUdevice, c_uint>,
}

impl VirtualMemory {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        self.memory
            .values()
            .filter_map(|memory| usize::try_from(memory.handle).ok())
    }

    fn memory(&mut self, handle: Handle) -> CudaResult<(AllocationId, &mut Memory)> {
        let id = *self.handles.get(&handle).ok_or(CudaError::InvalidValue)?;
        let memory = self.memory.get_mut(&id).ok_or(CudaError::InvalidValue)?;
        Ok((id, memory))
    }

    /// The mapping that contains an address.
    fn containing(&self, address: u64) -> Option<(u64, &Mapped)> {
        let (base, mapped) = self.mapped.range(..=address).next_back()?;
        (address - base < mapped.bytes).then_some((*base, mapped))
    }

    /// The mappings that cover a range covering.
    fn covering(&self, address: u64, bytes: u64) -> CudaResult<Vec<u64>> {
        let mut found = Vec::new();
        let mut next = address;
        let end = address.checked_add(bytes).ok_or(CudaError::InvalidValue)?;
        while next < end {
            let mapped = self.mapped.get(&next).ok_or(CudaError::InvalidValue)?;
            found.push(next);
            next += mapped.bytes;
        }
        match next == end && !found.is_empty() {
            true => Ok(found),
            false => Err(CudaError::InvalidValue),
        }
    }

    /// Returns whether a range is mapped without gaps and one device can access all of it.
    pub(crate) fn is_accessible(&self, address: u64, bytes: u64) -> bool {
        let mut next = address;
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        while next < end {
            match self.containing(next) {
                Some((base, mapped)) if !mapped.access.is_empty() => next = base + mapped.bytes,
                _ => return false,
            }
        }
        true
    }

    /// The device of the memory mapped at an address.
    pub(crate) fn device_of(&self, address: u64) -> Option<CUdevice> {
        let (_, mapped) = self.containing(address)?;
        Some(self.memory.get(&mapped.allocation)?.properties.location.id)
    }

    pub(crate) fn allocation(&self, handle: Handle) -> CudaResult<AllocationId> {
        let allocation = self.handles.get(&handle);
        allocation.copied().ok_or(CudaError::InvalidValue)
    }

    /// The memory whose mapping begins at an address.
    pub(crate) fn mapped_at(&self, address: u64) -> CudaResult<AllocationId> {
        let mapped = self.mapped.get(&address).ok_or(CudaError::InvalidValue)?;
        Ok(mapped.allocation)
    }

    /// Device and size of physical memory.
    pub(crate) fn device_and_size(&self, id: AllocationId) -> CudaResult<(CUdevice, u64)> {
        let memory = self.memory.get(&id).ok_or(CudaError::InvalidValue)?;
        Ok((memory.properties.location.id, memory.bytes))
    }

    /// The GPU's memory file and the offset of the memory of a handle.
    pub(crate) fn backing_file<'a>(
        &self,
        driver: &'a Driver,
        handle: Handle,
    ) -> CudaResult<(&'a OwnedFd, u64)> {
        let memory = self.memory.get(&self.allocation(handle)?);
        let memory = memory.ok_or(CudaError::InvalidValue)?;
        let (gpu, offset) = (memory.gpu, memory.offset);
        let device = driver.devices().iter().find(|device| device.gpu == gpu);
        Ok((&device.ok_or(CudaError::InvalidDevice)?.memory, offset))
    }

    /// Adds a binding to a multicast object or sparse array.
    pub(crate) fn add_binding(&mut self, id: AllocationId) -> CudaResult {
        let memory = self.memory.get_mut(&id).ok_or(CudaError::InvalidValue)?;
        memory.bindings += 1;
        Ok(())
    }

    pub(crate) fn is_reserved(&self, address: u64) -> bool {
        let before = self.reservations.range(..=address).next_back();
        before.is_some_and(|(_, reservation)| reservation.contains(address, 1))
    }
}

/// The GPU of a memory; errors for other locations.
fn gpu_of(driver: &Driver, properties: &CUmemAllocationProp) -> CudaResult<GpuIndex> {
    if properties.kind != PINNED {
        return Err(CudaError::InvalidValue);
    }
    match properties.location.kind {
        CUmemLocation::DEVICE => Ok(driver.device(properties.location.id)?.gpu),
        // Host memory, which is not simulated.
        2..=4 => Err(CudaError::NotSupported),
        _ => Err(CudaError::InvalidValue),
    }
}

impl State {
    fn create_memory(
        &mut self,
        driver: &Driver,
        bytes: u64,
        properties: CUmemAllocationProp,
    ) -> CudaResult<Handle> {
        let gpu = gpu_of(driver, &properties)?;
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(CudaError::InvalidValue);
        }
        if properties.handle_types & !FILE_DESCRIPTOR != 0 {
            return Err(CudaError::NotSupported);
        }
        match driver.request(&Request::CreateMemory { gpu, bytes })? {
            Reply::Allocated {
                allocation,
                offset,
                bytes,
            } => Ok(self.add_memory(allocation, gpu, offset, bytes, properties)),
            _ => Err(CudaError::Unknown),
        }
    }

    fn add_memory(
        &mut self,
        allocation: AllocationId,
        gpu: GpuIndex,
        offset: u64,
        bytes: u64,
        properties: CUmemAllocationProp,
    ) -> Handle {
        let handle = self.handle() as Handle;
        let memory = Memory {
            handle,
            handles: 1,
            mappings: 0,
            bindings: 0,
            gpu,
            offset,
            bytes,
            properties,
        };
        self.virtual_memory.handles.insert(handle, allocation);
        self.virtual_memory.memory.insert(allocation, memory);
        handle
    }

    /// Releases memory without handles, mappings and bindings.
    fn release_unused_memory(&mut self, driver: &Driver, allocation: AllocationId) -> CudaResult {
        let space = &mut self.virtual_memory;
        let Some(memory) = space.memory.get(&allocation) else {
            return Ok(());
        };
        if memory.handles == 0 {
            space.handles.remove(&memory.handle);
        }
        if memory.handles > 0 || memory.mappings > 0 || memory.bindings > 0 {
            return Ok(());
        }
        space.memory.remove(&allocation);
        driver.request(&Request::Release { allocation }).map(drop)
    }

    /// Removes a binding added by [`VirtualMemory::add_binding`].
    pub(crate) fn remove_binding(&mut self, driver: &Driver, id: AllocationId) -> CudaResult {
        if let Some(memory) = self.virtual_memory.memory.get_mut(&id) {
            memory.bindings = memory.bindings.saturating_sub(1);
        }
        self.release_unused_memory(driver, id)
    }

    pub(crate) fn release(&mut self, driver: &Driver, handle: Handle) -> CudaResult {
        let (allocation, memory) = self.virtual_memory.memory(handle)?;
        memory.handles = memory
            .handles
            .checked_sub(1)
            .ok_or(CudaError::InvalidValue)?;
        self.release_unused_memory(driver, allocation)
    }

    fn map(&mut self, driver: &Driver, at: u64, bytes: u64, handle: Handle) -> CudaResult {
        if let Some(mapped) = self.map_multicast(at, bytes, handle) {
            return mapped;
        }
        let (allocation, memory) = self.virtual_memory.memory(handle)?;
        if bytes == 0 || !(at | bytes).is_multiple_of(PAGE_BYTES) || bytes > memory.bytes {
            return Err(CudaError::InvalidValue);
        }
        let space = &self.virtual_memory;
        let reserved = space.reservations.range(..=at).next_back();
        let (_, reservation) = reserved.ok_or(CudaError::InvalidValue)?;
        if !reservation.contains(at, bytes) {
            return Err(CudaError::InvalidValue);
        }
        let before = space.mapped.range(..at + bytes).next_back();
        if before.is_some_and(|(base, mapped)| base + mapped.bytes > at) {
            return Err(CudaError::InvalidValue);
        }
        let (file, offset) = space.backing_file(driver, handle)?;
        let mapping = Mapping::place(reservation, at, file, offset, bytes)?;
        self.addresses.insert(mapping, bytes, RangeKind::Virtual);
        let mapped = Mapped {
            allocation,
            bytes,
            access: BTreeMap::new(),
        };
        self.virtual_memory.mapped.insert(at, mapped);
        self.virtual_memory.memory(handle)?.1.mappings += 1;
        Ok(())
    }

    fn unmap(&mut self, driver: &Driver, at: u64, bytes: u64) -> CudaResult {
        if let Some(unmapped) = self.unmap_multicast(driver, at, bytes) {
            return unmapped;
        }
        for base in self.virtual_memory.covering(at, bytes)? {
            self.addresses.remove(base);
            let Some(mapped) = self.virtual_memory.mapped.remove(&base) else {
                continue;
            };
            if let Some(memory) = self.virtual_memory.memory.get_mut(&mapped.allocation) {
                memory.mappings -= 1;
            }
            self.release_unused_memory(driver, mapped.allocation)?;
        }
        Ok(())
    }

    /// Imports memory from a descriptor.
    pub(crate) fn import(
        &mut self,
        driver: &Driver,
        descriptor: BorrowedFd<'_>,
    ) -> CudaResult<Handle> {
        let Reply::Opened {
            gpu,
            allocation,
            offset,
            bytes,
        } = driver.request_about(&Request::Import, descriptor)?
        else {
            return Err(CudaError::Unknown);
        };
        if let Some(memory) = self.virtual_memory.memory.get_mut(&allocation) {
            // Already held: one hold is enough.
            memory.handles += 1;
            let handle = memory.handle;
            self.virtual_memory.handles.insert(handle, allocation);
            driver.request(&Request::Release { allocation })?;
            return Ok(handle);
        }
        let position = driver.devices().iter().position(|one| one.gpu == gpu);
        let device = position.and_then(|index| CUdevice::try_from(index).ok());
        let Some(id) = device else {
            driver.request(&Request::Release { allocation })?;
            return Err(CudaError::InvalidDevice);
        };
        let properties = CUmemAllocationProp {
            kind: PINNED,
            handle_types: FILE_DESCRIPTOR,
            location: CUmemLocation {
                kind: CUmemLocation::DEVICE,
                id,
            },
            windows: std::ptr::null(),
            flags: [0; 8],
        };
        Ok(self.add_memory(allocation, gpu, offset, bytes, properties))
    }
}

/// Requests a descriptor for memory from the daemon.
fn export(driver: &Driver, allocation: AllocationId) -> CudaResult<OwnedFd> {
    let (reply, mut fds) = driver.request_with_fds(&Request::Export { allocation })?;
    match reply {
        Reply::Exported { .. } => fds.pop().ok_or(CudaError::Unknown),
        _ => Err(CudaError::Unknown),
    }
}

/// A descriptor of the caller.
pub(crate) fn borrow_descriptor(descriptor: usize) -> CudaResult<BorrowedFd<'static>> {
    let number = RawFd::try_from(descriptor).map_err(|_| CudaError::InvalidValue)?;
    if number < 0 {
        return Err(CudaError::InvalidValue);
    }
    // SAFETY: not -1; by the caller's contract it is open during the call.
    Ok(unsafe { BorrowedFd::borrow_raw(number) })
}

entry_points! {
    "cuMemAddressReserve" 10020 fn cuMemAddressReserve(address: Out<CUdeviceptr>, bytes: usize, alignment: usize, _hint: CUdeviceptr, flags: c_ulonglong) {
        let bytes = bytes as u64;
        let alignment = (alignment as u64).max(PAGE_BYTES);
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) || !alignment.is_power_of_two() || flags != 0 || address.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.state();
        let reservation = Reservation::new(bytes, alignment)?;
        let base = reservation.base();
        state.virtual_memory.reservations.insert(base, reservation);
        address.set(base)
    }

    "cuMemAddressFree" 10020 fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) {
        let driver = driver()?;
        let mut state = driver.state();
        let space = &mut state.virtual_memory;
        let reservation = space.reservations.get(&address).ok_or(CudaError::InvalidValue)?;
        let end = address + reservation.length();
        if reservation.length() != bytes as u64 || space.mapped.range(address..end).next().is_some() {
            return Err(CudaError::InvalidValue);
        }
        space.reservations.remove(&address);
        Ok(())
    }

    "cuMemCreate" 10020 fn cuMemCreate(handle: Out<Handle>, bytes: usize, properties: In<CUmemAllocationProp>, flags: c_ulonglong) {
        if flags != 0 || handle.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let properties = properties.get()?;
        let driver = driver()?;
        handle.set(driver.state().create_memory(driver, bytes as u64, properties)?)
    }

    "cuMemRelease" 10020 fn cuMemRelease(handle: Handle) {
        let driver = driver()?;
        let mut state = driver.state();
        if let Some(released) = state.release_multicast(driver, handle) {
            return released;
        }
        state.release(driver, handle)
    }

    "cuMemMap" 10020 fn cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: Handle, flags: c_ulonglong) {
        // `cuda.h` requires offset 0.
        if flags != 0 || offset != 0 {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        driver.state().map(driver, address, bytes as u64, handle)
    }

    "cuMemUnmap" 10020 fn cuMemUnmap(address: CUdeviceptr, bytes: usize) {
        let driver = driver()?;
        driver.state().unmap(driver, address, bytes as u64)
    }

    "cuMemSetAccess" 10020 fn cuMemSetAccess(address: CUdeviceptr, bytes: usize, descriptions: In<CUmemAccessDesc>, count: usize) {
        let descriptions = descriptions.list(count)?;
        let driver = driver()?;
        let mut state = driver.state();
        let space = &mut state.virtual_memory;
        for CUmemAccessDesc { location, flags } in descriptions {
            if location.kind != CUmemLocation::DEVICE {
                return Err(CudaError::NotSupported);
            }
            driver.device(location.id)?;
            for base in space.covering(address, bytes as u64)? {
                let mapped = space.mapped.get_mut(&base).ok_or(CudaError::InvalidValue)?;
                match flags {
                    0 => { mapped.access.remove(&location.id); }
                    flags if ACCESS.contains(&flags) => { mapped.access.insert(location.id, flags); }
                    _ => return Err(CudaError::InvalidValue),
                }
            }
        }
        Ok(())
    }

    "cuMemGetAllocationGranularity" 10020 fn cuMemGetAllocationGranularity(granularity: Out<usize>, properties: In<CUmemAllocationProp>, option: c_uint) {
        let driver = driver()?;
        gpu_of(driver, &properties.get()?)?;
        if option > 1 {
            return Err(CudaError::InvalidValue);
        }
        granularity.set(usize::try_from(PAGE_BYTES).map_err(|_| CudaError::Unknown)?)
    }

    "cuMemGetAllocationPropertiesFromHandle" 10020 fn cuMemGetAllocationPropertiesFromHandle(properties: Out<CUmemAllocationProp>, handle: Handle) {
        let driver = driver()?;
        let mut state = driver.state();
        properties.set(state.virtual_memory.memory(handle)?.1.properties)
    }

    "cuMemRetainAllocationHandle" 11000 fn cuMemRetainAllocationHandle(handle: Out<Handle>, address: Address) {
        let driver = driver()?;
        let mut state = driver.state();
        let space = &mut state.virtual_memory;
        let (_, mapped) = space.containing(address.number()).ok_or(CudaError::InvalidValue)?;
        let allocation = mapped.allocation;
        let memory = space.memory.get_mut(&allocation).ok_or(CudaError::InvalidValue)?;
        memory.handles += 1;
        let retained = memory.handle;
        space.handles.insert(retained, allocation);
        handle.set(retained)
    }

    "cuMemExportToShareableHandle" 10020 fn cuMemExportToShareableHandle(shareable: Untyped, handle: Handle, kind: c_uint, flags: c_ulonglong) {
        let driver = driver()?;
        let mut state = driver.state();
        let (allocation, memory) = state.virtual_memory.memory(handle)?;
        if flags != 0 || kind != FILE_DESCRIPTOR || memory.properties.handle_types & kind == 0 {
            return Err(CudaError::InvalidValue);
        }
        let shareable = shareable.out::<c_int>();
        if shareable.is_null() {
            return Err(CudaError::InvalidValue);
        }
        shareable.set(export(driver, allocation)?.into_raw_fd())
    }

    "cuMemImportFromShareableHandle" 10020 fn cuMemImportFromShareableHandle(handle: Out<Handle>, shareable: Untyped, kind: c_uint) {
        if kind != FILE_DESCRIPTOR || handle.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // The descriptor is passed in place of the pointer.
        let descriptor = borrow_descriptor(shareable.number())?;
        let driver = driver()?;
        handle.set(driver.state().import(driver, descriptor)?)
    }
}
