//! `cuMemAllocUnlisted`: an allocating entry point that no CUDA header has.
//!
//! Represents a function of a future driver. An interposer does not know the name, so tests use it
//! to allocate past libvgpu. Otherwise identical to `cuMemAlloc`.

use crate::abi::{Out, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::CUdeviceptr;

entry_points! {
    "cuMemAllocUnlisted" 13000 fn cuMemAllocUnlisted(address: Out<CUdeviceptr>, bytes: usize) {
        if address.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        address.set(driver.state().allocate(driver, bytes as u64)?)
    }
}
