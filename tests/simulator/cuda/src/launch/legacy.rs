//! Launches as they were before CUDA 4: the function remembers its block and its parameters.

use std::ffi::{c_float, c_int, c_uint, c_void};

use super::{Blocks, Parameters, Shape, launch};
use crate::abi::{Answer, In, Untyped, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::{CUfunction, CUstream};

/// What a function remembers.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    block: [c_uint; 3],
    shared_bytes: c_uint,
    parameters: Vec<u8>,
}

impl Default for Prepared {
    fn default() -> Self {
        Self {
            block: [1; 3],
            shared_bytes: 0,
            parameters: Vec::new(),
        }
    }
}

impl Prepared {
    fn set(&mut self, offset: c_int, bytes: &[u8]) -> Answer {
        let offset = usize::try_from(offset).map_err(|_| CudaError::InvalidValue)?;
        let end = offset.checked_add(bytes.len());
        let slot = end.and_then(|end| self.parameters.get_mut(offset..end));
        slot.ok_or(CudaError::InvalidValue)?.copy_from_slice(bytes);
        Ok(())
    }
}

/// `CU_LAUNCH_PARAM_*`
const END: usize = 0;
const BUFFER_POINTER: usize = 1;

fn prepare(function: CUfunction, change: impl FnOnce(&mut Prepared) -> Answer) -> Answer {
    let mut state = driver()?.state();
    change(&mut state.modules.function_mut(function)?.prepared)
}

fn launch_grid(function: CUfunction, width: c_int, height: c_int, stream: CUstream) -> Answer {
    let side = |side: c_int| c_uint::try_from(side).map_err(|_| CudaError::InvalidValue);
    let prepared = driver()?
        .state()
        .modules
        .function(function)?
        .prepared
        .clone();
    let shape = Shape {
        grid: [side(width)?, side(height)?, 1],
        block: prepared.block,
    };
    let buffer: *const c_void = prepared.parameters.as_ptr().cast();
    let end = std::ptr::without_provenance(END);
    let extra = [std::ptr::without_provenance(BUFFER_POINTER), buffer, end];
    let parameters = Parameters {
        pointers: In::NULL,
        extra: In::at(extra.as_ptr()),
    };
    launch(
        function,
        shape,
        Blocks::Apart,
        prepared.shared_bytes,
        stream,
        parameters,
    )
}

entry_points! {
    "cuFuncSetBlockShape" 2000 fn cuFuncSetBlockShape(function: CUfunction, x: c_int, y: c_int, z: c_int) {
        let side = |side: c_int| c_uint::try_from(side).map_err(|_| CudaError::InvalidValue);
        let block = [side(x)?, side(y)?, side(z)?];
        prepare(function, |prepared| {
            prepared.block = block;
            Ok(())
        })
    }

    "cuFuncSetSharedSize" 2000 fn cuFuncSetSharedSize(function: CUfunction, bytes: c_uint) {
        prepare(function, |prepared| {
            prepared.shared_bytes = bytes;
            Ok(())
        })
    }

    "cuParamSetSize" 2000 fn cuParamSetSize(function: CUfunction, bytes: c_uint) {
        const MOST: usize = 32 << 10;
        let bytes = bytes as usize;
        prepare(function, |prepared| match bytes {
            0..=MOST => {
                prepared.parameters.resize(bytes, 0);
                Ok(())
            }
            _ => Err(CudaError::InvalidValue),
        })
    }

    "cuParamSeti" 2000 fn cuParamSeti(function: CUfunction, offset: c_int, value: c_uint) { prepare(function, |prepared| prepared.set(offset, &value.to_ne_bytes())) }
    "cuParamSetf" 2000 fn cuParamSetf(function: CUfunction, offset: c_int, value: c_float) { prepare(function, |prepared| prepared.set(offset, &value.to_ne_bytes())) }
    "cuParamSetv" 2000 fn cuParamSetv(function: CUfunction, offset: c_int, value: Untyped, bytes: c_uint) {
        let value = value.input::<u8>().list(bytes as usize)?;
        prepare(function, |prepared| prepared.set(offset, &value))
    }

    // Of the time before streams per thread: cuda.h knows no other forms of these.
    "cuLaunch" 2000 fn cuLaunch(function: CUfunction) { launch_grid(function, 1, 1, CUstream::LEGACY) }
    "cuLaunchGrid" 2000 fn cuLaunchGrid(function: CUfunction, width: c_int, height: c_int) { launch_grid(function, width, height, CUstream::LEGACY) }
    "cuLaunchGridAsync" 2000 fn cuLaunchGridAsync(function: CUfunction, width: c_int, height: c_int, stream: CUstream) { launch_grid(function, width, height, stream) }
}
