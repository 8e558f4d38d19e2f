//! Devices of a claim's allocation on this node. Pure.
//!
//! The plan validates the allocation before the node is changed. Both the config of the claim and the allocation are
//! untrusted input.

use drava_api::config::{self, ConfigError, MemoryBurst, MemoryEnforcement, Percent, Settings};
use drava_api::obstacle::LimitObstacle;
use drava_api::{Quantity, names};
use drava_nvml::Gpu;
use drava_vgpu_abi::DeviceUuid;
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Access, GpuRef, Partition, Prepared, Share};
use crate::gpus::capacity::{ALL_CORES, MIB, ShareOffer, ShareTotals};
use crate::gpus::gpu_plan::{self, DeviceKind};
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};

/// The claim or its allocation is invalid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Another claim has this name now.
    #[error("replaced by a claim of the same name (uid {found}); delete and recreate the pod")]
    Replaced {
        /// UID of the other claim.
        found: String,
    },
    /// The claim does not exist.
    #[error("not found in the API server")]
    NotFound,
    /// The claim has no allocation.
    #[error("not allocated (status.allocation is empty)")]
    NotAllocated,
    /// The claim is not reserved.
    #[error("not reserved for a pod (status.reservedFor is empty)")]
    NotReserved,
    /// The allocation has no device of this node.
    #[error("allocated on another node: the allocation has no device of pool {pool}")]
    OtherNode {
        /// Pool of this node.
        pool: String,
    },
    /// The device is not on this node.
    #[error(
        "request {request}: device {device} is not on this node (present: {present}); check the GPU with nvidia-smi, \
         or delete the pod to release the allocation"
    )]
    NoDevice {
        /// Request of the claim.
        request: String,
        /// Allocated device.
        device: String,
        /// Devices of this node.
        present: String,
    },
    /// The allocation of a share lacks a field.
    #[error("request {request}: the allocation of shared device {device} has no {missing}; {hint}")]
    Incomplete {
        /// Request of the claim.
        request: String,
        /// Allocated device.
        device: String,
        /// The missing field.
        missing: &'static str,
        /// Remedy.
        hint: &'static str,
    },
    /// An amount is out of range.
    #[error(
        "request {request}: consumedCapacity.{capacity} of device {device} is {found}, expected {expected}"
    )]
    Amount {
        /// Request of the claim.
        request: String,
        /// Allocated device.
        device: String,
        /// Name of the capacity.
        capacity: &'static str,
        /// Value in the allocation.
        found: String,
        /// Valid values.
        expected: &'static str,
    },
    /// The opaque config is invalid or sets a field that a claim may not set.
    #[error("request {request}: {error}")]
    Config {
        /// Request of the claim.
        request: String,
        /// Error of the config.
        error: ConfigError,
    },
    /// The config of a whole GPU or a partition has a field that applies to shares only.
    #[error(
        "request {request}: config field {field} applies to shares (type vgpu), but device {device} is {kind}"
    )]
    ConfigWithoutShare {
        /// Request of the claim.
        request: String,
        /// Allocated device.
        device: String,
        /// Type of the device, as text.
        kind: &'static str,
        /// The field.
        field: &'static str,
    },
    /// The allocator did not apply a percentage of the memory.
    #[error(
        "request {request}: config field memory.percent: the allocation has all memory of device {device} instead of \
         {percent}%; only the controller applies percentages (scheduling.mode=managed), request an amount of memory"
    )]
    PercentNotApplied {
        /// Request of the claim.
        request: String,
        /// Allocated device.
        device: String,
        /// The percentage.
        percent: u8,
    },
    /// The device class requires that the NVIDIA driver limits the memory, and it cannot.
    #[error(
        "request {request}: the device class requires memory.enforcement: driver, but the NVIDIA driver cannot limit the memory of \
         device {device}: {obstacle}; or add the selector device.attributes[\"gpu.drava.dev\"].memoryEnforcement == \"driver\" to the class"
    )]
    NoDriverLimit {
        /// Request of the claim.
        request: String,
        /// Allocated device.
        device: String,
        /// What is missing.
        obstacle: LimitObstacle,
    },
    /// The device class requires a share of the multiprocessors, and the GPU can have none.
    #[error(
        "request {request}: the device class requires computePolicy: spatial, which device {device} cannot have: {obstacle}; or add \
         the selector device.attributes[\"gpu.drava.dev\"].spatialObstacle == \"none\" to the class"
    )]
    NoSpatial {
        /// Request of the claim.
        request: String,
        /// Allocated device.
        device: String,
        /// What is missing, for this GPU.
        obstacle: String,
    },
    /// A claim with a spatial share has more devices.
    #[error(
        "the claim has {devices} devices, one of them with computePolicy: spatial; a program is a client of one MPS daemon, which \
         serves one GPU: request one share only"
    )]
    SeveralSpatial {
        /// Number of devices.
        devices: usize,
    },
    /// An ID is invalid.
    #[error("request {request}: invalid {what} {found:?}")]
    Invalid {
        /// Request of the claim.
        request: String,
        /// Kind of ID.
        what: &'static str,
        /// Text in the allocation or inventory.
        found: String,
    },
}

/// Returns the devices of `wanted` on the node with this pool. `found` is the claim as the API server has it.
///
/// # Errors
/// When the claim or its allocation is invalid.
pub fn plan(
    wanted: &ClaimRef,
    found: Option<&ResourceClaim>,
    pool: &str,
    inventory: &NodeInventory,
) -> Result<Vec<Prepared>, PlanError> {
    let claim = found.ok_or(PlanError::NotFound)?;
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    if uid != wanted.uid.as_str() {
        return Err(PlanError::Replaced {
            found: uid.to_owned(),
        });
    }
    let status = claim.status.as_ref();
    let allocation = status
        .and_then(|status| status.allocation.as_ref())
        .ok_or(PlanError::NotAllocated)?;
    if status
        .and_then(|status| status.reserved_for.as_ref())
        .is_none_or(Vec::is_empty)
    {
        return Err(PlanError::NotReserved);
    }
    let allocated = allocation.devices.as_ref();
    let results = allocated
        .and_then(|devices| devices.results.as_deref())
        .unwrap_or_default();
    let configs = allocated
        .and_then(|devices| devices.config.as_deref())
        .unwrap_or_default();
    let ours: Vec<_> = results
        .iter()
        .filter(|result| result.driver == names::DRIVER && result.pool == pool)
        .collect();
    if ours.is_empty() {
        return Err(PlanError::OtherNode {
            pool: pool.to_owned(),
        });
    }
    let devices = ours.into_iter();
    let devices = devices.map(|result| device(result, configs, inventory));
    let devices: Vec<Prepared> = devices.collect::<Result<_, _>>()?;
    let mut shares = devices.iter().filter_map(Prepared::share);
    if devices.len() > 1 && shares.any(Share::is_spatial) {
        return Err(PlanError::SeveralSpatial {
            devices: devices.len(),
        });
    }
    Ok(devices)
}

fn device(
    result: &DeviceRequestAllocationResult,
    configs: &[DeviceAllocationConfiguration],
    inventory: &NodeInventory,
) -> Result<Prepared, PlanError> {
    let (gpu, kind) = resolve(result, inventory)?;
    // The defaults of the node profile are those of shares.
    let defaults = match kind {
        AllocatedKind::Shares => inventory.gpu_settings(gpu.uuid.as_str()).share_defaults(),
        AllocatedKind::Whole | AllocatedKind::Partition(_) => Settings::default(),
    };
    let settings = config::resolve_over(defaults, configs, &result.request);
    let settings = &settings.map_err(|error| PlanError::Config {
        request: result.request.clone(),
        error,
    })?;
    let access = match (result.admin_access == Some(true), kind) {
        (true, _) => Access::Admin,
        (false, AllocatedKind::Shares) => {
            // The limits page stores the UUID as 16 bytes.
            gpu.uuid
                .as_str()
                .parse::<DeviceUuid>()
                .map_err(|_| PlanError::Invalid {
                    request: result.request.clone(),
                    what: "GPU UUID",
                    found: gpu.uuid.to_string(),
                })?;
            check_spatial(result, settings, gpu, inventory)?;
            let limited_by_driver = limited_by_driver(result, settings, gpu, inventory)?;
            let share = share(result, settings, limited_by_driver)?;
            check_percent(result, settings, &share, inventory.plan(gpu).share_offer())?;
            Access::Share(share)
        }
        (false, AllocatedKind::Whole) => {
            check_config_without_share(result, settings, "a whole GPU")?;
            Access::Whole
        }
        (false, AllocatedKind::Partition(partition)) => {
            check_config_without_share(result, settings, "a MIG partition")?;
            Access::Partition(partition)
        }
    };
    Ok(Prepared {
        request: main_request(&result.request).to_owned(),
        pool: result.pool.clone(),
        device: result.device.clone(),
        gpu: GpuRef {
            uuid: gpu.uuid.to_string(),
            minor: gpu.minor,
            pci_bus_id: gpu.pci_bus_id.clone(),
        },
        access,
    })
}

/// Returns the main request of a request: kubelet does not know alternatives such as `gpu/small`.
pub(super) fn main_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(main, _)| main)
}

/// Type of an allocated device.
enum AllocatedKind {
    Whole,
    Shares,
    Partition(Partition),
}

/// Returns the GPU of a result and the type of the device. All types are found in every mode of the GPU, so that the
/// overcommit check can name the reason.
fn resolve<'a>(
    result: &DeviceRequestAllocationResult,
    inventory: &'a NodeInventory,
) -> Result<(&'a Gpu, AllocatedKind), PlanError> {
    let mut present = Vec::new();
    for gpu in &inventory.nvml.gpus {
        let number = inventory.number(gpu);
        let partitions = gpu_plan::partitions(gpu, number);
        for (name, kind) in [
            (names::gpu_device(number), AllocatedKind::Whole),
            (names::vgpu_device(number), AllocatedKind::Shares),
        ] {
            if name == result.device {
                return Ok((gpu, kind));
            }
            present.push(name);
        }
        if !partitions.is_empty() {
            present.push(format!("{} partitions of gpu-{number}", partitions.len()));
        }
        let allocated = partitions
            .into_iter()
            .find(|device| device.name == result.device);
        if let Some(DeviceKind::Partition { profile, placement }) =
            allocated.map(|device| device.kind)
        {
            let partition = Partition {
                profile: profile.name,
                profile_id: profile.id,
                start: placement.start,
                size: placement.size,
                boot_id: String::new(),
                instance: None,
            };
            return Ok((gpu, AllocatedKind::Partition(partition)));
        }
    }
    let present = if present.is_empty() {
        "none".to_owned()
    } else {
        present.join(", ")
    };
    Err(PlanError::NoDevice {
        request: result.request.clone(),
        device: result.device.clone(),
        present,
    })
}

/// Returns whether the NVIDIA driver limits the memory of a share.
fn limited_by_driver(
    result: &DeviceRequestAllocationResult,
    settings: &Settings,
    gpu: &Gpu,
    inventory: &NodeInventory,
) -> Result<bool, PlanError> {
    match (
        settings.memory_enforcement,
        inventory.driver_limit(&gpu.uuid),
    ) {
        (MemoryEnforcement::Library, _) | (MemoryEnforcement::Auto, Err(_)) => Ok(false),
        (MemoryEnforcement::Auto | MemoryEnforcement::Driver, Ok(())) => Ok(true),
        (MemoryEnforcement::Driver, Err(obstacle)) => Err(PlanError::NoDriverLimit {
            request: result.request.clone(),
            device: result.device.clone(),
            obstacle,
        }),
    }
}

/// Rejects a spatial share of a GPU that can have none.
fn check_spatial(
    result: &DeviceRequestAllocationResult,
    settings: &Settings,
    gpu: &Gpu,
    inventory: &NodeInventory,
) -> Result<(), PlanError> {
    if !settings.is_spatial() {
        return Ok(());
    }
    inventory
        .spatial(gpu)
        .map_err(|obstacle| PlanError::NoSpatial {
            request: result.request.clone(),
            device: result.device.clone(),
            obstacle: obstacle.of_gpu(gpu.uuid.as_str()),
        })
}

fn share(
    result: &DeviceRequestAllocationResult,
    settings: &Settings,
    limited_by_driver: bool,
) -> Result<Share, PlanError> {
    let (id, amounts) = amounts(result)?;
    let ShareTotals {
        memory_bytes,
        cores,
        slots,
    } = amounts;
    let limit_bytes = limit_bytes(result, settings, memory_bytes)?;
    Ok(Share {
        id,
        memory_bytes,
        limit_bytes,
        bursts_idle: limit_bytes.is_some() && settings.memory_burst == MemoryBurst::Idle,
        lends_idle: settings.lends_idle(),
        can_suspend: settings.allows_suspend(),
        cores,
        slots,
        compute_policy: settings.compute_policy,
        priority: settings.priority,
        memory_policy: settings.memory_policy,
        limited_by_driver,
        enforcement: settings.enforcement,
        unmetered: settings.unmetered,
        grants: Vec::new(),
        suspension: None,
    })
}

/// Returns the memory limit of a share, if it is above its guarantee.
fn limit_bytes(
    result: &DeviceRequestAllocationResult,
    settings: &Settings,
    guarantee_bytes: u64,
) -> Result<Option<u64>, PlanError> {
    let limit = settings.burst_limit(guarantee_bytes);
    let limit = limit.map_err(|error| PlanError::Config {
        request: result.request.clone(),
        error: error.into(),
    })?;
    Ok(limit
        .map(|bytes| bytes - bytes % MIB)
        .filter(|bytes| *bytes > guarantee_bytes))
}

/// Returns ID and amounts of an allocated share.
pub(super) fn amounts(
    result: &DeviceRequestAllocationResult,
) -> Result<(ShareId, ShareTotals), PlanError> {
    const FEATURE_GATE: &str = "enable the feature gate DRAConsumableCapacity of the API server (default since \
                                Kubernetes 1.36)";
    let incomplete = |missing, hint| PlanError::Incomplete {
        request: result.request.clone(),
        device: result.device.clone(),
        missing,
        hint,
    };
    let id = result
        .share_id
        .as_deref()
        .ok_or_else(|| incomplete("shareID", FEATURE_GATE))?;
    let id = ShareId::parse(id).map_err(|_| PlanError::Invalid {
        request: result.request.clone(),
        what: "shareID",
        found: id.to_owned(),
    })?;
    let consumed = result
        .consumed_capacity
        .as_ref()
        .filter(|consumed| !consumed.is_empty())
        .ok_or_else(|| incomplete("consumedCapacity", FEATURE_GATE))?;
    let allocator = "the allocator must set every capacity of the device";
    let amount = |capacity: &'static str, missing: &'static str| {
        consumed
            .get(capacity)
            .ok_or_else(|| incomplete(missing, allocator))
    };
    let memory = amount(names::capacity::MEMORY, "consumedCapacity.memory")?;
    let cores = amount(names::capacity::CORES, "consumedCapacity.cores")?;
    let wrong = |capacity, found: &RawQuantity, expected| PlanError::Amount {
        request: result.request.clone(),
        device: result.device.clone(),
        capacity,
        found: found.0.clone(),
        expected,
    };
    let memory_bytes = whole(memory)
        .filter(|&bytes| bytes >= MIB && bytes % MIB == 0)
        .ok_or_else(|| {
            wrong(
                names::capacity::MEMORY,
                memory,
                "a positive multiple of 1Mi",
            )
        })?;
    let cores = whole(cores)
        .filter(|&percent| percent <= ALL_CORES)
        .ok_or_else(|| wrong(names::capacity::CORES, cores, "an integer from 0 to 100"))?;
    // Allocators other than drava's may not set slots.
    let slots = match consumed.get(names::capacity::SLOTS) {
        None => 1,
        Some(slots) => whole(slots)
            .filter(|&slots| slots >= 1)
            .ok_or_else(|| wrong(names::capacity::SLOTS, slots, "an integer of at least 1"))?,
    };
    let amounts = ShareTotals {
        memory_bytes,
        cores,
        slots,
    };
    Ok((id, amounts))
}

/// Rejects a share of all memory for a claim that requests a percentage: kube-scheduler allocates it (mode native).
fn check_percent(
    result: &DeviceRequestAllocationResult,
    settings: &Settings,
    share: &Share,
    offer: Option<ShareOffer>,
) -> Result<(), PlanError> {
    match (settings.memory_percent.map(Percent::get), offer) {
        (Some(percent), Some(offer))
            if percent < 100 && share.memory_bytes >= offer.max_memory_bytes =>
        {
            Err(PlanError::PercentNotApplied {
                request: result.request.clone(),
                device: result.device.clone(),
                percent,
            })
        }
        _ => Ok(()),
    }
}

fn whole(quantity: &RawQuantity) -> Option<u64> {
    let quantity = Quantity::try_from(quantity).ok()?;
    quantity
        .to_i64()
        .and_then(|value| u64::try_from(value).ok())
}

/// Rejects limits on a device without shares: they would have no effect.
fn check_config_without_share(
    result: &DeviceRequestAllocationResult,
    settings: &Settings,
    kind: &'static str,
) -> Result<(), PlanError> {
    let defaults = Settings::default();
    let reject = |field| PlanError::ConfigWithoutShare {
        request: result.request.clone(),
        device: result.device.clone(),
        kind,
        field,
    };
    if settings.memory_percent.is_some() {
        return Err(reject("memory.percent"));
    }
    if settings.compute_policy != defaults.compute_policy {
        return Err(reject("computePolicy"));
    }
    if settings.memory_policy != defaults.memory_policy {
        return Err(reject("memory.policy"));
    }
    if settings.memory_enforcement == MemoryEnforcement::Driver {
        return Err(reject("memory.enforcement"));
    }
    if settings.memory_limit.is_some() {
        return Err(reject("memory.limit"));
    }
    Ok(())
}

/// Returns the reference of a claim; `None` when its metadata is incomplete.
#[must_use]
pub fn claim_ref(metadata: &ObjectMeta) -> Option<ClaimRef> {
    Some(ClaimRef {
        namespace: metadata.namespace.clone()?,
        name: metadata.name.clone()?,
        uid: ClaimUid::of(metadata)?,
    })
}
