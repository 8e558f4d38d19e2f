//! `cuDeviceGetAttribute`: values by `CUdevice_attribute` number.

use std::ffi::{c_int, c_uint};

use simulator_machine::description::{AddressingMode, Architecture, GpuDescription, GpuModel};

/// Number of attributes in CUDA 13.0. Attributes without a value here read 0, like every capability
/// that is not simulated.
const COUNT: c_uint = 149;

/// Returns the value of an attribute, or `None` for a number that CUDA 13.0 does not define.
pub(crate) fn attribute(which: c_uint, model: &GpuModel, gpu: &GpuDescription) -> Option<c_int> {
    if !(1..COUNT).contains(&which) {
        return None;
    }
    let number = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
    let since =
        |architecture: Architecture| c_int::from(rank(model.architecture) >= rank(architecture));
    Some(match which {
        // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_{X,Y,Z}
        1..=3 => 1024,
        4 => 64,
        // MAX_GRID_DIM_{X,Y,Z}
        5 => c_int::MAX,
        6 | 7 => 65535,
        // MAX_SHARED_MEMORY_PER_BLOCK, TOTAL_CONSTANT_MEMORY
        8 => 48 << 10,
        9 => 64 << 10,
        // WARP_SIZE
        10 => 32,
        // MAX_PITCH
        11 => c_int::MAX,
        // MAX_REGISTERS_PER_BLOCK and _PER_MULTIPROCESSOR
        12 | 82 => 65536,
        // CLOCK_RATE, in kHz
        13 => number(model.clocks_mhz.graphics.saturating_mul(1000)),
        // TEXTURE_ALIGNMENT
        14 => 512,
        // GPU_OVERLAP, KERNEL_EXEC_TIMEOUT, INTEGRATED, CAN_MAP_HOST_MEMORY, COMPUTE_MODE
        15 => 1,
        18 => c_int::from(model.addressing_mode == AddressingMode::Ats),
        19 => 1,
        16 => number(model.compute.multiprocessors),
        // MAXIMUM_TEXTURE*_{WIDTH,HEIGHT,QUEUE_DEPTH}
        21 | 22 | 23 | 27..=29 | 55..=58 | 70..=74 => 32768,
        24..=26 => 16384,
        // SURFACE_ALIGNMENT
        30 => 512,
        // CONCURRENT_KERNELS
        31 => 1,
        // ECC_ENABLED
        32 => c_int::from(model.ecc),
        // PCI_BUS_ID, PCI_DEVICE_ID
        33 => c_int::from(gpu.bus_id.bus),
        34 => c_int::from(gpu.bus_id.device),
        // MEMORY_CLOCK_RATE, in kHz; GLOBAL_MEMORY_BUS_WIDTH
        36 => number(model.clocks_mhz.memory.saturating_mul(1000)),
        37 => number(model.memory.bus_width_bits),
        // L2_CACHE_SIZE
        38 => 50 << 20,
        39 => number(model.compute.threads_per_multiprocessor),
        // ASYNC_ENGINE_COUNT, UNIFIED_ADDRESSING
        40 => number(model.compute.copy_engines),
        41 => 1,
        // PCI_DOMAIN_ID, TEXTURE_PITCH_ALIGNMENT
        50 => number(gpu.bus_id.domain),
        51 => 32,
        // COMPUTE_CAPABILITY_MAJOR, _MINOR
        75 => number(model.compute_capability.major),
        76 => number(model.compute_capability.minor),
        // STREAM_PRIORITIES_SUPPORTED, GLOBAL_ and LOCAL_L1_CACHE_SUPPORTED
        78..=80 => 1,
        // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        81 => shared_memory(model.architecture),
        97 => shared_memory(model.architecture) - 1024,
        // MANAGED_MEMORY
        83 => 1,
        // HOST_NATIVE_ATOMIC_SUPPORTED, PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
        86 | 100 => c_int::from(model.addressing_mode == AddressingMode::Ats),
        // SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO
        87 => 2,
        // PAGEABLE_MEMORY_ACCESS
        88 => c_int::from(model.addressing_mode != AddressingMode::None),
        // CONCURRENT_MANAGED_ACCESS, COMPUTE_PREEMPTION_SUPPORTED
        89 | 90 => 1,
        // COOPERATIVE_LAUNCH
        95 => 1,
        // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        102 | 103 => 1,
        // MAX_BLOCKS_PER_MULTIPROCESSOR
        106 => 32,
        // GENERIC_COMPRESSION_SUPPORTED
        107 => 0,
        // MAX_PERSISTING_L2_CACHE_SIZE, MAX_ACCESS_POLICY_WINDOW_SIZE
        108 => (32 << 20) * since(Architecture::Ampere),
        109 => (128 << 20) * since(Architecture::Ampere),
        // RESERVED_SHARED_MEMORY_PER_BLOCK
        111 => 1024,
        // MEMORY_POOLS_SUPPORTED, MEMPOOL_SUPPORTED_HANDLE_TYPES
        115 | 119 => 1,
        // CLUSTER_LAUNCH
        120 => since(Architecture::Hopper),
        // NUMA_ID
        134 => gpu.numa_node.map_or(-1, number),
        // GPU_PCI_DEVICE_ID, GPU_PCI_SUBSYSTEM_ID
        139 => number(model.pci_device_id),
        140 => number(model.pci_subsystem_id),
        _ => 0,
    })
}

fn rank(architecture: Architecture) -> u32 {
    match architecture {
        Architecture::Turing => 0,
        Architecture::Ampere => 1,
        Architecture::Ada => 2,
        Architecture::Hopper => 3,
        Architecture::Blackwell => 4,
    }
}

/// Shared memory per multiprocessor, bytes.
fn shared_memory(architecture: Architecture) -> c_int {
    match architecture {
        Architecture::Turing => 64 << 10,
        Architecture::Ampere => 164 << 10,
        Architecture::Ada => 100 << 10,
        Architecture::Hopper | Architecture::Blackwell => 228 << 10,
    }
}
