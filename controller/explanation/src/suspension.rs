//! Suspension of shares: what is against it, and what a suspended share waits for. The controller decides by it, `explain` and
//! `doctor` say it.

use drava_allocator::cluster::Cluster;
use drava_allocator::object::object_key;
use drava_allocator::reason::{Rejection, bytes};
use drava_allocator::usage::{AllocatedDevice, DeviceAccess};
use drava_api::error::describe;
use drava_api::{Quantity, config, names, suspension};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;

use crate::terminal::printable;

/// Properties of a pod that decide whether its share may be suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostTraits {
    /// Whether kubelet restarts a container whose programs stand still.
    pub is_probed: bool,
    /// The least memory limit of the containers that use claims, and of the pod; `None` if there is none.
    pub memory_limit: Option<Quantity>,
}

impl HostTraits {
    /// Returns the properties of a pod.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        Self {
            is_probed: containers(pod).any(|container| {
                container.liveness_probe.is_some() || container.startup_probe.is_some()
            }),
            memory_limit: memory_limit(pod),
        }
    }

    /// Returns what is against the suspension of a share with this memory.
    #[must_use]
    pub fn problem(&self, memory: Quantity) -> Option<String> {
        if self.is_probed {
            return Some(
                "its pod has a liveness or startup probe, so kubelet would restart the container"
                    .to_owned(),
            );
        }
        self.memory_limit.filter(|limit| *limit <= memory).map(|limit| {
            format!(
                "the memory of the share goes to the host memory of its container, which is limited to {limit}; {memory} and what the \
                 program needs itself are necessary"
            )
        })
    }
}

fn memory_limit(pod: &Pod) -> Option<Quantity> {
    let of_pod = pod.spec.iter().filter_map(|spec| spec.resources.as_ref());
    let of_containers = containers(pod).filter_map(|container| {
        let resources = container.resources.as_ref()?;
        let claims = resources.claims.as_ref();
        claims
            .is_some_and(|claims| !claims.is_empty())
            .then_some(resources)
    });
    let limits = of_pod
        .chain(of_containers)
        .filter_map(|resources| Quantity::try_from(resources.limits.as_ref()?.get("memory")?).ok());
    limits.min()
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        init.chain(&spec.containers)
    })
}

/// Checks whether the claim may be suspended: it has one device of this driver, a share, and its config allows it. Returns the
/// settings of its request.
///
/// # Errors
/// Why it may not.
pub fn check(claim: &ResourceClaim) -> Result<config::Settings, String> {
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref()?.devices.as_ref());
    let configs = allocation.and_then(|devices| devices.config.as_deref());
    let results = allocation
        .iter()
        .flat_map(|devices| devices.results.iter().flatten());
    let own: Vec<_> = results
        .filter(|result| result.driver == names::DRIVER)
        .collect();
    let [result] = own[..] else {
        return Err("it has not exactly one device of drava".to_owned());
    };
    if result.share_id.is_none() {
        let what = "it has a whole GPU or a MIG partition, and only shares can be suspended";
        return Err(what.to_owned());
    }
    let settings = config::resolve(configs.unwrap_or_default(), &result.request)
        .map_err(|error| format!("its config is invalid: {}", describe(&error)))?;
    if settings.allows_suspend() {
        return Ok(settings);
    }
    let why = match settings.memory_limit {
        Some(_) => {
            "its config has a memory.limit, and memory beyond the guarantee may not be free when the share is resumed"
        }
        None => {
            "neither its config nor its device class says suspend.allowed: true, or the class says false"
        }
    };
    Err(why.to_owned())
}

/// Returns the memory of the shares of a claim, suspended or not.
#[must_use]
pub fn memory_of(claim: &ResourceClaim) -> Quantity {
    let devices = AllocatedDevice::of_claim(claim).into_iter();
    let memory = devices.filter_map(|device| match device.resumed().access {
        DeviceAccess::Share(amounts, _) => amounts.get(names::capacity::MEMORY).copied(),
        _ => None,
    });
    memory.fold(Quantity::ZERO, |sum, amount| sum + amount)
}

/// Returns when the pod of a share is evicted that is suspended for another pod, unless it is resumed before.
#[must_use]
pub fn ends_at(claim: &ResourceClaim) -> Option<Timestamp> {
    suspension::suspended_for(&claim.metadata)?;
    let limit = check(claim).ok()?.max_suspend?;
    suspension::suspended_since(claim)?
        .checked_add(limit.duration())
        .ok()
}

/// Returns for what the share of a claim is suspended.
#[must_use]
pub fn cause(claim: &ResourceClaim) -> String {
    match suspension::cause(&claim.metadata) {
        Some(suspension::Cause::Pod(pod)) => format!("for {}", printable(pod)),
        Some(suspension::Cause::Wish) => {
            let annotation = names::SUSPEND_WISH_ANNOTATION;
            format!("as its annotation {annotation} requests")
        }
        Some(suspension::Cause::Idleness) => "because it was idle".to_owned(),
        None => "until it has room on its GPU".to_owned(),
    }
}

/// Returns the room that a suspended share lacks on a device.
#[must_use]
pub fn room(device: &str, lacking: &Rejection) -> String {
    let what = match lacking {
        Rejection::Capacity {
            name, requested, ..
        } if name == names::capacity::CORES => format!("{requested}% of GPU time must be free"),
        Rejection::Capacity { requested, .. } => {
            format!("{} of memory must be free", bytes(*requested))
        }
        _ => "the device is not published".to_owned(),
    };
    format!("room on {device}: {what}")
}

/// Returns what a share that is suspended, or is to be, waits for, or since when it is idle; `None` if its programs use their GPU. Without
/// the devices of its node it is not known what must be free.
#[must_use]
pub fn state(cluster: &Cluster, claim: &ResourceClaim) -> Option<String> {
    let cause = cause(claim);
    if !suspension::is_suspended(claim) {
        let mut answers = suspension::answers(claim);
        if let Some(refusal) = suspension::refusal(claim).filter(|_| is_requested(claim)) {
            return Some(format!(
                "its share cannot be suspended {cause}: {}",
                printable(&refusal.message)
            ));
        }
        if answers.any(|answer| answer.status == "True" || suspension::is_resuming(answer)) {
            return Some("its share is being resumed".to_owned());
        }
        if is_requested(claim) {
            return Some(format!(
                "its share is to be suspended {cause}; events of the pod say what prevents it"
            ));
        }
        let idle = suspension::idle_since(claim);
        return idle.map(|since| format!("its share has used no GPU time since {since}"));
    }
    let since = suspension::suspended_since(claim);
    let since = since.map(|since| format!(" since {since}"));
    let key = object_key(&claim.metadata);
    let end = if suspension::is_lost(claim) {
        "its node was restarted since, so the state of its programs is lost, and its pod is evicted"
            .to_owned()
    } else if suspension::is_wished(&claim.metadata) {
        "`kubectl drava resume` ends that".to_owned()
    } else if suspension::cause(&claim.metadata) == Some(suspension::Cause::Idleness)
        && !suspension::is_demanded(claim)
    {
        "it is resumed when a program calls CUDA".to_owned()
    } else {
        match cluster.lacks_to_resume(&key) {
            Some((_, Rejection::Unpublished)) => {
                "it is resumed when its memory and GPU time are free on its GPU".to_owned()
            }
            Some((device, lacking)) => {
                format!("it is resumed when there is {}", room(&device, &lacking))
            }
            None => {
                "there is room on its GPU: the controller resumes it after pods of higher priority"
                    .to_owned()
            }
        }
    };
    let evicted = ends_at(claim).map(|end| format!("; its pod is evicted at {end} otherwise"));
    Some(format!(
        "its share is suspended {cause}{}; {end}{}",
        since.unwrap_or_default(),
        evicted.unwrap_or_default()
    ))
}

/// Returns whether the claim is to be suspended, or a user wishes so.
fn is_requested(claim: &ResourceClaim) -> bool {
    suspension::is_intended(&claim.metadata) || suspension::is_wished(&claim.metadata)
}
