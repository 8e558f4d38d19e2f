//! Compares sizes and offsets with generated bindings.

use std::mem::{offset_of, size_of};

use cudarc::driver::sys;

use super::*;

/// Asserts equal size, and equal offsets of fields.
macro_rules! same_layout {
    ($ours:ty, $theirs:ty $(, $field:ident $(. $inner:ident)* = $other:ident)* $(,)?) => {
        assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
        $(assert_eq!(
            offset_of!($ours, $field $(. $inner)*),
            offset_of!($theirs, $other),
            concat!(stringify!($ours), ".", stringify!($field $(. $inner)*))
        );)*
    };
}

#[test]
fn matches_header_layout_of_basic_structs() {
    same_layout!(CUuuid, sys::CUuuid, bytes = bytes);
    same_layout!(
        CUctxCreateParams,
        sys::CUctxCreateParams,
        exec_affinity = execAffinityParams,
        exec_affinity_count = numExecAffinityParams,
        cig = cigParams
    );
    same_layout!(
        CUlaunchConfig,
        sys::CUlaunchConfig,
        grid = gridDimX,
        block = blockDimX,
        shared_bytes = sharedMemBytes,
        stream = hStream,
        attributes = attrs,
        attribute_count = numAttrs
    );
    same_layout!(
        CUlaunchParams,
        sys::CUDA_LAUNCH_PARAMS,
        function = function,
        grid = gridDimX,
        block = blockDimX,
        shared_bytes = sharedMemBytes,
        stream = hStream,
        pointers = kernelParams
    );
    same_layout!(CUmemLocation, sys::CUmemLocation, kind = type_, id = id);
    same_layout!(
        CUmemPoolProps,
        sys::CUmemPoolProps,
        alloc_type = allocType,
        handle_types = handleTypes,
        location = location,
        security_attributes = win32SecurityAttributes,
        max_size = maxSize,
        usage = usage,
        reserved = reserved
    );
    same_layout!(
        CUmemAccessDesc,
        sys::CUmemAccessDesc,
        location = location,
        flags = flags
    );
}

#[test]
fn matches_header_layout_of_memory_structs() {
    same_layout!(
        CUmemAllocationProp,
        sys::CUmemAllocationProp,
        kind = type_,
        handle_types = requestedHandleTypes,
        location = location,
        windows = win32HandleMetaData,
        flags = allocFlags
    );
    same_layout!(CUipcHandle, sys::CUipcMemHandle, bytes = reserved);
    same_layout!(CUipcHandle, sys::CUmemPoolPtrExportData, bytes = reserved);
}

#[test]
fn matches_header_layout_of_copies_and_arrays() {
    same_layout!(
        CUmemcpy3D,
        sys::CUDA_MEMCPY3D,
        from.x = srcXInBytes,
        from.y = srcY,
        from.z = srcZ,
        from.lod = srcLOD,
        from.memory_type = srcMemoryType,
        from.host = srcHost,
        from.device = srcDevice,
        from.array = srcArray,
        from.context = reserved0,
        from.pitch = srcPitch,
        from.height = srcHeight,
        to.x = dstXInBytes,
        to.y = dstY,
        to.z = dstZ,
        to.lod = dstLOD,
        to.memory_type = dstMemoryType,
        to.host = dstHost,
        to.device = dstDevice,
        to.array = dstArray,
        to.context = reserved1,
        to.pitch = dstPitch,
        to.height = dstHeight,
        width = WidthInBytes,
        height = Height,
        depth = Depth
    );
    same_layout!(
        CUmemcpy3D,
        sys::CUDA_MEMCPY3D_PEER,
        from.context = srcContext,
        to.context = dstContext,
        to.height = dstHeight,
        depth = Depth
    );
    same_layout!(
        CUmemsetNodeParams,
        sys::CUDA_MEMSET_NODE_PARAMS,
        to = dst,
        pitch = pitch,
        value = value,
        element_size = elementSize,
        width = width,
        height = height
    );
    same_layout!(
        CUmemcpy2D,
        sys::CUDA_MEMCPY2D,
        from.x = srcXInBytes,
        from.y = srcY,
        from.memory_type = srcMemoryType,
        from.host = srcHost,
        from.device = srcDevice,
        from.array = srcArray,
        from.pitch = srcPitch,
        to.x = dstXInBytes,
        to.y = dstY,
        to.memory_type = dstMemoryType,
        to.host = dstHost,
        to.device = dstDevice,
        to.array = dstArray,
        to.pitch = dstPitch,
        width = WidthInBytes,
        height = Height
    );
    same_layout!(
        CUarrayDescriptor,
        sys::CUDA_ARRAY_DESCRIPTOR,
        width = Width,
        height = Height,
        format = Format,
        channels = NumChannels
    );
    same_layout!(
        CUarray3DDescriptor,
        sys::CUDA_ARRAY3D_DESCRIPTOR,
        width = Width,
        height = Height,
        depth = Depth,
        format = Format,
        channels = NumChannels,
        flags = Flags
    );
    same_layout!(
        CUarraySparseProperties,
        sys::CUDA_ARRAY_SPARSE_PROPERTIES,
        tile = tileExtent,
        first_level_of_tail = miptailFirstLevel,
        tail_bytes = miptailSize,
        flags = flags,
        reserved = reserved
    );
    same_layout!(
        CUarrayMapInfo,
        sys::CUarrayMapInfo,
        resource_type = resourceType,
        resource = resource,
        subresource_type = subresourceType,
        subresource = subresource,
        operation = memOperationType,
        memory_type = memHandleType,
        memory = memHandle,
        offset = offset,
        devices = deviceBitMask,
        flags = flags,
        reserved = reserved
    );
}

#[test]
fn matches_header_layout_of_graph_structs() {
    same_layout!(
        CUgraphEdgeData,
        sys::CUgraphEdgeData,
        from_port = from_port,
        to_port = to_port,
        kind = type_,
        reserved = reserved
    );
    same_layout!(
        CUkernelNodeParams,
        sys::CUDA_KERNEL_NODE_PARAMS_v1,
        function = func,
        grid = gridDimX,
        block = blockDimX,
        shared_bytes = sharedMemBytes,
        pointers = kernelParams,
        extra = extra
    );
    same_layout!(
        CUkernelNodeParamsV2,
        sys::CUDA_KERNEL_NODE_PARAMS_v2,
        v1.function = func,
        v1.block = blockDimX,
        v1.pointers = kernelParams,
        kernel = kern,
        context = ctx
    );
    same_layout!(
        CUkernelNodeParamsV2,
        sys::CUDA_KERNEL_NODE_PARAMS_v3,
        kernel = kern,
        context = ctx
    );
    same_layout!(
        CUhostNodeParams,
        sys::CUDA_HOST_NODE_PARAMS,
        function = fn_,
        data = userData
    );
    same_layout!(
        CUmemcpyNodeParams,
        sys::CUDA_MEMCPY_NODE_PARAMS,
        flags = flags,
        context = copyCtx,
        copy = copyParams
    );
    same_layout!(
        CUmemsetNodeParamsV2,
        sys::CUDA_MEMSET_NODE_PARAMS_v2,
        v1.to = dst,
        v1.height = height,
        context = ctx
    );
    same_layout!(
        CUchildGraphNodeParams,
        sys::CUDA_CHILD_GRAPH_NODE_PARAMS,
        graph = graph,
        ownership = ownership
    );
    same_layout!(
        CUeventNodeParams,
        sys::CUDA_EVENT_RECORD_NODE_PARAMS,
        event = event
    );
    same_layout!(
        CUeventNodeParams,
        sys::CUDA_EVENT_WAIT_NODE_PARAMS,
        event = event
    );
    same_layout!(
        CUmemAllocNodeParams,
        sys::CUDA_MEM_ALLOC_NODE_PARAMS,
        pool = poolProps,
        access = accessDescs,
        access_count = accessDescCount,
        bytes = bytesize,
        address = dptr
    );
    same_layout!(
        CUmemAllocNodeParams,
        sys::CUDA_MEM_ALLOC_NODE_PARAMS_v2,
        bytes = bytesize,
        address = dptr
    );
    same_layout!(
        CUmemFreeNodeParams,
        sys::CUDA_MEM_FREE_NODE_PARAMS,
        address = dptr
    );
    same_layout!(
        CUgraphNodeParams,
        sys::CUgraphNodeParams,
        kind = type_,
        reserved0 = reserved0,
        parameters = __bindgen_anon_1,
        reserved2 = reserved2
    );
    same_layout!(
        CUgraphInstantiateParams,
        sys::CUDA_GRAPH_INSTANTIATE_PARAMS,
        flags = flags,
        upload_stream = hUploadStream,
        error_node = hErrNode_out,
        result = result_out
    );
    same_layout!(
        CUgraphExecUpdateResultInfo,
        sys::CUgraphExecUpdateResultInfo,
        result = result,
        error_node = errorNode,
        error_from_node = errorFromNode
    );
}

#[test]
fn matches_header_layout_of_batches_and_resources() {
    same_layout!(
        CUmemcpyAttributes,
        sys::CUmemcpyAttributes,
        access_order = srcAccessOrder,
        from = srcLocHint,
        to = dstLocHint,
        flags = flags
    );
    same_layout!(
        CUmemcpy3DOperand,
        sys::CUmemcpy3DOperand,
        kind = type_,
        place = op
    );
    same_layout!(
        CUmemcpy3DBatchOp,
        sys::CUDA_MEMCPY3D_BATCH_OP,
        from = src,
        to = dst,
        extent = extent,
        access_order = srcAccessOrder,
        flags = flags
    );
    same_layout!(
        CUdevResource,
        sys::CUdevResource,
        kind = type_,
        multiprocessors = __bindgen_anon_1
    );
    same_layout!(
        CUmulticastObjectProp,
        sys::CUmulticastObjectProp,
        devices = numDevices,
        bytes = size,
        handle_types = handleTypes,
        flags = flags
    );
    same_layout!(
        CUexternalMemoryHandleDesc,
        sys::CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
        kind = type_,
        descriptor = handle,
        bytes = size,
        flags = flags
    );
    same_layout!(
        CUexternalMemoryBufferDesc,
        sys::CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
        offset = offset,
        bytes = size,
        flags = flags
    );
}
