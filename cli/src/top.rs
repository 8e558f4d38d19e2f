//! `kubectl drava top`: allocations of each GPU.

use std::collections::BTreeMap;

use drava_allocator::attribute::Attribute;
use drava_allocator::device::Device;
use drava_allocator::pool::Pool;
use drava_allocator::reason::bytes;
use drava_allocator::usage::{DeviceAccess, Usage};
use drava_api::{DeviceType, Quantity, names};
use serde::Serialize;

use crate::output::table;
use crate::snapshot::Snapshot;

/// Allocations of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Gpu {
    pub(crate) node: String,
    gpu: String,
    uuid: String,
    product_name: String,
    pub(crate) mode: Mode,
    /// Bytes.
    pub(crate) memory: AllocatedAmount,
    pub(crate) cores: AllocatedAmount,
    pub(crate) slots: AllocatedAmount,
    claims: Vec<GpuClaim>,
}

/// Kind of allocations on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// No claim is allocated.
    Free,
    /// One claim has the whole GPU.
    Whole,
    /// Claims have shares.
    Shared,
    /// Claims have MIG partitions.
    Partitioned,
}

/// Allocated part of an amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct AllocatedAmount {
    pub(crate) allocated: u64,
    pub(crate) total: u64,
}

/// A claim with an allocation on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct GpuClaim {
    name: String,
    device: String,
    pods: Vec<String>,
}

/// Returns all GPUs by node and name.
pub(crate) fn gpus(snapshot: &Snapshot) -> Vec<Gpu> {
    let mut gpus = Vec::new();
    for (pool_name, pool, usage) in snapshot.cluster.usable_pools() {
        let mut by_gpu: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, device) in pool.devices.iter().enumerate() {
            let first = pool
                .devices
                .iter()
                .position(|other| other.gpu == device.gpu);
            by_gpu
                .entry(first.unwrap_or(index))
                .or_default()
                .push(index);
        }
        for indices in by_gpu.values() {
            gpus.extend(gpu(snapshot, pool_name, pool, usage, indices));
        }
    }
    gpus.sort_by(|a, b| a.node.cmp(&b.node));
    gpus
}

/// Returns the excluded pools with the reason.
pub(crate) fn problems(snapshot: &Snapshot) -> Vec<String> {
    snapshot
        .cluster
        .excluded_pools()
        .map(|(pool, _, problem)| format!("pool {pool} is excluded from allocation: {problem}"))
        .collect()
}

fn gpu(
    snapshot: &Snapshot,
    pool_name: &str,
    pool: &Pool,
    usage: &Usage,
    indices: &[usize],
) -> Option<Gpu> {
    let devices: Vec<(&Device, _)> = indices
        .iter()
        .filter_map(|index| {
            Some((
                pool.devices.get(*index)?.as_ref(),
                usage.devices.get(*index)?,
            ))
        })
        .collect();
    let (first, _) = devices.first()?;
    let in_use: Vec<_> = devices
        .iter()
        .filter(|(_, in_use)| in_use.exclusive > 0 || in_use.shares > 0)
        .collect();
    let mode = match in_use
        .first()
        .map(|(device, in_use)| (device.kind, in_use.exclusive > 0))
    {
        None => Mode::Free,
        Some((Some(DeviceType::Mig), _)) => Mode::Partitioned,
        Some((_, true)) => Mode::Whole,
        Some((_, false)) => Mode::Shared,
    };
    let allocated_amount = |capacity: &str| {
        let total = devices
            .iter()
            .filter_map(|(device, _)| device.amount(capacity))
            .max()
            .unwrap_or_default();
        let allocated = in_use
            .iter()
            .map(|(device, in_use)| match in_use.exclusive {
                0 => in_use.consumed.get(capacity).copied().unwrap_or_default(),
                _ => device.amount(capacity).unwrap_or_default(),
            });
        let allocated = allocated.fold(Quantity::ZERO, |sum, amount| sum + amount);
        AllocatedAmount {
            allocated: allocated.to_u64_rounded_up().unwrap_or_default(),
            total: total.to_u64_rounded_up().unwrap_or_default(),
        }
    };
    let names: Vec<&str> = devices
        .iter()
        .map(|(device, _)| device.name.as_ref())
        .collect();
    let claims = snapshot
        .cluster
        .allocated_devices()
        .filter(|allocated| {
            allocated.pool == pool_name && names.contains(&allocated.device.as_str())
        })
        .filter(|allocated| !matches!(allocated.access, DeviceAccess::Admin(_)))
        .map(|allocated| GpuClaim {
            name: allocated.claim.to_string(),
            device: allocated.device.clone(),
            pods: pods_of(snapshot, &allocated.claim.uid),
        })
        .collect();
    Some(Gpu {
        node: pool.node.clone(),
        gpu: first.display_name().to_owned(),
        uuid: first.gpu.to_string(),
        product_name: match first.attributes.get(names::attribute::PRODUCT_NAME) {
            Some(Attribute::String(name)) => name.clone(),
            _ => String::new(),
        },
        mode,
        memory: allocated_amount(names::capacity::MEMORY),
        cores: allocated_amount(names::capacity::CORES),
        slots: allocated_amount(names::capacity::SLOTS),
        claims,
    })
}

/// Returns the pods that have reserved the claim with this UID.
fn pods_of(snapshot: &Snapshot, uid: &str) -> Vec<String> {
    snapshot
        .claims
        .iter()
        .find(|claim| claim.metadata.uid.as_deref() == Some(uid))
        .and_then(|claim| claim.status.as_ref()?.reserved_for.as_ref())
        .into_iter()
        .flatten()
        .filter(|consumer| consumer.resource == "pods")
        .map(|consumer| consumer.name.clone())
        .collect()
}

/// Formats the table of GPUs, followed by the excluded pools.
pub(crate) fn text(gpus: &[Gpu], problems: &[String]) -> String {
    if gpus.is_empty() && problems.is_empty() {
        return format!(
            "no node publishes devices of {}; check that the node driver is running\n",
            names::DRIVER
        );
    }
    let rows: Vec<_> = gpus
        .iter()
        .map(|gpu| {
            vec![
                gpu.node.clone(),
                gpu.gpu.clone(),
                gpu.product_name.clone(),
                match gpu.mode {
                    Mode::Free => "free",
                    Mode::Whole => "whole",
                    Mode::Shared => "shared",
                    Mode::Partitioned => "partitioned",
                }
                .to_owned(),
                format!(
                    "{} / {}",
                    bytes(Quantity::bytes(gpu.memory.allocated)),
                    bytes(Quantity::bytes(gpu.memory.total))
                ),
                format!("{} / {}", gpu.cores.allocated, gpu.cores.total),
                format!("{} / {}", gpu.slots.allocated, gpu.slots.total),
                gpu.claims
                    .iter()
                    .map(GpuClaim::text)
                    .collect::<Vec<_>>()
                    .join(", "),
            ]
        })
        .collect();
    let header = [
        "NODE",
        "GPU",
        "MODEL",
        "MODE",
        "MEMORY",
        "CORES",
        "SLOTS",
        "CLAIMS (PODS)",
    ];
    let mut text = table(&header, rows);
    for problem in problems {
        text.push_str(&format!("warning: {problem}\n"));
    }
    text
}

impl GpuClaim {
    fn text(&self) -> String {
        if self.pods.is_empty() {
            format!("{} (no pod)", self.name)
        } else {
            format!("{} ({})", self.name, self.pods.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::tests::snapshot;

    #[test]
    fn lists_gpus_with_claims_and_pods() {
        assert_eq!(
            text(&gpus(&snapshot()), &problems(&snapshot())),
            "\
NODE   GPU     MODEL         MODE     MEMORY            CORES       SLOTS    CLAIMS (PODS)
n1     gpu-0   NVIDIA H100   shared   24 GiB / 80 GiB   30 / 100    2 / 10   default/a (a-pod), default/b (no pod)
n1     gpu-1   NVIDIA H100   whole    80 GiB / 80 GiB   100 / 100   0 / 10   default/w (w-pod)
"
        );
    }

    #[test]
    fn reports_missing_devices() {
        assert_eq!(
            text(&gpus(&Snapshot::default()), &[]),
            "no node publishes devices of gpu.drava.dev; check that the node driver is running\n"
        );
    }
}
