//! Multicast objects: one range of addresses through which a program reaches memory of several
//! devices.
//!
//! An object is a handle as physical memory is: it is released, and mapped into reserved addresses.
//! What is bound to it stays taken until it is unbound or the object is gone, whatever becomes of
//! its handle. Nothing is stored through a mapping of an object here.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_ulonglong;

use simulator_machine::kernel::PAGE_BYTES;
use simulator_machine::protocol::AllocationId;

use crate::abi::{Answer, In, Out, entry_points};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::types::{CUdevice, CUdeviceptr, CUmulticastObjectProp};
use crate::virtual_memory::{FILE_DESCRIPTOR, Handle};

/// One object.
#[derive(Debug)]
pub(crate) struct Multicast {
    bytes: u64,
    handles: u32,
    /// By address: how many bytes.
    mapped: BTreeMap<u64, u64>,
    /// How many devices it is for.
    size: usize,
    devices: BTreeSet<CUdevice>,
    /// By device and offset.
    bound: BTreeMap<(CUdevice, u64), Bound>,
}

#[derive(Clone, Copy, Debug)]
struct Bound {
    allocation: AllocationId,
    bytes: u64,
}

impl CUmulticastObjectProp {
    fn check(&self) -> Answer {
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
    fn multicast(&mut self, handle: Handle) -> Answer<&mut Multicast> {
        let object = self.multicasts.get_mut(&handle);
        object.ok_or(CudaError::InvalidValue)
    }

    /// Binds memory to an object, which holds it from now on.
    fn bind(
        &mut self,
        handle: Handle,
        offset: usize,
        allocation: AllocationId,
        bytes: usize,
        wanted: Option<CUdevice>,
    ) -> Answer {
        let (offset, bytes) = (offset as u64, bytes as u64);
        let (own, size) = self.virtual_memory.whereabouts(allocation)?;
        // A device can be named since 13.1: the one that is to reach the memory.
        let device = wanted.unwrap_or(own);
        let object = self.multicast(handle)?;
        let end = offset.checked_add(bytes).ok_or(CudaError::InvalidValue)?;
        // All devices take part before anything is bound.
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
            .insert((device, offset), Bound { allocation, bytes });
        self.virtual_memory.hold(allocation)
    }

    /// Releases a handle, if it is one of an object.
    pub(crate) fn release_multicast(&mut self, driver: &Driver, handle: Handle) -> Option<Answer> {
        let object = self.multicasts.get_mut(&handle)?;
        object.handles = object.handles.saturating_sub(1);
        Some(self.bury_multicast(driver, handle))
    }

    /// Maps an object, if the handle is one of it, into reserved addresses.
    pub(crate) fn map_multicast(&mut self, at: u64, bytes: u64, handle: Handle) -> Option<Answer> {
        let object = self.multicasts.get_mut(&handle)?;
        if bytes == 0 || bytes > object.bytes {
            return Some(Err(CudaError::InvalidValue));
        }
        object.mapped.insert(at, bytes);
        Some(Ok(()))
    }

    /// Unmaps an object, if exactly that is mapped.
    pub(crate) fn unmap_multicast(
        &mut self,
        driver: &Driver,
        at: u64,
        bytes: u64,
    ) -> Option<Answer> {
        let mut objects = self.multicasts.iter_mut();
        let (handle, object) = objects.find(|(_, one)| one.mapped.get(&at) == Some(&bytes))?;
        let handle = *handle;
        object.mapped.remove(&at);
        Some(self.bury_multicast(driver, handle))
    }

    /// Gives up an object with what is bound to it, if nobody has it any more.
    fn bury_multicast(&mut self, driver: &Driver, handle: Handle) -> Answer {
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
            .try_for_each(|id| self.let_go(driver, id))
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
        state.let_go(driver, one.allocation)
    }
}
