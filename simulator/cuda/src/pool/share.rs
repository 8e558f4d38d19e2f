//! Pools and their memory in other processes.
//!
//! A pool descriptor only names the GPU. Each imported pointer holds its memory until it is freed.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::os::fd::{BorrowedFd, IntoRawFd};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, pwrite};
use simulator_machine::protocol::{AllocationId, GpuIndex, Request};

use super::{Pool, PoolLocation};
use crate::State;
use crate::abi::{CudaResult, In, Out, Untyped, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::ipc::AllocationPart;
use crate::memory::RangeKind;
use crate::types::{CUdevice, CUdeviceptr, CUipcHandle, CUmemoryPool};
use crate::virtual_memory::{FILE_DESCRIPTOR, borrow_descriptor};

/// Identify pool descriptors and pool pointers.
const POOL: u64 = 0x6c6f_6f70_6375_6461;
const POINTER: u64 = 0x7274_706c_6375_6461;

fn export(gpu: GpuIndex) -> CudaResult<std::os::fd::OwnedFd> {
    let file = memfd_create("simulated-gpu-pool", MemfdFlags::CLOEXEC)?;
    let handle = CUipcHandle::of([POOL, u64::from(gpu.0)]);
    pwrite(&file, &handle.bytes, 0)?;
    Ok(file)
}

/// Returns the GPU of a pool descriptor.
fn read(descriptor: BorrowedFd<'_>) -> CudaResult<GpuIndex> {
    let mut bytes = [0; 64];
    let length = pread(descriptor, &mut bytes, 0).map_err(|_| CudaError::InvalidValue)?;
    let [magic, gpu] = CUipcHandle { bytes }.words();
    match u32::try_from(gpu) {
        Ok(gpu) if length == bytes.len() && magic == POOL => Ok(GpuIndex(gpu)),
        _ => Err(CudaError::InvalidValue),
    }
}

impl State {
    fn import_pool(&mut self, driver: &Driver, gpu: GpuIndex) -> CudaResult<CUmemoryPool> {
        let position = driver.devices().iter().position(|one| one.gpu == gpu);
        let device = position.and_then(|index| CUdevice::try_from(index).ok());
        let device = device.ok_or(CudaError::InvalidDevice)?;
        let mut pool = Pool::new(PoolLocation::Device(device), None);
        pool.imported = true;
        let handle = CUmemoryPool(self.handle());
        self.pools.pools.insert(handle, pool);
        Ok(handle)
    }

    fn export_pointer(&mut self, driver: &Driver, address: CUdeviceptr) -> CudaResult<CUipcHandle> {
        let found = self.allocation_at(address);
        let (start, bytes, kind) = found.ok_or(CudaError::InvalidValue)?;
        let RangeKind::Pool {
            allocation, pool, ..
        } = kind
        else {
            return Err(CudaError::InvalidValue);
        };
        if !self.pools.get(pool)?.exportable || start != address {
            return Err(CudaError::InvalidValue);
        }
        let (base, _) = self
            .addresses
            .bounds(address)
            .ok_or(CudaError::InvalidValue)?;
        driver.request(&Request::Share { allocation })?;
        Ok(CUipcHandle::of([
            POINTER,
            allocation.0,
            start - base,
            bytes,
        ]))
    }

    fn import_pointer(
        &mut self,
        driver: &Driver,
        pool: CUmemoryPool,
        data: &CUipcHandle,
    ) -> CudaResult<CUdeviceptr> {
        let [magic, allocation, within, bytes] = data.words();
        if magic != POINTER || !self.pools.get(pool)?.imported {
            return Err(CudaError::InvalidValue);
        }
        let part = AllocationPart {
            allocation: AllocationId(allocation),
            within,
            bytes,
            is_pool_memory: true,
        };
        self.open_part(driver, part)
    }
}

entry_points! {
    "cuMemPoolExportToShareableHandle" 11020 fn cuMemPoolExportToShareableHandle(shareable: Untyped, pool: CUmemoryPool, kind: c_uint, flags: c_ulonglong) {
        let driver = driver()?;
        let mut state = driver.state();
        let pool = state.pools.get(pool)?;
        if kind != FILE_DESCRIPTOR || flags != 0 || !pool.exportable {
            return Err(CudaError::InvalidValue);
        }
        let device = pool.location.device().ok_or(CudaError::InvalidValue)?;
        let gpu = driver.device(device)?.gpu;
        let shareable = shareable.out::<c_int>();
        if shareable.is_null() {
            return Err(CudaError::InvalidValue);
        }
        shareable.set(export(gpu)?.into_raw_fd())
    }

    "cuMemPoolImportFromShareableHandle" 11020 fn cuMemPoolImportFromShareableHandle(pool: Out<CUmemoryPool>, shareable: Untyped, kind: c_uint, flags: c_ulonglong) {
        if kind != FILE_DESCRIPTOR || flags != 0 || pool.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let gpu = read(borrow_descriptor(shareable.number())?)?;
        let driver = driver()?;
        pool.set(driver.state().import_pool(driver, gpu)?)
    }

    "cuMemPoolExportPointer" 11020 fn cuMemPoolExportPointer(data: Out<CUipcHandle>, address: CUdeviceptr) {
        let driver = driver()?;
        data.set(driver.state().export_pointer(driver, address)?)
    }

    "cuMemPoolImportPointer" 11020 fn cuMemPoolImportPointer(address: Out<CUdeviceptr>, pool: CUmemoryPool, data: In<CUipcHandle>) {
        let data = data.get()?;
        let driver = driver()?;
        address.set(driver.state().import_pointer(driver, pool, &data)?)
    }
}
