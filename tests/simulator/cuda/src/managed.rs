//! Hints about managed memory. It lives on the host here and stays there: what a hint asks for is
//! checked, and nothing follows from it.

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::abi::{Answer, In, Untyped, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::memory::RangeKind;
use crate::operation::{Operation, enqueue};
use crate::types::{CUdeviceptr, CUmemLocation, CUstream};

/// `CU_DEVICE_CPU`
const HOST: c_int = -1;

/// Refuses what is not managed memory, or no place for it.
fn check(address: CUdeviceptr, bytes: usize, location: CUmemLocation) -> Answer {
    let driver = driver()?;
    if location.kind == CUmemLocation::DEVICE && location.id != HOST {
        driver.device(location.id)?;
    }
    let state = driver.state();
    let (start, size, kind) = state
        .allocation_at(address)
        .ok_or(CudaError::InvalidValue)?;
    let end = (address - start).checked_add(bytes as u64);
    match kind {
        RangeKind::Managed { .. }
        | RangeKind::HostPool {
            is_managed: true, ..
        } if bytes > 0 && end.is_some_and(|end| end <= size) => Ok(()),
        _ => Err(CudaError::InvalidValue),
    }
}

fn device(id: c_int) -> CUmemLocation {
    CUmemLocation {
        kind: CUmemLocation::DEVICE,
        id,
    }
}

fn prefetch(address: CUdeviceptr, bytes: usize, to: CUmemLocation, stream: CUstream) -> Answer {
    check(address, bytes, to)?;
    enqueue(stream, |_, _, _| Ok(Operation::Empty)).map(drop)
}

/// Ranges of managed memory that an operation is about.
#[derive(Clone, Copy)]
struct Ranges {
    addresses: In<CUdeviceptr>,
    sizes: In<usize>,
    count: usize,
}

/// Where ranges shall be: the locations, and the first range that each is for.
#[derive(Clone, Copy)]
struct Locations {
    locations: In<CUmemLocation>,
    starts: In<usize>,
    count: usize,
}

impl Locations {
    /// The location of each of `ranges` ranges.
    fn spread(self, ranges: usize) -> Answer<Vec<CUmemLocation>> {
        let starts = self.starts.list(self.count)?;
        let rises = starts.is_sorted_by(|before, after| before < after);
        if starts.first() != Some(&0) || !rises || starts.last().is_none_or(|at| *at >= ranges) {
            return Err(CudaError::InvalidValue);
        }
        let locations = self.locations.list(self.count)?;
        let of = |range: usize| starts.partition_point(|start| *start <= range) - 1;
        let at = |range| locations.get(of(range)).copied();
        (0..ranges)
            .map(|range| at(range).ok_or(CudaError::InvalidValue))
            .collect()
    }
}

/// Checks ranges and puts what is done with them, nothing, on a stream.
fn batch(ranges: Ranges, to: Option<Locations>, flags: c_ulonglong, stream: CUstream) -> Answer {
    if flags != 0 || ranges.count == 0 || matches!(stream, CUstream::NULL | CUstream::LEGACY) {
        return Err(CudaError::InvalidValue);
    }
    let anywhere = vec![device(HOST); ranges.count];
    let locations = to.map_or(Ok(anywhere), |to| to.spread(ranges.count))?;
    let addresses = ranges.addresses.list(ranges.count)?;
    let sizes = ranges.sizes.list(ranges.count)?;
    for ((address, bytes), location) in addresses.into_iter().zip(sizes).zip(locations) {
        check(address, bytes, location)?;
    }
    enqueue(stream, |_, _, _| Ok(Operation::Empty)).map(drop)
}

/// `CU_MEM_ADVISE_SET_READ_MOSTLY` to `_UNSET_ACCESSED_BY`
const ADVICE: std::ops::RangeInclusive<c_uint> = 1..=6;

fn advise(address: CUdeviceptr, bytes: usize, advice: c_uint, of: CUmemLocation) -> Answer {
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

    "cuMemPrefetchBatchAsync" 13000 fn cuMemPrefetchBatchAsync(
        addresses: In<CUdeviceptr>, sizes: In<usize>, count: usize,
        locations: In<CUmemLocation>, starts: In<usize>, located: usize, flags: c_ulonglong, stream: CUstream,
    ) ptsz(stream) cuMemPrefetchBatchAsync_ptsz {
        batch(Ranges { addresses, sizes, count }, Some(Locations { locations, starts, count: located }), flags, stream)
    }
    // What is discarded may still be read here.
    "cuMemDiscardBatchAsync" 13000 fn cuMemDiscardBatchAsync(addresses: In<CUdeviceptr>, sizes: In<usize>, count: usize, flags: c_ulonglong, stream: CUstream) ptsz(stream) cuMemDiscardBatchAsync_ptsz {
        batch(Ranges { addresses, sizes, count }, None, flags, stream)
    }
    "cuMemDiscardAndPrefetchBatchAsync" 13000 fn cuMemDiscardAndPrefetchBatchAsync(
        addresses: In<CUdeviceptr>, sizes: In<usize>, count: usize,
        locations: In<CUmemLocation>, starts: In<usize>, located: usize, flags: c_ulonglong, stream: CUstream,
    ) ptsz(stream) cuMemDiscardAndPrefetchBatchAsync_ptsz {
        batch(Ranges { addresses, sizes, count }, Some(Locations { locations, starts, count: located }), flags, stream)
    }

    "cuMemAdvise" 8000 fn cuMemAdvise(address: CUdeviceptr, bytes: usize, advice: c_uint, of: c_int) { advise(address, bytes, advice, device(of)) }
    "cuMemAdvise" 12020 fn cuMemAdvise_v2(address: CUdeviceptr, bytes: usize, advice: c_uint, of: CUmemLocation) { advise(address, bytes, advice, of) }

    // No hint is kept: read-mostly is 0, a preferred or last location the invalid device.
    "cuMemRangeGetAttribute" 8000 fn cuMemRangeGetAttribute(data: Untyped, bytes: usize, attribute: c_uint, address: CUdeviceptr, count: usize) {
        const READ_MOSTLY: c_uint = 1;
        const INVALID_DEVICE: c_int = -2;
        check(address, count, device(HOST))?;
        let value = if attribute == READ_MOSTLY { 0 } else { INVALID_DEVICE };
        data.out::<c_int>().set_all(std::iter::repeat_n(value, bytes / 4))
    }

    "cuStreamAttachMemAsync" 6000 fn cuStreamAttachMemAsync(stream: CUstream, address: CUdeviceptr, _bytes: usize, flags: c_uint) ptsz(stream) cuStreamAttachMemAsync_ptsz {
        if !matches!(flags, 1 | 2 | 4) {
            return Err(CudaError::InvalidValue);
        }
        check(address, 1, device(HOST))?;
        enqueue(stream, |_, _, _| Ok(Operation::Empty)).map(drop)
    }
}
