//! Field values: those that count the traffic or load of all shares are not supported in a share, as the functions with the
//! same values. `nvml-fields.tsv` lists all fields.

use core::ffi::{c_int, c_uint};

use crate::driver_api::functions::nvmlDeviceGetFieldValues;
use crate::driver_api::nvml::{
    NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS, nvmlDevice_t, nvmlFieldValue_t, nvmlReturn_t,
};
use crate::hooks::nvml::is_shared;

/// Returns whether the field (`NVML_FI_DEV_*`) counts what all shares of a GPU do.
const fn is_of_all_shares(field: c_uint) -> bool {
    matches!(
        field,
        // NVLINK_BANDWIDTH_*: bytes by link.
        60..=73 | 120..=131
        // NVLINK_THROUGHPUT_*
        | 138..=141
        // PCIE_COUNT_TX_BYTES, PCIE_COUNT_RX_BYTES
        | 197 | 198
        // NVLINK_COUNT_XMIT_PACKETS to NVLINK_COUNT_RCV_BYTES
        | 201..=204
        // NVLINK_PLR_XMIT_BLOCKS, NVLINK_PLR_XMIT_RETRY_BLOCKS
        | 294 | 295
        // MMA_STALL_PERCENT
        | 297
    )
}

pub(crate) unsafe fn values(
    original: nvmlDeviceGetFieldValues::Function,
    device: nvmlDevice_t,
    count: c_int,
    values: *mut nvmlFieldValue_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, count, values) };
    if result != NVML_SUCCESS || values.is_null() || !is_shared(device) {
        return result;
    }
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: NVML has written that many.
        let place = unsafe { values.add(index) };
        // SAFETY: as above.
        let value = unsafe { &mut *place };
        if is_of_all_shares(value.fieldId) {
            value.nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
            value.value = 0;
        }
    }
    result
}
