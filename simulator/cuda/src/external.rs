//! External memory: memory exported as a file descriptor by a process or another API.
//!
//! A descriptor refers to physical memory of the virtual memory API. The external memory object
//! holds it; each buffer maps a part of it.

use std::collections::BTreeMap;
use std::os::fd::FromRawFd;

use simulator_machine::kernel::PAGE_BYTES;

use crate::State;
use crate::abi::{CudaResult, In, Out, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::memory::{Mapping, RangeKind};
use crate::types::{
    CUdeviceptr, CUexternalMemory, CUexternalMemoryBufferDesc, CUexternalMemoryHandleDesc,
};
use crate::virtual_memory::{Handle, borrow_descriptor};

/// `CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD`
const OPAQUE_FD: std::ffi::c_uint = 1;

/// External memory objects with their declared size in bytes.
#[derive(Debug, Default)]
pub(crate) struct ExternalMemories(BTreeMap<CUexternalMemory, (Handle, u64)>);

impl ExternalMemories {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        self.0.keys().map(|external| external.0)
    }
}

impl State {
    fn map_external(
        &mut self,
        driver: &Driver,
        external: CUexternalMemory,
        buffer: &CUexternalMemoryBufferDesc,
    ) -> CudaResult<CUdeviceptr> {
        let found = self.externals.0.get(&external).copied();
        let (handle, bytes) = found.ok_or(CudaError::InvalidHandle)?;
        let end = buffer.offset.checked_add(buffer.bytes);
        let fits = end.is_some_and(|end| end <= bytes);
        if !fits
            || buffer.bytes == 0
            || buffer.flags != 0
            || !buffer.offset.is_multiple_of(PAGE_BYTES)
        {
            return Err(CudaError::InvalidValue);
        }
        let context = crate::context::current_handle()?;
        let (file, start) = self.virtual_memory.backing_file(driver, handle)?;
        let mapping = Mapping::of_file(
            file,
            start + buffer.offset,
            buffer.bytes.next_multiple_of(PAGE_BYTES),
        )?;
        let kind = RangeKind::External { context };
        Ok(self.addresses.insert(mapping, buffer.bytes, kind))
    }
}

entry_points! {
    // The object takes ownership of the descriptor.
    "cuImportExternalMemory" 10000 fn cuImportExternalMemory(external: Out<CUexternalMemory>, description: In<CUexternalMemoryHandleDesc>) {
        let description = description.get()?;
        if external.is_null() || description.bytes == 0 {
            return Err(CudaError::InvalidValue);
        }
        if description.kind != OPAQUE_FD {
            return Err(CudaError::NotSupported);
        }
        crate::context::current_handle()?;
        let number = usize::try_from(description.descriptor).map_err(|_| CudaError::InvalidValue)?;
        let descriptor = borrow_descriptor(number)?;
        let driver = driver()?;
        let mut state = driver.state();
        let handle = state.import(driver, descriptor)?;
        let (_, size) = state.virtual_memory.device_and_size(state.virtual_memory.allocation(handle)?)?;
        if description.bytes > size {
            state.release(driver, handle)?;
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: open, and owned by the driver after a successful import.
        drop(unsafe { std::os::fd::OwnedFd::from_raw_fd(description.descriptor) });
        let made = CUexternalMemory(state.handle());
        state.externals.0.insert(made, (handle, description.bytes));
        external.set(made)
    }

    "cuExternalMemoryGetMappedBuffer" 10000 fn cuExternalMemoryGetMappedBuffer(address: Out<CUdeviceptr>, external: CUexternalMemory, buffer: In<CUexternalMemoryBufferDesc>) {
        let buffer = buffer.get()?;
        if address.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        address.set(driver.state().map_external(driver, external, &buffer)?)
    }

    // The program frees the buffers; they do not hold the memory.
    "cuDestroyExternalMemory" 10000 fn cuDestroyExternalMemory(external: CUexternalMemory) {
        let driver = driver()?;
        let mut state = driver.state();
        let (handle, _) = state.externals.0.remove(&external).ok_or(CudaError::InvalidHandle)?;
        state.release(driver, handle)
    }
}
