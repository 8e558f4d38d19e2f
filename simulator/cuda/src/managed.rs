//! Hints about managed memory, which lives on the host. Hints are validated and have no effect.

use std::ffi::{c_int, c_uint};

use crate::abi::{CudaResult, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::operation::{Operation, enqueue};
use crate::types::{CUdeviceptr, CUmemLocation, CUstream};

/// `CU_DEVICE_CPU`
const HOST: c_int = -1;

/// Errors unless the range is managed memory and the location valid.
fn check(address: CUdeviceptr, bytes: usize, location: CUmemLocation) -> CudaResult {
    let driver = driver()?;
    if location.kind == CUmemLocation::DEVICE && location.id != HOST {
        driver.device(location.id)?;
    }
    let state = driver.state();
    let (start, size, kind) = state
        .allocation_at(address)
        .ok_or(CudaError::InvalidValue)?;
    let end = (address - start).checked_add(bytes as u64);
    match kind.is_managed() && bytes > 0 && end.is_some_and(|end| end <= size) {
        true => Ok(()),
        false => Err(CudaError::InvalidValue),
    }
}

fn device(id: c_int) -> CUmemLocation {
    CUmemLocation {
        kind: CUmemLocation::DEVICE,
        id,
    }
}

fn prefetch(address: CUdeviceptr, bytes: usize, to: CUmemLocation, stream: CUstream) -> CudaResult {
    check(address, bytes, to)?;
    enqueue(stream, |_, _, _| Ok(Operation::Empty)).map(drop)
}

/// `CU_MEM_ADVISE_SET_READ_MOSTLY` to `_UNSET_ACCESSED_BY`
const ADVICE: std::ops::RangeInclusive<c_uint> = 1..=6;

fn advise(address: CUdeviceptr, bytes: usize, advice: c_uint, of: CUmemLocation) -> CudaResult {
    if !ADVICE.contains(&advice) {
        return Err(CudaError::InvalidValue);
    }
    check(address, bytes, of)
}

entry_points! {
    "cuMemPrefetchAsync" 8000 fn cuMemPrefetchAsync(address: CUdeviceptr, bytes: usize, to: c_int, stream: CUstream) ptsz(stream) cuMemPrefetchAsync_ptsz { prefetch(address, bytes, device(to), stream) }
    "cuMemPrefetchAsync" 12020 fn cuMemPrefetchAsync_v2(address: CUdeviceptr, bytes: usize, to: CUmemLocation, flags: c_uint, stream: CUstream) ptsz(stream) cuMemPrefetchAsync_v2_ptsz {
        if flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        prefetch(address, bytes, to, stream)
    }

    "cuMemAdvise" 8000 fn cuMemAdvise(address: CUdeviceptr, bytes: usize, advice: c_uint, of: c_int) { advise(address, bytes, advice, device(of)) }
    "cuMemAdvise" 12020 fn cuMemAdvise_v2(address: CUdeviceptr, bytes: usize, advice: c_uint, of: CUmemLocation) { advise(address, bytes, advice, of) }

    "cuStreamAttachMemAsync" 6000 fn cuStreamAttachMemAsync(stream: CUstream, address: CUdeviceptr, _bytes: usize, flags: c_uint) ptsz(stream) cuStreamAttachMemAsync_ptsz {
        if !matches!(flags, 1 | 2 | 4) {
            return Err(CudaError::InvalidValue);
        }
        check(address, 1, device(HOST))?;
        enqueue(stream, |_, _, _| Ok(Operation::Empty)).map(drop)
    }
}
