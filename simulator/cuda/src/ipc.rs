//! IPC memory: memory of another process, opened by its handle.
//!
//! A handle names the allocation and the offset in it. The memory lives until its owner has freed
//! it and every opener has closed it.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use simulator_machine::protocol::{AllocationId, Reply, Request};

use crate::State;
use crate::abi::{CudaResult, Out, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::memory::{Mapping, RangeKind};
use crate::types::{CUcontext, CUdeviceptr, CUipcHandle};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
/// Identifies memory handles.
const MAGIC: u64 = 0x006d_656d_6377_6b63;

/// Open memory of other processes, by allocation.
#[derive(Debug, Default)]
pub(crate) struct IpcMappings(BTreeMap<AllocationId, IpcMapping>);

#[derive(Clone, Copy, Debug)]
struct IpcMapping {
    base: u64,
    count: u32,
    /// Memory of a pool is freed instead of closed.
    is_pool_memory: bool,
}

/// A part of an allocation of another process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationPart {
    pub(crate) allocation: AllocationId,
    pub(crate) within: u64,
    pub(crate) bytes: u64,
    pub(crate) is_pool_memory: bool,
}

impl IpcMappings {
    fn at(&mut self, base: u64) -> Option<(AllocationId, &mut IpcMapping)> {
        let mut open = self.0.iter_mut();
        open.find(|(_, open)| open.base == base)
            .map(|(id, open)| (*id, open))
    }
}

impl State {
    fn share(&mut self, driver: &Driver, address: CUdeviceptr) -> CudaResult<CUipcHandle> {
        let (start, bytes, kind) = self.allocation_at(address).ok_or(CudaError::InvalidValue)?;
        let (RangeKind::Device { allocation, .. } | RangeKind::Heap { allocation, .. }) = kind
        else {
            return Err(CudaError::InvalidValue);
        };
        let (base, _) = self
            .addresses
            .bounds(address)
            .ok_or(CudaError::InvalidValue)?;
        driver.request(&Request::Share { allocation })?;
        let process = u64::from(std::process::id());
        Ok(CUipcHandle::of([
            MAGIC,
            allocation.0,
            start - base,
            bytes,
            process,
        ]))
    }

    fn open_shared(&mut self, driver: &Driver, handle: CUipcHandle) -> CudaResult<CUdeviceptr> {
        let [magic, number, within, bytes, process] = handle.words();
        if magic != MAGIC {
            return Err(CudaError::InvalidValue);
        }
        if process == u64::from(std::process::id()) {
            // A process cannot open its own memory.
            return Err(CudaError::InvalidContext);
        }
        let part = AllocationPart {
            allocation: AllocationId(number),
            within,
            bytes,
            is_pool_memory: false,
        };
        self.open_part(driver, part)
    }

    /// Maps an allocation of another process; one mapping serves all its parts.
    pub(crate) fn open_part(
        &mut self,
        driver: &Driver,
        part: AllocationPart,
    ) -> CudaResult<CUdeviceptr> {
        let context = current_handle()?;
        self.current()?;
        let AllocationPart {
            allocation,
            within,
            bytes,
            is_pool_memory,
        } = part;
        if let Some(open) = self.opened.0.get_mut(&allocation) {
            open.count += 1;
            return Ok(open.base + within);
        }
        let opened = driver.request(&Request::Open { allocation });
        let Reply::Opened {
            gpu,
            offset,
            bytes: whole,
            ..
        } = opened.map_err(|_| CudaError::InvalidValue)?
        else {
            return Err(CudaError::Unknown);
        };
        let device = driver.devices().iter().find(|device| device.gpu == gpu);
        let Some(device) = device else {
            driver.request(&Request::Release { allocation })?;
            return Err(CudaError::InvalidDevice);
        };
        let mapping = Mapping::of_file(&device.memory, offset, whole)?;
        // The rest of the block is other memory of the owner. Parts of a pool share their chunk.
        let length = match is_pool_memory {
            true => whole,
            false => within.saturating_add(bytes).min(whole),
        };
        let kind = RangeKind::Opened {
            context,
            allocation,
        };
        let base = self.addresses.insert(mapping, length, kind);
        let open = IpcMapping {
            base,
            count: 1,
            is_pool_memory,
        };
        self.opened.0.insert(allocation, open);
        Ok(base + within)
    }

    /// Frees memory of another process's pool.
    pub(crate) fn free_opened(&mut self, driver: &Driver, address: CUdeviceptr) -> CudaResult {
        let (base, _) = self
            .addresses
            .bounds(address)
            .ok_or(CudaError::InvalidValue)?;
        match self.opened.at(base) {
            Some((_, open)) if open.is_pool_memory => self.close_shared(driver, address),
            _ => Err(CudaError::InvalidValue),
        }
    }

    /// Closes memory opened in a destroyed context.
    pub(crate) fn close_opened(&mut self, driver: &Driver, context: CUcontext) -> CudaResult {
        let addresses = &self.addresses;
        let of_context = |open: &IpcMapping| match addresses.bounds(open.base) {
            Some((_, RangeKind::Opened { context: owner, .. })) => owner == context,
            _ => false,
        };
        let open = self.opened.0.iter().filter(|(_, open)| of_context(open));
        let closed: Vec<AllocationId> = open.map(|(id, _)| *id).collect();
        for allocation in closed {
            self.opened.0.remove(&allocation);
            driver.request(&Request::Release { allocation })?;
        }
        Ok(())
    }

    fn close_shared(&mut self, driver: &Driver, address: CUdeviceptr) -> CudaResult {
        let (base, kind) = self
            .addresses
            .bounds(address)
            .ok_or(CudaError::InvalidValue)?;
        if !matches!(kind, RangeKind::Opened { .. }) {
            return Err(CudaError::InvalidValue);
        }
        let (allocation, open) = self.opened.at(base).ok_or(CudaError::InvalidValue)?;
        open.count -= 1;
        if open.count > 0 {
            return Ok(());
        }
        self.opened.0.remove(&allocation);
        self.addresses.remove(base);
        driver.request(&Request::Release { allocation }).map(drop)
    }
}

fn open(address: Out<CUdeviceptr>, handle: CUipcHandle, flags: c_uint) -> CudaResult {
    if flags & !LAZY_ENABLE_PEER_ACCESS != 0 || address.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let driver = driver()?;
    address.set(driver.state().open_shared(driver, handle)?)
}

entry_points! {
    "cuIpcGetMemHandle" 4010 fn cuIpcGetMemHandle(handle: Out<CUipcHandle>, address: CUdeviceptr) {
        let driver = driver()?;
        handle.set(driver.state().share(driver, address)?)
    }

    "cuIpcOpenMemHandle" 4010 fn cuIpcOpenMemHandle(address: Out<CUdeviceptr>, handle: CUipcHandle, flags: c_uint) { open(address, handle, flags) }
    "cuIpcOpenMemHandle" 11000 fn cuIpcOpenMemHandle_v2(address: Out<CUdeviceptr>, handle: CUipcHandle, flags: c_uint) { open(address, handle, flags) }

    "cuIpcCloseMemHandle" 4010 fn cuIpcCloseMemHandle(address: CUdeviceptr) {
        let driver = driver()?;
        driver.state().close_shared(driver, address)
    }
}
