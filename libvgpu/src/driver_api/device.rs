//! The devices and contexts of libcuda that a thread uses.

use core::ffi::c_int;

use drava_vgpu_abi::DeviceUuid;

use crate::driver_api::cuda::{CUDA_SUCCESS, CUcontext, CUdevice, CUresult, CUuuid};
use crate::driver_api::driver::{Library, Original};

static GET_CURRENT: Original<GetCurrent> = Original::new(Library::Cuda, c"cuCtxGetCurrent");
static GET_DEVICE: Original<GetDevice> = Original::new(Library::Cuda, c"cuCtxGetDevice");
static GET_UUID_V2: Original<GetUuid> = Original::new(Library::Cuda, c"cuDeviceGetUuid_v2");
static GET_UUID: Original<GetUuid> = Original::new(Library::Cuda, c"cuDeviceGetUuid");

static GET_ATTRIBUTE: Original<GetAttribute> =
    Original::new(Library::Cuda, c"cuDeviceGetAttribute");
static GET_COUNT: Original<GetCount> = Original::new(Library::Cuda, c"cuDeviceGetCount");

type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, CUdevice) -> CUresult;
type GetCount = unsafe extern "C" fn(*mut c_int) -> CUresult;
type GetCurrent = unsafe extern "C" fn(*mut CUcontext) -> CUresult;
type GetDevice = unsafe extern "C" fn(*mut CUdevice) -> CUresult;
type GetUuid = unsafe extern "C" fn(*mut CUuuid, CUdevice) -> CUresult;

/// Returns the current context of this thread.
pub(crate) fn current_context() -> Option<u64> {
    let get = GET_CURRENT.get()?;
    let mut context = core::ptr::null_mut();
    // SAFETY: writes one context.
    let result = unsafe { get(&raw mut context) };
    (result == CUDA_SUCCESS && !context.is_null()).then(|| context.expose_provenance() as u64)
}

/// Returns the device of the current context.
pub(crate) fn current_device() -> Option<CUdevice> {
    let get = GET_DEVICE.get()?;
    let mut device = 0;
    // SAFETY: writes one device.
    let result = unsafe { get(&raw mut device) };
    (result == CUDA_SUCCESS).then_some(device)
}

/// Returns the UUID of a CUDA device; a MIG device has its own UUID, which no share has.
pub(crate) fn uuid_of(device: CUdevice) -> Option<DeviceUuid> {
    let get = GET_UUID_V2.get().or_else(|| GET_UUID.get())?;
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: writes one UUID.
    let result = unsafe { get(&raw mut uuid, device) };
    (result == CUDA_SUCCESS).then_some(DeviceUuid(uuid.bytes))
}

/// Returns a `CU_DEVICE_ATTRIBUTE_*`.
pub(crate) fn attribute(device: CUdevice, attribute: c_int) -> Option<u64> {
    let get = GET_ATTRIBUTE.get()?;
    let mut value = 0;
    // SAFETY: writes one number.
    let result = unsafe { get(&raw mut value, attribute, device) };
    u64::try_from(value).ok().filter(|_| result == CUDA_SUCCESS)
}

/// Returns the number of CUDA devices.
pub(crate) fn device_count() -> Option<c_int> {
    let get = GET_COUNT.get()?;
    let mut count = 0;
    // SAFETY: writes one number.
    let result = unsafe { get(&raw mut count) };
    (result == CUDA_SUCCESS).then_some(count)
}
