//! The hooks: one line each says name, signature, where it came from and which Rust function decides.
//!
//! [`hooks!`] makes of each line the exported `extern "C"` symbol, the place for the driver's own function, and
//! the entry that `dlsym`, `cuGetProcAddress` and the tests look up. A hook's body gets the driver's function as
//! its first argument.

use core::ffi::{CStr, c_void};

use crate::driver::{Library, Original};
use crate::process::Process;

/// What a hook is there for; it is handed out only if the process is limited in that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Needed by every limit.
    Any,
    /// Memory.
    Memory,
}

/// One hook.
pub(crate) struct Hook {
    /// Exported name, which is the driver's name of exactly this ABI.
    pub(crate) name: &'static CStr,
    /// Name to ask `cuGetProcAddress` for.
    pub(crate) base: &'static CStr,
    /// CUDA version, as in `CUDA_VERSION`, since which `cuGetProcAddress` gives this ABI for `base`.
    pub(crate) since: i32,
    /// Flags that `cuGetProcAddress` gives this ABI for.
    pub(crate) flags: u64,
    /// Where the driver's function is.
    pub(crate) library: Library,
    /// The driver's function.
    pub(crate) original: &'static Original,
    purpose: Purpose,
    wrapper: fn() -> *mut c_void,
}

impl Hook {
    /// The exported function.
    pub(crate) fn wrapper(&self) -> *mut c_void {
        (self.wrapper)()
    }

    /// Whether the process's limits need this hook. If not, the program gets the driver's own function.
    pub(crate) fn is_wanted(&self) -> bool {
        // Without memory for our own state nothing can be counted; the hooks then refuse.
        let Some(process) = Process::get() else {
            return true;
        };
        match self.purpose {
            Purpose::Any => process.is_limited(),
            Purpose::Memory => process.is_memory_limited(),
        }
    }
}

/// The hook of that name.
pub(crate) fn find(name: &[u8]) -> Option<&'static Hook> {
    HOOKS.iter().find(|hook| hook.name.to_bytes() == name)
}

/// The hooks that `cuGetProcAddress` may mean by that base name.
pub(crate) fn by_base(base: &CStr) -> impl Iterator<Item = &'static Hook> {
    HOOKS
        .iter()
        .filter(move |hook| hook.library == Library::Cuda && hook.base == base)
}

macro_rules! hooks {
    ($(
        $purpose:ident $library:ident $name:ident($($argument:ident: $type:ty),* $(,)?)
            = $base:literal $since:literal $(+ $flags:ident)? => $($body:ident)::+;
    )*) => {
        $(
            #[expect(non_snake_case, reason = "names are those of cuda.h and nvml.h")]
            pub(crate) mod $name {
                #[allow(unused_imports, reason = "not every signature needs all of them")]
                use super::types::*;

                /// Signature of the driver's function.
                pub(crate) type Function = unsafe extern "C" fn($($type),*) -> c_int;

                pub(crate) static ORIGINAL: Original =
                    Original::new(Library::$library, super::name_of(concat!(stringify!($name), "\0")));

                /// Hook of the driver's function of that name.
                ///
                /// # Safety
                /// As for the driver's function.
                #[unsafe(no_mangle)]
                pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                    let Some(original) = ORIGINAL.address() else {
                        return Library::$library.missing();
                    };
                    // SAFETY: the driver's function of that name has this signature.
                    let original = unsafe {
                        core::mem::transmute::<core::ptr::NonNull<c_void>, Function>(original)
                    };
                    // SAFETY: the caller keeps the driver's contract, which is also the body's.
                    unsafe { $($body)::+(original, $($argument),*) }
                }
            }
        )*

        static HOOKS: &[Hook] = &[
            $(Hook {
                name: name_of(concat!(stringify!($name), "\0")),
                base: $base,
                since: $since,
                flags: 0 $(| crate::cuda::$flags)?,
                library: Library::$library,
                original: &$name::ORIGINAL,
                purpose: Purpose::$purpose,
                wrapper: || $name::$name as *mut c_void,
            },)*
        ];
    };
}

/// A name with its NUL as a C string; checked at compile time.
const fn name_of(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

/// What the signatures below are made of.
mod types {
    pub(crate) use core::ffi::{c_char, c_int, c_uint, c_void};

    pub(crate) use crate::cuda::*;
    pub(crate) use crate::driver::{Library, Original};
    pub(crate) use crate::hooks::*;
    pub(crate) use crate::nvml::*;
}

hooks! {
    // Doors.
    Any Cuda cuInit(flags: c_uint) = c"cuInit" 2000 => lookup::init;
    Any Cuda cuGetProcAddress(symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64)
        = c"cuGetProcAddress" 11030 => lookup::get_proc_address;
    Any Cuda cuGetProcAddress_v2(symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int)
        = c"cuGetProcAddress" 12000 => lookup::get_proc_address_v2;

    // How much there is.
    Memory Cuda cuDeviceTotalMem(bytes: *mut c_uint, device: CUdevice) = c"cuDeviceTotalMem" 2000 => view::total_mem_v1;
    Memory Cuda cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) = c"cuDeviceTotalMem" 3020 => view::total_mem;
    Memory Cuda cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) = c"cuMemGetInfo" 2000 => view::mem_get_info_v1;
    Memory Cuda cuMemGetInfo_v2(free: *mut usize, total: *mut usize) = c"cuMemGetInfo" 3020 => view::mem_get_info;
    Memory Nvml nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut nvmlMemory_t) = c"" 0 => nvml::memory;
    Memory Nvml nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) = c"" 0 => nvml::memory_v2;

    // Who uses it, and how much.
    Memory Nvml nvmlDeviceGetComputeRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t)
        = c"" 0 => nvml::processes::compute_v1;
    Memory Nvml nvmlDeviceGetComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::compute;
    Memory Nvml nvmlDeviceGetComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::compute;
    Memory Nvml nvmlDeviceGetGraphicsRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t)
        = c"" 0 => nvml::processes::nobody_v1;
    Memory Nvml nvmlDeviceGetGraphicsRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::nobody;
    Memory Nvml nvmlDeviceGetGraphicsRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::nobody;
    Memory Nvml nvmlDeviceGetMPSComputeRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t)
        = c"" 0 => nvml::processes::nobody_v1;
    Memory Nvml nvmlDeviceGetMPSComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::nobody;
    Memory Nvml nvmlDeviceGetMPSComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::nobody;
    Any Nvml nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, rates: *mut nvmlUtilization_t) = c"" 0 => nvml::utilization::rates;
    Any Nvml nvmlDeviceGetProcessUtilization(device: nvmlDevice_t, samples: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, since: u64)
        = c"" 0 => nvml::utilization::by_process;
    Any Nvml nvmlDeviceGetProcessesUtilizationInfo(device: nvmlDevice_t, info: *mut nvmlProcessesUtilizationInfo_t)
        = c"" 0 => nvml::utilization::by_process_info;
    Any Nvml nvmlDeviceGetSamples(device: nvmlDevice_t, kind: c_uint, since: u64, value_type: *mut c_uint, count: *mut c_uint, samples: *mut nvmlSample_t)
        = c"" 0 => nvml::utilization::samples;

    // Contexts, which take memory and free what was allocated in them.
    Memory Cuda cuCtxCreate(context: *mut CUcontext, flags: c_uint, device: CUdevice) = c"cuCtxCreate" 2000 => context::create;
    Memory Cuda cuCtxCreate_v2(context: *mut CUcontext, flags: c_uint, device: CUdevice) = c"cuCtxCreate" 3020 => context::create;
    Memory Cuda cuCtxCreate_v3(context: *mut CUcontext, affinity: *mut c_void, count: c_int, flags: c_uint, device: CUdevice)
        = c"cuCtxCreate" 11040 => context::create_v3;
    Memory Cuda cuCtxCreate_v4(context: *mut CUcontext, parameters: *mut c_void, flags: c_uint, device: CUdevice)
        = c"cuCtxCreate" 12050 => context::create_v4;
    Memory Cuda cuCtxDestroy(context: CUcontext) = c"cuCtxDestroy" 2000 => context::destroy;
    Memory Cuda cuCtxDestroy_v2(context: CUcontext) = c"cuCtxDestroy" 4000 => context::destroy;
    Memory Cuda cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) = c"cuDevicePrimaryCtxRetain" 7000 => context::retain_primary;
    Memory Cuda cuDevicePrimaryCtxRelease(device: CUdevice) = c"cuDevicePrimaryCtxRelease" 7000 => context::end_primary;
    Memory Cuda cuDevicePrimaryCtxRelease_v2(device: CUdevice) = c"cuDevicePrimaryCtxRelease" 11000 => context::end_primary;
    Memory Cuda cuDevicePrimaryCtxReset(device: CUdevice) = c"cuDevicePrimaryCtxReset" 7000 => context::end_primary;
    Memory Cuda cuDevicePrimaryCtxReset_v2(device: CUdevice) = c"cuDevicePrimaryCtxReset" 11000 => context::end_primary;

    // Linear memory.
    Memory Cuda cuMemAlloc(pointer: *mut CUdeviceptr_v1, bytes: c_uint) = c"cuMemAlloc" 2000 => memory::alloc_v1;
    Memory Cuda cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) = c"cuMemAlloc" 3020 => memory::alloc;
    Memory Cuda cuMemAllocPitch(pointer: *mut CUdeviceptr_v1, pitch: *mut c_uint, width: c_uint, height: c_uint, element: c_uint)
        = c"cuMemAllocPitch" 2000 => memory::alloc_pitch_v1;
    Memory Cuda cuMemAllocPitch_v2(pointer: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint)
        = c"cuMemAllocPitch" 3020 => memory::alloc_pitch;
    Memory Cuda cuMemAllocManaged(pointer: *mut CUdeviceptr, bytes: usize, flags: c_uint) = c"cuMemAllocManaged" 6000 => memory::alloc_managed;
    Memory Cuda cuMemFree(pointer: CUdeviceptr_v1) = c"cuMemFree" 2000 => memory::free_v1;
    Memory Cuda cuMemFree_v2(pointer: CUdeviceptr) = c"cuMemFree" 3020 => memory::free;

    // Arrays.
    Memory Cuda cuArrayCreate(array: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1) = c"cuArrayCreate" 2000 => array::create_v1;
    Memory Cuda cuArrayCreate_v2(array: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR) = c"cuArrayCreate" 3020 => array::create;
    Memory Cuda cuArray3DCreate(array: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1) = c"cuArray3DCreate" 2000 => array::create_3d_v1;
    Memory Cuda cuArray3DCreate_v2(array: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR) = c"cuArray3DCreate" 3020 => array::create_3d;
    Memory Cuda cuArrayDestroy(array: CUarray) = c"cuArrayDestroy" 2000 => array::destroy;
    Memory Cuda cuMipmappedArrayCreate(array: *mut CUmipmappedArray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR, levels: c_uint)
        = c"cuMipmappedArrayCreate" 5000 => array::create_mipmapped;
    Memory Cuda cuMipmappedArrayDestroy(array: CUmipmappedArray) = c"cuMipmappedArrayDestroy" 5000 => array::destroy;

    // Stream-ordered memory.
    Memory Cuda cuMemAllocAsync(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream) = c"cuMemAllocAsync" 11020 => pool::alloc_async;
    Memory Cuda cuMemAllocAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream)
        = c"cuMemAllocAsync" 11020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => pool::alloc_async;
    Memory Cuda cuMemAllocFromPoolAsync(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        = c"cuMemAllocFromPoolAsync" 11020 => pool::alloc_from_pool_async;
    Memory Cuda cuMemAllocFromPoolAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        = c"cuMemAllocFromPoolAsync" 11020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => pool::alloc_from_pool_async;
    Memory Cuda cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) = c"cuMemFreeAsync" 11020 => pool::free_async;
    Memory Cuda cuMemFreeAsync_ptsz(pointer: CUdeviceptr, stream: CUstream)
        = c"cuMemFreeAsync" 11020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => pool::free_async;

    Memory Cuda cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps) = c"cuMemPoolCreate" 11020 => pool::create;
    Memory Cuda cuMemPoolDestroy(pool: CUmemoryPool) = c"cuMemPoolDestroy" 11020 => pool::destroy;

    // Virtual memory management.
    Memory Cuda cuMemCreate(handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: u64)
        = c"cuMemCreate" 10020 => vmm::create;
    Memory Cuda cuMemRelease(handle: CUmemGenericAllocationHandle) = c"cuMemRelease" 10020 => vmm::release;
    Memory Cuda cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void)
        = c"cuMemRetainAllocationHandle" 11000 => vmm::retain;
    Memory Cuda cuMemExportToShareableHandle(shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_int, flags: u64)
        = c"cuMemExportToShareableHandle" 10020 => vmm::export;
    Memory Cuda cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64)
        = c"cuMemMap" 10020 => vmm::map;
    Memory Cuda cuMemUnmap(address: CUdeviceptr, bytes: usize) = c"cuMemUnmap" 10020 => vmm::unmap;
}
