//! Arrays and mipmapped arrays. They live until they are destroyed or their context ends.
//!
//! Each is charged blocks of its own: libcuda does not report where an array lies, and arrays of random sizes take more of an
//! H200 than a packing of the small ones into shared blocks (docs/results/raw/gpu-h200.md).

use core::ffi::{c_int, c_uint, c_void};

use crate::accounts::blocks::BLOCK;
use crate::accounts::charge_map::Charge;
use crate::driver_api::cuda::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY_DESCRIPTOR_v1, CUDA_ARRAY3D_DESCRIPTOR,
    CUDA_ARRAY3D_DESCRIPTOR_v1, CUarray, CUmipmappedArray, CUresult,
};
use crate::driver_api::functions::{
    cuArray3DCreate, cuArray3DCreate_v2, cuArrayCreate, cuArrayCreate_v2, cuArrayDestroy,
    cuMipmappedArrayCreate,
};
use crate::hooks::ending_references::{EndingReferences, end_references};
use crate::hooks::memory::{Request, free_charged};
use crate::hooks::sparse;
use crate::process::Process;
use crate::system::elements;

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: no memory until some is mapped.
const WITHOUT_MEMORY: c_uint = 0x40 | 0x80;

/// `CUDA_ARRAY3D_LAYERED` and `CUDA_ARRAY3D_CUBEMAP`: the depth is a number of layers or faces, equal in each
/// level.
const LAYERS: c_uint = 0x01 | 0x04;

/// Extent of an array. Missing dimensions are 0 and count as 1.
struct Extent {
    width: u64,
    height: u64,
    depth: u64,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

impl Extent {
    /// Returns the bytes of the array, or of all `levels` of a mipmapped array: each level halves every dimension
    /// except layers.
    fn bytes(&self, levels: c_uint) -> u64 {
        if self.flags & WITHOUT_MEMORY != 0 {
            return 0;
        }
        let level = |level: c_uint| {
            let halved = |side: u64| side.checked_shr(level).unwrap_or(0).max(1);
            let depth = match self.flags & LAYERS {
                0 => halved(self.depth),
                _ => self.depth.max(1),
            };
            let sides = [halved(self.width), halved(self.height), depth];
            elements::bytes(self.format, self.channels, sides)
        };
        let bytes = (0..levels.clamp(1, 32))
            .map(level)
            .fold(0, u64::saturating_add);
        bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX)
    }
}

fn allocate(bytes: u64, array: *mut *mut c_void, call: impl FnOnce() -> CUresult) -> CUresult {
    // SAFETY: libcuda has written the handle.
    let key = || unsafe { array.read() }.expose_provenance() as u64;
    Request::in_current_context(bytes).allocate(|process| &process.arrays, call, key)
}

/// Drops the mappings of an array that ends with its context, and returns the bytes to release.
pub(crate) fn drop_array(process: &'static Process, array: u64, charge: Charge) -> u64 {
    if charge.bytes == 0 {
        sparse::drop_mappings(process, array);
    }
    charge.bytes
}

macro_rules! create {
    ($(#[$comment:meta])* $name:ident, $hook:ident, $descriptor:ty, |$from:ident| $extent:expr) => {
        $(#[$comment])*
        pub(crate) unsafe fn $name(
            original: $hook::Function,
            array: *mut CUarray,
            descriptor: *const $descriptor,
        ) -> CUresult {
            // SAFETY: null or the caller's descriptor.
            let bytes = unsafe { descriptor.as_ref() }.map_or(0, |$from| $extent.bytes(1));
            allocate(
                bytes,
                array,
                // SAFETY: the caller's arguments.
                || unsafe { original(array, descriptor) },
            )
        }
    };
}

create!(create, cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR, |from| {
    Extent {
        width: from.Width as u64,
        height: from.Height as u64,
        depth: 0,
        format: from.Format,
        channels: from.NumChannels,
        flags: 0,
    }
});

create!(create_v1, cuArrayCreate, CUDA_ARRAY_DESCRIPTOR_v1, |from| {
    Extent {
        width: u64::from(from.Width),
        height: u64::from(from.Height),
        depth: 0,
        format: from.Format,
        channels: from.NumChannels,
        flags: 0,
    }
});

create!(
    create_3d,
    cuArray3DCreate_v2,
    CUDA_ARRAY3D_DESCRIPTOR,
    |from| extent_3d(from)
);

create!(
    create_3d_v1,
    cuArray3DCreate,
    CUDA_ARRAY3D_DESCRIPTOR_v1,
    |from| Extent {
        width: u64::from(from.Width),
        height: u64::from(from.Height),
        depth: u64::from(from.Depth),
        format: from.Format,
        channels: from.NumChannels,
        flags: from.Flags,
    }
);

fn extent_3d(from: &CUDA_ARRAY3D_DESCRIPTOR) -> Extent {
    Extent {
        width: from.Width as u64,
        height: from.Height as u64,
        depth: from.Depth as u64,
        format: from.Format,
        channels: from.NumChannels,
        flags: from.Flags,
    }
}

pub(crate) unsafe fn create_mipmapped(
    original: cuMipmappedArrayCreate::Function,
    array: *mut CUmipmappedArray,
    descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
    levels: c_uint,
) -> CUresult {
    // SAFETY: null or the caller's descriptor.
    let bytes = unsafe { descriptor.as_ref() }.map_or(0, |from| extent_3d(from).bytes(levels));
    allocate(
        bytes,
        array,
        // SAFETY: the caller's arguments.
        || unsafe { original(array, descriptor, levels) },
    )
}

pub(crate) unsafe fn destroy(original: cuArrayDestroy::Function, array: *mut c_void) -> c_int {
    let key = array.expose_provenance() as u64;
    free_charged(
        |process| &process.arrays,
        key,
        || {
            end_references(
                |process| EndingReferences::of_array(process, key),
                // SAFETY: the caller's arguments.
                || unsafe { original(array) },
            )
        },
        |process, _, charge| {
            if let Some(gpu) = process.gpu(charge.gpu) {
                gpu.release(charge.bytes);
            }
        },
    )
}
