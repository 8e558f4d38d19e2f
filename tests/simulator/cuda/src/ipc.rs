//! Memory of another process, opened by the handle that it gave away.
//!
//! A handle names the allocation on the machine and where in it the memory lies. The memory lives
//! until its owner has freed it and everyone who opened it has closed it.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use simulator_machine::protocol::{AllocationId, Reply, Request};

use crate::abi::{Answer, Out, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::memory::{Mapping, RangeKind};
use crate::types::{CUcontext, CUdeviceptr, CUipcHandle};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
/// Tells handles of memory from anything else.
const MAGIC: u64 = 0x006d_656d_6377_6b63;

/// Memory of other processes that is open here, by allocation.
#[derive(Debug, Default)]
pub(crate) struct Opened(BTreeMap<AllocationId, Open>);

#[derive(Clone, Copy, Debug)]
struct Open {
    base: u64,
    /// How often it was opened.
    count: u32,
    /// Freed rather than closed.
    of_pool: bool,
}

/// A part of memory of another process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) allocation: AllocationId,
    pub(crate) within: u64,
    pub(crate) bytes: u64,
    pub(crate) of_pool: bool,
}

impl Opened {
    fn at(&mut self, base: u64) -> Option<(AllocationId, &mut Open)> {
        let mut open = self.0.iter_mut();
        open.find(|(_, open)| open.base == base)
            .map(|(id, open)| (*id, open))
    }
}

impl State {
    fn share(&mut self, driver: &Driver, address: CUdeviceptr) -> Answer<CUipcHandle> {
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

    fn open_shared(&mut self, driver: &Driver, handle: CUipcHandle) -> Answer<CUdeviceptr> {
        let [magic, number, within, bytes, process] = handle.words();
        if magic != MAGIC {
            return Err(CudaError::InvalidValue);
        }
        if process == u64::from(std::process::id()) {
            // Its own memory is not another process's.
            return Err(CudaError::InvalidContext);
        }
        let part = Part {
            allocation: AllocationId(number),
            within,
            bytes,
            of_pool: false,
        };
        self.open_part(driver, part)
    }

    /// Maps memory of another process, once for all its parts.
    pub(crate) fn open_part(&mut self, driver: &Driver, part: Part) -> Answer<CUdeviceptr> {
        let context = current_handle()?;
        self.current()?;
        let Part {
            allocation,
            within,
            bytes,
            of_pool,
        } = part;
        if let Some(open) = self.opened.0.get_mut(&allocation) {
            open.count += 1;
            return Ok(open.base + within);
        }
        let opened = driver.request(&Request::Open { allocation });
        let Reply::Opened {
            card,
            offset,
            bytes: whole,
            ..
        } = opened.map_err(|_| CudaError::InvalidValue)?
        else {
            return Err(CudaError::Unknown);
        };
        let device = driver.devices().iter().find(|device| device.card == card);
        let Some(device) = device else {
            driver.request(&Request::Release { allocation })?;
            return Err(CudaError::InvalidDevice);
        };
        let mapping = Mapping::of_memory(&device.memory, offset, whole)?;
        // What a handle is about ends here; the rest of the block is other memory. Parts of a pool
        // share what they lie in.
        let length = match of_pool {
            true => whole,
            false => within.saturating_add(bytes).min(whole),
        };
        let kind = RangeKind::Opened {
            context,
            allocation,
        };
        let base = self.addresses.insert(mapping, length, kind);
        let open = Open {
            base,
            count: 1,
            of_pool,
        };
        self.opened.0.insert(allocation, open);
        Ok(base + within)
    }

    /// Gives back memory of another process's pool; nothing else is freed here.
    pub(crate) fn free_opened(&mut self, driver: &Driver, address: CUdeviceptr) -> Answer {
        let (base, _) = self
            .addresses
            .bounds(address)
            .ok_or(CudaError::InvalidValue)?;
        match self.opened.at(base) {
            Some((_, open)) if open.of_pool => self.close_shared(driver, address),
            _ => Err(CudaError::InvalidValue),
        }
    }

    /// Closes what was opened in a context that is destroyed.
    pub(crate) fn forget_opened(&mut self, driver: &Driver, context: CUcontext) -> Answer {
        let addresses = &self.addresses;
        let of_context = |open: &Open| match addresses.bounds(open.base) {
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

    fn close_shared(&mut self, driver: &Driver, address: CUdeviceptr) -> Answer {
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

fn open(address: Out<CUdeviceptr>, handle: CUipcHandle, flags: c_uint) -> Answer {
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
