//! `kubectl drava top`: allocations of each GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;

use drava_allocator::attribute::Attribute;
use drava_allocator::capacity::Amounts;
use drava_allocator::device::Device;
use drava_allocator::pool::Pool;
use drava_allocator::reason::bytes;
use drava_allocator::usage::{AllocatedDevice, DeviceAccess, DeviceUse, Usage};
use drava_api::leader::ReservedClaim;
use drava_api::{DeviceType, Quantity, names, suspension};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use crate::natural;
use crate::watch;
use drava_allocator::object::{ObjectKey, object_key};
use drava_explanation::explain::claim::base_name;
use drava_explanation::snapshot::Snapshot;
use drava_explanation::table;

/// Options of the command.
#[derive(Debug, Clone, Copy, clap::Args)]
#[group(skip)]
pub(crate) struct Options {
    /// Show what the claims use, too: memory, and GPU time of the last seconds in percent of one GPU. With -o wide or json also the
    /// memory that shares with memory.limit may use at the moment, and how much of it is lent.
    ///
    /// Read from the metrics of the node drivers through the API server, which needs the permission to get pods/proxy in their
    /// namespace. Of MIG partitions nothing is measured.
    #[arg(long)]
    pub(crate) usage: bool,

    #[command(flatten)]
    pub(crate) watch: watch::Options,
}

/// Allocations of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Gpu {
    pub(crate) node: String,
    pub(crate) gpu: String,
    uuid: String,
    pub(crate) product_name: String,
    pub(crate) mode: Mode,
    /// Memory that the NVIDIA driver reserves, bytes.
    #[serde(skip)]
    pub(crate) reserved_bytes: u64,
    /// Bytes.
    pub(crate) memory: AllocatedAmount,
    pub(crate) cores: AllocatedAmount,
    pub(crate) slots: AllocatedAmount,
    /// Taints of its devices, without duplicates.
    pub(crate) taints: Vec<GpuTaint>,
    pub(crate) claims: Vec<GpuClaim>,
    /// Pods for which devices of the GPU are reserved: not allocated, and not free for others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) reserved: Vec<String>,
}

/// A taint of the devices of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GpuTaint {
    pub(crate) kind: TaintKind,
    /// Key, value and effect.
    pub(crate) taint: String,
    /// Whether it concerns all devices of the GPU; otherwise, some partitions.
    pub(crate) is_whole_gpu: bool,
}

/// What a taint says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TaintKind {
    /// The node driver found a fault.
    Unhealthy,
    /// `kubectl drava cordon` or `drain` excluded the device.
    Cordoned,
    /// A taint of others.
    Other,
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

impl Add for AllocatedAmount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            allocated: self.allocated + other.allocated,
            total: self.total + other.total,
        }
    }
}

/// A claim with an allocation on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GpuClaim {
    /// Namespace and name.
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) device: String,
    pub(crate) access: Access,
    /// Name of the claim to whose share it adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) adds_to: Option<String>,
    /// Bytes.
    pub(crate) memory: u64,
    /// Percent of GPU time; 0 for a share without a guarantee.
    pub(crate) cores: u64,
    /// What it gets back when it is resumed, if it is suspended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) suspended: Option<SuspendedAmounts>,
    /// Since when it has used no GPU time, if it is a share that runs and is idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_since: Option<Timestamp>,
    pub(crate) pods: Vec<String>,
    /// What it uses at the moment, if that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) measured: Option<Measured>,
}

/// Amounts of a suspended share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct SuspendedAmounts {
    /// Bytes.
    memory: u64,
    /// Percent of GPU time.
    cores: u64,
}

impl SuspendedAmounts {
    /// Returns the amounts of a device, of which a share without an amount has all that `total` says.
    pub(crate) fn of(access: &DeviceAccess, total: impl Fn(&str) -> Quantity) -> Option<Self> {
        let DeviceAccess::Suspended(amounts) = access else {
            return None;
        };
        let amount = |capacity: &str| {
            let amount = share_amount(amounts, capacity, || total(capacity));
            amount.to_u64_rounded_up().unwrap_or_default()
        };
        Some(Self {
            memory: amount(names::capacity::MEMORY),
            cores: amount(names::capacity::CORES),
        })
    }
}

/// What a claim uses of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Measured {
    /// Bytes.
    pub(crate) memory: u64,
    /// Percent of the time of one GPU; not known of a share after the first reading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cores: Option<u64>,
    /// Memory that it may use at the moment; absent for a claim that may use what it requests only.
    #[serde(flatten)]
    pub(crate) burst: Option<Burst>,
    /// Part of its request that other claims may use at the moment, bytes; absent for a claim that does not lend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lends_memory: Option<u64>,
}

/// Memory of a share with `memory.limit`, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Burst {
    /// The most that it may use at the moment.
    pub(crate) memory_limit: u64,
    /// Part of that beyond its request, which it gives back when another claim is guaranteed it.
    pub(crate) lent_memory: u64,
}
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Access {
    /// The whole GPU.
    Whole,
    /// A share.
    Share,
    /// A share that is suspended: it uses neither memory nor GPU time.
    Suspended,
    /// A MIG partition.
    Partition,
}

/// Allocations of the cluster by pool and device, and the pods of the claims.
struct Index<'a> {
    reservations: Vec<&'a ReservedClaim>,
    allocated: BTreeMap<(&'a str, &'a str), Vec<&'a AllocatedDevice>>,
    pods: BTreeMap<&'a str, Vec<String>>,
    /// Names of the claims to which companions add, by the UIDs of the companions.
    bases: BTreeMap<&'a str, String>,
    /// Since when the shares of claims are idle, by the UIDs of the claims.
    idle: BTreeMap<&'a str, Timestamp>,
}

impl<'a> Index<'a> {
    fn of(snapshot: &'a Snapshot) -> Self {
        let mut allocated: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for device in snapshot.cluster.allocated_devices() {
            if !matches!(device.access, DeviceAccess::Admin(_)) {
                let key = (device.pool.as_str(), device.device.as_str());
                allocated.entry(key).or_default().push(device);
            }
        }
        let pods = snapshot.claims.iter().filter_map(|claim| {
            let uid = claim.metadata.uid.as_deref()?;
            let consumers = claim.status.as_ref()?.reserved_for.as_ref()?;
            let pods = consumers
                .iter()
                .filter(|consumer| consumer.resource == "pods");
            Some((uid, pods.map(|pod| pod.name.clone()).collect()))
        });
        let idle = snapshot.claims.iter().filter_map(|claim| {
            let since = suspension::idle_since(claim)?;
            Some((claim.metadata.uid.as_deref()?, since))
        });
        let bases = snapshot.claims.iter().filter_map(|claim| {
            let base = base_name(claim, &snapshot.claims)?;
            Some((claim.metadata.uid.as_deref()?, base))
        });
        Self {
            bases: bases.collect(),
            idle: idle.collect(),
            reservations: reservations(snapshot),
            pods: pods.collect(),
            allocated,
        }
    }

    /// Returns the pods for which one of the devices is reserved.
    fn reserved(&self, pool: &str, devices: &[(&Device, &DeviceUse)]) -> Vec<String> {
        let is_reserved = |reservation: &&&ReservedClaim| {
            reservation.devices.iter().any(|reserved| {
                reserved.pool == pool
                    && devices
                        .iter()
                        .any(|(device, _)| *device.name == *reserved.device)
            })
        };
        let reservations = self.reservations.iter().filter(is_reserved);
        let pods: BTreeSet<String> = reservations
            .map(|reservation| format!("{}/{}", reservation.namespace, reservation.pod))
            .collect();
        pods.into_iter().collect()
    }

    fn claims(&self, pool: &str, device: &Device) -> Vec<GpuClaim> {
        let allocated = self.allocated.get(&(pool, &*device.name));
        let claims = allocated.into_iter().flatten().map(|allocated| {
            let amount = |capacity: &str| {
                let total = || device.amount(capacity).unwrap_or_default();
                let amount = match &allocated.access {
                    DeviceAccess::Share(amounts, _) => share_amount(amounts, capacity, total),
                    DeviceAccess::Suspended(_) => Quantity::ZERO,
                    DeviceAccess::Exclusive | DeviceAccess::Admin(_) => total(),
                };
                amount.to_u64_rounded_up().unwrap_or_default()
            };
            GpuClaim {
                name: allocated.claim.to_string(),
                namespace: allocated.claim.namespace.clone(),
                device: allocated.device.clone(),
                access: match (device.kind, &allocated.access) {
                    (Some(DeviceType::Mig), _) => Access::Partition,
                    (_, DeviceAccess::Share(..)) => Access::Share,
                    (_, DeviceAccess::Suspended(_)) => Access::Suspended,
                    (_, DeviceAccess::Exclusive | DeviceAccess::Admin(_)) => Access::Whole,
                },
                adds_to: self.bases.get(allocated.claim.uid.as_str()).cloned(),
                memory: amount(names::capacity::MEMORY),
                cores: amount(names::capacity::CORES),
                suspended: SuspendedAmounts::of(&allocated.access, |capacity| {
                    device.amount(capacity).unwrap_or_default()
                }),
                idle_since: match allocated.access {
                    DeviceAccess::Share(..) => self.idle.get(allocated.claim.uid.as_str()).copied(),
                    DeviceAccess::Suspended(_)
                    | DeviceAccess::Exclusive
                    | DeviceAccess::Admin(_) => None,
                },
                pods: self
                    .pods
                    .get(allocated.claim.uid.as_str())
                    .cloned()
                    .unwrap_or_default(),
                measured: None,
            }
        });
        claims.collect()
    }
}

/// Returns the reservations of claims that wait: the leader writes them a moment after the allocation of the claims.
fn reservations(snapshot: &Snapshot) -> Vec<&ReservedClaim> {
    if snapshot.reservations.is_empty() {
        return Vec::new();
    }
    let is_allocated = |claim: &&ResourceClaim| {
        let status = claim.status.as_ref();
        status.is_some_and(|status| status.allocation.is_some())
    };
    let allocated = snapshot.claims.iter().filter(is_allocated);
    let allocated: BTreeSet<ObjectKey> =
        allocated.map(|claim| object_key(&claim.metadata)).collect();
    let reservations = snapshot.reservations.iter();
    let waiting = reservations.filter(|reservation| {
        let claim = (reservation.namespace.clone(), reservation.claim.clone());
        !allocated.contains(&claim)
    });
    waiting.collect()
}

/// Returns what a share is charged: the whole capacity without an amount, as the allocator counts.
fn share_amount(amounts: &Amounts, capacity: &str, total: impl FnOnce() -> Quantity) -> Quantity {
    amounts.get(capacity).copied().unwrap_or_else(total)
}

/// Returns all GPUs by node and name.
pub(crate) fn gpus(snapshot: &Snapshot) -> Vec<Gpu> {
    let claims = Index::of(snapshot);
    let mut gpus = Vec::new();
    for (pool_name, pool, usage) in snapshot.cluster.usable_pools() {
        // GPUs in the order of their first device.
        let mut positions: BTreeMap<&str, usize> = BTreeMap::new();
        let mut by_gpu: Vec<Vec<usize>> = Vec::new();
        for (index, device) in pool.devices.iter().enumerate() {
            let position = *positions.entry(&device.gpu).or_insert(by_gpu.len());
            match by_gpu.get_mut(position) {
                Some(indices) => indices.push(index),
                None => by_gpu.push(vec![index]),
            }
        }
        for indices in &by_gpu {
            gpus.extend(gpu(&claims, pool_name, pool, usage, indices));
        }
    }
    gpus.sort_by(|one, other| {
        let by_node = natural::compare(&one.node, &other.node);
        by_node.then_with(|| natural::compare(&one.gpu, &other.gpu))
    });
    gpus
}

/// Returns the excluded pools with the reason, and whether reservations are missing.
pub(crate) fn problems(snapshot: &Snapshot) -> Vec<String> {
    snapshot
        .cluster
        .excluded_pools()
        .map(|(pool, _, problem)| format!("pool {pool} is excluded from allocation: {problem}"))
        .chain(snapshot.omission())
        .collect()
}

fn gpu(
    index: &Index<'_>,
    pool_name: &str,
    pool: &Pool,
    usage: &Usage,
    indices: &[usize],
) -> Option<Gpu> {
    let devices: Vec<(&Device, &DeviceUse)> = indices
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
            // Of a shared GPU what shares can have: the whole GPU has a little more memory.
            .filter(|(device, _)| mode != Mode::Shared || device.kind == Some(DeviceType::Vgpu))
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
    let mut claims: Vec<GpuClaim> = devices
        .iter()
        .flat_map(|(device, _)| index.claims(pool_name, device))
        .collect();
    claims.sort_by_key(GpuClaim::memory_slice);
    Some(Gpu {
        node: pool.node.clone(),
        gpu: first.display_name().to_owned(),
        uuid: first.gpu.to_string(),
        product_name: match first.published(names::attribute::PRODUCT_NAME) {
            Some(Attribute::String(name)) => name.clone(),
            _ => String::new(),
        },
        mode,
        reserved_bytes: reserved_bytes(&devices),
        memory: allocated_amount(names::capacity::MEMORY),
        cores: allocated_amount(names::capacity::CORES),
        slots: allocated_amount(names::capacity::SLOTS),
        taints: taints(pool, &devices),
        reserved: index.reserved(pool_name, &devices),
        claims,
    })
}

/// Returns the taints of the devices of a GPU, each once.
fn taints(pool: &Pool, devices: &[(&Device, &DeviceUse)]) -> Vec<GpuTaint> {
    let mut taints: Vec<GpuTaint> = Vec::new();
    for (device, _) in devices {
        for taint in pool.taints(device) {
            let text = taint.to_string();
            let is_whole_gpu = device.kind != Some(DeviceType::Mig);
            if let Some(known) = taints.iter_mut().find(|known| known.taint == text) {
                known.is_whole_gpu |= is_whole_gpu;
                continue;
            }
            taints.push(GpuTaint {
                kind: match taint.key.as_str() {
                    names::UNHEALTHY_TAINT => TaintKind::Unhealthy,
                    names::CORDONED_TAINT => TaintKind::Cordoned,
                    _ => TaintKind::Other,
                },
                taint: text,
                is_whole_gpu,
            });
        }
    }
    taints
}

/// Returns the difference of the memory that `nvidia-smi` shows and that of the whole GPU as a device.
fn reserved_bytes<T>(devices: &[(&Device, T)]) -> u64 {
    let whole = devices.iter().find_map(|(device, _)| {
        let Some(Attribute::Int(mib)) = device.published(names::attribute::MEMORY_MIB) else {
            return None;
        };
        let shown = u64::try_from(*mib).ok()? << 20;
        let is_whole = device.kind == Some(DeviceType::Gpu);
        let usable = device
            .amount(names::capacity::MEMORY)?
            .to_u64_rounded_up()?;
        is_whole.then(|| shown.saturating_sub(usable))
    });
    whole.unwrap_or_default()
}

/// Formats the table of GPUs, followed by the excluded pools. A wide table has the UUIDs of the GPUs, and the device of each
/// claim. What claims use has columns of its own where it was measured.
pub(crate) fn text(gpus: &[Gpu], problems: &[String], is_wide: bool) -> String {
    if gpus.is_empty() && problems.is_empty() {
        return format!(
            "no node publishes devices of {}; check that the node driver is running\n",
            names::DRIVER
        );
    }
    let mut claims = gpus.iter().flat_map(|gpu| &gpu.claims);
    let is_measured = claims.any(|claim| claim.measured.is_some());
    let rows: Vec<_> = gpus
        .iter()
        .flat_map(|gpu| {
            let mut row = vec![
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
            ];
            if is_measured {
                row.extend(gpu.used_text());
            }
            if !is_wide {
                row.push(gpu.claims_text());
                return vec![row];
            }
            row.push(gpu.uuid.clone());
            let columns = row.len();
            let reserved = gpu.reserved.iter();
            let reserved = reserved.map(|pod| format!("reserved for {pod}"));
            let mut lines = gpu.claims.iter().map(GpuClaim::text).chain(reserved);
            row.push(lines.next().unwrap_or_default());
            let further = lines.map(move |line| {
                let mut row = vec![String::new(); columns];
                row.push(line);
                row
            });
            std::iter::once(row).chain(further).collect()
        })
        .collect();
    let mut header = vec!["NODE", "GPU", "MODEL", "MODE", "MEMORY", "CORES", "SLOTS"];
    if is_measured {
        header.extend(["USED MEMORY", "USED CORES"]);
    }
    header.extend(is_wide.then_some("UUID"));
    header.push("CLAIMS (PODS)");
    table(&header, rows) + &warnings(problems)
}

/// Formats the excluded pools.
pub(crate) fn warnings(problems: &[String]) -> String {
    let lines = problems.iter();
    lines
        .map(|problem| format!("warning: {problem}\n"))
        .collect()
}

impl GpuClaim {
    /// Returns the first memory slice of a partition, with which the name of its device ends.
    fn memory_slice(&self) -> Option<u32> {
        match self.access {
            Access::Partition => self.device.rsplit('-').next()?.parse().ok(),
            Access::Whole | Access::Share | Access::Suspended => None,
        }
    }

    fn text(&self) -> String {
        let Self { name, device, .. } = self;
        let suspended = match self.access {
            Access::Suspended => ", suspended",
            Access::Whole | Access::Share | Access::Partition => "",
        };
        let adds = self.adds_to.iter().map(|base| format!(", adds to {base}"));
        let adds: String = adds.collect();
        let idle = self.idle_since;
        let idle = idle.map(|since| format!(", idle since {since}"));
        let idle = idle.unwrap_or_default();
        let pods = match self.pods.is_empty() {
            true => "no pod".to_owned(),
            false => self.pods.join(", "),
        };
        let used = self.measured.map(|measured| {
            let [memory, cores] = used_text(Some(measured.memory), measured.cores);
            let lent = measured.burst.map(|burst| {
                let [limit, lent] = [burst.memory_limit, burst.lent_memory];
                let [limit, lent] = [limit, lent].map(|memory| bytes(Quantity::bytes(memory)));
                format!(", limit {limit} with {lent} lent")
            });
            let lent = lent.unwrap_or_default();
            let lends = measured.lends_memory.filter(|memory| *memory > 0);
            let lends = lends.map(|memory| format!(", lends {}", bytes(Quantity::bytes(memory))));
            let lends = lends.unwrap_or_default();
            format!(", uses {memory} and {cores} cores{lent}{lends}")
        });
        let used = used.unwrap_or_default();
        format!("{name} on {device} ({pods}{adds}{suspended}{idle}){used}")
    }
}

/// Returns what is used as texts: memory, and GPU time in percent of one GPU.
fn used_text(memory: Option<u64>, cores: Option<u64>) -> [String; 2] {
    let unknown = || "?".to_owned();
    [
        memory.map_or_else(unknown, |memory| bytes(Quantity::bytes(memory))),
        cores.map_or_else(unknown, |cores| cores.to_string()),
    ]
}

impl Gpu {
    /// Returns what its claims use together; unknown if it is not known of one of them.
    fn used_text(&self) -> [String; 2] {
        // What a companion adds is used by its base.
        let claims = self.claims.iter().filter(|claim| claim.adds_to.is_none());
        let memory = claims.clone().map(|claim| Some(claim.measured?.memory));
        let cores = claims.map(|claim| claim.measured?.cores);
        used_text(memory.sum(), cores.sum())
    }

    /// Names the only claim, or counts them; and the pods for which devices are reserved.
    fn claims_text(&self) -> String {
        let mut parts = Vec::new();
        if !self.claims.is_empty() {
            parts.push(self.allocated_text());
        }
        parts.extend(
            self.reserved
                .iter()
                .map(|pod| format!("reserved for {pod}")),
        );
        parts.join(", ")
    }

    fn allocated_text(&self) -> String {
        match self.claims.as_slice() {
            [] => String::new(),
            [claim] if claim.pods.is_empty() => format!("{} (no pod)", claim.name),
            [claim] => format!("{} ({})", claim.name, claim.pods.join(", ")),
            claims => {
                let pods: usize = claims.iter().map(|claim| claim.pods.len()).sum();
                let plural = if pods == 1 { "" } else { "s" };
                format!("{} claims ({pods} pod{plural})", claims.len())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drava_explanation::fixture::{self, snapshot};

    #[test]
    fn lists_gpus_with_claims_and_pods() {
        assert_eq!(
            text(&gpus(&snapshot()), &problems(&snapshot()), false),
            "\
NODE   GPU     MODEL         MODE     MEMORY            CORES       SLOTS    CLAIMS (PODS)
n1     gpu-0   NVIDIA H100   shared   24 GiB / 80 GiB   30 / 100    2 / 10   2 claims (1 pod)
n1     gpu-1   NVIDIA H100   whole    80 GiB / 80 GiB   100 / 100   0 / 10   default/w (w-pod)
"
        );
    }

    /// The whole GPU has a little more memory than its shares can have together.
    #[test]
    fn shared_gpu_has_the_memory_that_shares_can_request() {
        let mut snapshot = snapshot();
        for mut slice in fixture::slices() {
            let devices = slice.spec.devices.iter_mut().flatten();
            for device in devices.filter(|device| !device.name.ends_with("-vgpu")) {
                let capacities = device.capacity.as_mut().expect("capacities");
                let memory = capacities.get_mut("memory").expect("memory");
                memory.value.0 = "81Gi".to_owned();
            }
            snapshot.cluster.upsert_slice(&slice);
        }
        let table = text(&gpus(&snapshot), &[], false);
        assert!(table.contains("shared   24 GiB / 80 GiB "), "{table}");
        assert!(table.contains("whole    81 GiB / 81 GiB "), "{table}");
    }

    #[test]
    fn wide_table_has_uuids_and_devices() {
        let wide = text(&gpus(&snapshot()), &[], true);
        let lines: Vec<&str> = wide.lines().map(str::trim_end).collect();
        assert_eq!(lines.len(), 4, "a line for each claim: {wide}");
        assert!(lines[0].contains("UUID"), "{wide}");
        assert!(
            lines[1].ends_with("GPU-0   default/a on gpu-0-vgpu (a-pod)"),
            "{wide}"
        );
        assert_eq!(lines[2].trim_start(), "default/b on gpu-0-vgpu (no pod)");
    }

    #[test]
    fn names_pods_with_reserved_devices() {
        let mut snapshot = snapshot();
        snapshot.reservations = serde_json::from_value(serde_json::json!([{
            "namespace": "x", "pod": "head", "claim": "head", "purpose": "HeadOfQueue",
            "devices": [{"request": "gpu", "pool": "n1/gpus", "device": "gpu-1"}],
        }]))
        .expect("reservations");
        let table = text(&gpus(&snapshot), &[], false);
        assert!(
            table.contains(
                "80 GiB / 80 GiB   100 / 100   0 / 10   default/w (w-pod), reserved for x/head\n"
            ),
            "{table}"
        );
        let wide = text(&gpus(&snapshot), &[], true);
        assert!(wide.contains(" reserved for x/head\n"), "{wide}");
        assert!(problems(&snapshot).is_empty());
        snapshot.omitted_reservations = 3;
        let table = text(&gpus(&snapshot), &problems(&snapshot), false);
        assert!(
            table.contains("reserves devices for 3 more claims than it lists"),
            "{table}"
        );
    }

    #[test]
    fn keeps_amounts_of_suspended_share() {
        let mut claims = snapshot().claims;
        claims.iter_mut().for_each(fixture::suspend);
        let gpus = gpus(&fixture::snapshot_with(claims));
        let gpu = serde_json::to_value(&gpus[0]).expect("JSON");
        assert_eq!(gpu["memory"]["allocated"], 0, "{gpu}");
        let claim = &gpu["claims"][0];
        assert_eq!(claim["access"], "suspended", "{claim}");
        assert_eq!(
            claim["suspended"],
            serde_json::json!({"memory": 8_u64 << 30, "cores": 30})
        );
        assert_eq!(claim["memory"], 0, "others may use it");
    }

    #[test]
    fn names_the_share_to_which_a_companion_adds() {
        let mut claims = snapshot().claims;
        let base = claims[0].metadata.uid.clone().expect("a UID");
        let labels = [(names::COMPANION_LABEL.to_owned(), base)];
        claims[1].metadata.labels = Some(labels.into());
        let found = gpus(&fixture::snapshot_with(claims));
        let wide = text(&found, &[], true);
        assert!(
            wide.contains("default/b on gpu-0-vgpu (no pod, adds to a)\n"),
            "{wide}"
        );
        // It has no use of its own.
        let mut measured = found[0].clone();
        for claim in &mut measured.claims {
            claim.measured = claim.adds_to.is_none().then_some(Measured {
                memory: 1 << 30,
                cores: Some(7),
                burst: None,
                lends_memory: None,
            });
        }
        assert_eq!(measured.used_text(), ["1 GiB", "7"]);
        let document = serde_json::to_value(&found[0].claims).expect("JSON");
        let bases = document.as_array().expect("claims").iter();
        let bases = bases.filter_map(|claim| claim.get("addsTo"));
        assert_eq!(bases.collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn names_since_when_shares_are_idle() {
        let mut claims = snapshot().claims;
        claims.iter_mut().for_each(fixture::idle);
        let wide = text(&gpus(&fixture::snapshot_with(claims.clone())), &[], true);
        let ends = "default/a on gpu-0-vgpu (a-pod, idle since 2026-01-01T00:00:00Z)\n";
        assert!(wide.contains(ends), "{wide}");
        // It uses no GPU for another reason.
        claims.iter_mut().for_each(fixture::suspend);
        let wide = text(&gpus(&fixture::snapshot_with(claims)), &[], true);
        assert!(wide.contains("(a-pod, suspended)"), "{wide}");
    }

    #[test]
    fn reports_missing_devices() {
        assert_eq!(
            text(&gpus(&Snapshot::default()), &[], false),
            "no node publishes devices of gpu.drava.dev; check that the node driver is running\n"
        );
    }
}
