//! Kernels.

use core::ffi::{c_int, c_uint, c_void};

use drava_vgpu_abi::cost::Kind;

use crate::cuda::{
    CU_STREAM_LEGACY, CUDA_LAUNCH_PARAMS, CUfunction, CUlaunchConfig, CUresult, CUstream,
};
use crate::meter::{metered, per_thread};
use crate::table::{
    cuLaunch, cuLaunchCooperativeKernel, cuLaunchCooperativeKernelMultiDevice, cuLaunchGrid,
    cuLaunchGridAsync, cuLaunchKernel, cuLaunchKernelEx,
};

fn key(function: CUfunction) -> u64 {
    function.expose_provenance() as u64
}

#[inline]
#[expect(clippy::too_many_arguments, reason = "the driver's arguments")]
pub(crate) unsafe fn kernel(
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
    let kind = || {
        Kind::kernel(
            key(function),
            [grid_x, grid_y, grid_z],
            [block_x, block_y, block_z],
        )
    };
    metered(kind, stream, || {
        // SAFETY: the caller's arguments.
        unsafe {
            original(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream,
                parameters, extra,
            )
        }
    })
}

#[inline]
#[expect(clippy::too_many_arguments, reason = "the driver's arguments")]
pub(crate) unsafe fn kernel_ptsz(
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
    let kind = || {
        Kind::kernel(
            key(function),
            [grid_x, grid_y, grid_z],
            [block_x, block_y, block_z],
        )
    };
    metered(kind, per_thread(stream), || {
        // SAFETY: the caller's arguments.
        unsafe {
            original(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream,
                parameters, extra,
            )
        }
    })
}

/// Kind and stream of a launch by configuration; a null configuration is the driver's business to refuse.
///
/// # Safety
/// `config` is null or points to a configuration.
unsafe fn of_config(config: *const CUlaunchConfig, function: CUfunction) -> (Kind, CUstream) {
    // SAFETY: the caller's promise.
    match unsafe { config.as_ref() } {
        Some(config) => (
            Kind::kernel(key(function), config.gridDim, config.blockDim),
            config.hStream,
        ),
        None => (
            Kind::kernel(key(function), [0; 3], [0; 3]),
            CU_STREAM_LEGACY,
        ),
    }
}

pub(crate) unsafe fn kernel_ex(
    original: cuLaunchKernelEx::Function,
    config: *const CUlaunchConfig,
    function: CUfunction,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let (kind, stream) = unsafe { of_config(config, function) };
    metered(
        || kind,
        stream,
        // SAFETY: the caller's arguments.
        || unsafe { original(config, function, parameters, extra) },
    )
}

pub(crate) unsafe fn kernel_ex_ptsz(
    original: cuLaunchKernelEx::Function,
    config: *const CUlaunchConfig,
    function: CUfunction,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let (kind, stream) = unsafe { of_config(config, function) };
    metered(
        || kind,
        per_thread(stream),
        // SAFETY: the caller's arguments.
        || unsafe { original(config, function, parameters, extra) },
    )
}

#[expect(clippy::too_many_arguments, reason = "the driver's arguments")]
pub(crate) unsafe fn cooperative(
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
    let kind = || {
        Kind::kernel(
            key(function),
            [grid_x, grid_y, grid_z],
            [block_x, block_y, block_z],
        )
    };
    metered(kind, stream, || {
        // SAFETY: the caller's arguments.
        unsafe {
            original(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream,
                parameters,
            )
        }
    })
}

#[expect(clippy::too_many_arguments, reason = "the driver's arguments")]
pub(crate) unsafe fn cooperative_ptsz(
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
    let kind = || {
        Kind::kernel(
            key(function),
            [grid_x, grid_y, grid_z],
            [block_x, block_y, block_z],
        )
    };
    metered(kind, per_thread(stream), || {
        // SAFETY: the caller's arguments.
        unsafe {
            original(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream,
                parameters,
            )
        }
    })
}

/// One kernel on several cards at once. It is charged to the current card, as its first launch there says; the
/// other cards' shares are not asked, since a launch that waits for one of them would keep the rest waiting.
pub(crate) unsafe fn cooperative_multi_device(
    original: cuLaunchCooperativeKernelMultiDevice::Function,
    launches: *mut CUDA_LAUNCH_PARAMS,
    count: c_uint,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(launches, count, flags) };
    if launches.is_null() || count == 0 {
        return call();
    }
    // SAFETY: the caller passes at least one launch.
    let first = unsafe { launches.read() };
    let kind = || {
        Kind::kernel(
            key(first.function),
            [first.gridDimX, first.gridDimY, first.gridDimZ],
            [first.blockDimX, first.blockDimY, first.blockDimZ],
        )
    };
    metered(kind, first.hStream, call)
}

pub(crate) unsafe fn legacy(original: cuLaunch::Function, function: CUfunction) -> CUresult {
    metered(
        || Kind::kernel(key(function), [1; 3], [0; 3]),
        CU_STREAM_LEGACY,
        // SAFETY: the caller's arguments.
        || unsafe { original(function) },
    )
}

/// Sides of a legacy grid, which are signed.
fn grid(width: c_int, height: c_int) -> [u32; 3] {
    [width.unsigned_abs(), height.unsigned_abs(), 1]
}

pub(crate) unsafe fn legacy_grid(
    original: cuLaunchGrid::Function,
    function: CUfunction,
    width: c_int,
    height: c_int,
) -> CUresult {
    metered(
        || Kind::kernel(key(function), grid(width, height), [0; 3]),
        CU_STREAM_LEGACY,
        // SAFETY: the caller's arguments.
        || unsafe { original(function, width, height) },
    )
}

pub(crate) unsafe fn legacy_grid_async(
    original: cuLaunchGridAsync::Function,
    function: CUfunction,
    width: c_int,
    height: c_int,
    stream: CUstream,
) -> CUresult {
    metered(
        || Kind::kernel(key(function), grid(width, height), [0; 3]),
        stream,
        // SAFETY: the caller's arguments.
        || unsafe { original(function, width, height, stream) },
    )
}
