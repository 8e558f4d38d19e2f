//! Content of a claim's `status.devices`. Pure.

use std::collections::BTreeMap;

use drava_api::condition::{ConditionReason, ConditionType};
use drava_api::config::ComputePolicy;
use drava_api::names;
use drava_nvml::GpuUuid;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::gpu_health::HealthByGpu;
use crate::gpu_health::state::Fault;
use crate::gpus::capacity;
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::ShareId;
use crate::prepare::companion::{Addition, Companion};
use crate::prepare::record::ClaimRecord;
use crate::prepare::{Access, Partition, Prepared, Share};

/// Injection of a claim's CDI devices, and violations of its limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Injection {
    /// No problem was detected.
    Expected,
    /// The container runtime ignored the CDI devices.
    Ignored,
    /// Containers run; these shares violate their limits.
    Observed(BTreeMap<ShareId, Violation>),
    /// Not checked: the condition `Enforced` stays as it was written.
    Unchecked,
    /// The preparation is refused, because the claims of a container do not go together. The message of the condition `Prepared`.
    Incompatible(String),
}

/// Violation of the limits of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Reason of the condition `Enforced`.
    pub reason: ConditionReason,
    /// Message of the condition.
    pub message: String,
}

/// What became of the capacity of a companion claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrantStatus {
    /// The share has it.
    Granted,
    /// It is to be given back, and the share uses more memory than it keeps.
    InUse {
        /// Memory that the share keeps.
        kept_bytes: u64,
    },
    /// It is given back.
    Released,
    /// Its base is not prepared on the node so far, or no more.
    NotPrepared,
    /// It is not added, with the reason.
    Refused(String),
}

/// Condition of a device without the time of its transition.
struct Condition {
    reason: ConditionReason,
    message: String,
}

/// What the conditions of a claim's devices depend on.
pub(super) struct Observed<'a> {
    pub(super) inventory: &'a NodeInventory,
    pub(super) health: &'a HealthByGpu,
    pub(super) injection: &'a Injection,
}

/// Returns the entries of `status.devices`. A condition with the same status as in `written` keeps its transition time.
/// A condition whose status is unknown at present stays as written.
pub(super) fn statuses(
    record: &ClaimRecord,
    observed: &Observed<'_>,
    written: &Value,
    now: Timestamp,
) -> Vec<Value> {
    let status = |device: &Prepared| {
        let mut entries = written.as_array().into_iter().flatten();
        let before = entries.find(|before| is_status_of(before, device));
        let is_written = |kind| written_condition(before, kind).is_some();
        // Of a share that is enforced, only the amounts can have changed.
        let was_interposed = written_condition(before, ConditionType::Enforced)
            .and_then(|written| written.get("reason")?.as_str())
            .is_some_and(|reason| {
                let enforced = [
                    ConditionReason::Interposed,
                    ConditionReason::LimitedByDriver,
                    ConditionReason::Partly,
                ];
                enforced.iter().any(|known| reason == known.as_str())
            });
        // Stays until the claim is prepared for other containers, or its programs run.
        let was_refused = *observed.injection == Injection::Unchecked
            && reason_of(written, ConditionType::Prepared)
                == Some(ConditionReason::IncompatibleClaims);
        let (is_refused, prepared) = match observed.injection {
            Injection::Incompatible(message) => {
                let reason = ConditionReason::IncompatibleClaims;
                let message = message.clone();
                (true, Some(Condition { reason, message }))
            }
            _ if was_refused => (true, None),
            _ => (false, Some(prepared(device))),
        };
        let keeps_enforced = *observed.injection == Injection::Unchecked
            && is_written(ConditionType::Enforced)
            && !was_interposed;
        let conditions = [
            (ConditionType::Prepared, prepared),
            (
                ConditionType::Enforced,
                (!keeps_enforced).then(|| enforced(device, observed)),
            ),
            (ConditionType::Healthy, healthy(device, observed.health)),
        ];
        // No container is to have the limits.
        let is_shown = |kind| !(is_refused && kind == ConditionType::Enforced);
        let conditions = conditions
            .into_iter()
            .filter(|(kind, _)| is_shown(*kind))
            .filter_map(|(kind, condition)| match condition {
                Some(condition) => Some(condition.to_json(before, now)),
                None => written_condition(before, kind).cloned(),
            });
        let conditions: Vec<Value> = conditions.collect();
        let mut status = BTreeMap::from([
            ("driver", json!(names::DRIVER)),
            ("pool", json!(device.pool)),
            ("device", json!(device.device)),
            ("conditions", Value::Array(conditions)),
            ("data", data(device)),
        ]);
        if let Some(share) = device.share() {
            status.insert("shareID", json!(share.id.as_str()));
        }
        json!(status)
    };
    record.devices.iter().map(status).collect()
}

/// Returns the entries of `status.devices` of a companion; see [`statuses`].
pub(super) fn granted(
    companion: &Companion,
    pool: &str,
    status: &GrantStatus,
    written: &Value,
    now: Timestamp,
) -> Vec<Value> {
    let base = &companion.base;
    let (reason, message) = match status {
        GrantStatus::Granted => (
            ConditionReason::Granted,
            format!("the limits of claim {base} include this capacity"),
        ),
        GrantStatus::InUse { kept_bytes } => {
            let kept = kept_bytes / capacity::MIB;
            // Without the use, which changes all the time.
            let message = format!(
                "the share uses more than the {kept} MiB that it keeps, or its use cannot be read; its limit is lowered as soon as \
                 its programs free enough"
            );
            (ConditionReason::InUse, message)
        }
        GrantStatus::Released => (
            ConditionReason::Released,
            format!("the limits of claim {base} no longer include this capacity"),
        ),
        GrantStatus::NotPrepared => (
            ConditionReason::BaseNotPrepared,
            format!(
                "claim {base}, which label {} names, is not prepared on the node of this one; the capacity is added when its pod \
                 starts there",
                names::COMPANION_LABEL
            ),
        ),
        GrantStatus::Refused(why) => (ConditionReason::Refused, why.clone()),
    };
    let condition = Condition { reason, message };
    let entry = |addition: &Addition| {
        let is_same = |before: &&Value| {
            let field = |name: &str| before.get(name).and_then(Value::as_str);
            field("driver") == Some(names::DRIVER)
                && field("pool") == Some(pool)
                && field("device") == Some(&addition.device)
                && field("shareID") == Some(addition.share.as_str())
        };
        let before = written.as_array().into_iter().flatten().find(is_same);
        json!({
            "driver": names::DRIVER,
            "pool": pool,
            "device": addition.device,
            "shareID": addition.share.as_str(),
            "conditions": [condition.to_json(before, now)],
        })
    };
    companion.additions.iter().map(entry).collect()
}

/// Returns the entries of `status.devices` with one condition alone, which another manager owns than the rest; see [`statuses`].
pub(super) fn alone(
    record: &ClaimRecord,
    reason: ConditionReason,
    message: &str,
    written: &Value,
    now: Timestamp,
) -> Vec<Value> {
    let condition = Condition {
        reason,
        message: message.to_owned(),
    };
    let entry = |device: &Prepared| {
        let mut entries = written.as_array().into_iter().flatten();
        let before = entries.find(|before| is_status_of(before, device));
        let mut entry = BTreeMap::from([
            ("driver", json!(names::DRIVER)),
            ("pool", json!(device.pool)),
            ("device", json!(device.device)),
            ("conditions", json!([condition.to_json(before, now)])),
        ]);
        if let Some(share) = device.share() {
            entry.insert("shareID", json!(share.id.as_str()));
        }
        json!(entry)
    };
    record.devices.iter().map(entry).collect()
}

/// Returns the reason of a condition of the devices of a claim.
pub(super) fn reason_of(written: &Value, kind: ConditionType) -> Option<ConditionReason> {
    let mut entries = written.as_array().into_iter().flatten();
    let condition = entries.find_map(|entry| {
        let is_ours = entry.get("driver").and_then(Value::as_str) == Some(names::DRIVER);
        written_condition(Some(entry).filter(|_| is_ours), kind)
    });
    let reason = condition?.get("reason")?.as_str()?;
    let mut reasons = ConditionReason::ALL.iter();
    let found = reasons.find(|known| known.condition_type() == kind && known.as_str() == reason);
    found.copied()
}

fn is_status_of(status: &Value, device: &Prepared) -> bool {
    let field = |name: &str| status.get(name).and_then(Value::as_str);
    field("driver") == Some(names::DRIVER)
        && field("pool") == Some(&device.pool)
        && field("device") == Some(&device.device)
        && field("shareID") == device.share().map(|share| share.id.as_str())
}

fn prepared(device: &Prepared) -> Condition {
    Condition {
        reason: ConditionReason::Prepared,
        message: format!("GPU {} is ready for containers", device.gpu.uuid),
    }
}

/// Returns the condition `Healthy`; `None` while the health of the GPU is unknown.
fn healthy(device: &Prepared, health: &HealthByGpu) -> Option<Condition> {
    let uuid = &device.gpu.uuid;
    let health = health.get(&GpuUuid::new(uuid))?;
    let fault = health.of_device(device.partition().map(Partition::placement));
    let (reason, message) = match fault {
        None => (
            ConditionReason::NoFault,
            format!("GPU {uuid} answers NVML and has no fault"),
        ),
        Some(fault) => {
            let reason = match fault {
                Fault::Lost => ConditionReason::GpuLost,
                Fault::NotResponding => ConditionReason::GpuNotResponding,
                Fault::Xid(_)
                | Fault::DoubleBitEcc
                | Fault::Unavailable
                | Fault::FabricNotReady
                | Fault::MemoryRepairFailed
                | Fault::GpuReset
                | Fault::NodeReboot
                | Fault::DrainP2p
                | Fault::DrainAndReset
                | Fault::OtherAction(_) => ConditionReason::GpuFault,
            };
            (reason, format!("GPU {uuid}: {fault}"))
        }
    };
    Some(Condition { reason, message })
}

fn enforced(device: &Prepared, observed: &Observed<'_>) -> Condition {
    let (reason, message) = match &device.access {
        Access::Share(share) => share_enforced(device, share, observed),
        Access::Whole => (
            ConditionReason::WholeGpu,
            "the claim has the whole GPU".to_owned(),
        ),
        Access::Partition(partition) => (
            ConditionReason::Partition,
            format!("the GPU isolates MIG partition {}", partition.profile),
        ),
        Access::Admin => (
            ConditionReason::AdminAccess,
            "admin access has no limits".to_owned(),
        ),
    };
    Condition { reason, message }
}

fn share_enforced(
    device: &Prepared,
    share: &Share,
    observed: &Observed<'_>,
) -> (ConditionReason, String) {
    match observed.injection {
        Injection::Expected | Injection::Unchecked | Injection::Incompatible(_) => {}
        Injection::Ignored => {
            let message = "the container runtime ignored the CDI devices of the claim";
            return (ConditionReason::CdiIgnored, message.to_owned());
        }
        Injection::Observed(violations) => {
            if let Some(violation) = violations.get(&share.id) {
                return (violation.reason, violation.message.clone());
            }
        }
    }
    let unenforceable = observed
        .inventory
        .gpu(&device.gpu.uuid)
        .and_then(|gpu| capacity::unenforceable(gpu, share.enforcement));
    if let Some((reason, message)) = unenforceable {
        return (reason, message.to_owned());
    }
    // The NVIDIA driver counts what these libraries allocate.
    if share.unmetered && !share.limited_by_driver {
        let message = "the device class mounts graphics and video libraries, whose allocations no limit covers";
        return (ConditionReason::Unmetered, message.to_owned());
    }
    let mib = share.held().memory_bytes / capacity::MIB;
    let (time, companions) = (time(share), companions(share));
    let burst = share.limit_bytes.map_or_else(String::new, |limit| {
        let mib = limit / capacity::MIB;
        format!(", to {mib} MiB while memory of the GPU is free")
    });
    let (reason, limits) = match share.limited_by_driver {
        true => (
            ConditionReason::LimitedByDriver,
            "the NVIDIA driver and libvgpu limit",
        ),
        false => (ConditionReason::Interposed, "libvgpu limits"),
    };
    let reason = match share.is_spatial() {
        true => ConditionReason::Partly,
        false => reason,
    };
    let message = format!("{limits} memory to {mib} MiB{companions}{burst}; {time}");
    (reason, message)
}

/// Returns how much of the memory companion claims add, as text.
fn companions(share: &Share) -> String {
    if share.grants.is_empty() {
        return String::new();
    }
    let added = share.grants.iter().map(|grant| {
        let (mib, name) = (grant.memory_bytes / capacity::MIB, &grant.claim.name);
        format!(" + {mib} of claim {name}")
    });
    let own = share.memory_bytes / capacity::MIB;
    format!(" ({own}{})", added.collect::<String>())
}

/// GPU time of the share, as text.
fn time(share: &Share) -> String {
    // Programs read their part of the multiprocessors when they start, so no companion adds to it.
    let cores = match share.compute_policy {
        ComputePolicy::Spatial => share.cores,
        _ => share.held().cores,
    };
    match (share.compute_policy, cores) {
        (ComputePolicy::None, _) => "GPU time is not metered".to_owned(),
        (ComputePolicy::Spatial, 0) => {
            "MPS lets it use all multiprocessors (no guarantee)".to_owned()
        }
        (ComputePolicy::Spatial, _) => {
            format!("MPS gives it {cores}% of the multiprocessors, which its programs can leave")
        }
        (_, 0) => "GPU time is best effort (no guarantee)".to_owned(),
        (ComputePolicy::Balance, _) => format!("{cores}% of GPU time guaranteed"),
        (ComputePolicy::Fixed, _) => format!("GPU time limited to {cores}%"),
    }
}

/// Returns a condition of a written status.
fn written_condition(status: Option<&Value>, kind: ConditionType) -> Option<&Value> {
    let mut conditions = status?.get("conditions")?.as_array()?.iter();
    conditions
        .find(|condition| condition.get("type").and_then(Value::as_str) == Some(kind.as_str()))
}

impl Condition {
    fn to_json(&self, before: Option<&Value>, now: Timestamp) -> Value {
        let kind = self.reason.condition_type();
        let status = if self.reason.status() {
            "True"
        } else {
            "False"
        };
        let unchanged = written_condition(before, kind)
            .filter(|before| before.get("status").and_then(Value::as_str) == Some(status));
        let time = unchanged
            .and_then(|before| before.get("lastTransitionTime").cloned())
            .unwrap_or_else(|| json!(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()));
        json!({
            "type": kind.as_str(),
            "status": status,
            "reason": self.reason.as_str(),
            "message": self.message,
            "lastTransitionTime": time,
        })
    }
}

fn data(device: &Prepared) -> Value {
    let mut data = BTreeMap::from([
        ("uuid", json!(device.gpu.uuid)),
        ("minor", json!(device.gpu.minor)),
    ]);
    if let Some(share) = device.share() {
        let held = share.held();
        data.insert("memoryBytes", json!(held.memory_bytes));
        data.insert("cores", json!(held.cores));
        data.insert("computePolicy", json!(share.compute_policy));
        data.insert("priority", json!(share.priority));
    }
    if let Some(partition) = device.partition() {
        data.insert("profile", json!(partition.profile));
        data.insert("start", json!(partition.start));
        if let Some(instance) = &partition.instance {
            data.insert("migUuid", json!(instance.uuid.as_str()));
        }
    }
    json!(data)
}

#[cfg(test)]
mod tests;
