//! Pool attributes.
//!
//! Attributes from `ALLOCATION_TYPE` on need CUDA 13.2.

use std::ffi::{c_int, c_uint};

use simulator_machine::description::DottedVersion;

use crate::abi::{Untyped, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::CUmemoryPool;

/// First CUDA version with the attributes that describe the pool.
const KNOWN_SINCE: DottedVersion = DottedVersion {
    major: 13,
    minor: 2,
};

/// `CU_MEMPOOL_ATTR_*`
mod attribute {
    use std::ffi::c_uint;

    pub(super) const REUSE_POLICIES: std::ops::RangeInclusive<c_uint> = 1..=3;
    pub(super) const RELEASE_THRESHOLD: c_uint = 4;
    pub(super) const RESERVED_CURRENT: c_uint = 5;
    pub(super) const RESERVED_HIGH: c_uint = 6;
    pub(super) const USED_CURRENT: c_uint = 7;
    pub(super) const USED_HIGH: c_uint = 8;
    pub(super) const ALLOCATION_TYPE: c_uint = 9;
    pub(super) const EXPORT_HANDLE_TYPES: c_uint = 10;
    pub(super) const LOCATION_ID: c_uint = 11;
    pub(super) const LOCATION_TYPE: c_uint = 12;
    pub(super) const MAX_POOL_SIZE: c_uint = 13;
}

entry_points! {
    "cuMemPoolGetAttribute" 11020 fn cuMemPoolGetAttribute(pool: CUmemoryPool, which: c_uint, value: Untyped) {
        let driver = driver()?;
        if which >= attribute::ALLOCATION_TYPE && driver.machine().cuda_version < KNOWN_SINCE {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        let pool = state.pools.get(pool)?;
        let number = match which {
            which if attribute::REUSE_POLICIES.contains(&which) => {
                return value.out::<c_int>().set(pool.policies.get(&which).copied().unwrap_or(1));
            }
            attribute::RELEASE_THRESHOLD => pool.threshold,
            attribute::RESERVED_CURRENT => pool.reserved(),
            attribute::RESERVED_HIGH => pool.reserved_high,
            attribute::USED_CURRENT => pool.used,
            attribute::USED_HIGH => pool.used_high,
            attribute::ALLOCATION_TYPE => return value.out().set(pool.location.allocation_type()),
            attribute::EXPORT_HANDLE_TYPES => return value.out().set(c_uint::from(pool.exportable)),
            attribute::LOCATION_ID => return value.out().set(pool.location.cuda_location().id),
            attribute::LOCATION_TYPE => return value.out().set(pool.location.cuda_location().kind),
            attribute::MAX_POOL_SIZE => pool.max_bytes.unwrap_or(0),
            _ => return Err(CudaError::InvalidValue),
        };
        value.out::<u64>().set(number)
    }

    "cuMemPoolSetAttribute" 11020 fn cuMemPoolSetAttribute(pool: CUmemoryPool, which: c_uint, value: Untyped) {
        let driver = driver()?;
        let mut state = driver.state();
        state.require_safe_in_capture()?;
        let pool = state.pools.get(pool)?;
        match which {
            which if attribute::REUSE_POLICIES.contains(&which) => {
                pool.policies.insert(which, value.input::<c_int>().get()?);
            }
            attribute::RELEASE_THRESHOLD => pool.threshold = value.input::<u64>().get()?,
            // High-water marks can only be reset.
            attribute::RESERVED_HIGH if value.input::<u64>().get()? == 0 => pool.reserved_high = pool.reserved(),
            attribute::USED_HIGH if value.input::<u64>().get()? == 0 => pool.used_high = pool.used,
            _ => return Err(CudaError::InvalidValue),
        }
        Ok(())
    }
}
