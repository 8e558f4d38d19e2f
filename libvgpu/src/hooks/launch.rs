//! Kernel launches.

use core::ffi::{c_int, c_uint, c_void};

use drava_vgpu_abi::cost::LaunchKind;

use crate::driver_api::cuda::{
    CU_STREAM_LEGACY, CUDA_LAUNCH_PARAMS, CUfunction, CUlaunchConfig, CUresult, CUstream,
};
use crate::driver_api::functions::{
    cuLaunch, cuLaunchCooperativeKernel, cuLaunchCooperativeKernelMultiDevice, cuLaunchGrid,
    cuLaunchGridAsync, cuLaunchKernel, cuLaunchKernelEx,
};
use crate::hooks::metering::{NullStream, metered};

#[inline]
fn kind_of(function: CUfunction, grid: [c_uint; 3], block: [c_uint; 3]) -> LaunchKind {
    LaunchKind::kernel(function.expose_provenance() as u64, grid, block)
}

#[inline]
#[expect(clippy::too_many_arguments, reason = "the original's arguments")]
pub(crate) unsafe fn kernel<S: NullStream>(
    original: cuLaunchKernel::Function,
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    let kind = kind_of(
        function,
        [grid_x, grid_y, grid_z],
        [block_x, block_y, block_z],
    );
    // SAFETY: the caller's arguments.
    metered!(kind, S::resolve(stream), unsafe {
        original(
            function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream,
            parameters, extra,
        )
    })
}

/// Returns kind and stream of a launch by configuration; libcuda rejects a null configuration.
///
/// # Safety
/// `config` is null or points to a configuration.
unsafe fn of_config(config: *const CUlaunchConfig, function: CUfunction) -> (LaunchKind, CUstream) {
    // SAFETY: the caller's contract.
    match unsafe { config.as_ref() } {
        Some(config) => (
            kind_of(function, config.gridDim, config.blockDim),
            config.hStream,
        ),
        None => (kind_of(function, [0; 3], [0; 3]), CU_STREAM_LEGACY),
    }
}

#[inline]
pub(crate) unsafe fn kernel_ex<S: NullStream>(
    original: cuLaunchKernelEx::Function,
    config: *const CUlaunchConfig,
    function: CUfunction,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let (kind, stream) = unsafe { of_config(config, function) };
    // SAFETY: the caller's arguments.
    metered!(kind, S::resolve(stream), unsafe {
        original(config, function, parameters, extra)
    })
}

#[inline]
#[expect(clippy::too_many_arguments, reason = "the original's arguments")]
pub(crate) unsafe fn cooperative<S: NullStream>(
    original: cuLaunchCooperativeKernel::Function,
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> CUresult {
    let kind = kind_of(
        function,
        [grid_x, grid_y, grid_z],
        [block_x, block_y, block_z],
    );
    // SAFETY: the caller's arguments.
    metered!(kind, S::resolve(stream), unsafe {
        original(
            function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters,
        )
    })
}

/// One kernel on several GPUs. It is charged to the current GPU with its first launch; the shares of the other GPUs
/// are not charged, since waiting for one of them would delay all.
pub(crate) unsafe fn cooperative_multi_device(
    original: cuLaunchCooperativeKernelMultiDevice::Function,
    launches: *mut CUDA_LAUNCH_PARAMS,
    count: c_uint,
    flags: c_uint,
) -> CUresult {
    if launches.is_null() || count == 0 {
        // SAFETY: the caller's arguments.
        return unsafe { original(launches, count, flags) };
    }
    // SAFETY: the caller passes at least one launch.
    let first = unsafe { launches.read() };
    let kind = kind_of(
        first.function,
        [first.gridDimX, first.gridDimY, first.gridDimZ],
        [first.blockDimX, first.blockDimY, first.blockDimZ],
    );
    // SAFETY: the caller's arguments.
    metered!(kind, first.hStream, unsafe {
        original(launches, count, flags)
    })
}

pub(crate) unsafe fn legacy(original: cuLaunch::Function, function: CUfunction) -> CUresult {
    let kind = kind_of(function, [1; 3], [0; 3]);
    // SAFETY: the caller's arguments.
    metered!(kind, CU_STREAM_LEGACY, unsafe { original(function) })
}

/// Returns the signed sides of a legacy grid.
fn grid(width: c_int, height: c_int) -> [c_uint; 3] {
    [width.unsigned_abs(), height.unsigned_abs(), 1]
}

pub(crate) unsafe fn legacy_grid(
    original: cuLaunchGrid::Function,
    function: CUfunction,
    width: c_int,
    height: c_int,
) -> CUresult {
    let kind = kind_of(function, grid(width, height), [0; 3]);
    // SAFETY: the caller's arguments.
    metered!(kind, CU_STREAM_LEGACY, unsafe {
        original(function, width, height)
    })
}

pub(crate) unsafe fn legacy_grid_async(
    original: cuLaunchGridAsync::Function,
    function: CUfunction,
    width: c_int,
    height: c_int,
    stream: CUstream,
) -> CUresult {
    let kind = kind_of(function, grid(width, height), [0; 3]);
    // SAFETY: the caller's arguments.
    metered!(kind, stream, unsafe {
        original(function, width, height, stream)
    })
}
