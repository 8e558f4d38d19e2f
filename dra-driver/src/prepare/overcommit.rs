//! Overcommit check of a claim against the prepared claims of this node. Pure.
//!
//! The API server does not check claims against each other: two allocators, or a claim that was force-deleted while its
//! pod still runs, can overcommit a GPU. The check uses the records of this node only.

use std::collections::BTreeMap;
use std::fmt;

use super::{Access, Grant, Prepared};
use crate::gpus::capacity::{self, ShareTotals, UnavailableReason};
use crate::gpus::gpu_plan::{self, Counters, GpuPlan};
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::ClaimRef;

/// Conflict of a claim with the prepared claims or with the state of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// Claims use the GPU in ways that exclude each other.
    #[error(
        "cannot use device {device} (GPU {gpu}) as {wanted}: claim {holder} uses the GPU as {held}; delete one of \
         the pods"
    )]
    Exclusive {
        /// Allocated device.
        device: String,
        /// UUID of the GPU.
        gpu: String,
        /// Use by this claim.
        wanted: Use,
        /// The other claim.
        holder: ClaimRef,
        /// Use by the other claim.
        held: Use,
    },
    /// The programs of spatial shares are clients of one MPS server, which a fault of one of them stops for all.
    #[error(
        "cannot use device {device} (GPU {gpu}) with computePolicy: spatial: claim {holder} of another namespace uses the GPU \
         with it; delete one of the pods"
    )]
    OtherNamespace {
        /// Allocated device.
        device: String,
        /// UUID of the GPU.
        gpu: String,
        /// The other claim.
        holder: ClaimRef,
    },
    /// The sum of the shares would exceed the GPU.
    #[error(
        "cannot use {requested} of {resource} of device {device} (GPU {gpu}): {used} of {total} is prepared for other \
         claims: {holders}; delete one of the pods"
    )]
    Exceeds {
        /// Allocated device.
        device: String,
        /// UUID of the GPU.
        gpu: String,
        /// Memory, cores, slots, or a counter of the GPU.
        resource: String,
        /// Amount of this claim.
        requested: Amount,
        /// Amount of the other claims.
        used: Amount,
        /// Total amount of the GPU.
        total: Amount,
        /// Claims with shares or partitions of the GPU.
        holders: Holders,
    },
    /// The claim adds its capacity to another one.
    #[error(
        "the claim adds its capacity to claim {base} as its companion, so no pod can use it: remove it from the pod"
    )]
    Companion {
        /// The other claim.
        base: ClaimRef,
    },
    /// The capacity of a companion is in use already.
    #[error("claim {companion} adds nothing: its capacity is used by {holder}")]
    Used {
        /// The companion.
        companion: ClaimRef,
        /// The claim that uses it: another base, or the companion itself, of which a container runs.
        holder: ClaimRef,
    },
    /// The GPU cannot be used in its current mode.
    #[error("cannot use device {device} (GPU {gpu}): {reason}")]
    NotUsable {
        /// Allocated device.
        device: String,
        /// UUID of the GPU.
        gpu: String,
        /// Reason.
        reason: UnavailableReason,
    },
    /// The GPU cannot be shared in its current mode.
    #[error("cannot share device {device} (GPU {gpu}): {reason}")]
    NotShared {
        /// Allocated device.
        device: String,
        /// UUID of the GPU.
        gpu: String,
        /// Reason.
        reason: Unshared,
    },
}

/// Reason why a GPU cannot be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unshared {
    /// The GPU is not on the node.
    Missing,
    /// The mode of the GPU excludes shares.
    Unavailable(UnavailableReason),
}

impl fmt::Display for Unshared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the GPU is not on this node"),
            Self::Unavailable(reason) => reason.fmt(f),
        }
    }
}

impl Conflict {
    /// Returns the conflicting claims.
    #[must_use]
    pub fn holders(&self) -> &[ClaimRef] {
        match self {
            Self::Exclusive { holder, .. } | Self::OtherNamespace { holder, .. } => {
                std::slice::from_ref(holder)
            }
            Self::Exceeds { holders, .. } => &holders.0,
            Self::Companion { .. }
            | Self::Used { .. }
            | Self::NotUsable { .. }
            | Self::NotShared { .. } => &[],
        }
    }
}

/// Use of a GPU by a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Exclusive.
    Whole,
    /// Shared.
    Shares,
    /// Shared, with parts of the multiprocessors.
    SpatialShares,
    /// Partitioned by MIG.
    Partitions,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "a whole GPU",
            Self::Shares => "shares",
            Self::SpatialShares => "shares with computePolicy: spatial",
            Self::Partitions => "MIG partitions",
        })
    }
}

/// An amount with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// Bytes, displayed in MiB.
    Bytes(u64),
    /// Percent.
    Percent(u64),
    /// A count.
    Count(u64),
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{} MiB", bytes.div_ceil(capacity::MIB)),
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Count(count) => write!(f, "{count}"),
        }
    }
}

/// Claims, displayed as a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders(pub Vec<ClaimRef>);

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (position, holder) in self.0.iter().enumerate() {
            let separator = if position == 0 { "" } else { ", " };
            write!(f, "{separator}{holder}")?;
        }
        Ok(())
    }
}

/// Checks that `devices` of `claim` and the devices of `others` fit the GPUs. An entry of `claim` in `others` is skipped.
///
/// # Errors
/// The first conflict, by GPU and in the order memory, cores, slots.
pub fn check<'a>(
    claim: &ClaimRef,
    devices: &[Prepared],
    others: impl IntoIterator<Item = (&'a ClaimRef, &'a [Prepared])>,
    inventory: &NodeInventory,
) -> Result<(), Box<Conflict>> {
    let others: Vec<_> = others
        .into_iter()
        .filter(|(other, _)| other.uid != claim.uid)
        .collect();
    check_companions(claim, devices, &others)?;
    let mut by_gpu: BTreeMap<&str, Vec<&Prepared>> = BTreeMap::new();
    for device in devices
        .iter()
        .filter(|device| usage(&device.access).is_some())
    {
        by_gpu
            .entry(device.gpu.uuid.as_str())
            .or_default()
            .push(device);
    }
    for (gpu, wanted) in by_gpu {
        let held: Vec<(&ClaimRef, &Prepared)> = others
            .iter()
            .flat_map(|(other, devices)| devices.iter().map(move |device| (*other, device)))
            .filter(|(_, device)| device.gpu.uuid == gpu)
            .collect();
        let plan = inventory.gpu(gpu).map(|gpu| inventory.plan(gpu));
        check_usable(gpu, &wanted, plan.as_ref())?;
        check_exclusive(claim, gpu, &wanted, &held)?;
        match wanted.first().and_then(|device| usage(&device.access)) {
            Some(Use::Shares | Use::SpatialShares) => {
                check_shares(gpu, &wanted, &held, plan.as_ref(), inventory)?
            }
            Some(Use::Partitions) => check_partitions(gpu, &wanted, &held, plan.as_ref())?,
            Some(Use::Whole) | None => {}
        }
    }
    Ok(())
}

/// Checks that no capacity of a companion is used twice: by a container of its own, or by two bases.
fn check_companions(
    claim: &ClaimRef,
    devices: &[Prepared],
    others: &[(&ClaimRef, &[Prepared])],
) -> Result<(), Box<Conflict>> {
    let wanted: Vec<&ClaimRef> = grants(devices).map(|grant| &grant.claim).collect();
    for (other, devices) in others {
        if grants(devices).any(|grant| grant.claim.uid == claim.uid) {
            let base = (*other).clone();
            return Err(Box::new(Conflict::Companion { base }));
        }
        let is_used = |wanted: &&&ClaimRef| {
            wanted.uid == other.uid || grants(devices).any(|grant| grant.claim.uid == wanted.uid)
        };
        if let Some(companion) = wanted.iter().find(is_used) {
            return Err(Box::new(Conflict::Used {
                companion: (*companion).clone(),
                holder: (*other).clone(),
            }));
        }
    }
    Ok(())
}

fn grants(devices: &[Prepared]) -> impl Iterator<Item = &Grant> {
    let shares = devices.iter().filter_map(Prepared::share);
    shares.flat_map(|share| &share.grants)
}

/// Returns the use of a GPU; `None` for admin access, which needs no capacity.
fn usage(access: &Access) -> Option<Use> {
    match access {
        Access::Whole => Some(Use::Whole),
        Access::Share(share) if share.is_spatial() => Some(Use::SpatialShares),
        Access::Share(_) => Some(Use::Shares),
        Access::Partition(_) => Some(Use::Partitions),
        Access::Admin => None,
    }
}

/// Checks that the GPU can be used in its present mode. A GPU that is not on the node is checked for conflicts only.
fn check_usable(
    gpu: &str,
    wanted: &[&Prepared],
    plan: Option<&GpuPlan>,
) -> Result<(), Box<Conflict>> {
    let Some(plan) = plan else {
        return Ok(());
    };
    let missing = wanted.iter().find(|device| {
        let is_partition = usage(&device.access) == Some(Use::Partitions);
        (plan.devices.is_empty() || is_partition != plan.is_partitioned())
            && plan.device(&device.device).is_none()
    });
    match missing {
        Some(device) => Err(Box::new(Conflict::NotUsable {
            device: device.device.clone(),
            gpu: gpu.to_owned(),
            reason: plan.excluded,
        })),
        None => Ok(()),
    }
}

fn check_exclusive(
    claim: &ClaimRef,
    gpu: &str,
    wanted: &[&Prepared],
    held: &[(&ClaimRef, &Prepared)],
) -> Result<(), Box<Conflict>> {
    for (position, device) in wanted.iter().enumerate() {
        let Some(wanted_use) = usage(&device.access) else {
            continue;
        };
        let own = wanted.iter().take(position).map(|other| (claim, *other));
        for (holder, other) in held.iter().copied().chain(own) {
            match (wanted_use, usage(&other.access)) {
                (_, None)
                | (Use::Shares, Some(Use::Shares))
                | (Use::Partitions, Some(Use::Partitions)) => {}
                (Use::SpatialShares, Some(Use::SpatialShares)) => {
                    if holder.namespace != claim.namespace {
                        return Err(Box::new(Conflict::OtherNamespace {
                            device: device.device.clone(),
                            gpu: gpu.to_owned(),
                            holder: holder.clone(),
                        }));
                    }
                }
                (Use::Whole, Some(held))
                | (Use::Shares, Some(held))
                | (Use::SpatialShares, Some(held))
                | (Use::Partitions, Some(held)) => {
                    return Err(Box::new(Conflict::Exclusive {
                        device: device.device.clone(),
                        gpu: gpu.to_owned(),
                        wanted: wanted_use,
                        holder: holder.clone(),
                        held,
                    }));
                }
            }
        }
    }
    Ok(())
}

fn check_shares(
    gpu: &str,
    wanted: &[&Prepared],
    held: &[(&ClaimRef, &Prepared)],
    plan: Option<&GpuPlan>,
    inventory: &NodeInventory,
) -> Result<(), Box<Conflict>> {
    let Some(first) = wanted.first() else {
        return Ok(());
    };
    let not_shared = |reason| {
        Box::new(Conflict::NotShared {
            device: first.device.clone(),
            gpu: gpu.to_owned(),
            reason,
        })
    };
    let plan = plan.ok_or_else(|| not_shared(Unshared::Missing))?;
    let ShareTotals {
        memory_bytes,
        cores,
        slots,
    } = inventory
        .share_limits(plan, gpu)
        .ok_or_else(|| not_shared(Unshared::Unavailable(plan.excluded)))?;
    let requested = held_by(wanted.iter().copied());
    let used = held_by(held.iter().map(|(_, device)| *device));
    let amounts = [
        (
            "memory",
            Amount::Bytes as fn(u64) -> Amount,
            requested.memory_bytes,
            used.memory_bytes,
            memory_bytes,
        ),
        ("cores", Amount::Percent, requested.cores, used.cores, cores),
        ("slots", Amount::Count, requested.slots, used.slots, slots),
    ];
    for (resource, amount, requested, used, total) in amounts {
        if requested.saturating_add(used) > total {
            let amounts = [requested, used, total].map(amount);
            return Err(exceeds(first, resource, amounts, held));
        }
    }
    Ok(())
}

/// Returns what the shares among these devices hold together. The own amounts of a suspended share are free, and it is resumed
/// only if they fit again.
fn held_by<'a>(devices: impl Iterator<Item = &'a Prepared>) -> ShareTotals {
    let shares = devices.filter_map(Prepared::share);
    shares.fold(ShareTotals::default(), |sum, share| {
        sum.plus(share.counted())
    })
}

/// Checks that the memory slices and engines of the GPU suffice.
fn check_partitions(
    gpu: &str,
    wanted: &[&Prepared],
    held: &[(&ClaimRef, &Prepared)],
    plan: Option<&GpuPlan>,
) -> Result<(), Box<Conflict>> {
    let Some(plan) = plan else {
        return Ok(());
    };
    let consumed = |device: &Prepared| plan.device(&device.device).map(|planned| &planned.consumes);
    let mut used = Counters::new();
    let held_here = held.iter().filter_map(|(_, device)| consumed(device));
    held_here.for_each(|consumed| gpu_plan::add(&mut used, consumed));
    for device in wanted {
        let Some(requested) = consumed(device) else {
            return Err(Box::new(Conflict::NotUsable {
                device: device.device.clone(),
                gpu: gpu.to_owned(),
                reason: plan.excluded,
            }));
        };
        for (name, requested) in requested {
            let amount = |counters: &Counters| counters.get(name).copied().unwrap_or_default();
            let (used, total) = (amount(&used), amount(&plan.counters));
            if requested.saturating_add(used) > total {
                let amounts = [*requested, used, total].map(Amount::Count);
                return Err(exceeds(device, name, amounts, held));
            }
        }
        gpu_plan::add(&mut used, requested);
    }
    Ok(())
}

fn exceeds(
    device: &Prepared,
    resource: &str,
    [requested, used, total]: [Amount; 3],
    held: &[(&ClaimRef, &Prepared)],
) -> Box<Conflict> {
    let mut holders: Vec<ClaimRef> = held.iter().map(|(holder, _)| (*holder).clone()).collect();
    holders.sort();
    holders.dedup();
    Box::new(Conflict::Exceeds {
        device: device.device.clone(),
        gpu: device.gpu.uuid.clone(),
        resource: resource.to_owned(),
        requested,
        used,
        total,
        holders: Holders(holders),
    })
}
