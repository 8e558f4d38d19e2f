//! The limit that applies to a device, and to the current context of a thread.

use core::sync::atomic::Ordering;

use drava_vgpu_abi::DeviceUuid;

use crate::driver_api::cuda::CUdevice;
use crate::driver_api::device::{current_device, uuid_of};
use crate::limits::environment::Attached;
use crate::limits::gpu::Gpu;
use crate::limits::shares::LimitsSource;
use crate::process::Process;

/// Limit that applies to a GPU.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    /// None: calls pass through unchanged.
    Unlimited,
    /// The limits of these shares.
    Limited(Gpu),
    /// Unknown limits: all allocations are denied.
    Denied,
}

/// Returns the limit that applies to the GPU with this UUID.
pub(crate) fn target_of(
    process: &'static Process,
    uuid: DeviceUuid,
    ordinal: Option<u32>,
) -> Target {
    if let Some(gpu) = process.gpu_of(uuid) {
        return Target::Limited(gpu);
    }
    match process.source() {
        LimitsSource::None | LimitsSource::Pages => Target::Unlimited,
        LimitsSource::UnreadablePages | LimitsSource::InvalidEnvironment => Target::Denied,
        LimitsSource::Environment => {
            let _guard = process.guard();
            // Another thread may have attached the share.
            if let Some(gpu) = process.gpu_of(uuid) {
                return Target::Limited(gpu);
            }
            match process.environment.attach(&process.shares, uuid, ordinal) {
                Attached::Share => process.gpu_of(uuid).map_or(Target::Denied, Target::Limited),
                Attached::NoLimit => Target::Unlimited,
                Attached::Failed => Target::Denied,
            }
        }
    }
}

const UNLIMITED: u32 = 1;
const DENIED: u32 = 2;
const FIRST_GPU: u32 = 3;

/// Returns the limit that applies to the memory of a CUDA device.
pub(crate) fn target_of_device(device: CUdevice) -> Target {
    let Some(process) = Process::get() else {
        return Target::Denied;
    };
    let known = usize::try_from(device)
        .ok()
        .and_then(|ordinal| process.devices.get(ordinal))
        .map(|device| &device.target);
    if let Some(known) = known {
        match known.load(Ordering::Acquire) {
            0 => {}
            UNLIMITED => return Target::Unlimited,
            DENIED => return Target::Denied,
            found => {
                let index = u8::try_from(found.saturating_sub(FIRST_GPU)).unwrap_or(u8::MAX);
                return process.gpu(index).map_or(Target::Denied, Target::Limited);
            }
        }
    }
    // libcuda reports an invalid device.
    let Some(uuid) = uuid_of(device) else {
        return Target::Unlimited;
    };
    let target = match target_of(process, uuid, u32::try_from(device).ok()) {
        Target::Limited(gpu) if !gpu.is_memory_limited() => Target::Unlimited,
        target => target,
    };
    if let Some(known) = known {
        let code = match target {
            Target::Unlimited => UNLIMITED,
            Target::Denied => DENIED,
            Target::Limited(gpu) => FIRST_GPU.saturating_add(u32::from(gpu.index())),
        };
        known.store(code, Ordering::Release);
    }
    target
}

/// Returns the limit that applies to the memory of the current context's GPU.
pub(crate) fn target_of_current_context() -> Target {
    // Without a context libcuda reports the error.
    current_device().map_or(Target::Unlimited, target_of_device)
}
