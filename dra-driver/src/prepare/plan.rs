//! What a claim's allocation means on this node. Pure: a ResourceClaim and the inventory in, devices out.
//!
//! Everything that can be wrong with an allocation is found here, before anything is touched. The config of a claim is
//! hostile input, and so is the allocation itself: the controller wrote it, but the driver is who answers for the card.

use std::collections::BTreeMap;

use drava_api::config::{self, ConfigError, Settings};
use drava_api::{Quantity, names};
use drava_nvml::Card;
use drava_vgpu_abi::DeviceUuid;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;

use super::{Access, CardRef, Prepared, Share};
use crate::capacity::{ALL_CORES, MIB};
use crate::claim::{ClaimRef, ClaimUid, ShareId};
use crate::inventory::NodeInventory;

/// What is wrong with a claim. The text becomes the pod's event.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The claim of this name is another one now.
    #[error(
        "it was replaced by a claim of the same name (uid {found}); the pod must be deleted and created again"
    )]
    Replaced {
        /// UID of the present claim.
        found: String,
    },
    /// There is no such claim.
    #[error("it does not exist in the API server any more")]
    Gone,
    /// Nothing is allocated.
    #[error("it is not allocated (status.allocation is empty)")]
    NotAllocated,
    /// No pod may use it.
    #[error("it is not reserved for any pod (status.reservedFor is empty)")]
    NotReserved,
    /// Nothing of it is for this node.
    #[error("no device of pool {pool} is allocated to it; it is allocated on another node")]
    OtherNode {
        /// Pool of this node.
        pool: String,
    },
    /// The device is not on this node.
    #[error(
        "request {request}: device {device} is not on this node any more (present: {present}); \
         check the card with nvidia-smi, or delete the pod to have the claim allocated again"
    )]
    NoDevice {
        /// Request of the claim.
        request: String,
        /// Device allocated.
        device: String,
        /// Devices there are.
        present: String,
    },
    /// An allocation of a share without what makes it one.
    #[error(
        "request {request}: device {device} is shared but the allocation has no {missing}; {hint}"
    )]
    Incomplete {
        /// Request of the claim.
        request: String,
        /// Device allocated.
        device: String,
        /// What is missing.
        missing: &'static str,
        /// Why that may be.
        hint: &'static str,
    },
    /// An amount that cannot be.
    #[error(
        "request {request}: consumedCapacity.{capacity} of device {device} is {found}, {expected}"
    )]
    Amount {
        /// Request of the claim.
        request: String,
        /// Device allocated.
        device: String,
        /// Which capacity.
        capacity: &'static str,
        /// The value as it is written.
        found: String,
        /// What it can be.
        expected: &'static str,
    },
    /// The opaque config does not decode, or sets what it may not set.
    #[error("request {request}: {error}")]
    Config {
        /// Request of the claim.
        request: String,
        /// What is wrong.
        error: ConfigError,
    },
    /// Config for shares on a device that is none.
    #[error(
        "request {request}: config field {field} is for shares (type vgpu), but device {device} is a whole card"
    )]
    ConfigOnWholeCard {
        /// Request of the claim.
        request: String,
        /// Device allocated.
        device: String,
        /// The field.
        field: &'static str,
    },
    /// An id that is none.
    #[error("request {request}: {what} {found:?} is not valid")]
    Invalid {
        /// Request of the claim.
        request: String,
        /// Which id.
        what: &'static str,
        /// The text found.
        found: String,
    },
}

/// Decides what `wanted` gets on the node whose pool is `pool`. `found` is what the API server has under its name.
///
/// # Errors
/// What is wrong with the claim.
pub fn plan(
    wanted: &ClaimRef,
    found: Option<&ResourceClaim>,
    pool: &str,
    inventory: &NodeInventory,
) -> Result<Vec<Prepared>, Problem> {
    let claim = found.ok_or(Problem::Gone)?;
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    if uid != wanted.uid.as_str() {
        return Err(Problem::Replaced {
            found: uid.to_owned(),
        });
    }
    let status = claim.status.as_ref();
    let allocation = status
        .and_then(|status| status.allocation.as_ref())
        .ok_or(Problem::NotAllocated)?;
    if status
        .and_then(|status| status.reserved_for.as_ref())
        .is_none_or(Vec::is_empty)
    {
        return Err(Problem::NotReserved);
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
        return Err(Problem::OtherNode {
            pool: pool.to_owned(),
        });
    }
    ours.into_iter()
        .map(|result| {
            let settings =
                config::resolve(configs, &result.request).map_err(|error| Problem::Config {
                    request: result.request.clone(),
                    error,
                })?;
            device(result, &settings, inventory)
        })
        .collect()
}

fn device(
    result: &DeviceRequestAllocationResult,
    settings: &Settings,
    inventory: &NodeInventory,
) -> Result<Prepared, Problem> {
    let (card, shared) = resolve(result, inventory)?;
    let access = match (result.admin_access == Some(true), shared) {
        (true, _) => Access::Admin,
        (false, true) => {
            // The limits page names the card by the 16 bytes of its UUID.
            card.uuid
                .as_str()
                .parse::<DeviceUuid>()
                .map_err(|_| Problem::Invalid {
                    request: result.request.clone(),
                    what: "card UUID",
                    found: card.uuid.to_string(),
                })?;
            Access::Share(share(result, settings)?)
        }
        (false, false) => {
            whole_card_takes(result, settings)?;
            Access::Whole
        }
    };
    Ok(Prepared {
        request: main_request(&result.request).to_owned(),
        pool: result.pool.clone(),
        device: result.device.clone(),
        card: CardRef {
            uuid: card.uuid.to_string(),
            minor: card.minor,
            pci_bus_id: card.pci_bus_id.clone(),
        },
        access,
    })
}

/// Kubelet knows main requests only: an alternative `gpu/small` belongs to `gpu`.
fn main_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(main, _)| main)
}

/// The card of a result, and whether the device is its shares.
fn resolve<'a>(
    result: &DeviceRequestAllocationResult,
    inventory: &'a NodeInventory,
) -> Result<(&'a Card, bool), Problem> {
    let mut devices: BTreeMap<String, (&Card, bool)> = BTreeMap::new();
    for card in &inventory.gpus.cards {
        devices.insert(names::gpu_device(card.minor), (card, false));
        devices.insert(names::vgpu_device(card.minor), (card, true));
    }
    devices
        .get(&result.device)
        .copied()
        .ok_or_else(|| Problem::NoDevice {
            request: result.request.clone(),
            device: result.device.clone(),
            present: if devices.is_empty() {
                "none".to_owned()
            } else {
                devices
                    .keys()
                    .map(String::as_str)
                    .collect::<Vec<_>>()
                    .join(", ")
            },
        })
}

fn share(result: &DeviceRequestAllocationResult, settings: &Settings) -> Result<Share, Problem> {
    const OLD_SERVER: &str =
        "the API server needs the feature gate DRAConsumableCapacity (on since Kubernetes 1.36)";
    let incomplete = |missing, hint| Problem::Incomplete {
        request: result.request.clone(),
        device: result.device.clone(),
        missing,
        hint,
    };
    let id = result
        .share_id
        .as_deref()
        .ok_or_else(|| incomplete("shareID", OLD_SERVER))?;
    let id = ShareId::parse(id).map_err(|_| Problem::Invalid {
        request: result.request.clone(),
        what: "shareID",
        found: id.to_owned(),
    })?;
    let consumed = result
        .consumed_capacity
        .as_ref()
        .filter(|consumed| !consumed.is_empty())
        .ok_or_else(|| incomplete("consumedCapacity", OLD_SERVER))?;
    let writer = "whoever allocated the claim must set every capacity of the device";
    let amount = |capacity: &'static str, missing: &'static str| {
        consumed
            .get(capacity)
            .ok_or_else(|| incomplete(missing, writer))
    };
    let memory = amount(names::capacity::MEMORY, "consumedCapacity.memory")?;
    let cores = amount(names::capacity::CORES, "consumedCapacity.cores")?;
    let wrong = |capacity, found: &RawQuantity, expected| Problem::Amount {
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
                "it must be a positive multiple of 1Mi",
            )
        })?;
    let cores = whole(cores)
        .filter(|&percent| percent <= ALL_CORES)
        .ok_or_else(|| {
            wrong(
                names::capacity::CORES,
                cores,
                "it must be a whole number from 0 to 100",
            )
        })?;
    // An allocator that knows no slots takes one.
    let slots = match consumed.get(names::capacity::SLOTS) {
        None => 1,
        Some(slots) => whole(slots).filter(|&slots| slots >= 1).ok_or_else(|| {
            wrong(
                names::capacity::SLOTS,
                slots,
                "it must be a whole number from 1",
            )
        })?,
    };
    Ok(Share {
        id,
        memory_bytes,
        cores,
        slots,
        compute_policy: settings.compute_policy,
        priority: settings.priority,
        memory_policy: settings.memory_policy,
        enforcement: settings.enforcement,
        unmetered: settings.unmetered,
    })
}

fn whole(quantity: &RawQuantity) -> Option<u64> {
    let quantity = Quantity::try_from(quantity).ok()?;
    quantity
        .to_i64()
        .and_then(|value| u64::try_from(value).ok())
}

/// A tenant who limits a whole card would believe in a limit that nobody enforces.
fn whole_card_takes(
    result: &DeviceRequestAllocationResult,
    settings: &Settings,
) -> Result<(), Problem> {
    let defaults = Settings::default();
    let refuse = |field| Problem::ConfigOnWholeCard {
        request: result.request.clone(),
        device: result.device.clone(),
        field,
    };
    if settings.memory_percent.is_some() {
        return Err(refuse("memory.percent"));
    }
    if settings.compute_policy != defaults.compute_policy {
        return Err(refuse("computePolicy"));
    }
    if settings.memory_policy != defaults.memory_policy {
        return Err(refuse("memory.policy"));
    }
    Ok(())
}

/// The claim that `claim` is, if it is complete enough to be one.
#[must_use]
pub fn claim_ref(claim: &ResourceClaim) -> Option<ClaimRef> {
    Some(ClaimRef {
        namespace: claim.metadata.namespace.clone()?,
        name: claim.metadata.name.clone()?,
        uid: ClaimUid::parse(claim.metadata.uid.as_deref()?).ok()?,
    })
}
