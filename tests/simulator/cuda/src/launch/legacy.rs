//! Launches as they were before CUDA 4: the function remembers its block and its parameters.

use std::ffi::{c_int, c_uint};

use super::{Blocks, Parameters, Shape, launch};
use crate::abi::{Answer, In, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::{CUfunction, CUstream};

/// What a function remembers.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    block: [c_uint; 3],
}

impl Default for Prepared {
    fn default() -> Self {
        Self { block: [1; 3] }
    }
}

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
    let parameters = Parameters {
        pointers: In::NULL,
        extra: In::NULL,
    };
    launch(function, shape, Blocks::Apart, 0, stream, parameters)
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

    // Of the time before streams per thread: cuda.h knows no other forms of these.
    "cuLaunch" 2000 fn cuLaunch(function: CUfunction) { launch_grid(function, 1, 1, CUstream::LEGACY) }
    "cuLaunchGrid" 2000 fn cuLaunchGrid(function: CUfunction, width: c_int, height: c_int) { launch_grid(function, width, height, CUstream::LEGACY) }
    "cuLaunchGridAsync" 2000 fn cuLaunchGridAsync(function: CUfunction, width: c_int, height: c_int, stream: CUstream) { launch_grid(function, width, height, stream) }
}
