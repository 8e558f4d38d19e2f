//! Location of a pool's memory.

use std::ffi::{c_int, c_uint};

use crate::abi::CudaResult;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::types::{CUdevice, CUmemLocation};

/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `_MANAGED`
const PINNED: c_uint = 1;
const MANAGED: c_uint = 2;

/// `CU_MEM_LOCATION_TYPE_NONE`, `_HOST`, `_HOST_NUMA` and `_HOST_NUMA_CURRENT`
const NONE: c_uint = 0;
const HOST: c_uint = 2;
const HOST_NUMA: c_uint = 3;
const HOST_NUMA_CURRENT: c_uint = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PoolLocation {
    Device(CUdevice),
    /// Pinned host memory, optionally of a NUMA node.
    Host(Option<c_int>),
    /// Managed memory; the preferred location has no effect.
    Managed(c_uint, c_int),
}

impl PoolLocation {
    /// Converts a location and a `CUmemAllocationType`.
    pub(super) fn new(driver: &Driver, location: CUmemLocation, kind: c_uint) -> CudaResult<Self> {
        if location.kind == CUmemLocation::DEVICE {
            driver.device(location.id)?;
        }
        match (kind, location.kind) {
            (PINNED, CUmemLocation::DEVICE) => Ok(Self::Device(location.id)),
            (PINNED, HOST) => Ok(Self::Host(None)),
            (PINNED, HOST_NUMA | HOST_NUMA_CURRENT) => Ok(Self::Host(Some(location.id))),
            (MANAGED, NONE | HOST) => Ok(Self::Managed(location.kind, 0)),
            (MANAGED, CUmemLocation::DEVICE | HOST_NUMA) => {
                Ok(Self::Managed(location.kind, location.id))
            }
            _ => Err(CudaError::InvalidValue),
        }
    }

    pub(super) fn device(self) -> Option<CUdevice> {
        match self {
            Self::Device(device) => Some(device),
            Self::Host(_) | Self::Managed(..) => None,
        }
    }

    /// `CUmemAllocationType`
    pub(super) fn allocation_type(self) -> c_uint {
        match self {
            Self::Device(_) | Self::Host(_) => PINNED,
            Self::Managed(..) => MANAGED,
        }
    }

    /// `CUmemLocation`
    pub(super) fn cuda_location(self) -> CUmemLocation {
        let (kind, id) = match self {
            Self::Device(device) => (CUmemLocation::DEVICE, device),
            Self::Host(None) => (HOST, 0),
            Self::Host(Some(node)) => (HOST_NUMA, node),
            Self::Managed(kind, id) => (kind, id),
        };
        CUmemLocation { kind, id }
    }
}
