//! The share of a running pod, and the companions that add to it.

use anyhow::{Context as _, bail};
use drava_allocator::claim::request_class;
use drava_allocator::division::Division;
use drava_allocator::usage::{AllocatedDevice, DeviceAccess};
use drava_api::{Quantity, names};
use drava_explanation::growth::{granted, is_allocated};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim, ResourceSlice};
use kube::ResourceExt as _;
use serde::Serialize;

/// 1 MiB, the least memory of a claim.
pub(super) const MIB: u64 = 1 << 20;

/// Amounts of a share: memory in bytes, GPU time in percent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Amounts {
    pub(super) memory_bytes: u64,
    pub(super) cores: u64,
}

impl Amounts {
    fn of(result: &DeviceRequestAllocationResult) -> Self {
        let consumed = |name: &str| {
            let amount = result.consumed_capacity.as_ref()?.get(name)?;
            let amount = Quantity::try_from(amount).ok()?;
            amount.to_u64_rounded_up()
        };
        Self {
            memory_bytes: consumed(names::capacity::MEMORY).unwrap_or_default(),
            cores: consumed(names::capacity::CORES).unwrap_or_default(),
        }
    }

    /// Returns what a companion adds. A share without memory does not exist, so one for GPU time has 1 MiB, which counts as none.
    fn of_companion(result: &DeviceRequestAllocationResult) -> Self {
        let amounts = Self::of(result);
        match amounts.memory_bytes {
            MIB => Self {
                memory_bytes: 0,
                ..amounts
            },
            _ => amounts,
        }
    }

    pub(super) const fn plus(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            cores: self.cores.saturating_add(other.cores),
        }
    }

    pub(super) const fn minus(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_sub(other.memory_bytes),
            cores: self.cores.saturating_sub(other.cores),
        }
    }

    pub(super) const fn fits(self, limit: Self) -> bool {
        self.memory_bytes <= limit.memory_bytes && self.cores <= limit.cores
    }
}

/// What the cores of a share are a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cores {
    Time,
    /// Its programs read their part when they start, so it stays as it is.
    Multiprocessors,
}

impl Cores {
    fn of(claim: &ResourceClaim, request: &str) -> Self {
        let mut devices = AllocatedDevice::of_claim(claim).into_iter();
        let device = devices.find(|device| device.request == request);
        match device.map(|device| device.access) {
            Some(DeviceAccess::Share(_, Division::Multiprocessors(_))) => Self::Multiprocessors,
            _ => Self::Time,
        }
    }

    /// Formats amounts of such a share.
    pub(super) fn text(self, amounts: Amounts) -> String {
        let Amounts {
            memory_bytes,
            cores,
        } = amounts;
        let mib = memory_bytes.div_ceil(MIB);
        match self {
            Self::Time => format!("{mib} MiB, {cores}% of GPU time"),
            Self::Multiprocessors => format!("{mib} MiB, {cores}% of the multiprocessors"),
        }
    }
}

/// The share of a running pod.
#[derive(Debug, Clone)]
pub(super) struct Share {
    /// Its claim.
    pub(super) base: ResourceClaim,
    /// Name of its request.
    pub(super) request: String,
    /// Its device class.
    pub(super) class: String,
    /// Name of its device, and of the pool of that.
    pub(super) device: (String, String),
    /// What its cores are a part of.
    pub(super) cores: Cores,
    /// Amounts of the claim itself.
    pub(super) own: Amounts,
    /// What its companions add, oldest first.
    pub(super) companions: Vec<(String, Amounts)>,
}

impl Share {
    pub(super) fn total(&self) -> Amounts {
        let added = self.companions.iter().map(|(_, added)| *added);
        added.fold(self.own, Amounts::plus)
    }
}

/// Refuses a pod whose share cannot change.
pub(super) fn check_runs(pod: &Pod) -> anyhow::Result<()> {
    let name = pod.name_any();
    if !crate::pod::is_bound(pod) {
        bail!(
            "pod {name} is not bound to a node: change the request in its claim or template instead"
        );
    }
    if pod.metadata.deletion_timestamp.is_some() {
        bail!("pod {name} is being deleted: only the shares of running pods grow");
    }
    crate::pod::check_unfinished(pod)
}

/// Refuses a claim that is not reserved for the pod alone.
pub(super) fn check_grows(pod: &Pod, base: &ResourceClaim) -> anyhow::Result<()> {
    let status = base.status.iter();
    let consumers = status.flat_map(|status| status.reserved_for.iter().flatten());
    let consumers: Vec<_> = consumers.collect();
    let uid = pod.uid().unwrap_or_default();
    if matches!(consumers[..], [consumer] if consumer.uid == uid) {
        return Ok(());
    }
    let names = consumers
        .iter()
        .map(|consumer| format!("{}/{}", consumer.resource, consumer.name));
    let names = match consumers.is_empty() {
        true => "no pod".to_owned(),
        false => names.collect::<Vec<_>>().join(", "),
    };
    bail!(
        "claim {} is not reserved for pod {} alone (reserved for: {names}): a companion goes with one pod, so shares of several \
         pods and of PodGroups do not grow",
        base.name_any(),
        pod.name_any()
    )
}

/// Refuses totals that the GPU of the share does not have, as it is published.
pub(super) fn check_size(share: &Share, total: Amounts, published: Amounts) -> anyhow::Result<()> {
    let (device, pool) = &share.device;
    if !total.fits(published) {
        bail!(
            "the share can never have {}: {device} of pool {pool} has {} altogether, and a share grows on its own GPU only; a claim for \
             GPU time alone has 1 MiB of memory",
            share.cores.text(total),
            share.cores.text(published)
        );
    }
    Ok(())
}

/// Returns what the device of a share has altogether; `None` if no slice has it.
pub(super) fn published(share: &Share, slices: &[ResourceSlice]) -> Option<Amounts> {
    let (name, pool) = &share.device;
    let of_pool = slices.iter().filter(|slice| slice.spec.pool.name == *pool);
    // Slices of an older generation are being replaced.
    let generation = of_pool
        .clone()
        .map(|slice| slice.spec.pool.generation)
        .max();
    let newest = of_pool.filter(|slice| Some(slice.spec.pool.generation) == generation);
    let mut devices = newest.flat_map(|slice| slice.spec.devices.iter().flatten());
    let device = devices.find(|device| device.name == *name)?;
    let amount = |name: &str| {
        let capacity = device.capacity.as_ref()?.get(name)?;
        Quantity::try_from(&capacity.value)
            .ok()?
            .to_u64_rounded_up()
    };
    Some(Amounts {
        memory_bytes: amount(names::capacity::MEMORY)?,
        cores: amount(names::capacity::CORES)?,
    })
}

/// Finds the share of a pod by the name of its claim in the pod and the name of its request, where they are given.
pub(super) fn find(
    pod: &Pod,
    claims: &[ResourceClaim],
    (in_pod, wanted): (Option<&str>, Option<&str>),
) -> anyhow::Result<Share> {
    let mut found = Vec::new();
    let mut others = Vec::new();
    for (entry, name) in drava_allocator::pod::claims(pod) {
        let claim = claims
            .iter()
            .find(|claim| Some(claim.name_any().as_str()) == name);
        let Some(claim) = claim.filter(|_| in_pod.is_none_or(|of| of == entry)) else {
            continue;
        };
        for result in results(claim) {
            let request = main_request(&result.request);
            if wanted.is_some_and(|of| of != request) {
                continue;
            }
            if result.driver == names::DRIVER && result.share_id.is_some() {
                found.push((entry, claim, result));
            } else if result.driver == names::DRIVER {
                others.push(format!(
                    "{entry}/{request} has device {}, no share",
                    result.device
                ));
            }
        }
    }
    let name = pod.name_any();
    let [(_, claim, result)] = &found[..] else {
        if found.is_empty() {
            let others = match others.is_empty() {
                true => "none of its claims is allocated by drava".to_owned(),
                false => others.join("; "),
            };
            bail!(
                "pod {name} has no such share of a GPU ({others}): whole GPUs and MIG partitions do not grow"
            );
        }
        let shares = found
            .iter()
            .map(|(entry, _, result)| format!("{entry}/{}", main_request(&result.request)));
        let shares: Vec<String> = shares.collect();
        bail!(
            "pod {name} has several shares ({}): select one with --claim and --request",
            shares.join(", ")
        );
    };
    let request = main_request(&result.request).to_owned();
    let class = request_class(claim, &result.request)
        .with_context(|| format!("claim {} has no request {request}", claim.name_any()))?
        .to_owned();
    Ok(Share {
        companions: companions(pod, claims, claim, &request)?,
        base: (*claim).clone(),
        device: (result.device.clone(), result.pool.clone()),
        cores: Cores::of(claim, &result.request),
        own: Amounts::of(result),
        class,
        request,
    })
}

/// Returns what the companions of a share add, oldest first.
///
/// # Errors
/// When one of them is not settled: the total is not known then. When one of them adds to other requests, too: a change of this
/// share would change theirs.
fn companions(
    pod: &Pod,
    claims: &[ResourceClaim],
    base: &ResourceClaim,
    request: &str,
) -> anyhow::Result<Vec<(String, Amounts)>> {
    let own = claims
        .iter()
        .filter(|claim| is_companion(claim, base, pod))
        .filter(|claim| requests(claim).any(|name| name == request));
    let mut own: Vec<&ResourceClaim> = own.collect();
    own.sort_by_key(|companion| companion.creation_timestamp().map(|created| created.0));
    let added = own.into_iter().map(|companion| {
        if let Some(state) = unsettled(companion) {
            let what = match companion.metadata.deletion_timestamp {
                Some(_) => "wait until it is gone".to_owned(),
                None => format!("wait, or withdraw it with {}", withdrawal(companion)),
            };
            bail!(
                "claim {} of an earlier resize {state}: {what}",
                companion.name_any()
            );
        }
        if let Some(other) = requests(companion).find(|name| *name != request) {
            bail!(
                "claim {} adds to request {other} as well as to {request}, so this command does not change it: withdraw it with {}",
                companion.name_any(),
                withdrawal(companion)
            );
        }
        let mut results = results(companion).filter(|result| result.driver == names::DRIVER);
        let result = results.find(|result| main_request(&result.request) == request);
        let added = result.map(Amounts::of_companion).unwrap_or_default();
        Ok((companion.name_any(), added))
    });
    added.collect()
}

/// Returns whether a claim is a companion of `base` for this pod, and for no other one. A claim that the pod itself uses is none,
/// whatever its label says.
fn is_companion(claim: &ResourceClaim, base: &ResourceClaim, pod: &Pod) -> bool {
    let uid = pod.uid().unwrap_or_default();
    let name = claim.name_any();
    let status = claim.status.iter();
    let mut consumers = status.flat_map(|status| status.reserved_for.iter().flatten());
    claim.labels().get(names::COMPANION_LABEL) == base.metadata.uid.as_ref()
        && claim.owner_references().iter().any(|owner| owner.uid == uid)
        // The controller reserves it together with its allocation.
        && consumers.all(|consumer| consumer.uid == uid)
        && !drava_allocator::pod::claims(pod).any(|(_, used)| used == Some(name.as_str()))
}

/// Returns the names of the requests of a claim.
fn requests(claim: &ResourceClaim) -> impl Iterator<Item = &str> {
    let spec = claim.spec.iter();
    let devices = spec.filter_map(|spec| spec.devices.as_ref());
    let requests = devices.flat_map(|devices| devices.requests.iter().flatten());
    requests.map(|request| request.name.as_str())
}

/// Returns the state of a companion that the limits of its share do not include, or do not include for long.
pub(super) fn unsettled(companion: &ResourceClaim) -> Option<String> {
    let condition = granted(companion);
    let reported = condition.map_or_else(
        || "the node driver has not reported on it".to_owned(),
        |condition| format!("{}: {}", condition.reason, condition.message),
    );
    let is_allocated = is_allocated(companion);
    match companion.metadata.deletion_timestamp {
        Some(_) if is_allocated => Some(format!("is being deleted ({reported})")),
        Some(_) => Some("is being deleted".to_owned()),
        None if !is_allocated => Some("waits for its allocation".to_owned()),
        None if condition.is_some_and(|condition| condition.status == "True") => None,
        None => Some(format!(
            "is allocated, and the limits do not include it ({reported})"
        )),
    }
}

/// Returns the command that withdraws a companion.
pub(super) fn withdrawal(companion: &ResourceClaim) -> String {
    format!(
        "`kubectl delete resourceclaim {} -n {}`",
        companion.name_any(),
        companion.namespace().unwrap_or_default()
    )
}

fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let status = claim.status.iter();
    let allocation = status.filter_map(|status| status.allocation.as_ref());
    let devices = allocation.filter_map(|allocation| allocation.devices.as_ref());
    devices.flat_map(|devices| devices.results.iter().flatten())
}

fn main_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(main, _)| main)
}
