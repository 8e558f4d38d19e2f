//! The GPU of a launch: that of the thread's current context.
//!
//! In a process with one device there is one answer. With several, libcuda is asked for the current context, which it
//! only reads, and the record of that context has the GPU; a query of the context's device takes several times as
//! long. The current context of a thread is never recorded: it can be switched unnoticed, through libcuda's private
//! tables.
//!
//! A context can also end unnoticed, and its handle recur. So each launch on the slow path, at least one per lease,
//! queries the device and corrects the record.

use core::sync::atomic::{AtomicU32, Ordering};

use super::contexts::Contexts;
use crate::driver_api::cuda::CUdevice;
use crate::driver_api::device::{current_context, current_device, device_count};
use crate::limits::gpu::Gpu;

/// CUDA ordinals with a record.
const DEVICES: usize = 64;

/// Codes of what is known of a device; further ones are the index of a metered GPU.
const UNKNOWN: u32 = 0;
const NOT_METERED: u32 = 1;
const SEVERAL: u32 = 2;
const FIRST_GPU: u32 = 3;

/// Record of the GPU of a launch.
pub(super) enum Known {
    /// [`Gpu::index`] of a GPU whose time is metered.
    Metered(u8),
    /// A GPU whose time is not metered.
    NotMetered,
    /// No record.
    Unknown,
}

/// Records of devices and contexts. All zeroes is none.
#[repr(C)]
pub(super) struct Gpus {
    /// Code of the only device, or [`SEVERAL`].
    only: AtomicU32,
    /// Code of each CUDA ordinal.
    by_device: [AtomicU32; DEVICES],
    /// Codes of contexts on metered GPUs.
    by_context: Contexts,
}

impl Gpus {
    /// Returns the record of the GPU of this thread's launches.
    #[inline]
    pub(super) fn known(&self) -> Known {
        match self.only.load(Ordering::Relaxed) {
            UNKNOWN => Known::Unknown,
            NOT_METERED => Known::NotMetered,
            SEVERAL => self.known_by_context(),
            code => decode(code),
        }
    }

    #[inline(never)]
    fn known_by_context(&self) -> Known {
        let code = current_context().and_then(|context| self.by_context.code_of(context));
        code.map_or(Known::Unknown, |code| decode(u32::from(code)))
    }

    /// Returns the [`Gpu::index`] of the GPU of this thread's launches if its time is metered, according to libcuda
    /// and `metered_gpu`, and records it.
    pub(super) fn find(&self, metered_gpu: impl Fn(CUdevice) -> Option<Gpu>) -> Option<u8> {
        let device = current_device()?;
        let code = self.code_of(device, metered_gpu);
        match self.only.load(Ordering::Relaxed) {
            UNKNOWN => {
                let only = if device_count()? == 1 { code } else { SEVERAL };
                self.only.store(only, Ordering::Relaxed);
            }
            SEVERAL => self.record(code),
            _ => {}
        }
        match decode(code) {
            Known::Metered(gpu) => Some(gpu),
            Known::NotMetered | Known::Unknown => None,
        }
    }

    fn code_of(&self, device: CUdevice, metered_gpu: impl Fn(CUdevice) -> Option<Gpu>) -> u32 {
        let entry = usize::try_from(device)
            .ok()
            .and_then(|ordinal| self.by_device.get(ordinal));
        let Some(entry) = entry else {
            return NOT_METERED;
        };
        match entry.load(Ordering::Relaxed) {
            UNKNOWN => {
                let code = metered_gpu(device).map_or(NOT_METERED, |gpu| {
                    FIRST_GPU.wrapping_add(u32::from(gpu.index()))
                });
                entry.store(code, Ordering::Relaxed);
                code
            }
            code => code,
        }
    }

    /// Records the code of the current context. A context on a GPU that is not metered has no record: its launches
    /// would never take the slow path.
    fn record(&self, code: u32) {
        if let Some(context) = current_context() {
            let metered = u8::try_from(code)
                .ok()
                .filter(|code| u32::from(*code) >= FIRST_GPU);
            self.by_context.set(context, metered);
        }
    }

    /// Drops the records of contexts for which `has_ended` is true.
    pub(super) fn forget(&self, has_ended: impl Fn(u64) -> bool) {
        self.by_context.forget(has_ended);
    }
}

#[inline]
fn decode(code: u32) -> Known {
    match code.checked_sub(FIRST_GPU).map(u8::try_from) {
        Some(Ok(gpu)) => Known::Metered(gpu),
        Some(Err(_)) | None => Known::NotMetered,
    }
}
