//! Batches of copies, and copies with attributes.
//!
//! CUDA leaves the order within a batch undefined; here copies execute in list order. Attributes
//! (location hints, source access order) are validated and have no effect.

use std::ffi::c_ulonglong;

use crate::abi::{CudaResult, In, Out, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::operation::{Operation, enqueue};
use crate::types::{
    CUdeviceptr, CUmemcpy3D, CUmemcpy3DBatchOp, CUmemcpy3DOperand, CUmemcpy3DSide,
    CUmemcpyAttributes, CUstream, MemoryType,
};

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM` to `_ANY`
const ACCESS_ORDERS: std::ops::RangeInclusive<std::ffi::c_uint> = 1..=3;

impl CUmemcpyAttributes {
    fn check(&self) -> CudaResult {
        match ACCESS_ORDERS.contains(&self.access_order) {
            true => Ok(()),
            false => Err(CudaError::InvalidValue),
        }
    }
}

impl CUmemcpy3DOperand {
    /// Converts to a side of a copy; `element` is the element size in bytes.
    fn side(&self, element: usize) -> CudaResult<CUmemcpy3DSide> {
        let bytes = |elements: u64| {
            let elements = usize::try_from(elements).ok();
            let bytes = elements.and_then(|elements| elements.checked_mul(element));
            bytes.ok_or(CudaError::InvalidValue)
        };
        let size = |number: u64| usize::try_from(number).map_err(|_| CudaError::InvalidValue);
        match self.kind {
            Self::POINTER => Ok(CUmemcpy3DSide {
                pitch: bytes(self.place[1])?,
                height: size(self.place[2])?,
                ..CUmemcpy3DSide::linear(MemoryType::UNIFIED, self.place[0])
            }),
            Self::ARRAY => Ok(CUmemcpy3DSide {
                x: bytes(self.place[1])?,
                y: size(self.place[2])?,
                z: size(self.place[3])?,
                array: self.array()?,
                ..CUmemcpy3DSide::linear(MemoryType::ARRAY, 0)
            }),
            _ => Err(CudaError::InvalidValue),
        }
    }
}

impl CUmemcpy3DBatchOp {
    /// Converts to a copy. Extents and offsets are in elements if an array takes part.
    fn copy(&self) -> CudaResult<CUmemcpy3D> {
        if !ACCESS_ORDERS.contains(&self.access_order) || self.flags & !1 != 0 {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let state = driver.state();
        let mut element = None;
        for operand in [&self.from, &self.to] {
            if operand.kind == CUmemcpy3DOperand::ARRAY {
                let bytes = state.arrays.get(operand.array()?)?.element_bytes();
                let bytes = bytes.ok_or(CudaError::NotSupported)?;
                if element.replace(bytes).is_some_and(|other| other != bytes) {
                    return Err(CudaError::InvalidValue);
                }
            }
        }
        let element = element.unwrap_or(1);
        let [width, height, depth] = self.extent;
        Ok(CUmemcpy3D {
            from: self.from.side(element)?,
            to: self.to.side(element)?,
            width: width.checked_mul(element).ok_or(CudaError::InvalidValue)?,
            height,
            depth,
        })
    }
}

/// Error of a batch, and the index of the failing copy if there is one.
struct BatchError {
    error: CudaError,
    index: Option<usize>,
}

impl From<CudaError> for BatchError {
    fn from(error: CudaError) -> Self {
        Self { error, index: None }
    }
}

/// Submits copies to a stream in order.
fn run(
    count: usize,
    stream: CUstream,
    copy: impl Fn(usize) -> CudaResult<CUmemcpy3D>,
) -> Result<(), BatchError> {
    // Batches are not allowed on the legacy default stream.
    if matches!(stream, CUstream::NULL | CUstream::LEGACY) || count == 0 {
        return Err(CudaError::InvalidValue.into());
    }
    let at_index = |index| {
        move |error| BatchError {
            error,
            index: Some(index),
        }
    };
    let copies: Vec<CUmemcpy3D> = (0..count)
        .map(|index| copy(index).map_err(at_index(index)))
        .collect::<Result<_, BatchError>>()?;
    for (index, copy) in copies.into_iter().enumerate() {
        enqueue(stream, |_, _, _| Ok(Operation::Copy(copy))).map_err(at_index(index))?;
    }
    Ok(())
}

/// Reports the failing copy if the function has an output for it.
fn report(result: Result<(), BatchError>, failed: Out<usize>) -> CudaResult {
    result.map_err(|failure| {
        failed.set_if_not_null(failure.index.unwrap_or(usize::MAX));
        failure.error
    })
}

/// Arrays of equal length: destinations, sources, sizes.
#[derive(Clone, Copy)]
struct CopyLists {
    to: In<CUdeviceptr>,
    from: In<CUdeviceptr>,
    sizes: In<usize>,
    count: usize,
}

/// Attributes, and the first copy that each applies to.
#[derive(Clone, Copy)]
struct Attributes {
    values: In<CUmemcpyAttributes>,
    starts: In<usize>,
    count: usize,
}

impl Attributes {
    /// Errors unless the attributes cover all copies of a batch in order.
    fn check(self, copies: usize) -> CudaResult {
        if self.count == 0 || self.count > copies {
            return Err(CudaError::InvalidValue);
        }
        let starts = self.starts.list(self.count)?;
        let rises = starts.is_sorted_by(|before, after| before < after);
        if starts.first() != Some(&0) || !rises || starts.last().is_none_or(|at| *at >= copies) {
            return Err(CudaError::InvalidValue);
        }
        let values = self.values.list(self.count)?;
        values.iter().try_for_each(CUmemcpyAttributes::check)
    }
}

fn linear(lists: CopyLists, attributes: Attributes, stream: CUstream) -> Result<(), BatchError> {
    attributes.check(lists.count)?;
    run(lists.count, stream, |index| {
        let to = CUmemcpy3DSide::linear(MemoryType::UNIFIED, lists.to.element(index)?);
        let from = CUmemcpy3DSide::linear(MemoryType::UNIFIED, lists.from.element(index)?);
        match lists.sizes.element(index)? {
            0 => Err(CudaError::InvalidValue),
            bytes => Ok(CUmemcpy3D::linear(to, from, bytes)),
        }
    })
}

fn shaped(
    count: usize,
    copies: In<CUmemcpy3DBatchOp>,
    flags: c_ulonglong,
    stream: CUstream,
) -> Result<(), BatchError> {
    if flags != 0 {
        return Err(CudaError::InvalidValue.into());
    }
    run(count, stream, |index| copies.element(index)?.copy())
}

entry_points! {
    "cuMemcpyBatchAsync" 12080 fn cuMemcpyBatchAsync(
        to: In<CUdeviceptr>, from: In<CUdeviceptr>, sizes: In<usize>, count: usize,
        values: In<CUmemcpyAttributes>, starts: In<usize>, attributes: usize, failed: Out<usize>, stream: CUstream,
    ) ptsz(stream) cuMemcpyBatchAsync_ptsz {
        let attributes = Attributes { values, starts, count: attributes };
        report(linear(CopyLists { to, from, sizes, count }, attributes, stream), failed)
    }
    "cuMemcpyBatchAsync" 13000 fn cuMemcpyBatchAsync_v2(
        to: In<CUdeviceptr>, from: In<CUdeviceptr>, sizes: In<usize>, count: usize,
        values: In<CUmemcpyAttributes>, starts: In<usize>, attributes: usize, stream: CUstream,
    ) ptsz(stream) cuMemcpyBatchAsync_v2_ptsz {
        let attributes = Attributes { values, starts, count: attributes };
        report(linear(CopyLists { to, from, sizes, count }, attributes, stream), Out::NULL)
    }

    "cuMemcpy3DBatchAsync" 12080 fn cuMemcpy3DBatchAsync(count: usize, copies: In<CUmemcpy3DBatchOp>, failed: Out<usize>, flags: c_ulonglong, stream: CUstream) ptsz(stream) cuMemcpy3DBatchAsync_ptsz {
        report(shaped(count, copies, flags, stream), failed)
    }
    "cuMemcpy3DBatchAsync" 13000 fn cuMemcpy3DBatchAsync_v2(count: usize, copies: In<CUmemcpy3DBatchOp>, flags: c_ulonglong, stream: CUstream) ptsz(stream) cuMemcpy3DBatchAsync_v2_ptsz {
        report(shaped(count, copies, flags, stream), Out::NULL)
    }

    "cuMemcpyWithAttributesAsync" 13020 fn cuMemcpyWithAttributesAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, attributes: In<CUmemcpyAttributes>, stream: CUstream) ptsz(stream) cuMemcpyWithAttributesAsync_ptsz {
        attributes.get()?.check()?;
        let to = CUmemcpy3DSide::linear(MemoryType::UNIFIED, to);
        let from = CUmemcpy3DSide::linear(MemoryType::UNIFIED, from);
        super::copy(CUmemcpy3D::linear(to, from, bytes), stream, super::Completion::Queued)
    }
    "cuMemcpy3DWithAttributesAsync" 13020 fn cuMemcpy3DWithAttributesAsync(copy: In<CUmemcpy3DBatchOp>, flags: c_ulonglong, stream: CUstream) ptsz(stream) cuMemcpy3DWithAttributesAsync_ptsz {
        if flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        super::copy(copy.get()?.copy()?, stream, super::Completion::Queued)
    }
}
