//! NUMA, CPU affinity, NVLink, fabric and GPU topology.

use std::ffi::{c_uint, c_ulong};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceAddressingMode_t, nvmlEnableState_t, nvmlGpuFabricInfo_t,
    nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfoV_t, nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t,
    nvmlGpuTopologyLevel_t,
};
use simulator_machine::description::AddressingMode;

use crate::abi::{NvmlResult, Out, entry_points, set_list};
use crate::error::NvmlError;
use crate::fields::driver_branch;
use crate::handle::{Device, device, handle as handle_of};

/// `NVML_TOPOLOGY_*`
const SAME_GPU: nvmlGpuTopologyLevel_t = 0;
const SAME_NODE: nvmlGpuTopologyLevel_t = 40;
const WHOLE_SYSTEM: nvmlGpuTopologyLevel_t = 50;

entry_points! {
    fn nvmlDeviceGetNumaNodeId(handle: nvmlDevice_t, node: Out<c_uint>) {
        node.set(device(handle)?.described()?.numa_node.ok_or(NvmlError::NotSupported)?)
    }

    fn nvmlDeviceGetAddressingMode(handle: nvmlDevice_t, mode: Out<nvmlDeviceAddressingMode_t>) {
        let device = device(handle)?;
        let version = mode.require_version(1)?;
        let value = match device.model()?.addressing_mode {
            AddressingMode::None => 0,
            AddressingMode::Hmm => 1,
            AddressingMode::Ats => 2,
        };
        mode.set(nvmlDeviceAddressingMode_t { version, value })
    }

    fn nvmlDeviceGetTopologyCommonAncestor(first: nvmlDevice_t, second: nvmlDevice_t, level: Out<nvmlGpuTopologyLevel_t>) {
        level.set(common_ancestor(device(first)?, device(second)?)?)
    }

    fn nvmlDeviceGetTopologyNearestGpus(handle: nvmlDevice_t, level: nvmlGpuTopologyLevel_t, count: Out<c_uint>, devices: Out<nvmlDevice_t>) {
        let near = device(handle)?;
        let mut found = Vec::new();
        for gpu in near.library.visible().iter().copied().filter(|gpu| *gpu != near.gpu) {
            let other = Device { gpu, ..near };
            if common_ancestor(near, other)? == level {
                found.push(handle_of(gpu));
            }
        }
        // Unlike other lists: capacity 0 succeeds and returns the count; otherwise the list is
        // truncated.
        let wanted = match count.get()? {
            0 => return count.set(c_uint::try_from(found.len()).map_err(|_| NvmlError::Unknown)?),
            wanted => usize::try_from(wanted).map_err(|_| NvmlError::InvalidArgument)?,
        };
        found.truncate(wanted);
        set_list(count, devices, found)
    }

    fn nvmlDeviceGetP2PStatus(first: nvmlDevice_t, second: nvmlDevice_t, capability: nvmlGpuP2PCapsIndex_t, status: Out<nvmlGpuP2PStatus_t>) {
        const NVLINK: nvmlGpuP2PCapsIndex_t = 2;
        const UNKNOWN_CAPABILITY: nvmlGpuP2PCapsIndex_t = 5;
        const OK: nvmlGpuP2PStatus_t = 0;
        const NOT_SUPPORTED: nvmlGpuP2PStatus_t = 5;
        let (first, second) = (device(first)?, device(second)?);
        if capability >= UNKNOWN_CAPABILITY {
            return Err(NvmlError::InvalidArgument);
        }
        // GPUs before Hopper have NVLink but report no fabric.
        let linked = first.model()?.nvlink.is_some()
            && second.model()?.nvlink.is_some()
            && first.described()?.fabric == second.described()?.fabric;
        status.set(if capability == NVLINK && !linked { NOT_SUPPORTED } else { OK })
    }

    fn nvmlDeviceGetNvLinkState(handle: nvmlDevice_t, link: c_uint, active: Out<nvmlEnableState_t>) {
        nvlink(handle, link)?;
        active.set(1)
    }

    fn nvmlDeviceGetNvLinkVersion(handle: nvmlDevice_t, link: c_uint, version: Out<c_uint>) {
        version.set(nvlink(handle, link)?)
    }

    fn nvmlDeviceGetGpuFabricInfo(handle: nvmlDevice_t, info: Out<nvmlGpuFabricInfo_t>) {
        let (clusterUuid, cliqueId, state) = fabric(device(handle)?)?;
        info.set(nvmlGpuFabricInfo_t { clusterUuid, status: 0, cliqueId, state })
    }

    fn nvmlDeviceGetGpuFabricInfoV(handle: nvmlDevice_t, info: Out<nvmlGpuFabricInfoV_t>) {
        let device = device(handle)?;
        // Since CUDA 12.4.
        if driver_branch(device) < 550 {
            return Err(NvmlError::FunctionNotFound);
        }
        let (clusterUuid, cliqueId, state) = fabric(device)?;
        let (status, healthMask) = (0, device.state()?.fabric_health_mask);
        let v2 = info.as_version::<nvmlGpuFabricInfo_v2_t>();
        if let Ok(version) = v2.require_version(2) {
            return v2.set(nvmlGpuFabricInfo_v2_t { version, clusterUuid, status, cliqueId, state, healthMask });
        }
        let version = info.require_version(3)?;
        info.set(nvmlGpuFabricInfoV_t {
            version,
            clusterUuid,
            status,
            cliqueId,
            state,
            healthMask,
            healthSummary: if has_fabric_defect(healthMask) { UNHEALTHY } else { HEALTHY },
        })
    }

    fn nvmlDeviceGetCpuAffinity(handle: nvmlDevice_t, words: c_uint, set: Out<c_ulong>) {
        device(handle)?;
        whole_set(words, set)
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(handle: nvmlDevice_t, words: c_uint, set: Out<c_ulong>, _scope: c_uint) {
        device(handle)?;
        whole_set(words, set)
    }

    fn nvmlDeviceGetMemoryAffinity(handle: nvmlDevice_t, words: c_uint, set: Out<c_ulong>, _scope: c_uint) {
        let node = device(handle)?.described()?.numa_node.ok_or(NvmlError::NotSupported)?;
        let words = usize::try_from(words).map_err(|_| NvmlError::InvalidArgument)?;
        for (word, first) in set.elements(words)?.zip((0..).step_by(64)) {
            let bit = node.checked_sub(first).filter(|bit| *bit < 64);
            word.set(bit.map_or(0, |bit| 1 << bit))?;
        }
        Ok(())
    }
}

/// `NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY`
const HEALTHY: std::ffi::c_uchar = 1;

/// `NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY`
const UNHEALTHY: std::ffi::c_uchar = 2;

/// Whether one of the four conditions of two bits is "true", or the configuration is neither "not supported" nor "none".
fn has_fabric_defect(mask: c_uint) -> bool {
    [0, 2, 4, 6].into_iter().any(|shift| mask >> shift & 3 == 1) || mask >> 8 & 15 > 1
}

fn common_ancestor(first: Device, second: Device) -> NvmlResult<nvmlGpuTopologyLevel_t> {
    if first.gpu == second.gpu {
        return Ok(SAME_GPU);
    }
    let same_node = first.described()?.numa_node == second.described()?.numa_node;
    Ok(if same_node { SAME_NODE } else { WHOLE_SYSTEM })
}

/// The NVLink version if the link exists.
fn nvlink(handle: nvmlDevice_t, link: c_uint) -> NvmlResult<c_uint> {
    let nvlink = device(handle)?
        .model()?
        .nvlink
        .ok_or(NvmlError::NotSupported)?;
    if link >= nvlink.links {
        return Err(NvmlError::InvalidArgument);
    }
    Ok(nvlink.version)
}

/// Cluster UUID, clique and state of a GPU's fabric.
fn fabric(device: Device) -> NvmlResult<([u8; 16], c_uint, u8)> {
    const NOT_SUPPORTED: u8 = 0;
    const COMPLETED: u8 = 3;
    let Some(fabric) = &device.described()?.fabric else {
        return Ok(([0; 16], 0, NOT_SUPPORTED));
    };
    let digits: Vec<u8> = fabric
        .cluster_uuid
        .chars()
        .filter_map(|digit| digit.to_digit(16))
        .filter_map(|digit| u8::try_from(digit).ok())
        .collect();
    let mut uuid = [0; 16];
    for (byte, pair) in uuid.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair.iter().fold(0, |byte, digit| byte << 4 | digit);
    }
    Ok((
        uuid,
        fabric.clique,
        device.state()?.fabric_state.unwrap_or(COMPLETED),
    ))
}

/// All CPUs: the simulated GPUs have no affinity.
fn whole_set(words: c_uint, set: Out<c_ulong>) -> NvmlResult {
    let words = usize::try_from(words).map_err(|_| NvmlError::InvalidArgument)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    for (word, first) in set.elements(words)?.zip((0..).step_by(64)) {
        let bits = processors.saturating_sub(first).min(64);
        word.set((0..bits).fold(0, |mask, bit| mask | 1 << bit))?;
    }
    Ok(())
}
