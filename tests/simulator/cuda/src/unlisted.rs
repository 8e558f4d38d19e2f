//! An allocating entry point that no CUDA header has.
//!
//! It stands for what a later driver may add: an interposer that knows the functions of today's
//! headers does not know this one, so tests show with it what happens to memory that is taken past
//! an interposer. Otherwise it is `cuMemAlloc`.

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
