//! The functions that have hooks: names, signatures, versions and originals.
//!
//! [`for_each_hook`] holds one line for each function. This module expands it to the original functions,
//! [`crate::wiring`] to the exported hooks, whose bodies the lines name.

use core::ffi::CStr;

/// Expands a macro with all hooks: `PURPOSE LIBRARY NAME(ARGUMENTS) = BASE VERSION [+ FLAGS] => BODY`.
///
/// PURPOSE is a [`crate::hooks::hook::Purpose`]. BASE is the name for `cuGetProcAddress`, which returns this ABI from
/// VERSION on with FLAGS. BODY gets the original function as its first argument.
macro_rules! for_each_hook {
    ($expand:ident) => { $expand! {
    // Lookup of functions.
    Lookup Cuda cuInit(flags: c_uint) = c"cuInit" 2000 => lookup::init;
    Lookup Cuda cuGetProcAddress(symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64)
        = c"cuGetProcAddress" 11030 => lookup::get_proc_address;
    Lookup Cuda cuGetProcAddress_v2(symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int)
        = c"cuGetProcAddress" 12000 => lookup::get_proc_address_v2;

    // Memory information.
    Memory Cuda cuDeviceTotalMem(bytes: *mut c_uint, device: CUdevice) = c"cuDeviceTotalMem" 2000 => memory_info::total_mem;
    Memory Cuda cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) = c"cuDeviceTotalMem" 3020 => memory_info::total_mem;
    Memory Cuda cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) = c"cuMemGetInfo" 2000 => memory_info::mem_get_info;
    Memory Cuda cuMemGetInfo_v2(free: *mut usize, total: *mut usize) = c"cuMemGetInfo" 3020 => memory_info::mem_get_info;
    Memory Nvml nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut nvmlMemory_t) = c"" 0 => nvml::memory;
    Memory Nvml nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) = c"" 0 => nvml::memory_v2;
    Memory Nvml nvmlDeviceGetConfComputeProtectedMemoryUsage(device: nvmlDevice_t, memory: *mut nvmlMemory_t) = c"" 0 => nvml::memory;
    Memory Nvml nvmlDeviceGetConfComputeMemSizeInfo(device: nvmlDevice_t, sizes: *mut nvmlConfComputeMemSizeInfo_t) = c"" 0 => nvml::confidential_sizes;

    // Processes and utilization.
    Memory Nvml nvmlDeviceGetComputeRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t)
        = c"" 0 => nvml::processes::compute_v1;
    Memory Nvml nvmlDeviceGetComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::compute;
    Memory Nvml nvmlDeviceGetComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::compute;
    Memory Nvml nvmlDeviceGetGraphicsRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t)
        = c"" 0 => nvml::processes::empty_v1;
    Memory Nvml nvmlDeviceGetGraphicsRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::empty;
    Memory Nvml nvmlDeviceGetGraphicsRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::empty;
    Memory Nvml nvmlDeviceGetMPSComputeRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t)
        = c"" 0 => nvml::processes::empty_v1;
    Memory Nvml nvmlDeviceGetMPSComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::empty;
    Memory Nvml nvmlDeviceGetMPSComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t)
        = c"" 0 => nvml::processes::empty;
    Memory Nvml nvmlDeviceGetRunningProcessDetailList(device: nvmlDevice_t, list: *mut nvmlProcessDetailList_t) = c"" 0 => nvml::processes::detailed;
    Memory Nvml nvmlDeviceGetAccountingPids(device: nvmlDevice_t, count: *mut c_uint, pids: *mut c_uint) = c"" 0 => nvml::accounting::pids;
    Memory Nvml nvmlDeviceGetAccountingStats(device: nvmlDevice_t, pid: c_uint, stats: *mut nvmlAccountingStats_t) = c"" 0 => nvml::accounting::stats;
    Memory Nvml nvmlDeviceGetAccountingStats_v2(device: nvmlDevice_t, stats: *mut nvmlAccountingStats_v2_t) = c"" 0 => nvml::accounting::stats_v2;
    Any Nvml nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, rates: *mut nvmlUtilization_t) = c"" 0 => nvml::utilization::rates;
    Any Nvml nvmlDeviceGetProcessUtilization(device: nvmlDevice_t, samples: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, since: u64)
        = c"" 0 => nvml::utilization::by_process;
    Any Nvml nvmlDeviceGetProcessesUtilizationInfo(device: nvmlDevice_t, info: *mut nvmlProcessesUtilizationInfo_t)
        = c"" 0 => nvml::utilization::by_process_info;
    Any Nvml nvmlDeviceGetSamples(device: nvmlDevice_t, kind: c_uint, since: u64, value_type: *mut c_uint, count: *mut c_uint, samples: *mut nvmlSample_t)
        = c"" 0 => nvml::utilization::samples;
    Any Nvml nvmlDeviceGetDynamicPstatesInfo(device: nvmlDevice_t, info: *mut nvmlGpuDynamicPstatesInfo_t) = c"" 0 => nvml::utilization::dynamic_states;

    // Values that exist only for the whole GPU.
    Any Nvml nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, support: *mut nvmlGpmSupport_t) = c"" 0 => nvml::whole_gpu::monitoring;
    Any Nvml nvmlGpmSampleGet(device: nvmlDevice_t, sample: *mut c_void) = c"" 0 => nvml::whole_gpu::one;
    Any Nvml nvmlGpmMigSampleGet(device: nvmlDevice_t, gpu_instance: c_uint, sample: *mut c_void) = c"" 0 => nvml::whole_gpu::two;
    Any Nvml nvmlDevicePerfMetricsGetSamples_v1(device: nvmlDevice_t, samples: *mut c_void) = c"" 0 => nvml::whole_gpu::one;
    Any Nvml nvmlDeviceReadPRMCounters_v1(device: nvmlDevice_t, counters: *mut c_void) = c"" 0 => nvml::whole_gpu::one;
    Any Nvml nvmlDeviceGetBAR1MemoryInfo(device: nvmlDevice_t, memory: *mut c_void) = c"" 0 => nvml::whole_gpu::one;
    Any Nvml nvmlDeviceGetMemoryLimits_v1(device: nvmlDevice_t, limits: *mut c_void) = c"" 0 => nvml::whole_gpu::one;
    Any Nvml nvmlDeviceGetPcieThroughput(device: nvmlDevice_t, counter: c_uint, value: *mut c_uint) = c"" 0 => nvml::whole_gpu::two;
    Any Nvml nvmlDeviceGetNvLinkUtilizationCounter(device: nvmlDevice_t, link: c_uint, counter: c_uint, received: *mut c_ulonglong, sent: *mut c_ulonglong)
        = c"" 0 => nvml::whole_gpu::four;
    Any Nvml nvmlDeviceGetNvLinkTelemetrySamples_v1(device: nvmlDevice_t, samples: *mut c_void) = c"" 0 => nvml::whole_gpu::one;
    Any Nvml nvmlDeviceGetFieldValues(device: nvmlDevice_t, count: c_int, values: *mut nvmlFieldValue_t) = c"" 0 => nvml::fields::values;
    Any Nvml nvmlDeviceGetSupportedEventTypes(device: nvmlDevice_t, types: *mut c_ulonglong) = c"" 0 => nvml::events::supported;
    Any Nvml nvmlDeviceRegisterEvents(device: nvmlDevice_t, types: c_ulonglong, set: *mut c_void) = c"" 0 => nvml::events::register;
    Any Nvml nvmlEventSetRegisterGpuOperationalEvents_v1(set: *mut c_void, config: *mut c_void) = c"" 0 => nvml::events::register_operational;

    // Video engines, which no program of a share can use.
    Any Nvml nvmlDeviceGetEncoderUtilization(device: nvmlDevice_t, percent: *mut c_uint, period: *mut c_uint) = c"" 0 => nvml::video::utilization;
    Any Nvml nvmlDeviceGetDecoderUtilization(device: nvmlDevice_t, percent: *mut c_uint, period: *mut c_uint) = c"" 0 => nvml::video::utilization;
    Any Nvml nvmlDeviceGetJpgUtilization(device: nvmlDevice_t, percent: *mut c_uint, period: *mut c_uint) = c"" 0 => nvml::video::utilization;
    Any Nvml nvmlDeviceGetOfaUtilization(device: nvmlDevice_t, percent: *mut c_uint, period: *mut c_uint) = c"" 0 => nvml::video::utilization;
    Any Nvml nvmlDeviceGetEncoderCapacity(device: nvmlDevice_t, codec: c_uint, percent: *mut c_uint) = c"" 0 => nvml::whole_gpu::two;
    Any Nvml nvmlDeviceGetEncoderStats(device: nvmlDevice_t, sessions: *mut c_uint, frames: *mut c_uint, latency: *mut c_uint) = c"" 0 => nvml::video::encoder_stats;
    Any Nvml nvmlDeviceGetEncoderSessions(device: nvmlDevice_t, count: *mut c_uint, sessions: *mut c_void) = c"" 0 => nvml::video::sessions;
    Any Nvml nvmlDeviceGetFBCStats(device: nvmlDevice_t, stats: *mut nvmlFBCStats_t) = c"" 0 => nvml::video::capture_stats;
    Any Nvml nvmlDeviceGetFBCSessions(device: nvmlDevice_t, count: *mut c_uint, sessions: *mut c_void) = c"" 0 => nvml::video::sessions;

    // Contexts: they take memory, and their end frees their allocations.
    Memory Cuda cuCtxCreate(context: *mut CUcontext, flags: c_uint, device: CUdevice) = c"cuCtxCreate" 2000 => context::create;
    Memory Cuda cuCtxCreate_v2(context: *mut CUcontext, flags: c_uint, device: CUdevice) = c"cuCtxCreate" 3020 => context::create;
    Memory Cuda cuCtxCreate_v3(context: *mut CUcontext, affinity: *mut c_void, count: c_int, flags: c_uint, device: CUdevice)
        = c"cuCtxCreate" 11040 => context::create_v3;
    Memory Cuda cuCtxCreate_v4(context: *mut CUcontext, parameters: *mut c_void, flags: c_uint, device: CUdevice)
        = c"cuCtxCreate" 12050 => context::create_v4;
    Memory Cuda cuCtxAttach(context: *mut CUcontext, flags: c_uint) = c"cuCtxAttach" 2000 => context::attach;
    Any Cuda cuCtxDetach(context: CUcontext) = c"cuCtxDetach" 2000 => context::detach;
    Any Cuda cuCtxDestroy(context: CUcontext) = c"cuCtxDestroy" 2000 => context::destroy;
    Any Cuda cuCtxDestroy_v2(context: CUcontext) = c"cuCtxDestroy" 4000 => context::destroy;
    Any Cuda cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) = c"cuDevicePrimaryCtxRetain" 7000 => primary::retain;
    Any Cuda cuDevicePrimaryCtxRelease(device: CUdevice) = c"cuDevicePrimaryCtxRelease" 7000 => primary::end;
    Any Cuda cuDevicePrimaryCtxRelease_v2(device: CUdevice) = c"cuDevicePrimaryCtxRelease" 11000 => primary::end;
    Any Cuda cuDevicePrimaryCtxReset(device: CUdevice) = c"cuDevicePrimaryCtxReset" 7000 => primary::end;
    Any Cuda cuDevicePrimaryCtxReset_v2(device: CUdevice) = c"cuDevicePrimaryCtxReset" 11000 => primary::end;

    // Parts of a primary context, which they retain.
    Memory Cuda cuGreenCtxCreate(green: *mut CUgreenCtx, description: *mut c_void, device: CUdevice, flags: c_uint) = c"cuGreenCtxCreate" 12040 => green::create;
    Any Cuda cuGreenCtxDestroy(green: CUgreenCtx) = c"cuGreenCtxDestroy" 12040 => green::destroy;
    Memory Cuda cuCtxFromGreenCtx(context: *mut CUcontext, green: CUgreenCtx) = c"cuCtxFromGreenCtx" 12040 => green::context;

    // Modules and libraries, and limits of a context, for which libcuda allocates memory.
    Memory Cuda cuCtxSetLimit(limit: c_int, value: usize) = c"cuCtxSetLimit" 3010 => module::set_limit;
    Memory Cuda cuModuleLoad(module: *mut CUmodule, path: *const c_char) = c"cuModuleLoad" 2000 => module::load;
    Memory Cuda cuModuleLoadData(module: *mut CUmodule, image: *const c_void) = c"cuModuleLoadData" 2000 => module::load_data;
    Memory Cuda cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut c_int, values: *mut *mut c_void)
        = c"cuModuleLoadDataEx" 2010 => module::load_data_ex;
    Memory Cuda cuModuleLoadFatBinary(module: *mut CUmodule, image: *const c_void) = c"cuModuleLoadFatBinary" 2000 => module::load_data;
    Any Cuda cuModuleUnload(module: CUmodule) = c"cuModuleUnload" 2000 => module::unload;
    Memory Cuda cuLibraryLoadData(library: *mut CUlibrary, code: *const c_void, jit: *mut c_int, jit_values: *mut *mut c_void, jit_count: c_uint, options: *mut c_int, values: *mut *mut c_void, count: c_uint)
        = c"cuLibraryLoadData" 12000 => library::load_data;
    Memory Cuda cuLibraryLoadFromFile(library: *mut CUlibrary, path: *const c_char, jit: *mut c_int, jit_values: *mut *mut c_void, jit_count: c_uint, options: *mut c_int, values: *mut *mut c_void, count: c_uint)
        = c"cuLibraryLoadFromFile" 12000 => library::load_file;
    Memory Cuda cuLibraryGetUnifiedFunction(function: *mut *mut c_void, library: CUlibrary, symbol: *const c_char)
        = c"cuLibraryGetUnifiedFunction" 12000 => library::unified_function;
    Memory Cuda cuLibraryGetModule(module: *mut CUmodule, library: CUlibrary) = c"cuLibraryGetModule" 12000 => library::module;
    Memory Cuda cuLibraryGetGlobal(pointer: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char)
        = c"cuLibraryGetGlobal" 12000 => library::global;
    Memory Cuda cuLibraryGetKernel(kernel: *mut CUkernel, library: CUlibrary, name: *const c_char) = c"cuLibraryGetKernel" 12000 => library::kernel;
    Memory Cuda cuLibraryEnumerateKernels(kernels: *mut CUkernel, count: c_uint, library: CUlibrary) = c"cuLibraryEnumerateKernels" 12040 => library::kernels;
    Any Cuda cuLibraryUnload(library: CUlibrary) = c"cuLibraryUnload" 12000 => library::unload;

    // Linear memory.
    Memory Cuda cuMemAlloc(pointer: *mut CUdeviceptr_v1, bytes: c_uint) = c"cuMemAlloc" 2000 => memory::alloc_v1;
    Memory Cuda cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) = c"cuMemAlloc" 3020 => memory::alloc;
    Memory Cuda cuMemAllocPitch(pointer: *mut CUdeviceptr_v1, pitch: *mut c_uint, width: c_uint, height: c_uint, element: c_uint)
        = c"cuMemAllocPitch" 2000 => memory::alloc_pitch_v1;
    Memory Cuda cuMemAllocPitch_v2(pointer: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint)
        = c"cuMemAllocPitch" 3020 => memory::alloc_pitch;
    Memory Cuda cuMemAllocManaged(pointer: *mut CUdeviceptr, bytes: usize, flags: c_uint) = c"cuMemAllocManaged" 6000 => memory::alloc_managed;
    Memory Cuda cuMemFree(pointer: CUdeviceptr_v1) = c"cuMemFree" 2000 => free::now_v1;
    Memory Cuda cuMemFree_v2(pointer: CUdeviceptr) = c"cuMemFree" 3020 => free::now;

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
    Memory Cuda cuMemAllocAsync(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream) = c"cuMemAllocAsync" 11020 => pool::alloc_async::<Legacy>;
    Memory Cuda cuMemAllocAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream)
        = c"cuMemAllocAsync" 11020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => pool::alloc_async::<PerThread>;
    Memory Cuda cuMemAllocFromPoolAsync(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        = c"cuMemAllocFromPoolAsync" 11020 => pool::alloc_from_pool_async::<Legacy>;
    Memory Cuda cuMemAllocFromPoolAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        = c"cuMemAllocFromPoolAsync" 11020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => pool::alloc_from_pool_async::<PerThread>;
    Memory Cuda cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) = c"cuMemFreeAsync" 11020 => free::in_order::<Legacy>;
    Memory Cuda cuMemFreeAsync_ptsz(pointer: CUdeviceptr, stream: CUstream)
        = c"cuMemFreeAsync" 11020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => free::in_order::<PerThread>;

    Memory Cuda cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps) = c"cuMemPoolCreate" 11020 => pool::create;
    Memory Cuda cuMemPoolDestroy(pool: CUmemoryPool) = c"cuMemPoolDestroy" 11020 => pool::destroy;

    Memory Cuda cuMemPoolExportPointer(data: *mut c_void, pointer: CUdeviceptr) = c"cuMemPoolExportPointer" 11020 => pool::share::export_pointer;
    Memory Cuda cuMemPoolImportPointer(pointer: *mut CUdeviceptr, pool: CUmemoryPool, data: *mut c_void)
        = c"cuMemPoolImportPointer" 11020 => pool::share::import_pointer;

    // Linear memory shared between processes.
    Memory Cuda cuIpcGetMemHandle(handle: *mut CUipcMemHandle, pointer: CUdeviceptr) = c"cuIpcGetMemHandle" 4010 => ipc::get_handle;
    Memory Cuda cuIpcOpenMemHandle(pointer: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) = c"cuIpcOpenMemHandle" 4010 => ipc::open;
    Memory Cuda cuIpcOpenMemHandle_v2(pointer: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) = c"cuIpcOpenMemHandle" 11000 => ipc::open;
    Memory Cuda cuIpcCloseMemHandle(pointer: CUdeviceptr) = c"cuIpcCloseMemHandle" 4010 => ipc::close;

    // Virtual memory management.
    Memory Cuda cuMemCreate(handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: u64)
        = c"cuMemCreate" 10020 => vmm::create;
    Memory Cuda cuMemRelease(handle: CUmemGenericAllocationHandle) = c"cuMemRelease" 10020 => vmm::release;
    Memory Cuda cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void)
        = c"cuMemRetainAllocationHandle" 11000 => vmm::retain;
    Memory Cuda cuMemExportToShareableHandle(shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_int, flags: u64)
        = c"cuMemExportToShareableHandle" 10020 => vmm::export;
    Memory Cuda cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void, kind: c_int)
        = c"cuMemImportFromShareableHandle" 10020 => vmm::import;
    Memory Cuda cuMemMapArrayAsync(operations: *mut CUarrayMapInfo, count: c_uint, stream: CUstream) = c"cuMemMapArrayAsync" 11010 => sparse::map;
    Memory Cuda cuMemMapArrayAsync_ptsz(operations: *mut CUarrayMapInfo, count: c_uint, stream: CUstream)
        = c"cuMemMapArrayAsync" 11010 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => sparse::map;
    Memory Cuda cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64)
        = c"cuMemMap" 10020 => vmm::map;
    Memory Cuda cuMemUnmap(address: CUdeviceptr, bytes: usize) = c"cuMemUnmap" 10020 => vmm::unmap;

    // Multicast objects, which keep bound memory alive.
    Memory Cuda cuMulticastCreate(object: *mut CUmemGenericAllocationHandle, properties: *const c_void) = c"cuMulticastCreate" 12010 => multicast::create;
    Memory Cuda cuMulticastUnbind(object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, bytes: usize) = c"cuMulticastUnbind" 12010 => multicast::unbind;
    Memory Cuda cuMulticastBindMem(object: CUmemGenericAllocationHandle, offset: usize, memory: CUmemGenericAllocationHandle, memory_offset: usize, bytes: usize, flags: u64)
        = c"cuMulticastBindMem" 12010 => multicast::bind;
    Memory Cuda cuMulticastBindMem_v2(object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, memory: CUmemGenericAllocationHandle, memory_offset: usize, bytes: usize, flags: u64)
        = c"cuMulticastBindMem" 13010 => multicast::bind_v2;
    Memory Cuda cuMulticastBindAddr(object: CUmemGenericAllocationHandle, offset: usize, address: CUdeviceptr, bytes: usize, flags: u64)
        = c"cuMulticastBindAddr" 12010 => multicast::bind_address;
    Memory Cuda cuMulticastBindAddr_v2(object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, address: CUdeviceptr, bytes: usize, flags: u64)
        = c"cuMulticastBindAddr" 13010 => multicast::bind_address_v2;

    // Imported memory of another API or process.
    Memory Cuda cuImportExternalMemory(external: *mut CUexternalMemory, description: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC)
        = c"cuImportExternalMemory" 10000 => external::import;
    Memory Cuda cuDestroyExternalMemory(external: CUexternalMemory) = c"cuDestroyExternalMemory" 10000 => external::destroy;

    // Kernels.
    Compute Cuda cuLaunchKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void) = c"cuLaunchKernel" 4000 => launch::kernel::<Legacy>;
    Compute Cuda cuLaunchKernel_ptsz(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void)
        = c"cuLaunchKernel" 4000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => launch::kernel::<PerThread>;
    Compute Cuda cuLaunchKernelEx(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void) = c"cuLaunchKernelEx" 11060 => launch::kernel_ex::<Legacy>;
    Compute Cuda cuLaunchKernelEx_ptsz(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void)
        = c"cuLaunchKernelEx" 11060 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => launch::kernel_ex::<PerThread>;
    Compute Cuda cuLaunchCooperativeKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void) = c"cuLaunchCooperativeKernel" 9000 => launch::cooperative::<Legacy>;
    Compute Cuda cuLaunchCooperativeKernel_ptsz(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void)
        = c"cuLaunchCooperativeKernel" 9000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => launch::cooperative::<PerThread>;
    Compute Cuda cuLaunchCooperativeKernelMultiDevice(launches: *mut CUDA_LAUNCH_PARAMS, count: c_uint, flags: c_uint) = c"cuLaunchCooperativeKernelMultiDevice" 9000 => launch::cooperative_multi_device;
    Compute Cuda cuLaunch(function: CUfunction) = c"cuLaunch" 2000 => launch::legacy;
    Compute Cuda cuLaunchGrid(function: CUfunction, width: c_int, height: c_int) = c"cuLaunchGrid" 2000 => launch::legacy_grid;
    Compute Cuda cuLaunchGridAsync(function: CUfunction, width: c_int, height: c_int, stream: CUstream) = c"cuLaunchGridAsync" 2000 => launch::legacy_grid_async;

    // Graphs.
    Any Cuda cuGraphLaunch(exec: CUgraphExec, stream: CUstream) = c"cuGraphLaunch" 10000 => graph::launch::<Legacy>;
    Any Cuda cuGraphLaunch_ptsz(exec: CUgraphExec, stream: CUstream)
        = c"cuGraphLaunch" 10000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => graph::launch::<PerThread>;
    Any Cuda cuGraphInstantiate(exec: *mut CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode, log: *mut c_char, size: usize) = c"cuGraphInstantiate" 10000 => graph::instantiate;
    Any Cuda cuGraphInstantiate_v2(exec: *mut CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode, log: *mut c_char, size: usize) = c"cuGraphInstantiate" 11000 => graph::instantiate;
    Any Cuda cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) = c"cuGraphInstantiateWithFlags" 11040 => graph::instantiate_with_flags;
    Any Cuda cuGraphInstantiateWithParams(exec: *mut CUgraphExec, graph: CUgraph, parameters: *mut c_void) = c"cuGraphInstantiateWithParams" 12000 => graph::instantiate_with_params;
    Any Cuda cuGraphInstantiateWithParams_ptsz(exec: *mut CUgraphExec, graph: CUgraph, parameters: *mut c_void)
        = c"cuGraphInstantiateWithParams" 12000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => graph::instantiate_with_params;
    Compute Cuda cuGraphExecUpdate(exec: CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode, update: *mut c_int) = c"cuGraphExecUpdate" 10020 => graph::update;
    Compute Cuda cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, info: *mut c_void) = c"cuGraphExecUpdate" 12000 => graph::update_v2;
    Compute Cuda cuGraphExecKernelNodeSetParams(exec: CUgraphExec, node: CUgraphNode, parameters: *const c_void) = c"cuGraphExecKernelNodeSetParams" 10010 => graph::set_node;
    Compute Cuda cuGraphExecKernelNodeSetParams_v2(exec: CUgraphExec, node: CUgraphNode, parameters: *const c_void) = c"cuGraphExecKernelNodeSetParams" 12000 => graph::set_node;
    Compute Cuda cuGraphExecNodeSetParams(exec: CUgraphExec, node: CUgraphNode, parameters: *const c_void) = c"cuGraphExecNodeSetParams" 12020 => graph::set_node;
    Compute Cuda cuGraphExecMemcpyNodeSetParams(exec: CUgraphExec, node: CUgraphNode, parameters: *const c_void, context: CUcontext) = c"cuGraphExecMemcpyNodeSetParams" 10020 => graph::set_transfer;
    Compute Cuda cuGraphExecMemsetNodeSetParams(exec: CUgraphExec, node: CUgraphNode, parameters: *const c_void, context: CUcontext) = c"cuGraphExecMemsetNodeSetParams" 10020 => graph::set_transfer;
    Compute Cuda cuGraphExecChildGraphNodeSetParams(exec: CUgraphExec, node: CUgraphNode, child: CUgraph) = c"cuGraphExecChildGraphNodeSetParams" 11010 => graph::set_child;
    Compute Cuda cuGraphNodeSetEnabled(exec: CUgraphExec, node: CUgraphNode, enabled: c_uint) = c"cuGraphNodeSetEnabled" 11060 => graph::set_enabled;
    Memory Cuda cuGraphAddMemAllocNode(node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize, parameters: *mut c_void) = c"cuGraphAddMemAllocNode" 11040 => graph_memory::add_allocation;
    Memory Cuda cuGraphAddNode(node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize, parameters: *mut c_void) = c"cuGraphAddNode" 12020 => graph_memory::add_node;
    Memory Cuda cuGraphAddNode_v2(node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, edges: *const c_void, count: usize, parameters: *mut c_void) = c"cuGraphAddNode" 12030 => graph_memory::add_node_v2;
    Memory Cuda cuGraphAddNode_v3(node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, edges: *const c_void, count: usize, parameters: *mut c_void) = c"cuGraphAddNode" 13040 => graph_memory::add_node_v2;
    Memory Cuda cuGraphUpload(exec: CUgraphExec, stream: CUstream) = c"cuGraphUpload" 11010 => graph_memory::upload;
    Memory Cuda cuGraphUpload_ptsz(exec: CUgraphExec, stream: CUstream)
        = c"cuGraphUpload" 11010 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => graph_memory::upload;
    Any Cuda cuGraphExecDestroy(exec: CUgraphExec) = c"cuGraphExecDestroy" 10000 => graph::destroy;

    // Captures, during which events are forbidden.
    Any Cuda cuStreamBeginCapture(stream: CUstream) = c"cuStreamBeginCapture" 10000 => graph::begin_capture::<Legacy>;
    Any Cuda cuStreamBeginCapture_ptsz(stream: CUstream)
        = c"cuStreamBeginCapture" 10000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => graph::begin_capture::<PerThread>;
    Any Cuda cuStreamBeginCapture_v2(stream: CUstream, mode: c_int) = c"cuStreamBeginCapture" 10010 => graph::begin_capture_v2::<Legacy>;
    Any Cuda cuStreamBeginCapture_v2_ptsz(stream: CUstream, mode: c_int)
        = c"cuStreamBeginCapture" 10010 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => graph::begin_capture_v2::<PerThread>;
    Any Cuda cuStreamBeginCaptureToGraph(stream: CUstream, graph: CUgraph, dependencies: *const CUgraphNode, edges: *const c_void, count: usize, mode: c_int) = c"cuStreamBeginCaptureToGraph" 12030 => graph::begin_capture_to_graph::<Legacy>;
    Any Cuda cuStreamBeginCaptureToGraph_ptsz(stream: CUstream, graph: CUgraph, dependencies: *const CUgraphNode, edges: *const c_void, count: usize, mode: c_int)
        = c"cuStreamBeginCaptureToGraph" 12030 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => graph::begin_capture_to_graph::<PerThread>;
    Any Cuda cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) = c"cuStreamEndCapture" 10000 => graph::end_capture::<Legacy>;
    Any Cuda cuStreamEndCapture_ptsz(stream: CUstream, graph: *mut CUgraph)
        = c"cuStreamEndCapture" 10000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => graph::end_capture::<PerThread>;
    Any Cuda cuStreamDestroy(stream: CUstream) = c"cuStreamDestroy" 2000 => graph::destroy_stream;
    Any Cuda cuStreamDestroy_v2(stream: CUstream) = c"cuStreamDestroy" 4000 => graph::destroy_stream;

    // Fills.
    Compute Cuda cuMemsetD8_v2(to: CUdeviceptr, value: c_uchar, count: usize) = c"cuMemsetD8" 3020 => transfer::fill::<Legacy, _>;
    Compute Cuda cuMemsetD8_v2_ptds(to: CUdeviceptr, value: c_uchar, count: usize)
        = c"cuMemsetD8" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill::<PerThread, _>;
    Compute Cuda cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream) = c"cuMemsetD8Async" 3020 => transfer::fill_async::<Legacy, _>;
    Compute Cuda cuMemsetD8Async_ptsz(to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream)
        = c"cuMemsetD8Async" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_async::<PerThread, _>;
    Compute Cuda cuMemsetD2D8_v2(to: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize) = c"cuMemsetD2D8" 3020 => transfer::fill_rows::<Legacy, _>;
    Compute Cuda cuMemsetD2D8_v2_ptds(to: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize)
        = c"cuMemsetD2D8" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_rows::<PerThread, _>;
    Compute Cuda cuMemsetD2D8Async(to: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize, stream: CUstream) = c"cuMemsetD2D8Async" 3020 => transfer::fill_rows_async::<Legacy, _>;
    Compute Cuda cuMemsetD2D8Async_ptsz(to: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize, stream: CUstream)
        = c"cuMemsetD2D8Async" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_rows_async::<PerThread, _>;
    Compute Cuda cuMemsetD16_v2(to: CUdeviceptr, value: c_ushort, count: usize) = c"cuMemsetD16" 3020 => transfer::fill::<Legacy, _>;
    Compute Cuda cuMemsetD16_v2_ptds(to: CUdeviceptr, value: c_ushort, count: usize)
        = c"cuMemsetD16" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill::<PerThread, _>;
    Compute Cuda cuMemsetD16Async(to: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream) = c"cuMemsetD16Async" 3020 => transfer::fill_async::<Legacy, _>;
    Compute Cuda cuMemsetD16Async_ptsz(to: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream)
        = c"cuMemsetD16Async" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_async::<PerThread, _>;
    Compute Cuda cuMemsetD2D16_v2(to: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize) = c"cuMemsetD2D16" 3020 => transfer::fill_rows::<Legacy, _>;
    Compute Cuda cuMemsetD2D16_v2_ptds(to: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize)
        = c"cuMemsetD2D16" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_rows::<PerThread, _>;
    Compute Cuda cuMemsetD2D16Async(to: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize, stream: CUstream) = c"cuMemsetD2D16Async" 3020 => transfer::fill_rows_async::<Legacy, _>;
    Compute Cuda cuMemsetD2D16Async_ptsz(to: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize, stream: CUstream)
        = c"cuMemsetD2D16Async" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_rows_async::<PerThread, _>;
    Compute Cuda cuMemsetD32_v2(to: CUdeviceptr, value: c_uint, count: usize) = c"cuMemsetD32" 3020 => transfer::fill::<Legacy, _>;
    Compute Cuda cuMemsetD32_v2_ptds(to: CUdeviceptr, value: c_uint, count: usize)
        = c"cuMemsetD32" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill::<PerThread, _>;
    Compute Cuda cuMemsetD32Async(to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream) = c"cuMemsetD32Async" 3020 => transfer::fill_async::<Legacy, _>;
    Compute Cuda cuMemsetD32Async_ptsz(to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream)
        = c"cuMemsetD32Async" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_async::<PerThread, _>;
    Compute Cuda cuMemsetD2D32_v2(to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize) = c"cuMemsetD2D32" 3020 => transfer::fill_rows::<Legacy, _>;
    Compute Cuda cuMemsetD2D32_v2_ptds(to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize)
        = c"cuMemsetD2D32" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_rows::<PerThread, _>;
    Compute Cuda cuMemsetD2D32Async(to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize, stream: CUstream) = c"cuMemsetD2D32Async" 3020 => transfer::fill_rows_async::<Legacy, _>;
    Compute Cuda cuMemsetD2D32Async_ptsz(to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize, stream: CUstream)
        = c"cuMemsetD2D32Async" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::fill_rows_async::<PerThread, _>;

    // Copies within a GPU.
    Compute Cuda cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) = c"cuMemcpy" 4000 => transfer::unified::<Legacy>;
    Compute Cuda cuMemcpy_ptds(to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        = c"cuMemcpy" 4000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::unified::<PerThread>;
    Compute Cuda cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) = c"cuMemcpyAsync" 4000 => transfer::unified_async::<Legacy>;
    Compute Cuda cuMemcpyAsync_ptsz(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream)
        = c"cuMemcpyAsync" 4000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::unified_async::<PerThread>;
    Compute Cuda cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) = c"cuMemcpyDtoD" 3020 => transfer::device::<Legacy>;
    Compute Cuda cuMemcpyDtoD_v2_ptds(to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        = c"cuMemcpyDtoD" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::device::<PerThread>;
    Compute Cuda cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) = c"cuMemcpyDtoDAsync" 3020 => transfer::device_async::<Legacy>;
    Compute Cuda cuMemcpyDtoDAsync_v2_ptsz(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream)
        = c"cuMemcpyDtoDAsync" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::device_async::<PerThread>;
    Compute Cuda cuMemcpyPeer(to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, bytes: usize) = c"cuMemcpyPeer" 4000 => transfer::peer::<Legacy>;
    Compute Cuda cuMemcpyPeer_ptds(to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, bytes: usize)
        = c"cuMemcpyPeer" 4000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::peer::<PerThread>;
    Compute Cuda cuMemcpyPeerAsync(to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, bytes: usize, stream: CUstream) = c"cuMemcpyPeerAsync" 4000 => transfer::peer_async::<Legacy>;
    Compute Cuda cuMemcpyPeerAsync_ptsz(to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, bytes: usize, stream: CUstream)
        = c"cuMemcpyPeerAsync" 4000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::peer_async::<PerThread>;
    Compute Cuda cuMemcpyDtoA_v2(to: CUarray, offset: usize, from: CUdeviceptr, bytes: usize) = c"cuMemcpyDtoA" 3020 => transfer::to_array::<Legacy>;
    Compute Cuda cuMemcpyDtoA_v2_ptds(to: CUarray, offset: usize, from: CUdeviceptr, bytes: usize)
        = c"cuMemcpyDtoA" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::to_array::<PerThread>;
    Compute Cuda cuMemcpyAtoD_v2(to: CUdeviceptr, from: CUarray, offset: usize, bytes: usize) = c"cuMemcpyAtoD" 3020 => transfer::from_array::<Legacy>;
    Compute Cuda cuMemcpyAtoD_v2_ptds(to: CUdeviceptr, from: CUarray, offset: usize, bytes: usize)
        = c"cuMemcpyAtoD" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::from_array::<PerThread>;
    Compute Cuda cuMemcpyAtoA_v2(to: CUarray, to_offset: usize, from: CUarray, from_offset: usize, bytes: usize) = c"cuMemcpyAtoA" 3020 => transfer::arrays::<Legacy>;
    Compute Cuda cuMemcpyAtoA_v2_ptds(to: CUarray, to_offset: usize, from: CUarray, from_offset: usize, bytes: usize)
        = c"cuMemcpyAtoA" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::arrays::<PerThread>;
    Compute Cuda cuMemcpy2D_v2(copy: *const CUDA_MEMCPY2D) = c"cuMemcpy2D" 3020 => transfer::rows::<Legacy>;
    Compute Cuda cuMemcpy2D_v2_ptds(copy: *const CUDA_MEMCPY2D)
        = c"cuMemcpy2D" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::rows::<PerThread>;
    Compute Cuda cuMemcpy2DUnaligned_v2(copy: *const CUDA_MEMCPY2D) = c"cuMemcpy2DUnaligned" 3020 => transfer::rows::<Legacy>;
    Compute Cuda cuMemcpy2DUnaligned_v2_ptds(copy: *const CUDA_MEMCPY2D)
        = c"cuMemcpy2DUnaligned" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::rows::<PerThread>;
    Compute Cuda cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) = c"cuMemcpy2DAsync" 3020 => transfer::rows_async::<Legacy>;
    Compute Cuda cuMemcpy2DAsync_v2_ptsz(copy: *const CUDA_MEMCPY2D, stream: CUstream)
        = c"cuMemcpy2DAsync" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::rows_async::<PerThread>;
    Compute Cuda cuMemcpy3D_v2(copy: *const CUDA_MEMCPY3D) = c"cuMemcpy3D" 3020 => transfer::volume::<Legacy>;
    Compute Cuda cuMemcpy3D_v2_ptds(copy: *const CUDA_MEMCPY3D)
        = c"cuMemcpy3D" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::volume::<PerThread>;
    Compute Cuda cuMemcpy3DAsync_v2(copy: *const CUDA_MEMCPY3D, stream: CUstream) = c"cuMemcpy3DAsync" 3020 => transfer::volume_async::<Legacy>;
    Compute Cuda cuMemcpy3DAsync_v2_ptsz(copy: *const CUDA_MEMCPY3D, stream: CUstream)
        = c"cuMemcpy3DAsync" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::volume_async::<PerThread>;
    Compute Cuda cuMemcpy3DPeer(copy: *const CUDA_MEMCPY3D) = c"cuMemcpy3DPeer" 4000 => transfer::volume::<Legacy>;
    Compute Cuda cuMemcpy3DPeer_ptds(copy: *const CUDA_MEMCPY3D)
        = c"cuMemcpy3DPeer" 4000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::volume::<PerThread>;
    Compute Cuda cuMemcpy3DPeerAsync(copy: *const CUDA_MEMCPY3D, stream: CUstream) = c"cuMemcpy3DPeerAsync" 4000 => transfer::volume_async::<Legacy>;
    Compute Cuda cuMemcpy3DPeerAsync_ptsz(copy: *const CUDA_MEMCPY3D, stream: CUstream)
        = c"cuMemcpy3DPeerAsync" 4000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::volume_async::<PerThread>;
    Compute Cuda cuMemcpyWithAttributesAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, attributes: *mut c_void, stream: CUstream) = c"cuMemcpyWithAttributesAsync" 13020 => transfer::with_attributes::<Legacy>;
    Compute Cuda cuMemcpyWithAttributesAsync_ptsz(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, attributes: *mut c_void, stream: CUstream)
        = c"cuMemcpyWithAttributesAsync" 13020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::with_attributes::<PerThread>;
    Compute Cuda cuMemcpy3DWithAttributesAsync(copy: *mut c_void, flags: u64, stream: CUstream) = c"cuMemcpy3DWithAttributesAsync" 13020 => transfer::volume_with_attributes::<Legacy>;
    Compute Cuda cuMemcpy3DWithAttributesAsync_ptsz(copy: *mut c_void, flags: u64, stream: CUstream)
        = c"cuMemcpy3DWithAttributesAsync" 13020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::volume_with_attributes::<PerThread>;
    Compute Cuda cuMemcpyBatchAsync(to: *mut CUdeviceptr, from: *mut CUdeviceptr, sizes: *mut usize, count: usize, attributes: *mut c_void, indices: *mut usize, attribute_count: usize, failed: *mut usize, stream: CUstream) = c"cuMemcpyBatchAsync" 12080 => transfer::batch::<Legacy>;
    Compute Cuda cuMemcpyBatchAsync_ptsz(to: *mut CUdeviceptr, from: *mut CUdeviceptr, sizes: *mut usize, count: usize, attributes: *mut c_void, indices: *mut usize, attribute_count: usize, failed: *mut usize, stream: CUstream)
        = c"cuMemcpyBatchAsync" 12080 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::batch::<PerThread>;
    Compute Cuda cuMemcpyBatchAsync_v2(to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: *const usize, count: usize, attributes: *mut c_void, indices: *mut usize, attribute_count: usize, stream: CUstream) = c"cuMemcpyBatchAsync" 13000 => transfer::batch_v2::<Legacy>;
    Compute Cuda cuMemcpyBatchAsync_v2_ptsz(to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: *const usize, count: usize, attributes: *mut c_void, indices: *mut usize, attribute_count: usize, stream: CUstream)
        = c"cuMemcpyBatchAsync" 13000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::batch_v2::<PerThread>;
    Compute Cuda cuMemcpy3DBatchAsync(count: usize, copies: *mut c_void, failed: *mut usize, flags: u64, stream: CUstream) = c"cuMemcpy3DBatchAsync" 12080 => transfer::volumes::<Legacy>;
    Compute Cuda cuMemcpy3DBatchAsync_ptsz(count: usize, copies: *mut c_void, failed: *mut usize, flags: u64, stream: CUstream)
        = c"cuMemcpy3DBatchAsync" 12080 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::volumes::<PerThread>;
    Compute Cuda cuMemcpy3DBatchAsync_v2(count: usize, copies: *mut c_void, flags: u64, stream: CUstream) = c"cuMemcpy3DBatchAsync" 13000 => transfer::volumes_v2::<Legacy>;
    Compute Cuda cuMemcpy3DBatchAsync_v2_ptsz(count: usize, copies: *mut c_void, flags: u64, stream: CUstream)
        = c"cuMemcpy3DBatchAsync" 13000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => transfer::volumes_v2::<PerThread>;

    // Copies between host and GPU, and waits: hooked for the demand of a suspended share only.
    Demand Cuda cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) = c"cuMemcpyHtoD" 3020 => demand::three;
    Demand Cuda cuMemcpyHtoD_v2_ptds(to: CUdeviceptr, from: *const c_void, bytes: usize)
        = c"cuMemcpyHtoD" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::three;
    Demand Cuda cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) = c"cuMemcpyDtoH" 3020 => demand::three;
    Demand Cuda cuMemcpyDtoH_v2_ptds(to: *mut c_void, from: CUdeviceptr, bytes: usize)
        = c"cuMemcpyDtoH" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::three;
    Demand Cuda cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) = c"cuMemcpyHtoDAsync" 3020 => demand::four;
    Demand Cuda cuMemcpyHtoDAsync_v2_ptsz(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream)
        = c"cuMemcpyHtoDAsync" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::four;
    Demand Cuda cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) = c"cuMemcpyDtoHAsync" 3020 => demand::four;
    Demand Cuda cuMemcpyDtoHAsync_v2_ptsz(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream)
        = c"cuMemcpyDtoHAsync" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::four;
    Demand Cuda cuMemcpyHtoA_v2(to: CUarray, offset: usize, from: *const c_void, bytes: usize) = c"cuMemcpyHtoA" 3020 => demand::four;
    Demand Cuda cuMemcpyHtoA_v2_ptds(to: CUarray, offset: usize, from: *const c_void, bytes: usize)
        = c"cuMemcpyHtoA" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::four;
    Demand Cuda cuMemcpyAtoH_v2(to: *mut c_void, from: CUarray, offset: usize, bytes: usize) = c"cuMemcpyAtoH" 3020 => demand::four;
    Demand Cuda cuMemcpyAtoH_v2_ptds(to: *mut c_void, from: CUarray, offset: usize, bytes: usize)
        = c"cuMemcpyAtoH" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::four;
    Demand Cuda cuMemcpyHtoAAsync_v2(to: CUarray, offset: usize, from: *const c_void, bytes: usize, stream: CUstream) = c"cuMemcpyHtoAAsync" 3020 => demand::five;
    Demand Cuda cuMemcpyHtoAAsync_v2_ptsz(to: CUarray, offset: usize, from: *const c_void, bytes: usize, stream: CUstream)
        = c"cuMemcpyHtoAAsync" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::five;
    Demand Cuda cuMemcpyAtoHAsync_v2(to: *mut c_void, from: CUarray, offset: usize, bytes: usize, stream: CUstream) = c"cuMemcpyAtoHAsync" 3020 => demand::five;
    Demand Cuda cuMemcpyAtoHAsync_v2_ptsz(to: *mut c_void, from: CUarray, offset: usize, bytes: usize, stream: CUstream)
        = c"cuMemcpyAtoHAsync" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::five;
    Demand Cuda cuCtxSynchronize() = c"cuCtxSynchronize" 2000 => demand::none;
    Demand Cuda cuCtxSynchronize_v2(context: CUcontext) = c"cuCtxSynchronize" 13000 => demand::one;
    Demand Cuda cuStreamSynchronize(stream: CUstream) = c"cuStreamSynchronize" 2000 => demand::one;
    Demand Cuda cuStreamSynchronize_ptsz(stream: CUstream)
        = c"cuStreamSynchronize" 2000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::one;
    Demand Cuda cuStreamQuery(stream: CUstream) = c"cuStreamQuery" 2000 => demand::one;
    Demand Cuda cuStreamQuery_ptsz(stream: CUstream)
        = c"cuStreamQuery" 2000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::one;
    Demand Cuda cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) = c"cuStreamWaitEvent" 3020 => demand::three;
    Demand Cuda cuStreamWaitEvent_ptsz(stream: CUstream, event: CUevent, flags: c_uint)
        = c"cuStreamWaitEvent" 3020 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::three;
    Demand Cuda cuEventRecord(event: CUevent, stream: CUstream) = c"cuEventRecord" 2000 => demand::two;
    Demand Cuda cuEventRecord_ptsz(event: CUevent, stream: CUstream)
        = c"cuEventRecord" 2000 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::two;
    Demand Cuda cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint) = c"cuEventRecordWithFlags" 11010 => demand::three;
    Demand Cuda cuEventRecordWithFlags_ptsz(event: CUevent, stream: CUstream, flags: c_uint)
        = c"cuEventRecordWithFlags" 11010 + CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM => demand::three;
    Demand Cuda cuEventSynchronize(event: CUevent) = c"cuEventSynchronize" 2000 => demand::one;
    Demand Cuda cuEventQuery(event: CUevent) = c"cuEventQuery" 2000 => demand::one;
    } };
}
pub(crate) use for_each_hook;

macro_rules! originals {
    ($(
        $purpose:ident $library:ident $name:ident($($argument:ident: $type:ty),* $(,)?)
            = $base:literal $since:literal $(+ $flags:ident)? => $body:path;
    )*) => {
        $(
            #[expect(non_snake_case, reason = "names are those of cuda.h and nvml.h")]
            pub(crate) mod $name {
                #[allow(unused_imports, reason = "not every signature needs all of them")]
                use super::types::*;

                /// Signature of the original function.
                pub(crate) type Function = unsafe extern "C" fn($($type),*) -> c_int;

                pub(crate) static ORIGINAL: Original<Function> =
                    Original::new(Library::$library, super::name_of(concat!(stringify!($name), "\0")));
            }
        )*
    };
}

for_each_hook!(originals);

/// Converts a name with its NUL; checked at compile time.
pub(crate) const fn name_of(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

/// Types in the signatures.
pub(crate) mod types {
    pub(crate) use core::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

    pub(crate) use crate::driver_api::cuda::*;
    pub(crate) use crate::driver_api::driver::{Library, Original};
    pub(crate) use crate::driver_api::nvml::*;
}
