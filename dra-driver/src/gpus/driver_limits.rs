//! Whether the NVIDIA driver can limit the memory of a cgroup, by GPU.
//!
//! NVIDIA's documentation names requirements (release 615, cgroup v2, no MIG), but not all: the driver chooses its backend when it
//! is loaded. So each GPU is tried, with a limit on a cgroup without processes.

use std::collections::BTreeMap;
use std::path::Path;

use drava_api::error::describe;
use drava_api::obstacle::LimitObstacle;
use drava_nvml::{CgroupMemory, Gpu, GpuError, GpuLibrary, GpuUuid, Inventory, Mig, Status};

use crate::gpus::cgroups::{CgroupError, Cgroups};

/// The limit of the probe.
const PROBE_BYTES: u64 = 1 << 30;

/// GPUs with whether the NVIDIA driver can limit memory, or why not. A GPU without an entry was not tried.
pub type DriverLimits = BTreeMap<GpuUuid, Result<(), LimitObstacle>>;

/// Returns the state after a scan. A GPU is tried until its driver can; of one that does not answer nothing new is known.
#[must_use]
pub fn update(
    library: &dyn GpuLibrary,
    nvml: &Inventory,
    cgroups: &Cgroups,
    known: &DriverLimits,
) -> DriverLimits {
    let is_faulty = |gpu: &Gpu| {
        let mut faults = nvml.faults.iter();
        faults.any(|fault| fault.gpu.as_ref() == Some(&gpu.uuid))
    };
    let is_settled = |gpu: &Gpu| {
        is_faulty(gpu) || (known.get(&gpu.uuid) == Some(&Ok(())) && !is_partitioned(gpu))
    };
    let (settled, tried): (Vec<Gpu>, Vec<Gpu>) = nvml.gpus.iter().cloned().partition(is_settled);
    let kept = settled.into_iter().filter_map(|gpu| {
        let known = *known.get(&gpu.uuid)?;
        Some((gpu.uuid, known))
    });
    let mut limits: DriverLimits = kept.collect();
    let mut probed = match tried.is_empty() {
        true => DriverLimits::new(),
        false => probe(library, &tried, cgroups),
    };
    limits.extend(tried.into_iter().filter_map(|gpu| {
        let found = probed.remove(&gpu.uuid);
        let found = found.or_else(|| known.get(&gpu.uuid).copied());
        Some((gpu.uuid, found?))
    }));
    limits
}

/// Returns whether the error says that NVML or the GPU does not answer, and nothing of limits.
fn is_no_answer(status: &Status) -> bool {
    matches!(
        status,
        Status::GpuLost
            | Status::ResetRequired
            | Status::DriverNotLoaded
            | Status::VersionMismatch
            | Status::Load(_)
            | Status::Timeout
            | Status::Other(_)
    )
}

fn is_partitioned(gpu: &Gpu) -> bool {
    matches!(gpu.mig, Mig::Capable { enabled: true, .. })
}

/// Tries all GPUs; those that do not answer are left out. Without the functions in NVML no cgroup is changed.
#[must_use]
pub fn probe(library: &dyn GpuLibrary, gpus: &[Gpu], cgroups: &Cgroups) -> DriverLimits {
    let none = |gpus: &[Gpu], obstacle| -> DriverLimits {
        let of_gpu = |gpu: &Gpu| (gpu.uuid.clone(), Err(obstacle));
        gpus.iter().map(of_gpu).collect()
    };
    let read = |gpu: &Gpu| library.cgroup_memory(&gpu.uuid, cgroups.root());
    let missing = |error: &GpuError| matches!(error.status, Status::MissingSymbol(_));
    let mut answering = Vec::new();
    for gpu in gpus {
        match read(gpu) {
            Err(error) if missing(&error) => return none(gpus, LimitObstacle::OldDriver),
            Err(error) if is_no_answer(&error.status) => {}
            Ok(_) | Err(_) => answering.push(gpu.clone()),
        }
    }
    let gpus = answering.as_slice();
    if gpus.is_empty() {
        return DriverLimits::new();
    }
    let tried = cgroups.with_probe(|directory, enabled| {
        // Of the backends of the driver only one needs the controller.
        let unsupported = match (enabled, cgroups.has_device_memory()) {
            (Err(_), _) => LimitObstacle::NotEnabled,
            (Ok(()), false) => LimitObstacle::NoController,
            (Ok(()), true) => LimitObstacle::Refused,
        };
        let probed = |gpu: &Gpu| probe_gpu(library, gpu, directory, unsupported);
        let of_gpu = |gpu: &Gpu| (gpu.uuid.clone(), probed(gpu));
        gpus.iter().map(of_gpu).collect()
    });
    tried.unwrap_or_else(|error| {
        tracing::debug!(error = describe(&error), "cannot try memory limits");
        let obstacle = match error {
            CgroupError::NoUnified { .. } => LimitObstacle::NoCgroupV2,
            CgroupError::Controller { .. }
            | CgroupError::File { .. }
            | CgroupError::NotOfContainer { .. } => LimitObstacle::Failed,
        };
        none(gpus, obstacle)
    })
}

fn probe_gpu(
    library: &dyn GpuLibrary,
    gpu: &Gpu,
    directory: &Path,
    unsupported: LimitObstacle,
) -> Result<(), LimitObstacle> {
    if is_partitioned(gpu) {
        return Err(LimitObstacle::Mig);
    }
    match try_limit(library, &gpu.uuid, directory) {
        Ok(true) => Ok(()),
        Ok(false) => Err(LimitObstacle::Failed),
        Err(error) => {
            tracing::debug!(error = describe(&error), "cannot limit memory");
            Err(match error.status {
                Status::NotSupported => unsupported,
                _ => LimitObstacle::Failed,
            })
        }
    }
}

/// Returns whether a limit was kept.
fn try_limit(library: &dyn GpuLibrary, gpu: &GpuUuid, directory: &Path) -> Result<bool, GpuError> {
    library.set_memory_limit(gpu, directory, Some(PROBE_BYTES))?;
    let kept = library.cgroup_memory(gpu, directory);
    library.set_memory_limit(gpu, directory, None)?;
    let CgroupMemory { limit_bytes, .. } = kept?;
    Ok(limit_bytes == Some(PROBE_BYTES))
}
