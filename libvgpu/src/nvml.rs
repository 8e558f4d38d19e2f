//! Types and numbers of NVML that the hooks use. Names as in `nvml.h`.

#![expect(non_camel_case_types, reason = "names are those of nvml.h")]

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};
use core::mem::{offset_of, size_of};

pub(crate) type nvmlReturn_t = c_int;
pub(crate) type nvmlDevice_t = *mut c_void;

pub(crate) const NVML_SUCCESS: nvmlReturn_t = 0;
pub(crate) const NVML_ERROR_LIBRARY_NOT_FOUND: nvmlReturn_t = 12;

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
pub(crate) const UUID_BUFFER_SIZE: c_uint = 96;

#[repr(C)]
pub(crate) struct nvmlMemory_t {
    pub(crate) total: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

#[repr(C)]
pub(crate) struct nvmlMemory_v2_t {
    pub(crate) version: c_uint,
    pub(crate) total: c_ulonglong,
    pub(crate) reserved: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

const _: () = {
    assert!(size_of::<nvmlMemory_t>() == 24);
    assert!(size_of::<nvmlMemory_v2_t>() == 40);
    assert!(offset_of!(nvmlMemory_v2_t, total) == 8);
};
