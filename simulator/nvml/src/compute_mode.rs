//! Compute mode: which processes may create contexts.

use nvml_wrapper_sys::bindings::{nvmlComputeMode_t, nvmlDevice_t};
use simulator_machine::protocol::{ComputeMode, Request};

use crate::abi::{Out, entry_points};
use crate::error::NvmlError;
use crate::handle::device;

/// `NVML_COMPUTEMODE_*`
const DEFAULT: nvmlComputeMode_t = 0;
const PROHIBITED: nvmlComputeMode_t = 2;
const EXCLUSIVE_PROCESS: nvmlComputeMode_t = 3;

entry_points! {
    fn nvmlDeviceGetComputeMode(handle: nvmlDevice_t, mode: Out<nvmlComputeMode_t>) {
        mode.set(match device(handle)?.state()?.compute_mode {
            ComputeMode::Default => DEFAULT,
            ComputeMode::Prohibited => PROHIBITED,
            ComputeMode::ExclusiveProcess => EXCLUSIVE_PROCESS,
        })
    }

    fn nvmlDeviceSetComputeMode(handle: nvmlDevice_t, mode: nvmlComputeMode_t) {
        let device = device(handle)?;
        let mode = match mode {
            DEFAULT => ComputeMode::Default,
            PROHIBITED => ComputeMode::Prohibited,
            EXCLUSIVE_PROCESS => ComputeMode::ExclusiveProcess,
            _ => return Err(NvmlError::InvalidArgument),
        };
        let gpu = device.gpu;
        device.library.request(&Request::SetComputeMode { gpu, mode })?;
        Ok(())
    }
}
