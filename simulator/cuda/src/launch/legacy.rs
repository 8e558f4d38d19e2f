//! Launch functions before CUDA 4: block shape is state of the function.

use std::ffi::{c_int, c_uint};

use super::{Blocks, Parameters, Shape, launch};
use crate::abi::{CudaResult, In, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::module::LegacyLaunchState;
use crate::types::{CUfunction, CUstream};

fn set_legacy(
    function: CUfunction,
    change: impl FnOnce(&mut LegacyLaunchState) -> CudaResult,
) -> CudaResult {
    let mut state = driver()?.state();
    change(&mut state.modules.function_mut(function)?.legacy)
}

fn launch_grid(function: CUfunction, width: c_int, height: c_int, stream: CUstream) -> CudaResult {
    let side = |side: c_int| c_uint::try_from(side).map_err(|_| CudaError::InvalidValue);
    let legacy = driver()?.state().modules.function(function)?.legacy.clone();
    let shape = Shape {
        grid: [side(width)?, side(height)?, 1],
        block: legacy.block,
    };
    let parameters = Parameters {
        pointers: In::NULL,
        extra: In::NULL,
    };
    launch(function, shape, Blocks::Independent, 0, stream, parameters)
}

entry_points! {
    "cuFuncSetBlockShape" 2000 fn cuFuncSetBlockShape(function: CUfunction, x: c_int, y: c_int, z: c_int) {
        let side = |side: c_int| c_uint::try_from(side).map_err(|_| CudaError::InvalidValue);
        let block = [side(x)?, side(y)?, side(z)?];
        set_legacy(function, |legacy| {
            legacy.block = block;
            Ok(())
        })
    }

    // `cuda.h` defines no per-thread variants of these.
    "cuLaunch" 2000 fn cuLaunch(function: CUfunction) { launch_grid(function, 1, 1, CUstream::LEGACY) }
    "cuLaunchGrid" 2000 fn cuLaunchGrid(function: CUfunction, width: c_int, height: c_int) { launch_grid(function, width, height, CUstream::LEGACY) }
    "cuLaunchGridAsync" 2000 fn cuLaunchGridAsync(function: CUfunction, width: c_int, height: c_int, stream: CUstream) { launch_grid(function, width, height, stream) }
}
