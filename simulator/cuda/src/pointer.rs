//! `cuPointerGetAttribute`.

use std::ffi::{c_int, c_uint};

use crate::State;
use crate::abi::{CudaResult, Untyped, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::memory::RangeKind;
use crate::types::{CUcontext, CUdevice, CUdeviceptr, MemoryType};

/// `CU_POINTER_ATTRIBUTE_*`
mod attribute {
    use std::ffi::c_uint;

    pub(super) const CONTEXT: c_uint = 1;
    pub(super) const MEMORY_TYPE: c_uint = 2;
    pub(super) const DEVICE_POINTER: c_uint = 3;
    pub(super) const HOST_POINTER: c_uint = 4;
    pub(super) const SYNC_MEMOPS: c_uint = 6;
    pub(super) const BUFFER_ID: c_uint = 7;
    pub(super) const IS_MANAGED: c_uint = 8;
    pub(super) const DEVICE_ORDINAL: c_uint = 9;
    pub(super) const IS_LEGACY_CUDA_IPC_CAPABLE: c_uint = 10;
    pub(super) const RANGE_START_ADDR: c_uint = 11;
    pub(super) const RANGE_SIZE: c_uint = 12;
    pub(super) const MAPPED: c_uint = 13;
    pub(super) const MEMPOOL_HANDLE: c_uint = 17;
}

#[derive(Clone, Copy, Debug)]
struct PointerInfo {
    start: u64,
    bytes: u64,
    kind: RangeKind,
    context: CUcontext,
    device: CUdevice,
}

impl State {
    fn pointer_info(&self, address: CUdeviceptr) -> CudaResult<PointerInfo> {
        let found = self.allocation_at(address);
        let (start, bytes, kind) = found.ok_or(CudaError::InvalidValue)?;
        let context = kind.context();
        let device = match self.contexts.get(&context) {
            Some(context) => context.device,
            None => self.virtual_memory.device_of(address).unwrap_or(0),
        };
        Ok(PointerInfo {
            start,
            bytes,
            kind,
            context,
            device,
        })
    }
}

impl PointerInfo {
    fn is_on_gpu(&self) -> bool {
        !matches!(
            self.kind,
            RangeKind::Host { .. } | RangeKind::Managed { .. } | RangeKind::HostPool { .. }
        )
    }

    fn is_on_host(&self) -> bool {
        !self.is_on_gpu()
    }

    fn write(&self, which: c_uint, address: CUdeviceptr, data: Untyped) -> CudaResult {
        match which {
            attribute::CONTEXT => data.out().set(self.context),
            attribute::MEMORY_TYPE => {
                data.out()
                    .set(match self.is_on_gpu() || self.kind.is_managed() {
                        true => MemoryType::DEVICE,
                        false => MemoryType::HOST,
                    })
            }
            attribute::DEVICE_POINTER => data.out().set(address),
            attribute::HOST_POINTER if self.is_on_host() => data.out().set(address),
            attribute::SYNC_MEMOPS => data.out::<c_int>().set(0),
            // Allocation addresses are unique at any time.
            attribute::BUFFER_ID => data.out().set(self.start),
            attribute::IS_MANAGED => data.out::<u8>().set(self.kind.is_managed().into()),
            attribute::DEVICE_ORDINAL => data.out().set(self.device),
            attribute::IS_LEGACY_CUDA_IPC_CAPABLE => {
                let capable =
                    matches!(self.kind, RangeKind::Device { .. } | RangeKind::Heap { .. });
                data.out::<u8>().set(capable.into())
            }
            attribute::RANGE_START_ADDR => data.out().set(self.start),
            attribute::RANGE_SIZE => data.out().set(self.bytes),
            attribute::MAPPED => data.out::<u8>().set(1),
            attribute::MEMPOOL_HANDLE => match self.kind {
                RangeKind::Pool { pool, .. } | RangeKind::HostPool { pool, .. } => {
                    data.out().set(pool)
                }
                _ => data.out::<u64>().set(0),
            },
            _ => Err(CudaError::InvalidValue),
        }
    }
}

entry_points! {
    "cuPointerGetAttribute" 4000 fn cuPointerGetAttribute(data: Untyped, which: c_uint, address: CUdeviceptr) {
        driver()?.state().pointer_info(address)?.write(which, address, data)
    }
}
