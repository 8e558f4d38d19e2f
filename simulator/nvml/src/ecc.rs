//! ECC: enabled if the model has it, without error counts. Rows are remapped since Ampere, pages are retired before.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEccCounterType_t, nvmlEnableState_t, nvmlMemoryErrorType_t,
    nvmlMemoryLocation_t,
};

use simulator_machine::description::Architecture;

use crate::abi::{NvmlResult, Out, entry_points};
use crate::error::NvmlError;
use crate::handle::device;

entry_points! {
    fn nvmlDeviceGetEccMode(handle: nvmlDevice_t, current: Out<nvmlEnableState_t>, pending: Out<nvmlEnableState_t>) {
        require(handle)?;
        current.set(1)?;
        pending.set(1)
    }

    fn nvmlDeviceGetDefaultEccMode(handle: nvmlDevice_t, mode: Out<nvmlEnableState_t>) {
        require(handle)?;
        mode.set(1)
    }

    fn nvmlDeviceGetTotalEccErrors(handle: nvmlDevice_t, _kind: nvmlMemoryErrorType_t, _counter: nvmlEccCounterType_t, count: Out<c_ulonglong>) {
        require(handle)?;
        count.set(0)
    }

    fn nvmlDeviceGetMemoryErrorCounter(handle: nvmlDevice_t, _kind: nvmlMemoryErrorType_t, _counter: nvmlEccCounterType_t, _location: nvmlMemoryLocation_t, count: Out<c_ulonglong>) {
        require(handle)?;
        count.set(0)
    }

    fn nvmlDeviceGetRemappedRows(handle: nvmlDevice_t, correctable: Out<c_uint>, uncorrectable: Out<c_uint>, pending: Out<c_uint>, failed: Out<c_uint>) {
        require(handle)?;
        let device = device(handle)?;
        if device.model()?.architecture < Architecture::Ampere {
            return Err(NvmlError::NotSupported);
        }
        let state = device.state()?;
        correctable.set(0)?;
        uncorrectable.set((state.repair_pending || state.repair_failed).into())?;
        pending.set(state.repair_pending.into())?;
        failed.set(state.repair_failed.into())
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(handle: nvmlDevice_t, pending: Out<nvmlEnableState_t>) {
        require(handle)?;
        let device = device(handle)?;
        if device.model()?.architecture >= Architecture::Ampere {
            return Err(NvmlError::NotSupported);
        }
        pending.set(device.state()?.repair_pending.into())
    }
}

fn require(handle: nvmlDevice_t) -> NvmlResult {
    let device = device(handle)?;
    match device.model()?.ecc {
        // A GPU that is lost has no counts.
        true => device.state().map(drop),
        false => Err(NvmlError::NotSupported),
    }
}
