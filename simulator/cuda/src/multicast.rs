//! Multicast objects: one address range that reaches memory of several devices.
//!
//! An object is a handle that is released and mapped like physical memory. Binding memory stays
//! allocated until it is unbound or the object is destroyed, even if its own handle is released.
//! Stores through a mapping of an object have no effect.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_ulonglong;

use simulator_machine::kernel::PAGE_BYTES;
use simulator_machine::protocol::AllocationId;

use crate::State;
use crate::abi::{CudaResult, In, Out, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::types::{CUdevice, CUdeviceptr, CUmulticastObjectProp};
use crate::virtual_memory::{FILE_DESCRIPTOR, Handle};

#[derive(Debug)]
pub(crate) struct Multicast {
    bytes: u64,
    handles: u32,
    /// Mapped bytes by address.
    mapped: BTreeMap<u64, u64>,
    /// Number of devices of the object.
    size: usize,
    devices: BTreeSet<CUdevice>,
    /// By device and offset.
    bound: BTreeMap<(CUdevice, u64), Binding>,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    allocation: AllocationId,
    bytes: u64,
}

impl CUmulticastObjectProp {
    fn check(&self) -> CudaResult {
        let bytes = self.bytes as u64;
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) || self.devices < 2 || self.flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        match self.handle_types & !c_ulonglong::from(FILE_DESCRIPTOR) {
            0 => Ok(()),
            _ => Err(CudaError::NotSupported),
        }
    }
}

impl State {
    fn multicast(&mut self, handle: Handle) -> CudaResult<&mut Multicast> {
        let object = self.multicasts.get_mut(&handle);
        object.ok_or(CudaError::InvalidValue)
    }

    /// Binds memory to an object, which then holds the memory.
    fn bind(
        &mut self,
        handle: Handle,
        offset: usize,
        allocation: AllocationId,
        bytes: usize,
        wanted: Option<CUdevice>,
    ) -> CudaResult {
        let (offset, bytes) = (offset as u64, bytes as u64);
        let (own, size) = self.virtual_memory.device_and_size(allocation)?;
        // Since 13.1 the caller can name the device.
        let device = wanted.unwrap_or(own);
        let object = self.multicast(handle)?;
        let end = offset.checked_add(bytes).ok_or(CudaError::InvalidValue)?;
        // All devices must be added before memory is bound.
        if object.devices.len() < object.size {
            return Err(CudaError::IllegalState);
        }
        let aligned = (offset | bytes).is_multiple_of(PAGE_BYTES);
        if bytes == 0 || !aligned || end > object.bytes || bytes > size {
            return Err(CudaError::InvalidValue);
        }
        if !object.devices.contains(&device) {
            return Err(CudaError::InvalidDevice);
        }
        let of_device = object.bound.range((device, 0)..(device, end));
        if of_device
            .last()
            .is_some_and(|((_, at), one)| at + one.bytes > offset)
        {
            return Err(CudaError::InvalidValue);
        }
        object
            .bound
            .insert((device, offset), Binding { allocation, bytes });
        self.virtual_memory.add_binding(allocation)
    }

    /// Releases the handle of an object; `None` for other handles.
    pub(crate) fn release_multicast(
        &mut self,
        driver: &Driver,
        handle: Handle,
    ) -> Option<CudaResult> {
        let object = self.multicasts.get_mut(&handle)?;
        object.handles = object.handles.saturating_sub(1);
        Some(self.destroy_unused_multicast(driver, handle))
    }

    /// Maps an object into reserved addresses; `None` for other handles.
    pub(crate) fn map_multicast(
        &mut self,
        at: u64,
        bytes: u64,
        handle: Handle,
    ) -> Option<CudaResult> {
        let object = self.multicasts.get_mut(&handle)?;
        if bytes == 0 || bytes > object.bytes {
            return Some(Err(CudaError::InvalidValue));
        }
        object.mapped.insert(at, bytes);
        Some(Ok(()))
    }

    /// Unmaps an object; `None` unless exactly this range is mapped.
    pub(crate) fn unmap_multicast(
        &mut self,
        driver: &Driver,
        at: u64,
        bytes: u64,
    ) -> Option<CudaResult> {
        let mut objects = self.multicasts.iter_mut();
        let (handle, object) = objects.find(|(_, one)| one.mapped.get(&at) == Some(&bytes))?;
        let handle = *handle;
        object.mapped.remove(&at);
        Some(self.destroy_unused_multicast(driver, handle))
    }

    /// Destroys an object without handles and mappings, and unbinds its memory.
    fn destroy_unused_multicast(&mut self, driver: &Driver, handle: Handle) -> CudaResult {
        let in_use = |object: &Multicast| object.handles > 0 || !object.mapped.is_empty();
        if self.multicasts.get(&handle).is_none_or(in_use) {
            return Ok(());
        }
        let Some(object) = self.multicasts.remove(&handle) else {
            return Ok(());
        };
        let bound = object.bound.into_values();
        bound
            .map(|one| one.allocation)
            .try_for_each(|id| self.remove_binding(driver, id))
    }
}

entry_points! {
    "cuMulticastCreate" 12010 fn cuMulticastCreate(handle: Out<Handle>, properties: In<CUmulticastObjectProp>) {
        let properties = properties.get()?;
        properties.check()?;
        let driver = driver()?;
        if properties.devices as usize > driver.devices().len() || handle.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver.state();
        let made = state.handle() as Handle;
        let object = Multicast {
            bytes: properties.bytes as u64,
            handles: 1,
            mapped: BTreeMap::new(),
            size: properties.devices as usize,
            devices: BTreeSet::new(),
            bound: BTreeMap::new(),
        };
        state.multicasts.insert(made, object);
        handle.set(made)
    }

    "cuMulticastAddDevice" 12010 fn cuMulticastAddDevice(handle: Handle, device: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        let mut state = driver.state();
        let object = state.multicast(handle)?;
        if object.devices.len() == object.size || !object.devices.insert(device) {
            return Err(CudaError::InvalidValue);
        }
        Ok(())
    }

    "cuMulticastBindMem" 12010 fn cuMulticastBindMem(handle: Handle, offset: usize, memory: Handle, memory_offset: usize, bytes: usize, flags: c_ulonglong) {
        if flags != 0 || memory_offset != 0 {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.state();
        let allocation = state.virtual_memory.allocation(memory)?;
        state.bind(handle, offset, allocation, bytes, None)
    }

    "cuMulticastBindAddr" 12010 fn cuMulticastBindAddr(handle: Handle, offset: usize, address: CUdeviceptr, bytes: usize, flags: c_ulonglong) {
        if flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.state();
        let allocation = state.virtual_memory.mapped_at(address)?;
        state.bind(handle, offset, allocation, bytes, None)
    }

    "cuMulticastBindMem" 13010 fn cuMulticastBindMem_v2(handle: Handle, device: CUdevice, offset: usize, memory: Handle, memory_offset: usize, bytes: usize, flags: c_ulonglong) {
        if flags != 0 || memory_offset != 0 {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.state();
        let allocation = state.virtual_memory.allocation(memory)?;
        state.bind(handle, offset, allocation, bytes, Some(device))
    }

    "cuMulticastBindAddr" 13010 fn cuMulticastBindAddr_v2(handle: Handle, device: CUdevice, offset: usize, address: CUdeviceptr, bytes: usize, flags: c_ulonglong) {
        if flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.state();
        let allocation = state.virtual_memory.mapped_at(address)?;
        state.bind(handle, offset, allocation, bytes, Some(device))
    }

    "cuMulticastUnbind" 12010 fn cuMulticastUnbind(handle: Handle, device: CUdevice, offset: usize, bytes: usize) {
        let driver = driver()?;
        let mut state = driver.state();
        let bound = &mut state.multicast(handle)?.bound;
        let at = (device, offset as u64);
        if bound.get(&at).is_none_or(|one| one.bytes != bytes as u64) {
            return Err(CudaError::InvalidValue);
        }
        let one = bound.remove(&at).ok_or(CudaError::InvalidValue)?;
        state.remove_binding(driver, one.allocation)
    }
}
